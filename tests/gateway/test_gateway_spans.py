"""The gateway's spans, in memory: one for each request for inference, whatever becomes of it."""

from __future__ import annotations

import pytest
from gateway_harness import Message, Peer, Stage, get, post, respond_ok, staged
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from session_holders import until

from midstream.core.tracing import SpanRecord
from midstream.launch.tracing import OtelTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(stage: Stage) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    stage.gateway.proxy.tracer = OtelTracer(exporter, "gateway", at_once=True)
    return exporter


async def ended(exporter: InMemorySpanExporter) -> ReadableSpan:
    await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    return span


def parent_of(request: Message) -> tuple[int, int]:
    version, trace, span, flags = request.headers["traceparent"].split("-")
    # Sampled. A further bit may say that the id is random.
    assert (version, int(flags, 16) & 1) == ("00", 1)
    return int(trace, 16), int(span, 16)


async def test_a_replica_is_sent_the_span_and_not_its_clients() -> None:
    async with staged(respond_ok) as stage:
        exporter = traced(stage)
        headers = f"traceparent: {PARENT}\r\ntracestate: vendor=1\r\nx-session-id: s\r\n"
        assert (await stage.ask(post(headers=headers))).status == 200
        span = await ended(exporter)
        assert (span.name, span.kind) == ("POST /v1/completions", SpanKind.SERVER)
        assert span.parent is not None
        assert span.context is not None
        assert f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01" == PARENT
        (request,) = stage.mocks[0].requests
        assert parent_of(request) == (span.parent.trace_id, span.context.span_id)
        assert request.headers["tracestate"] == "vendor=1"
        assert span.attributes == {
            "http.request.method": "POST",
            "url.path": "/v1/completions",
            "http.response.status_code": 200,
            "midstream.sends": 1,
            "midstream.deployment": "accounts/local/deployments/default",
            "gen_ai.request.model": "accounts/local/models/tiny-moe",
            "midstream.session": "s",
            "midstream.replica": "replica-0",
            "midstream.route_reason": "new",
        }


@pytest.mark.parametrize("given", ["", "traceparent: 00-0-0-01\r\n", "traceparent: \xff\r\n"])
async def test_a_request_without_a_valid_parent_begins_a_trace(given: str) -> None:
    async with staged(respond_ok) as stage:
        exporter = traced(stage)
        await stage.ask(post(headers=given))
        span = await ended(exporter)
        assert span.parent is None
        assert span.context is not None
        assert parent_of(stage.mocks[0].requests[0]) == (span.context.trace_id, span.context.span_id)


async def test_both_replicas_of_a_request_that_is_sent_again_continue_one_span() -> None:
    async def dies(request: Message, peer: Peer) -> None:
        peer.abort()

    async with staged(dies, dies) as stage:
        exporter = traced(stage)
        answer = await stage.ask(post())
        span = await ended(exporter)
        assert span.attributes is not None
        assert span.context is not None
        assert span.attributes["http.response.status_code"] == answer.status
        asked = [request for mock in stage.mocks for request in mock.requests]
        assert len(asked) == span.attributes["midstream.sends"] == 2
        assert {parent_of(request)[1] for request in asked} == {span.context.span_id}
        assert [event.name for event in span.events] == ["sent", "sent"]


async def _streams(request: Message, peer: Peer) -> None:
    peer.start_stream()
    peer.chunk(b"data: 1\n\n")
    await peer.writer.drain()
    if request.body == b"dies":
        peer.writer.close()


@pytest.mark.parametrize(("body", "why"), [(b"dies", "cut short"), (b"goes on", "the client left")])
async def test_a_response_that_is_not_whole_is_an_error(body: bytes, why: str) -> None:
    async with staged(_streams) as stage:
        exporter = traced(stage)
        client = await stage.connect()
        client.send(post(body))
        await client.reader.readuntil(b"data: 1\n\n")
        if body == b"goes on":
            client.abort()
        span = await ended(exporter)
        assert span.status.description == why
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == 200


async def test_a_client_that_left_before_the_response_and_control_calls() -> None:
    async def silent(request: Message, peer: Peer) -> None:
        pass

    async with staged(silent) as stage:
        exporter = traced(stage)
        assert (await stage.ask(get("/v1/models"))).status == 200
        client = await stage.connect()
        client.send(post())
        await until(lambda: bool(stage.mocks[0].requests))
        client.abort()
        # The control call has none.
        span = await ended(exporter)
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == 499


async def test_without_a_tracer_a_clients_context_passes_as_it_came() -> None:
    async with staged(respond_ok) as stage:
        await stage.ask(post(headers=f"traceparent: {PARENT}\r\n"))
        assert stage.mocks[0].requests[0].headers["traceparent"] == PARENT


def test_an_attribute_that_utf_8_does_not_take_is_escaped() -> None:
    """Otherwise its whole batch could not be encoded."""
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(exporter, "gateway", at_once=True)
    tracer.record(SpanRecord("one", 1.0, 2.5, {"key": "a\ud800", "list": ("\udfff", "b")}, error="\ud800"))
    (span,) = exporter.get_finished_spans()
    assert span.attributes == {"key": "a\\ud800", "list": ("\\udfff", "b")}
    assert span.status.description == "\\ud800"
    assert (span.start_time, span.end_time) == (1_000_000_000, 2_500_000_000)
