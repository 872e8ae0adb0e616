"""What the search for numbers that are not finite costs: 1 GB is fetched and verified with it and without it, in turns.

A replica does this before its engine loads the files. Times are in seconds: `cpu` of all threads, which other processes on
the machine change little, and `wall`. The engine's own load comes after and is the same in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from document import table, write_part
from hardware import provenance, write_result

from midstream.client.weights import write_weights
from midstream.core.types import Desired
from midstream.replica.swap import source as swap_source
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.finite import check_finite
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import find_snapshot

TENSORS = 64
TENSOR_BYTES = 16 * 2**20


def skipped(*_: object, **__: object) -> None:
    """Reads nothing."""


def write_checkpoint(directory: Path, dtype: str) -> None:
    """64 tensors of 16 MiB. dtype: "float32", or "bfloat16"."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "bench"}')
    random = np.random.default_rng(0)
    width = 2**22 if dtype == "float32" else 2**23
    tensors = {f"t{i}": random.standard_normal(width, np.float32).reshape(-1, 2**11) for i in range(TENSORS)}
    write_weights(directory, tensors, None if dtype == "float32" else "bfloat16")


async def staged(bucket: Path, cache: Path) -> dict[str, float]:
    """Seconds of fetching and of verifying."""
    source = CachedSource(ChainFetcher(SnapshotCache(cache)), read_spec(bucket))
    fingerprint = (await find_snapshot(bucket.as_uri())).fingerprint
    desired = Desired(snapshot="s", generation=1, url=bucket.as_uri(), fingerprint=fingerprint)
    times: dict[str, float] = {}

    async def timed(name: str, step: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        await step()  # type: ignore[misc]
        times[f"{name}_wall_s"] = time.perf_counter() - wall
        times[f"{name}_cpu_s"] = time.process_time() - cpu

    found: list[Path | None] = []

    async def fetch() -> None:
        found.append(await source.fetch(desired))

    await timed("fetch", fetch)
    assert found[0] is not None
    await timed("verify", lambda: source.verify(found[0], desired))  # type: ignore[arg-type]
    return times


def measured(place: Path, dtype: str, rounds: int) -> dict[str, object]:
    bucket = place / "bucket"
    write_checkpoint(bucket, dtype)
    sides: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for round_number in range(2 * rounds):
        side = ("before", "after")[round_number % 2]
        swap_source.check_finite = skipped if side == "before" else check_finite  # type: ignore[assignment]
        sides[side].append(asyncio.run(staged(bucket, place / "cache")))
        shutil.rmtree(place / "cache")
    shutil.rmtree(bucket)
    medians = {
        side: {key: statistics.median(times[key] for times in rounds_) for key in rounds_[0]}
        for side, rounds_ in sides.items()
    }
    ratio = {
        clock: sum(medians["after"][f"{step}_{clock}_s"] for step in ("fetch", "verify"))
        / sum(medians["before"][f"{step}_{clock}_s"] for step in ("fetch", "verify"))
        for clock in ("wall", "cpu")
    }
    return {"dtype": dtype, "bytes": TENSORS * TENSOR_BYTES, **medians, "after_over_before": ratio}


def render(result: dict[str, Any]) -> str:
    """The marked part of docs/benchmarks.md."""
    hardware = result["hardware"]
    head = ["1 GiB of", "CPU s without the search", "with it", "ratio", "wall s without", "with", "ratio"]
    body = []
    for found in result["results"]:
        cells = [found["dtype"]]
        for clock in ("cpu", "wall"):
            sides = [
                sum(found[side][f"{step}_{clock}_s"] for step in ("fetch", "verify"))
                for side in ("before", "after")
            ]
            cells += [*(f"{seconds:.2f}" for seconds in sides), f"{found['after_over_before'][clock]:.2f}"]
        body.append(cells)
    words = (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}; {result['rounds']} rounds."
    )
    return f"{words}\n\n{table(head, body)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="results/finite.json and docs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = [measured(Path(place), dtype, arguments.rounds) for dtype in ("bfloat16", "float32")]
    body = {"results": found, "rounds": arguments.rounds, **provenance()}
    print(json.dumps(body, indent=2))
    if arguments.write:
        write_result("finite", body)
        write_part("finite", render(body))


if __name__ == "__main__":
    main()
