"""A replica's spans of requests, in memory: what was measured, and how a request ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from replica_fakes import DEPLOYMENT, MODEL, FakeEngine, running

from midstream.launch.tracing import OtelTracer

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
BODY = {"model": MODEL, "prompt": "a private prompt", "max_tokens": 5}


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_spans_are_what_the_response_says_and_an_error_is_its_code(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with running(tmp_path, FakeEngine()) as here:
        here.replica.tracer = OtelTracer(exporter, "replica-0", at_once=True)
        answer = await here.http.post("/v1/completions", json=BODY, headers=PARENT)
        usage = answer.json()["usage"]
        spans = by_name(exporter)
        assert set(spans) == {"replica completions", "admit", "engine", "queue", "prefill", "decode"}
        said = told(spans["replica completions"])
        assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
        assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert said["gen_ai.response.finish_reasons"] == ("length",)
        assert (said["midstream.deployment"], said["midstream.snapshots"]) == (DEPLOYMENT, ("base",))
        parent = spans["replica completions"].parent
        assert parent is not None
        assert f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01" == PARENT["traceparent"]

        exporter.clear()
        wrong = {**BODY, "no_such_field": "a private value"}
        assert (await here.http.post("/v1/completions", json=wrong)).status_code == 400
        (span,) = exporter.get_finished_spans()
        assert told(span)["http.response.status_code"] == 400
        assert span.status.description == "invalid_request_error"


async def test_a_client_that_leaves_has_a_span_with_what_it_got(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        here.replica.tracer = OtelTracer(exporter, "replica-0", at_once=True)
        async with here.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = stream.aiter_lines()
            while '"text"' not in await anext(lines):
                pass
        async with asyncio.timeout(120):
            while "replica completions" not in by_name(exporter):
                await here.replica.changed(0.05)
        span = by_name(exporter)["replica completions"]
        said = told(span)
        assert said["http.response.status_code"] == 499
        assert said["gen_ai.response.finish_reasons"] == ("abort",)
        assert 1 <= said["gen_ai.usage.output_tokens"] <= 2
        assert span.status.description == "client_left"
        assert here.replica.sessions.measures.counts["finishes"]["abort"] == 1


async def test_a_tracer_that_fails_costs_no_request_and_no_swap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no span can be made")

    async with running(tmp_path, FakeEngine()) as here:
        tracer = here.replica.tracer = OtelTracer(InMemorySpanExporter(), "replica-0", at_once=True)
        tracer._record = broken  # type: ignore[method-assign]
        for _ in range(2):
            answer = await here.http.post("/v1/completions", json=BODY, headers=PARENT)
            assert answer.json()["usage"]["completion_tokens"] == 5
        tracer.finish = broken  # type: ignore[method-assign]
        tracer.begin("POST", {}).end({})
    assert caplog.text.count("is lost") == 3
