"""The embedded engine on a device: its numbers, what it declares, its digests, and the memory of a hot load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_helpers import request, run
from families import write_model
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.types import SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.model_runner import dispose
from midstream.engine.embedded.sampler import Sampled, SampleRow, sample, score
from midstream.engine.embedded.weights_digest import digest, kind

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05, "temperature": 1.3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {7: 3.0}},
]
VOCABULARY = 4096


def on(device: str, **settings: Any) -> EngineSettings:
    """Never the native kernels: what runs on a device are PyTorch's."""
    return EngineSettings(**{"device": device, "kernels": "torch", "kv_cache_tokens": 4096, **settings})


def sampled(logits: torch.Tensor) -> tuple[Sampled, Sampled]:
    rng = random.Random(0)
    rows, history = [], [rng.randrange(VOCABULARY) for _ in range(300)]
    for i in range(len(logits)):
        params = SamplingParams(max_tokens=1, seed=i, **SAMPLINGS[i % len(SAMPLINGS)])
        mask = rng.randbytes(VOCABULARY // 8) if i % 7 == 0 else None
        rows.append(SampleRow(params, 0, i, history, 100, i % 3, mask))
    return sample(logits, rows), score(logits, [row.history[-1] for row in rows], [0] * len(rows))


def test_samples_and_scores_are_those_of_the_cpu(device: str) -> None:
    logits = torch.randn(480, VOCABULARY, generator=torch.manual_seed(0)) * 3
    drawn, scored = sampled(logits.to(device))
    expected, expected_scores = sampled(logits)
    same = np.equal(drawn.tokens, expected.tokens)
    assert same.sum() >= 478, "a rounding may move a border between two tokens, once in a million"
    for ours, theirs in (
        (drawn.logprobs, expected.logprobs),
        (drawn.sampling_logprobs, expected.sampling_logprobs),
    ):
        assert np.array(ours)[same] == pytest.approx(np.array(theirs)[same], abs=1e-4)
    assert np.array(drawn.near_ties)[same].tolist() == np.array(expected.near_ties)[same].tolist()
    assert scored.logprobs == pytest.approx(expected_scores.logprobs, abs=1e-4)
    assert [[t for t, _ in row] for row in drawn.top] == [[t for t, _ in row] for row in expected.top]


def test_it_does_not_declare_that_numbers_are_reproducible_and_declares_the_rest(
    device: str, tiny_model: Callable[..., Path]
) -> None:
    info = EngineCore(tiny_model(), on(device)).info()
    assert not info.card.has("reproducible_sampling")
    assert [f for f in ("routes", "grammars", "kv_provenance", "near_ties") if not info.card.has(f)] == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma2", "mixtral", "deepseek-v3", "gpt-oss"])
def test_bfloat16_is_as_near_float32_as_transformers_own_bfloat16_is(
    device: str, family: str, tmp_path: Path, figure: Callable[..., None]
) -> None:
    """At the median: where two experts are near each other, either may be chosen, and numbers are off by far more."""
    directory = write_model(family, tmp_path)
    core = EngineCore(directory, on(device, dtype="bfloat16"))
    given = [int(token) for token in np.random.default_rng(0).integers(0, 128, 90)]
    (got,) = run(core, [request("b", given, max_tokens=1)]).values()
    exact, own = (plain_logprobs(directory, given, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = np.array([record.logprob for record in got.prompt[1:]])
    off, own_off = (float(np.median(np.abs(numbers - exact))) for numbers in (ours, own))
    figure(**{f"bfloat16 {family}, nats off at the median": [round(off, 4), round(own_off, 4)]})
    assert off < 2 * own_off


def plain_logprobs(directory: Path, ids: list[int], dtype: torch.dtype) -> np.ndarray:
    """Of each token but the first, by transformers on the CPU."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        logprobs = plain(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    picked: np.ndarray = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return picked


def test_equal_files_have_equal_digests_and_others_have_others(
    device: str, tiny_model: Callable[..., Path]
) -> None:
    core = EngineCore(tiny_model(seed=1), on(device))
    first = core.weights()
    found = [digest(first)]
    for seed in (1, 2):
        core.set_staged(core.stage(tiny_model(seed=seed)))
        core.commit(f"seed-{seed}")
        assert kind(core.weights()) == kind(first)
        found.append(digest(core.weights()))
    assert found[0] == found[1] != found[2]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of 135 million parameters."""
    config = transformers.Qwen2Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(tmp_path_factory.mktemp("larger") / str(seed))
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made[-1])
    return made


def test_a_hot_load_takes_the_room_of_one_more_model_and_gives_it_back(
    device: str, larger: list[Path], figure: Callable[..., None]
) -> None:
    if device == "cpu":
        pytest.skip("PyTorch counts the memory of devices only")
    core = EngineCore(larger[0], on(device))
    run(core, [request("before", range(2, 400), max_tokens=4)])
    weights = sum(tensor.nbytes for _, tensor in core.weights())
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    kept = []
    for number in range(4):
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        core.set_staged(core.stage(larger[(number + 1) % 2]))
        staged_s = time.perf_counter() - began
        assert torch.cuda.max_memory_allocated() - before <= 1.1 * weights
        core.commit(f"step-{number}")
        run(core, [request(f"after-{number}", range(2, 400), max_tokens=4)])
        dispose(core.take_retired())
        assert torch.cuda.memory_allocated() - before <= 0.02 * weights
        kept.append(torch.cuda.memory_reserved() - reserved)
    figure(
        weights_mb=round(weights / 1e6),
        reserved_after_swaps_mb=[round(size / 1e6) for size in kept],
        staged_s=round(staged_s, 3),
    )
    assert max(kept) <= 1.5 * weights, "freed memory is used again"
