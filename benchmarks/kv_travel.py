"""What a move costs with and without the KV of the session: time to the first token, and CPU of all processes.

    python kv_travel.py [--tokens 3000] [--layers 6] [--rounds 4]

Two replicas of a random dense model serve. A session begins on one of them, which is then drained, and its next turn goes to
the other one. In every second round that turn has another isolation key, under which the old home has nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from dense_model import write_dense

READY = re.compile(r"midstream ready on (http://\S+) \(\d+ replicas, model (\S+), deployment (\S+)\)")


class Pair:
    def __init__(self, folder: Path, model: Path) -> None:
        config = folder / "config.toml"
        config.write_text("[embedded]\nkv_cache_tokens = 32768\nthreads = 1\nspare_after_s = 0\n")
        options = ("--model", str(model), "--replicas", "2", "--port", "0", "--no-tinker")
        command = [sys.executable, "-m", "midstream.cli", "serve", *options, "--config", str(config)]
        more = ("--state-dir", str(folder / "state"), "--log-level", "error")
        self.process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = next(filter(None, map(READY.search, self.process.stdout)), None)
        if found is None:
            raise SystemExit("the server did not start")
        self.url, self.model, self.deployment = found.groups()

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        data = None if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url + path, data, given, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read()), {k.lower(): v for k, v in answer.headers.items()}

    def drain(self, name: str, *, drain: bool) -> None:
        path = f"/v1/{self.deployment}/replicas"
        self.call("PATCH", f"{path}/{name}", {"drain": drain})
        while next(r for r in self.call("GET", path)[0]["replicas"] if r["name"] == name)["usable"] is drain:
            time.sleep(0.02)

    def turn(self, prompt: list[int], session: str, key: str) -> tuple[list[int], int, str]:
        """The answer, cached tokens, and the replica."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "prompt_cache_isolation_key": key,
        }
        answer, headers = self.call("POST", "/v1/completions", body, x_session_id=session)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached, headers["x-midstream-replica"]

    def cpu_s(self) -> float:
        """Of all processes of the server."""
        ticks = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks[int(stat.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
        ours = {self.process.pid}
        while more := {pid for pid, (parent, _) in ticks.items() if parent in ours} - ours:
            ours |= more
        return sum(ticks[pid][1] for pid in ours) / 100


def moved(pair: Pair, number: int, tokens: int, *, copied: bool) -> tuple[float, float, int]:
    """Seconds and CPU seconds of the first turn at the new home, and the prompt tokens that it computed."""
    rng, session = random.Random(number), f"session-{number}"
    prompt = [rng.randrange(200) for _ in range(tokens)]
    said, _, home = pair.turn(prompt, session, "one")
    pair.drain(home, drain=True)
    prompt += [*said, 1, 2, 3]
    cpu_s, began = pair.cpu_s(), time.perf_counter()
    _, cached, other = pair.turn(prompt, session, "one" if copied else "other")
    took_s, cpu_s = time.perf_counter() - began, pair.cpu_s() - cpu_s
    assert other != home
    pair.drain(home, drain=False)
    pair.call("DELETE", f"/v1/sessions/{session}")
    return took_s, cpu_s, len(prompt) - cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    found: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        write_dense(Path(folder) / "model", layers=asked.layers)
        pair = Pair(Path(folder), Path(folder) / "model")
        try:
            for number in range(2 * asked.rounds):
                copied = number % 2 == 1
                found[copied].append(moved(pair, number, asked.tokens, copied=copied))
                print("copied  " if copied else "computed", *(f"{value:8.2f}" for value in found[copied][-1]))
        finally:
            pair.process.terminate()
            pair.process.wait(60)
    for at, what in enumerate(("seconds", "CPU seconds", "tokens computed")):
        computed, copied = (statistics.median(row[at] for row in found[way]) for way in (False, True))
        print(f"{what}: computed {computed:.2f}, copied {copied:.2f}, 1/{computed / max(copied, 1e-9):.0f}")


if __name__ == "__main__":
    main()
