"""Constrained generation: what comes matches its grammar, whatever else the engine does, and its numbers are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_helpers import Collected, reference, request, run

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest
from midstream.engine.embedded import constraint
from midstream.engine.embedded.constraint import Constraints, Matcher
from midstream.engine.embedded.core import EngineCore
from midstream.models.tiny_moe import TOKEN_ID, VOCAB_SIZE, build_tokenizer

EOS = TOKEN_ID["<|im_end|>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = "start: %json " + json.dumps(SCHEMA)


def constrained(
    name: str, *, grammar: str = GRAMMAR, stops: tuple[int, ...] = (EOS,), **more: Any
) -> GenerateRequest:
    given = {"max_tokens": 80, "echo": 0, "stop_token_ids": stops} | more
    return msgspec.structs.replace(request(name, b"colour: " + name.encode(), **given), grammar=grammar)


def assert_matches_the_schema(got: Collected) -> None:
    ids = [r.token_id for r in got.tokens]
    assert (got.finish, got.error, ids[-1]) == ("stop", None, EOS)
    value = json.loads(bytes(ids[:-1]))
    assert list(value) == ["kind", "count", "tags"]
    assert value["kind"] in {"red", "green", "blue"}
    assert type(value["count"]) is int
    assert 0 <= value["count"] <= 9999
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "bc"}


def matcher(grammar: str = GRAMMAR, stops: tuple[int, ...] = (EOS,)) -> Matcher:
    text = build_tokenizer().backend_tokenizer.to_str()
    return Constraints(text, VOCAB_SIZE, [EOS]).matcher(grammar, stops)


def allowed(m: Matcher) -> list[int]:
    mask = m.mask()
    assert mask is not None
    return [int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


def test_constrained_choices_match_and_free_ones_beside_them_are_not_changed(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model(dtype="bfloat16")
    free = request("free", b"anything", seed=4, max_tokens=30, echo=0)
    alone = run(EngineCore(model, EngineSettings()), [free])["free", 0]
    wanted = [constrained(f"{i}", seed=i, n=3, temperature=1.5 * (i % 2)) for i in range(4)]
    got = run(EngineCore(model, EngineSettings()), [*wanted[:2], free, *wanted[2:]])
    assert got.pop(("free", 0)).tokens == alone.tokens
    for choice in got.values():
        assert_matches_the_schema(choice)
    # A random stream each.
    assert len({tuple(r.token_id for r in got["1", i].tokens) for i in range(3)}) == 3
    # Greedy.
    assert len({tuple(r.token_id for r in got["2", i].tokens) for i in range(3)}) == 1


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_logprob_is_the_raw_models_and_the_sampling_logprob_that_of_what_is_allowed(
    tiny_model: Callable[..., Path], temperature: float
) -> None:
    model = tiny_model()
    wanted = constrained("r", seed=3, temperature=temperature)
    got = run(EngineCore(model, EngineSettings()), [wanted])["r", 0]
    assert_matches_the_schema(got)
    ids = [*wanted.prompt, *(r.token_id for r in got.tokens)]
    logprobs, routes = reference(model)(ids)
    follower = matcher()
    for i, record in enumerate(got.tokens, start=len(wanted.prompt)):
        raw = logprobs[i - 1]
        assert record.logprob == pytest.approx(raw[ids[i]].item(), abs=1e-4)
        assert record.route == routes[i - 1].tobytes()
        tokens = allowed(follower)
        among = (raw[tokens] / temperature).log_softmax(-1)
        assert record.sampling_logprob == pytest.approx(among[tokens.index(ids[i])].item(), abs=1e-4)
        if ids[i] != EOS:
            follower.accept(ids[i])


def test_a_preempted_sequence_goes_on_where_its_grammar_stood(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(dtype="bfloat16")
    wanted = [constrained(f"{i}", seed=i, n=2) for i in range(8)]
    roomy = run(EngineCore(model, EngineSettings()), wanted)
    tight = EngineCore(model, EngineSettings(kv_cache_tokens=160))
    preempt, preempted = tight.scheduler._preempt, []

    def counted(seq: Any) -> None:
        preempted.append(seq.index)
        preempt(seq)

    tight.scheduler._preempt = counted  # type: ignore[method-assign]
    got = run(tight, wanted)
    assert preempted
    for key, expected in roomy.items():
        assert got[key].tokens == expected.tokens
        assert_matches_the_schema(got[key])


def test_a_swap_in_the_middle_leaves_the_grammar_where_it_stood(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), EngineSettings())

    def swap(step: int) -> None:
        if step == 12:
            core.set_staged(core.stage(tiny_model(seed=1)))
            core.commit("step-1")

    got = run(core, [constrained(f"{i}", seed=i) for i in range(3)], after_step=swap)
    for choice in got.values():
        assert_matches_the_schema(choice)
        assert [r.snapshot for r in choice.tokens][:13] == ["base"] * 12 + ["step-1"]


def test_a_stop_token_is_allowed_exactly_where_the_grammar_accepts() -> None:
    m = matcher('start: "ab" "c"*')
    assert allowed(m) == [ord("a")]
    assert not m.accept(ord("a"))
    assert allowed(m) == [ord("b")]
    assert not m.accept(ord("b"))
    assert allowed(m) == [ord("c"), EOS]
    # A request's own stop tokens take the place of the model's.
    other = matcher('start: "a"', stops=(65, 66))
    assert not other.accept(ord("a"))
    assert allowed(other) == [65, 66]


def test_without_stop_tokens_the_end_of_the_grammar_ends_the_choice(tiny_model: Callable[..., Path]) -> None:
    wanted = [constrained(f"{i}", seed=i, stops=()) for i in range(2)]
    got = run(EngineCore(tiny_model(), EngineSettings()), wanted)
    for choice in got.values():
        assert (choice.finish, choice.tokens[-1].token_id) == ("stop", ord("}"))
        assert set(json.loads(bytes(r.token_id for r in choice.tokens))) == {"kind", "count", "tags"}


def test_the_token_limit_cuts_a_constrained_choice_like_any_other(tiny_model: Callable[..., Path]) -> None:
    got = run(EngineCore(tiny_model(), EngineSettings()), [constrained("r", max_tokens=5)])["r", 0]
    assert (got.finish, bytes(r.token_id for r in got.tokens)) == ("length", b'{"kin')


def test_the_grammar_wins_over_bias_penalties_and_filters(tiny_model: Callable[..., Path]) -> None:
    bias = {ord("x"): 100.0, ord("{"): -100.0}
    wanted = constrained("r", logit_bias=bias, repetition_penalty=1.5, top_k=1, min_p=0.9)
    assert_matches_the_schema(run(EngineCore(tiny_model(), EngineSettings()), [wanted])["r", 0])


def test_a_grammar_that_does_not_compile_ends_its_own_request_only(tiny_model: Callable[..., Path]) -> None:
    core = EngineCore(tiny_model(), EngineSettings())
    got = run(core, [constrained("bad", grammar='start: %json {"type": "colour"}'), constrained("good")])
    error = got["bad", 0].error
    assert error is not None
    assert error.startswith("the grammar cannot be used: ")
    assert "Invalid type: colour" in error
    assert_matches_the_schema(got["good", 0])


def test_a_matcher_that_fails_on_the_way_ends_its_choice_and_no_other(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(), EngineSettings())

    def break_one(step: int) -> None:
        if step == 5:
            (broken, _) = (seq for seq in core.scheduler.running if seq.request.request_id == "bad")
            assert broken.matcher is not None
            # As if the library gave up on a limit of its own.
            broken.matcher.accept(ord("?"))

    got = run(core, [constrained("bad", n=2), constrained("good")], after_step=break_one)
    ended, *others = sorted((got["bad", 0], got["bad", 1], got["good", 0]), key=lambda one: len(one.tokens))
    assert (ended.finish, ended.error, len(ended.tokens)) == ("dead_end", None, 5)
    for other in others:
        assert_matches_the_schema(other)


def test_a_dead_end_ends_a_choice_with_its_tokens_and_the_snapshots_of_their_kv(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(), EngineSettings())
    # Behind "ab" the grammar asks for a token that may not come.
    wanted = constrained("r", grammar='start: "ab" "c"', bad_tokens=((ord("c"),),))
    wanted = msgspec.structs.replace(wanted, want_kv_snapshots=True)
    got = run(core, [wanted])["r", 0]
    assert (got.finish, got.error, bytes(r.token_id for r in got.tokens)) == ("dead_end", None, b"ab")
    assert got.kv == [("base", 0, len(wanted.prompt) + 1)]
    assert core.idle


def test_text_that_spells_a_special_token_is_spelled_not_replaced_by_the_token() -> None:
    m = matcher('start: "x<think>y"')
    taken = []
    while (tokens := allowed(m)) != [EOS]:
        assert len(tokens) == 1
        taken += tokens
        assert not m.accept(tokens[0])
    assert bytes(taken) == b"x<think>y"
    tag = TOKEN_ID["<tool_call>"]
    assert allowed(matcher(f"start: <[{tag}]>")) == [tag]


def test_the_most_recently_used_grammars_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "COMPILED_MAX", 2)
    compiled: list[str] = []

    def compile_one(tokenizer: Any, grammar: str, **options: Any) -> Any:
        compiled.append(grammar)
        return compiler(tokenizer, grammar, **options)

    compiler = constraint.LLMatcher
    constraints = Constraints(build_tokenizer().backend_tokenizer.to_str(), VOCAB_SIZE, [EOS])
    monkeypatch.setattr(constraint, "LLMatcher", compile_one)
    for letter in "abacab":
        constraints.matcher(f'start: "{letter}"', ())
    assert [grammar[-2] for grammar in compiled] == ["a", "b", "c", "b"]


def test_an_engine_without_a_tokenizer_says_that_it_takes_no_grammars(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    for file in tiny_model().iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    core = EngineCore(tmp_path, EngineSettings())
    assert not core.info().grammars
    assert EngineCore(tiny_model(), EngineSettings()).info().grammars
    got = run(core, [constrained("r"), request("free", b"abc", echo=0)])
    assert (
        got["r", 0].error == "the grammar cannot be used: this model's tokenizer does not work with grammars"
    )
    assert got["free", 0].finish == "length"
