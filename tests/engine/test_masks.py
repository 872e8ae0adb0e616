"""Sampling masks against a sampler in plain NumPy and float64, which is written here and shares no code with the engine's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import needs_compiler, reference, request, run
from msgspec.structs import replace
from numpy.typing import NDArray
from test_constraint import EOS, GRAMMAR
from tiers import slow, variant

from midstream.core.config import EngineSettings
from midstream.core.masks import ALONE, EVERY, kept_ids
from midstream.core.types import SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.sampler import Sampler
from midstream.engine.step import SampleRow, mask_of
from midstream_kernels import CpuSampler

Array = NDArray[np.float64]
#: Of probabilities that are summed in float32: a border that lies nearer is not decided.
UNDECIDED = 1e-6


@pytest.fixture(params=["native", slow("torch")])
def sampler(request: pytest.FixtureRequest) -> Iterator[Sampler]:
    needs_compiler(request.param)
    return Sampler(CpuSampler(threads=2) if request.param == "native" else None)


def scores_of(logits: Array, row: SampleRow) -> Array:
    """The penalised logits, with minus infinity for what is forbidden."""
    scores, params = logits.copy(), row.params
    for token in set(row.history):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(row.history[row.prompt_len :]).items():
        scores[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if row.mask is not None:
        for token in range(len(scores)):
            if not row.mask[token >> 3] >> (token & 7) & 1:
                scores[token] = -np.inf
    return scores


def left_of(scores: Array, params: SamplingParams) -> tuple[set[int], bool]:
    """The tokens that the filters leave, and whether rounding may leave others: top-k, of these top-p, of these min-p."""
    if params.temperature == 0:
        return {int(scores.argmax())}, False
    order = [int(i) for i in np.lexsort((np.arange(len(scores)), -scores)) if scores[i] > -np.inf]
    if 0 < params.top_k < len(scores):
        order = order[: params.top_k]
    weights = np.exp((scores[order] - scores[order[0]]) / params.temperature)
    shares = weights / weights.sum()
    before = np.cumsum(shares) - shares
    near = params.top_p < 1 and bool((np.abs(before[1:] - params.top_p) < UNDECIDED).any())
    near |= params.min_p > 0 and bool((np.abs(weights / params.min_p - 1) < 1e-5).any())
    heavy = weights >= params.min_p
    light = params.top_p >= 1
    left = {t for i, t in enumerate(order) if i == 0 or ((light or before[i] < params.top_p) and heavy[i])}
    return left, near


def random_row(rng: random.Random, vocab: int, position: int) -> SampleRow:
    """Any combination of filters, penalties, bias and allowed tokens."""
    some: dict[str, Any] = {}
    if rng.random() < 0.6:
        some["top_p"] = rng.choice([0.05, 0.5, 0.8, 0.95, 0.999])
    if rng.random() < 0.4:
        some["top_k"] = rng.choice([1, 2, 7, 40, vocab, vocab + 9])
    if rng.random() < 0.3:
        some["min_p"] = rng.choice([1e-4, 0.05, 0.3, 1.0])
    if rng.random() < 0.2:
        some["repetition_penalty"] = 1.25
    if rng.random() < 0.2:
        some |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    if rng.random() < 0.2:
        some["logit_bias"] = {rng.randrange(vocab): 8.0, rng.randrange(vocab): -100.0}
    temperature = rng.choice([0.0, 0.3, 1.0, 1.0, 1.7])
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=rng.getrandbits(63), **some)
    mask = None
    if rng.random() < 0.3:
        allowed = np.zeros(vocab, dtype=np.uint8)
        allowed[rng.sample(range(vocab), rng.choice([1, 3, vocab - 1]))] = 1
        mask = np.packbits(allowed, bitorder="little").tobytes()
    history = [rng.randrange(vocab) for _ in range(12)]
    return SampleRow(params, 0, position, history, 5, 0, mask, wants_mask=True)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("vocab", [5, 264, variant(5001)])
def test_a_mask_is_what_a_plain_sampler_keeps_and_gives_the_sampling_logprob(
    sampler: Sampler, dtype: torch.dtype, vocab: int
) -> None:
    rng, normal = random.Random(vocab), np.random.default_rng(vocab)
    decided, kinds = 0, Counter[int]()
    for batch in range(12):
        rows = [random_row(rng, vocab, batch * 32 + i) for i in range(32)]
        # On a grid, so that many are equal and no others are nearly so.
        logits = torch.tensor(np.round(normal.normal(size=(32, vocab)) * 3 * 16) / 16).to(dtype)
        got = sampler.sample(logits, rows)
        for i, row in enumerate(rows):
            scores = scores_of(logits[i].double().numpy(), row)
            left, undecided = left_of(scores, row.params)
            mask, token = got.masks[i], got.tokens[i]
            assert mask is not None
            ids = kept_ids(mask, token)
            kept = list(range(vocab)) if ids is None else list(ids)
            kinds[mask[0]] += 1
            temperature = row.params.temperature or 1.0
            if not undecided:
                decided += 1
                assert set(kept) == left
            assert token in kept
            # What a trainer computes from the mask.
            own = scores[kept] / temperature
            logprob = scores[token] / temperature - own.max() - np.log(np.exp(own - own.max()).sum())
            assert got.sampling_logprobs[i] == pytest.approx(logprob, abs=2e-5)
            assert (mask == ALONE) == (len(kept) == 1)
    assert decided > 300
    assert min(kinds[0], kinds[1], kinds[2] + kinds[8]) > 10


def test_a_row_that_wants_no_mask_gets_none_and_draws_the_same(sampler: Sampler) -> None:
    rng = random.Random(3)
    logits = torch.randn((40, 300), generator=torch.Generator().manual_seed(3))
    rows = [random_row(rng, 300, i) for i in range(40)]
    some = [
        SampleRow(*(getattr(r, f) for f in r.__struct_fields__[:-1]), wants_mask=i % 2 == 0)
        for i, r in enumerate(rows)
    ]
    none = [SampleRow(*(getattr(r, f) for f in r.__struct_fields__[:-1])) for r in rows]
    got, mixed, plain = (sampler.sample(logits, these) for these in (rows, some, none))
    assert got.columns[:5] == mixed.columns[:5] == plain.columns[:5]
    assert mixed.masks == [mask if i % 2 == 0 else None for i, mask in enumerate(got.masks)]
    assert plain.masks == [None] * 40


def test_a_mask_of_one_token_is_a_byte_and_so_is_one_of_all(sampler: Sampler) -> None:
    logits = torch.randn((3, 300), generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {}]
    rows = [SampleRow(SamplingParams(max_tokens=1, **k), 0, 0, [], 0, 0, wants_mask=True) for k in kinds]
    assert sampler.sample(logits, rows).masks == [ALONE, ALONE, EVERY]


@pytest.mark.parametrize(
    ("ids", "kind", "size"),
    [
        ([7], 0, 1),
        ([3, 700], 2, 1 + 2 * 2),
        ([3, 65535], 2, 1 + 2 * 2),
        ([3, 65536], 4, 1 + 2 * 4),
        # A grammar may leave nearly all.
        (range(1, 150_000), 8, 1 + 18750),
    ],
)
def test_a_set_has_the_shortest_form_and_is_read_again(ids: Any, kind: int, size: int) -> None:
    given = np.array(list(ids))
    mask = mask_of(given)
    assert (mask[0], len(mask)) == (kind, size)
    read = kept_ids(mask, int(given[-1]))
    assert read is not None
    assert list(read) == given.tolist()


@pytest.mark.parametrize(
    "mask",
    [
        b"",
        b"\3",
        b"\2\1",
        b"\2",
        b"\4\1\0",
        b"\2\5\0\5\0",
        b"\2\6\0\5\0",
        b"\10\0",
        b"\2\1\0\2\0",
        b"\0\0",
        b"\1\1",
        b"\4\5\0\0\0\0\0\0\x80",
    ],
)
def test_bytes_that_are_no_mask_of_the_token_are_refused(mask: bytes) -> None:
    with pytest.raises(ValueError, match="sampling mask"):
        kept_ids(mask, 5)


@pytest.mark.parametrize("token", [-1, 2**31, 2**70])
@pytest.mark.parametrize("mask", [b"\0", b"\1", b"\4\0\0\0\x80"])
def test_a_token_that_is_no_id_has_no_mask(mask: bytes, token: int) -> None:
    with pytest.raises(ValueError, match="no id"):
        kept_ids(mask, token)


def test_masks_of_requests_in_one_batch_give_a_plain_forwards_numbers(
    tiny_model: Callable[..., Path],
) -> None:
    """Filters, penalties, limits, a grammar and several choices beside each other, in a cache that is too small for all."""
    needs_compiler("native")
    model = tiny_model()
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 20, "temperature": 1.4},
        {"min_p": 0.4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"top_p": 0.7, "logit_bias": {65: 6.0}},
        {"allowed_token_ids": tuple(range(97, 123)), "top_p": 0.95},
        {"min_tokens": 10, "stop_token_ids": (EOS,), "logit_bias": {EOS: 4.0}},
        {"temperature": 0.0},
        {},
    ]
    wanted = [
        request(f"{i}", b"some text " + bytes([97 + i] * 9), max_tokens=24, seed=i, n=2, echo=0, **kind)
        for i, kind in enumerate(kinds)
    ]
    bound = request("grammar", b"a colour", max_tokens=40, seed=1, echo=0, top_p=0.9, stop_token_ids=(EOS,))
    wanted.append(replace(bound, grammar=GRAMMAR))
    tight = EngineCore(model, EngineSettings(kernels="native", kv_cache_tokens=320))
    preempt, preempted = tight.scheduler._preempt, []

    def counted(seq: Any) -> None:
        preempted.append(seq.index)
        preempt(seq)

    tight.scheduler._preempt = counted  # type: ignore[method-assign]
    got, plain = run(tight, wanted), reference(model).model
    assert preempted
    roomy = run(EngineCore(model, EngineSettings(kernels="native")), wanted)
    sizes = Counter[int]()
    for asked in wanted:
        for index in range(asked.n):
            records = got[asked.request_id, index].tokens
            assert records == roomy[asked.request_id, index].tokens
            ids = [*asked.prompt, *(record.token_id for record in records)]
            with torch.no_grad():
                logits = plain(torch.tensor([ids])).logits[0].double().numpy()
            for place, record in enumerate(records, len(asked.prompt)):
                row = SampleRow(asked.sampling, 0, 0, ids[:place], len(asked.prompt), 0)
                scores = scores_of(logits[place - 1], row)
                assert record.mask is not None
                kept = kept_ids(record.mask, record.token_id)
                sizes[0 if kept is None else len(kept)] += 1
                own = scores if kept is None else scores[list(kept)]
                own = own / (asked.sampling.temperature or 1.0)
                value = scores[record.token_id] / (asked.sampling.temperature or 1.0)
                expected = value - own.max() - np.log(np.exp(own - own.max()).sum())
                assert record.sampling_logprob == pytest.approx(expected, abs=2e-4)
                allowed = asked.sampling.allowed_token_ids
                assert not allowed or set(kept or ()) <= set(allowed)
                late = place - len(asked.prompt) >= asked.sampling.min_tokens
                assert kept is None or late or not set(kept) & set(asked.sampling.stop_token_ids)
    assert len(sizes) > 5


def test_a_request_that_asks_for_no_mask_has_none(tiny_model: Callable[..., Path]) -> None:
    needs_compiler("native")
    core = EngineCore(tiny_model(), EngineSettings(kernels="native"))
    got = run(
        core, [replace(request("r", b"abc", top_p=0.5), want_masks=False), request("s", b"abc", top_p=0.5)]
    )
    assert {record.mask for record in got["r", 0].tokens} == {None}
    assert None not in {record.mask for record in got["s", 0].tokens}
    assert {record.mask for record in got["s", 0].prompt} == {None}
