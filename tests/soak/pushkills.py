"""Real processes that are killed or stopped in drawn phases of real pushes: `python tests/soak/pushkills.py --rounds 20`.

Owns: a server with two replicas, a trainer's process, streams beside it, and one strike a round.
Always holds: a round ends within its deadlines. Every response of one snapshot has the numbers that its weights had in calm
weather. At the end of a round all replicas serve its weights. At the end of all, no receiver and no update is left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import soakpath  # noqa: F401

# isort: split
import httpx
from serving import Server, serve

from midstream.snapshots.store.local import TEMPORARY_PREFIX

VICTIMS = {
    "trainer": b"",
    "replica": b"midstream.launch.replica",
    "receiver": b"midstream.transfer.receiver",
    "engine": b"midstream.engine.embedded.loop",
    "gateway": b"midstream.launch.gateway",
}
PHASES = ("init", "start", "update", "finish", "signal", "keep")
KINDS = ("kill", "stall")
IN_LEDGER = {
    "joining": "init",
    "starting": "start",
    "started": "update",
    "receiving": "update",
    "finishing": "finish",
}
PUSH_S = 40.0
#: A publication tries again for so long, and its last call may be as long as a phase and a gateway's grace.
PUBLISH_S = 200.0
BOUND_S = PUBLISH_S + PUSH_S + 20.0
WELL_S = 240.0
MODELS, SEEDS, TOKENS = 3, 4, 16
CONFIG = f"""
[push]
join_s = {PUSH_S}
update_s = {PUSH_S}
finish_s = {PUSH_S}
quorum = %s
"""
TRAINER = """
    import sys, time
    from safetensors.torch import load_file
    from midstream.client import PublishError, SnapshotPublisher, push

    push.PIECE_BYTES = 2**18
    start = push.TrainerGroup._start

    def slow(*given):
        time.sleep(0.01)
        return start(*given)

    push.TrainerGroup._start = slow
    with SnapshotPublisher(sys.argv[1], to="push") as publisher:
        for line in sys.stdin:
            name, path = line.split()
            try:
                publisher.publish(name, dict(load_file(path)), timeout_s=float(sys.argv[2]))
            except PublishError as error:
                print("failed", str(error).replace(chr(10), " ")[:300], flush=True)
            else:
                print("serves", flush=True)
"""


class Found(Exception):
    """What must not be."""


@dataclass
class Numbers:
    """What the weights of a snapshot compute. weights: the number of the model, by the name of a snapshot."""

    weights: dict[str, int] = field(default_factory=lambda: {"base": 0})
    known: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)

    def check(self, label: str, seed: int, tokens: list[tuple[int, float]]) -> None:
        """Raises Found."""
        if label not in self.weights:
            raise Found(f"a label that nobody pushed: {label}")
        expected = self.known[self.weights[label], seed]
        same = [
            one[0] == other[0] and abs(one[1] - other[1]) < 1e-3
            for one, other in zip(expected, tokens, strict=True)
        ]
        if not all(same):
            raise Found(f"{label}, seed {seed}: {tokens}, not {expected}")


def stream(server: Server, seed: int) -> tuple[list[str], list[tuple[int, float]]] | None:
    """The labels and the tokens of a response. None: it was refused, or broke off."""
    body = {
        "model": server.model,
        "prompt": list(f"Rollout {seed} goes".encode()),
        "max_tokens": TOKENS,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": True,
        "raw_output": True,
        "stream": True,
        "return_token_ids": True,
    }
    labels: list[str] = []
    tokens: list[tuple[int, float]] = []
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WELL_S) as answer:
            if answer.is_error:
                return None
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return None
                for choice in chunk["choices"]:
                    entries = (choice.get("logprobs") or {}).get("content") or []
                    tokens += [(entry["token_id"], entry["logprob"]) for entry in entries]
                    labels += [chunk["model"].partition("@")[2]] * len(entries)
    except httpx.TransportError:
        return None
    return (labels, tokens) if len(tokens) == TOKENS else None


class Streams:
    """Clients that ask all the time, and check what they are answered."""

    def __init__(self, server: Server, numbers: Numbers, count: int) -> None:
        self._server, self._numbers = server, numbers
        self.over = threading.Event()
        self.found: list[str] = []
        self.counts = Counter[str]()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self.over.is_set():
                return
            seed = (number + turn) % SEEDS
            answer = stream(self._server, seed)
            if answer is None:
                self.counts["refused or broken"] += 1
                time.sleep(0.2)
                continue
            labels, tokens = answer
            self.counts["whole" if len(set(labels)) == 1 else "crossed"] += 1
            try:
                for label in set(labels):
                    if label not in self._numbers.weights:
                        raise Found(f"a label that nobody pushed: {label}")
                if len(set(labels)) == 1:
                    self._numbers.check(labels[0], seed, tokens)
            except Found as error:
                self.found.append(str(error))
                return

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(WELL_S)
            if thread.is_alive():
                self.found.append("a stream hangs")


class Trainer:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._said = threading.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def publish(self, name: str, file: Path) -> None:
        if self._process is None or self._process.poll() is not None:
            program = [sys.executable, "-c", textwrap.dedent(TRAINER), self._server.url, str(PUBLISH_S)]
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self._said.clear()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {file}\n")
        self._process.stdin.flush()
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines.append(process.stdout.readline().strip() or "died")
        self._said.set()

    def answered(self) -> bool:
        return self._said.is_set()

    def outcome(self, within_s: float) -> str:
        """Raises Found."""
        begun = time.monotonic()
        if not self._said.wait(within_s):
            raise Found(f"the trainer was not answered within {time.monotonic() - begun:.0f} s")
        return self._lines[-1]

    def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def pids_of(server: Server, what: bytes) -> list[int]:
    """Of the server's processes."""
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes()

    def ours(pid: int) -> bool:
        while pid in parents:
            if pid == server.process.pid:
                return True
            pid = parents[pid]
        return False

    return sorted(pid for pid, line in lines.items() if what in line and ours(pid))


class Ledger:
    """What the ledger says of the push of a name, read from its file."""

    def __init__(self, server: Server) -> None:
        self._place = f"file:{server.state_dir / 'ledger.db'}?mode=ro"

    @contextlib.contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._place, uri=True, timeout=30)) as db:
            yield db

    def phase(self, name: str, answered: bool) -> str:
        with self._read() as db:
            kept = db.execute("SELECT kept FROM transfer_updates WHERE identity = ?", (name,)).fetchone()
            open_in = db.execute("SELECT phase FROM transfers WHERE open_of IS NOT NULL").fetchone()
        if kept is not None:
            return "signal" if not answered else "keep" if kept[0] == "wanted" else "over"
        return "" if open_in is None else IN_LEDGER.get(open_in[0], "")

    def open_groups(self) -> int:
        with self._read() as db:
            return len(db.execute("SELECT id FROM transfers WHERE open_of IS NOT NULL").fetchall())


@dataclass
class Strike:
    victim: str
    phase: str
    kind: str
    which: float
    s: float

    def __str__(self) -> str:
        return f"{self.victim}, {self.phase}, {self.kind}" + (
            f" for {self.s:.1f} s" if self.kind == "stall" else ""
        )


class Rounds:
    def __init__(self, server: Server, files: list[Path], seed: int) -> None:
        self._server, self._files = server, files
        self._rng = random.Random(seed)
        self._numbers, self._ledger, self._trainer = Numbers(), Ledger(server), Trainer(server)
        self.counts = Counter[str]()
        pairs = list(itertools.product(VICTIMS, PHASES, KINDS))
        self._rng.shuffle(pairs)
        self._pairs = itertools.cycle(pairs)
        self._stalls: list[threading.Thread] = []

    def run(self, rounds: int) -> list[str]:
        """What was found."""
        self._learn()
        streams = Streams(self._server, self._numbers, 3)
        found: list[str] = []
        try:
            for number in range(rounds):
                self._round(number)
                if streams.found:
                    break
        except Found as error:
            found.append(str(error))
        streams.end()
        self.counts.update(streams.counts)
        found += streams.found
        if not found:
            try:
                self._nothing_is_left()
            except Found as error:
                found.append(str(error))
        self._trainer.end()
        return found

    def _learn(self) -> None:
        """In calm weather: what each model's weights compute."""
        for number, file in enumerate(self._files):
            self._push(f"calm-{number}", number, file)
            for seed in range(SEEDS):
                answer = stream(self._server, seed)
                if answer is None:
                    raise Found("a request in calm weather is refused")
                self._numbers.known[number, seed] = answer[1]

    def _push(self, name: str, model: int, file: Path) -> None:
        """Until it serves. Raises Found."""
        self._numbers.weights[name] = model
        until = time.monotonic() + WELL_S
        while True:
            self._trainer.publish(name, file)
            outcome = self._trainer.outcome(BOUND_S)
            if outcome == "serves":
                return
            if time.monotonic() > until:
                raise Found(f"{name} is not taken in calm weather: {outcome}")
            time.sleep(1.0)

    def _round(self, number: int) -> None:
        victim, phase, kind = next(self._pairs)
        s = self._rng.choice((1.0, 5.0, PUSH_S + 5.0))
        strike = Strike(victim, phase, kind, self._rng.random(), s)
        name, model = f"round-{number}", self._rng.randrange(len(self._files))
        self._numbers.weights[name] = model
        begun = time.monotonic()
        if phase == "init":
            # A new trainer forms a group.
            self._trainer.end()
        self._trainer.publish(name, self._files[model])
        struck = self._strike_in(strike, name, begun)
        print(f"round {number}: {strike}; {'struck' if struck else 'missed'};", end=" ", flush=True)
        own_s = s if kind == "stall" and victim in ("trainer", "gateway") else 0.0
        outcome = self._trainer.outcome(BOUND_S + own_s)
        took = time.monotonic() - begun
        for stall in self._stalls:
            stall.join()
        self._stalls.clear()
        self._wait(lambda: self._all_there(), "not all processes came back")
        if outcome != "serves":
            self._push(name, model, self._files[model])
        self._wait(lambda: self._all_serve(name), f"not all serve {name}")
        self.counts[f"{victim}, {phase}, {kind}: " + ("struck" if struck else "missed")] += 1
        print(f"{took:.1f} s: {outcome}; well after {time.monotonic() - begun:.1f} s", flush=True)

    def _strike_in(self, strike: Strike, name: str, begun: float) -> bool:
        while time.monotonic() < begun + PUSH_S:
            answered = self._trainer.answered()
            phase = self._ledger.phase(name, answered)
            if phase == strike.phase and (pid := self._pid(strike)) is not None:
                return self._strike(strike, pid)
            if phase == "over" or (answered and phase != "keep"):
                return False
            time.sleep(0.002)
        return False

    def _pid(self, strike: Strike) -> int | None:
        there = (
            [self._trainer.pid]
            if strike.victim == "trainer"
            else pids_of(self._server, VICTIMS[strike.victim])
        )
        return there[int(strike.which * len(there))] if there else None

    def _strike(self, strike: Strike, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return False
        if strike.kind == "stall":
            stall = threading.Thread(target=_goes_on, args=(pid, strike.s), daemon=True)
            stall.start()
            self._stalls.append(stall)
        return True

    # -- what has to be

    def _wait(self, holds: Any, why: str) -> None:
        until = time.monotonic() + WELL_S
        while not holds():
            if time.monotonic() > until:
                raise Found(f"{why}: {self._said()}")
            time.sleep(0.2)

    def _said(self) -> Any:
        try:
            place = f"{self._server.url}/hot_load/v1/models/hot_load"
            return httpx.get(place, timeout=20).json().get("replicas", [])
        except (httpx.TransportError, ValueError):
            return []

    def _all_there(self) -> bool:
        rows = self._said()
        return len(rows) == 2 and all(row["readiness"] for row in rows)

    def _all_serve(self, name: str) -> bool:
        rows = self._said()
        return len(rows) == 2 and all(
            row["readiness"] and row["current_snapshot_identity"] == name for row in rows
        )

    def _nothing_is_left(self) -> None:
        self._trainer.end()
        self._wait(lambda: not self._ledger.open_groups(), "a group is left")
        self._wait(lambda: not pids_of(self._server, VICTIMS["receiver"]), "a receiver is left")
        self._wait(lambda: not self._updates(), f"updates are left: {self._updates()}")

    def _updates(self) -> list[Path]:
        return [path for path in self._server.state_dir.rglob(f"{TEMPORARY_PREFIX}*") if path.is_dir()]


def _goes_on(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def run(rounds: int, seed: int, place: Path, quorum: float) -> tuple[list[str], Counter[str]]:
    files = []
    for number in range(MODELS):
        directory = str(place / f"model-{number}")
        made = (
            "from pathlib import Path; from midstream.models.tiny_moe import write_tiny_moe; "
            f"write_tiny_moe(Path({directory!r}), seed={number})"
        )
        subprocess.run([sys.executable, "-c", made], check=True)
        files.append(place / f"model-{number}" / "model.safetensors")
    config = place / "config.toml"
    config.write_text(CONFIG % quorum)
    options = ("--model", str(place / "model-0"), "--no-tinker", "--config", str(config))
    with serve(place / "state", *options) as server:
        rounds_of = Rounds(server, files, seed)
        return rounds_of.run(rounds), rounds_of.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quorum", type=float, default=0.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="midstream-push-kills-") as place:
        found, counts = run(arguments.rounds, arguments.seed, Path(place), arguments.quorum)
    for what, count in sorted(counts.items()):
        print(f"{count:6} {what}")
    print("\n".join(found) or "nothing is wrong")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
