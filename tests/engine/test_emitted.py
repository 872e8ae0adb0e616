"""A request that another engine has begun goes on here as if it had never moved: tokens, numbers, routes, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import Collected, needs_compiler, request, run
from msgspec.structs import replace
from test_constraint import EOS, GRAMMAR
from tiers import variant

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.models.tiny_moe import VOCAB_SIZE

MAX_TOKENS = 40


@pytest.fixture(params=["native", variant("torch")])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> tuple[Path, EngineSettings]:
    """With native kernels a position's numbers do not depend on how many were computed with it. With torch's they are the same
    to 1e-4 in float32; in bfloat16 it is a matter of the processor."""
    kernels = request.param
    needs_compiler(kernels)
    return tiny_model(dtype="bfloat16" if kernels == "native" else "float32"), EngineSettings(kernels=kernels)


def assert_same(
    got: Sequence[TokenRecord] | None,
    expected: Sequence[TokenRecord] | None,
    model: tuple[Path, EngineSettings],
) -> None:
    if model[1].kernels == "native" or not got or not expected:
        assert got == expected
        return
    assert [(r.token_id, r.snapshot, r.route) for r in got] == [
        (r.token_id, r.snapshot, r.route) for r in expected
    ]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.sampling_logprob == pytest.approx(theirs.sampling_logprob, abs=1e-4)
        assert [t.token_id for t in ours.top_logprobs] == [t.token_id for t in theirs.top_logprobs]


def variants() -> dict[str, GenerateRequest]:
    def one(name: str, **more: Any) -> GenerateRequest:
        given = {"max_tokens": MAX_TOKENS, "echo": 0, "seed": 5} | more
        return request(name, b"once upon a time " + name.encode(), **given)

    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    grammar = one("grammar", n=2, stop_token_ids=(EOS,), max_tokens=80)
    return {
        "sampled": one("sampled", n=3, temperature=1.2, top_p=0.9),
        "greedy": one("greedy", temperature=0.0),
        "penalties": one("penalties", **penalties, logit_bias={65: 3.0, 66: -2.0}),
        "echo": one("echo", echo=6, n=2),
        "tops": replace(one("tops"), top_logprobs=3),
        "grammar": replace(grammar, grammar=GRAMMAR),
    }


def whole(model: tuple[Path, EngineSettings], asked: GenerateRequest) -> list[Collected]:
    got = run(EngineCore(*model), [asked])
    return [got[asked.request_id, index] for index in range(asked.n)]


def resumed(
    model: tuple[Path, EngineSettings], asked: GenerateRequest, emitted: Sequence[tuple[int, ...] | None]
) -> list[Collected]:
    """On an engine that has served something else, so that blocks, rows and steps are others."""
    core = EngineCore(*model)
    run(core, [request("before", b"something else entirely", max_tokens=7, echo=0)])
    beside = request("beside", b"and another one beside it", seed=9, max_tokens=30, echo=0)
    got = run(core, [beside, replace(asked, emitted=tuple(emitted))])
    return [got[asked.request_id, index] for index in range(asked.n)]


@pytest.mark.parametrize("name", variants())
def test_what_follows_the_emitted_tokens_is_what_would_have_followed(
    model: tuple[Path, EngineSettings], name: str
) -> None:
    asked = variants()[name]
    undisturbed = whole(model, asked)
    ids = [tuple(record.token_id for record in choice.tokens) for choice in undisturbed]
    for cut in (0, 1, 2, 15, 16, 17, min(map(len, ids)) - 1):
        # Choices are not all as far.
        cuts = [max(cut - index, 0) for index in range(asked.n)]
        after = resumed(model, asked, [ids[i][:at] for i, at in enumerate(cuts)])
        for at, choice, expected in zip(cuts, after, undisturbed, strict=True):
            assert_same(choice.tokens, expected.tokens[at:], model)
            assert (choice.finish, choice.error) == (expected.finish, None)
            assert_same(choice.prompt, expected.prompt, model)


def test_choices_that_are_over_are_not_computed(model: tuple[Path, EngineSettings]) -> None:
    asked = variants()["sampled"]
    undisturbed = whole(model, asked)
    after = resumed(model, asked, [None, tuple(r.token_id for r in undisturbed[1].tokens[:9]), None])
    assert_same(after[1].tokens, undisturbed[1].tokens[9:], model)
    assert [(choice.tokens, choice.finish) for choice in (after[0], after[2])] == [([], None)] * 2


def test_a_choice_whose_last_token_was_emitted_only_ends(model: tuple[Path, EngineSettings]) -> None:
    for asked, reason in ((variants()["greedy"], "length"), (variants()["grammar"], "stop")):
        undisturbed = whole(model, asked)
        after = resumed(model, asked, [tuple(r.token_id for r in choice.tokens) for choice in undisturbed])
        assert [(choice.tokens, choice.finish) for choice in after] == [([], reason)] * asked.n


def test_what_cannot_have_been_emitted_is_refused(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), EngineSettings())
    asked = request("r", b"x", max_tokens=2, n=2)
    emitted: list[tuple[tuple[int, ...] | None, ...]] = [
        ((1,),),
        (None, None),
        ((1, 2, 3), ()),
        ((10**6,), ()),
    ]
    errors = [run(core, [replace(asked, emitted=given)])["r", 0].error for given in emitted]
    every = "emitted must have an entry for every choice, and one choice must be unfinished"
    assert errors[:3] == [every, every, "3 tokens were emitted of at most 2"]
    assert errors[3] == f"prompt token ids must be 0 to {VOCAB_SIZE - 1}"


@pytest.mark.slow
@pytest.mark.variant
def test_an_engine_process_ends_the_iterator_when_the_unfinished_choices_are_done(
    tiny_model: Callable[..., Path],
) -> None:
    async def main() -> list[GenerationEvent]:
        engine = EmbeddedEngine(tiny_model(), EngineSettings())
        await engine.start()
        try:
            asked = request("r", b"x", max_tokens=4, n=3, echo=0)
            given = replace(asked, emitted=(None, (1, 2), (1, 2, 3, 4)))
            return [event async for event in engine.generate(given)]
        finally:
            await engine.close()

    events = asyncio.run(main())
    assert [e.index for e in events for _ in e.tokens] == [1, 1]
    assert {e.index: e.finish for e in events if e.finish} == {1: "length", 2: "length"}
