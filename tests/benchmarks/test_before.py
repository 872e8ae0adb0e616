"""A server of another commit gets its settings in the form that this commit knows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from servers import FLAT_TOKEN, TOKEN, Midstream, MidstreamBefore, Model

ROOT = Path(__file__).parents[2]
FLAT = f"class Settings:\n    {FLAT_TOKEN}: str | None = None\n"


def written(kind: type[Midstream], folder: Path) -> dict[str, object]:
    model = Model("m", folder, vocabulary=1, threads=1, vllm_cores="auto", kv_gib=1)
    server = kind(model, folder)
    server.command()
    return tomllib.loads((server.log.with_suffix("") / "midstream.toml").read_text())


def test_a_checkout_from_before_the_sections_gets_its_token_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    settings = checkout / "src" / "midstream" / "core" / "config.py"
    settings.parent.mkdir(parents=True)
    settings.write_text(FLAT)
    monkeypatch.setattr(MidstreamBefore, "checkout", checkout)
    (tmp_path / "flat").mkdir()
    flat = written(MidstreamBefore, tmp_path / "flat")
    assert flat["replica_token"] == TOKEN
    assert "replica" not in flat


def test_any_other_checkout_gets_what_this_one_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MidstreamBefore, "checkout", ROOT)
    before, now = (written(kind, tmp_path) for kind in (MidstreamBefore, Midstream))
    assert before == now
    assert now["replica"] == {"token": TOKEN}
