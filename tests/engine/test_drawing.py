"""The sampling parameters in a record give its sampling log-probabilities: against the engine's own sampler."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from explained import World
from families import write_model

from midstream.core.config import EngineSettings
from midstream.core.masks import EVERY
from midstream.core.traces import TurnSampling, sampling_of
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded.limits import TokenLimiter
from midstream.engine.embedded.sampler import sample
from midstream.engine.step import NEAR_TIE, SampleRow, mask_of
from midstream.verify.claims import Claim, Tree, gather
from midstream.verify.compare import TOLERANCES, Computed, compare, wrong_masks
from midstream.verify.drawing import is_plain, may_leave, redrawn
from midstream.verify.explain import Explainer
from midstream.verify.findings import Cause
from midstream.verify.gaps import GapCause
from midstream.verify.jobs import Computer, Numbers, OnComputed, PassJob
from midstream.verify.paged import PagedComputer
from midstream.verify.readings import masks_of, mass
from midstream.verify.verifier import Report, Verifier

VOCAB, TOKENS = 97, 24
PROMPT = (3, 4, 5, 4)
#: Every parameter, and what meets.
GIVEN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 0.0},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {5: 3.0, 7: -4.0}, "temperature": 0.8},
    {"min_tokens": 12, "stop_token_ids": (9, 10, 11)},
    {"allowed_token_ids": (1, 5, 7, 60)},
    {"bad_tokens": ((7,), (5, 8))},
    {
        "temperature": 0.9,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {8: 1.0},
    },
]


def drawn(given: dict[str, Any], seed: int, *, masked: bool = False) -> tuple[Claim, np.ndarray]:
    """A turn as the engine samples it from random logits, and those logits."""
    params = SamplingParams(max_tokens=TOKENS, seed=seed, **given)
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, VOCAB, generator=random)
    limiter = TokenLimiter(params, VOCAB, None) if params.limited else None
    history, sampling, masks = [*PROMPT], [], list[bytes | None]()
    for at in range(TOKENS):
        mask = None if limiter is None else limiter.mask()
        row = SampleRow(params, 0, len(history), history, len(PROMPT), 0, mask, wants_mask=True)
        found = sample(logits[at : at + 1], [row])
        if limiter is not None:
            limiter.accept(found.tokens[0])
        history = [*history, *found.tokens]
        sampling += found.sampling_logprobs
        masks += found.masks
    request = GenerateRequest(request_id="r", prompt=PROMPT, sampling=params)
    claim = claim_of(request, history[len(PROMPT) :], sampling)
    if masked:
        told = [b64encode(mask or b"").decode() for mask in masks]
        claim.turn = msgspec.structs.replace(claim.turn, sampling_masks=told)
    return claim, logits.numpy()


def claim_of(request: GenerateRequest, tokens: Sequence[int], sampling: Sequence[float]) -> Claim:
    size = len(tokens)
    turn = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": [*PROMPT],
        "token_ids": [*tokens],
        "loss_mask": [],
        "finish_reason": "length",
        "created": 1.0,
        "logprobs": [0.0] * size,
        "sampling_logprobs": [*sampling],
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "snapshots": [{"snapshot": "base", "start": 0, "end": size}],
        "kv_snapshots": [{"snapshot": "base", "start": 0, "end": len(PROMPT) + size - 1}],
        # As JSON has it.
        "sampling": json_of(request),
    }
    head = {"n": 1, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": 1}
    record = {**head, "deployment": "d", "tenant": "", "session": "k", "tree": 1, "turn": turn}
    [tree] = gather([record], []).trees
    return tree.claims[1]


def json_of(request: GenerateRequest) -> Any:
    return msgspec.json.decode(msgspec.json.encode(sampling_of(request)))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_the_parameters_of_a_record_give_what_the_sampler_gave(given: dict[str, Any]) -> None:
    for seed in range(8):
        claim, logits = drawn(given, seed)
        made = redrawn(claim, "float32")
        assert made is not None
        # In pieces, as passes come.
        made.hear(0, logits[:10])
        made.hear(10, logits[10:])
        assert np.abs(made.values - np.array(claim.turn.sampling_logprobs)).max() < 2e-5


@pytest.mark.parametrize("given", [{"repetition_penalty": 0.02}, {"temperature": 0.02}], ids=str)
def test_rounding_that_parameters_enlarge_is_no_difference(given: dict[str, Any]) -> None:
    for seed in range(8):
        claim, logits = drawn(given, seed)
        made = redrawn(claim, "float32")
        assert made is not None
        # As another order of additions rounds.
        noise = np.random.default_rng(seed).uniform(-1e-5, 1e-5, logits.shape).astype(np.float32)
        made.hear(0, logits + noise)
        computed = Computed(claim, [])
        computed.draw(made)
        assert np.abs(made.values - np.array(claim.turn.sampling_logprobs)).max() > 0
        assert compare(claim, computed, TOLERANCES["float32"]).sampling == ()
        claim.turn.sampling_logprobs[3] -= 0.1
        assert compare(claim, computed, TOLERANCES["float32"]).sampling == (3,)


def wrong_masks_of(claim: Claim, logits: np.ndarray) -> set[int]:
    computed, made = Computed(claim, []), redrawn(claim, "float32")
    if made is not None and not is_plain(claim.turn.sampling):
        made.hear(0, logits)
        computed.draw(made)
    wrong = {one.token for one in wrong_masks(claim, VOCAB)}
    return wrong | {*compare(claim, computed, TOLERANCES["float32"]).mask}


def with_mask(claim: Claim, at: int, kept: Sequence[int] | None) -> Claim:
    masks = [*(claim.turn.sampling_masks or ())]
    masks[at] = b64encode(EVERY if kept is None else mask_of(np.array(kept, dtype=np.int64))).decode()
    return replace(claim, turn=msgspec.structs.replace(claim.turn, sampling_masks=masks))


def test_a_mask_may_lack_a_weight_that_no_sum_shows() -> None:
    for seed in range(3):
        claim, logits = drawn({"temperature": 0.02, "top_k": 5}, seed, masked=True)
        assert any(ids is not None and len(ids) < 5 for ids in masks_of(claim, VOCAB))
        assert wrong_masks_of(claim, logits) == set()


def test_a_narrower_tolerance_leaves_a_border_less_room() -> None:
    wide, narrow = set[int](), set[int]()
    claim, logits = drawn({"top_p": 0.6}, 1, masked=True)
    short = set[int]()
    for at, ids in enumerate(masks_of(claim, VOCAB)):
        assert ids is not None
        others = sorted({*ids.tolist()} - {claim.turn.token_ids[at]}, key=lambda one: logits[at, one])
        if others:
            claim = with_mask(claim, at, sorted({*ids.tolist()} - {others[0]}))
            short.add(at)
    for found, rounding in ((wide, 1.0), (narrow, 1e-4)):
        made = redrawn(claim, "bfloat16", rounding)
        assert made is not None
        made.hear(0, logits)
        found |= {*made.wrong_masks}
    assert wide < short == narrow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("min_p_first", [True, False])
def test_rounding_at_the_border_of_min_p_is_no_wrong_mask(dtype: str, min_p_first: bool) -> None:
    """vLLM applies min_p before top_p: which tokens are that light decides of how many top_p leaves."""
    given, random = TurnSampling(temperature=1.5, top_p=0.95, min_p=0.05), np.random.default_rng(0)
    for _ in range(500):
        warm = random.normal(0.0, 2.0, 100)
        slack = NEAR_TIE[dtype] * np.abs(warm).max()
        seen = warm + random.uniform(-0.5, 0.5, 100) * slack
        heavy = seen >= seen.max() + np.log(given.min_p)
        weights = np.exp(seen) * (heavy if min_p_first else 1.0)
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        kept = order[(before < given.top_p * weights.sum()) & heavy[order]]
        assert may_leave(warm, kept, given, slack)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_mask_has_what_its_parameters_leave_and_no_token_more_or_fewer(given: dict[str, Any]) -> None:
    planted = 0
    for seed in range(3):
        claim, logits = drawn(given, seed, masked=True)
        noise = np.random.default_rng(seed).uniform(-1e-6, 1e-6, logits.shape).astype(np.float32)
        assert wrong_masks_of(claim, logits + noise) == set()
        for at, ids in enumerate(masks_of(claim, VOCAB)):
            kept = [*range(VOCAB)] if ids is None else ids.tolist()
            token = claim.turn.token_ids[at]
            lightest = min(
                (one for one in kept if one != token), key=lambda one: logits[at, one], default=None
            )
            others = [one for one in range(VOCAB) if one not in kept]
            wrong: list[list[int] | None] = [None] if len(kept) < VOCAB else []
            if lightest is not None and not {"top_p", "min_p"} <= given.keys():
                # Of both, another order of the two may leave one token fewer.
                wrong.append([one for one in kept if one != lightest])
            wrong += [sorted([*kept, other]) for other in others[:: len(others) // 3 + 1]]
            if lightest is not None and others:
                # So light that the sampling log-probability does not show it.
                faint = min(others, key=lambda one: logits[at, one])
                wrong.append(sorted({*kept, faint} - {lightest}))
            for mask in wrong:
                assert wrong_masks_of(with_mask(claim, at, mask), logits) == {at}
                planted += 1
    assert planted >= 3 * TOKENS


class Rows(Computer):
    """Has these logits for the tokens of a turn."""

    def __init__(self, logits: np.ndarray) -> None:
        self.vocab, self.longest, self.dtype, self.about, self.routes = VOCAB, 64, "float32", {}, None
        self._logits = logits

    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        for job in jobs:
            if job.look is not None:
                job.look(0, self._logits)
        said = np.zeros(len(self._logits))
        return [Numbers(said, said, None, False) for _ in jobs]


@pytest.mark.parametrize(
    "given",
    [{"repetition_penalty": 0.02}, {"temperature": 0.02}, {"repetition_penalty": 30.0, "temperature": 0.5}],
    ids=str,
)
def test_rounding_that_parameters_enlarge_leaves_a_gap_its_cause(given: dict[str, Any]) -> None:
    for seed in range(8):
        claim, logits = drawn(given, seed)
        raw = [
            float(row[token] - mass(row, -1)) for row, token in zip(logits, claim.turn.token_ids, strict=True)
        ]
        claim.turn = msgspec.structs.replace(claim.turn, logprobs=raw)
        noise = np.random.default_rng(seed).uniform(-2e-5, 2e-5, logits.shape).astype(np.float32)
        computer, tree = Rows(logits + noise), Tree("d", "", "k", "r", "b", 1, {1: claim})
        explainer = Explainer(computer, lambda _: None, lambda claim: claim.logprobs)
        [split] = explainer.explain([tree]).splits
        assert {*split.details} == {GapCause.TEMPERATURE}
        assert "penalties, filters or a grammar" not in split.details[GapCause.TEMPERATURE]
        assert f"drawn at temperature {given.get('temperature', 1):g}" in split.details[GapCause.TEMPERATURE]


@pytest.mark.parametrize("given", [one for one in GIVEN if one != {"temperature": 0.0}], ids=str)
def test_no_other_temperature_gives_them(given: dict[str, Any]) -> None:
    claim, logits = drawn(given, 3)
    turn = claim.turn
    assert turn.sampling is not None
    told = msgspec.structs.replace(turn.sampling, temperature=turn.sampling.temperature * 1.1)
    claim.turn = msgspec.structs.replace(turn, sampling=told)
    made = redrawn(claim, "float32")
    assert made is not None
    made.hear(0, logits)
    off = np.abs(made.values - np.array(turn.sampling_logprobs))
    assert (off > 1e-3).sum() >= 2
    other = made.other_temperature(1e-4)
    if not given.keys() & {"top_p", "top_k", "min_p"}:
        assert other == pytest.approx(turn.sampling.temperature, rel=1e-3)


def test_what_is_not_the_default_is_recorded_and_nothing_else() -> None:
    def of(grammar: str | None = None, **given: Any) -> Any:
        params = SamplingParams(max_tokens=5, seed=3, **given)
        return json_of(GenerateRequest(request_id="r", prompt=(1,), sampling=params, grammar=grammar))

    assert of() == of(stop_token_ids=(2,)) == {}
    assert of(temperature=0.5, top_p=0.9) == {"temperature": 0.5, "top_p": 0.9}
    assert of(min_tokens=3, stop_token_ids=(2,)) == {"min_tokens": 3, "stop_token_ids": [2]}
    assert of(grammar="start: A") == {"grammar": True}
    assert of(bad_words=("x",)) == {"bad_words": ["x"]}
    assert of(bad_words=("x",), bad_tokens=((4, 5),)) == {"bad_tokens": [[4, 5]]}


def test_forged_parameters_are_not_computed_or_give_no_number_that_fits() -> None:
    claim, logits = drawn({}, 1)
    for forged in (
        {"temperature": -1.0},
        {"repetition_penalty": 0.0},
        {"logit_bias": {-1: 2.0}},
        {"grammar": True},
    ):
        claim.turn = msgspec.structs.replace(
            claim.turn, sampling=msgspec.convert(forged, type(claim.turn.sampling))
        )
        assert redrawn(claim, "float32") is None
    for forged in (
        {"logit_bias": {10**9: 2.0}, "temperature": 1e-3},
        {"temperature": 1e308},
        {"logit_bias": {5: 1e308}},
        {"allowed_token_ids": [10**9]},
        {"bad_tokens": [[], [10**9]], "frequency_penalty": 1e308},
        {"top_p": -3.0},
        {"min_p": 1e300},
    ):
        claim.turn = msgspec.structs.replace(
            claim.turn, sampling=msgspec.convert(forged, type(claim.turn.sampling))
        )
        made = redrawn(claim, "float32")
        assert made is not None
        made.hear(0, logits)
        off = np.abs(made.values - np.array(claim.turn.sampling_logprobs))
        assert not (off < 1e-4).all()


# -- through the verifier


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    model = write_model("llama", tmp_path_factory.mktemp("dense") / "model", 0)
    world = World({"step-1": model})
    world.turn("step-1", tokens=12, temperature=0.7)
    world.turn("step-1", tokens=12, temperature=0.7, top_p=0.8)
    return world


def verified(world: World, *sampling: dict[str, Any] | None) -> Report:
    records = []
    for record, given in zip(world.records, sampling, strict=True):
        turn = dict(record["turn"]) if given is None else {**record["turn"], "sampling": given}
        records.append({**record, "turn": turn})
    files = world.checkpoints.__getitem__
    computer = PagedComputer(files, "step-1", EngineSettings(kv_cache_tokens=1024, threads=1))
    return Verifier(computer, lambda _: None, lambda _: False).verify(world.trees_of(records))


def test_a_record_with_another_temperature_than_the_one_it_was_drawn_at_is_found(world: World) -> None:
    true = {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}
    clean = verified(world, *true)
    assert clean.findings == []
    assert clean.sampling == {"computed": 24}
    report = verified(world, {"temperature": 1.0}, true[1])
    [finding] = report.findings
    assert finding.cause is Cause.SAMPLING
    assert finding.place.session == "s-1"
    assert finding.detail == "temperature 0.7 gives every number, and the record says temperature 1"
    [finding] = verified(world, true[0], {"temperature": 0.9, "top_p": 0.8}).findings
    assert finding.detail == "temperature 0.7 gives every number, and the record says temperature 0.9"
    [finding] = verified(world, {"temperature": 0.0}, true[1]).findings
    assert finding.cause is Cause.SAMPLING


def test_records_of_older_servers_are_verified_as_before(world: World) -> None:
    report = verified(world, None, None)
    assert report.findings == []
    assert report.sampling == {"not computed": 24}


def test_one_moved_sampling_logprob_is_a_moved_number(world: World) -> None:
    moved = [*world.records[0]["turn"]["sampling_logprobs"]]
    moved[4] -= 1e-2
    turn = {**world.records[0]["turn"], "sampling_logprobs": moved, "sampling": {"temperature": 0.7}}
    record = {**world.records[0], "turn": turn}
    files = world.checkpoints.__getitem__
    computer = PagedComputer(files, "step-1", EngineSettings(kv_cache_tokens=1024, threads=1))
    [finding] = Verifier(computer, lambda _: None, lambda _: False).verify(world.trees_of([record])).findings
    assert finding.cause is Cause.LOGPROB
    assert [(one.token, one.column) for one in finding.tokens] == [(4, "sampling_logprobs")]
