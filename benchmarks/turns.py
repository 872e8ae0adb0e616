"""What a session's tree of turns costs: CPU of gateway and replica per turn, and the prompt tokens that the engine computes.

Run by `make bench-gateway`. The same chats run in turn with and without a session against `midstream serve` with one replica
of tiny-moe: with one, each turn goes on from the sampled tokens of the turn before it; without one, it is rendered anew.
The engine is a process of its own and is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hardware import commit_of, provenance, source_of, write_result

READY = re.compile(r"midstream ready on http://127\.0\.0\.1:(\d+)")
BLOCK = 16
WORDS = ("the", "door", "lamp", "is", "open", "we", "look", "at", "it", "and", "go", "on", "north", "again")


class Serving:
    """A server of one replica, of this source or of another checkout's. Gone when its `with` block is left."""

    def __init__(self, checkout: Path | None = None) -> None:
        self._environment = {} if checkout is None else source_of(checkout)

    def __enter__(self) -> Serving:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "midstream.cli", "serve", "--replicas", "1", "--port", "0"]
        state = ["--state-dir", f"{self._folder.name}/state", "--log-level", "warning"]
        environment = {**os.environ, **self._environment}
        self._process = subprocess.Popen(
            [*command, *state], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := READY.search(line):
                self.port = int(found[1])
                return self
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._folder.cleanup()

    def cpu_us(self) -> float:
        """Of gateway and replica, since they started."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self._process.pid and re.search(rb"launch\.(gateway|replica) ", command + b" "):
                    for task in (folder / "task").iterdir():
                        total += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue
        return total / 1000


def chat(serving: Serving, seed: int, session: str | None, turns: int, words: int) -> list[dict[str, int]]:
    """One trajectory; the usage of each turn."""
    rng, usages = random.Random(seed), []
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=120)
    headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        said = " ".join(rng.choice(WORDS) for _ in range(words))
        messages.append({"role": "user", "content": said})
        body = {"model": "tiny-moe", "messages": messages, "max_tokens": 16, "seed": seed + number}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        assert "midstream" not in answer, answer["midstream"]
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usages.append(
            {"prompt": usage["prompt_tokens"], "cached": cached, "answer": usage["completion_tokens"]}
        )
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    connection.close()
    return usages


def ideal(usages: list[dict[str, int]]) -> int:
    """Prompt tokens that no turn before has had, in whole blocks: what a tree of turns has to compute."""
    held, computed = 0, 0
    for usage in usages:
        computed += usage["prompt"] - held // BLOCK * BLOCK
        # The last sampled token was not an input yet.
        held = usage["prompt"] + usage["answer"] - 1
    return computed


def measure(rounds: int, chats: int, turns: int, words: int) -> dict[str, Any]:
    costs: dict[bool, list[float]] = {True: [], False: []}
    prefill: dict[bool, list[float]] = {True: [], False: []}
    longest = 0
    with Serving() as serving:
        chat(serving, 0, None, turns, words)
        for number in range(rounds):
            # Which one is first changes, so that neither gains by the other's cache: seeds differ, too.
            for tree in (True, False) if number % 2 else (False, True):
                before, all_usages = serving.cpu_us(), []
                for at in range(chats):
                    seed = 1000 * (2 * (number * chats + at) + tree + 1)
                    all_usages.append(chat(serving, seed, f"s-{seed}" if tree else None, turns, words))
                costs[tree].append((serving.cpu_us() - before) / (chats * turns))
                computed = sum(u["prompt"] - u["cached"] for usages in all_usages for u in usages)
                prefill[tree].append(computed / sum(map(ideal, all_usages)))
                longest = max(longest, max(u["prompt"] for usages in all_usages for u in usages))
    row = {
        "words_a_turn": words,
        "longest_prompt_tokens": longest,
        "cpu_us_a_turn": {
            "tree": statistics.median(costs[True]),
            "rendered": statistics.median(costs[False]),
        },
        "more_us_a_turn": statistics.median(a - b for a, b in zip(costs[True], costs[False], strict=True)),
        "prefill_times_ideal": {
            "tree": statistics.median(prefill[True]),
            "rendered": statistics.median(prefill[False]),
        },
    }
    print(json.dumps(row), flush=True)
    return row


def against(checkout: Path, rounds: int, chats: int, turns: int, words: int) -> dict[str, Any]:
    """The same turns of sessions at this source's server and at another checkout's, one after the other in each round."""
    costs: dict[str, list[float]] = {"after": [], "before": []}
    with Serving() as after, Serving(checkout) as before:
        sides = {"after": after, "before": before}
        for serving in sides.values():
            chat(serving, 0, None, turns, words)
        for number in range(rounds):
            for name in sorted(sides, reverse=bool(number % 2)):
                serving, begun = sides[name], sides[name].cpu_us()
                for at in range(chats):
                    seed = 1000 * (number * chats + at + 1)
                    chat(serving, seed, f"s-{seed}", turns, words)
                costs[name].append((serving.cpu_us() - begun) / (chats * turns))
    row: dict[str, Any] = {
        "words_a_turn": words,
        "cpu_us_a_turn": {name: statistics.median(found) for name, found in costs.items()},
        "after_over_before": statistics.median(
            a / b for a, b in zip(costs["after"], costs["before"], strict=True)
        ),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/turns.json")
    parser.add_argument(
        "--before",
        metavar="DIR",
        type=Path,
        help="a checkout of another commit, measured beside this one alone; --write: results/turns-before.json",
    )
    options, _ = parser.parse_known_args()
    rounds = 2 if options.quick else options.rounds
    configuration = {"rounds": rounds, "chats": options.chats, "turns": options.turns}
    if options.before is not None:
        checkout = options.before.resolve()
        found = [against(checkout, rounds, options.chats, options.turns, words) for words in (12, 60)]
        if options.write:
            about = {**provenance(**configuration), "before": commit_of(checkout)}
            print("wrote", write_result("turns-before", {**about, "rows": found}))
        return
    rows = [measure(rounds, options.chats, options.turns, words) for words in (12, 60)]
    if options.write:
        print("wrote", write_result("turns", {**provenance(**configuration, block=BLOCK), "rows": rows}))


if __name__ == "__main__":
    main()
