"""reproducible_sampling, where it is declared: tokens and numbers are the same to the last bit, whatever else is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from engine_helpers import Collected, needs_compiler, request, run
from families import LLAMA3_ROPE, SIZES
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.embedded.core import EngineCore

ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64, **ROPE}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

#: By name: config class and what differs from SIZES. Of each family with heads of 32 and of another size.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-head-16-llama3-rope": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama-head-24-linear-rope": (
        "LlamaConfig",
        {"head_dim": 24, "rope_parameters": {"rope_type": "linear", **ROPE}},
    ),
    "llama-dynamic-rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    "llama-head-80-yarn-rope": ("LlamaConfig", {"head_dim": 80, "rope_parameters": YARN}),
    "mistral-head-16": ("MistralConfig", {"head_dim": 16, "sliding_window": 24}),
    "mixtral": ("MixtralConfig", MOE),
    "mixtral-head-16": ("MixtralConfig", {"head_dim": 16, **MOE}),
    "qwen2-hidden-64": ("Qwen2Config", {"hidden_size": 64}),
    "qwen3-head-16": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe-head-16": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 20, "num_experts_per_tok": 3},
    ),
}


def write(name: str, directory: Path, dtype: str) -> Path:
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for tensor in model.parameters():
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.15)
    model.save_pretrained(directory)
    return directory


def core(directory: Path, batch_tokens: int, threads: int, cache: int = 8192) -> EngineCore:
    return EngineCore(
        directory,
        EngineSettings(max_batch_tokens=batch_tokens, max_running=16, kv_cache_tokens=cache, threads=threads),
    )


def numbers(got: Collected) -> list[TokenRecord]:
    assert got.finish is not None
    return [*got.prompt, *got.tokens]


def beside(count: int, first: int) -> list[GenerateRequest]:
    """Other requests, of all lengths and ways to sample."""
    rng = random.Random(first)
    return [
        request(
            f"beside{first + i}",
            [rng.randrange(128) for _ in range(rng.randrange(1, 90))],
            seed=i,
            max_tokens=rng.randrange(1, 30),
            temperature=rng.choice((0.0, 0.7)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_all_numbers_are_the_same_to_the_last_bit_whatever_runs_beside(
    name: str, dtype: str, tmp_path: Path
) -> None:
    needs_compiler("native")
    directory = write(name, tmp_path / "model", dtype)
    first, *others = (core(directory, *how) for how in ((1024, 1), (40, 2), (1024, 2, 640)))
    assert first.info().card.has("reproducible_sampling")
    rng = random.Random(1)
    asked = [
        request(f"asked{i}", [rng.randrange(128) for _ in range(size)], seed=i, max_tokens=24, **sampling)
        for i, (size, sampling) in enumerate(
            ((70, {"top_p": 0.9}), (33, {"top_k": 20, "temperature": 0.8}), (1, {}))
        )
    ]
    alone = {r.request_id: numbers(run(first, [r])[r.request_id, 0]) for r in asked}
    assert all(len(records) == len(r.prompt) + 24 for r, records in zip(asked, alone.values(), strict=True))
    for number, engine in enumerate(others):
        results = run(engine, [*beside(5, 10 * number), *asked, *beside(4, 10 * number + 5)])
        for r in asked:
            assert numbers(results[r.request_id, 0]) == alone[r.request_id]
        resumed = [
            msgspec.structs.replace(
                r,
                request_id=f"resumed-{r.request_id}",
                emitted=(tuple(record.token_id for record in alone[r.request_id][len(r.prompt) :][:9]),),
                prompt_records=0,
                salt=b"not what is cached",
            )
            for r in asked
        ]
        results = run(engine, [*beside(3, 10 * number + 9), *resumed])
        for r, again in zip(asked, resumed, strict=True):
            assert numbers(results[again.request_id, 0]) == alone[r.request_id][len(r.prompt) + 9 :]
