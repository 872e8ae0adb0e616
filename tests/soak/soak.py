"""Soak and storm on real processes: `python tests/soak/soak.py --minutes 10`.

A real server, hundreds of streams, swaps of every kind, hostile clients, and for a part of the time an adversary that kills,
stops and fills. Every token has a label that is checked, and what the processes hold must come to rest. See docs/soak.md.
"""

from __future__ import annotations

import soakpath  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import itertools
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import serving
from s3server import S3Server, s3_server
from simclient import Wrong
from simengine import weights_of
from simtinker import TinkerClient
from simtrainer import Weights
from soakflat import Verdict
from soakload import Client, Hostile, Publisher, patient
from soakoracle import RealOracle, in_a_process
from soaktrain import Trainee
from soaktrouble import SlowBucket, Trouble
from soakwatch import Watch
from test_full_disk import on_a_small_disk

BUCKET = "soak"
URL = f"s3://{BUCKET}/run"
VARIANTS = 4
WORKERS = 2
BODY_MAX = 16 * 2**20
#: A request may take so long, with everything on two cores and a process stopped meanwhile.
PATIENCE_S = 150.0
#: For requests that run at the end, and for the numbers that are still to be judged.
ENDING_S = 180.0
#: After the last trouble, until what it did to event loops has been told.
SETTLED_S = 15.0

#: Bounds that are reached within minutes, and patience with a machine that has few cores for all of this.
CONFIG = f"""\
[embedded]
kv_cache_tokens = 32768

[gateway]
workers = {WORKERS}
max_body_bytes = {BODY_MAX}
session_idle_s = 20
replica_silence_s = 8
max_sessions = 5000
allowed_buckets = []

[tinker]
base_model_clients = "serving"
trainer_threads = 1
"""


@dataclass
class Plan:
    minutes: float = 10.0
    streams: int = 200
    replicas: int = 3
    seed: int = 0
    out: Path = Path(".soak")
    #: Of all the time: until trouble begins, and until it ends.
    storm: tuple[float, float] = (0.08, 0.5)
    trouble_every_s: float = 6.0
    swap_every_s: float = 6.0
    sample_every_s: float = 4.0
    #: Of each life of a process; what comes before does not count.
    warm_up_s: float = 60.0
    samplers: int = 2


class Findings(list[str]):
    """Each is also told when it comes."""

    def append(self, finding: str) -> None:
        super().append(finding)
        print(f"FINDING {len(self)}: {finding[:600]}", flush=True)


@dataclass
class Outcome:
    found: list[str] = field(default_factory=Findings)
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.found and not any(verdict.grows for verdict in self.verdicts)


def model_and_weights(place: Path) -> tuple[Path, Weights, dict[str, Path]]:
    """The base model, the snapshots that a trainer may publish, and the directory of each name of weights.

    Both experts of each layer are chosen: no rounding may choose others, so numbers have one right value.
    """
    from midstream.models.tiny_moe import write_tiny_moe
    from midstream.snapshots.arc2.encode import encode_delta
    from midstream.snapshots.content import MANIFEST_FILE, directory_content, encode_manifest

    named: dict[str, Path] = {}
    for number in range(-1, VARIANTS):
        name = "base" if number < 0 else f"weights-{number}"
        named[name] = place / ("sim" if number < 0 else name)
        write_tiny_moe(
            named[name], seed=100 + number, layers=2, hidden=64, experts=2, top_k=2, max_positions=1024, dtype="float32"
        )  # fmt: skip
    variants = []
    for number in range(VARIANTS):
        directory = named[f"weights-{number}"]
        files = {file: (directory / file).read_bytes() for file in ("config.json", "model.safetensors")}
        variants.append({**files, MANIFEST_FILE: encode_manifest(directory_content(directory, files))})
    deltas = {}
    for parent, child in itertools.permutations(range(VARIANTS), 2):
        out = place / f"{parent}-{child}"
        encode_delta(named[f"weights-{parent}"], named[f"weights-{child}"], out, threads=1)
        deltas[parent, child] = {file.name: file.read_bytes() for file in out.iterdir()}
    return named["base"], Weights(variants, deltas), named


def small_disk(place: Path) -> Path | None:
    """A directory to mount a file system of the server's own at; None where this user may not."""
    disk = place / "disk"
    disk.mkdir()
    if shutil.which("unshare") is None or subprocess.run(on_a_small_disk(disk, ["true"])).returncode:
        return None
    return disk


@contextlib.contextmanager
def served(
    plan: Plan, place: Path, model: Path, disk: Path | None, bucket: dict[str, str]
) -> Iterator[serving.Server]:
    config = place / "config.toml"
    config.write_text(CONFIG)
    words = (
        "--model",
        str(model),
        "--replicas",
        str(plan.replicas),
        "--bucket",
        URL,
        "--config",
        str(config),
    )
    plain = serving.command
    on_disk = plain if disk is None else lambda *given: on_a_small_disk(disk, plain(*given))
    with (
        patch.dict(os.environ, bucket),
        patch.object(serving, "command", on_disk),
        serving.serve((disk or place) / "state", *words) as server,
    ):
        yield server


class Soak:
    """One run. Everything but the server, the bucket and the oracle's process lives in one event loop."""

    def __init__(self, plan: Plan, place: Path, s3: S3Server) -> None:
        self.plan, self.place, self.s3 = plan, place, s3
        self.outcome = Outcome()
        self.begun = time.monotonic()
        self.model, self.weights, self.named = model_and_weights(place)
        self.disk = small_disk(place)
        self.slow = SlowBucket(urlsplit(s3.endpoint).port or 80)

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self.begun:7.1f} s  {text}"
        self.outcome.lines.append(line)
        print(line, flush=True)

    async def run(self) -> Outcome:
        patient(PATIENCE_S)
        names = {weights_of(files.items()): f"weights-{i}" for i, files in enumerate(self.weights.variants)}
        names[0] = "base"
        bucket = {**self.s3.environment(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{await self.slow.start()}"}
        with in_a_process(self.named) as executor, contextlib.ExitStack() as stack:
            oracle = RealOracle(names, executor, self.outcome.found)
            oracle.weights["base"] = 0
            judging = asyncio.create_task(oracle.run())
            try:
                # The model is loaded by processes that this one starts: they need this loop for the bucket.
                context = served(self.plan, self.place, self.model, self.disk, bucket)
                server = await asyncio.to_thread(context.__enter__)
                stack.push(context)
                await self._storm(server, oracle)
                await self._judged(oracle)
            finally:
                judging.cancel()
                self.slow.close()
        return self.outcome

    async def _storm(self, server: serving.Server, oracle: RealOracle) -> None:
        plan, outcome = self.plan, self.outcome
        port = urlsplit(server.url).port or 80
        seconds = plan.minutes * 60
        inside = Path(f"/proc/{server.process.pid}/root{self.disk}") if self.disk is not None else None
        state = server.state_dir if inside is None else inside / "state"
        rng = random.Random(plan.seed)
        trouble = Trouble(
            server, port, plan.replicas, WORKERS, rng, self.slow, inside, outcome.found, outcome.counts, self.say
        )  # fmt: skip
        calm = trouble.calm_since
        trainer = Publisher(
            port, self.s3, URL, self.weights, oracle, random.Random(plan.seed + 1), outcome.counts, calm, outcome.found
        )  # fmt: skip
        clients = [
            Client(f"client-{number}", port, oracle, outcome.counts, trainer, calm, outcome.found)
            for number in range(plan.streams)
        ]
        hostile = Hostile(port, BODY_MAX, random.Random(plan.seed + 2), outcome.counts, calm, outcome.found)
        samplers = [self._sampler(number, port, oracle, trouble) for number in range(plan.samplers)]
        samplers.append(self._trainee(port, oracle, trouble))
        ends_at = asyncio.get_running_loop().time() + seconds
        self.outcome.lines.append("")
        with (plan.out / "samples.jsonl").open("w") as out:
            watch = Watch(server, port, state, oracle, out)
            over, settled = asyncio.Event(), None
            tasks = [asyncio.create_task(client.run()) for client in clients]
            tasks += [asyncio.create_task(self._sampled(sampler)) for sampler in samplers]
            tasks.append(asyncio.create_task(trainer.run(plan.swap_every_s)))
            attack = asyncio.create_task(hostile.run(3.0))
            watching = asyncio.create_task(watch.run(plan.sample_every_s, over.is_set))
            telling = asyncio.create_task(self._tell(oracle, trainer, watch))
            try:
                await asyncio.sleep(plan.storm[0] * seconds)
                await trouble.run((plan.storm[1] - plan.storm[0]) * seconds, plan.trouble_every_s)
                calm_from = asyncio.get_running_loop().time() - (ends_at - seconds)
                self.say("quiet from here on")
                # A process that was stopped or starved of its disk stood still by no fault of its own.
                settled = asyncio.get_running_loop().call_later(SETTLED_S, watch.judge_stalls, outcome.found)
                await asyncio.sleep(max(0.0, ends_at - asyncio.get_running_loop().time()))
            finally:
                over.set()
                if settled is not None:
                    settled.cancel()
                for one in (*clients, *samplers, trainer):
                    one.over = True
            _, hanging = await asyncio.wait(tasks, timeout=ENDING_S)
            for task in hanging:
                outcome.found.append(f"does not end: {task}")
                task.cancel()
            for task in (*tasks, attack):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    outcome.found.append(f"the soak itself failed: {task.exception()!r}")
            telling.cancel()
            attack.cancel()
            await watching
            outcome.verdicts = watch.verdicts(plan.warm_up_s, calm_from)
        outcome.counts["swaps"] = trainer.swaps
        outcome.tokens = oracle.checked_tokens
        self._read_log(server)

    def _sampler(self, number: int, port: int, oracle: RealOracle, trouble: Trouble) -> TinkerClient:
        def count(what: str) -> None:
            self.outcome.counts[what] += 1

        def starts() -> int:
            # A front that met with something may have been started anew.
            return len(trouble.windows) + sum(end is not None for _, end in trouble.windows)

        rng = random.Random(self.plan.seed + 100 + number)
        return TinkerClient(f"sampler-{number}", port, rng, oracle, count, starts)

    def _trainee(self, port: int, oracle: RealOracle, trouble: Trouble) -> Trainee:
        def count(what: str) -> None:
            self.outcome.counts[what] += 1

        rng = random.Random(self.plan.seed + 200)
        return Trainee("trainee", port, rng, oracle, count, trouble.trainer_lives_since)

    async def _sampled(self, sampler: TinkerClient) -> None:
        while not sampler.over:
            try:
                await sampler.run()
            except Wrong as error:
                self.outcome.found.append(str(error))
                await asyncio.sleep(1.0)

    async def _tell(self, oracle: RealOracle, trainer: Publisher, watch: Watch) -> None:
        while True:
            await asyncio.sleep(15.0)
            counts = self.outcome.counts
            whole = sum(count for what, count in counts.items() if what.startswith("turn: whole"))
            now = watch.now()
            self.say(
                f"{whole} turns, {oracle.checked_tokens} tokens ({oracle.unchecked} to judge), {trainer.swaps} swaps, "
                f"{now.get('in_flight', 0):.0f} in flight, {now.get('sessions', 0):.0f} sessions, "
                f"{len(self.outcome.found)} findings"
            )

    async def _judged(self, oracle: RealOracle) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await oracle.finished()
        counts = self.outcome.counts
        counts |= Counter({f"tokens {how}": count for how, count in oracle.counts.items()})
        counts["tokens unchecked"] = oracle.unchecked

    def _read_log(self, server: serving.Server) -> None:
        """No process may show a traceback; what is meant for a person has none."""
        text = server.log.read_text(errors="replace")
        shutil.copyfile(server.log, self.plan.out / "server.log")
        if "Traceback" in text:
            at = text.index("Traceback")
            self.outcome.found.append(f"a traceback in the log: {text[at : at + 1500]}")


def soak(plan: Plan) -> Outcome:
    plan.out.mkdir(parents=True, exist_ok=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="soak-") as place, s3_server() as s3:
        s3.make_bucket(BUCKET)
        return asyncio.run(Soak(plan, Path(place), s3).run())


def shown(outcome: Outcome) -> str:
    lines = ["", "what happened:"]
    lines += [f"{count:9}  {what}" for what, count in sorted(outcome.counts.items())]
    judged = outcome.counts["tokens looked up"] + outcome.counts["tokens computed"]
    share = judged / outcome.tokens if outcome.tokens else 0.0
    lines += ["", f"{outcome.tokens} tokens of whole answers, the numbers of {share:.1%} judged"]
    lines += ["", "medians of each quarter after the warm-up:", *map(str, outcome.verdicts)]
    lines += ["", f"{len(outcome.found)} findings", *outcome.found[:40]]
    lines += ["clean" if outcome.clean else "NOT CLEAN"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--streams", type=int, default=Plan.streams)
    parser.add_argument("--replicas", type=int, default=Plan.replicas)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--out", type=Path, default=Plan.out, help="samples, the server's log, the table")
    given = parser.parse_args()
    outcome = soak(Plan(given.minutes, given.streams, given.replicas, given.seed, given.out))
    text = shown(outcome)
    (given.out / "outcome.txt").write_text("\n".join([*outcome.lines, text, ""]))
    print(text)
    return 0 if outcome.clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
