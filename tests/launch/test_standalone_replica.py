"""What `midstream replica` starts, by the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.core.config import ReplicaSettings, Settings, TracingSettings
from midstream.core.errors import ConfigError
from midstream.launch.standalone_replica import replica_spec

TOKEN = "known-to-both-machines"


def of(tmp_path: Path, replica: ReplicaSettings, **more: object) -> Settings:
    return Settings(state_dir=str(tmp_path), replica=replica, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_replica_gets_what_the_settings_say(tmp_path: Path, engine: str) -> None:
    replica = ReplicaSettings(
        host="10.0.0.7", port=8090, token=TOKEN, pin_drain_s=7.0, tls_cert="/c.pem", tls_key="/k.pem"
    )
    tracing = TracingSettings(endpoint="http://collector:4318")
    spec = replica_spec(of(tmp_path, replica, engine=engine, tracing=tracing), "tiny", tmp_path / "model")
    assert (spec.host, spec.port, spec.token, spec.kind) == ("10.0.0.7", 8090, TOKEN, engine)
    assert (spec.settings.pin_drain_s, spec.tls_cert, spec.tls_key) == (7.0, "/c.pem", "/k.pem")
    assert spec.tracing == tracing
    assert Path(spec.cache_dir).is_relative_to(tmp_path)


def test_a_replica_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 10.0.0.7: needs the setting replica.token"):
        replica_spec(of(tmp_path, ReplicaSettings(host="10.0.0.7")), "tiny", tmp_path / "model")
