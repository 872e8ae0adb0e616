"""Serving the tiny MoE with one embedded replica: through the gateway and straight at the replica, and with swaps.

One `midstream serve`; every configuration runs `--repeats` times, alternating, and the medians are reported. The load
generator runs beside the server on the same cores, so absolute numbers are low; the ratios are the point. Streams with
logprobs on, 64 prompt tokens of which none is cached (each request has its own prefix) and 128 generated.

    python benchmarks/serving.py [--repeats 5] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
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
from midstream.types import HEADER_TOKEN

TOKEN = "serving-benchmark"
READY = re.compile(r"midstream ready on (\S+)")
PROMPT, NEW = 64, 128
CONCURRENCY = (1, 16, 64)
SWAPS, SWAP_STREAMS = 10, 16


async def one_stream(
    client: httpx.AsyncClient, url: str, rng: random.Random, extra: dict[str, Any]
) -> dict[str, float]:
    """Seconds to the first token and tokens received."""
    prompt = [rng.randrange(256) for _ in range(PROMPT)]
    body = {
        "model": "tiny-moe",
        "prompt": prompt,
        "max_tokens": NEW,
        "stream": True,
        "ignore_eos": True,
        **extra,
    }
    started, first, tokens = time.perf_counter(), 0.0, 0
    headers = {HEADER_TOKEN: TOKEN}
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"token_id"' in line:
                tokens += 1
                first = first or time.perf_counter() - started
    assert tokens == NEW, f"{tokens} of {NEW} tokens"
    return {"ttft_s": first, "tokens": tokens}


async def load(url: str, streams: int, seed: int, **extra: Any) -> dict[str, float]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        await one_stream(client, url, rng, {"logprobs": True})  # connections and code are warm
        started = time.perf_counter()
        results = await asyncio.gather(
            *(one_stream(client, url, rng, {"logprobs": True, **extra}) for _ in range(streams))
        )
        seconds = time.perf_counter() - started
    return {
        "tokens_per_s": sum(r["tokens"] for r in results) / seconds,
        "ttft_ms_p50": statistics.median(r["ttft_s"] for r in results) * 1e3,
    }


def replica_url(gateway: str) -> str:
    """The replica's own address, as the gateway's metrics name it."""
    lines = httpx.get(f"{gateway}/metrics").text
    match = re.search(r'url="(http://127\.0\.0\.1:\d+)"', lines)
    assert match, "the metrics name no replica url"
    return match[1]


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}


def throughput(gateway: str, replica: str, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for streams in CONCURRENCY:
        runs: dict[str, list[dict[str, float]]] = {"gateway": [], "replica": [], "routes": []}
        for repeat in range(repeats):
            seed = repeat * 1000 + streams
            runs["gateway"].append(asyncio.run(load(gateway, streams, seed)))
            runs["replica"].append(asyncio.run(load(replica, streams, seed + 1)))
            runs["routes"].append(asyncio.run(load(gateway, streams, seed + 2, include_routing_matrix=True)))
        row = {"streams": streams, **{name: medians(values) for name, values in runs.items()}}
        rows.append(row)
        print(row, file=sys.stderr)
    return rows


def swaps(gateway: str, bucket: Path, models: Path) -> dict[str, Any]:
    """Pauses of full-snapshot swaps under running streams."""
    pauses, crossed = [], 0
    with SnapshotPublisher(gateway, bucket.as_uri()) as publisher:
        for i in range(SWAPS):
            checkpoint = models / f"seed-{i % 2 + 1}"
            publisher.write_full(f"step-{i}", checkpoint)

            async def swap_under_load(identity: str = f"step-{i}") -> None:
                running = asyncio.create_task(load(gateway, SWAP_STREAMS, int(identity[5:])))
                await asyncio.sleep(0.9)  # the warm-up stream is over, the others are under way
                await asyncio.to_thread(publisher.signal, identity)
                await asyncio.to_thread(publisher.wait_until_ready, identity)
                await running

            asyncio.run(swap_under_load())
            swap = publisher.status().replicas[0].last_swap
            assert swap is not None
            pauses.append(swap["pause_ms"])
            crossed += swap["streams_crossed"]
    return {
        "swaps": SWAPS,
        "streams_crossed": crossed,
        "pause_ms_p50": round(statistics.median(pauses), 2),
        "pause_ms_max": round(max(pauses), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/serving.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed in (1, 2):
            write_tiny_moe(root / "models" / f"seed-{seed}", seed=seed)
        config = root / "midstream.toml"
        config.write_text(f'replica_token = "{TOKEN}"\n')
        command = [sys.executable, "-m", "midstream.cli", "serve", "--port", "0", "--replicas", "1"]
        server = subprocess.Popen(
            [*command, "--state-dir", str(root / "state"), "--log-level", "warning", "--config", str(config)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            match = READY.match(server.stdout.readline())
            assert match, "the server did not start"
            rows = throughput(match[1], replica_url(match[1]), options.repeats)
            swapped = swaps(match[1], root / "state" / "bucket", root / "models")
        finally:
            server.terminate()
            server.wait(timeout=30)
    result = provenance(
        prompt_tokens=PROMPT, new_tokens=NEW, repeats=options.repeats, replicas=1, model="tiny-moe bfloat16"
    )
    result |= {"throughput": rows, "swaps": swapped}
    if options.write:
        print(f"wrote {write_result('serving', result)}")
    print(swapped)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
