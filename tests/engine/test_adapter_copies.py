"""What is read of an adapter's files and of a model's: tensors of the base again, and memory that no file can change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from midstream.core.errors import SnapshotIncompatible
from midstream.engine.adapter import load_adapter
from midstream.engine.embedded import loading

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


@pytest.mark.parametrize("hidden", [3, 4])
@pytest.mark.parametrize(
    ("version", "turned"),
    [("0.18.1", True), ("0.19.0", True), ("0.19.1", False), ("0.21.0.dev0@a1b2", False)],
)
def test_fused_experts_are_read_as_the_version_of_peft_wrote_them(
    tmp_path: Path, version: str, turned: bool, hidden: int
) -> None:
    """PEFT 0.19.1 turned the matrices round. With 4 inputs to 4 outputs their shapes do not tell."""
    experts, rank, inner = 2, 3, 4
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text("{}")
    place = "model.layers.0.mlp.experts"
    down = torch.zeros(experts, hidden, inner)
    save_file(
        {f"{place}.gate_up_proj": torch.zeros(experts, 2 * inner, hidden), f"{place}.down_proj": down},
        base / "model.safetensors",
    )
    a_columns, b_rows = (hidden, inner) if turned else (inner, hidden)
    a = torch.arange(experts * rank * a_columns).reshape(experts * rank, a_columns).float()
    b = torch.arange(b_rows * rank * experts).reshape(b_rows, rank * experts).float() - 7
    name = f"base_model.model.{place}.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, adapter / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "peft_version": version}
    (adapter / "adapter_config.json").write_text(json.dumps(given))

    [(module, low)] = load_adapter(adapter, base, torch.float32).items()

    # ParamWrapper.get_delta_weight in lora/layer.py of each version.
    order = "ore,eri->eio" if turned else "ore,eri->eoi"
    expected = 2 * torch.einsum(order, b.reshape(b_rows, rank, experts), a.reshape(experts, rank, a_columns))
    assert module == f"{place}.down_proj"
    assert torch.equal(low.b @ low.a, expected)


def overwrite(path: Path) -> None:
    """Write other numbers over those of the file, where they lie."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(len(data) - begin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_loaded_of_an_adapter_stays_when_its_file_is_written_over(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The file in the cache may be the trainer's own, by a link."""
    base, adapter = directories(tmp_path, "model.embed_tokens", 1.0)
    loaded = load_adapter(adapter, base, dtype)[Q]
    overwrite(adapter / "adapter_model.safetensors")
    assert (loaded.a.tolist(), loaded.b.tolist()) == ([[1.0, 1.0]], [[3.0], [3.0]])


def test_what_was_placed_of_a_model_stays_when_its_file_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    module = torch.nn.Module()
    mapped = load_file(path)
    module.register_parameter("weight", torch.nn.Parameter(mapped["weight"], requires_grad=False))
    module.register_buffer("bias", mapped["bias"])
    placed = loading._placed(module, "cpu")
    overwrite(path)
    assert (placed.weight.sum().item(), placed.bias.sum().item()) == (4.0, 2.0)
