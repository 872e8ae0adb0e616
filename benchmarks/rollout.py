"""What routing does for trajectories of many turns: the same replicas under several ways to choose one for each turn.

Owns: `make bench-rollout`. 64 trajectories of 8 turns start at once on four embedded replicas (tiny-moe, one thread each), once
per way and round, in another order each round; each run has session keys and random prompts of its own. The ways:
    affinity         midstream's gateway, the trajectory's key in X-Session-ID
    no keys          midstream's gateway without a key: it follows prompts it knows
    round robin      the client takes the replicas in turn: no router, so this way costs no CPU time
    plain hash       the client takes hash(key) modulo the number of replicas: likewise
    vllm-router      its consistent_hash, the key in X-Session-ID
Reported per way:
    prefill          prompt tokens computed (prompt_tokens - cached_tokens of the usage, which the replicas' own counters must
                     confirm) over the ideal: every token of a trajectory once; and over the ideal in whole blocks
    turn_ms          p50 and p99 of a turn, from the request's first byte to the response's last
    load             the busiest replica over the mean: of turns, of tokens computed (prefill and new), and of requests in
                     flight (time that its turns took, summed, over the wall time: the mean over time)
    wall_s           from the first request to the last answer

    python rollout.py [--rounds 5] [--trajectories 64] [--turns 8] [--ways NAME...] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.tools import busy_s
from hardware import provenance, write_result
from loadgen import percentile
from rollout_fleet import REPLICAS, Fleet, Work
from rollout_load import (
    BLOCK,
    Driven,
    Plan,
    Route,
    TurnFailed,
    Workload,
    drive,
    ideal_prefill,
    plans,
    session_key,
)
from rollout_table import write_table

AFFINITY, NO_KEYS, ROUND_ROBIN, HASH, PEER = "affinity", "no keys", "round robin", "plain hash", "vllm-router"
WAYS = (AFFINITY, NO_KEYS, ROUND_ROBIN, HASH, PEER)
SESSION_HEADER = "x-session-id"
# Of each replica, the default.
KV_CACHE_TOKENS = 65536
WARM = Workload(trajectories=8, turns=2)


def route(way: str, fleet: Fleet) -> Route:
    """Where turns go. Raises TurnFailed when there is no vllm-router."""
    turn = itertools.count()
    ports, router = fleet.replica_ports, fleet.router_port
    ways: dict[str, Route] = {
        AFFINITY: lambda place, key: (fleet.port, {SESSION_HEADER: key}),
        NO_KEYS: lambda place, key: (fleet.port, {}),
        ROUND_ROBIN: lambda place, key: (ports[next(turn) % len(ports)], {}),
        HASH: lambda place, key: (ports[hashed(key) % len(ports)], {}),
    }
    if way not in ways:
        if router is None:
            raise TurnFailed(fleet.absent)
        return lambda place, key: (router, {SESSION_HEADER: key})
    return ways[way]


def hashed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


async def driven_by(fleet: Fleet, way: str, all_plans: Sequence[Plan], run: str) -> tuple[Driven, list[Work]]:
    driven = await drive(all_plans, run, route(way, fleet))
    return driven, await fleet.after(len(driven.turns), sum(turn.answer for turn in driven.turns))


async def warm(fleet: Fleet, way: str) -> None:
    await driven_by(fleet, way, plans(WARM), run_name(way, -1))


def run_name(way: str, number: int) -> str:
    """Other ones in each run of this script: keys decide where hashes fall."""
    return f"{os.getpid()}-{number}-{way.replace(' ', '-')}"


async def measure(fleet: Fleet, way: str, all_plans: Sequence[Plan], run: str) -> dict[str, Any]:
    """One run: its figures. Raises RuntimeError when client and replicas disagree about what was computed."""
    cores = os.sched_getaffinity(0)
    busy, ours, started = busy_s(cores), fleet.cpu_s(), time.monotonic()
    driven, work = await driven_by(fleet, way, all_plans, run)
    busy, ours = busy_s(cores) - busy, fleet.cpu_s() - ours
    others = max(0.0, (busy - ours) / (time.monotonic() - started))
    if way == AFFINITY:
        await fleet.close_sessions(session_key(run, place) for place in range(len(all_plans)))
    return figures(all_plans, driven, work) | {
        "cpu_s": round(ours, 2),
        "others": round(others, 2),
    }


def figures(all_plans: Sequence[Plan], driven: Driven, work: Sequence[Work]) -> dict[str, Any]:
    prefill = sum(turn.prompt - turn.cached for turn in driven.turns)
    told = sum(one.prompt - one.cached for one in work)
    if prefill != told:
        raise RuntimeError(f"by the usage {prefill} prompt tokens were computed, by the replicas {told}")
    latencies = sorted(turn.latency_s * 1e3 for turn in driven.turns)
    return {
        "prefill_tokens": prefill,
        "over_ideal": round(prefill / ideal_prefill(all_plans), 4),
        "over_block_ideal": round(prefill / ideal_prefill(all_plans, BLOCK), 4),
        "turn_ms_p50": round(percentile(latencies, 0.5), 1),
        "turn_ms_p99": round(percentile(latencies, 0.99), 1),
        "load_turns": max_over_mean([one.turns for one in work]),
        "load_tokens": max_over_mean([one.computed for one in work]),
        "load_in_flight": max_over_mean([one.busy_s for one in work]),
        "wall_s": round(driven.wall_s, 2),
        "turns": [one.turns for one in work],
    }


def max_over_mean(loads: Sequence[float]) -> float:
    return round(max(loads) / statistics.fmean(loads), 3)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, with the least and the most of each figure, and the rounds themselves."""
    names = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {
        **{name: statistics.median(one[name] for one in rounds) for name in names},
        "range": {name: [pick(one[name] for one in rounds) for pick in (min, max)] for name in names},
        "rounds": list(rounds),
    }


async def run(workload: Workload, ways: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    all_plans = plans(workload)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    absent: dict[str, str] = {}
    async with Fleet(folder, KV_CACHE_TOKENS) as fleet:
        # No measurement.
        for way in ways:
            try:
                await warm(fleet, way)
            except TurnFailed as failed:
                if way != PEER:
                    raise
                absent[PEER] = str(failed)
        here = [way for way in ways if way not in absent]
        for number in range(rounds):
            for step in range(len(here)):
                way = here[(step + number) % len(here)]
                found[way].append(await measure(fleet, way, all_plans, run_name(way, number)))
                say(f"round {number + 1} of {rounds}, {way}: {found[way][-1]}")
        about = fleet.router_about()
    return {
        "ways": {way: summary(found[way]) for way in ways if found[way]},
        "absent": absent,
        "vllm_router": about,
        "ideal_prefill_tokens": ideal_prefill(all_plans),
        "ideal_prefill_tokens_in_blocks": ideal_prefill(all_plans, BLOCK),
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="one round of 16 trajectories with 4 turns")
    parser.add_argument("--write", action="store_true", help="results/rollout.json and docs/benchmarks.md")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.trajectories, args.turns = 1, 16, 4
    return args


def main() -> None:
    args = arguments()
    workload = Workload(trajectories=args.trajectories, turns=args.turns)
    result = provenance(
        replicas=REPLICAS,
        engine_threads=1,
        kv_cache_tokens=KV_CACHE_TOKENS,
        block=BLOCK,
        rounds=args.rounds,
        **asdict(workload),
    )
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        result |= asyncio.run(run(workload, args.ways, args.rounds, Path(folder)))
    if args.write:
        write_result("rollout", result)
        write_table(result)
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
