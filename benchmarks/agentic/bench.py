"""Agents' trajectories through midstream and other routers, before the same replicas, whose KV caches are small.

Owns: `make bench-agents`. All trajectories of a trace (agentic/trace.py) begin at once on four embedded replicas of tiny-moe,
once per way and round, in another order each round. Keys of sessions are never the same twice: a session that was closed
shares nothing when it comes again. The KV caches of all replicas together hold a share of what the trajectories have live at
most. A last part does it with three swaps and a replica killed in the middle. Reported per way:
    wall_s            from the first request to the last answer; trajectory_s: how long trajectories took, all begun at once
    cached_tokens     prompt tokens that were found; prefill_tokens: those that were computed; over_ideal: over each token once
    evicted_tokens    of those computed: the replica had had them (agentic/books.py); again_tokens: another one had had them
    preemptions       of running sequences, where the replicas count them
    load_tokens       tokens computed by the busiest replica over the mean
    idle_core_s       what the cores did not work in that time

    python -m agentic.bench [--trace FILE] [--rounds 5] [--kv 0.6 1 2] [--ways NAME...] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.routers import RouterFailed
from gateway.tools import busy_s, tree_cpu_s
from hardware import provenance, write_result
from loadgen import percentile
from rollout import max_over_mean, say, summary
from rollout_load import BLOCK, TurnFailed, session_key
from vllm_turns import Progress, swap_points

from agentic.books import Served, split, total
from agentic.fleet import OURS, REPLICAS, THROUGH_GATEWAY, WAYS, Fleet
from agentic.load import Client, Content, Run
from agentic.table import write_documents
from agentic.trace import Trace, first_groups, ideal_prefill, live_tokens, read, scaled
from midstream.client import SnapshotPublisher

TRACES = Path(__file__).parent / "traces"
#: Of the recorded lengths and waits. With longer waits or fewer trajectories, the waits of one trajectory are the
#: wall time of all ways, which then says nothing of them.
TOKENS_SCALE, SECONDS_SCALE = 1 / 48, 0.03
GROUPS, STREAMS = 16, 6
KV_SHARES = (0.6, 1.0, 2.0)
DISTURBED_SHARE = 1.0
SWAPS = 3
#: Longer than a run, which must not have the imports of the next spare process in it.
SPARE_AFTER_S = 30
#: A counter that replicas may not have yet.
PREEMPTIONS = "preemptions_total"
RunFigures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What every way does in every run."""

    trace: Trace
    disturbed: bool = False


class Bench:
    """Runs on one fleet."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet = fleet
        bucket = fleet.server.log.with_suffix("") / "state" / "bucket"
        self._publisher = SnapshotPublisher(f"http://127.0.0.1:{fleet.server.port}", bucket.as_uri())
        self._weights = folder / "m"
        self._published = itertools.count()
        self.about: dict[str, dict[str, str]] = {}

    async def measure(self, way: str, work: Work, name: str) -> RunFigures:
        """name: of the round. Raises RouterFailed or TurnFailed."""
        keys = f"{name}-{WAYS.index(way)}"
        if work.disturbed:
            await self._fleet.spare_waits()
        async with self._fleet.way(way) as (port, router):
            if router is not None:
                self.about[way] = {"version": router.version(), "command": router.configuration()["command"]}
            # Its probes are over.
            before = await self._fleet.counts()
            cores = os.sched_getaffinity(0)
            busy, ours, began = busy_s(cores), tree_cpu_s(os.getpid()), time.monotonic()
            run = await self._driven(way, port, work, keys)
            took = time.monotonic() - began
            busy, ours = busy_s(cores) - busy, tree_cpu_s(os.getpid()) - ours
        found = figures(work.trace, run)
        found["idle_core_s"] = round(max(0.0, len(cores) * took - busy), 2)
        # What a killed replica used and counted is gone with it.
        if not work.disturbed:
            found |= await self._confirmed(before, run)
            found["others"] = round(max(0.0, busy - ours) / took, 2)
        if way not in THROUGH_GATEWAY:
            places = range(len(work.trace.trajectories))
            await self._fleet.close_sessions(session_key(keys, place) for place in places)
        return found

    async def _driven(self, way: str, port: int, work: Work, keys: str) -> Run:
        content = Content(work.trace, keys)
        progress = Progress(sum(len(one.out_lens) for one in work.trace.trajectories))
        ended = self._fleet.close_session if way in THROUGH_GATEWAY else None
        client = Client(work.trace, content, port, keys, progress, ended)
        if not work.disturbed:
            return await client.drive()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._fleet.follow())
            disturbing = group.create_task(self._disturb(progress, client.run))
            try:
                run = await client.drive()
                await disturbing
            finally:
                following.cancel()
        return run

    async def _disturb(self, progress: Progress, run: Run) -> None:
        """Three swaps, and a replica killed right behind the signal of the second one."""
        points = swap_points(progress.total, SWAPS)
        names = [f"step-{next(self._published)}" for _ in points]
        for number, (name, point) in enumerate(zip(names, points, strict=True)):
            await asyncio.to_thread(self._publisher.write_full, name, self._weights)
            await progress.reached(point)
            await asyncio.to_thread(self._publisher.snapshots.signal, name, "new_session")
            if number == SWAPS // 2:
                run.lost.append((self._fleet.kill_one(), time.perf_counter()))
        await asyncio.to_thread(self._publisher.snapshots.wait_until_ready, names[-1])

    async def _confirmed(self, before: dict[str, dict[str, float]], run: Run) -> RunFigures:
        """What replicas count beside it. Raises RuntimeError when they count other tokens than the client."""

        def drawn(counts: dict[str, dict[str, float]], name: str) -> float:
            return sum(one.get(name, 0.0) for one in counts.values())

        answers = sum(turn.answer for turn in run.turns)
        after = await self._fleet.counts(drawn(before, "generated_tokens_total") + answers)
        names = ("prompt_tokens_total", "cached_prompt_tokens_total")
        counted = [drawn(after, name) - drawn(before, name) for name in names]
        ours = [sum(turn.prompt for turn in run.turns), sum(turn.cached for turn in run.turns)]
        if counted != ours:
            raise RuntimeError(f"replicas count {counted} prompt and cached tokens, the client {ours}")
        if not any(PREEMPTIONS in one for one in after.values()):
            return {}
        return {"preemptions": drawn(after, PREEMPTIONS) - drawn(before, PREEMPTIONS)}

    def close(self) -> None:
        self._publisher.close()


def figures(trace: Trace, run: Run) -> RunFigures:
    books = total(split(trace, run.turns, BLOCK, run.lost))
    times = sorted(over - run.began_s for over in run.over_s.values())
    return {
        "wall_s": round(run.wall_s, 2),
        "cached_tokens": books.cached,
        "cached_share": round(books.cached / books.prompt, 4),
        "prefill_tokens": books.computed,
        "over_ideal": round(books.computed / ideal_prefill(trace), 3),
        "first_tokens": books.first,
        "again_tokens": books.again,
        "evicted_tokens": books.evicted,
        "load_tokens": max_over_mean(_computed(run.turns)),
        **{f"trajectory_s_p{share}": round(percentile(times, share / 100), 2) for share in (50, 90)},
        "trajectory_s_max": round(times[-1], 2),
        "sent_again": sum(run.again.values()),
        "reasons": run.again,
        "moves": _moves(run.turns),
        "replicas": {name: len([t for t in run.turns if t.replica == name]) for name in _names(run.turns)},
    }


def _names(turns: Sequence[Served]) -> list[str]:
    return sorted({turn.replica for turn in turns})


def _computed(turns: Sequence[Served]) -> list[float]:
    """Tokens that each replica computed, prompts' and drawn ones; nothing by one that got no turn."""
    computed = dict.fromkeys(_names(turns), 0.0)
    for turn in turns:
        computed[turn.replica] += turn.prompt - turn.cached + turn.answer
    return [*computed.values(), *[0.0] * (REPLICAS - len(computed))]


def _moves(turns: Sequence[Served]) -> int:
    """Turns on another replica than the trajectory's turn before."""
    last: dict[int, str] = {}
    moves = 0
    for turn in sorted(turns, key=lambda one: one.began_s):
        moves += last.get(turn.place, turn.replica) != turn.replica
        last[turn.place] = turn.replica
    return moves


async def rounds_of(
    benches: dict[bool, Bench], work: Work, ways: Sequence[str], rounds: int, about: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Summaries of the ways, and why others are absent: those that failed once. benches: with and without the budget."""
    found: dict[str, list[RunFigures]] = {way: [] for way in ways}
    absent: dict[str, str] = {}

    async def measured(way: str, asked: Work, name: str) -> RunFigures | None:
        if way in absent:
            return None
        try:
            return await benches[way == OURS].measure(way, asked, name)
        except (RouterFailed, TurnFailed) as failed:
            if way in THROUGH_GATEWAY:
                raise
            absent[way] = f"{about}: {failed}"
            say(f"{way} is left out: {failed}")
            return None

    warm = Work(scaled(first_groups(work.trace, 2, 1), 1.0, 0.0))
    for way in ways:
        await measured(way, warm, f"{os.getpid()}-{about}-warm")
    for number in range(rounds):
        for step in range(len(ways)):
            way = ways[(step + number) % len(ways)]
            if (one := await measured(way, work, f"{os.getpid()}-{about}-{number}")) is not None:
                found[way].append(one)
                say(f"{about}, round {number + 1} of {rounds}, {way}: {one}")
    return {way: summary(found[way]) for way in ways if way not in absent}, absent


async def run(
    trace: Trace, ways: Sequence[str], rounds: int, shares: Sequence[float], disturbed: bool, folder: Path
) -> dict[str, Any]:
    live = live_tokens(trace)
    parts = [(f"{share:g}", share, False) for share in shares]
    parts += [("disturbed", DISTURBED_SHARE, True)] if disturbed else []
    result: dict[str, Any] = {"parts": {}, "absent": {}, "routers": {}}
    for name, share, with_swaps in parts:
        place = folder / name
        place.mkdir()
        tokens = int(share * live / REPLICAS) // BLOCK * BLOCK
        if tokens < (longest := max(one.lengths[-1] for one in trace.trajectories)):
            raise SystemExit(
                f"--kv {share:g}: a replica holds {tokens} tokens, but a trajectory has {longest}"
            )
        async with contextlib.AsyncExitStack() as stack:
            benches = {}
            for has_budget in (True, False):
                (own := place / f"budget-{has_budget}").mkdir()
                spare_after_s = SPARE_AFTER_S if with_swaps else 0
                made = Fleet(own, tokens, has_budget=has_budget, spare_after_s=spare_after_s)
                fleet = await stack.enter_async_context(made)
                benches[has_budget] = stack.enter_context(contextlib.closing(Bench(fleet, own)))
            found, absent = await rounds_of(benches, Work(trace, with_swaps), ways, rounds, name)
            result["absent"] |= absent
            result["routers"] |= benches[False].about
        result["parts"][name] = {"share": share, "kv_cache_tokens": tokens, "ways": found}
    return result | {"live_tokens": live, "ideal_prefill_tokens": ideal_prefill(trace)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=TRACES / "coding.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens-scale", type=float, default=TOKENS_SCALE)
    parser.add_argument(
        "--kv", nargs="*", type=float, default=list(KV_SHARES), help="shares of the live tokens"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--no-disturbed", action="store_true", help="no part with swaps and a killed replica")
    parser.add_argument("--quick", action="store_true", help="one round at 60 %%, undisturbed")
    parser.add_argument("--write", action="store_true", help="results/agents.json and docs/benchmarks.md")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.kv, args.no_disturbed = 1, [0.6], True
    return args


def main() -> None:
    args = arguments()
    if not args.kv and args.no_disturbed:
        raise SystemExit("nothing to do: --kv names no share, and --no-disturbed leaves out the other part")
    recorded = first_groups(read(args.trace), args.groups, args.streams)
    trace = scaled(recorded, args.tokens_scale, SECONDS_SCALE)
    turns = sum(len(one.out_lens) for one in trace.trajectories)
    result = provenance(
        trace=args.trace.name,
        about=trace.about,
        groups=args.groups,
        streams=args.streams,
        turns=turns,
        tokens_scale=round(args.tokens_scale, 5),
        seconds_scale=SECONDS_SCALE,
        replicas=REPLICAS,
        engine_threads=1,
        block=BLOCK,
        rounds=args.rounds,
    )
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        ways, disturbed = args.ways, not args.no_disturbed
        result |= asyncio.run(run(trace, ways, args.rounds, args.kv, disturbed, Path(folder)))
    if args.write:
        write_result("agents", result)
        write_documents(result)
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
