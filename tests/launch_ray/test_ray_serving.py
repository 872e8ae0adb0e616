"""One server over several nodes of a Ray cluster: served, hot-loaded, scaled, and kept up when processes and nodes are lost."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raycluster import Nodes, RayServer, kill, serving, until
from raystreams import STREAMS, TOKENS, ask, streamed

STRANGE = (
    # A cache on a node, of a deployment that nobody knows any more.
    "snapshots/127.0.0.4/gone-replica-0"
)
GROUPS = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
for group in ray.util.placement_group_table().values():
    if group["state"] != "REMOVED":
        print(group["name"])
"""
HOT_LOAD = "/hot_load/v1/models/hot_load"

pytestmark = [pytest.mark.variant, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    path = tmp_path_factory.mktemp("ray")
    (path / "state" / STRANGE / "step-1").mkdir(parents=True)
    with serving(path, nodes, "--replicas", "2", "--no-tinker") as running:
        yield running
    until(lambda: groups(nodes) == [], lambda: f"left: {groups(nodes)}")


@pytest.fixture(autouse=True)
def two_replicas_before_each(server: RayServer) -> None:
    server.wait_serving("replica-0", "replica-1")


def load(server: RayServer, identity: str, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, server.state_dir / "bucket" / identity)
    server.http.post(f"{server.url}{HOT_LOAD}", json={"identity": identity}).raise_for_status()
    until(lambda: set(snapshots(server).values()) == {identity}, server.state)


def snapshots(server: RayServer) -> dict[str, str]:
    return {r["name"]: r["snapshot"] for r in server.health()["replicas"]}


def groups(nodes: Nodes) -> list[str]:
    """Names of the placement groups that the cluster has, of any server."""
    command = [sys.executable, "-c", GROUPS, nodes.address]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return sorted(said.stdout.split())


def test_replicas_are_on_nodes_of_their_own_and_serve(server: RayServer, nodes: Nodes) -> None:
    assert set(server.places) == {"replica-0", "replica-1"}
    for name, address in server.places.items():
        assert address == f"127.0.0.{nodes.node_of(name)}"
    assert len(set(server.places.values())) == 2
    homes = {session: ask(server, session).headers["x-midstream-replica"] for session in map(str, range(8))}
    assert set(homes.values()) == {"replica-0", "replica-1"}
    for session, home in homes.items():
        again = ask(server, session)
        assert (again.headers["x-midstream-replica"], again.headers["x-midstream-route-reason"]) == (
            home,
            "sticky",
        )


def test_a_snapshot_is_loaded_on_all_nodes(server: RayServer, tiny_model: Callable[..., Path]) -> None:
    load(server, "step-1", tiny_model(seed=3, dtype="bfloat16"))
    for session in map(str, range(8)):
        assert ask(server, session).json()["model"].endswith("@step-1")


def test_a_killed_replica_process_comes_back_on_its_node(server: RayServer, nodes: Nodes) -> None:
    node = nodes.node_of("replica-0")
    [pid] = nodes.children("replica-0")
    kill(pid)
    until(lambda: nodes.children("replica-0") not in ([], [pid]), server.state)
    server.wait_serving("replica-0", "replica-1")
    assert nodes.node_of("replica-0") == node
    assert len(set(snapshots(server).values())) == 1, "it serves what the other one does"


def test_a_killed_actor_takes_its_replica_with_it_and_both_are_replaced(
    server: RayServer, nodes: Nodes
) -> None:
    [pid] = nodes.children("replica-1")
    worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    kill(worker)
    until(
        lambda: nodes.children("replica-1") not in ([], [pid]) and pid not in nodes.children(), server.state
    )
    server.wait_serving("replica-0", "replica-1")
    assert "replica-1 is lost with its actor on node" in server.text()


def test_scaling_up_and_down_fails_no_stream(server: RayServer, nodes: Nodes) -> None:
    async def streams_while_scaled() -> None:
        streams = await streamed(server, lambda _: server.scale(3))
        await asyncio.to_thread(server.wait_serving, "replica-0", "replica-1", "replica-2")
        taken = await streamed(server, lambda _: server.scale(2), "late")
        assert {stream.replica for stream in taken} == {"replica-0", "replica-1", "replica-2"}
        for stream in streams + taken:
            assert (stream.complete, stream.tokens, stream.error) == (True, TOKENS, None)

    asyncio.run(streams_while_scaled())
    server.wait_serving("replica-0", "replica-1")
    until(lambda: not nodes.children("replica-2"), server.state)


def test_caches_of_deployments_that_are_gone_go_from_the_nodes(server: RayServer, nodes: Nodes) -> None:
    until(lambda: not (server.state_dir / STRANGE).exists(), server.state)
    body = {"baseModel": "tiny-moe", "minReplicaCount": 1}
    account = f"{server.url}/v1/accounts/local/deployments"
    server.http.post(account, params={"deploymentId": "b"}, json=body).raise_for_status()
    server.wait_serving("b-replica-0", "replica-0", "replica-1")
    cache = server.state_dir / "snapshots" / f"127.0.0.{nodes.node_of('b-replica-0')}" / "b-replica-0"
    assert cache.is_dir()
    server.http.delete(f"{account}/b").raise_for_status()
    until(lambda: not cache.exists(), server.state)
    server.wait_serving("replica-0", "replica-1")
    assert len(list((server.state_dir / "snapshots").glob("*/replica-[01]"))) >= 2


def test_where_a_replica_cannot_start_is_not_the_only_node_it_is_tried_on(
    server: RayServer, nodes: Nodes
) -> None:
    nodes.add(6, slots=1)
    free = {3, 4, 5, 6} - {nodes.node_of("replica-0"), nodes.node_of("replica-1")}
    assert len(free) == 2
    caches = {number: server.state_dir / "snapshots" / f"127.0.0.{number}" for number in free}
    for number, directory in caches.items():
        shutil.rmtree(directory, ignore_errors=True)
        directory.write_text(f"no directory: nothing can start on node {number}")
    server.scale(3)
    said = "replica-2: on node 127.0.0."
    until(lambda: all(f"{said}{number}: " in server.text() for number in free), server.state)
    caches[6].unlink()
    server.wait_serving("replica-0", "replica-1", "replica-2")
    assert nodes.node_of("replica-2") == 6
    server.scale(2)
    server.wait_serving("replica-0", "replica-1")
    for number in free - {6}:
        caches[number].unlink()
    until(lambda: not nodes.children("replica-2"), server.state)
    nodes.remove(6)


def test_a_node_lost_under_streams(server: RayServer, nodes: Nodes) -> None:
    undisturbed = asyncio.run(streamed(server))
    lost, left = nodes.node_of("replica-0"), nodes.node_of("replica-1")
    assert lost is not None
    streams = asyncio.run(streamed(server, lambda _: nodes.lose(lost)))
    on_lost = [stream for stream in streams if stream.replica == "replica-0"]
    assert 0 < len(on_lost) < STREAMS
    for stream, whole in zip(streams, undisturbed, strict=True):
        assert stream.complete or stream.error, "none ends short without saying so"
        if stream.complete:
            assert (stream.text, stream.tokens) == (whole.text, TOKENS)
        if stream not in on_lost:
            assert (stream.complete, stream.resumed) == (True, False)
    assert any(stream.resumed and stream.complete for stream in on_lost)
    server.wait_serving("replica-0", "replica-1")
    assert nodes.node_of("replica-0") not in (None, lost, left)
    assert len(set(snapshots(server).values())) == 1, "it serves what the other one does"
    # For the tests after this one.
    nodes.add(lost, slots=1)


def test_a_server_that_stops_leaves_nothing_on_the_cluster(
    nodes: Nodes, server: RayServer, tmp_path: Path
) -> None:
    others, held = set(nodes.children()), groups(nodes)
    assert [name.rpartition("-")[0] for name in held] == ["replica-0", "replica-1"], (
        "all that is left of the others"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        with serving(tmp_path / number.name, nodes, "--replicas", "1", "--no-tinker") as short:
            assert set(nodes.children()) > others
            short.process.send_signal(number)
            code = short.process.wait(timeout=60)
            assert code == (0 if number == signal.SIGTERM else -number), short.text()[-3000:]
            until(lambda: set(nodes.children()) <= others, lambda: f"left: {nodes.children()}, had {others}")
            until(lambda: groups(nodes) == held, lambda: f"left: {groups(nodes)}, had {held}")
