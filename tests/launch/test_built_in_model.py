"""The built-in model is made in the state directory, and nowhere else: a mount that is missing is not filled with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.core.config import Settings
from midstream.launch.models import known_models, model_directory


def test_a_users_model_of_the_built_in_name_is_not_made_when_its_storage_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr("midstream.models.tiny_moe.write_tiny_moe", made.append)
    mounted = tmp_path / "mnt" / "models" / "tiny-moe"
    mounted.mkdir(parents=True)
    (mounted / "config.json").write_text("{}")
    settings = Settings(models={"tiny-moe": str(mounted)}, state_dir=str(tmp_path / "state"))
    _, known = known_models(settings)
    mounted.rename(tmp_path / "unmounted")
    assert model_directory(known, "tiny-moe", Path(settings.state_dir)) == mounted
    assert made == []
    own = Settings(state_dir=str(tmp_path / "state"))
    _, known = known_models(own)
    built_in = tmp_path / "state" / "models" / "tiny-moe"
    assert model_directory(known, "tiny-moe", Path(own.state_dir)) == built_in
    assert made == [built_in]
