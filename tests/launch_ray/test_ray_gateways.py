"""Several gateways on nodes of their own, over the same replicas: they agree, and the loss of one is no loss to the others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from raycluster import Nodes, RayServer, serving, until
from raystreams import TOKENS, ask, streamed

CONFIG = """
[gateway]
host = "0.0.0.0"
[ray]
resources = {slot = 1}
gateway = true
gateways = 2
gateway_resources = {gate = 1, CPU = 0.5}
"""
HOT_LOAD = "/hot_load/v1/models/hot_load"
SESSIONS = [f"trajectory {number}" for number in range(8)]

pytestmark = [pytest.mark.variant, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    path = tmp_path_factory.mktemp("gateways")
    # That all nodes reach, being one machine.
    database = f"sqlite:///{path / 'ledger.db'}"
    nodes.add(6, gate=1)
    nodes.add(7, gate=1)
    with serving(
        path, nodes, "--replicas", "2", "--no-tinker", "--database", database, config=CONFIG
    ) as running:
        yield running
    for number in (6, 7, 8):
        if number in nodes.numbers():
            nodes.remove(number)


def replicas(server: RayServer, gateway: int) -> dict[str, str]:
    """Those that a gateway can use, and what each serves."""
    rows = server.health(server.urls[gateway])["replicas"]
    return {row["name"]: row["snapshot"] for row in rows if row["usable"]}


def both_have(server: RayServer, *names: str) -> bool:
    return all(set(replicas(server, gateway)) == set(names) for gateway in (0, 1))


def load(server: RayServer, tiny_model: Callable[..., Path], identity: str) -> None:
    """Signals it to gateway 1, until both gateways see it on both replicas."""
    shutil.copytree(tiny_model(seed=3, dtype="bfloat16"), server.state_dir / "bucket" / identity)
    server.http.post(f"{server.urls[1]}{HOT_LOAD}", json={"identity": identity}).raise_for_status()
    expected = dict.fromkeys(("replica-0", "replica-1"), identity)
    until(lambda: all(replicas(server, gateway) == expected for gateway in (0, 1)), server.state)


def home(answer: httpx.Response) -> str:
    return answer.headers["x-midstream-replica"]


def test_a_session_is_at_one_replica_whichever_gateway_it_comes_to(server: RayServer, nodes: Nodes) -> None:
    assert {nodes.node_of(f"gateway-{number}") for number in (0, 1)} == {6, 7}
    assert [server.places[f"gateway-{number}"] for number in (0, 1)] == [
        url.removeprefix("http://").partition(":")[0] for url in server.urls
    ]
    homes = {session: home(ask(server, session, gateway=0)) for session in SESSIONS}
    assert set(homes.values()) == {"replica-0", "replica-1"}
    for gateway in (1, 0):
        for session in SESSIONS:
            again = ask(server, session, gateway)
            assert (home(again), again.headers["x-midstream-route-reason"]) == (homes[session], "sticky")


def test_what_one_gateway_is_told_to_load_both_serve(
    server: RayServer, tiny_model: Callable[..., Path]
) -> None:
    load(server, tiny_model, "step-1")
    for gateway in (0, 1):
        for session in SESSIONS:
            assert ask(server, session, gateway).json()["model"].endswith("@step-1")


def test_a_replica_that_one_gateway_is_told_to_let_go_ends_what_the_other_has_there(
    server: RayServer, nodes: Nodes
) -> None:
    server.scale(3, gateway=1)
    until(lambda: both_have(server, "replica-0", "replica-1", "replica-2"), server.state)
    taken = asyncio.run(streamed(server, lambda _: server.scale(2, gateway=1), "let go", gateway=0))
    assert {stream.replica for stream in taken} == {"replica-0", "replica-1", "replica-2"}
    for stream in taken:
        assert (stream.complete, stream.tokens, stream.error, stream.resumed) == (True, TOKENS, None, False)
    until(lambda: both_have(server, "replica-0", "replica-1"), server.state)
    until(lambda: nodes.node_of("replica-2") is None, server.state)


def test_the_loss_of_a_gateways_node_is_no_loss_to_the_other(
    server: RayServer, nodes: Nodes, tiny_model: Callable[..., Path]
) -> None:
    load(server, tiny_model, "step-2")
    homes = {session: home(ask(server, session, gateway=0)) for session in SESSIONS}
    lost = nodes.node_of("gateway-0")
    assert lost is not None
    streams = asyncio.run(streamed(server, lambda _: nodes.lose(lost), "beside", gateway=1))
    for stream in streams:
        assert (stream.complete, stream.tokens, stream.error, stream.resumed) == (True, TOKENS, None, False)
    for session in SESSIONS:
        turn = ask(server, session, gateway=1)
        assert (home(turn), turn.headers["x-midstream-route-reason"]) == (homes[session], "sticky")
    until(lambda: "gateway-0: waits for {CPU: 0.5, gate: 1}" in server.text(), server.text)
    server.url = server.urls[1]
    # Which the lost one would not have let go.
    server.scale(1, gateway=1)
    until(lambda: set(replicas(server, 1)) == {"replica-0"}, server.state)
    until(lambda: nodes.node_of("replica-1") is None, server.state)
    nodes.add(8, gate=1)
    until(lambda: nodes.node_of("gateway-0") == 8, server.text)
    [port] = until(lambda: up_on(server, 8), server.text)
    server.urls[0] = f"http://127.0.0.8:{port}"
    until(lambda: set(replicas(server, 0)) == {"replica-0"}, server.text)
    assert {home(ask(server, session, gateway=0)) for session in SESSIONS} == {"replica-0"}
    assert ask(server, "new", gateway=0).json()["model"].endswith("@step-2")
    assert server.process.poll() is None


def up_on(server: RayServer, node: int) -> list[str]:
    """The port at which a gateway is up there, as the log says."""
    place = f"gateway-0 is up on node 127.0.0.{node}, at 127.0.0.{node}:"
    return [line.rpartition(":")[2] for line in server.text().splitlines() if place in line]
