"""Weight swaps under load: what a stream notices of one.

One `midstream serve` with one embedded replica of tiny-moe and 16 streams with logprobs on; each swap is a full snapshot,
signalled when every stream has its first token. Reported: the engine's pause (no step runs), how many streams crossed,
the longest time between two tokens of any stream during the swap, from signal to ready, and the same without a swap.

    python benchmarks/swaps.py [--swaps 10] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from hardware import provenance, write_result

from midstream.client import SnapshotPublisher
from midstream.models.tiny_moe import write_tiny_moe

READY = re.compile(r"midstream ready on (\S+)")
PROMPT, NEW = 64, 2500
STREAMS = 16


class Streams:
    """Running streams and when each of their tokens came."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._started = [asyncio.Event() for _ in range(STREAMS)]
        self.times: list[list[float]] = [[] for _ in range(STREAMS)]

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._stream(client, i) for i in range(STREAMS)))

    async def all_running(self) -> None:
        for event in self._started:
            await event.wait()

    async def _stream(self, client: httpx.AsyncClient, i: int) -> None:
        body = {
            "model": "tiny-moe",
            "prompt": [self._rng.randrange(256) for _ in range(PROMPT)],
            "max_tokens": NEW,
            "stream": True,
            "ignore_eos": True,
            "logprobs": True,
        }
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if '"token_id"' in line:
                    self.times[i].append(time.perf_counter())
                    self._started[i].set()
        assert len(self.times[i]) == NEW, f"{len(self.times[i])} of {NEW} tokens"

    def worst_gap_ms(self, first: float, last: float) -> float:
        """The longest time between two tokens of a stream that touches first..last."""
        gaps = [
            b - a for times in self.times for a, b in itertools.pairwise(times) if b >= first and a <= last
        ]
        return max(gaps) * 1e3


async def one_swap(url: str, publisher: SnapshotPublisher, identity: str, seed: int) -> dict[str, float]:
    streams = Streams(url, seed)
    running = asyncio.create_task(streams.run())
    await streams.all_running()
    signalled = time.perf_counter()
    await asyncio.to_thread(publisher.signal, identity)
    await asyncio.to_thread(publisher.wait_until_ready, identity)
    ready = time.perf_counter()
    assert not running.done(), "the streams ended before the swap did: raise NEW"
    await running
    swap = publisher.status().replicas[0].last_swap
    assert swap is not None
    assert swap["snapshot"] == identity
    quiet = ready + 0.2
    return {
        "pause_ms": swap["pause_ms"],
        "streams_crossed": swap["streams_crossed"],
        "signal_to_ready_ms": (ready - signalled) * 1e3,
        "worst_gap_ms": streams.worst_gap_ms(signalled, ready),
        "worst_gap_without_ms": streams.worst_gap_ms(quiet, quiet + ready - signalled),
    }


def measure(url: str, bucket: Path, models: Path, swaps: int) -> dict[str, Any]:
    runs = []
    with SnapshotPublisher(url, bucket.as_uri()) as publisher:
        for i in range(swaps):
            publisher.write_full(f"step-{i}", models / f"seed-{i % 2 + 1}")
            runs.append(asyncio.run(one_swap(url, publisher, f"step-{i}", i)))
            print(runs[-1], file=sys.stderr)
    summary: dict[str, Any] = {
        "swaps": swaps,
        "streams_crossed": sum(int(run.pop("streams_crossed")) for run in runs),
    }
    for key in runs[0]:
        values = [run[key] for run in runs]
        summary |= {f"{key}_p50": round(statistics.median(values), 2), f"{key}_max": round(max(values), 2)}
    return summary


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/swaps.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed in (1, 2):
            write_tiny_moe(root / "models" / f"seed-{seed}", seed=seed)
        command = [sys.executable, "-m", "midstream.cli", "serve", "--port", "0", "--replicas", "1"]
        server = subprocess.Popen(
            [*command, "--state-dir", str(root / "state"), "--log-level", "warning"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            match = READY.match(server.stdout.readline())
            assert match, "the server did not start"
            swapped = measure(match[1], root / "state" / "bucket", root / "models", options.swaps)
        finally:
            server.terminate()
            server.wait(timeout=30)
    result = provenance(prompt_tokens=PROMPT, new_tokens=NEW, streams=STREAMS, model="tiny-moe bfloat16")
    result |= swapped
    if options.write:
        print(f"wrote {write_result('swaps', result)}")
    print(swapped)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
