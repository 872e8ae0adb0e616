from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from midstream.engine.embedded.sampler import Sampled, SampleRow, sample, uniform
from midstream.types import SamplingParams

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def draw(
    position: int = 0, *, history: list[int] | None = None, prompt_len: int = 0, **params: Any
) -> Sampled:
    row = SampleRow(SamplingParams(max_tokens=1, **params), 0, position, history or [], prompt_len, 0)
    return sample(LOGITS, [row])


def distribution(**params: Any) -> dict[int, float]:
    counts = Counter(draw(i, seed=7, **params).tokens[0] for i in range(4000))
    return {token: count / 4000 for token, count in counts.items()}


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
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.8}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"top_p": 0.0}, {0}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(params: dict[str, Any], kept: set[int]) -> None:
    assert set(distribution(**params)) == kept


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
        ({"presence_penalty": 5.0, "history": [0], "prompt_len": 1}, 0),  # prompt tokens do not count
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
        assert sample(logits, [row]).tokens == [500]


def test_alternatives_are_the_best_raw_tokens_in_order() -> None:
    row = SampleRow(SamplingParams(max_tokens=1, temperature=0.3), 0, 0, [], 0, 3)
    (top,) = sample(LOGITS, [row]).top
    raw = torch.log_softmax(LOGITS[0], -1)
    assert [token for token, _ in top] == [0, 1, 2]
    assert [value for _, value in top] == pytest.approx(raw[:3].tolist())
