"""The raw and the sampling log-probability: made beside vLLM's sampler, sent through what vLLM makes of them, and read."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm, logprob_at, sampling_of
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_helpers import asking as asking_of
from vllm_helpers import attached, begun

from midstream.core.types import NEAR_TIES, GenerateRequest, SamplingParams
from midstream.engine.base import EngineDied
from midstream.engine.servers.chunks import Token
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.choice import unknown_feature, wants_both
from midstream.engine.vllm.protocol import InvalidAnswer, read_answer
from midstream.engine.vllm.sampling_proof import OneNumber, Proved, check_raw, check_sampling
from midstream.engine.vllm.worker_extension import midstream_vllm_numbers as numbers

VOCAB = 11


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As in vLLM's environment, where it is no part of a package."""
    monkeypatch.setitem(sys.modules, "midstream_vllm_numbers", numbers)
    monkeypatch.syspath_prepend(str(WORKER_DIR))
    own = ("midstream_vllm_ties", "midstream_vllm_masks", "midstream_vllm_sampler")
    for name in own:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("midstream_vllm_sampler")
    yield module
    for name in own:
        del sys.modules[name]


class Tensors(NamedTuple):
    """vLLM's LogprobsTensors."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: Any = None


class Filters:
    """vLLM's TopKTopPSampler with top_k 3, which draws the second best token. fused: as on a GPU."""

    def __init__(self, *, fused: bool) -> None:
        self.logprobs_mode = "raw_logprobs"
        self.forward = self.forward_fused if fused else self.forward_cpu

    def forward_cpu(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        least = logits.topk(3).values[:, -1:]
        logits.masked_fill_(logits < least, -torch.inf)
        return logits.topk(2).indices[:, 1], logits if self.logprobs_mode == "processed_logits" else None

    forward_native = forward_cpu

    def forward_fused(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert self.logprobs_mode == "raw_logprobs", "a fused kernel returns no logits"
        return logits.topk(2).indices[:, 1], None


def samplers(*, fused: bool = False) -> tuple[type[Any], type[Any]]:
    """Of the form of vLLM's model runner and sampler."""

    class Sampler:
        logprobs_mode = "raw_logprobs"

        def __init__(self) -> None:
            self.topk_topp_sampler = Filters(fused=fused)

        def __call__(self, logits: torch.Tensor, metadata: Any) -> Any:
            raw = logits.log_softmax(-1)
            sampled, processed = self.sample(logits, metadata)
            assert processed is None, "vLLM would return it instead of the raw ones"
            best, ids = raw.topk(metadata.max_num_logprobs)
            own = raw.gather(-1, sampled[:, None])
            tensors = Tensors(
                torch.cat((sampled[:, None], ids), 1).int(),
                torch.cat((own, best), 1),
                (raw >= own).sum(-1),
            )
            return SimpleNamespace(sampled_token_ids=sampled[:, None].int(), logprobs_tensors=tensors)

        def sample(self, logits: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            greedy = logits.argmax(-1)
            if metadata.temperature is None:
                return greedy, None
            cold = metadata.temperature < 1e-5
            logits.div_(torch.where(cold, 1.0, metadata.temperature)[:, None])
            drawn, processed = self.topk_topp_sampler.forward(logits)
            return torch.where(cold, greedy, drawn), processed

    class Runner:
        device = "cpu"
        speculative_config: Any = None

        def __init__(self, rows: list[tuple[float, int, dict[str, Any] | None]]) -> None:
            """rows: temperature, logprobs, extra_args."""
            self.sampler = Sampler()
            names = [f"r{i}" for i in range(len(rows))]
            self.requests = {
                name: SimpleNamespace(
                    sampling_params=SimpleNamespace(
                        logprobs=logprobs,
                        extra_args=extra,
                        temperature=temperature,
                        top_k=3 if temperature else 0,
                        top_p=1.0,
                        min_p=0.0,
                    )
                )
                for name, (temperature, logprobs, extra) in zip(names, rows, strict=True)
            }
            temperature = torch.tensor([row[0] for row in rows])
            metadata = SimpleNamespace(
                temperature=temperature if (temperature > 0).any() else None,
                max_num_logprobs=max(row[1] or 0 for row in rows),
            )
            self.input_batch = SimpleNamespace(req_ids=names, num_reqs=len(names), sampling_metadata=metadata)
            self.execute_model_state: Any = None

        def step(self, logits: torch.Tensor, allowed: dict[str, list[int]] | None = None) -> Any:
            self.execute_model_state = SimpleNamespace(logits=logits.clone())
            grammar = allowed and SimpleNamespace(structured_output_request_ids=[*allowed], allowed=allowed)
            return self.sample_tokens(grammar)

        def sample_tokens(self, grammar_output: Any) -> Any:
            state, self.execute_model_state = self.execute_model_state, None
            for name, tokens in (grammar_output.allowed if grammar_output else {}).items():
                row = state.logits[self.input_batch.req_ids.index(name)]
                kept = row[tokens].clone()
                row.fill_(-torch.inf)
                row[tokens] = kept
            return self._sample(state.logits, None)

        def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
            return self.sampler(logits, self.input_batch.sampling_metadata)

    return Runner, Sampler


MARKED = {numbers.MARK: True}


def answered(output: Any, row: int, logprobs: int) -> bytes:
    """What a client gets of a row, as vLLM's LogprobsProcessor and its endpoint make it."""
    tensors = output.logprobs_tensors
    ids, values = tensors.logprob_token_ids[row].tolist(), tensors.logprobs[row].tolist()
    ranks = itertools.chain((tensors.selected_token_ranks[row].item(),), range(1, logprobs + 1))
    entry = {i: (value, rank) for i, value, rank in zip(ids, values, ranks, strict=False)}
    token = output.sampled_token_ids[row, 0].item()
    top = [{"token_id": i, "logprob": max(p, -9999.0), "rank": r or None} for i, (p, r) in entry.items()]
    content = {"token_id": token, "logprob": entry[token][0], "rank": entry[token][1] or None}
    content["top_logprobs"] = top[: max(logprobs, 1)]
    choice = {"token_ids": [token], "finish_reason": "length", "logprobs": {"content": [content]}}
    return json.dumps({"choices": [choice]}).encode()


def read(output: Any, row: int, top: int = 0, *, both: bool = True) -> Token:
    (token,) = read_answer(answered(output, row, top + 1 if top else 0), top, both=both).tokens
    return token


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - values.max() - np.log(np.exp(values - values.max()).sum())  # type: ignore[no-any-return]


@pytest.mark.parametrize("fused", [False, True])
def test_both_numbers_are_of_the_logits_before_and_behind_all_that_changes_them(
    extension: Any, fused: bool
) -> None:
    """Rows with and without the mark, greedy ones, and one under a grammar, in one batch."""
    kinds, sampler = samplers(fused=fused)
    extension.hook(kinds, sampler)
    rows = [(0.5, 4, MARKED), (0.5, 4, None), (0.0, 4, MARKED), (1.5, 4, MARKED), (0.5, 4, {"other": 1})]
    runner = kinds(rows)
    logits = torch.randn(len(rows), VOCAB, generator=torch.manual_seed(3)) * 4
    allowed = [0, 4, 7, 9, 10]
    output = runner.step(logits, {"r3": allowed})
    for row, temperature in ((0, 0.5), (3, 1.5)):
        own = logits[row].double().numpy()
        token = read(output, row, 3)
        raw = log_softmax(own)
        assert token.logprob == pytest.approx(raw[token.token_id], abs=1e-5)
        best = np.argsort(-own)[:3].tolist()
        assert [t.token_id for t in token.top] == best
        assert [t.logprob for t in token.top] == pytest.approx(raw[best].tolist(), abs=1e-5)
        free = allowed if row == 3 else [*range(VOCAB)]
        kept = sorted(free, key=lambda i: -own[i])[:3]
        assert token.token_id == kept[1]
        drawn = dict(zip(kept, log_softmax(own[kept] / temperature), strict=True))
        assert token.sampling == pytest.approx(drawn[token.token_id], abs=1e-5)
    greedy = read(output, 2, 3)
    assert (greedy.token_id, greedy.sampling) == (logits[2].argmax().item(), 0.0)
    assert greedy.top[0].token_id == greedy.token_id
    for row in (1, 4):
        # As vLLM gives them, and no more.
        plain = read(output, row, 3, both=False)
        assert plain.sampling is None
        assert [t.token_id for t in plain.top] == logits[row].topk(3).indices.tolist()
        with pytest.raises(InvalidAnswer, match="no sampling log-probability"):
            read(output, row, 3)


def test_the_drawn_tokens_and_the_filters_are_as_without_the_hook(extension: Any) -> None:
    kinds, sampler = samplers()
    logits = torch.randn(2, VOCAB, generator=torch.manual_seed(4))
    plain = kinds([(0.7, 0, MARKED), (0.7, 0, None)]).step(logits)
    extension.hook(kinds, sampler)
    runner = kinds([(0.7, 0, MARKED), (0.7, 0, None)])
    before = dict(vars(runner.sampler.topk_topp_sampler))
    hooked = runner.step(logits)
    assert torch.equal(plain.sampled_token_ids, hooked.sampled_token_ids)
    assert torch.equal(plain.logprobs_tensors.logprobs, hooked.logprobs_tensors.logprobs)
    assert (
        plain.logprobs_tensors.selected_token_ranks[1] == hooked.logprobs_tensors.selected_token_ranks[1] < 99
    )
    assert vars(runner.sampler.topk_topp_sampler) == before
    assert runner.sampler.midstream_rows is None


def test_rows_are_found_anew_when_the_batch_changes(extension: Any) -> None:
    kinds, sampler = samplers()
    extension.hook(kinds, sampler)
    runner = kinds([(0.7, 0, MARKED), (0.7, 0, None)])
    logits = torch.randn(2, VOCAB, generator=torch.manual_seed(5))
    for marked in (0, 1):
        for _ in range(2):
            output = runner.step(logits)
            assert read(output, marked).sampling is not None
            assert output.logprobs_tensors.selected_token_ranks[1 - marked] <= VOCAB
        batch = runner.input_batch
        batch.req_ids.reverse()
        batch.sampling_metadata = SimpleNamespace(**vars(batch.sampling_metadata))


def test_a_mark_without_logprobs_ends_nothing(extension: Any) -> None:
    """Others may send it to an attached server."""
    kinds, sampler = samplers()
    extension.hook(kinds, sampler)
    runner = kinds([(0.7, None, MARKED)])
    assert runner.step(torch.randn(1, VOCAB)).sampled_token_ids.shape == (1, 1)


def test_numbers_of_the_model_that_are_not_finite_are_seen_also_under_a_grammar(extension: Any) -> None:
    kinds, sampler = samplers()
    extension.hook(kinds, sampler)
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(6))
    # vLLM forbids this token, so its own number would not show it.
    logits[0, 5] = torch.nan
    output = kinds([(0.7, 0, MARKED)]).step(logits, {"r0": [1, 2, 3]})
    # As vLLM sends it.
    output.logprobs_tensors.logprobs.nan_to_num_(-9999.0)
    chunk = read_answer(answered(output, 0, 0), both=True)
    assert chunk.not_finite
    assert chunk.error is not None
    assert "not finite" in chunk.error


def test_a_runner_says_why_it_has_one_number(extension: Any) -> None:
    kinds, sampler = samplers()
    assert "model runner" in extension.why_not(SimpleNamespace())
    extension.hook(kinds, sampler)
    runner = kinds([(0.7, 0, MARKED)])
    assert extension.why_not(runner) == ""
    runner.speculative_config = object()
    assert "speculatively" in extension.why_not(runner)
    # And it does not try.
    assert runner.step(torch.randn(1, VOCAB)).logprobs_tensors.selected_token_ranks[0] <= VOCAB
    runner.speculative_config, runner.sampler.logprobs_mode = None, "processed_logprobs"
    assert "logprobs-mode" in extension.why_not(runner)


def scored(rank: Any, **more: Any) -> bytes:
    content = {"token_id": 5, "logprob": -1.5, "rank": rank, "top_logprobs": []} | more
    choice = {"token_ids": [5], "finish_reason": "length", "logprobs": {"content": [content]}}
    return json.dumps({"choices": [choice]}).encode()


@given(st.floats(max_value=0.0, width=32, allow_infinity=False), st.integers(0, 31))
def test_every_number_comes_back_bit_by_bit(value: float, near_tie: int) -> None:
    bits = int.from_bytes(struct.pack("<f", abs(value)), "little")
    rank = numbers.RANK_BASE + near_tie * numbers.TIE_PLACE + bits
    (token,) = read_answer(scored(rank), both=True).tokens
    assert token.near_tie == near_tie
    assert token.sampling == value
    assert struct.pack("<d", token.sampling) == struct.pack("<d", value + 0.0)


@pytest.mark.parametrize("bits", [numbers.INFINITE, numbers.INFINITE + 1, (1 << 31) - 1])
def test_a_number_that_is_not_finite_is_an_error_of_the_model(bits: int) -> None:
    assert read_answer(scored(numbers.RANK_BASE + bits), both=True).not_finite


@settings(max_examples=60, deadline=None)
@given(
    st.none()
    | st.integers(max_value=numbers.RANK_BASE - 1)
    | st.integers(min_value=numbers.RANK_BASE + (numbers.TIE_PLACE << len(NEAR_TIES)))
    | st.floats()
    | st.text()
    | st.booleans()
    | st.lists(st.integers())
)
def test_a_rank_that_is_no_such_number_is_no_answer(rank: Any) -> None:
    with pytest.raises(InvalidAnswer):
        read_answer(scored(rank), both=True)


def test_older_versions_have_no_place_for_the_number_and_say_so() -> None:
    """vLLM 0.26 names every token in words, the alternative that is the sampled one, too."""
    top = [{"token": f"token_id:{i}", "bytes": None, "logprob": -1.5} for i in (5, numbers.ITSELF)]
    content = {"token": "token_id:5", "bytes": None, "logprob": -1.5, "top_logprobs": top}
    choice = {"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [content]}}
    for more in (0, 2):
        with pytest.raises(InvalidAnswer, match="token 5: this version of vLLM gives tokens no rank"):
            read_answer(json.dumps({"choices": [choice]}).encode(), more, both=True)


def test_an_alternative_that_is_the_token_itself_has_its_id_only_where_both_were_asked_for() -> None:
    top = [
        {"token_id": 5, "logprob": -1.5, "rank": numbers.RANK_BASE},
        {"token_id": 9, "logprob": -0.5, "rank": 1},
        {"token_id": numbers.ITSELF, "logprob": -1.5, "rank": 2},
    ]
    (token,) = read_answer(scored(numbers.RANK_BASE, top_logprobs=top), 2, both=True).tokens
    assert [(t.token_id, t.logprob) for t in token.top] == [(9, -0.5), (5, -1.5)]
    assert token.sampling == 0.0


def asking(grammar: str | None = None, *, want_logprobs: bool = True, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=4, **sampling)
    return GenerateRequest(
        request_id="r", prompt=(1, 2), sampling=params, grammar=grammar, want_logprobs=want_logprobs
    )


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (asking(), ""),
        (asking(temperature=0.0), ""),
        (asking(temperature=0.0, logit_bias={3: 1.0}), ""),
        (asking(temperature=0.7), "sampling_logprobs"),
        (asking(top_p=0.9), "sampling_logprobs"),
        (asking(top_k=9), "sampling_logprobs"),
        (asking(min_p=0.1), "sampling_logprobs"),
        (asking(presence_penalty=0.5), "sampling_logprobs"),
        (asking(logit_bias={3: 1.0}), "sampling_logprobs"),
        (asking(allowed_token_ids=(3, 4)), "sampling_logprobs"),
        (asking(temperature=0.7, want_logprobs=False), ""),
        (asking("start: /a/"), "constrained_logprobs"),
        (asking("start: /a/", temperature=0.0), "constrained_logprobs"),
        (asking("start: /a/", want_logprobs=False), ""),
    ],
)
def test_both_are_asked_for_where_one_says_too_little(request_: GenerateRequest, feature: str) -> None:
    assert unknown_feature(request_) == feature


def token_of(raw: list[float], place: int, sampling: float | None) -> Token:
    top = tuple(protocol.TopLogprob(i, value) for i, value in enumerate(raw))
    return Token(place, raw[place], top, sampling)


RAW = [-1.0, -1.5, -2.0, -2.5, -3.0, -3.5]
DRAWN = log_softmax(np.array(RAW[:4]) / 0.7).tolist()


def test_the_proof_takes_the_numbers_of_the_best_tokens_and_no_others() -> None:
    right = token_of(RAW, 2, DRAWN[2])
    check_sampling([right])
    for wrong in (
        token_of(RAW, 2, DRAWN[1]),
        # The raw one.
        token_of(RAW, 2, RAW[2]),
        # Without the filter.
        token_of(RAW, 2, log_softmax(np.array(RAW) / 0.7)[2]),
        token_of(RAW, 2, float("nan")),
        token_of(RAW, 2, None),
        token_of(RAW, 5, -1.0),
        Token(99, -1.0, right.top, -1.0),
    ):
        with pytest.raises(OneNumber):
            check_sampling([right, wrong])


def test_ties_prove_nothing() -> None:
    tied = token_of([-1.0, -2.0, -3.0, -4.0, -4.0], 1, -99.0)
    with pytest.raises(OneNumber, match="alike"):
        check_sampling([tied])
    check_sampling([tied, token_of(RAW, 0, DRAWN[0])])


def test_a_grammar_that_changes_the_raw_numbers_fails_the_proof() -> None:
    free = token_of(RAW, 1, DRAWN[1])
    check_raw([free], [token_of(RAW, 5, -0.1)])
    forbidden = [-9999.0 if i == 3 else value for i, value in enumerate(RAW)]
    for other in ([token_of(forbidden, 0, -0.1)], [token_of([v + 1 for v in RAW], 0, -0.1)], []):
        with pytest.raises(OneNumber):
            check_raw([free], other)


def both(fake: FakeVllm) -> None:
    fake.both = True


async def test_a_server_that_passed_the_proof_gives_both_numbers_and_the_others_say_why_not(
    tmp_path: Path,
) -> None:
    asked = asking_of("r", temperature=0.7, top_k=4, top_logprobs=2)
    async with attached(tmp_path, set_up=both) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asked)
        request.to_the_end()
        records = (await reading.ended()).records()
        assert [r.sampling_logprob for r in records] == pytest.approx([sampling_of(0.7)] * 4, abs=1e-6)
        assert [r.logprob for r in records] == [logprob_at(3 + i, fake.weights or 0) for i in range(4)]
        assert [[t.token_id for t in r.top_logprobs] for r in records] == [[r.token_id, 259] for r in records]
        # Nothing is asked of vLLM that is known without.
        _, (plain,) = await begun(engine, fake, asking_of("plain"))
        assert "extra_args" not in plain.sampling


@pytest.mark.parametrize("why", ["", "it decodes speculatively"])
async def test_a_server_without_the_proof_gives_one_number_and_its_card_says_why(
    tmp_path: Path, why: str
) -> None:
    def set_up(fake: FakeVllm) -> None:
        # With the extension, or without any.
        fake.both, fake.one_number = bool(why), why

    async with attached(tmp_path, set_up=set_up) as (engine, fake):
        card = (await engine.start()).card
        for feature in ("sampling_logprobs", "constrained_logprobs"):
            assert not card.has(feature)
            assert (why or "--worker-extension-cls midstream_vllm_worker.Worker") in card.why[feature]
        reading, (request,) = await begun(engine, fake, asking_of("r", temperature=0.7))
        assert "extra_args" not in request.sampling
        request.to_the_end()
        (record, *_) = (await reading.ended()).records()
        assert record.sampling_logprob is not None
        assert math.isnan(record.sampling_logprob)


async def test_a_server_whose_ranks_draw_unlike_tokens_is_not_used(tmp_path: Path) -> None:
    """Each computes the next step with what it drew, and the first one's tokens are answered."""

    def set_up(fake: FakeVllm) -> None:
        both(fake)
        fake.ranks, fake.other_seed = 2, "0"

    with pytest.raises(EngineDied, match="ranks have seeds 0, 7"):
        async with attached(tmp_path, set_up=set_up):
            raise AssertionError("it was used")


async def test_an_answer_that_lacks_the_second_number_ends_its_request_alone(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=both) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking_of("r", temperature=0.7))
        other, (kept,) = await begun(engine, fake, asking_of("other"))
        fake.both = False
        request.step()
        assert "no sampling log-probability" in (await reading.ended()).errors[0]
        kept.to_the_end()
        assert (await other.ended()).finishes == {0: "length"}


async def test_a_grammar_that_the_extension_serves_has_the_raw_numbers(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=both) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking_of("r", grammar="start: /a/"))
        request.to_the_end()
        records = (await reading.ended()).records()
        assert {record.constrained for record in records} == {False}
        assert [r.sampling_logprob for r in records] == pytest.approx([sampling_of(1.0)] * 4, abs=1e-6)


async def test_numbers_under_a_grammar_that_were_not_proved_raw_are_not_given_as_raw(tmp_path: Path) -> None:
    async with attached(tmp_path, set_up=both) as (engine, fake):
        engine._numbers = Proved({"constrained_logprobs": "they are of what it allows"}, engine._numbers.tie)
        greedy = asking_of("r", grammar="start: /a/", temperature=0.0)
        assert not wants_both(greedy, engine._numbers.features)
        reading, (request,) = await begun(engine, fake, greedy)
        request.to_the_end()
        assert {record.constrained for record in (await reading.ended()).records()} == {True}
        free = asking_of("free", temperature=0.0)
        assert wants_both(free, engine._numbers.features), "near ties do not depend on it"
