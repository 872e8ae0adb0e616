"""A LoRA adapter's directory, read against its base without tensor data: what a stranger may write into one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.adapter import AdapterSpec, read_adapter
from midstream.snapshots.layout import DTYPE_BITS, CheckpointSpec, TensorSpec

VOCAB, HIDDEN = 6, 4
EXPERTS = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"


def base(*more: str) -> CheckpointSpec:
    """With these maps of HIDDEN numbers each, beside one of attention and two experts."""
    square = [Q, *(f"{EXPERTS}.{n}.{part}_proj" for n in (0, 1) for part in ("gate", "up", "down")), *more]
    shapes = {f"{path}.weight": (HIDDEN, HIDDEN) for path in square}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    return CheckpointSpec(
        {n: TensorSpec("F32", shape, "model.safetensors") for n, shape in shapes.items()}, {}
    )


def written(place: Path, tensors: dict[str, tuple[str, tuple[int, int]]], **config: Any) -> Path:
    """tensors: their dtypes and shapes, by their names behind `base_model.model.`. Their numbers are zeros."""
    header: dict[str, Any] = {}
    size = 0
    for name, (dtype, (rows, columns)) in tensors.items():
        begin, size = size, size + rows * columns * DTYPE_BITS[dtype] // 8
        header[f"base_model.model.{name}"] = {
            "dtype": dtype,
            "shape": [rows, columns],
            "data_offsets": [begin, size],
        }
    encoded = json.dumps(header).encode()
    data = len(encoded).to_bytes(8, "little") + encoded + bytes(size)
    (place / "adapter_model.safetensors").write_bytes(data)
    given = {"peft_type": "LORA", "r": 1, "lora_alpha": 2} | config
    (place / "adapter_config.json").write_text(json.dumps(given))
    return place


def maps(*paths: str, outputs: int = HIDDEN) -> dict[str, tuple[str, tuple[int, int]]]:
    return {
        f"{path}.lora_{side}.weight": ("F32", shape)
        for path in paths
        for side, shape in (("A", (1, HIDDEN)), ("B", (outputs, 1)))
    }


@pytest.mark.parametrize("number", ["01", "\u0661", "9" * 5000, "2"])
def test_an_expert_has_one_name(tmp_path: Path, number: str) -> None:
    """Else one expert had two adapters, of which the engine would keep the last."""
    directory = written(tmp_path, maps(f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.{number}.gate_proj"))
    with pytest.raises(SnapshotIncompatible, match="the base model has no linear map") as refused:
        read_adapter(directory, base())
    assert len(str(refused.value)) < 1000


def test_an_embedding_is_no_linear_map(tmp_path: Path) -> None:
    directory = written(tmp_path, maps("model.embed_tokens", outputs=VOCAB))
    with pytest.raises(SnapshotIncompatible, match=r"no linear map model\.embed_tokens"):
        read_adapter(directory, base())


@pytest.mark.parametrize("dtype", ["BOOL", "I8", "F4", "F8_E4M3", "F6_E2M3", "F64"])
def test_a_copy_of_a_base_tensor_has_a_dtype_in_which_it_can_be_compared(tmp_path: Path, dtype: str) -> None:
    """As BOOL every tensor without a zero is equal."""
    copy = {"lm_head.weight": (dtype, (VOCAB, HIDDEN))}
    directory = written(tmp_path, maps(Q) | copy)
    with pytest.raises(SnapshotIncompatible, match=f"has dtype {dtype}, one of F32, F16, BF16 is expected"):
        read_adapter(directory, base())


def test_a_refusal_is_short_whatever_the_configuration_says(tmp_path: Path) -> None:
    directory = written(tmp_path, maps(Q), rank_pattern={"q_proj": 10**4000})
    with pytest.raises(SnapshotIncompatible, match=r"has rank 1, adapter_config\.json says 1000") as refused:
        read_adapter(directory, base())
    assert len(str(refused.value)) < 1000


def many(count: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.o_proj" for layer in range(count)]


def scalings(spec: AdapterSpec, paths: Iterable[str]) -> list[float]:
    return [spec.maps[path].scaling for path in paths]


def test_a_pattern_for_each_of_many_modules_is_read_in_time(tmp_path: Path) -> None:
    """As PEFT's EVA writes ranks. Each pattern is compiled once, not once for every module."""
    paths = many(1200)
    alphas = {path: number for number, path in enumerate(paths)}
    directory = written(tmp_path, maps(*paths), alpha_pattern=alphas)
    assert scalings(read_adapter(directory, base(*paths)), paths) == list(range(1200))


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        (r".*\.q_proj", True),
        (r".*q_proj", True),
        (r"self_attn\.q_proj", True),
        (r"q_proj|k_proj", True),
        (r".*\.q_proj|.*\.k_proj", False),
        (r".*.*\.q_proj", False),
        (r"self.*q_proj", False),
        (r"q_proj\\", False),
        (r"(a+)+", False),
    ],
)
def test_a_pattern_repeats_at_its_beginning_alone(tmp_path: Path, pattern: str, taken: bool) -> None:
    """Several repetitions would make a stranger's pattern slow."""
    directory = written(tmp_path, maps(Q), alpha_pattern={pattern: 5})
    if taken:
        assert scalings(read_adapter(directory, base()), [Q]) == [5]
        return
    with pytest.raises(SnapshotIncompatible, match=r"alpha_pattern has .*at the beginning are served"):
        read_adapter(directory, base())


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_without_end_are_refused(tmp_path: Path, field: str) -> None:
    patterns = {f"{'a|' * 120}{number}": 1 for number in range(1000)}
    directory = written(tmp_path, maps(Q), **{field: patterns})
    with pytest.raises(SnapshotIncompatible, match=f"{field} has patterns of [0-9]+ characters, at most"):
        read_adapter(directory, base())


def test_many_targets_are_looked_for_in_time_and_one_that_is_absent_is_named(tmp_path: Path) -> None:
    paths = many(2000)
    targets = [*(f"name{number}" for number in range(9_990)), "self_attn.o_proj"]
    directory = written(tmp_path, maps(*paths[1:]), target_modules=targets)
    with pytest.raises(SnapshotIncompatible, match=r"has nothing for model\.layers\.0\.self_attn\.o_proj"):
        read_adapter(directory, base(*paths))
    directory = written(tmp_path, maps(*paths), target_modules=targets)
    assert len(read_adapter(directory, base(*paths)).maps) == 2000


@pytest.mark.parametrize("version", [None, 18, "", "main", "0.19.1.dev0@a1b2"])
def test_square_experts_of_an_unknown_version_of_peft_are_refused(tmp_path: Path, version: Any) -> None:
    """PEFT 0.19.1 turned the matrices round, and their shapes do not tell."""
    fused = {
        f"{EXPERTS}.lora_{side}.weight": ("F32", shape)
        for side, shape in (("A", (2, HIDDEN)), ("B", (HIDDEN, 2)))
    }
    directory = written(tmp_path, fused, peft_version=version)
    with pytest.raises(SnapshotIncompatible, match=r"peft_version is .* has to say which"):
        read_adapter(directory, base())
