"""What the Tinker front makes of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from midstream.core.config import TinkerSettings
from midstream.core.errors import ConfigError
from midstream.core.supervision import TinkerSpec
from midstream_tinker.front import max_context, served_model, trainer_start

SPEC = TinkerSpec(
    path="/nowhere/tinker.sock",
    gateway_url="http://127.0.0.1:1",
    names=("tiny", "Qwen/Qwen3-8B-Base"),
    model_dir="/nowhere",
    deployment="accounts/local/deployments/default",
    bucket="file:///nowhere",
    state_dir="/nowhere",
    api_keys=(),
    threads=3,
    settings=TinkerSettings(base_model_clients="serving", trainer_dtype="bfloat16", trainer_device="cuda"),
    log_level="info",
)


def test_the_context_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for text, context in (
        ('{"max_position_embeddings": 4096, "n": 1}', 4096),
        ('{"text_config": {"max_position_embeddings": 2048}}', 2048),
        ('{"n_positions": 1024}', None),
    ):
        config.write_text(text)
        assert max_context(tmp_path) == context
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        max_context(tmp_path)


def test_settings_reach_clients_and_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    served = served_model(replace(SPEC, model_dir=str(tmp_path)))
    assert served.names == SPEC.names
    assert (served.base_policy, served.directory) == ("serving", str(tmp_path))
    start = trainer_start(SPEC)
    assert (start.directory, start.dtype, start.device, start.threads) == ("/nowhere", "bfloat16", "cuda", 3)
