"""What each kind of key may do, on every route of a gateway with a real ledger, two deployments and replicas that answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Message, MockReplica, Stage, get, post, reconciler, run
from openapi_answers import SHOWN, Checked, is_of_front
from reports import replica_report

from midstream.api.adapter_calls import AdapterCallsApi
from midstream.api.app import control_app
from midstream.api.board import Board
from midstream.api.dashboard import DashboardApi
from midstream.api.delta_calls import DeltaCallsApi
from midstream.api.deployments import DeploymentsApi
from midstream.api.hotload import hotload_apis
from midstream.api.reference import ReferenceApi
from midstream.api.trainer_calls import TrainerApi
from midstream.api.weight_transfer import WeightTransferApi
from midstream.core.config import GatewaySettings
from midstream.core.endpoints import endpoints_of
from midstream.core.key_settings import KeySettings
from midstream.core.pages import DASHBOARD_EVENTS, PAGES_OPEN
from midstream.core.served_names import ServedNames
from midstream.core.wires import (
    CHANGES_BY_GET,
    HOT_LOAD_PATH,
    TRAINER_REFUSED,
    TRAINER_TRANSFERS,
    TRAINER_UNSERVED,
    WIRES,
)
from midstream.fleet.membership import MembershipApi
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.launch.reference import document
from midstream.ledger import Ledger, sqlite_url
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway

A = "accounts/local"
#: Trainers' calls that change something by POST, and those that read.
TRAINER_CHANGES = [
    one.path
    for one in endpoints_of(TrainerApi, WeightTransferApi, DeltaCallsApi, AdapterCallsApi)
    if one.method == "POST" and one.path not in TRAINER_REFUSED
]
TRAINER_READS = [
    one.path for one in endpoints_of(TrainerApi) if one.method == "GET" and one.path not in CHANGES_BY_GET
]
DEPLOYMENTS = f"/v1/{A}/deployments"
TOKEN = "token-of-the-replicas"
#: Kinds of keys; each key is called as its kind, with `key-` before it.
SCOPES = {
    "sample": ["sample"],
    "publish": ["publish"],
    "observe": ["observe"],
    "operate": ["operate"],
    "trainer": ["sample", "publish"],
    "sample:other": ["sample:other"],
    "publish:other": ["publish:other"],
    "observe:other": ["observe:other"],
    "operate:other": ["operate:other"],
    "sample:default": ["sample:default"],
    "publish:default": ["publish:default"],
    "operate:gone": ["operate:gone"],
}
KEYS = (
    "key-full",
    *(KeySettings(key=f"key-{kind}", scopes=tuple(scopes)) for kind, scopes in SCOPES.items()),
)
KINDS = ("full", *SCOPES)


def bearer(kind: str | None) -> str:
    return "" if kind is None else f"authorization: Bearer key-{kind}\r\n"


class World:
    """A gateway before a ledger with the deployments `default` and `other`, each of a model of its own, with one replica."""

    def __init__(self, stage: Stage, ledger: Ledger, bucket: Path) -> None:
        self.stage = stage
        self.ledger = ledger
        self.bucket = bucket

    async def ask(
        self, kind: str | None, method: str, path: str, body: Any = None, headers: str = ""
    ) -> Message:
        headers += bearer(kind)
        if body is None:
            peer = await self.stage.connect()
            peer.send(get(path, headers, method))
            message = await peer.message(head_only=method == "HEAD")
            peer.writer.close()
            return message
        data = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
        return await self.stage.ask(head.encode() + data)

    async def state(self) -> Any:
        """All that a control call can change."""
        names = [row.name for row in await self.ledger.deployments()]
        return [
            (
                await self.ledger.deployment(name),
                await self.ledger.snapshots(name),
                await self.ledger.state(name),
            )
            for name in names
        ]


STORED = {
    **dict.fromkeys(("error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id")),
    "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m@s", "output": [],
    "usage": {
        "input_tokens": 1, "input_tokens_details": {"cached_tokens": None, "cache_write_tokens": 0},
        "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 1,
    },
    "background": False, "metadata": {}, "parallel_tool_calls": True, "reasoning": {}, "store": True,
    "temperature": 1.0, "text": {}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
    "truncation": "disabled", "user": None, "midstream": {"snapshot": "s"},
}  # fmt: skip


@contextlib.asynccontextmanager
async def world(keys: Any = KEYS) -> AsyncIterator[World]:
    async def answer(request: Message, peer: Any) -> None:
        stored = b'"response"' in request.body
        peer.respond(json.dumps({"closed": True, "sessions": [], "found": STORED if stored else []}).encode())

    with tempfile.TemporaryDirectory() as directory:
        bucket = Path(directory) / "bucket"
        for place in ("s1", "other/s1"):
            (bucket / place).mkdir(parents=True)
            (bucket / place / "config.json").write_text("{}")
        ledger = Ledger(sqlite_url(Path(directory) / "ledger.db"))
        mocks, made = [MockReplica(answer), MockReplica(answer)], []
        for name, place, mock in zip(("default", "other"), (bucket, bucket / "other"), mocks, strict=True):
            names = ServedNames(f"{A}/models/{name}-model", f"{A}/deployments/{name}")
            await ledger.ensure_deployment(names.deployment, names.model, place.as_uri(), "ASYNC", 1)
            await mock.start()
            replicas = ReplicaSet(
                DeploymentReplicas([(f"{name}-replica-0", f"http://127.0.0.1:{mock.port}")])
            )
            replicas.views[0].replica.hear(
                replica_report(replica=replicas.views[0].name, boot="b", ready=True)
            )
            replicas.views[0].admitted = True
            made.append(Deployment(names, replicas, reconciler(replicas)))
        deployments = Deployments(made[0], ("default-model", "other-model", "third-model"))
        deployments.add(made[1])

        async def changed() -> None: ...

        metrics = GatewayMetrics(deployments)
        apis = [
            DeploymentsApi(ledger, deployments, bucket=bucket.as_uri(), changed=changed),
            MembershipApi(ledger, deployments, allowed=("127.0.0.1",), changed=changed),
            *hotload_apis(ledger, deployments),
            # Its streams end at once, as those of a process that listens no more.
            DashboardApi(Board(deployments, metrics), lambda: False),
            ReferenceApi(document),
        ]
        app = Checked(control_app(deployments, metrics, keyed=bool(keys), apis=apis))
        gateway = Gateway(GatewaySettings(api_keys=keys), deployments, metrics, app, replica_token=TOKEN)
        stage = Stage(gateway, await gateway.start("127.0.0.1", 0), made[0].replicas, mocks)
        try:
            yield World(stage, ledger, bucket)
        finally:
            for peer in stage.peers:
                peer.abort()
            await gateway.close()
            for mock in mocks:
                mock.stop()
            ledger.close()
        assert not app.misfits


#: The kinds that need no key but some valid one, and those with a scope everywhere or on `default`.
ALL = set(KINDS)
SAMPLES = {"full", "operate", "sample", "trainer"}
PUBLISHES = {"full", "operate", "publish", "trainer"}
READS = PUBLISHES | {"observe"}
OPERATES = {"full", "operate"}
ON_OTHER = {"operate:other"}
ONE, OTHER = f"{DEPLOYMENTS}/default", f"{DEPLOYMENTS}/other"
TO_OTHER = "fireworks-deployment: other\r\n"

#: (route of the table, method and path asked for, body, headers) -> the kinds of keys that are served.
Case = tuple[str, str, str, Any, str, set[str]]


def of_each_deployment(
    route: str, method: str, path: str, body: Any, all_of: set[str], scoped: str
) -> list[Case]:
    """A route whose deployment the headers name: all_of: served on both; scoped: the scope that serves on one."""
    return [
        (route, method, path, body, "", all_of | ({f"{scoped}:default"} & ALL)),
        (route, method, path, body, TO_OTHER, all_of | ({f"{scoped}:other"} & ALL) | ON_OTHER),
        (
            route,
            method,
            path,
            body,
            "fireworks-model: other-model\r\n",
            all_of | ({f"{scoped}:other"} & ALL) | ON_OTHER,
        ),
    ]


CASES: list[Case] = [
    *of_each_deployment("/sessions/{key:path}/trace", "GET", "/sessions/s/trace", None, SAMPLES, "sample"),
    *of_each_deployment(
        "/sessions/{key:path}/reward", "POST", "/sessions/s/reward", {"reward": 1}, SAMPLES, "sample"
    ),
]
for path in WIRES:
    CASES += of_each_deployment(path, "POST", path, {}, SAMPLES, "sample")
for prefix in ("", "/inference"):
    CASES += of_each_deployment(
        prefix + "/v1/sessions", "GET", prefix + "/v1/sessions", None, SAMPLES, "sample"
    )
    one = prefix + "/v1/sessions/{key:path}"
    for method in ("GET", "DELETE"):
        CASES += of_each_deployment(one, method, prefix + "/v1/sessions/s", None, SAMPLES, "sample")
    trace = prefix + "/v1/sessions/s/trace"
    CASES += of_each_deployment(one + "/trace", "GET", trace, None, SAMPLES, "sample")
    stored, kept = prefix + "/v1/responses/{id}", prefix + "/v1/responses/resp_1"
    for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        CASES += of_each_deployment(stored + below, method, kept + below, None, SAMPLES, "sample")
    reward = prefix + "/v1/sessions/s/reward"
    CASES += of_each_deployment(one + "/reward", "POST", reward, {"reward": 1}, SAMPLES, "sample")
    CASES.append((prefix + "/v1/models", "GET", prefix + "/v1/models", None, "", ALL))
    mine = {kind for kind in KINDS if ":" not in kind}
    one = prefix + "/v1/models/{model:path}"
    CASES.append(
        (
            one,
            "GET",
            prefix + "/v1/models/default-model",
            None,
            "",
            mine | {"sample:default", "publish:default"},
        )
    )
    others = {"sample:other", "publish:other", "observe:other", "operate:other"}
    CASES.append((one, "GET", prefix + "/v1/models/other-model", None, "", mine | others))
#: Bodies of trainers' calls that would otherwise wait for replicas, and are refused here once the key is found good.
WRONG: dict[str, Any] = {
    "/pause_generation": {"mode": "x"},
    "/abort_requests": {"request_ids": 3},
}
TRAINERS: list[Case] = []
for path in TRAINER_UNSERVED:
    TRAINERS += of_each_deployment(path, "POST", path, {}, PUBLISHES, "publish")[:1]
for path in (*TRAINER_CHANGES, *TRAINER_TRANSFERS):
    asked = path + ("?mode=x" if path == "/pause" else "")
    TRAINERS += of_each_deployment(path, "POST", asked, WRONG.get(path, {}), PUBLISHES, "publish")
for path in CHANGES_BY_GET:
    TRAINERS += of_each_deployment(path, "GET", path, None, PUBLISHES, "publish")
for path in (HOT_LOAD_PATH, *TRAINER_READS):
    CASES += of_each_deployment(path, "GET", path, None, READS, "publish")[:1]
CASES += [
    *((path, "GET", path, None, TO_OTHER, READS | ON_OTHER | {"publish:other", "observe:other"})
      for path in (HOT_LOAD_PATH, *TRAINER_READS)),
    ("/metrics", "GET", "/metrics", None, "", {"full", "operate", "observe"}),
    ("/metrics", "HEAD", "/metrics", None, "", {"full", "operate", "observe"}),
    (DASHBOARD_EVENTS, "GET", DASHBOARD_EVENTS, None, "",
     {"full", "operate", "observe", "observe:other", "operate:gone", *ON_OTHER}),
    ("/v1/accounts", "GET", "/v1/accounts", None, "", ALL),
    ("/v1/accounts/{account}", "GET", f"/v1/{A}", None, "", ALL),
    ("/v1/accounts/{account}/models", "GET", f"/v1/{A}/models", None, "", ALL),
    ("/v1/accounts/{account}/models/{model}", "GET", f"/v1/{A}/models/other-model", None, "", mine | others),
    ("/v1/accounts/{account}/models/{model}", "GET", f"/v1/{A}/models/third-model", None, "", mine),
    ("/v1/accounts/{account}/deployments", "GET", DEPLOYMENTS, None, "",
     ALL - {"sample", "sample:other", "sample:default"}),
    ("/v1/accounts/{account}/deployments/{name}", "GET", ONE, None, "", READS | {"publish:default"}),
    ("/v1/accounts/{account}/deployments/{name}", "GET", OTHER, None, "",
     READS | ON_OTHER | {"publish:other", "observe:other"}),
    # what is decoded on the way is the same route
    ("/v1/accounts/{account}/deployments/{name}/ledger", "GET", f"{DEPLOYMENTS}/default%2Fledger", None, "",
     READS | {"publish:default"}),
    ("/v1/accounts/{account}/deployments/{name}/ledger", "GET", f"{OTHER}/ledger", None, "",
     READS | ON_OTHER | {"publish:other", "observe:other"}),
    ("/v1/accounts/{account}/deployments/{name}/replicas", "GET", f"{OTHER}/replicas", None, "",
     OPERATES | ON_OTHER | {"observe", "observe:other"}),
    *(("/v1/accounts/{account}/deployments/{name}" + route, "GET", OTHER + path, None, "",
       READS | ON_OTHER | {"publish:other", "observe:other"})
      for route, path in (("/policies", "/policies"), ("/policies/{policy}", "/policies/mine"))),
    ("/v1/accounts/{account}/deployedModels", "GET", f"/v1/{A}/deployedModels", None, "",
     ALL - {"sample", "sample:other", "sample:default"}),
    ("/v1/accounts/{account}/deployedModels/{model}", "GET", f"/v1/{A}/deployedModels/mine", None, "", READS),
    # what changes something, the deletions last
    *of_each_deployment(HOT_LOAD_PATH, "POST", HOT_LOAD_PATH, {"identity": "s1"}, PUBLISHES, "publish"),
    *of_each_deployment(f"{HOT_LOAD_PATH}/hint", "POST", f"{HOT_LOAD_PATH}/hint",
                        {"identity": "s1", "files": ["config.json"]}, PUBLISHES, "publish"),
    *TRAINERS,
    ("/v1/accounts/{account}/deployments", "POST", f"{DEPLOYMENTS}?deploymentId=other", {"baseModel": "other-model"}, "",
     OPERATES),
    ("/v1/accounts/{account}/deployments/{name}", "PATCH", ONE, {"displayName": "x"}, "", OPERATES),
    ("/v1/accounts/{account}/deployments/{name}", "PATCH", OTHER, {"displayName": "x"}, "", OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployments/{name}", "PATCH", OTHER, {"hotLoadBucketUrl": ""}, "", OPERATES),
    *(("/v1/accounts/{account}/deployments/{name}:scale", method, f"{OTHER}:scale", {"replicaCount": 1}, "",
       OPERATES | ON_OTHER) for method in ("PATCH", "POST")),
    ("/v1/accounts/{account}/deployments/{name}:undelete", "POST", f"{OTHER}:undelete", {}, "", OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployments/{name}/replicas", "POST", f"{OTHER}/replicas", {"url": "http://127.0.0.1:9"}, "",
     OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployments/{name}/replicas/{replica}", "PATCH", f"{OTHER}/replicas/other-replica-0",
     {"drain": False}, "", OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployments/{name}/replicas/{replica}", "DELETE", f"{OTHER}/replicas/other-replica-0", None, "",
     OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployedModels", "POST", f"/v1/{A}/deployedModels",
     {"model": "no/name", "deployment": "other"}, "", PUBLISHES | ON_OTHER | {"publish:other"}),
    ("/v1/accounts/{account}/deployedModels", "POST", f"/v1/{A}/deployedModels", {"model": "no/name"}, "",
     PUBLISHES | {"publish:default"}),
    *(("/v1/accounts/{account}/deployedModels/{model}", method, f"/v1/{A}/deployedModels/mine", body, "", PUBLISHES)
      for method, body in (("PATCH", {}), ("DELETE", None))),
    ("/v1/accounts/{account}/deployments/{name}/policies", "POST", f"{OTHER}/policies", {"policy": "mine"}, "",
     PUBLISHES | ON_OTHER | {"publish:other"}),
    ("/v1/accounts/{account}/deployments/{name}/policies/{policy}", "DELETE", f"{OTHER}/policies/mine", None, "",
     PUBLISHES | ON_OTHER | {"publish:other"}),
    ("/v1/accounts/{account}/deployments/{name}/ledger", "DELETE", f"{ONE}/ledger", None, "", OPERATES),
    ("/v1/accounts/{account}/deployments/{name}/ledger", "DELETE", f"{OTHER}/ledger", None, "", OPERATES | ON_OTHER),
    ("/v1/accounts/{account}/deployments/{name}", "DELETE", ONE, None, "", OPERATES),
    ("/v1/accounts/{account}/deployments/{name}", "DELETE", OTHER, None, "", OPERATES | ON_OTHER),
]  # fmt: skip


def test_the_cases_are_of_every_route_in_the_table() -> None:
    asked = {(method, route) for route, method, *_ in CASES if method != "HEAD"}
    assert asked == {
        (one.method, one.path) for one in SHOWN if one.endpoint.need is not None and not is_of_front(one)
    }


async def test_pages_need_no_key_and_say_nothing_of_the_server() -> None:
    async with world() as here:
        for path in PAGES_OPEN:
            answer = await here.ask(None, "GET", path)
            assert answer.status == 200, path
            assert b"default-replica-0" not in answer.body
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            again = await here.ask(None, "GET", path, headers=f"if-none-match: {answer.headers['etag']}\r\n")
            assert (again.status, again.body) == (304, b"")
        assert (await here.ask(None, "GET", "/dashboard/../etc/passwd")).status == 401
        assert (await here.ask("full", "GET", "/dashboard/__init__.py")).status == 404


async def test_the_dashboards_stream_shows_a_key_its_own_deployments_alone() -> None:
    async with world() as here:
        everything = (await here.ask("observe", "GET", DASHBOARD_EVENTS)).body
        assert b"default-replica-0" in everything
        assert b"other-replica-0" in everything
        assert b"event: counts" in everything
        other = (await here.ask("observe:other", "GET", DASHBOARD_EVENTS)).body
        assert b"other-replica-0" in other
        assert b"default" not in other
        assert b"event: counts" not in other


async def test_every_kind_of_key_on_every_route() -> None:
    async with world() as here:
        before = await here.state()
        for _, method, path, body, headers, served in CASES:
            for kind in KINDS:
                if kind in served:
                    continue
                answer = await here.ask(kind, method, path, body, headers)
                assert answer.status == 403, (kind, method, path, headers)
                if method == "HEAD":
                    continue
                assert answer.error["code"] == "permission_error"
                assert answer.error["message"].startswith("this API key lacks the scope '")
                assert "retry-after" not in answer.headers
            for nobody in (None, "unknown"):
                answer = await here.ask(nobody, method, path, body, headers)
                assert answer.status == 401, (method, path)
        assert await here.state() == before
        assert [len(mock.requests) for mock in here.stage.mocks] == [0, 0], (
            "what is refused reaches no replica"
        )
        for _, method, path, body, headers, served in CASES:
            for kind in sorted(served):
                answer = await here.ask(kind, method, path, body, headers)
                assert answer.status in (200, 202, 400, 404, 409), (
                    kind,
                    method,
                    path,
                    headers,
                    answer.body,
                )
                assert (
                    answer.status < 400
                    or method in ("POST", "PATCH", "DELETE")
                    or "/sessions/" in path
                    # Nobody takes up what the ledger has of policies here.
                    or path.endswith("/mine")
                    # Of several deployments they want one named.
                    or (path in (*TRAINER_READS, *CHANGES_BY_GET) and not headers)
                )
        assert await here.state() != before


async def test_without_configured_keys_everybody_may_do_everything() -> None:
    async with world(keys=()) as here:
        for _, method, path, body, headers, _ in CASES:
            for kind in (None, "sample"):
                assert (await here.ask(kind, method, path, body, headers)).status not in (401, 403), path
        told = "x-midstream-scopes: sample:nothing\r\n"
        assert (await here.ask(None, "GET", "/metrics", headers=told)).status == 200


async def test_nobody_gives_himself_scopes_or_a_tenant() -> None:
    async with world() as here:
        told = "x-midstream-scopes: operate\r\nx-midstream-tenant: key-full\r\n"
        for kind, status in (("sample", 403), (None, 401)):
            assert (await here.ask(kind, "DELETE", f"{ONE}/ledger", headers=told)).status == status
        assert set(json.loads((await here.ask(None, "GET", "/health", headers=told)).body)) == {"status"}
        await here.ask("sample", "POST", "/v1/completions", {}, told)
        (asked,) = here.stage.mocks[0].requests
        assert "x-midstream-scopes" not in asked.headers
        assert asked.headers["x-midstream-tenant"] != "key-full"


async def test_a_refusal_names_the_scope_and_what_it_is_missing_on() -> None:
    async with world() as here:
        lacks = "this API key lacks the scope "
        for kind, method, path, headers, message in (
            ("sample", "DELETE", f"{ONE}/ledger", "", "'operate' on deployment 'default'"),
            ("sample", "GET", f"{ONE}/ledger", "", "'publish' or 'observe' on deployment 'default'"),
            ("sample", "GET", "/metrics", "", "'observe' on every deployment"),
            ("sample", "POST", HOT_LOAD_PATH, "", "'publish' on the default deployment"),
            ("sample", "POST", HOT_LOAD_PATH, TO_OTHER, "'publish' on deployment 'other'"),
            ("publish", "POST", "/v1/completions", "", "'sample' on any deployment"),
            ("sample:other", "POST", "/v1/completions", "", "'sample' on the default deployment"),
            (
                "operate:other",
                "POST",
                f"{DEPLOYMENTS}?deploymentId=other",
                "",
                "'operate' on every deployment",
            ),
        ):
            body = {} if method == "POST" else None
            answer = await here.ask(kind, method, path, body, headers)
            assert (answer.status, answer.error["message"]) == (403, lacks + message)


@pytest.mark.parametrize("where", ["fireworks-deployment", "fireworks-model", "body"])
async def test_a_deployment_that_is_not_the_keys_and_one_that_does_not_exist_look_the_same(
    where: str,
) -> None:
    names = ["default", f"{A}/deployments/default", "default-model", "default-model@s1", "nowhere"]
    names += [f"{A}/deployments/nowhere", "accounts/else/deployments/other2", "x" * 5000]

    async with world() as here:
        seen = set()
        for path in ("/v1/completions", "/v1/sessions") if where != "body" else ("/v1/completions",):
            for name in names:
                headers = "" if where == "body" else f"{where}: {name}\r\n"
                body = None if path == "/v1/sessions" else {"model": name} if where == "body" else {}
                method = "GET" if body is None else "POST"
                answer = await here.ask("sample:other", method, path, body, headers)
                assert answer.status == 403, (path, name)
                shown = name if len(name) < 200 else name[:200] + "..."
                assert repr(shown) in answer.error["message"]
                seen.add(answer.error["message"].replace(repr(shown), "NAME"))
        kind = "deployment" if where == "fireworks-deployment" else "model"
        assert seen == {f"this API key lacks the scope 'sample' on {kind} NAME"}
        for path in (f"{DEPLOYMENTS}/default", f"{DEPLOYMENTS}/nowhere", f"{DEPLOYMENTS}/nowhere/ledger"):
            assert (await here.ask("publish:other", "GET", path)).status == 403
        assert [len(mock.requests) for mock in here.stage.mocks] == [0, 0]


async def test_a_key_for_a_deployment_that_is_not_there_is_told_so() -> None:
    async with world() as here:
        gone = "fireworks-deployment: gone\r\n"
        for method, path, body in (("POST", "/v1/completions", {}), ("GET", "/v1/sessions", None)):
            answer = await here.ask("operate:gone", method, path, body, gone)
            assert (answer.status, answer.error["code"]) == (404, "not_found_error")
            assert answer.error["message"] == "deployment 'gone' is not served here"
        assert (await here.ask("operate:gone", "GET", f"{DEPLOYMENTS}/gone")).status == 404


@pytest.mark.parametrize("kind", ["full", "trainer", "sample:other", "operate:gone"])
async def test_a_gateway_that_has_just_started_blames_no_key_and_names_no_other_deployment(kind: str) -> None:
    gone = f"{A}/deployments/gone"

    async with world() as here:
        here.stage.gateway.proxy.deployments.catching_up = True
        for path, headers in (
            (f"/v1/{A}/models/gone-model", ""),
            ("/v1/models/gone-model", ""),
            ("/v1/sessions/s", f"fireworks-deployment: {gone}\r\n"),
            ("/v1/sessions/s", "fireworks-model: gone-model\r\n"),
        ):
            answer = await here.ask(kind, "GET", path, headers=headers)
            assert (answer.status, answer.error["code"]) == (503, "replica_unavailable"), path
            assert kind in ("full", "trainer") or "default" not in answer.error["message"]


async def test_the_replica_of_the_keys_own_deployment_serves_it() -> None:
    async with world() as here:
        for headers, body in (
            (TO_OTHER, {}),
            ("", {"model": "other"}),
            ("", {"model": "other-model@s1"}),
        ):
            answer = await here.ask("sample:other", "POST", "/v1/completions", body, headers)
            assert (answer.status, answer.headers["x-midstream-replica"]) == (200, "other-replica-0")


async def test_lists_show_what_a_key_may_use() -> None:
    async def names(here: World, kind: str, path: str, listed: str, key: str) -> list[str]:
        answer = json.loads((await here.ask(kind, "GET", path)).body)
        return [entry[key].rpartition("/")[2] for entry in answer[listed]]

    async with world() as here:
        for kind, deployments, models, known in (
            ("operate", ["default", "other"], ["default-model", "other-model"],
             ["default-model", "other-model", "third-model"]),
            ("publish:other", ["other"], ["other-model"], ["other-model"]),
            ("operate:gone", [], [], []),
        ):  # fmt: skip
            assert await names(here, kind, DEPLOYMENTS, "deployments", "name") == deployments
            assert await names(here, kind, "/v1/models", "data", "id") == models
            assert await names(here, kind, f"/v1/{A}/models", "models", "name") == known
        page = json.loads((await here.ask("publish:other", "GET", f"{DEPLOYMENTS}?pageSize=1")).body)
        assert (page["totalSize"], page["nextPageToken"]) == (1, "")


async def test_health_says_only_whether_it_is_up_to_whoever_has_no_key() -> None:
    async with world() as here:
        for headers in ("", "authorization: Bearer wrong\r\n", "x-midstream-token: wrong\r\n"):
            answer = await here.ask(None, "GET", "/health", headers=headers)
            assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok"})
        for kind, shown in (
            ("sample", ["default", "other"]),
            ("publish:other", ["other"]),
            ("operate:gone", []),
        ):
            told = json.loads((await here.ask(kind, "GET", "/health")).body)
            assert [row["name"].rpartition("/")[2] for row in told["deployments"]] == shown
            assert [row["name"] for row in told["replicas"]] == [f"{name}-replica-0" for name in shown]
            assert told["usable_replicas"] == len(shown)
        supervisor = f"x-midstream-token: {TOKEN}\r\n"
        told = json.loads((await here.ask(None, "GET", "/health", headers=supervisor)).body)
        assert len(told["deployments"]) == 2
        assert (await here.ask(None, "GET", "/metrics", headers=supervisor)).status == 401
        here.stage.views[0].admitted = False
        assert (await here.ask(None, "GET", "/health")).status == 200, "the other deployment has one"
        for deployment in here.stage.gateway.proxy.deployments:
            deployment.replicas.views[0].admitted = False
        down = await here.ask(None, "GET", "/health")
        assert (down.status, json.loads(down.body)) == (503, {"status": "unavailable"})


async def test_a_key_publishes_nothing_out_of_the_bucket_of_another_deployment() -> None:
    async with world() as here:
        before = await here.state()
        source = f"x-fireworks-hot-load-source-url: {(here.bucket / 'other' / 's1').as_uri()}\r\n"
        for identity, headers in (("other/s1", ""), ("s9", source)):
            answer = await here.ask("publish:default", "POST", HOT_LOAD_PATH, {"identity": identity}, headers)
            assert (answer.status, answer.error["message"]) == (
                403,
                "this API key lacks the scope 'publish' on the place of this snapshot",
            )
        assert await here.state() == before
        for kind, identity, headers in (
            ("publish:default", "s1", ""),
            ("publish:other", "s1", TO_OTHER),
            ("publish", "other/s1", ""),
        ):
            answer = await here.ask(kind, "POST", HOT_LOAD_PATH, {"identity": identity}, headers)
            assert (answer.status, json.loads(answer.body)["identity"]) == (200, identity)


def test_a_refused_control_call_leaves_one_line_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        caplog.clear()
        async with world() as here:
            await here.ask("sample", "DELETE", f"{ONE}/ledger?key-sample")
            await here.ask("sample", "POST", f"{DEPLOYMENTS}/a%0Ab:scale", {})
            lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
            assert len(lines) == 2
            tenant = lines[0].split("tenant ")[1].split(",")[0]
            assert len(tenant) == 16
            asked = f"DELETE {ONE}/ledger"
            lacks = "this API key lacks the scope 'operate' on deployment"
            assert lines[0] == f"refused: tenant {tenant}, {asked}: {lacks} 'default'"
            assert lines[1] == f"refused: tenant {tenant}, POST {DEPLOYMENTS}/a%0Ab%3Ascale: {lacks} 'a\\nb'"
            assert "key-sample" not in caplog.text

    caplog.set_level(logging.DEBUG)
    run(main)


async def test_a_key_may_be_written_as_its_digest_and_keys_of_one_tenant_share_sessions() -> None:
    digest = "sha256:" + hashlib.sha256(b"key-a").hexdigest()
    keys = (
        KeySettings(key=digest, scopes=("sample",), tenant="team"),
        KeySettings(key="key-b", scopes=("sample",), tenant="team"),
        "sha256:" + hashlib.sha256(b"key-c").hexdigest(),
    )

    async with world(keys=keys) as here:
        session = "x-session-id: s\r\n"
        reasons = []
        for key in ("a", "b", "c"):
            answer = await here.ask(key, "POST", "/v1/completions", {}, session)
            assert answer.status == 200
            reasons.append(answer.headers["x-midstream-route-reason"])
        assert reasons == ["new", "sticky", "new"]
        tenants = [request.headers["x-midstream-tenant"] for request in here.stage.mocks[0].requests]
        assert tenants[:2] == ["team", "team"]
        assert tenants[2] not in ("team", "")
        as_key = f"authorization: Bearer {digest}\r\n"
        assert (await here.ask(None, "POST", "/v1/completions", {}, as_key)).status == 401, (
            "a digest is no key"
        )
        empty = "authorization: Bearer \r\nx-api-key: \r\n"
        assert (await here.ask(None, "GET", "/v1/models", headers=empty)).status == 401


async def test_a_request_that_may_not_sample_is_refused_before_its_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as here:
        client = await here.stage.connect()
        client.send(post(b"", headers=bearer("publish")).replace(b"Length: 0", b"Length: 1000000"))
        answer = await client.message()
        assert (answer.status, answer.error["code"]) == (403, "permission_error")
