"""The grammar of scopes, what a grant allows, and what becomes of an endpoint's record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from midstream.api.app import control_app
from midstream.api.board import Board
from midstream.api.dashboard import DashboardApi
from midstream.api.deployments import DeploymentsApi
from midstream.api.hotload import hotload_apis
from midstream.api.reference import ReferenceApi
from midstream.core.endpoints import Endpoint, Nothing, serves
from midstream.core.errors import ConfigError
from midstream.core.scopes import (
    ANY,
    EVERYTHING,
    NOTHING,
    OBSERVE,
    PUBLISH,
    SAMPLE,
    SCOPES,
    parse_grant,
    parse_scope,
)
from midstream.core.served_names import ServedNames
from midstream.core.settings import load_settings
from midstream.fleet.loop import Reconciler
from midstream.fleet.membership import MembershipApi
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http import routes
from midstream.http.auth import Authenticator
from midstream.launch.reference import document
from midstream.proxy.metrics import GatewayMetrics
from midstream_tinker.app import tinker_app
from midstream_tinker.futures import Futures
from midstream_tinker.store import Store
from midstream_tinker.types import Served

A = "accounts/local"


def routes_of(app: Starlette) -> set[tuple[str, str]]:
    """(method, path) of every route of an app."""
    routes = cast("list[Route]", app.routes)
    assert all(isinstance(route, Route) for route in routes)
    return {(method, route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}


def whole_gateway() -> Starlette:
    nothing = cast("Any", None)
    names, replicas = (
        ServedNames(f"{A}/models/m", f"{A}/deployments/default"),
        ReplicaSet(DeploymentReplicas([])),
    )
    deployments = Deployments(Deployment(names, replicas, Reconciler(nothing, replicas, names.deployment)))
    metrics = GatewayMetrics(deployments)
    apis = [
        DeploymentsApi(nothing, deployments, bucket="file:///b", changed=nothing),
        MembershipApi(nothing, deployments, allowed=(), changed=nothing),
        *hotload_apis(nothing, deployments),
        DashboardApi(Board(deployments, metrics), lambda: True),
        ReferenceApi(document),
    ]
    return control_app(deployments, metrics, keyed=True, apis=apis)


def whole_front() -> Starlette:
    return tinker_app(
        store=Store(":memory:"),
        futures=Futures(),
        sampling=cast("Any", None),
        training=cast("Any", _Anything()),
        authenticator=Authenticator(["k"]),
        served=Served(names=("m",), directory="/m"),
    )


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return None


def test_a_handler_without_an_endpoint_is_not_served() -> None:
    class Api:
        @serves(Endpoint("GET", "/served", ANY, "Is served."))
        async def served(self, request: Request) -> Nothing:
            return Nothing()

        async def other(self, request: Request) -> Nothing:
            return Nothing()

    (route,) = routes.routes_of([Api()], lambda request, endpoint: None)
    assert isinstance(route, Route)
    assert route.path == "/served"


def test_of_two_paths_that_match_the_more_specific_one_is_served_wherever_it_stands() -> None:
    class Api:
        @serves(Endpoint("GET", "/v1/sessions/{key:path}", None, "Shows a session."))
        async def get(self, request: Request) -> Nothing:
            raise AssertionError("the trace was asked for")

        @serves(Endpoint("GET", "/v1/sessions/{key:path}/trace", None, "Shows a trace."))
        async def trace(self, request: Request) -> Nothing:
            return Nothing()

    app = Starlette(routes=routes.routes_of([Api()], lambda request, endpoint: None))
    assert TestClient(app).get("/v1/sessions/a/b/trace").json() == {}


def test_a_method_that_a_path_lacks_is_refused_with_all_that_it_has() -> None:
    class Api:
        @serves(
            Endpoint("PATCH", "/one:scale", None, "Scales."), Endpoint("POST", "/one:scale", None, "Scales.")
        )
        async def scale(self, request: Request) -> Nothing:
            return Nothing()

        @serves(Endpoint("GET", "/one:scale", None, "Shows."))
        async def get(self, request: Request) -> Nothing:
            return Nothing()

    client = TestClient(Starlette(routes=routes.routes_of([Api()], lambda request, endpoint: None)))
    refused = client.put("/one:scale")
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "PATCH", "POST"}
    assert [client.request(method, "/one:scale").status_code for method in ("HEAD", "PATCH", "POST")] == [
        200
    ] * 3


def test_the_gateway_that_is_served_has_the_apis_of_these_tests() -> None:
    """A module that adds an API in launch/gateway.py belongs into whole_gateway() above."""
    wiring = (Path(control_app.__code__.co_filename).parents[1] / "launch" / "gateway.py").read_text()
    assert set(re.findall(r"\b(\w+(?:Api|_apis))\(", wiring)) == {
        "DashboardApi",
        "DeploymentsApi",
        "MembershipApi",
        "ReferenceApi",
        "hotload_apis",
    }


def test_a_scope_is_for_every_deployment_or_for_one() -> None:
    assert [parse_scope(scope) for scope in SCOPES] == [(scope, None) for scope in SCOPES]
    assert parse_scope("publish:actor-1.b_2") == ("publish", "actor-1.b_2")
    assert str(parse_grant(["sample:b", "publish", "sample:a"])) == "publish sample:a sample:b"
    assert parse_grant(str(parse_grant(["sample:b", "publish"])).split()) == parse_grant(
        ["publish", "sample:b"]
    )


@pytest.mark.parametrize(
    "text",
    ["", "Sample", "train", "sample:", "sample:*", "sample :a", "sample:a b", "sample:a:b", "sample:a/", " sample",
     f"sample:{A}/deployments/default", "sample:é", "sample:" + "x" * 129, "sample\n"],
)  # fmt: skip
def test_what_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected one of sample, publish, observe, operate"):
        parse_scope(text)


def test_the_documented_keys_can_be_configured(tmp_path: Path) -> None:
    docs = Path(__file__).parents[1] / "docs"
    for page in ("api.md", "tinker.md"):
        text = (docs / page).read_text()
        file = tmp_path / page
        [config] = [part for part in text.split("```toml\n")[1:] if "api_keys" in part]
        file.write_text(config.partition("```")[0])
        keys = [key for key in load_settings(str(file), {}).gateway.api_keys if not isinstance(key, str)]
        assert len(keys) >= 2
        assert Authenticator(keys).required


def test_a_policy_has_its_place_and_is_refused_until_there_are_any() -> None:
    with pytest.raises(ConfigError, match="a scope is for a whole deployment"):
        parse_scope("publish:default/actor")


def test_operate_contains_the_others_and_nothing_contains_operate() -> None:
    assert all(EVERYTHING.everywhere((scope,)) for scope in SCOPES)
    assert not any(NOTHING.anywhere((scope,)) for scope in SCOPES)
    for scope in (SAMPLE, PUBLISH, OBSERVE):
        one = parse_grant([scope])
        assert [other for other in SCOPES if one.anywhere((other,))] == [scope]


def test_a_scope_on_one_deployment_is_for_that_name_alone() -> None:
    grant = parse_grant(["sample:a", "operate:b"])
    for name, scopes in {"a": [SAMPLE], "b": list(SCOPES), "ab": [], "": [], "c": []}.items():
        for full in (name, f"{A}/deployments/{name}"):
            assert [scope for scope in SCOPES if grant.allows((scope,), full)] == scopes, full
    assert grant.anywhere((PUBLISH,))
    assert not any(grant.everywhere((scope,)) for scope in SCOPES)
