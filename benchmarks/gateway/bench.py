"""Routers in front of the same mock replicas under the same load, in one run: what each costs, adds and decides.

The router has one core for itself; load generator and mocks share the other (bed.c). All routers run all the time, one is
loaded at a time, in another order each round; each figure is the median of the rounds. Then the cores change places.
Counted: the CPU time of the router's processes, user and system, over a window in the middle of a load, divided by the
requests or chunks that the mocks served in that window.

    python -m gateway.bench [--quick] [--write] [--only ROUTER...] [--shapes NAME...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import last_result
from hardware import provenance, write_result

from gateway import loads, tools
from gateway.keys import KEYS, decisions
from gateway.loads import LoadShape
from gateway.routers import (
    ROUTERS,
    Midstream,
    MidstreamBefore,
    Router,
    RouterFailed,
    folder_for,
    probe,
    temporary_folder,
)
from gateway.table import write_table

MOCKS = 4
WARM_S = 0.25
DIRECT = "direct"
#: How often a load is tried on a router that serves nothing.
MEASURED_MAX = 3


@dataclass(frozen=True)
class Effort:
    rounds: int
    window_s: float
    paced_window_s: float
    idle_s: float


FULL = Effort(rounds=5, window_s=0.7, paced_window_s=1.5, idle_s=3.0)
QUICK = Effort(rounds=1, window_s=0.5, paced_window_s=1.0, idle_s=1.0)


class Bench:
    """The test bed and the routers that run. files: the requests, by name."""

    def __init__(self, folder: Path, effort: Effort, cores: tuple[int, int], *, rests: bool = False) -> None:
        self.folder, self.effort, self.cores = folder, effort, cores
        tools.build(folder)
        self.files = loads.write(folder)
        self.bed = tools.Bed(folder, MOCKS, cores[1], rests=rests)
        self.bed.pace(0.0, loads.BURST_CHUNKS)
        self.running: dict[str, Router] = {}
        self.absent: dict[str, str] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for router in self.running.values():
            router.stop()
        self.bed.__exit__()

    def start(self, kinds: Sequence[type[Router]]) -> None:
        for kind in kinds:
            why = kind.missing()
            if why is None:
                router = kind(folder_for(kind.name, self.folder), self.bed.urls, self.cores[0])
                try:
                    router.start(self.request("1k"))
                except RouterFailed as error:
                    why = str(error)
                else:
                    self.running[kind.name] = router
            if why is not None:
                say(f"{kind.name} is absent: {why}")
                self.absent[kind.name] = why

    def request(self, body: str) -> bytes:
        return self.files[body].read_bytes().replace(b"KKKKKKKK", b"00000000")

    def place(self, router_core: int, bed_core: int) -> None:
        """Pin everything; this process goes with the bed."""
        tools.pin(self.bed.process.pid, bed_core)
        tools.pin(os.getpid(), bed_core)
        for router in self.running.values():
            router.pin(router_core)
        self.cores = (router_core, bed_core)

    def idle(self) -> dict[str, float]:
        """CPU ms per second of each router that has nothing to do."""
        before = {name: tools.tree_cpu_s(router.pid) for name, router in self.running.items()}
        time.sleep(self.effort.idle_s)
        return {
            name: (tools.tree_cpu_s(router.pid) - before[name]) / self.effort.idle_s * 1e3
            for name, router in self.running.items()
        }

    def measure(self, name: str, shape: LoadShape) -> dict[str, Any]:
        """One load on one router, or straight on the mocks. A cell without figures says why: `refused` or `unserved`."""
        bed, router = self.bed, self.running.get(name)
        port = bed.ports[0] if router is None else router.port
        status = probe(port, self.request(shape.body))
        if status != 200:
            return {"refused": status}
        window_s = self.effort.paced_window_s if shape.mode == "hold" else self.effort.window_s
        if shape.counter == "chunks":
            whole_s = window_s + 4 * WARM_S + shape.opening_s
            chunks = round(whole_s / shape.interval_s) if shape.interval_s else loads.BURST_CHUNKS
            bed.pace(shape.interval_s, chunks)
        while bed.total("streams"):
            # Those of the probe.
            time.sleep(0.01)
        served = bed.total("requests")
        bed.begin(
            port,
            self.files[shape.body],
            shape.connections,
            shape.mode,
            window_s + 2 * WARM_S,
            rate=shape.rate,
        )
        time.sleep(WARM_S)
        before = self._sample(router, shape)
        time.sleep(window_s)
        after = self._sample(router, shape)
        rss = 0 if router is None else tools.rss_bytes(router.pid)
        load = bed.end()
        wall, cpu, bed_cpu, count, cores = (b - a for a, b in zip(before, after, strict=True))
        if count == 0:
            return {"unserved": load["failed"]}
        delays = load["event_delay" if shape.counter == "chunks" else "latency"]
        return {
            "cpu_us": (bed_cpu if router is None else cpu) / count * 1e6,
            "per_s": count / wall,
            "busy": cpu / wall,
            "others": max(0.0, (cores - cpu - bed_cpu) / wall),
            "p50_us": delays["p50_us"],
            "p99_us": delays["p99_us"],
            "rss_mb": rss / 1e6,
            "failed": load["failed"],
            "requests": load["asked"],
            "served_more": bed.total("requests") - served - load["asked"],
        }

    def _sample(self, router: Router | None, shape: LoadShape) -> tuple[float, ...]:
        return (
            time.monotonic(),
            0.0 if router is None else tools.tree_cpu_s(router.pid),
            tools.cpu_s(self.bed.process.pid),
            self.bed.total(shape.counter),
            tools.busy_s(self.cores),
        )


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a cell: medians, the spread of the CPU figure, and the sum of failures."""
    if refused := [one for one in rounds if "refused" in one]:
        return refused[0]
    unserved = [one for one in rounds if "unserved" in one]
    if len(unserved) == len(rounds):
        return {"unserved": sum(one["unserved"] for one in rounds)}
    rounds = [one for one in rounds if one not in unserved]
    digits = {"cpu_us": 2, "per_s": 0, "busy": 3, "others": 2, "p50_us": 1, "p99_us": 1, "rss_mb": 1}
    found: dict[str, Any] = {
        name: round(statistics.median(one[name] for one in rounds), places) for name, places in digits.items()
    }
    cpu = [one["cpu_us"] for one in rounds]
    found["cpu_us_range"] = [round(min(cpu), 2), round(max(cpu), 2)]
    found["rounds"] = len(rounds)
    if unserved:
        found["unserved_rounds"] = len(unserved)
    for name in ("failed", "requests", "served_more"):
        found[name] = sum(one[name] for one in rounds)
    return found


def measured(bench: Bench, name: str, shape: LoadShape) -> dict[str, Any]:
    """The figures of one load. A router that served nothing in the window is measured again, MEASURED_MAX times in all."""
    for turn in range(MEASURED_MAX):
        figures = bench.measure(name, shape)
        if "unserved" not in figures:
            break
        again = "; measured again" if turn + 1 < MEASURED_MAX else ""
        say(f"  {shape.name} on {name}: nothing was served in the window{again}")
    return figures


def run_cells(bench: Bench, shapes: Sequence[LoadShape]) -> dict[str, dict[str, dict[str, Any]]]:
    """Shape to router to figures, at the cores as they are."""
    names = [DIRECT, *bench.running]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn in range(bench.effort.rounds):
        for shape in shapes:
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                cells[shape.name, name].append(measured(bench, name, shape))
        say(f"  round {turn + 1} of {bench.effort.rounds} done")
    return {shape.name: {name: median_of(cells[shape.name, name]) for name in names} for shape in shapes}


def run(bench: Bench, shapes: Sequence[LoadShape]) -> dict[str, Any]:
    placements = []
    first, second = bench.cores
    for router_core, bed_core in ((first, second), (second, first)):
        say(f"routers on core {router_core}, load and mocks on core {bed_core}")
        bench.place(router_core, bed_core)
        placements.append(
            {
                "router_core": router_core,
                "bed_core": bed_core,
                "idle_ms_per_s": {name: round(ms, 2) for name, ms in bench.idle().items()},
                "cells": run_cells(bench, shapes),
            }
        )
    rss = {name: tools.rss_bytes(router.pid) for name, router in bench.running.items()}
    placed: dict[str, dict[str, Any]] = {}
    for name, router in bench.running.items():
        try:
            placed[name] = decisions(bench.bed, router, bench.files["1k"])
        # It does not cost the others their figures.
        except (RouterFailed, OSError) as error:
            placed[name] = {"error": str(error)}
        say(f"  keys of {name}: {placed[name]}")
    return {
        "routers": {
            name: {
                "version": router.version(),
                **router.configuration(),
                "rss_mb": round(rss[name] / 1e6, 1),
                "log_bytes": router.log.stat().st_size,
                "keys": placed[name],
            }
            for name, router in bench.running.items()
        },
        "absent": bench.absent,
        "placements": placements,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="one round of short windows: about three minutes"
    )
    parser.add_argument("--write", action="store_true", help="results/gateway.json and docs/benchmarks.md")
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in ROUTERS], help="these routers")
    parser.add_argument(
        "--before",
        metavar="DIR",
        type=Path,
        help="a checkout of another commit, measured beside this one alone; --write: results/gateway-before.json",
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=[shape.name for shape in loads.SHAPES], help="these loads"
    )
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        sys.exit("this needs two cores")
    effort = QUICK if args.quick else FULL
    shapes = [shape for shape in loads.SHAPES if not args.shapes or shape.name in args.shapes]
    if args.before is not None:
        MidstreamBefore.checkout, args.only = args.before.resolve(), [Midstream.name, MidstreamBefore.name]
    chosen = args.only or [kind.name for kind in ROUTERS if kind is not MidstreamBefore]
    kinds = [kind for kind in ROUTERS if kind.name in chosen]
    with temporary_folder() as folder, Bench(Path(folder), effort, (available[0], available[1])) as bench:
        bench.start(kinds)
        result = provenance(
            mocks=MOCKS,
            keys=KEYS,
            rounds=effort.rounds,
            window_s=effort.window_s,
            paced_window_s=effort.paced_window_s,
            answer_bytes=1024,
            shapes={shape.name: {"connections": shape.connections, "mode": shape.mode} for shape in shapes},
            request_bytes={name: len(body) for name, (_, body) in loads.bodies().items()},
            stream_interval_ms=20,
            latency_requests_per_s=1000,
            headers=loads.HEAD,
        )
        result |= run(bench, shapes)
    if args.write and args.before is not None:
        write_result("gateway-before", result)
    elif args.write:
        write_result("gateway", result)
        write_table(result)
    else:
        print(json.dumps(result, indent=2))
    if args.before is None:
        last_result.say("gateway", result)


if __name__ == "__main__":
    main()
