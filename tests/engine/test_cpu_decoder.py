"""The native kernels by themselves: shapes at the edges of their tiles, and bits that depend on nothing they should not."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_helpers import needs_compiler
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.engine.embedded.attention import IMPLEMENTATION
from midstream.engine.embedded.loading import checked_decoder
from midstream.engine.step import StepBatch
from midstream_kernels import CpuDecoder, KernelsUnavailable
from midstream_kernels.decoder import PackedCache

VOCAB, POSITIONS, BLOCKS = 267, 512, 64


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


#: what is at an edge: heads per KV head, head_dim, sizes that fill no panel, windows, expert counts
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "seven-heads-a-group": (
        "Qwen2Config",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 224},
    ),
    "nine-heads-a-group": (
        "LlamaConfig",
        {"num_attention_heads": 9, "num_key_value_heads": 1, "hidden_size": 288},
    ),
    "head-dim-96": ("Qwen3Config", {"head_dim": 96}),
    "head-dim-256": ("Qwen3Config", {"head_dim": 256, "num_hidden_layers": 1}),
    "narrow-window": ("MistralConfig", {"sliding_window": 5, "head_dim": 32}),
    "odd-sizes": ("LlamaConfig", {"intermediate_size": 48, "hidden_size": 144, "head_dim": 32}),
    "head-dim-16": ("MixtralConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "head-dim-20-norms": ("Qwen3Config", {"head_dim": 20}),
    "head-dim-24-biases": ("LlamaConfig", {"head_dim": 24, "attention_bias": True}),
    "head-dim-80": ("MistralConfig", {"head_dim": 80, "sliding_window": 24}),
    "linear-rope": ("LlamaConfig", {"head_dim": 16, "rope_parameters": rope("linear", factor=4.0)}),
    "dynamic-rope": ("LlamaConfig", {"head_dim": 16, "rope_parameters": rope("dynamic", factor=4.0)}),
    "yarn-rope": (
        "LlamaConfig",
        {"head_dim": 16, "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    ),
    "llama3-rope": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "untied": ("LlamaConfig", {}),
    "one-expert": ("MixtralConfig", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "300-experts": (
        "Qwen3MoeConfig",
        {"num_experts": 300, "num_experts_per_tok": 5, "moe_intermediate_size": 16},
    ),
    "head-dim-264": ("LlamaConfig", {"head_dim": 264, "num_hidden_layers": 1}),
    "mixed-layers": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
}


FUSED = [shape for shape in SHAPES if shape != "head-dim-264"]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    needs_compiler("native")


def model(shape: str, dtype: torch.dtype) -> Any:
    kind, changes = SHAPES[shape]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    }
    if kind in ("Qwen3MoeConfig", "MixtralConfig"):
        sizes["head_dim"] = 32
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**sizes, **changes}), dtype=dtype
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape) * (0.2 if parameter.ndim == 1 else 0.08)
            parameter.copy_(values + 1 if "norm" in name else values)
    return module.eval().requires_grad_(False)


def poisoned(decoder: CpuDecoder) -> PackedCache:
    """A cache whose unwritten slots are all NaN."""
    cache = decoder.new_cache(BLOCKS * 16)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(-1)
    return cache


def step(parts: list[tuple[np.ndarray, int, int, np.ndarray]]) -> StepBatch:
    """parts: (ids of the whole sequence, first, last, block table)."""
    rows, offset, spans, positions, slots = 0, 0, [], [], []
    for _, first, last, table in parts:
        at = np.arange(first, last)
        positions.append(at)
        slots.append(table[at // 16].astype(np.int64) * 16 + at % 16)
        spans.append((rows, last - first, first, offset))
        rows, offset = rows + last - first, offset + len(table)
    return StepBatch(
        ids=np.concatenate([ids[first:last] for ids, first, last, _ in parts]),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        spans=np.array(spans, dtype=np.int32),
        blocks=np.concatenate([table for *_, table in parts]).astype(np.int32),
        block_size=16,
    )


def in_chunks(
    decoder: CpuDecoder, ids: np.ndarray, sizes: list[int], table: np.ndarray
) -> tuple[torch.Tensor, np.ndarray | None]:
    cache, first, logits, routes = poisoned(decoder), 0, [], []
    for size in sizes:
        got, taken = decoder.forward(step([(ids, first, first + size, table)]), cache, np.arange(size))
        logits.append(got)
        routes.append(taken)
        first += size
    assert first == len(ids)
    return torch.cat(logits), None if routes[0] is None else np.concatenate(routes)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", FUSED)
def test_float32_logits_and_routes_are_the_modules_own(shape: str) -> None:
    module = model(shape, torch.float32)
    ids = np.random.default_rng(0).integers(0, VOCAB, 150)
    chosen: list[torch.Tensor] = []
    for part in module.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(lambda m, i, output: chosen.append(output[2]))
    with torch.inference_mode():
        expected = module(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    decoder = CpuDecoder(module, POSITIONS, threads=2, near_tie=0.0)
    logits, routes = in_chunks(decoder, ids, [150], np.random.default_rng(1).permutation(BLOCKS)[:10])
    assert (logits - expected).abs().max().item() < 1e-4
    if chosen:
        assert routes is not None
        assert routes.dtype == (np.uint16 if decoder.num_experts > 256 else np.uint8)
        assert np.array_equal(routes, torch.stack(chosen, dim=1).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", FUSED)
def test_bits_do_not_depend_on_chunks_batch_threads_or_where_blocks_lie(
    shape: str, dtype: torch.dtype
) -> None:
    module = model(shape, dtype)
    rng = np.random.default_rng(0)
    one, two = (
        CpuDecoder(module, POSITIONS, threads=1, near_tie=0.0),
        CpuDecoder(module, POSITIONS, threads=2, near_tie=0.0),
    )
    sequences = [rng.integers(0, VOCAB, length) for length in (150, 97, 3)]
    tables = [np.arange(10), rng.permutation(np.arange(10, 20)), np.array([33])]
    alone = [in_chunks(one, ids, [len(ids)], t) for ids, t in zip(sequences, tables, strict=True)]
    for ids, (logits, routes) in zip(sequences, alone, strict=True):
        for sizes in ([1] * len(ids), [2, len(ids) - 2], [len(ids) - 1, 1]):
            got, taken = in_chunks(two, ids, sizes, rng.permutation(BLOCKS)[:10])
            assert torch.equal(got, logits)
            assert routes is None or np.array_equal(taken, routes)
    cache = poisoned(two)
    parts = list(zip(sequences, tables, strict=True))
    two.forward(step([(ids, 0, len(ids) - 2, t) for ids, t in parts]), cache, np.zeros(0, dtype=np.int64))
    last, _ = two.forward(step([(ids, len(ids) - 2, len(ids), t) for ids, t in parts]), cache, np.arange(6))
    assert torch.equal(last, torch.cat([logits[-2:] for logits, _ in alone]))


def test_a_rotary_embedding_that_grows_with_the_prompt_is_not_fused_beyond_where_it_grows() -> None:
    module = model("dynamic-rope", torch.float32)
    CpuDecoder(module, POSITIONS, threads=1, near_tie=0.0)
    with pytest.raises(
        KernelsUnavailable, match="rotary embedding of type dynamic, of 512 positions where 513 are needed"
    ):
        CpuDecoder(module, POSITIONS + 1, threads=1, near_tie=0.0)


def test_heads_that_do_not_fit_the_kernels_when_they_are_filled_up_are_not_fused() -> None:
    with pytest.raises(KernelsUnavailable, match="head_dim 264, which takes more than 256"):
        CpuDecoder(model("head-dim-264", torch.float32), POSITIONS, threads=1, near_tie=0.0)


def test_positions_beyond_the_rotary_table_are_refused_not_read() -> None:
    decoder = CpuDecoder(model("odd-sizes", torch.float32), 20, threads=1, near_tie=0.0)
    ids = np.zeros(21, dtype=np.int64)
    cache = decoder.new_cache(32)
    decoder.forward(step([(ids, 0, 20, np.arange(2))]), cache, np.arange(1))
    with pytest.raises(RuntimeError, match="position 20 in a model with 20 positions"):
        decoder.forward(step([(ids, 20, 21, np.arange(2))]), cache, np.arange(1))


@pytest.mark.parametrize("shape", ["odd-sizes", "tied"])
def test_tokens_beyond_the_embedding_are_refused_not_read(shape: str) -> None:
    decoder = CpuDecoder(model(shape, torch.float32), 20, threads=1, near_tie=0.0)
    for token in (VOCAB, -1):
        ids = np.array([0, token])
        with pytest.raises(IndexError, match="index out of range in self"):
            decoder.forward(step([(ids, 0, 2, np.arange(1))]), decoder.new_cache(16), np.arange(1))


def test_an_output_layer_that_is_tied_to_the_embedding_is_in_memory_once() -> None:
    def held(shape: str) -> int:
        decoder = CpuDecoder(model(shape, torch.bfloat16), POSITIONS, threads=1, near_tie=0.0)
        return sum(tensor.nbytes for _, tensor in decoder.weights())

    assert held("tied") == held("untied") - VOCAB * 128 * 2


def test_a_context_shorter_than_the_check_at_start_is_checked_all_the_same() -> None:
    module = model("odd-sizes", torch.float32)
    module.config.max_position_embeddings = 16
    module.set_attn_implementation(IMPLEMENTATION)
    assert isinstance(checked_decoder(module, EngineSettings(kernels="native")), CpuDecoder)


def test_a_linear_map_that_does_more_than_multiply_is_not_fused() -> None:
    """An adapter or a quantised layer keeps its base layer's name, shape and weight."""

    class Adapted(torch.nn.Linear):
        pass

    module = model("odd-sizes", torch.float32)
    module.model.layers[1].mlp.up_proj.__class__ = Adapted
    with pytest.raises(KernelsUnavailable, match="Adapted is not a plain linear map"):
        CpuDecoder(module, POSITIONS, threads=1, near_tie=0.0)


def test_a_kernel_without_huge_pages_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    decoder = CpuDecoder(model("odd-sizes", torch.float32), POSITIONS, threads=1, near_tie=0.0)
    logits, _ = in_chunks(decoder, np.arange(3), [3], np.arange(1))
    assert torch.isfinite(logits).all()
