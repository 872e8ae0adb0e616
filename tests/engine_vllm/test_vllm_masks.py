"""Sampling masks: taken beside vLLM's sampler, carried by its scheduler, read as bytes of a record, and proved at a start."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_vllm_both_numbers import VOCAB, extension, samplers
from test_vllm_kv_history import World
from test_vllm_kv_history import module as history
from vllm_helpers import asking, attached, begun

from midstream.core.masks import ALONE, EVERY, kept_ids
from midstream.core.types import GenerateRequest, TopLogprob
from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.masks import fixed_mask, read_mask
from midstream.engine.vllm.protocol import InvalidAnswer, Token, read_answer
from midstream.engine.vllm.sampling_proof import TOP_K, NoMasks, check_masks
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import IDS, MARK, MASK, WORDS

_FIXTURES = (extension, history)
MASKED = {MARK: True, MASK: True}


@pytest.fixture
def masks(extension: Any) -> Any:
    return importlib.import_module("midstream_vllm_masks")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("complete", [True, False])
def test_a_worker_answers_with_what_was_left_for_the_draws_of_those_that_ask(
    extension: Any, masks: Any, fused: bool, complete: bool
) -> None:
    kinds, sampler = samplers(fused=fused)
    if not complete:
        # As with asynchronous scheduling: the output is inside of what the runner gives.
        inner = kinds.sample_tokens
        kinds.sample_tokens = lambda self, grammar: SimpleNamespace(_model_runner_output=inner(self, grammar))
    extension.hook(kinds, sampler)
    runner = kinds([(0.5, 2, MASKED), (0.5, 2, {MARK: True}), (0.0, 0, MASKED), (1.5, 0, MASKED)])
    logits = torch.randn(4, VOCAB, generator=torch.manual_seed(3)) * 4
    answer = runner.step(logits, {"r3": [2, 7]})
    answer = getattr(answer, "_model_runner_output", answer)
    best = sorted(logits[0].topk(3).indices.tolist())
    assert {name: read_mask(mask.tolist()) for name, (mask,) in masks.of(answer).items()} == {
        "r0": read_mask([IDS, *best]),
        "r3": read_mask([IDS, 2, 7]),
    }
    assert best == list(kept_ids(read_mask([IDS, *best]), best[0]) or ())


def test_nothing_of_a_step_is_answered_with_a_later_one(extension: Any, masks: Any) -> None:
    kinds, sampler = samplers()
    extension.hook(kinds, sampler)
    runner = kinds([(0.5, 2, MASKED)])
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(4))
    assert masks.of(runner.step(logits)).keys() == {"r0"}
    runner.requests["r0"].sampling_params.extra_args = {MARK: True}
    runner.midstream_marked = None
    assert masks.of(runner.step(logits)) == {}


@given(st.sets(st.integers(0, 3000), min_size=1))
def test_what_is_packed_is_read_again(ids: set[int]) -> None:
    ordered = sorted(ids)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(WORKER_DIR))
        pack = importlib.import_module("midstream_vllm_masks").pack
    numbers = pack(np.array(ordered)).tolist()
    assert len(numbers) <= 1 + min(len(ordered), ordered[-1] // 32 + 1)
    assert list(kept_ids(read_mask(numbers), ordered[0]) or ()) == ordered


@pytest.mark.parametrize("numbers", [[IDS], [IDS, 3, 3], [IDS, 4, 2], [WORDS, 0], [-3, 1], [IDS, -1]])
def test_numbers_that_are_no_mask_are_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="no sampling mask"):
        read_mask(numbers)


class Lists(NamedTuple):
    """vLLM's SamplingMaskLists."""

    token_ids: np.ndarray
    offsets: np.ndarray | None = None

    def to_nested_list(self) -> list[list[int]]:
        ids = self.token_ids.tolist()
        ends = [0, len(ids)] if self.offsets is None else self.offsets.tolist()
        return [ids[start:end] for start, end in pairwise(ends)]


class Answer(dict[str, int]):
    """Tokens by request, and what a worker says beside them."""

    midstream_masks: dict[str, np.ndarray]


def test_the_scheduler_passes_a_mask_on_with_its_token_beside_what_it_says_of_kv(
    history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(history, monkeypatch)
    monkeypatch.setattr(sys.modules[history.LISTS], "SamplingMaskLists", Lists)
    world.scheduler = world.core.scheduler = history.telling(type(world.scheduler).__mro__[1])()
    world.name(0)
    asked, quiet = world.ask([10, 11], wanted=3), world.ask([20, 21], wanted=3, told=False)
    said = []
    for number in range(2):
        step = world.scheduler.schedule()
        answer = Answer({asked.request_id: number, quiet.request_id: number})
        answer.midstream_said = {name: [np.array([IDS, number, 9])] for name in answer}
        outputs = world.scheduler.update_from_output(step, answer)[0].outputs
        said.append({output.request_id: output.new_sampling_mask.to_nested_list() for output in outputs})
    assert said[0][quiet.request_id] == [[IDS, 0, 9]]
    assert said[0][asked.request_id][1:] == [[IDS, 0, 9]]
    assert said[0][asked.request_id][0][0] == 0
    assert said[1] == {asked.request_id: [[IDS, 1, 9]], quiet.request_id: [[IDS, 1, 9]]}


def answered(tokens: Sequence[int], said: Any) -> bytes:
    content = [{"token_id": token, "logprob": -1.0} for token in tokens]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "sampling_mask": said}
    return json.dumps({"choices": [choice | {"finish_reason": "length"}]}).encode()


def test_masks_and_spans_of_kv_are_told_apart() -> None:
    said = [[0, 4, 0], [IDS, 3, 5], [1, 5, 0, 6, 9], [IDS, 7]]
    chunk = read_answer(answered([5, 7], said), kv=True, masks=True)
    assert chunk.masks == (read_mask([IDS, 3, 5]), ALONE)
    assert chunk.kv == ((0, ((4, 0),)), (1, ((5, 0), (6, 9))))
    assert read_answer(answered([5, 7], said)).masks == ()


@pytest.mark.parametrize("said", [None, [], [[IDS, 5]], [[IDS, 5], [IDS]], [[IDS, 5], [WORDS, 1 << 40]]])
def test_a_token_without_a_mask_that_was_asked_for_is_no_answer(said: Any) -> None:
    with pytest.raises(InvalidAnswer):
        read_answer(answered([5, 7], said), masks=True)


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, EVERY),
        ({"top_k": VOCAB}, EVERY),
        ({"repetition_penalty": 1.3, "logit_bias": {1: 2.0}}, EVERY),
        ({"temperature": 0.0, "top_p": 0.5}, ALONE),
        ({"top_k": 3}, None),
        ({"top_p": 0.9}, None),
        ({"min_p": 0.1}, None),
        ({"allowed_token_ids": (1, 2)}, None),
        ({"grammar": "start: /a/"}, None),
    ],
)
def test_what_follows_from_a_request_is_not_asked_of_vllm(fields: dict[str, Any], mask: bytes | None) -> None:
    assert fixed_mask(asking("r", **fields), VOCAB) == mask


def token(place: int) -> Token:
    """The one at a place of ten."""
    top = tuple([TopLogprob(20 - i, -0.5 * i) for i in range(10)])
    return Token(20 - place, -0.5 * place, top, -1.0)


def test_the_proof_takes_the_best_tokens_alone() -> None:
    best = read_mask([IDS, *range(21 - TOP_K, 21)])
    check_masks([token(0), token(TOP_K - 1)], [best, best])
    for wrong in (read_mask([IDS, *range(20 - TOP_K, 21)]), ALONE, EVERY):
        with pytest.raises(NoMasks):
            check_masks([token(1)], [wrong])


def with_scheduler(fake: FakeVllm) -> None:
    fake.both = fake.checks_in_pause = fake.by_priority = True


def masked(name: str, **fields: Any) -> GenerateRequest:
    return replace(asking(name, **fields), want_masks=True)


async def test_a_server_that_passed_the_proof_gives_each_token_its_mask(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=with_scheduler) as (engine, fake):
        assert engine._numbers.features >= {"sampling_masks"}
        cases = [
            masked("filtered", temperature=0.7, top_k=3),
            masked("free"),
            masked("cold", temperature=0.0),
        ]
        kept: list[Any] = []
        for case in cases:
            reading, (request,) = await begun(engine, fake, case)
            assert (MASK in request.sampling.get("extra_args", {})) is (case.request_id == "filtered")
            request.to_the_end()
            records = (await reading.ended()).records()
            kept.append([kept_ids(record.mask or b"", record.token_id) for record in records])
        assert all(len(ids) == 3 for ids in kept[0])
        assert kept[1] == [None] * len(kept[1])
        assert all(len(ids) == 1 for ids in kept[2])


async def test_a_token_whose_mask_does_not_come_ends_its_request_alone(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=with_scheduler) as (engine, fake):
        reading, (request,) = await begun(engine, fake, masked("r", top_p=0.9))
        fake.no_masks = True
        request.step()
        assert "0 sampling masks of 1 tokens" in (await reading.ended()).errors[0]


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("checks_in_pause", "--scheduler-cls midstream_vllm_scheduler.scheduler"),
        ("no_masks", "0 sampling masks of "),
    ],
)
async def test_a_server_that_fails_the_proof_says_why_on_its_card(
    tmp_path: Path, lacks: str, why: str
) -> None:
    def set_up(fake: FakeVllm) -> None:
        with_scheduler(fake)
        setattr(fake, lacks, not getattr(fake, lacks))

    async with attached(tmp_path, set_up=set_up) as (engine, _):
        card = (await engine.start()).card
        assert card.has("sampling_logprobs")
        assert not card.has("sampling_masks")
        assert why in card.why["sampling_masks"]
