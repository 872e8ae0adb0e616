"""A real server that exports spans to a real collector: one tree per request over processes, one trace per signal."""

from __future__ import annotations

import http.server
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import Server, serve

from midstream.client import SnapshotPublisher

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a very private prompt"


@dataclass
class Span:
    process: str
    name: str
    trace: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    error: str | None


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self._received: list[Span] = []
        self.bodies: list[bytes] = []
        taken = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                taken.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _values(resource.resource.attributes)
            assert about["service.name"] == "midstream"
            for scope in resource.scope_spans:
                self._received += [_span(about["midstream.process"], one) for one in scope.spans]

    def until(self, wanted: Callable[[Span], bool], count: int) -> list[Span]:
        deadline = time.monotonic() + 150
        while len(found := [span for span in list(self._received) if wanted(span)]) < count:
            assert time.monotonic() < deadline, [(span.process, span.name) for span in self._received]
            time.sleep(0.05)
        assert len(found) == count
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _span(process: str, one: Any) -> Span:
    times = one.start_time_unix_nano, one.end_time_unix_nano
    events = [(event.name, _values(event.attributes)) for event in one.events]
    ids = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
    error = one.status.message if one.status.code == 2 else None
    return Span(process, one.name, *ids, *times, _values(one.attributes), events, error)


def _values(attributes: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(one) for one in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {one.key: value(one.value) for one in attributes}


# Tests of replicas and gateways show the spans of each.
pytestmark = pytest.mark.variant


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with closing(Collector()) as made:
        yield made


@contextmanager
def exporting(folder: Path, endpoint: str, *options: str) -> Iterator[Server]:
    config = folder / "config.toml"
    config.write_text(f'[tracing]\nendpoint = "{endpoint}"\n')
    with pytest.MonkeyPatch.context() as environment:
        # Milliseconds; the default of 5 s would be the length of the test.
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serve(folder / "state", "--no-tinker", "--config", str(config), *options) as server:
            yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    with exporting(tmp_path_factory.mktemp("traced"), collector.url) as running:
        yield running


def ask(server: Server, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"model": server.model, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_the_spans_of_a_request_are_one_tree_below_its_clients_span(
    server: Server, collector: Collector
) -> None:
    parent = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
    answer = ask(server, {"traceparent": parent, "x-session-id": "rollout-7"}).raise_for_status()
    spans = {span.name: span for span in collector.until(lambda span: span.trace == CLIENT_TRACE, 7)}
    replica = answer.headers["x-midstream-replica"]
    gateway, served = spans["POST /v1/chat/completions"], spans["replica chat_completions"]
    assert (gateway.process, served.process) == ("gateway", replica)
    assert gateway.parent == CLIENT_SPAN
    assert served.parent == gateway.id
    assert {spans[name].parent for name in ("admit", "engine")} == {served.id}
    assert {spans[name].parent for name in ("queue", "prefill", "decode")} == {spans["engine"].id}
    # Of one process: between two, a busy machine may stop one of them before it looks at its clock.
    for outer, inner in ((served, spans["engine"]), (spans["engine"], spans["decode"])):
        assert outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns
    assert spans["queue"].end_ns <= spans["prefill"].end_ns == spans["decode"].begin_ns
    usage, choice = answer.json()["usage"], answer.json()["choices"][0]
    assert served.attributes == {
        "midstream.replica": replica,
        "midstream.wire": "chat_completions",
        "midstream.session": "rollout-7",
        "midstream.deployment": server.deployment,
        "midstream.snapshots": ["base"],
        "http.response.status_code": 200,
        "gen_ai.request.model": server.model,
        "gen_ai.response.model": f"{server.model}@base",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": [choice["finish_reason"]],
    }
    assert gateway.attributes["midstream.session"] == "rollout-7"
    assert gateway.attributes["midstream.replica"] == replica
    assert gateway.attributes["midstream.route_reason"] == answer.headers["x-midstream-route-reason"]
    assert gateway.attributes["http.response.status_code"] == 200
    assert [name for name, _ in gateway.events] == ["sent", "first byte"]
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_refused_request_has_a_status_and_no_words_of_its_body(
    server: Server, collector: Collector
) -> None:
    trace = "1" * 32
    refused = ask(server, {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"}, stop=[SECRET] * 99)
    assert refused.status_code == 400
    spans = {span.name: span for span in collector.until(lambda span: span.trace == trace, 2)}
    gateway, served = spans["POST /v1/chat/completions"], spans["replica chat_completions"]
    assert {one.attributes["http.response.status_code"] for one in spans.values()} == {400}
    assert (gateway.error, served.error) == (None, refused.json()["error"]["code"])
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_one_that_its_client_does_not_sample_is_not_seen(server: Server, collector: Collector) -> None:
    unseen, seen = "2" * 32, "3" * 32
    for trace, flags in ((unseen, "00"), (seen, "01")):
        ask(server, {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}"}).raise_for_status()
    collector.until(lambda span: span.trace == seen, 7)
    collector.until(lambda span: span.trace == unseen, 0)


def test_a_stream_over_a_hot_load_has_its_labels_and_the_swap_its_stages(
    server: Server, collector: Collector, tiny_model: Callable[..., Path]
) -> None:
    trace, snapshots = "4" * 32, ["base"]
    body = {
        "model": server.model,
        "prompt": [1, 2, 3],
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"}
    shutil.copytree(tiny_model(seed=1, dtype="bfloat16"), server.bucket / "step-1")
    with (
        SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60
        ) as response,
    ):
        lines = response.iter_lines()
        # Comments of the resume log come before the first event.
        assert any(line.startswith("data:") for line in lines)
        publisher.snapshots.signal("step-1")
        publisher.snapshots.wait_until_ready("step-1", timeout_s=120)
        for line in lines:
            if '"model":"' in line:
                label = line.partition('"model":"')[2].partition('"')[0].rpartition("@")[2]
                snapshots += [label] if label not in snapshots else []
    assert snapshots == ["base", "step-1"], "the stream did not cross the swap"
    served = collector.until(lambda span: (span.trace, span.name) == (trace, "replica completions"), 1)[0]
    assert served.attributes["midstream.snapshots"] == snapshots
    decode = collector.until(lambda span: (span.trace, span.name) == (trace, "decode"), 1)[0]
    assert decode.events == [("snapshot", {"midstream.snapshot": label}) for label in snapshots]

    swaps = collector.until(lambda span: span.name == "swap", 2)
    assert {span.attributes["midstream.replica"] for span in swaps} == {"replica-0", "replica-1"}
    assert len({span.trace for span in swaps}) == 1, "one trace has the swaps of one signal"
    for swap in swaps:
        told = swap.attributes
        assert swap.process == told["midstream.replica"]
        assert told["midstream.snapshot"] == "step-1"
        assert (told["midstream.outcome"], told["midstream.transition"]) == ("ready", "ASYNC")
        stages = collector.until(lambda span, swap=swap: span.parent == swap.id, 6)  # type: ignore[misc]
        stages.sort(key=lambda span: span.begin_ns)
        assert [span.name for span in stages] == ["fetch", "verify", "stage", "hold", "commit", "check"]
        for before, after in pairwise(stages):
            assert before.end_ns == after.begin_ns
    # Of the replica that had the stream.
    crossed = {span.process: span.attributes["midstream.streams_crossed"] for span in swaps}
    assert crossed[served.process] == 1


def test_a_collector_that_is_gone_costs_spans_and_no_request(tmp_path: Path, free_port: int) -> None:
    with exporting(tmp_path, f"http://127.0.0.1:{free_port}", "--replicas", "1") as server:
        for _ in range(5):
            assert ask(server, {}).status_code == 200
        began = time.monotonic()
        assert server.stop() == 0
        # Nobody waits for a collector until its timeout.
        assert time.monotonic() - began < 30
