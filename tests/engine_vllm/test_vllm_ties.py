"""Near ties of vLLM's tokens: what the worker extension marks, and how the mark comes into records."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import GAP, FakeVllm
from resampling import is_firm, left_by
from test_vllm_both_numbers import MARKED, VOCAB, read, samplers
from test_vllm_both_numbers import extension as extension
from vllm_helpers import asking, attached, begun

from midstream.core.types import NEAR_GREEDY, NEAR_MIN_P, NEAR_TOP_K, NEAR_TOP_P, SamplingParams
from midstream.engine.embedded.sampler import sample
from midstream.engine.step import NEAR_TIE, SUM_ROUNDING, SampleRow
from midstream.engine.vllm.worker_extension import midstream_vllm_numbers as numbers

SHARE = NEAR_TIE["float32"]
NEAR = MARKED | {numbers.NEAR: (SHARE, SUM_ROUNDING)}
QUARTERS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
EQUAL = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()


def marks(extension: Any, logits: torch.Tensor, **params: Any) -> dict[int, int]:
    """By each token that vLLM may draw, its near ties."""
    sampling = SamplingParams(max_tokens=1, **params)
    asked = SimpleNamespace(
        extra_args=NEAR,
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    left = left_by(logits[0].double().numpy() / sampling.temperature, sampling, 0, 0) > -np.inf
    drawn = torch.from_numpy(np.flatnonzero(left))
    size = len(drawn)
    limits = extension.ties.TieLimits.of([asked] * size, "cpu")
    kept = torch.from_numpy(left).expand(size, -1)
    largest = logits.abs().amax(-1, keepdim=True).expand(size, -1)
    found = extension.ties.filter_ties(logits.expand(size, -1), kept, drawn, largest, limits)
    return dict(zip(drawn.tolist(), found.tolist(), strict=True))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_p": 0.8}, {0: 0, 1: 0, 2: 0}),
        ({"top_p": 0.749999}, {0: NEAR_TOP_P, 1: NEAR_TOP_P}),
        ({"top_p": 0.750001}, {0: NEAR_TOP_P, 1: NEAR_TOP_P, 2: NEAR_TOP_P}),
        ({"top_k": 2}, {0: 0, 1: 0}),
        ({"top_k": 9}, {0: 0, 1: 0, 2: 0, 3: 0}),
        # Of the three, 0.83.
        ({"top_k": 3, "top_p": 0.75}, {0: 0, 1: 0}),
        ({"min_p": 0.4}, {0: 0, 1: 0}),
        ({"min_p": 0.499999}, {0: NEAR_MIN_P, 1: NEAR_MIN_P}),
        ({"min_p": 0.500001}, {0: NEAR_MIN_P}),
        # vLLM sums behind min_p: where its border is counts for the sum.
        ({"min_p": 0.3 - 1e-7, "top_p": 0.5}, {0: NEAR_MIN_P}),
        # top_k cuts off what lies at the border.
        ({"min_p": 0.3 - 1e-7, "top_k": 2}, {0: 0, 1: 0}),
    ],
)
def test_a_border_within_rounding_is_marked(
    extension: Any, params: dict[str, Any], expected: dict[int, int]
) -> None:
    assert marks(extension, QUARTERS, **params) == expected


def test_a_token_is_marked_that_weighs_as_much_as_one_that_is_or_may_be_cut_off(extension: Any) -> None:
    """vLLM leaves all that are as heavy as the last one of top_k. Others leave two of them."""
    assert marks(extension, EQUAL, top_k=2) == {0: 0} | dict.fromkeys((1, 2, 3), NEAR_TOP_K)
    nearly = EQUAL + torch.tensor([[0.0, 3e-6, 0.0, 0.0]])
    assert marks(extension, nearly, top_k=2) == {0: 0, 1: NEAR_TOP_K}
    assert marks(extension, nearly, top_p=0.5) == {0: 0, 1: NEAR_TOP_P}


def test_marks_are_those_of_the_embedded_engine_and_of_what_rounding_may_change(extension: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8})
    marked = 0
    for number in range(240):
        logits = torch.randn(1, 40, generator=generator) * 3
        if number % 2:
            # Borders are seldom near by themselves.
            logits = (logits * 4).round() / 4
        params: dict[str, Any] = {"temperature": random.Random(number).choice((0.5, 1.0, 1.7))}
        # Where tokens are equal, the sum behind top_k depends on how many of them are left.
        params |= kinds[number // 2 % (3 if number % 2 else len(kinds))]
        found = marks(extension, logits, **params)
        rows = [SampleRow(SamplingParams(max_tokens=1, seed=i, **params), 0, i, [], 0, 0) for i in range(8)]
        drawn = sample(logits.expand(8, -1), rows)
        sampling = rows[0].params
        scores = logits[0].double().numpy()
        size = SHARE * float(np.abs(scores).max())
        for token, near in zip(drawn.tokens, drawn.near_ties, strict=True):
            # Of equal tokens, the samplers may cut off others.
            assert found.get(token, near) == near, (number, params, token)
        for token, near in found.items():
            assert is_firm(scores, sampling, token, size * (2 if near else 0.5)) == (near == 0), (
                number,
                token,
            )
            marked += near != 0
    assert marked > 20


@pytest.fixture
def hooked(extension: Any) -> type[Any]:
    runner, sampler = samplers()
    extension.hook(runner, sampler)
    return runner


def test_marks_travel_with_the_rows_that_want_them_alone(hooked: type[Any]) -> None:
    """The filters leave 3, and the second best is drawn. A grammar's row is measured by its raw logits."""
    rows = [
        (0.5, 2, NEAR),
        (0.5, 2, MARKED),
        (0.0, 2, NEAR),
        (0.5, 2, NEAR),
        (0.0, 2, MARKED),
        (0.5, 2, None),
    ]
    logits = torch.arange(VOCAB).float().flip(0).expand(len(rows), -1).clone()
    # The second to the fourth are equal.
    logits[:3, 1:4] = 9.0
    # The best two.
    logits[2] = logits[4] = torch.tensor([9.0, 9.0, *range(VOCAB - 2)])
    # Alike by the size of a logit that the grammar forbids.
    logits[3, :5] = torch.tensor([1e6, 4.0, 3.0, 3.0 - 1e-6, 2.9])
    output = hooked(rows).step(logits, {"r3": [1, 2, 3, 4]})
    assert [read(output, i).near_tie for i in range(5)] == [NEAR_TOP_K, 0, NEAR_GREEDY, NEAR_TOP_K, 0]
    assert output.logprobs_tensors.selected_token_ranks[5] <= VOCAB
    apart = torch.arange(VOCAB).float().expand(2, -1).clone()
    output = hooked([(0.5, 2, NEAR), (0.0, 2, NEAR)]).step(apart)
    assert [read(output, i).near_tie for i in range(2)] == [0, 0]
    assert read(output, 1).sampling == 0.0


def both(fake: FakeVllm) -> None:
    fake.both = True


async def test_records_have_the_marks_of_a_server_that_passed_the_proof(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=both) as (engine, fake):
        card = engine._info().card
        assert card.has("near_ties")
        assert not card.has("router_ties")
        tied = {"temperature": 0.0, "logit_bias": {9: GAP}}
        reading, (request,) = await begun(engine, fake, asking("r", **tied))
        assert request.sampling["extra_args"][numbers.NEAR] == [SHARE, SUM_ROUNDING]
        request.to_the_end()
        assert [r.near_tie for r in (await reading.ended()).records()] == [NEAR_GREEDY] * 4
        for more in ({"want_logprobs": False}, {"temperature": 1.0}):
            _, (plain,) = await begun(engine, fake, asking(str(more), **{"temperature": 0.0} | more))
            assert "extra_args" not in plain.sampling


async def test_a_server_whose_marks_are_wrong_is_used_without_them(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.both = fake.no_ties = True

    async with attached(tmp_path, set_up=set_up) as (engine, fake):
        card = engine._info().card
        assert "alike" in card.why["near_ties"]
        assert card.has("sampling_logprobs")
        _, (request,) = await begun(engine, fake, asking("r", temperature=0.7))
        assert request.sampling["extra_args"] == {numbers.MARK: True}
        _, (greedy,) = await begun(engine, fake, asking("greedy", temperature=0.0))
        assert "extra_args" not in greedy.sampling
