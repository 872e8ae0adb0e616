"""Turns of trajectories on two vLLM servers, while the weights change: by midstream, and by vLLM alone without changes.

Owns: the second part of `make bench-vllm`. `midstream serve --engine vllm --replicas 2` starts two vLLM servers; in each round
every way runs once, in another order, on those same servers, with session keys and random prompts of its own:
    no swaps                 through midstream, the trajectory's key in X-Session-ID
    swaps, new_session       the same, with full snapshots hot-loaded at even shares of the turns; sessions keep their KV
    swaps, all               the same, and every cached prefix is given up at each swap
    vLLM, round robin        the client asks vLLM itself, the servers in turn; no swaps
    vLLM, hash               the same, the server by hash(key)
Reported per way:
    wall_s, turn_ms          of the run; p50 and p99 of a turn, from the request's first byte to its last token
    cached_share             of the prompt tokens of all turns but the first: cached by the usage; cached_of_possible: over what
                             there would be if every turn found all whole blocks of the turn before
    gap_ms                   mean, p50, p99 and the longest time between two tokens of a stream
    pause_ms                 of each swap on each replica, by its own word; signal_to_ready_s by the clock
    crossed                  streams that had tokens of more than one snapshot, and their tokens behind the first swap
    failures                 turns that were not answered whole and with labels in order
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.tools import busy_s, tree_cpu_s
from loadgen import percentile
from rollout import hashed
from rollout_load import Plan, Workload, plans
from servers import CONTEXT, Model
from vllm_servers import INNER_NAME, OverVllm
from vllm_turns import Driven, Progress, Route, Target, Turn, drive, swap

from midstream.client import SnapshotPublisher
from midstream.models.tiny_moe import write_tiny_moe

REPLICAS = 2
ROUNDS = 3
# Tokens that vLLM caches together on a CPU.
BLOCK = 128
KV_GIB = 1
ARGS = ("--enforce-eager", "--max-model-len", str(CONTEXT), "--disable-log-stats")
NO_SWAPS, NEW_SESSION, ALL = "no swaps", "swaps, new_session", "swaps, all"
ROUND_ROBIN, HASH = "vLLM, round robin", "vLLM, hash"
POLICIES = {NEW_SESSION: "new_session", ALL: "all"}
OURS = (NO_SWAPS, *POLICIES)
WAYS = (*OURS, ROUND_ROBIN, HASH)
WARM = Workload(trajectories=8, turns=2, first=(512, 512), answer=(16, 16), observation=(64, 64))


def workload(trajectories: int, turns: int) -> Workload:
    return Workload(
        trajectories=trajectories, turns=turns, first=(512, 512), answer=(128, 128), observation=(64, 64)
    )


class Bench:
    """Running servers, and what each way does with them."""

    def __init__(self, server: OverVllm, publisher: SnapshotPublisher, directories: Sequence[Path]) -> None:
        self._server = server
        self._publisher = publisher
        self._directories = directories
        self._vllm_ports = server.vllm_ports()
        self._published = itertools.count()
        if len(self._vllm_ports) != REPLICAS:
            raise RuntimeError(f"expected {REPLICAS} vLLM servers under midstream, found {self._vllm_ports}")

    def route(self, way: str) -> Route:
        if way in OURS:
            model, asked = self._server.model.directory.name, {"logprobs": True}
            return lambda place, key: Target(self._server.port, model, {"x-session-id": key}, asked)
        turn, count = itertools.count(), len(self._vllm_ports)

        def route(place: int, key: str) -> Target:
            chosen = next(turn) if way == ROUND_ROBIN else hashed(key)
            return Target(self._vllm_ports[chosen % count], INNER_NAME, {}, {"logprobs": 0})

        return route

    def write(self, count: int) -> list[str]:
        """Put full snapshots into the bucket, of other weights by turns; their names."""
        names = []
        for _ in range(count):
            number = next(self._published)
            names.append(f"step-{number}")
            self._publisher.write_full(names[-1], self._directories[number % len(self._directories)])
        return names

    async def run(self, way: str, all_plans: Sequence[Plan], name: str, swaps: int) -> Driven:
        identities = self.write(swaps) if way in POLICIES else []
        serving = self._publisher.snapshots.status().replicas[0].snapshot if way in OURS else None
        order = [serving, *identities] if serving is not None else []
        progress = Progress(sum(map(len, all_plans)))
        swapping = asyncio.create_task(swap(self._publisher, identities, POLICIES.get(way), progress))
        try:
            driven = await drive(all_plans, name, self.route(way), progress, order)
            driven.swaps = await swapping
        finally:
            swapping.cancel()
        return driven

    async def measure(self, way: str, all_plans: Sequence[Plan], name: str, swaps: int) -> dict[str, Any]:
        cores = os.sched_getaffinity(0)
        busy, own, began = busy_s(cores), tree_cpu_s(os.getpid()), time.monotonic()
        driven = await self.run(way, all_plans, name, swaps)
        busy, own = busy_s(cores) - busy, tree_cpu_s(os.getpid()) - own
        others = max(0.0, (busy - own) / (time.monotonic() - began))
        return figures(all_plans, driven) | {"cpu_s": round(own, 2), "others": round(others, 2)}


def possible_cached(all_plans: Sequence[Plan], block: int = BLOCK) -> int:
    """Prompt tokens of later turns that are found when each turn finds what the one before it computed, in whole blocks.

    The last token of an answer was drawn, but never an input.
    """
    total = 0
    for plan in all_plans:
        said = 0
        for turn in plan:
            total += max(0, said - 1) // block * block
            said += turn.added + turn.answer
    return total


def figures(all_plans: Sequence[Plan], driven: Driven) -> dict[str, Any]:
    """Of one run. Raises RuntimeError when no turn was answered."""
    turns, later = driven.turns, [turn for turn in driven.turns if turn.number]
    if not turns:
        raise RuntimeError(f"no turn was answered: {driven.failures[:3]}")
    latencies = sorted(turn.latency_s * 1e3 for turn in turns)
    gaps = sorted(gap * 1e3 for turn in turns for gap in turn.gaps_s)
    cached, prompts = sum(turn.cached for turn in later), sum(turn.prompt for turn in later)
    found: dict[str, Any] = {
        "wall_s": round(driven.wall_s, 2),
        "tokens_per_s": round(sum(len(turn.ids) for turn in turns) / driven.wall_s, 1),
        "turn_ms_p50": round(percentile(latencies, 0.5), 1),
        "turn_ms_p99": round(percentile(latencies, 0.99), 1),
        "cached_share": round(cached / max(1, prompts), 4),
        "cached_of_possible": round(cached / max(1, possible_cached(all_plans)), 4),
        "gap_ms_mean": round(statistics.fmean(gaps), 2) if gaps else 0.0,
        "gap_ms_p50": round(percentile(gaps, 0.5), 2),
        "gap_ms_p99": round(percentile(gaps, 0.99), 2),
        "gap_ms_max": round(percentile(gaps, 1.0), 2),
        "failures": len(driven.failures),
    }
    if driven.failures:
        found["failed"] = driven.failures[:5]
    return found | (swap_figures(turns, driven.swaps) if driven.swaps else {})


def swap_figures(turns: Sequence[Turn], swaps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pauses = [pause for one in swaps for pause in one["pause_ms"]]
    return {
        "pause_ms_p50": round(statistics.median(pauses), 1),
        "pause_ms_max": round(max(pauses), 1),
        "signal_to_ready_s_p50": round(statistics.median(one["signal_to_ready_s"] for one in swaps), 2),
        "signal_to_ready_s_max": max(one["signal_to_ready_s"] for one in swaps),
        "streams_crossed": sum(len(turn.labels) > 1 for turn in turns),
        "tokens_crossed": sum(turn.crossed for turn in turns),
        "swaps": list(swaps),
    }


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, with the least and the most of each figure, and the rounds themselves. Failures are summed."""
    names = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {
        **{name: statistics.median(one[name] for one in rounds) for name in names},
        "failures": sum(one["failures"] for one in rounds),
        "range": {name: [pick(one[name] for one in rounds) for pick in (min, max)] for name in names},
        "rounds": list(rounds),
    }


async def measured(
    bench: Bench, work: Workload, ways: Sequence[str], rounds: int, swaps: int
) -> dict[str, Any]:
    all_plans = plans(work)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    # No measurement.
    for way in ways:
        warmed = await bench.run(way, plans(WARM), f"{os.getpid()}-warm-{ways.index(way)}", min(swaps, 1))
        if warmed.failures:
            raise RuntimeError(f"{way}: {warmed.failures[0]}")
    for number in range(rounds):
        for step in range(len(ways)):
            way = ways[(step + number) % len(ways)]
            name = f"{os.getpid()}-{number}-{ways.index(way)}"
            found[way].append(await bench.measure(way, all_plans, name, swaps))
            say(f"  round {number + 1} of {rounds}, {way}: {shown(found[way][-1])}")
    prompts = sum(turn.prompt for turn in lengths(all_plans))
    return {
        "ways": {way: summary(done) for way, done in found.items()},
        "possible_cached_share": round(possible_cached(all_plans) / max(1, prompts), 4),
    }


def lengths(all_plans: Sequence[Plan]) -> list[Turn]:
    """Later turns as they are asked, without what comes of them."""
    found = []
    for plan in all_plans:
        said = 0
        for number, turn in enumerate(plan):
            if number:
                found.append(Turn(number, said + turn.added, 0, [], [], 0.0, []))
            said += turn.added + turn.answer
    return found


def shown(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in run.items() if isinstance(value, int | float))


def run(folder: Path, work: Workload, ways: Sequence[str], rounds: int, swaps: int) -> dict[str, Any]:
    """Start everything, measure, end it."""
    directories = [folder / f"seed-{seed}" for seed in (1, 2)]
    for seed, directory in enumerate(directories, start=1):
        write_tiny_moe(directory, seed=seed)
    model = Model("rollout", folder / "m", vocabulary=256, threads=1, vllm_cores="", kv_gib=KV_GIB)
    write_tiny_moe(model.directory)
    env = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CACHE_ROOT": str(folder / "vllm-cache")}
    say(f"rollout: starting midstream with {REPLICAS} vLLM servers")
    with OverVllm(model, folder, replicas=REPLICAS, args=ARGS, env=env) as server:
        assert isinstance(server, OverVllm)
        say(f"  ready after {server.startup_s:.0f} s")
        bucket = (server.state / "bucket").as_uri()
        with SnapshotPublisher(f"http://127.0.0.1:{server.port}", bucket) as publisher:
            bench = Bench(server, publisher, directories)
            result = asyncio.run(measured(bench, work, ways, rounds, swaps))
        about = {
            **server.configuration(),
            "VLLM_CPU_OMP_THREADS_BIND": "one core per replica, by midstream",
            "startup_s": round(server.startup_s, 1),
        }
    return {"about": about, "block": BLOCK, "swaps": swaps, **result}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
