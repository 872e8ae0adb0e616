"""Requests to SGLang that shape the draw, and those with routes: what they get, and which servers are not asked for them."""

from __future__ import annotations

import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import (
    EOS,
    SPARSE,
    TAKEN,
    VOCAB,
    FakeSglang,
    experts_of,
    logits_of,
    logprobs_of,
    next_kv,
    until,
)
from test_sglang_engine import PROMPT, Stream, asking, attached, switched

SHAPING = {"logit_bias", "grammars", "constrained_logprobs"}
GRAMMAR = "start: (<[40]> | <[41]>) <[50]>"
COLD = {"temperature": 0.0}


def with_experts(fake: FakeSglang) -> None:
    fake.info["enable_return_routed_experts"] = True


def has(engine: Any) -> set[str]:
    card = engine._info().card
    return {feature for feature in (*SHAPING, "routes") if card.has(feature)}


def route_of(kv: bytes) -> bytes:
    return experts_of(kv)[list(SPARSE)].astype("u1").tobytes()


def kvs_of(weights: bytes, tokens: tuple[int, ...]) -> list[bytes]:
    found: list[bytes] = []
    for token in tokens:
        found.append(next_kv(weights, token, found[-1] if found else b""))
    return found


class TestProofs:
    async def test_a_server_that_passes_has_the_features(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            assert has(engine) == SHAPING
            assert engine._info().card.why["routes"].endswith("without --enable-return-routed-experts")
        async with attached(tmp_path, with_experts, experts=True) as (engine, _):
            assert has(engine) == {*SHAPING, "routes"}

    @pytest.mark.parametrize(
        ("fault", "lost", "why"),
        [
            (
                "shapes_numbers",
                SHAPING,
                "under a bias are not the raw model's .* start SGLang with PYTHONPATH=",
            ),
            ("ignores_bias", SHAPING, "where a bias made [0-9]+ the best token"),
            ("counts_nothing", {"logit_bias"}, "penalties make|no penalty of SGLang was seen"),
            ("counts_prompts", {"logit_bias"}, "penalties make"),
            (
                "refuses_grammars",
                {"grammars", "constrained_logprobs"},
                "Grammar-based generation is not supported",
            ),
            ("forgets_grammars", {"grammars", "constrained_logprobs"}, "does not hold answers to a grammar"),
        ],
    )
    async def test_a_server_with_a_fault_is_not_asked_for_them(
        self, tmp_path: Path, fault: str, lost: set[str], why: str
    ) -> None:
        async with attached(tmp_path, lambda fake: setattr(fake, fault, True)) as (engine, _):
            assert has(engine) == SHAPING - lost
            for feature in lost:
                assert re.search(why, engine._info().card.why[feature])

    @pytest.mark.parametrize(
        ("fault", "why"),
        [
            ("shifts_routes", "gives an answer other routes than the same tokens of a prompt"),
            ("loses_cached_routes", "other routes when it is cached|cached tokens other routes"),
            ("blanks_routes", "the same one twice"),
            ("sends_no_routes", "returned no routes"),
        ],
    )
    async def test_a_server_with_wrong_routes_is_not_asked_for_them(
        self, tmp_path: Path, fault: str, why: str
    ) -> None:
        def plant(fake: FakeSglang) -> None:
            with_experts(fake)
            setattr(fake, fault, True)

        async with attached(tmp_path, plant, experts=True) as (engine, _):
            assert has(engine) == SHAPING
            assert re.search(why, engine._info().card.why["routes"])


class TestRequests:
    @pytest.mark.parametrize(
        "sampling",
        [
            {"logit_bias": {40: 4.0, 41: -3.0}},
            {"presence_penalty": 1.5, "frequency_penalty": -0.5, "top_p": 0.9},
        ],
    )
    async def test_numbers_are_the_raw_models(self, tmp_path: Path, sampling: dict[str, Any]) -> None:
        async with attached(tmp_path) as (engine, fake):
            stream = Stream(engine, asking(count=12, sampling=sampling, top_logprobs=2))
            assert (await stream.end()).finish == "length"
            made = [(token.token_id, fake.weights) for token in stream.tokens]
            expected = logprobs_of(PROMPT, made)
            assert [token.logprob for token in stream.tokens] == pytest.approx(expected, abs=1e-9)
            assert all(isnan(token.sampling_logprob or 0) for token in stream.tokens), "nothing says it"

    async def test_each_greedy_token_is_the_best_under_bias_and_penalties(self, tmp_path: Path) -> None:
        shape: dict[str, Any] = {
            "presence_penalty": 2.0,
            "frequency_penalty": 1.0,
            "logit_bias": {40: 6.0, 41: 5.5},
        }
        async with attached(tmp_path) as (engine, fake):
            stream = Stream(engine, asking(count=12, sampling=COLD | shape))
            await stream.end()
            made = [token.token_id for token in stream.tokens]
            for at, token in enumerate(made):
                scores = logits_of(kvs_of(fake.weights, (*PROMPT, *made[:at]))[-1], VOCAB)
                for one, bias in shape["logit_bias"].items():
                    scores[one] += bias
                for one in set(made[:at]):
                    scores[one] -= 2.0 + made[:at].count(one)
                assert token == scores.argmax()
            assert len(set(made)) > 3

    @pytest.mark.parametrize("stops", [(EOS,), ()])
    async def test_an_answer_matches_its_grammar_and_has_raw_numbers(
        self, tmp_path: Path, stops: tuple[int, ...]
    ) -> None:
        async with attached(tmp_path) as (engine, fake):
            asked = asking(sampling={"stop_token_ids": stops}, grammar=GRAMMAR)
            stream = Stream(engine, asked)
            assert (await stream.end()).finish == "stop"
            made = [token.token_id for token in stream.tokens]
            assert made[0] in (40, 41)
            assert made[1:] == [50, EOS]
            expected = logprobs_of(PROMPT, [(i, fake.weights) for i in made])
            assert [token.logprob for token in stream.tokens] == pytest.approx(expected, abs=1e-9)
            assert not any(token.constrained for token in stream.tokens)
            assert all(isnan(token.sampling_logprob or 0) for token in stream.tokens), "not the raw number"

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"sampling": {"repetition_penalty": 1.2}}, "repetition_penalty: SGLang does not count"),
            ({"grammar": '{"grammars": []}'}, "Lark dialect only"),
            (
                {"grammar": GRAMMAR, "emitted": ((40,),)},
                "must match a grammar: it would begin the grammar again",
            ),
            ({"sampling": {"frequency_penalty": 1.0}, "emitted": ((40,),)}, "it would not count its tokens"),
        ],
    )
    async def test_what_sglang_would_compute_otherwise_is_refused(
        self, tmp_path: Path, more: dict[str, Any], why: str
    ) -> None:
        async with attached(tmp_path) as (engine, fake):
            assert why in str((await Stream(engine, asking(**more)).end()).error)
            assert fake.calls == []

    async def test_each_token_has_the_route_of_its_pass_over_a_swap(self, tmp_path: Path) -> None:
        async with attached(tmp_path, with_experts, experts=True) as (engine, fake):
            old = fake.weights
            fake.hold_at = 3
            stream = Stream(engine, asking(count=6, want_routes=True, prompt_records=4))
            await until_running(fake, 3)
            new = await switched(engine, tmp_path, "step-1", experts=True)
            fake.go.set()
            last = await stream.end()
            assert last.finish == "length", last.error
            made = [token.token_id for token in stream.tokens]
            kvs = kvs_of(old, (*PROMPT, *made[:2]))
            for token in made[2:5]:
                kvs.append(next_kv(new, token, kvs[-1]))
            assert [token.route for token in stream.tokens] == [route_of(kv) for kv in kvs[len(PROMPT) - 1 :]]
            prompt = [record for event in stream.events for record in event.prompt or ()]
            at = len(PROMPT) - 5
            assert [record.route for record in prompt] == [route_of(kv) for kv in kvs[at : at + 4]]
            assert {len(token.route or b"") for token in stream.tokens} == {len(SPARSE) * TAKEN}

    @pytest.mark.parametrize("fault", ["blanks_routes", "sends_no_routes"])
    async def test_a_stream_whose_routes_are_lost_ends_with_an_error(
        self, tmp_path: Path, fault: str
    ) -> None:
        async with attached(tmp_path, with_experts, experts=True) as (engine, fake):
            setattr(fake, fault, True)
            stream = Stream(engine, asking(want_routes=True))
            assert "routes" in str((await stream.end()).error)
            assert stream.tokens == []

    async def test_a_continued_stream_asks_for_the_routes_behind_its_tokens(self, tmp_path: Path) -> None:
        async with attached(tmp_path, with_experts, experts=True) as (engine, fake):
            stream = Stream(engine, asking(count=5, want_routes=True, emitted=((5, 6),)))
            assert (await stream.end()).error is None
            made = tuple(token.token_id for token in stream.tokens)
            kvs = kvs_of(fake.weights, (*PROMPT, 5, 6, *made))
            assert [token.route for token in stream.tokens] == [
                route_of(kv) for kv in kvs[len(PROMPT) + 1 : -1]
            ]


async def until_running(fake: FakeSglang, count: int) -> None:
    await until(lambda: any(len(made) >= count for made in fake.running.values()))
