from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_helpers import needs_compiler
from tiers import slow

from midstream.core.types import SamplingParams
from midstream.engine.embedded.sampler import Sampler, sample, uniform
from midstream.engine.step import Sampled, SampleRow
from midstream_kernels import CpuSampler

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


@pytest.fixture(autouse=True, params=["native", slow("torch")])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both samplers."""
    needs_compiler(request.param)
    SAMPLER.append(Sampler(CpuSampler(threads=2) if request.param == "native" else None))
    yield
    SAMPLER.pop()


SAMPLER: list[Any] = []


def draw(
    position: int = 0, *, history: list[int] | None = None, prompt_len: int = 0, **params: Any
) -> Sampled:
    row = SampleRow(SamplingParams(max_tokens=1, **params), 0, position, history or [], prompt_len, 0)
    return SAMPLER[-1].sample(LOGITS, [row])


def distribution(draws: int = 4000, **params: Any) -> dict[int, float]:
    counts = Counter(draw(i, seed=7, **params).tokens[0] for i in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_the_random_number_depends_on_seed_choice_and_position_only() -> None:
    numbers = {uniform(s, i, p) for s in range(5) for i in range(5) for p in range(40)}
    assert len(numbers) == 1000
    assert all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.03
    assert uniform(2**63 + 5, 1, 9) == uniform(2**63 + 5, 1, 9)


def test_samples_follow_the_softmax() -> None:
    expected = torch.softmax(LOGITS[0], -1)
    for token, share in distribution().items():
        assert share == pytest.approx(expected[token].item(), abs=0.025)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        # So many draws show each token.
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.8}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"top_p": 0.0}, {0}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(params: dict[str, Any], kept: set[int]) -> None:
    assert set(distribution(400, **params)) == kept


def test_the_sampling_logprob_is_of_the_filtered_distribution_and_the_logprob_of_the_raw_one() -> None:
    raw = torch.log_softmax(LOGITS[0], -1)
    tempered = torch.softmax(LOGITS[0] / 0.5, -1)
    for position in range(50):
        got = draw(position, temperature=0.5, top_k=2)
        token = got.tokens[0]
        expected = (tempered[token] / tempered[:2].sum()).log().item()
        assert got.sampling_logprobs[0] == pytest.approx(expected, abs=1e-6)
        assert got.logprobs[0] == pytest.approx(raw[token].item(), abs=1e-6)


def test_greedy_takes_the_best_token_with_sampling_logprob_zero() -> None:
    got = draw(temperature=0.0)
    assert (got.tokens, got.sampling_logprobs) == ([0], [0.0])
    assert got.logprobs[0] == pytest.approx(torch.log_softmax(LOGITS[0], -1)[0].item())


def test_penalties_and_bias_change_the_choice_but_not_the_raw_logprob() -> None:
    raw = torch.log_softmax(LOGITS[0], -1)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"logit_bias": {3: 100.0}}, 3),
        ({"repetition_penalty": 10.0, "history": [0], "prompt_len": 1}, 1),
        ({"presence_penalty": 1.5, "history": [4, 0], "prompt_len": 1}, 1),
        ({"frequency_penalty": 0.6, "history": [0, 0, 0], "prompt_len": 1}, 1),
        # Prompt tokens do not count.
        ({"presence_penalty": 5.0, "history": [0], "prompt_len": 1}, 0),
    ]
    for params, expected in cases:
        got = draw(temperature=0.0, **params)
        assert got.tokens == [expected], params
        assert got.logprobs[0] == pytest.approx(raw[expected].item())


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 500] = 0.0
    for position in range(200):
        row = SampleRow(SamplingParams(max_tokens=1, seed=3), 0, position, [], 0, 0)
        assert SAMPLER[-1].sample(logits, [row]).tokens == [500]


def test_alternatives_are_the_best_raw_tokens_in_order() -> None:
    row = SampleRow(SamplingParams(max_tokens=1, temperature=0.3), 0, 0, [], 0, 3)
    (top,) = SAMPLER[-1].sample(LOGITS, [row]).top
    raw = torch.log_softmax(LOGITS[0], -1)
    assert [token for token, _ in top] == [0, 1, 2]
    assert [value for _, value in top] == pytest.approx(raw[:3].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 264, 1024, 5001])
def test_both_samplers_draw_the_same_tokens(dtype: torch.dtype, vocab: int) -> None:
    """Rows of every kind in one batch, wherever the kernel's lanes and chunks end."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn((60, vocab), generator=generator) * 3).to(dtype)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.3, "logit_bias": {1: 2.0}},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.1, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 0.0, "top_k": 1},
    ]
    rows = [
        SampleRow(
            SamplingParams(max_tokens=1, seed=-i if i % 2 else 2**63 + i, **kinds[i % 9]),
            i % 3,
            i,
            [1],
            1,
            i % 4,
        )
        for i in range(60)
    ]
    got, expected = SAMPLER[-1].sample(logits, rows), sample(logits, rows)
    assert got.tokens == expected.tokens
    assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-6)
    assert got.sampling_logprobs == pytest.approx(expected.sampling_logprobs, abs=4e-6)
    for row, top, wanted in zip(rows, got.top, expected.top, strict=True):
        assert len(top) == min(row.top_logprobs, vocab)
        assert [value for _, value in top] == pytest.approx([value for _, value in wanted], abs=2e-6)
    targets = [i % vocab for i in range(60)]
    scored = SAMPLER[-1].score(logits, targets, [2] * 60)
    raw = logits.float().log_softmax(-1)
    assert scored.logprobs == pytest.approx([raw[i, t].item() for i, t in enumerate(targets)], abs=2e-6)
    assert [t[0][1] for t in scored.top] == pytest.approx(raw.max(-1).values.tolist(), abs=2e-6)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_a_number_gives_a_logprob_that_is_not_one(bad: float, top_p: float) -> None:
    logits = torch.zeros((2, 300))
    logits[1, 250] = bad
    rows = [
        SampleRow(
            SamplingParams(max_tokens=1, seed=1, temperature=t, top_p=top_p), 0, 0, [], 0, 0, wants_mask=True
        )
        for t in (1.0, 0.0)
    ]
    for order in (rows, rows[::-1]):
        got = SAMPLER[-1].sample(logits, order)
        assert math.isfinite(got.logprobs[0])
        assert not math.isfinite(got.logprobs[1])


def test_two_equal_tokens_share_the_probability_when_all_others_have_none() -> None:
    logits = torch.full((1, 40), -float("inf"))
    logits[0, [7, 33]] = 0.0
    for position in range(200):
        row = SampleRow(SamplingParams(max_tokens=1, seed=3), 0, position, [], 0, 0)
        got = SAMPLER[-1].sample(logits, [row])
        assert got.tokens[0] in (7, 33)
        assert got.logprobs[0] == pytest.approx(math.log(0.5))
