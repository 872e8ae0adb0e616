"""Many open streams, and more than one core: what one router costs at 10,000 streams, and what two cores serve.

    python -m gateway.scale [--streams N] [--rounds N] [--write]

Owns: results/gateway-scale.json. The loads, mocks and routers are those of gateway.bench.
Always holds: every round starts each router afresh, so that its memory is that of the streams. On two cores, routers, load
generator and mocks share both cores, for every router alike.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hardware import provenance, write_result

from gateway import tools
from gateway.bench import DIRECT, Bench, Effort, median_of, say
from gateway.loads import SHAPES, LoadShape
from gateway.routers import HAProxy, Midstream, Router, RouterFailed, VllmRouter, folder_for, temporary_folder
from gateway.scale_table import write_table

#: A stream's connection to the router and the router's to the mock, in the bed; and what else is open.
FILES_PER_STREAM, OTHER_FILES = 2, 500
INTERVAL_S = 1.0


class OneGateway(Midstream):
    """The server as a user starts it, in front of replicas that run elsewhere."""

    name = "midstream, one gateway"
    gateways = 1
    talks = False

    def command(self) -> list[str]:
        replicas = [word for url in self.urls for word in ("--replica-url", url)]
        state = ["--state-dir", str(self.folder / "state"), "--bucket", (self.folder / "bucket").as_uri()]
        port = ["--port", str(self.port), "--gateway-workers", str(self.gateways)]
        return [
            *(sys.executable, "-m", "midstream.cli", "serve", "--no-tinker", "--replicas", "0"),
            *replicas,
            *state,
            *port,
        ]

    def started(self) -> None:
        """There is nothing to say to it."""

    def apply(self) -> None:
        raise NotImplementedError("these replicas stay")


class TwoGateways(OneGateway):
    name = "midstream, two gateways"
    gateways = 2


class HAProxyOfTwo(HAProxy):
    threads = 2


AT_STREAMS: tuple[type[Router], ...] = (Midstream, VllmRouter, HAProxy)
AT_TWO_CORES: tuple[type[Router], ...] = (OneGateway, TwoGateways, VllmRouter, HAProxyOfTwo)


def streams_that_fit(wanted: int) -> int:
    """As many as the hard limit of open files allows."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(wanted, (most - OTHER_FILES) // FILES_PER_STREAM)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, count * FILES_PER_STREAM + OTHER_FILES), most))
    return count


def started(bench: Bench, kind: type[Router], index: int) -> Router:
    router = kind(folder_for(f"{index}", bench.folder), bench.bed.urls, bench.cores[0])
    router.start(bench.request("1k"))
    return router


def rounds_of(
    bench: Bench,
    kinds: Sequence[type[Router]],
    rounds: int,
    measure: Callable[[Router | None], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Router to figures, each started for its measurement alone, in another order each round."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in range(rounds):
        for place in range(len(kinds)):
            kind = kinds[(place + turn) % len(kinds)]
            if (why := kind.missing()) is not None:
                bench.absent[kind.name] = why
                continue
            try:
                router = started(bench, kind, turn * len(kinds) + place)
            except RouterFailed as error:
                bench.absent[kind.name] = str(error)
                continue
            bench.running[kind.name] = router
            try:
                found[kind.name].append(measure(router))
            finally:
                bench.running.pop(kind.name).stop()
        found[DIRECT].append(measure(None))
        say(f"  round {turn + 1} of {rounds} done")
    return {name: one | median_of(cells) for name, cells in found.items() for one in (_medians(cells),)}


def _medians(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What median_of does not know."""
    kb = sorted(cell["kb_per_stream"] for cell in cells if "kb_per_stream" in cell)
    return {"kb_per_stream": round(kb[len(kb) // 2], 1)} if kb else {}


def at_streams(bench: Bench, count: int, rounds: int) -> dict[str, Any]:
    """Routers on one core, load and mocks on the other."""
    shape = LoadShape(
        "streams", "stream", count, "hold", "chunks", interval_s=INTERVAL_S, opening_s=count / 1500
    )

    def measure(router: Router | None) -> dict[str, Any]:
        before = 0 if router is None else tools.rss_bytes(router.pid)
        cell = bench.measure(DIRECT if router is None else router.name, shape)
        if router is not None and "rss_mb" in cell:
            cell["kb_per_stream"] = (cell["rss_mb"] * 1e6 - before) / count / 1e3
        return cell

    return {"streams": count, "cells": rounds_of(bench, AT_STREAMS, rounds, measure)}


def at_two_cores(bench: Bench, rounds: int) -> dict[str, Any]:
    """1 KB requests, with everything on both cores."""
    shape = next(shape for shape in SHAPES if shape.name == "1 KB")
    tools.pin(bench.bed.process.pid, *bench.cores)

    def measure(router: Router | None) -> dict[str, Any]:
        if router is not None:
            tools.pin(router.pid, *bench.cores)
            # Its processes find the replicas.
            time.sleep(1.0)
        return bench.measure(DIRECT if router is None else router.name, shape)

    return {"connections": shape.connections, "cells": rounds_of(bench, AT_TWO_CORES, rounds, measure)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="results/gateway-scale.json, docs/benchmarks.md")
    # What `make bench-gateway` gives all of its benchmarks.
    parser.add_argument("--quick", action="store_true", help="one round of 1,000 streams")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        sys.exit("this needs two cores")
    streams = streams_that_fit(1000 if args.quick else args.streams)
    HAProxy.connections_max = streams + OTHER_FILES // 4
    rounds = 1 if args.quick else args.rounds
    effort = Effort(rounds=rounds, window_s=2.0, paced_window_s=4.0, idle_s=0.0)
    cores = (available[0], available[1])
    result = provenance(
        rounds=rounds,
        window_s=effort.window_s,
        paced_window_s=effort.paced_window_s,
        interval_s=INTERVAL_S,
    )
    with temporary_folder() as folder, Bench(Path(folder), effort, cores) as bench:
        result["streams"] = at_streams(bench, streams, rounds)
        absent = bench.absent
    with temporary_folder() as folder, Bench(Path(folder), effort, cores, rests=True) as bench:
        result["two_cores"] = at_two_cores(bench, rounds)
        result["absent"] = absent | bench.absent
    if args.write:
        write_result("gateway-scale", result)
        write_table(result)
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
