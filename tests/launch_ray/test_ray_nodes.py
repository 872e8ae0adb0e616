"""What is done on a node for a replica, where a placed gateway may listen, and a cluster that is not well while caches go."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.exceptions import RaySystemError

from midstream.core.config import (
    EngineSettings,
    GatewaySettings,
    LedgerSettings,
    RaySettings,
    RecordsSettings,
    Settings,
)
from midstream.core.errors import ConfigError
from midstream.launch import ray_launcher
from midstream.launch.caches import held
from midstream.launch.ray_actor import on_node
from midstream.launch.ray_launcher import RayLauncher, is_loopback
from midstream.launch.specs import ReplicaSpec


def spec(name: str, model_dir: Path, state: Path) -> ReplicaSpec:
    return ReplicaSpec(
        name=name, host="127.0.0.1", port=0, model_dir=str(model_dir), model="accounts/a/models/tiny-moe",
        deployment="d", cache_dir=str(state / "snapshots" / name), token="t", engine=EngineSettings(), log_level="info",
    )  # fmt: skip


def test_replicas_that_come_and_go_leave_no_caches_behind_on_a_node(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    caches = tmp_path / "snapshots" / "10.0.0.7"
    model = tiny_model()
    for number in range(4):
        there = on_node(spec(f"replica-{number}", model, tmp_path), "10.0.0.7", 0, ())
        assert isinstance(there, ReplicaSpec)
        with held(Path(there.cache_dir)):
            assert [directory.name for directory in caches.iterdir()] == [f"replica-{number}"]
            on_node(spec("replica-9", model, tmp_path), "10.0.0.7", 0, ())
            assert {directory.name for directory in caches.iterdir()} == {f"replica-{number}", "replica-9"}
        (caches / "replica-9").joinpath(".lock").unlink(missing_ok=True)
        (caches / "replica-9").rmdir()


def test_records_that_a_replica_left_on_a_node_go_to_the_bucket_from_there(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = msgspec.structs.replace(
        spec("replica-3", tiny_model(), tmp_path),
        records=RecordsSettings(bucket="s3://kept"),
        records_dir=str(tmp_path / "records" / "replica-3"),
    )
    there = on_node(kept, "10.0.0.7", 0, ())
    assert isinstance(there, ReplicaSpec)
    asked: list[tuple[Path, str]] = []
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(ray_launcher, "upload_stranded", lambda root, url: asked.append((root, url)) or True)
    assert ray_launcher.upload_stranded_on(str(tmp_path / "records"), "s3://kept")
    assert asked == [(Path(there.records_dir).parent, "s3://kept")]


def test_a_missing_mount_is_named_and_not_filled_with_the_built_in_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr("midstream.models.tiny_moe.write_tiny_moe", made.append)
    mount = tmp_path / "mnt" / "tiny-moe"
    with pytest.raises(ConfigError, match=f"there is no model in {mount}"):
        on_node(spec("replica-0", mount, tmp_path / "state"), "10.0.0.7", 0, ())
    built_in = tmp_path / "state" / "models" / "tiny-moe"
    # Nothing was written really.
    with pytest.raises(ConfigError, match=f"there is no model in {built_in}"):
        on_node(spec("replica-0", built_in, tmp_path / "state"), "10.0.0.7", 0, ())
    assert made == [built_in]


def test_loopback_is_seen_by_whatever_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"localhost": ["127.0.0.1", "::1"], "debian": ["127.0.1.1"], "both": ["127.0.1.1", "10.0.0.7"]}

    def getaddrinfo(host: str, *arguments: object, **more: object) -> list[Any]:
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(0, 0, 0, "", (address, 0)) for address in found.get(host, [host])]

    monkeypatch.setattr(ray_launcher.socket, "getaddrinfo", getaddrinfo)
    hosts = (
        "127.0.0.1",
        "127.0.0.7",
        "::1",
        "localhost",
        "debian",
        "both",
        "10.0.0.7",
        "fe80::1%eth0",
        "nowhere",
    )
    assert [host for host in (*hosts, "0.0.0.0", "::", "") if is_loopback(host)] == list(hosts[:5])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_placed_gateway_that_only_its_own_node_would_reach_is_refused(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in ("127.0.0.2", "10.0.0.7")]
    monkeypatch.setattr(ray_launcher, "_connect", lambda settings: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    settings = Settings(
        gateway=GatewaySettings(host=host), state_dir=str(tmp_path), ray=RaySettings(gateway=True)
    )
    with pytest.raises(ConfigError, match=rf"--host {host}: .* other nodes \(e\.g\. 10\.0\.0\.7\) reach"):
        RayLauncher(settings, "s3://bucket")
    nodes.pop()
    RayLauncher(settings, "s3://bucket")


def test_several_gateways_on_several_machines_need_one_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in ("127.0.0.2", "10.0.0.7")]
    monkeypatch.setattr(ray_launcher, "_connect", lambda settings: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)

    def launcher(database: str) -> RayLauncher:
        several = RaySettings(gateway=True, gateways=2, gateway_resources={"gateway": 1})
        settings = Settings(
            gateway=GatewaySettings(host="0.0.0.0"),
            state_dir=str(tmp_path),
            ledger=LedgerSettings(database=database),
            ray=several,
        )
        return RayLauncher(settings, "s3://bucket")

    for database in ("postgresql://h/d", "postgresql+psycopg://h/d", "postgres://h/d"):
        launcher(database)
    with pytest.raises(
        ConfigError, match=r"ray\.gateways above 1 needs one database .* \(e\.g\. 10\.0\.0\.7\)"
    ):
        launcher("sqlite:////shared/ledger.db")
    nodes.pop()
    launcher("sqlite:////shared/ledger.db")


def test_cleaning_on_a_cluster_that_is_not_well_is_logged_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unwell(*arguments: object, **more: object) -> None:
        raise RaySystemError("the head is gone")

    monkeypatch.setattr(ray_launcher, "_connect", lambda settings: None)
    monkeypatch.setattr(ray, "nodes", unwell)
    launcher = RayLauncher(
        Settings(state_dir=str(tmp_path), records=RecordsSettings(bucket="s3://kept")), "s3://bucket"
    )
    launcher.remove_caches("b-replica-0", set())
    assert not launcher.upload_stranded(), "it is tried again"
    launcher.set_strange_caches_aside({"replica-0"})()
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "ab" * 28, "Alive": True}])
    monkeypatch.setattr(ray, "remote", unwell)
    launcher.remove_caches("b-replica-0", set())
    monkeypatch.setattr(ray, "nodes", list)
    # No node is left.
    launcher.remove_caches("b-replica-0", set())
    assert launcher.upload_stranded()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert "records of replicas that are gone wait on nodes: System error: the head is gone" in caplog.text
    assert "the head is gone" in caplog.text


def test_lines_of_several_replicas_are_not_merged() -> None:
    code = "import midstream.launch.ray_launcher; from ray._private import ray_constants as c; print(c.RAY_DEDUP_LOGS)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"
