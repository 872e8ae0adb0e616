"""What has no room yet, the gateway as an actor, and what is refused by name."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from raycluster import Nodes, RayServer, kill, serving, until

from midstream.core.config import EngineSettings, RaySettings
from midstream.core.errors import ConfigError
from midstream.core.settings import load_settings
from midstream.launch.ray_actor import on_node
from midstream.launch.ray_demand import gateway_demand, replica_demand, waiting_for
from midstream.launch.specs import ReplicaSpec

pytestmark = pytest.mark.variant

GATEWAY = """
[ray]
resources = {slot = 1}
gateway = true
gateway_resources = {gate = 1, CPU = 0.5}
"""

SEVERAL = "gateway = true\ngateways = 2\n[tinker]\nenabled = false"

slow = pytest.mark.timeout(900)


@slow
def test_a_replica_that_has_no_room_says_so_and_starts_when_there_is(nodes: Nodes, tmp_path: Path) -> None:
    config = "[ray]\ncpus = 0.5\nresources = {big = 1}\n"
    with serving(tmp_path, nodes, "--replicas", "1", "--no-tinker", config=config, ready=False) as server:
        waits = "replica-0: waits for {CPU: 0.5, big: 1}: the cluster has 127.0.0.2 {CPU: 1, big: 0}"
        until(lambda: waits in server.text(), server.text)
        assert server.process.poll() is None
        nodes.add(6, big=1)
        try:
            server.wait_ready()
            assert server.places == {"replica-0": "127.0.0.6"}
            server.scale(2)
            until(lambda: server.health()["deployments"][0]["failed"] == ["replica-1"], server.state)
            shown = server.http.get(f"{server.url}/v1/{server.health()['deployments'][0]['name']}").text
            assert "replica-1: waits for {CPU: 0.5, big: 1}" in shown
            server.scale(1)
            until(lambda: not server.health()["deployments"][0]["failed"], server.state)
            assert server.usable() == ["replica-0"]
        finally:
            nodes.remove(6)


@slow
def test_a_gateway_that_is_an_actor_is_replaced_also_on_another_node(
    nodes: Nodes, tmp_path: Path, free_port: int
) -> None:
    # That all nodes reach, being one machine.
    database = f"sqlite:///{tmp_path / 'ledger.db'}"
    arguments = ("--replicas", "1", "--no-tinker", "--database", database, "--port", str(free_port))
    nodes.add(6, gate=1)
    nodes.add(7, gate=1)
    with serving(tmp_path, nodes, *arguments, config=GATEWAY) as server:
        assert server.url == f"http://127.0.0.1:{free_port}"
        first = nodes.node_of("gateway")
        assert first in (6, 7)
        [pid] = nodes.children("gateway")
        kill(pid)
        until(lambda: nodes.children("gateway") not in ([], [pid]), server.text)
        until(lambda: answers(server), server.text)
        assert nodes.node_of("gateway") == first
        nodes.lose(first)
        until(lambda: answers(server), server.text)
        assert nodes.node_of("gateway") == 13 - first
        assert server.process.poll() is None
    nodes.remove(13 - first)
    assert not nodes.children("gateway")


def answers(server: RayServer) -> bool:
    """It listens and its replica serves."""
    body = {"model": "tiny-moe", "prompt": "abc", "max_tokens": 4}
    try:
        return server.http.post(f"{server.url}/v1/completions", json=body).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpus = -1", "ray.cpus must be at least 0"),
        ("gpus = inf", "ray.gpus must be at least 0 and finite"),
        ("cpus = 0", "one of ray.cpus, ray.gpus and ray.resources must be above 0"),
        ("resources = {slot = -1}", "ray.resources.slot must be at least 0"),
        ("gateway_resources = {gate = nan}", "ray.gateway_resources.gate must be at least 0 and finite"),
        ("bundles = 0", "ray.bundles must be at least 1"),
        ("strategy = 'CLOSE'", "ray.strategy"),
        ("address = 'ray://10.0.0.7:10001'", "ray.address must be HOST:PORT"),
        ("[vllm]\ngpus = 1", "set ray.gpus"),
        ('[vllm]\nurls = ["http://h:1", "http://h:2"]', "vllm.urls and launcher ray exclude each other"),
        ("gateway = true", "give --no-tinker"),
        ("gateway = true\n[tinker]\nenabled = false", "ray.gateway needs a database"),
        ("gateways = 0", "ray.gateways must be at least 1"),
        ("gateways = 2", "ray.gateways above 1 needs ray.gateway = true"),
        (SEVERAL, "ray.gateways above 1 needs ray.gateway_resources"),
        (f"gateway_resources = {{CPU = 2}}\n{SEVERAL}", "ray.gateways above 1 needs ray.gateway_resources"),
        (f'gateway_resources = {{"node:10.0.0.7" = 0.01}}\n{SEVERAL}', "ray.gateways above 1 needs"),
    ],
)
def test_a_setting_that_cannot_work_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "midstream.toml"
    database = '[ledger]\ndatabase = "postgresql://h/d"\n' if "gateways" in text else ""
    file.write_text(f'launcher = "ray"\n{database}[ray]\n{text}\n')
    with pytest.raises(ConfigError, match=says):
        load_settings(str(file), {})


def test_a_gateway_kept_on_one_node_needs_no_database(tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text('[ray]\ngateway = true\ngateway_resources = {"node:10.0.0.7" = 0.01}\n')
    settings = load_settings(
        str(file), {"launcher": "ray", "tinker.enabled": False, "ray.address": "10.0.0.7:6379"}
    )
    assert settings.ray.address == "10.0.0.7:6379"
    assert gateway_demand(settings.ray).bundles() == [{"CPU": 1.0, "node:10.0.0.7": 0.01}]


def test_what_a_replica_asks_of_the_cluster() -> None:
    demand = replica_demand(RaySettings(cpus=4, gpus=2, resources={"fast": 0.0, "rack": 1}))
    assert demand.bundles() == [{"CPU": 4, "GPU": 2, "rack": 1}]
    spread = replica_demand(RaySettings(cpus=0, gpus=8, bundles=2, strategy="STRICT_SPREAD"))
    assert (spread.bundles(), spread.strategy) == ([{"GPU": 8}, {"GPU": 8}], "STRICT_SPREAD")
    nodes = {f"10.0.0.{n}": {"CPU": 64.0, "GPU": 8.0} for n in range(10)}
    assert waiting_for("replica-3", spread, nodes, {"CPU": 600.0}) == (
        "replica-3: waits for 2 x {GPU: 8} (STRICT_SPREAD): the cluster has "
        + ", ".join(f"10.0.0.{n} {{GPU: 8}}" for n in range(8))
        + ", 2 more; free is {GPU: 0}"
    )


def spec(model_dir: Path, cache_dir: Path) -> ReplicaSpec:
    return ReplicaSpec(
        name="replica-0", host="127.0.0.1", port=0, model_dir=str(model_dir), model="accounts/a/models/m",
        deployment="d", cache_dir=str(cache_dir), token="t", engine=EngineSettings(), log_level="info",
    )  # fmt: skip


def test_what_a_node_lacks_is_named(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    caches = tmp_path / "snapshots" / "replica-0"
    with pytest.raises(ConfigError, match=f"there is no model in {tmp_path / 'gone'}: the nodes need it"):
        on_node(spec(tmp_path / "gone", caches), "10.0.0.7", 0, ())
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path / 'bucket'}: .* all nodes share"):
        on_node(spec(tiny_model(), caches), "10.0.0.7", 0, (str(tmp_path / "bucket"),))
    there = on_node(spec(tiny_model(), caches), "10.0.0.7", 7001, (str(tmp_path),))
    assert isinstance(there, ReplicaSpec)
    assert (there.host, there.port) == ("10.0.0.7", 7001)
    assert there.cache_dir == str(tmp_path / "snapshots" / "10.0.0.7" / "replica-0"), "a node's own"


def test_a_cluster_that_is_not_there_and_a_package_that_is_not_there_are_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"127.0.0.1:{taken.getsockname()[1]}"
    arguments = ["serve", "--launcher", "ray", "--port", "0", "--state-dir", str(tmp_path / "state")]
    run = "import sys; from midstream.cli import main; sys.exit(main(sys.argv[1:]))"
    without = f"import sys; sys.modules['ray'] = None; {run}"
    said = f"midstream serve: --launcher ray: no Ray cluster at {closed} that this machine is a node of: "
    for code, more, says in (
        (run, ["--ray-address", closed], said),
        (without, [], "midstream serve: --launcher ray: needs Ray: pip install 'midstream[ray]'"),
    ):
        command = [sys.executable, "-c", code, *arguments, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith(says), done.stderr
        assert "Traceback" not in done.stderr
