"""Which engine a replica gets, and which cores, GPUs or server of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.config import EngineSettings, Settings
from midstream.core.errors import ConfigError
from midstream.core.server_settings import VllmSettings
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.engine.embedded.loading import checked_decoder
from midstream.engine.vllm.engine import VllmEngine
from midstream.launch import engines
from midstream.launch.engines import (
    KERNELS_LEVEL,
    check_installed,
    engine_fields,
    make_engine,
    number_of,
    requests_max,
)
from midstream.launch.specs import ReplicaSpec


def spec(folder: Path, **more: object) -> ReplicaSpec:
    fields = {
        "name": "replica-0",
        "host": "127.0.0.1",
        "port": 0,
        "model_dir": str(folder / "model"),
        "model": "accounts/a/models/m",
        "deployment": "accounts/a/deployments/d",
        "cache_dir": str(folder / "cache"),
        "token": "",
        "engine": EngineSettings(max_running=5, max_waiting=7),
        "log_level": "info",
    }
    return ReplicaSpec(**(fields | more))  # type: ignore[arg-type]


def test_an_embedded_engine_asks_for_nothing(tmp_path: Path) -> None:
    assert engine_fields(Settings(), 3, 4) == {"kind": "embedded"}
    plain = spec(tmp_path)
    assert isinstance(make_engine(plain), EmbeddedEngine)
    assert requests_max(plain) == 12


def test_a_vllm_replica_gets_its_server_or_starts_one(tmp_path: Path) -> None:
    urls = ("http://a:1", "http://b:2")
    settings = Settings(engine="vllm", vllm=VllmSettings(urls=urls, max_waiting=9))
    assert [engine_fields(settings, i, 2)["server_url"] for i in range(2)] == list(urls)
    with pytest.raises(ConfigError, match=r"vllm\.urls names 2 servers: there is none for replica 2"):
        engine_fields(settings, 2, 3)
    twice = Settings(engine="vllm", vllm=VllmSettings(urls=("http://a:1", "http://a:1/")))
    with pytest.raises(ConfigError, match="twice"):
        engine_fields(twice, 0, 2)
    for given_settings in (settings, Settings(engine="vllm")):
        made = spec(tmp_path, **engine_fields(given_settings, 1, 2))
        engine = make_engine(made)
        assert isinstance(engine, VllmEngine)
        assert (urls[1] in repr(engine)) == (given_settings is settings)
        assert requests_max(made) == given_settings.vllm.max_waiting


@given(st.sets(st.integers(0, 63), min_size=1, max_size=16), st.integers(1, 20), st.integers(0, 3))
def test_replicas_of_one_machine_do_not_share(cores: set[int], replicas: int, gpus: int) -> None:
    settings = Settings(engine="vllm", vllm=VllmSettings(gpus=gpus))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "usable_cores", lambda: sorted(cores))
        fields = [engine_fields(settings, i, replicas) for i in range(replicas)]
        assert engine_fields(settings, 0, 1, alone=True)["cores"] == ()
    given_cores = [core for each in fields for core in each["cores"]]
    assert all(each["cores"] for each in fields)
    assert set(given_cores) <= cores
    if replicas <= len(cores):
        assert len(set(given_cores)) == len(given_cores)
        assert {len(each["cores"]) for each in fields} == {len(cores) // replicas}
    given_gpus = [gpu for each in fields for gpu in each["gpus"]]
    assert given_gpus == list(range(replicas * gpus))


def test_the_cores_are_some_that_this_process_may_run_on() -> None:
    cores = engines.usable_cores()
    assert cores == sorted(set(cores))
    assert cores


def test_a_level_of_kernels_that_does_not_exist_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNELS_LEVEL, "x86-64-v9")
    with pytest.raises(
        ConfigError, match="MIDSTREAM_KERNELS_LEVEL=x86-64-v9: the levels of this machine are "
    ):
        check_installed(Settings())
    with pytest.raises(ConfigError, match="x86-64-v9"):
        checked_decoder(torch.nn.Linear(1, 1), EngineSettings())


@pytest.mark.parametrize(
    ("name", "number"), [("replica-0", 0), ("default-replica-12", 12), ("alone", 0), ("7", 7)]
)
def test_the_number_of_a_replica_is_at_the_end_of_its_name(name: str, number: int) -> None:
    assert number_of(name) == number
