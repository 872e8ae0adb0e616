"""Replicas that others run join and leave, weights, draining: the API over a real ledger, the settings, a DNS name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import reconciler
from openapi_answers import Checked
from reports import replica_report

from midstream.api.app import control_app
from midstream.core.errors import ConfigError
from midstream.core.served_names import ServedNames
from midstream.fleet.desired_state import DesiredState, Running, RunningReplica, Wanted, replica_count
from midstream.fleet.membership import (
    MembershipApi,
    Resolver,
    entries_of_settings,
    merged,
    replica_name,
)
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.view import ReplicaEntry
from midstream.ledger import DeploymentRow, Ledger, NewDeployment, sqlite_url
from midstream.proxy.metrics import GatewayMetrics

A = "accounts/local"
DEFAULT, B = f"{A}/deployments/default", f"{A}/deployments/b"
FAR = "http://10.0.0.7:9000"


class Server:
    """The control side of a gateway with one replica of its own, and a supervisor that runs it."""

    def __init__(self, ledger: Ledger, row: DeploymentRow, settings: dict[str, ReplicaEntry]) -> None:
        self.ledger = ledger
        self.told = Wanted()
        self.now = 0.0
        self.deployments = Deployments(self._run_time(row))
        self.desired_state = DesiredState(
            ledger,
            self.deployments,
            self._run_time,
            self._tell,
            settings=settings,
            monotonic=lambda: self.now,
        )
        api = MembershipApi(
            ledger,
            self.deployments,
            allowed=("10.0.0.7", "other:1"),
            changed=self.desired_state.look_once,
            clock=lambda: 1000.0 + self.now,
        )
        app = control_app(self.deployments, GatewayMetrics(self.deployments), apis=[api])
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(Checked(app)), base_url="http://gateway")

    def _tell(self, wanted: Wanted) -> None:
        self.told = wanted

    def _run_time(self, row: DeploymentRow) -> Deployment:
        replicas = ReplicaSet(DeploymentReplicas())
        names = ServedNames(row.model, row.name)
        return Deployment(names, replicas, reconciler(replicas), wanted=replica_count(row))

    @property
    def replicas(self) -> ReplicaSet:
        return self.deployments.default.replicas

    async def look(self) -> None:
        running = [
            RunningReplica(name=r.name, deployment=r.deployment, url=f"http://{r.name}")
            for r in self.told.replicas
        ]
        self.desired_state.running(Running(tuple(running)))
        await self.desired_state.look_once()

    async def ask(
        self, method: str, path: str = "", status: int = 200, deployment: str = DEFAULT, **body: Any
    ) -> dict[str, Any]:
        answer = await self.http.request(method, f"/v1/{deployment}/replicas{path}", json=body or None)
        assert answer.status_code == status, answer.text
        shown: dict[str, Any] = answer.json()
        return shown


@asynccontextmanager
async def serve(path: Path, settings: dict[str, ReplicaEntry] | None = None) -> AsyncIterator[Server]:
    ledger = Ledger(sqlite_url(path / "ledger.sqlite"))
    row = await ledger.ensure_deployment(DEFAULT, f"{A}/models/m", "file:///bucket", "ASYNC", 1)
    server = Server(ledger, row, settings or {})
    await server.desired_state.look_once()
    await server.look()
    async with server.http:
        yield server
    ledger.close()


def names(server: Server) -> list[str]:
    return [view.name for view in server.replicas.views]


async def test_a_replica_joins_and_another_gateway_on_the_ledger_knows_it_too(tmp_path: Path) -> None:
    async def joins(server: Server) -> None:
        shown = await server.ask("POST", url=FAR + "/", weight=2.5)
        assert shown == {
            "name": "10.0.0.7:9000", "url": FAR, "weight": 2.5, "drain": False, "standing": "member",
            "usable": False, "in_flight": 0, "snapshot": None, "leaves_at": None,
        }  # fmt: skip
        assert names(server) == ["replica-0", "10.0.0.7:9000"]
        assert [replica.name for replica in server.told.replicas] == ["replica-0"], "not ours to run"
        assert server.deployments.default.wanted_in_all == 2
        view = server.replicas.views[1]
        view.replica.hear(replica_report(replica=view.name, boot="b", ready=True))
        view.admitted = True
        health = (await server.http.get("/health")).json()["deployments"][0]
        assert (health["usable"], health["elsewhere"], health["wanted"]) == (1, 1, 1)

    async def knows(server: Server) -> None:
        assert [one["name"] for one in (await server.ask("GET"))["replicas"]] == [
            "replica-0",
            "10.0.0.7:9000",
        ]
        assert server.replicas.views[1].weight == 2.5

    async with serve(tmp_path) as server:
        await joins(server)
    async with serve(tmp_path) as server:
        await knows(server)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.8:9000",
        "http://other:2",
        "ftp://10.0.0.7:1",
        "http://10.0.0.7",
        "http://a@10.0.0.7:1",
        "http://:password@10.0.0.7:1",
        "http://@10.0.0.7:1",
        "http://10.0.0.7:1?",
        "http://10.0.0.7:1#",
        " http://10.0.0.7:1",
        "http://10.0.0.7:1\n",
        "http://10.0.0\t.7:1",
        "http://10.0.0.7:1//",
        "http://[10.0.0.7:1",
        "http://a\u2100b:1",
        5,
    ],
)
async def test_a_url_that_is_not_allowed_is_refused(tmp_path: Path, url: Any) -> None:
    async with serve(tmp_path) as server:
        for status, param, body in (
            (400, "url", {"url": url}),
            (400, "url", {"weight": 1}),
            (400, "weight", {"url": FAR, "weight": 0}),
            (400, "drain", {"url": FAR, "drain": 1}),
            (400, "name", {"url": FAR, "name": "x"}),
        ):
            error = (await server.ask("POST", status=status, **body))["error"]
            assert error["param"] == param
            assert f"{param}: " in error["message"] or f"{param!r}" in error["message"]
        await server.ask("POST", status=404, url=FAR, deployment=f"{A}/deployments/none")
        assert names(server) == ["replica-0"]


async def test_one_replica_belongs_to_one_deployment(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.ledger.create_deployment(
            NewDeployment(B, model=f"{A}/models/m", bucket_url="file:///bucket/b")
        )
        await server.desired_state.look_once()
        await server.ask("POST", url=FAR)
        for deployment in (DEFAULT, B):
            shown = await server.ask("POST", status=409, url=FAR, deployment=deployment)
            assert DEFAULT in shown["error"]["message"]
            assert shown["error"]["param"] == "url"
        await server.ask("DELETE", "/10.0.0.7:9000")
        await server.ask("POST", url=FAR, deployment=B)


async def test_a_replica_that_joins_twice_at_once_belongs_to_the_first(tmp_path: Path) -> None:
    """The calls come to two gateways, and neither has seen what the other one wrote."""

    async with serve(tmp_path) as server:
        row = await server.ledger.create_deployment(
            NewDeployment(B, model=f"{A}/models/m", bucket_url="file:///bucket/b")
        )
        await server.desired_state.look_once()
        other = Server(server.ledger, await server.ledger.deployment(DEFAULT), {})
        await other.desired_state.look_once()
        async with other.http:
            await server.ask("POST", url=FAR)
            for deployment in (B, DEFAULT):
                shown = await other.ask("POST", status=409, url=FAR, deployment=deployment)
                assert shown["error"]["message"] == f"url: 10.0.0.7:9000 belongs to {DEFAULT} already"
                assert shown["error"]["param"] == "url"
        assert (await server.ledger.deployment(B)).fields == row.fields


async def test_a_replica_that_is_removed_finishes_what_it_has(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        view = server.replicas.views[1]
        view.replica.in_flight = 1
        await server.ask("DELETE", "/10.0.0.7:9000")
        assert (view.replica.standing, server.replicas.leaving) == ("leaving", (view,))
        assert [replica.name for replica in server.told.replicas] == ["replica-0"]
        await server.look()
        assert view.replica.standing == "leaving"
        view.replica.in_flight = 0
        await server.look()
        assert (view.replica.standing, server.replicas.leaving) == ("gone", ())
        await server.ask("DELETE", "/10.0.0.7:9000", status=404)
        await server.ask("DELETE", "/replica-0", status=400)


async def test_requests_that_never_end_hold_a_removed_replica_for_so_long_only(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        view = server.replicas.views[1]
        view.replica.in_flight = 1
        await server.ask("DELETE", "/10.0.0.7:9000")
        server.now = server.deployments.default.drain_s + 1
        await server.look()
        assert view.replica.standing == "gone"


@pytest.mark.parametrize("name", ["replica-0", "10.0.0.7:9000"])
async def test_a_drained_replica_takes_nothing_new_and_is_admitted_anew_when_it_returns(
    tmp_path: Path, name: str
) -> None:
    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        view = next(view for view in server.replicas.views if view.name == name)
        view.replica.hear(replica_report(replica=name, boot="b", ready=True))
        view.admitted = True
        assert view.usable
        shown = await server.ask("PATCH", f"/{name}", drain=True)
        assert (shown["standing"], shown["drain"], shown["usable"]) == ("leaving", True, False)
        assert [replica.name for replica in server.told.replicas] == ["replica-0"], "it runs on"
        await server.look()
        assert view.replica.standing == "leaving"
        shown = await server.ask("PATCH", f"/{name}", drain=False, weight=3)
        assert (shown["standing"], shown["weight"]) == ("member", 3)
        assert not view.usable, "control says when it serves what it should"
        assert next(v for v in server.replicas.views if v.name == name) is view


@pytest.mark.parametrize("name", ["replica-0", "10.0.0.7:9000"])
async def test_a_spot_notice_is_one_call_that_may_come_again(tmp_path: Path, name: str) -> None:
    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        shown = await server.ask("PATCH", f"/{name}", drain=True, within_s=120)
        assert (shown["standing"], shown["drain"], shown["leaves_at"]) == ("leaving", True, 1120.0)
        server.now = 60.0
        again = await server.ask("PATCH", f"/{name}", drain=True, within_s=120)
        assert again["leaves_at"] == 1120.0, "it is the same notice"
        sooner = await server.ask("PATCH", f"/{name}", drain=True, within_s=10)
        assert sooner["leaves_at"] == 1070.0
        assert (await server.ask("PATCH", f"/{name}", weight=2))["leaves_at"] == 1070.0
        listed = (await server.ask("GET"))["replicas"]
        assert {one["name"]: one["leaves_at"] for one in listed}[name] == 1070.0
        stays = await server.ask("PATCH", f"/{name}", drain=False)
        assert (stays["standing"], stays["leaves_at"]) == ("member", None)
        for body in ({"within_s": 5, "weight": 1}, {"within_s": 5, "drain": False}):
            wrong = await server.ask("PATCH", f"/{name}", status=400, **body)
            assert wrong["error"]["param"] == "within_s"
        await server.ask("PATCH", f"/{name}", status=400, drain=True, within_s=-1)


@pytest.mark.parametrize("name", ["replica-0", "10.0.0.7:9000"])
async def test_what_two_calls_say_of_a_replica_at_once_counts_both(tmp_path: Path, name: str) -> None:
    """A notice that the machine goes must not be undone by an autoscaler's weight."""

    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        await asyncio.gather(
            server.ask("PATCH", f"/{name}", drain=True, within_s=120),
            server.ask("PATCH", f"/{name}", weight=2),
        )
        listed = {one["name"]: one for one in (await server.ask("GET"))["replicas"]}
        shown = listed[name]
        assert (shown["standing"], shown["leaves_at"], shown["weight"]) == ("leaving", 1120.0, 2)


async def test_a_replica_that_another_call_removes_is_not_brought_back(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.ask("POST", url=FAR)
        path = f"/v1/{DEFAULT}/replicas/10.0.0.7:9000"
        removed, _ = await asyncio.gather(
            server.http.delete(path), server.http.patch(path, json={"weight": 2})
        )
        assert removed.status_code == 200
        assert names(server) == ["replica-0"]


async def test_settings_name_replicas_and_weights_and_the_api_has_the_last_word(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        weights = {view.name: view.weight for view in server.replicas.views}
        assert weights == {"replica-0": 0.5, "10.0.0.7:9000": 4.0, "10.0.0.9:1": 1.0}
        await server.ask("PATCH", "/10.0.0.9:1", weight=7)
        nothing = await server.ask("PATCH", "/10.0.0.9:1", status=400)
        assert nothing["error"]["param"] == "weight"
        await server.ask("DELETE", "/10.0.0.9:1", status=400)
        assert server.replicas.views[2].weight == 7

    settings = entries_of_settings([FAR, "http://10.0.0.9:1"], {"replica-0": 0.5, "10.0.0.7:9000": 4.0})
    async with serve(tmp_path, settings) as server:
        await work(server)


def test_what_is_said_later_counts() -> None:
    first = {"a": ReplicaEntry("http://a:1", 2.0), "b": ReplicaEntry("http://b:1")}
    then = {"a": ReplicaEntry(drain=True), "c": ReplicaEntry(weight=3.0)}
    assert merged(first, then) == {
        "a": ReplicaEntry("http://a:1", 2.0, True),
        "b": ReplicaEntry("http://b:1"),
        "c": ReplicaEntry(weight=3.0),
    }


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.7:9000",
        "http://h:x",
        "http://h:1/path",
        "http://h:1?q",
        "ftp://h:1",
        "http://h:0",
        "http://h:65536",
        "http://a b:1",
        f"http://{'a' * 64}.x:1",
    ],
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        replica_name(url)


@pytest.mark.parametrize("name", ["replicas.local", ":80", "h:x", "h:0", "h:65536", f"{'a' * 64}.x:80"])
def test_a_dns_name_that_cannot_be_one_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Resolver(name, lambda: None)


async def test_a_dns_name_is_as_many_replicas_as_it_has_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] | OSError = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "::1"]

    async def getaddrinfo(self: object, host: str, port: int, **_: object) -> list[Any]:
        assert (host, port) == ("replicas.local", 80)
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", getaddrinfo)

    async with serve(tmp_path) as server:
        changes: list[None] = []
        server.desired_state.resolver = resolver = Resolver("replicas.local:80", lambda: changes.append(None))
        await resolver.look()
        await server.look()
        assert names(server) == ["replica-0", "10.0.0.1:80", "10.0.0.2:80", "::1:80"]
        assert server.replicas.views[3].url == "http://[::1]:80"
        found = OSError("no answer")
        await resolver.look()
        assert len(changes) == 1
        found = ["10.0.0.2"]
        kept = server.replicas.views[2]
        await resolver.look()
        await server.look()
        assert names(server) == ["replica-0", "10.0.0.2:80"]
        assert (server.replicas.views[1] is kept, len(changes)) == (True, 2)
