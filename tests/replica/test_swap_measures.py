"""What a replica counts and measures of its swaps, in the numbers that a gateway is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from replica_fakes import DEPLOYMENT, FakeEngine, FakeSource, make_replica

from midstream.core.measures import SWAP_STAGES
from midstream.core.tracing import trace_of_signal
from midstream.core.types import (
    CompressionFormat,
    Desired,
    GenerateRequest,
    GenerationEvent,
    Stage,
    SwapTiming,
)
from midstream.launch.tracing import OtelTracer
from midstream.replica.replica import Replica
from midstream.snapshots.arc2.files import Making

#: Of each stage. Any two sums of some of them differ. A held swap waits for HOLD_S.
FETCH_S, REBUILD_S, VERIFY_S, STAGE_S, HOLD_S, COMMIT_S, CHECK_S = (2.0**n for n in range(7))


class Clock:
    """Stands still, except for what `passes` adds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


class TimedSource(FakeSource):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    async def fetch(
        self, desired: Desired, *, refetch: bool = False, making: Making | None = None
    ) -> Path | None:
        self.clock.passes(FETCH_S)
        return await super().fetch(desired, refetch=refetch, making=making)

    async def rebuild(self, desired: Desired, making: Making | None = None) -> Path:
        self.clock.passes(REBUILD_S)
        return await super().rebuild(desired, making)

    async def verify(self, path: Path, desired: Desired) -> None:
        self.clock.passes(VERIFY_S)
        await super().verify(path, desired)


class TimedEngine(FakeEngine):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    async def stage(self, snapshot: str, directory: Path) -> None:
        self.clock.passes(STAGE_S)
        await super().stage(snapshot, directory)

    async def commit(self, snapshot: str) -> SwapTiming:
        self.clock.passes(COMMIT_S)
        return await super().commit(snapshot)

    async def _score(self, request: GenerateRequest) -> GenerationEvent:
        self.clock.passes(CHECK_S)
        return await super()._score(request)


def desired(
    snapshot: str, generation: int, *, compression: CompressionFormat | None = None, hold: bool = False
) -> Desired:
    return Desired(
        snapshot=snapshot,
        generation=generation,
        url=f"file:///b/{snapshot}",
        compression=compression,
        hold=hold,
    )


async def until(replica: Replica, outcome: str, count: int) -> None:
    async with asyncio.timeout(120):
        while replica.sessions.measures.counts["swaps"][outcome] < count:
            await replica.changed(1.0)


def told(replica: Replica) -> dict[str, tuple[int, float]]:
    measures = replica.sessions.measures.measures
    return {name: (sum(one.counts), one.sum) for name, one in measures.items()}


async def test_each_outcome_is_counted_and_a_stage_that_did_not_end_is_not_measured(tmp_path: Path) -> None:
    source, exporter = FakeSource(), InMemorySpanExporter()
    replica = make_replica(tmp_path, FakeEngine(), source)
    replica.tracer = OtelTracer(exporter, "replica-0", at_once=True)
    await replica.start()
    replica.desire(desired("v1", 1))
    await until(replica, "ready", 1)
    source.corrupt = {"v2"}
    source.blocked = {"v3"}
    replica.desire(desired("v2", 2))
    await until(replica, "failed", 1)
    assert replica.report().own.stage is Stage.ERROR
    source.fetching.clear()
    replica.desire(desired("v3", 3))
    await source.fetching.wait()
    replica.desire(desired("v4", 4))
    await until(replica, "ready", 2)
    assert replica.sessions.measures.counts["swaps"] == {
        "ready": 2,
        "unchanged": 0,
        "failed": 1,
        "superseded": 1,
        "stopped": 0,
    }
    found = told(replica)
    ended = {stage: found[f"swap_{stage}_seconds"][0] for stage in SWAP_STAGES}
    assert ended == {
        "fetch": 3, "rebuild": 0, "verify": 2, "stage": 2, "hold": 2, "commit": 2, "check": 2,
    }  # fmt: skip
    assert {name: found[name][0] for name in ("swap_seconds", "swap_pause_seconds")} == {
        "swap_seconds": 2, "swap_pause_seconds": 2,
    }  # fmt: skip
    swaps = [span for span in exporter.get_finished_spans() if span.name == "swap"]
    assert [int(trace_of_signal(DEPLOYMENT, desired(f"v{n}", n)).hex(), 16) for n in (1, 2, 3, 4)] == [
        span.context.trace_id for span in swaps if span.context is not None
    ]
    assert [(span.attributes or {})["midstream.outcome"] for span in swaps] == [
        "ready",
        "failed",
        "superseded",
        "ready",
    ]
    assert [span.status.description for span in swaps] == [
        None,
        "v2: checksum of a.weight differs",
        None,
        None,
    ]
    await replica.close()


async def test_every_second_of_a_swap_lies_in_the_stage_that_took_it(tmp_path: Path) -> None:
    clock = Clock()
    source = TimedSource(clock)
    replica = make_replica(tmp_path, TimedEngine(clock), source, monotonic=clock)
    await replica.start()
    source.blocked, source.corrupt = {"v1"}, {"v2"}
    replica.desire(desired("v1", 1))
    await source.fetching.wait()
    replica.desire(desired("v2", 2))
    await until(replica, "failed", 1)
    before = told(replica)

    delta = desired("v3", 3, compression="arc_v2", hold=True)
    replica.desire(delta)
    async with asyncio.timeout(120):
        while replica.report().own.stage is not Stage.STAGED:
            await replica.changed(1.0)
    clock.passes(HOLD_S)
    replica.desire(desired("v3", 3, compression="arc_v2"))
    await until(replica, "ready", 1)

    assert {stage: before[f"swap_{stage}_seconds"] for stage in SWAP_STAGES} == {
        "fetch": (1, FETCH_S), "rebuild": (0, 0.0), "verify": (0, 0.0), "stage": (0, 0.0),
        "hold": (0, 0.0), "commit": (0, 0.0), "check": (0, 0.0),
    }, "a stage that did not end was measured"  # fmt: skip
    took = {
        stage: told(replica)[f"swap_{stage}_seconds"][1] - before[f"swap_{stage}_seconds"][1]
        for stage in SWAP_STAGES
    }
    assert took == {
        "fetch": FETCH_S, "rebuild": REBUILD_S, "verify": VERIFY_S, "stage": STAGE_S,
        "hold": HOLD_S, "commit": COMMIT_S, "check": CHECK_S,
    }  # fmt: skip
    assert before["swap_seconds"] == (0, 0.0)
    assert told(replica)["swap_seconds"] == (1, sum(took.values()))
    [swap] = replica.report().own.swaps
    reported = (swap.fetch_ms, swap.rebuild_ms, swap.verify_ms, swap.stage_ms, swap.check_ms)
    assert reported == pytest.approx(
        [1e3 * seconds for seconds in (FETCH_S, REBUILD_S, VERIFY_S, STAGE_S, CHECK_S)]
    )
    await replica.close()
