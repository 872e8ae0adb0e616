"""The control endpoints through the public port, and the gateway's own routing as a user sees it."""

import asyncio
import json
import logging
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest
from gateway_harness import (
    NAMES,
    Message,
    Peer,
    get,
    post,
    read_chunk,
    read_head,
    reconciler,
    respond_ok,
    staged,
)
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from reports import replica_report
from starlette.requests import Request
from starlette.responses import Response

from midstream.api.app import control_app
from midstream.core.audits import AuditedTurn, AuditStats
from midstream.core.endpoints import Endpoint, serves
from midstream.core.kv import KvStats
from midstream.core.measures import BUCKETS_S, COUNTS, MEASURES, Distribution, Histogram, Trajectories
from midstream.core.served_names import ServedNames
from midstream.core.types import EngineStats
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.tally import Siblings, Tally
from midstream.ledger import Phase
from midstream.proxy.families import FAMILIES
from midstream.proxy.metrics import GatewayMetrics, cumulative


def decoded(message: Message) -> dict:  # type: ignore[type-arg]
    body: dict = json.loads(message.body)  # type: ignore[type-arg]
    return body


async def test_health_follows_the_replicas() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        stage.views[1].replica.hear(None)
        healthy = await stage.ask(get("/health"))
        assert healthy.status == 200
        assert decoded(healthy)["usable_replicas"] == 1
        assert decoded(healthy)["replicas"][1] == {
            "name": "replica-1",
            "reachable": False,
            "ready": False,
            "usable": False,
            "snapshot": None,
            "stage": None,
            "in_flight": 0,
        }
        stage.views[0].admitted = False
        assert (await stage.ask(get("/health"))).status == 503


async def test_the_model_is_listed_under_both_prefixes_with_its_snapshots() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        stage.views[1].replica.hear(replica_report(replica="replica-1", boot="b", ready=True, snapshot="s7"))
        for prefix in ("", "/inference"):
            listed = decoded(await stage.ask(get(f"{prefix}/v1/models")))
            assert listed["object"] == "list"
            [model] = listed["data"]
            assert (model["id"], model["object"]) == (NAMES.model, "model")
            assert model["snapshots"] == {"replica-0": "base", "replica-1": "s7"}
            for name in (NAMES.model, "tiny-moe", "tiny-moe@s7"):
                assert decoded(await stage.ask(get(f"{prefix}/v1/models/{name}"))) == model
        assert (await stage.ask(get("/v1/models/other"))).error["param"] == "model"


async def test_the_one_account_and_its_models_as_the_control_plane_shows_them() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        accounts = decoded(await stage.ask(get("/v1/accounts?pageSize=2")))
        assert [account["name"] for account in accounts["accounts"]] == ["accounts/local"]
        assert decoded(await stage.ask(get("/v1/accounts/local"))) == accounts["accounts"][0]
        listed = decoded(await stage.ask(get("/v1/accounts/local/models?pageSize=1")))
        assert [(model["name"], model["state"]) for model in listed["models"]] == [(NAMES.model, "READY")]
        assert (listed["nextPageToken"], listed["totalSize"]) == ("", 1)
        assert decoded(await stage.ask(get("/v1/accounts/local/models/tiny-moe"))) == listed["models"][0]
        for wrong in ("other", "other/models", "other/models/tiny-moe", "local/models/other"):
            answer = await stage.ask(get(f"/v1/accounts/{wrong}"))
            assert (answer.status, answer.error["code"]) == (404, "not_found_error")


async def test_errors_have_the_apis_shape() -> None:
    class Exploding:
        @serves(Endpoint("GET", "/explode", None, "Fails."))
        async def explode(self, request: Request) -> Response:
            raise RuntimeError("secret detail")

    replicas = ReplicaSet(DeploymentReplicas([]))
    deployments = Deployments(Deployment(NAMES, replicas, reconciler(replicas)))
    app = control_app(deployments, GatewayMetrics(deployments), apis=[Exploding()])
    async with staged(respond_ok, app=app) as stage:
        cases = [
            (get("/pause"), 404, "not_found_error"),
            (post(b"", "/health"), 405, "method_not_allowed"),
            (get("/v1/completions"), 405, "method_not_allowed"),
            (post(b"", "/v1/completions/"), 404, "not_found_error"),
            (get("/v1/models/", "x-forwarded-host: evil\r\n"), 404, "not_found_error"),
            (get("/explode"), 500, "internal_error"),
        ]
        for request, status, code in cases:
            answer = await stage.ask(request)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert "location" not in answer.headers
            assert set(answer.error) == {"message", "type", "code", "param"}
            assert b"secret" not in answer.body


VLLM = 'engine="replica-0",model_name="accounts/local/models/tiny-moe"'


async def test_metrics_count_requests_routes_and_show_what_replicas_report() -> None:
    async with staged(respond_ok) as stage:
        stage.views[0].replica.hear(
            replica_report(
                replica="replica-0",
                boot="b",
                ready=True,
                snapshot="step-2",
                engine=EngineStats(kv=KvStats(used=3, total=10), generated_tokens=7),
            )
        )
        stage.views[0].admitted = True
        for headers in ("X-Session-ID: very-private\r\n", "X-Session-ID: very-private\r\n", ""):
            await stage.ask(post(headers=headers))
        text = (await stage.ask(get("/metrics"))).body.decode()
        for line in (
            'midstream_gateway_requests_total{path="completions",status="200"} 3.0',
            'midstream_gateway_time_to_first_byte_seconds_count{path="completions"} 3.0',
            'midstream_gateway_time_to_first_byte_seconds_bucket{le="1800.0",path="completions"} 3.0',
            'midstream_gateway_request_seconds_bucket{le="+Inf",path="completions"} 3.0',
            'midstream_gateway_routes_total{reason="new"} 1.0',
            'midstream_gateway_routes_total{reason="sticky"} 1.0',
            'midstream_gateway_routes_total{reason="balanced"} 1.0',
            "midstream_gateway_sessions 1.0",
            'midstream_gateway_in_flight{replica="replica-0"} 0.0',
            'midstream_gateway_replica_usable{replica="replica-0"} 1.0',
            'midstream_replica_kv_blocks_used{replica="replica-0"} 3.0',
            'midstream_replica_generated_tokens_total{replica="replica-0"} 7.0',
            'midstream_replica_kv_blocks_capacity{replica="replica-0"} 10.0',
            'midstream_replica_snapshots_behind{replica="replica-0"} 0.0',
            'midstream_replica_disagrees{replica="replica-0"} 0.0',
            'midstream_deployment_replicas_usable{deployment="accounts/local/deployments/default"} 1.0',
            f"vllm:kv_cache_usage_perc{{{VLLM}}} 0.3",
            f"vllm:gpu_cache_usage_perc{{{VLLM}}} 0.3",
            f"vllm:generation_tokens_total{{{VLLM}}} 7.0",
            'midstream_replica_info{deployment="accounts/local/deployments/default",replica="replica-0",snapshot="step-2",stage="idle",'
            f'url="{stage.views[0].url}"}} 1.0',
        ):
            assert line in text.splitlines()
        assert "very-private" not in text


async def test_a_drained_replica_has_its_series_while_it_is_heard() -> None:
    """Without them, its counters would begin anew, and a graph would have a hole where its last requests end."""

    async with staged(respond_ok, respond_ok) as stage:
        facts = stage.gateway.proxy.deployments.default.replicas.facts
        drained = stage.views[1].replica
        drained.hear(replica_report(replica="replica-1", boot="b", engine=EngineStats(generated_tokens=7)))
        drained.in_flight = 2
        members = [(view.name, view.url) for view in stage.views]

        async def shown() -> list[str]:
            lines = (await stage.ask(get("/metrics"))).body.decode().splitlines()
            return [line for line in lines if 'replica="replica-1"' in line or 'engine="replica-1"' in line]

        before = {line.partition("{")[0] for line in await shown()}
        facts.set_members(members, leaving={"replica-1"})
        lines = await shown()
        for line in (
            'midstream_gateway_in_flight{replica="replica-1"} 2.0',
            'midstream_gateway_replica_up{replica="replica-1"} 1.0',
            'midstream_gateway_replica_usable{replica="replica-1"} 0.0',
            'midstream_replica_generated_tokens_total{replica="replica-1"} 7.0',
        ):
            assert line in lines
        # It takes no snapshot before it is taken back, so an alert on these would be a false one.
        missing = {"midstream_replica_snapshots_behind", "midstream_replica_disagrees"}
        assert before - {line.partition("{")[0] for line in lines} == missing
        drained.hear(None)
        assert await shown() == [], "it may be gone with its machine, which is no alert"
        facts.set_members(members)
        assert 'midstream_gateway_replica_up{replica="replica-1"} 0.0' in await shown()
        drained.in_flight = 0


async def test_a_replica_that_leaves_for_another_deployment_has_each_series_once() -> None:
    async with staged(respond_ok) as stage:
        deployments, [left] = stage.gateway.proxy.deployments, stage.views
        member = (left.name, left.url)
        deployments.default.replicas.facts.set_members([member], leaving={left.name})
        replicas = ReplicaSet(DeploymentReplicas([member]))
        names = ServedNames("accounts/local/models/b", "accounts/local/deployments/b")
        deployments.add(Deployment(names, replicas, reconciler(replicas)))
        [view] = replicas.views
        view.replica.hear(replica_report(replica=view.name, boot="b"))
        lines = (await stage.ask(get("/metrics"))).body.decode().splitlines()
        series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        assert 'midstream_gateway_replica_up{replica="replica-0"}' in series
        assert len(set(series)) == len(series)


def test_durations_fall_into_the_first_bucket_whose_bound_they_do_not_exceed() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 10.0, 5000.0):
        histogram.observe(seconds)
    counts = dict(cumulative(BUCKETS_S, histogram.counts))
    assert [counts[bound] for bound in ("0.001", "0.0025", "5.0", "10.0", "1800.0", "+Inf")] == [
        2,
        3,
        3,
        4,
        4,
        5,
    ]
    assert list(counts) == [*map(str, BUCKETS_S), "+Inf"]
    assert histogram.sum == 5010.0021


async def test_the_first_byte_is_timed_apart_from_the_whole_response() -> None:
    now_s = 0.0

    async def handler(request: Message, peer: Peer) -> None:
        nonlocal now_s
        now_s += 2.0
        peer.start_stream()
        await headed.wait()
        now_s += 20.0
        peer.end_stream()

    async with staged(handler) as stage:
        headed = asyncio.Event()
        stage.gateway.proxy.clock = lambda: now_s
        client = await stage.connect()
        client.send(post())
        await read_head(client.reader)
        assert not stage.metrics.total_s
        headed.set()
        assert await read_chunk(client.reader) == b""
        assert {path: h.sum for path, h in stage.metrics.first_byte_s.items()} == {"completions": 2.0}
        assert {path: h.sum for path, h in stage.metrics.total_s.items()} == {"completions": 22.0}


@pytest.mark.parametrize(
    ("headers", "body"),
    [("x-session-affinity: k\r\n", b"{}"), ("", b'{"prompt_cache_key":"k"}'), ("", b'{"user":"k"}')],
)
async def test_a_session_sticks_wherever_its_key_stands(
    headers: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "midstream")

    async with staged(respond_ok, respond_ok, respond_ok) as stage:
        answers = [await stage.ask(post(body, headers=headers)) for _ in range(4)]
        reasons = [answer.headers["x-midstream-route-reason"] for answer in answers]
        assert reasons == ["new", "sticky", "sticky", "sticky"]
        [name] = {answer.headers["x-midstream-replica"] for answer in answers}
        index = int(name[-1])
        assert len(stage.mocks[index].requests) == 4
        expected = f"Hash key 'k' mapped to worker: {stage.views[index].url} (index={index})"
        assert [r.getMessage() for r in caplog.records].count(expected) == 4


async def test_the_log_at_info_says_where_a_session_is_placed_and_where_it_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "midstream")

    async with staged(respond_ok, respond_ok) as stage:
        caplog.clear()
        for headers in ("x-session-id: k\r\n", "x-session-id: k\r\n", ""):
            home = (await stage.ask(post(headers=headers))).headers["x-midstream-replica"]
            if headers:
                first = stage.views[int(home[-1])]
        first.replica.hear(None)
        assert (await stage.ask(post(headers="x-session-id: k\r\n"))).status == 200
        other = stage.views[1 - first.replica.index]
        assert [r.getMessage() for r in caplog.records if "mapped" in r.getMessage()] == [
            f"Hash key 'k' mapped to worker: {view.url} (index={view.replica.index})"
            for view in (first, other)
        ]


async def test_a_session_key_cannot_begin_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream")
    key = "k\u2028Hash key 'other' mapped to worker: http://elsewhere (index=0)"

    async with staged(respond_ok) as stage:
        caplog.clear()
        body = msgspec.json.encode({"user": key})
        assert (await stage.ask(post(body))).status == 200
        [line] = [r.getMessage() for r in caplog.records if "mapped" in r.getMessage()]
        assert line.startswith("Hash key 'k\\u2028Hash key")
        assert line.splitlines() == [line]


async def test_a_long_temporary_directory_does_not_keep_the_control_app_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async with staged(respond_ok) as stage:
        assert (await stage.ask(get("/health"))).status == 200
        directory = Path(stage.gateway._control.path).parent
        assert directory.parent == Path("/tmp")
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert list(long.iterdir()) == []


async def test_a_taken_port_is_an_error_and_leaves_nothing_running() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with staged(respond_ok) as stage:
            with pytest.raises(OSError, match="in use"):
                await stage.gateway.start("127.0.0.1", taken.getsockname()[1])


async def test_probes_are_no_requests_and_no_errors_also_where_they_are_refused() -> None:
    async with staged(respond_ok, api_keys=("k",)) as stage:
        stage.views[0].admitted = False
        head = b"HEAD %b HTTP/1.1\r\nhost: h\r\n\r\n"
        statuses = [(await stage.ask(get(path))).status for path in ("/health", "/liveness?probe=1")]
        assert statuses == [503, 503]
        for path in (b"/", b"/v1/models"):
            peer = await stage.connect()
            peer.send(head % path)
            assert (await peer.message(head_only=True)).status == 401
        assert stage.metrics.requests == {}
        assert stage.metrics.total_s == {}
        assert (await stage.ask(get("/v1/models"))).status == 401
        assert stage.metrics.requests == {("refused", 401): 1}


async def test_every_metric_has_its_kind_and_labels_of_the_table_and_each_of_the_table_is_shown() -> None:
    async with staged(respond_ok) as stage:
        measures = {name: Distribution([1] * (len(bounds) + 1), 2.0) for name, bounds in MEASURES.items()}
        counts = {name: dict.fromkeys(values, 3) for name, values in COUNTS.items()}
        stage.views[0].replica.trajectories = Trajectories(measures=measures, counts=counts)
        report = stage.views[0].replica.heard
        assert report is not None
        differs = AuditedTurn(at=1.0, session="s", turn=2, snapshot="a", cause="stale KV")
        audit = AuditStats(mismatches={"stale KV": 1}, not_audited={"snapshot gone": 1}, last=differs)
        stage.views[0].replica.hear(replace(report, engine=EngineStats(kv=KvStats(total=10)), audit=audit))
        stage.views[0].replica.leaves_at = 2.0**40
        for name in ("routes", "moves", "upstream_errors", "retries", "cut_responses"):
            getattr(stage.metrics, name)["x"] += 1
        stage.metrics.stall_s["gateway"].observe(0.07)
        stage.metrics.pushes.received_bytes["replica-0"] += 7
        stage.metrics.pushes.open = {NAMES.deployment: Phase.RECEIVING}
        await stage.ask(post())
        text = (await stage.ask(get("/metrics"))).body.decode()
        found = {}
        for family in text_string_to_metric_families(text):
            kind = "info" if family.name.endswith("_info") else family.type
            labels = {name for sample in family.samples for name in sample.labels} - {"le"}
            found[family.name.removesuffix("_info")] = (kind, frozenset(labels))
        assert found == {name: (one.kind, frozenset(one.labels)) for name, one in FAMILIES.items()}
        assert f'finished_reason="stop",{VLLM.partition(",")[2]}}} 6.0' in text
        assert 'midstream_swap_pause_seconds_bucket{le="+Inf",replica="replica-0"} 16.0' in text
        for le, count in (("0.05", 0.0), ("0.1", 1.0), ("+Inf", 1.0)):
            sample = f'midstream_event_loop_stall_seconds_bucket{{le="{le}",process="gateway"}} {count}'
            assert sample in text
        assert 'midstream_event_loop_stall_seconds_sum{process="replica-0"} 2.0' in text


async def test_pushes_of_all_gateways_are_added_up_and_what_the_ledger_has_is_not() -> None:
    async with staged(respond_ok) as stage:
        pushes = stage.metrics.pushes
        pushes.updates["committed"] += 2
        pushes.groups_ended["deadline"] += 1
        pushes.received_bytes["replica-0"] += 7
        pushes.seconds["receiving"].observe(0.2)
        pushes.open, pushes.waiting_s = (
            {NAMES.deployment: Phase.RECEIVING},
            {NAMES.deployment: 3.5, "another": 9.0},
        )
        # As it comes from another process.
        other = msgspec.json.decode(msgspec.json.encode(stage.metrics.tally()), type=Tally)
        stage.metrics.siblings = lambda: Siblings(tally=other)
        text = (await stage.ask(get("/metrics"))).body.decode()
        for line in (
            'push_updates_total{outcome="committed"} 4.0',
            # Prometheus sees the first one as an increase.
            'push_updates_total{outcome="dropped"} 0.0',
            'push_groups_ended_total{reason="deadline"} 2.0',
            'push_keeps_total{outcome="given_up"} 0.0',
            'push_received_bytes_total{replica="replica-0"} 14.0',
            'push_seconds_count{phase="receiving"} 2.0',
            'push_seconds_count{phase="joining"} 0.0',
            f'push_groups{{deployment="{NAMES.deployment}",phase="receiving"}} 1.0',
            f'push_waiting_seconds{{deployment="{NAMES.deployment}"}} 3.5',
        ):
            assert f"midstream_{line}" in text
        assert 'deployment="another"' not in text
