"""The grammar of scopes, what a grant allows, and that every route there is has an entry in the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from midstream.api.app import control_app
from midstream.api.board import Board
from midstream.api.dashboard import dashboard_routes
from midstream.api.deployments import deployment_routes
from midstream.api.hotload import hotload_routes
from midstream.api.reference import reference_routes
from midstream.core.errors import ConfigError
from midstream.core.scopes import (
    EVERYTHING,
    GATEWAY_ROUTES,
    NOTHING,
    OBSERVE,
    OPERATE,
    PUBLIC,
    PUBLISH,
    SAMPLE,
    SCOPES,
    TINKER_ROUTES,
    need_of,
    parse_grant,
    parse_scope,
)
from midstream.core.settings import load_settings
from midstream.core.versions import ServedNames
from midstream.fleet.loop import Reconciler
from midstream.fleet.membership import membership_routes
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replicas import ReplicaSet
from midstream.proxy.auth import Authenticator
from midstream.proxy.metrics import GatewayMetrics
from midstream.tinker.app import tinker_app
from midstream.tinker.futures import Futures
from midstream.tinker.store import Store
from midstream.tinker.types import Served

A = "accounts/local"


def routes_of(app: Starlette) -> set[tuple[str, str]]:
    """(method, path) of every route of an app."""
    routes = cast("list[Route]", app.routes)
    assert all(isinstance(route, Route) for route in routes)
    return {(method, route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}


def whole_gateway() -> Starlette:
    nothing = cast("Any", None)
    names, replicas = ServedNames(f"{A}/models/m", f"{A}/deployments/default"), ReplicaSet([])
    deployments = Deployments(Deployment(names, replicas, Reconciler(nothing, replicas, names.deployment)))
    metrics = GatewayMetrics(deployments)
    routes = [
        *deployment_routes(nothing, deployments, bucket="file:///b", changed=nothing),
        *membership_routes(nothing, deployments, allowed=(), changed=nothing),
        *hotload_routes(nothing, deployments),
        *dashboard_routes(Board(deployments, metrics), lambda: True),
        *reference_routes(lambda: ({}, {})),
    ]
    return control_app(deployments, metrics, keyed=True, extra_routes=routes)


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


def test_every_route_of_the_gateway_and_of_the_tinker_front_is_in_the_table_and_nothing_else_is() -> None:
    assert routes_of(whole_gateway()) - PUBLIC == set(GATEWAY_ROUTES)
    assert routes_of(whole_front()) - PUBLIC == set(TINKER_ROUTES)


def test_the_gateway_that_is_served_has_no_further_routes() -> None:
    """A module that adds routes in launch/gateway.py belongs into whole_gateway() above."""
    wiring = Path(control_app.__code__.co_filename).parents[1] / "launch" / "gateway.py"
    made = {word.partition("(")[0].strip("*") for word in wiring.read_text().split() if "_routes(" in word}
    assert made == {
        "deployment_routes",
        "membership_routes",
        "hotload_routes",
        "dashboard_routes",
        "reference_routes",
    }


def test_a_route_that_is_not_in_the_table_needs_operate_on_every_deployment() -> None:
    need = need_of(GATEWAY_ROUTES, "GET", "/new")
    assert need is not None
    assert (need.scopes, need.on) == ((OPERATE,), "every")
    assert need_of(GATEWAY_ROUTES, "HEAD", "/metrics") == GATEWAY_ROUTES["GET", "/metrics"]
    assert need_of(GATEWAY_ROUTES, "HEAD", "/health") is None


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
