"""The pause of a swap on vLLM: weights that its workers have staged, beside vLLM's own reload of the same files in place.

Owns: `make bench-vllm-swap`. One vLLM server of each model, with the flags and the worker extension that midstream gives, is
asked by running streams. Its weights are swapped by midstream's own switch (`engine/vllm/swap.py`), in turns:
    staged     the workers load the weights beside those that serve; the pause has the switch to them
    in place   the pause has vLLM's `reload_weights` of the same files, which lie in the page cache

Reported per model and way, in medians over the swaps and the worst:
    pause_ms        from the first call of the switch to the last, as a replica reports it
    brought_ms      of it, the call that brings the weights
    wait_ms         the longest time between two tokens of any stream that touches the pause
    stage_s         how long staging took, under the streams
    slower          a step while weights are staged, as a multiple of a step before: the median
    stage_wait_ms   the longest time between two tokens while weights are staged

    python benchmarks/vllm_swaps.py [--models 10MB 1GB] [--swaps 7] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import vllm_versions
from hardware import provenance, write_result
from loadgen import take_priority
from servers import VLLM_PYTHON, Model, Server
from swaps import QUIET_TOKENS, STREAMS, Streams, say, write_models
from vllm_servers import SharedVllm

from midstream.engine.servers.switching import switch
from midstream.engine.vllm.beside import WorkerWeights
from midstream.engine.vllm.swap import Control

STAGED, IN_PLACE = "staged", "in place"
LOAD_S_MAX = 600.0
#: Tokens of each stream after a swap.
AFTER = 20

Load = Callable[[], Awaitable[None]]


async def timed(work: Load, times: list[float]) -> None:
    began = time.perf_counter()
    await work()
    times.append(time.perf_counter() - began)


async def swapped(
    control: Control, workers: WorkerWeights, way: str, new: Path, old: Path, streams: Streams
) -> dict[str, Any]:
    """One swap under streams that run: when it did what."""
    began = time.perf_counter()
    await streams.after(QUIET_TOKENS)
    asked = time.perf_counter()
    weights = workers.next()
    if way == STAGED:
        await weights.load(new)
    staged = time.perf_counter()
    load: Load = weights.switch if way == STAGED else partial(control.reload, new)
    brought: list[float] = []
    await switch(control, partial(timed, load, brought), old, f"v{asked}", lambda: None)
    switched = time.perf_counter()
    await weights.drop()
    await streams.after(AFTER)
    return {"marks": (began, asked, staged, switched), "brought_s": brought[0]}


def found(run: dict[str, Any], streams: Streams, way: str) -> dict[str, float]:
    began, asked, staged, switched = run["marks"]

    def gaps(first: float, last: float) -> list[float]:
        return [gap for each in streams.gaps(first, last) for gap in each]

    step = statistics.median(gaps(began, asked))
    made = {
        "pause_ms": (switched - staged) * 1e3,
        "brought_ms": run["brought_s"] * 1e3,
        "wait_ms": max(gaps(staged, switched)) * 1e3,
        "step_ms": step * 1e3,
    }
    if way == STAGED:
        while_staged = gaps(asked, staged)
        made |= {
            "stage_s": staged - asked,
            "slower": statistics.median(while_staged) / step,
            "stage_wait_ms": max(while_staged) * 1e3,
        }
    return made


async def measured(
    server: Server, model: Model, directories: Sequence[Path], swaps: int
) -> dict[str, list[dict[str, float]]]:
    """What each way took at each of its swaps. The first of each is not counted."""
    url = f"http://127.0.0.1:{server.port}"
    control = Control(url, "", LOAD_S_MAX)
    workers = WorkerWeights(control, LOAD_S_MAX)
    made: dict[str, list[dict[str, float]]] = {STAGED: [], IN_PLACE: []}
    for number in range(2 * (swaps + 1)):
        # Each way brings each of the two models.
        way = (STAGED, IN_PLACE)[(number // 2 + number) % 2]
        new, old = directories[(number + 1) % 2], directories[number % 2]
        async with Streams(url, model.name, model, STREAMS[model.name], seed=number) as streams:
            run = await swapped(control, workers, way, new, old, streams)
        numbers = found(run, streams, way)
        say(f"{model.name} {way}: {', '.join(f'{name} {value:.2f}' for name, value in numbers.items())}")
        if number >= 2:
            made[way].append(numbers)
    return made


def summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"swaps": len(runs)}
    for key in runs[0]:
        values = [run[key] for run in runs]
        result |= {f"{key}_p50": round(statistics.median(values), 3), f"{key}_max": round(max(values), 3)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["10MB", "1GB"], choices=["10MB", "1GB"])
    parser.add_argument("--swaps", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/vllm-swaps.json")
    options = parser.parse_args()
    if not VLLM_PYTHON.exists():
        parser.error(f"{VLLM_PYTHON} is missing; `make setup-vllm` makes it")
    take_priority()
    # As in swaps.py.
    sys.setswitchinterval(0.0005)
    lines = []
    with tempfile.TemporaryDirectory(prefix="bench-vllm-swap-") as folder:
        for name, (model, directories) in write_models(options.models, Path(folder), "cpu").items():
            with SharedVllm(model, Path(folder), eager=True) as server:
                made = asyncio.run(measured(server, model, directories, options.swaps))
            pauses = {way: statistics.median(run["pause_ms"] for run in runs) for way, runs in made.items()}
            ratio = round(pauses[STAGED] / pauses[IN_PLACE], 3)
            lines += [{"model": name, "way": way, **summary(runs)} for way, runs in made.items()]
            lines.append({"model": name, "pause_staged_to_in_place": ratio})
    result = provenance(models=options.models, swaps=options.swaps, streams=STREAMS, eager=True)
    result["versions"]["vllm environment"] = vllm_versions()
    result["lines"] = lines
    if options.write:
        say(f"wrote {write_result('vllm-swaps', result)}")
    print(json.dumps(lines, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
