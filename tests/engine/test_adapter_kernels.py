"""Adapters in the native kernels: PEFT's numbers, and bits that depend neither on the batch nor on other adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_helpers import ATTENTION, EXPERTS, MLP, adapted, write_adapter, write_base
from engine_helpers import needs_compiler
from test_cpu_decoder import BLOCKS, FUSED, POSITIONS, VOCAB, model, poisoned, step
from tiers import few_fast

from midstream.engine.adapter import load_adapter
from midstream_kernels import CpuDecoder

#: name: what PEFT is asked for.
KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 16, "lora_alpha": 32, "targets": "all"},
    "odd-rank": {"r": 5, "lora_alpha": 7, "targets": "all"},
    "rank-stabilised": {"r": 8, "lora_alpha": 16, "use_rslora": True, "targets": "attention"},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"q_proj": 3, "layers.1.self_attn.o_proj": 40},
        "alpha_pattern": {"v_proj": 1},
        "targets": "attention",
    },
    "head": {"r": 4, "lora_alpha": 8, "targets": "head"},
}
#: PEFT warns of an adapter of an output layer that is tied.
UNTIED = [shape for shape in FUSED if shape != "tied"]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    needs_compiler("native")


def targets(module: Any, which: str) -> dict[str, Any]:
    experts = any("experts" in name for name, _ in module.named_parameters())
    dense = any(name.endswith("gate_proj.weight") for name, _ in module.named_parameters())
    if which == "attention":
        return {"target_modules": ATTENTION}
    if which == "head":
        return {"target_modules": ["lm_head"]}
    # PEFT cannot tell the MLPs of dense layers from the experts' by name.
    names = [*ATTENTION, "lm_head", *(MLP if dense and not experts else [])]
    return {"target_modules": names, **({"target_parameters": EXPERTS} if experts else {})}


def made(module: Any, place: Path, kind: str, seed: int) -> tuple[Any, Any]:
    """PEFT's model, and the same adapter as it is read from its files."""
    config = {**KINDS[kind]}
    peft = adapted(module, seed, **targets(module, config.pop("targets")), **config)
    if not (place / "config.json").exists():
        write_base(module, place)
    directory = place / f"{kind}-{seed}"
    write_adapter(peft, directory)
    dtype = next(module.parameters()).dtype
    return peft, load_adapter(directory, place, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    few_fast(
        ["odd-sizes", "head-dim-20-norms", "one-expert", "300-experts", "narrow-window"],
        *("odd-sizes", "head-dim-20-norms", "one-expert", "narrow-window"),
    ),
)
def test_logits_are_those_of_peft(tmp_path: Path, shape: str, kind: str) -> None:
    module = model(shape, torch.float32)
    peft, maps = made(module, tmp_path, kind, 1)
    ids = np.random.default_rng(0).integers(0, VOCAB, 70)
    with torch.inference_mode():
        expected = peft(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        plain = module(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    decoder = CpuDecoder(module, POSITIONS, threads=2, near_tie=0.0)
    table = np.random.default_rng(1).permutation(BLOCKS)[:5]
    batch = replace(step([(ids, 0, 70, table)]), adapters=(decoder.adapter(maps),))
    logits, _ = decoder.forward(batch, poisoned(decoder), np.arange(70))
    assert (expected - plain).abs().max().item() > 0.01
    assert (logits - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", few_fast(UNTIED, *(shape for shape in UNTIED if shape != "300-experts")))
def test_bits_do_not_depend_on_the_adapters_beside_them(
    tmp_path: Path, shape: str, dtype: torch.dtype
) -> None:
    module = model(shape, dtype)
    decoder = CpuDecoder(module, POSITIONS, threads=2, near_tie=0.0)
    rng = np.random.default_rng(0)
    packed = [
        decoder.adapter(made(module, tmp_path, kind, seed)[1])
        for seed, kind in enumerate(("all", "odd-rank", "rank-stabilised"))
    ]
    # Two sequences have one adapter, two have none.
    of = [packed[0], None, packed[1], packed[0], packed[2], None]
    lengths = (33, 20, 3, 17, 40, 2)
    sequences = [rng.integers(0, VOCAB, length) for length in lengths]
    tables = [np.arange(8 * i, 8 * i + 8) for i in range(len(lengths))]
    alone = []
    for ids, table, adapter in zip(sequences, tables, of, strict=True):
        batch = replace(step([(ids, 0, len(ids), table)]), adapters=(adapter,))
        alone.append(decoder.forward(batch, poisoned(decoder), np.arange(len(ids)))[0])
        if adapter is None:
            plain = replace(batch, adapters=())
            got = decoder.forward(plain, poisoned(decoder), np.arange(len(ids)))[0]
            assert torch.equal(got, alone[-1])
    assert not torch.equal(alone[0][:2], alone[3][:2])
    cache = poisoned(decoder)
    parts = list(zip(sequences, tables, strict=True))
    first = step([(ids, 0, len(ids) - 1, t) for ids, t in parts])
    decoder.forward(replace(first, adapters=tuple(of)), cache, np.zeros(0, np.int64))
    # The last token of each in another order of sequences.
    order = [4, 1, 0, 5, 3, 2]
    last = step([(sequences[i], lengths[i] - 1, lengths[i], tables[i]) for i in order])
    got, _ = decoder.forward(replace(last, adapters=tuple(of[i] for i in order)), cache, np.arange(6))
    assert torch.equal(got, torch.stack([alone[i][-1] for i in order]))


def test_memory_is_the_numbers_and_hardly_more(tmp_path: Path) -> None:
    module = model("odd-sizes", torch.bfloat16)
    _, maps = made(module, tmp_path, "all", 0)
    packed = CpuDecoder(module, POSITIONS, threads=1, near_tie=0.0).adapter(maps)
    numbers = sum(low.a.nbytes + low.b.nbytes for low in maps.values())
    assert packed.nbytes <= 1.25 * numbers
