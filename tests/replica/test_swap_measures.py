"""What a replica counts and measures of its swaps, in the numbers that a gateway is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from replica_fakes import DEPLOYMENT, FakeEngine, FakeSource, make_replica

from midstream.core.measures import SWAP_STAGES
from midstream.core.tracing import trace_of_signal
from midstream.core.types import Desired, Stage
from midstream.launch.tracing import OtelTracer
from midstream.replica.replica import Replica


def desired(snapshot: str, generation: int) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}")


async def until(replica: Replica, outcome: str, count: int) -> None:
    async with asyncio.timeout(120):
        while replica.sessions.measures.counts["swaps"][outcome] < count:
            await replica.changed(1.0)


def told(replica: Replica) -> dict[str, tuple[int, float]]:
    measures = replica.sessions.measures.measures
    return {name: (sum(one.counts), one.sum) for name, one in measures.items()}


def test_each_outcome_is_counted_and_a_stage_that_did_not_end_is_not_measured(tmp_path: Path) -> None:
    async def main() -> None:
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
        stages = sum(found[f"swap_{stage}_seconds"][1] for stage in SWAP_STAGES)
        assert stages >= found["swap_seconds"][1] > 0

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

    asyncio.run(main())
