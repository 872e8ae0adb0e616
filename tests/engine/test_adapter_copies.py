"""Tensors of the base that an adapter's file has again: compared by their numbers, and refused on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from midstream.core.errors import SnapshotIncompatible
from midstream.engine.adapter import load_adapter

Q = "model.layers.0.self_attn.q_proj"


def directories(place: Path, copy: str, value: float) -> tuple[Path, Path]:
    base, adapter = place / "base", place / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text("{}")
    embedding = torch.ones(3, 2)
    save_file(
        {f"{Q}.weight": torch.ones(2, 2), "model.embed_tokens.weight": embedding}, base / "model.safetensors"
    )
    tensors = {
        f"base_model.model.{Q}.lora_{side}.weight": torch.ones(shape)
        for side, shape in (("A", (1, 2)), ("B", (2, 1)))
    }
    tensors[f"base_model.model.{copy}.weight"] = embedding * value
    save_file(tensors, adapter / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": 1, "lora_alpha": 3}
    (adapter / "adapter_config.json").write_text(json.dumps(given))
    return base, adapter


def test_an_equal_copy_is_passed_over(tmp_path: Path) -> None:
    base, adapter = directories(tmp_path, "model.embed_tokens", 1.0)
    loaded = load_adapter(adapter, base, torch.float32)
    assert {module: low.b.tolist() for module, low in loaded.items()} == {Q: [[3.0], [3.0]]}


@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "x\rWARNING all is lost\x1b[2J.embed_tokens", "y" * 9999 + ".embed_tokens"]
)
def test_a_copy_with_other_numbers_is_refused_on_a_short_line(tmp_path: Path, name: str) -> None:
    base, adapter = directories(tmp_path, name, 2.0)
    with pytest.raises(SnapshotIncompatible, match="is not the base model's: only LoRA is served") as refused:
        load_adapter(adapter, base, torch.float32)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300
