"""The fields of vLLM's clients: what each does to prompt, text, records and engine, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import (
    IM_END,
    IM_START,
    MODEL,
    RANK,
    FakeEngine,
    Running,
    ids,
    running,
    sse,
    write_tokenizer,
)

from midstream.core.errors import InvalidRequest, UnknownField
from midstream.core.types import ENGINE_FEATURES, EngineCard, ModelInfo
from midstream.fleet.sessions import session_key
from midstream.replica.request.checked import check
from midstream.replica.request.fields import bad_tokens
from midstream.replica.request.needs import check_needs
from midstream.replica.request.schema import parse_chat, parse_completion
from midstream.replica.text.grammar import build
from midstream.replica.text.grammarcheck import GrammarChecks
from midstream.replica.text.vocabulary import StopStrings

MOE = ModelInfo(max_model_len=100, vocab_size=300, moe_layers=2, top_k=2, num_experts=8, eos_token_ids=(7,))
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- if not loop.last or m.role == 'user' -%}{{ '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
    "{{ mood|default('') }}{{ reasoning_effort|default('') }}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def completion(info: ModelInfo = MOE, **fields: Any) -> Any:
    return check(parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode()), info)


def chat(info: ModelInfo = MOE, **fields: Any) -> Any:
    return check(parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode()), info)


def write_template(directory: Path) -> Path:
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@asynccontextmanager
async def play(
    directory: Path,
    engine: FakeEngine,
    write: Callable[[Path], Path] = write_template,
) -> AsyncIterator[Running]:
    async with running(directory, engine, write=write) as here:
        yield here


async def complete(here: Running, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 6, **fields}
    return answered(await here.http.post("/v1/completions", json=body))


async def say(here: Running, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": HI, "max_tokens": 6, **fields}
    return answered(await here.http.post("/v1/chat/completions", json=body))


def answered(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(engine: FakeEngine) -> str:
    names = {IM_START: "<|im_start|>", IM_END: "<|im_end|>", 256: "he"}
    return "".join(names.get(token) or chr(token) for token in engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: must be at most max_tokens (8), got 9"),
        ({"min_tokens": 17}, "min_tokens: must be at most max_tokens (16), got 17"),
        (
            {"min_tokens": 1, "structured_outputs": {"choice": ["a"]}},
            "min_tokens: cannot go with structured_outputs, which decides the end",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids: must hold at least one token"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids: must be 0 to 299, got 300"),
        ({"bad_words": ["a", " "]}, "bad_words: words must not be empty"),
        ({"bad_words": ["a"] * 257}, "bad_words: at most 256 words of 8192 characters in all"),
        ({"detokenize": False, "stop": "x"}, "stop: needs text; leave out detokenize: false"),
        (
            {"cache_salt": "a", "prompt_cache_isolation_key": "b"},
            "cache_salt: must equal prompt_cache_isolation_key when both are given",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs: expected int <= 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: not supported in a stream"),
        (
            {"guided_json": {}},
            "guided_json: not supported by this server; use structured_outputs.json",
        ),
        (
            {"guided_decoding_backend": "x"},
            "guided_decoding_backend: not supported by this server; leave it out",
        ),
        (
            {"structured_outputs": {"json": r'{"const": "\ud800"}'}},
            "structured_outputs: json is not JSON: Input data was truncated",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= x"}},
            "structured_outputs: grammar is not supported by this server; use one of json, json_object, choice, regex",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "regex": "b"}},
            "structured_outputs: expected one of json, json_object, choice, regex, got choice, regex",
        ),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs: regex ends in a single backslash"),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}},
            "structured_outputs: cannot go with response_format",
        ),
        ({"return_routed_experts": True}, "include_routing_matrix: requires logprobs: true"),
        ({"request_id": ""}, "request_id: expected str of length >= 1"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"separate_reasoning": True, "include_reasoning": False}, "include_reasoning"),
        (
            {
                "structured_outputs": {"choice": ["a"]},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "structured_outputs",
        ),
    ],
)
def test_a_chats_wish_that_cannot_be_met_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_fields_of_chats_are_none_of_completions() -> None:
    for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(UnknownField):
            completion(**{name: None})


@pytest.mark.parametrize(
    ("feature", "fields"),
    [
        ("token_limits", {"min_tokens": 1}),
        ("token_limits", {"allowed_token_ids": [1]}),
        ("token_limits", {"bad_words": ["x"]}),
        ("priorities", {"priority": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("grammars", {"structured_outputs": {"json": {"type": "object"}}}),
    ],
)
def test_what_an_engine_lacks_is_refused_by_the_name_of_the_field(
    feature: str, fields: dict[str, Any]
) -> None:
    card = EngineCard(kind="x", features=tuple(name for name in ENGINE_FEATURES if name != feature))
    body = parse_completion(json.dumps({"prompt": "p", **fields}).encode())
    info = msgspec.structs.replace(MOE, grammars=True)
    check_needs(check(body, info), body, info)
    with pytest.raises(InvalidRequest, match=rf"^{next(iter(fields))}: .*feature {feature}"):
        check_needs(check(body, MOE), body, msgspec.structs.replace(info, card=card))


def test_a_session_is_named_by_session_id_behind_the_cache_key_and_before_the_user() -> None:
    def named(**fields: Any) -> str | None:
        return session_key({}, json.dumps(fields).encode())

    assert named(session_id="s") == "s"
    assert named(session_id="s", user="u") == "s"
    assert named(session_id="s", prompt_cache_key="p", user="u") == "p"


@pytest.mark.parametrize(
    ("asked", "fits", "fails"),
    [
        ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ({"regex": r"[0-9]+/[a-c]+"}, "12/ab", "12-ab"),
        ({"regex": "a\nb|\\/"}, "a\nb", "b"),
        ({"json": '{"type": "object", "required": ["a"]}'}, '{"a":1}', "[1]"),
        ({"json_object": True}, "{}", "1"),
    ],
)
def test_structured_outputs_become_grammars(asked: dict[str, Any], fits: str, fails: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    wanted = completion(structured_outputs=asked).answer
    checks = GrammarChecks()
    try:
        grammar = build(
            wanted.schema,
            None,
            None,
            None,
            (7,),
            checks.of_request(lambda: None),
            wanted.rule,
            wanted.param,  # type: ignore[arg-type]
        )
    finally:
        checks.close()
    assert grammar is not None
    tokenizer = LLTokenizer("byte")

    def takes(text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        return (
            matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()
        )

    assert takes(fits)
    assert not takes(fails)


def test_bad_words_are_tokenized_as_vllm_does() -> None:
    table = {"bad": (1, 2), " bad": (3, 2), "x": (5,), " x": (9, 5)}
    assert bad_tokens((" bad", "x"), table.__getitem__) == ((1, 2), (3, 2), (5,))


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_no_stop_string_ends_in_the_free_text_and_one_may_begin_there(cut: int) -> None:
    stops = StopStrings(("ab", "xaby"))
    free = "ab-xab"
    shown = "".join(stops.push(free[i : i + cut], free=True) for i in range(0, len(free), cut))
    assert stops.matched is None
    shown += stops.push("y!")
    assert (shown, stops.matched) == ("ab-", "xaby")
    kept = StopStrings(("ab",), kept=True)
    assert kept.push("xxabyy") == "xxab"


async def test_the_template_gets_its_variables_and_the_turn_as_asked(tmp_path: Path) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine) as here:
        await say(here)
        plain = prompt_of(engine)
        assert plain == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
        await say(here, chat_template_kwargs={"mood": "glad"}, reasoning_effort="high")
        assert prompt_of(engine) == "<|im_start|>user\nhi<|im_end|>gladhigh<|im_start|>assistant\n"
        await say(here, reasoning_effort="none")
        assert prompt_of(engine) == plain
        await say(here, add_generation_prompt=False)
        assert prompt_of(engine) == "<|im_start|>user\nhi<|im_end|>"
        begun = [*HI, {"role": "assistant", "content": "Well, "}]
        await say(here, messages=begun, continue_final_message=True)
        assert prompt_of(engine) == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\nWell, "


async def test_reasoning_effort_is_refused_where_the_template_does_not_use_it(tmp_path: Path) -> None:
    async with play(tmp_path, FakeEngine(), write_tokenizer) as here:
        body = {"model": MODEL, "messages": HI, "reasoning_effort": "high"}
        response = await here.http.post("/v1/chat/completions", json=body)
        message = "reasoning_effort: not supported by this server; leave it out"
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_special_tokens_and_stops_stand_in_the_text_when_they_are_wanted(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.reply = (*ids("a"), IM_START, *ids("b;c"), IM_END)

    async with play(tmp_path, engine) as here:

        async def text(**fields: Any) -> str:
            return str((await complete(here, **fields))["choices"][0]["text"])

        assert await text() == "ab;c"
        assert await text(skip_special_tokens=False) == "a<|im_start|>b;c"
        assert await text(skip_special_tokens=False, include_stop_str_in_output=True) == (
            "a<|im_start|>b;c<|im_end|>"
        )
        assert await text(include_stop_str_in_output=True) == "ab;c"
        assert await text(stop=";") == "ab"
        assert await text(stop=";", include_stop_str_in_output=True) == "ab;"
        assert await text(stop=";", min_tokens=4) == "ab;c"
        assert await text(detokenize=False) == ""


async def test_every_token_is_on_record_without_text_and_by_its_number(tmp_path: Path) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine) as here:
        asked = {"detokenize": False, "return_tokens_as_token_ids": True, "return_token_ids": True}
        choice = (await complete(here, logprobs=True, top_logprobs=1, **asked))["choices"][0]
        tokens = list(ids("hello he"))
        assert choice["token_ids"] == tokens
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens]
        assert bytes(entries[0]["bytes"]) == b"he"
        assert entries[0]["top_logprobs"][0]["token"] == "token_id:65"
        legacy = (await complete(here, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]
        assert legacy["text"] == "hello he"
        assert legacy["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]


async def test_the_prompts_log_probabilities_come_in_vllms_shape(tmp_path: Path) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine) as here:
        answer = await complete(here, prompt=["abc", "de"], prompt_logprobs=1, echo=True, max_tokens=1)
        first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
        best = {"logprob": -0.5, "rank": 1, "decoded_token": "A"}
        assert first == [
            None,
            {"65": best, "98": {"logprob": -1.0, "rank": RANK, "decoded_token": "b"}},
            {"65": best, "99": {"logprob": -2.0, "rank": RANK, "decoded_token": "c"}},
        ]
        assert len(second) == 2
        told = await say(here, prompt_logprobs=0)
        assert "prompt_logprobs" not in told["choices"][0]
        size = len(engine.requests[-1].prompt)
        assert [len(scores or {}) for scores in told["prompt_logprobs"]] == [0] + [1] * (size - 1)


async def test_an_echo_shows_its_own_part_of_a_scored_prompt(tmp_path: Path) -> None:
    async with play(tmp_path, FakeEngine()) as here:
        asked = {"echo": True, "echo_last": 2, "logprobs": True, "prompt_logprobs": 0, "max_tokens": 1}
        choice = (await complete(here, prompt="abcd", **asked))["choices"][0]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["c", "d", "he"]
        assert len(choice["prompt_logprobs"]) == 4


async def test_limits_priority_and_salt_reach_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine) as here:
        await complete(here, min_tokens=3, allowed_token_ids=[5, 6, 5], bad_words=["he"], priority=4)
        request = engine.requests[-1]
        sampling = request.sampling
        assert (sampling.min_tokens, sampling.allowed_token_ids, request.priority) == (3, (5, 6), 4)
        assert (sampling.bad_words, sampling.bad_tokens) == (("he",), ((256,),))
        salts = []
        for fields in ({}, {"cache_salt": "a"}, {"prompt_cache_isolation_key": "a"}, {"cache_salt": "b"}):
            await complete(here, **fields)
            salts.append(engine.requests[-1].salt)
        assert salts[1] == salts[2]
        assert len(set(salts)) == 3


async def test_ids_names_and_a_model_that_is_left_out(tmp_path: Path) -> None:
    async with play(tmp_path, FakeEngine()) as here:
        assert (await complete(here, request_id="r-1"))["id"] == "cmpl-r-1"
        streamed = await here.http.post(
            "/v1/chat/completions",
            json={"messages": HI, "request_id": "r-2", "stream": True, "max_tokens": 2},
        )
        assert {event["id"] for event in sse(streamed.text) if event != "[DONE]"} == {"chatcmpl-r-2"}


async def test_special_tokens_of_the_tokenizer_are_added_as_asked(tmp_path: Path) -> None:
    from replica_fakes import byte_tokenizer
    from tokenizers.processors import TemplateProcessing

    def write(directory: Path) -> Path:
        write_template(directory)
        tokenizer = byte_tokenizer()
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    engine = FakeEngine()

    async with play(tmp_path, engine, write) as here:
        for given, expected in ((None, 1), (True, 1), (False, 0)):
            await complete(here, add_special_tokens=given)
            assert engine.requests[-1].prompt.count(IM_START) == expected
        for given, expected in ((None, 2), (True, 3), (False, 2)):
            await say(here, add_special_tokens=given)
            assert engine.requests[-1].prompt.count(IM_START) == expected
