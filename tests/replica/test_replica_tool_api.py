"""Tool calls and response formats over HTTP: the shapes clients read, and every token still on record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from replica_fakes import MODEL, FakeEngine, Running, running, sse
from transformers import AutoTokenizer

from midstream.models.tiny_moe import TOKEN_ID, build_tokenizer

EOS = TOKEN_ID["<|im_end|>"]
USER: list[Any] = [{"role": "user", "content": "Oslo?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(build_tokenizer().backend_tokenizer.encode(text).ids)


def write_tool_model(directory: Path) -> Path:
    build_tokenizer().save_pretrained(directory)
    return directory


def engine_saying(text: str) -> FakeEngine:
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, vocab_size=264, max_model_len=4096, grammars=True)
    engine.reply = (*tokens(text), EOS)
    return engine


@asynccontextmanager
async def play(directory: Path, engine: FakeEngine, write: Any = write_tool_model) -> AsyncIterator[Running]:
    async with running(directory, engine, write=write) as here:
        yield here


async def ask(here: Running, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": USER, **fields}
    return await here.http.post("/v1/chat/completions", json=body)


def called(message: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_calls_are_parsed_back_and_every_token_is_on_record(tmp_path: Path) -> None:
    engine = engine_saying(f"I look.\n{CALLS}")

    async with play(tmp_path, engine) as here:
        asked = {
            "logprobs": True,
            "return_token_ids": True,
            "raw_output": True,
            "include_routing_matrix": True,
        }
        answer = (await ask(here, tools=TOOLS, **asked)).json()
        choice = answer["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["role"], message["content"]) == ("assistant", "I look.")
        assert called(message) == [("weather", '{"city":  "Oslo"}'), ("stop", "{}")]
        assert all(call["type"] == "function" and "index" not in call for call in message["tool_calls"])
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == list(engine.reply) == choice["token_ids"]
        assert all(entry["routing_matrix"] for entry in entries)
        offsets = [entry["text_offset"] for entry in entries[:13]]
        # Of the generated text, markup included.
        assert offsets == [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            19,
            20,
            21,
            22,
        ]
        raw = choice["raw_output"]
        assert raw["completion"] == f"I look.\n{CALLS}<|im_end|>"
        assert raw["completion_token_ids"] == list(engine.reply)
        assert answer["usage"]["completion_tokens"] == len(engine.reply)


async def test_beside_tools_a_stop_string_that_names_a_special_token_means_it_too(tmp_path: Path) -> None:
    """A special token has no text that a stop string could be found in."""
    engine = engine_saying(f"I look.\n{CALLS}<|im_start|>user\nNo.")

    async with play(tmp_path, engine) as here:
        asked = {"stop": ["<|im_start|>"], "return_token_ids": True}
        choice = (await ask(here, tools=TOOLS, **asked)).json()["choices"][0]
        assert choice["token_ids"] == list(tokens(f"I look.\n{CALLS}<|im_start|>"))
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        assert len(choice["message"]["tool_calls"]) == 2


async def test_a_stop_string_that_is_a_tag_of_calls_cuts_the_call_off(tmp_path: Path) -> None:
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n'

    async with play(tmp_path, engine_saying(f"I look.\n{CALLS}")) as here:
        choice = (await ask(here, tools=TOOLS, stop="</tool_call>")).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": f"I look.\n{cut}"}


async def test_a_message_of_calls_only_has_null_content(tmp_path: Path) -> None:
    async with play(tmp_path, engine_saying(CALLS)) as here:
        message = (await ask(here, tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert [name for name, _ in called(message)] == ["weather", "stop"]


async def test_a_stream_shows_calls_as_deltas_and_none_of_their_markup(tmp_path: Path) -> None:
    engine = engine_saying(f"I < look.\n{CALLS}")

    async with play(tmp_path, engine) as here:
        stream = await here.sdk.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=TOOLS,
            logprobs=True,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "I < look."
        assert deltas[0].role == "assistant"
        found = [(c.index, c.function.name, c.function.arguments) for d in deltas for c in d.tool_calls or []]  # type: ignore[union-attr]
        assert found == [(0, "weather", '{"city":  "Oslo"}'), (1, "stop", "{}")]
        assert all(c.id and c.type == "function" for d in deltas for c in d.tool_calls or [])
        assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "tool_calls"]
        extra = [chunk.choices[0].model_extra for chunk in chunks]
        assert [i for e in extra if e for i in e["token_ids"]] == list(engine.reply)
        assert sum(len(c.choices[0].logprobs.content or []) for c in chunks if c.choices[0].logprobs) == len(
            engine.reply
        )


async def test_the_sdks_accumulated_message_can_be_sent_back_and_is_rendered_as_the_template_defines(
    tmp_path: Path,
) -> None:
    engine = engine_saying(CALLS)

    async with play(tmp_path, engine) as here:
        async with here.sdk.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        assert message.tool_calls is not None
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls
        ]
        history = [*USER, message.model_dump(), *results]
        answer = (await ask(here, messages=history, tools=TOOLS, max_tokens=1, return_token_ids=True)).json()
        hub = AutoTokenizer.from_pretrained(tmp_path)
        first = hub.apply_chat_template(USER, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        again = hub.apply_chat_template(history, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        assert answer["prompt_token_ids"] == again
        # No token differs on the second turn.
        assert again[: len(first) + len(engine.reply)] == [
            *first,
            *engine.reply,
        ]


async def test_what_is_not_a_call_comes_back_as_content_with_nothing_lost(tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call> so'
    engine = engine_saying(text)

    async with play(tmp_path, engine) as here:
        choice = (await ask(here, tools=TOOLS)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
        events = sse((await ask(here, tools=TOOLS, stream=True)).text)[:-1]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
        cut = (await ask(here, tools=TOOLS, max_tokens=19)).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] == '<tool_call>\n{"name": "weather'
        stopped = (await ask(here, tools=TOOLS, stop=['"arg'])).json()["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert stopped["message"]["content"] == '<tool_call>\n{"name": "weather", '


async def test_without_tools_nothing_is_parsed_and_special_tokens_stay_hidden(tmp_path: Path) -> None:
    async with play(tmp_path, engine_saying(CALLS)) as here:
        without = (await ask(here, return_token_ids=True)).json()
        plain, plain_size = without["choices"][0], len(without["prompt_token_ids"])
        none = (await ask(here, tools=TOOLS, tool_choice="none", return_token_ids=True)).json()
        for choice in (plain, none["choices"][0]):
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == CALLS.replace("<tool_call>", "").replace(
                "</tool_call>", ""
            )
        # The tools stay in the prompt, so that a session's turns begin alike whatever each may call.
        auto = (await ask(here, tools=TOOLS, tool_choice="auto", return_token_ids=True)).json()
        assert none["prompt_token_ids"] == auto["prompt_token_ids"]
        assert len(none["prompt_token_ids"]) > plain_size


async def test_one_call_at_most_ends_the_choice_at_its_closing_tag(tmp_path: Path) -> None:
    engine = engine_saying(CALLS)
    first = CALLS.partition("</tool_call>")[0] + "</tool_call>"

    async with play(tmp_path, engine) as here:
        fields = {"tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True, "n": 2}
        choices = (await ask(here, **fields)).json()["choices"]
        for choice in choices:
            assert choice["finish_reason"] == "tool_calls"
            assert [name for name, _ in called(choice["message"])] == ["weather"]
            assert choice["token_ids"] == list(tokens(first))
        request_id = engine.requests[0].request_id
        assert sorted(engine.end_choice_calls) == [(request_id, 0), (request_id, 1)]


async def test_choices_have_calls_of_their_own(tmp_path: Path) -> None:
    engine = engine_saying(CALLS)
    engine.replies = {1: (*tokens("no"), EOS)}

    async with play(tmp_path, engine) as here:
        first, second = (await ask(here, tools=TOOLS, n=2)).json()["choices"]
        assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
        assert second["message"] == {"role": "assistant", "content": "no"}


async def test_only_requests_that_ask_for_it_are_constrained(tmp_path: Path) -> None:
    engine = engine_saying("{}")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

    async with play(tmp_path, engine) as here:
        for fields in (
            {},
            {"tools": TOOLS},
            {"response_format": {"type": "text"}},
            {"response_format": schema},
            {"tools": TOOLS, "tool_choice": "required"},
        ):
            assert (await ask(here, **fields)).status_code == 200
        prompted = {"model": MODEL, "prompt": "x", "response_format": {"type": "json_object"}}
        assert (await here.http.post("/v1/completions", json=prompted)).status_code == 200
        grammars = [request.grammar for request in engine.requests]
        assert grammars[:3] == [None, None, None]
        assert [str(grammar).partition("\n")[0] for grammar in grammars[3:]] == [
            "start: body",
            "start: calls",
            "start: body",
        ]


async def test_a_schema_that_does_not_compile_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    engine = engine_saying("x")

    async with play(tmp_path, engine) as here:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
        for stream in (False, True):
            answer = await ask(here, response_format=schema, stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "response_format")
            assert error["message"] == "response_format: the schema: Invalid type: colour"
        assert engine.requests == []


async def test_what_engine_or_template_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_saying("x")
    engine.info = msgspec.structs.replace(engine.info, grammars=False)

    def without_tools(directory: Path) -> Path:
        write_tool_model(directory)
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
        return directory

    async def no_grammars(here: Running) -> None:
        for fields, param in (
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ):
            answer = await ask(here, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert "does not constrain answers to a schema" in answer.json()["error"]["message"]
        assert (await ask(here, tools=TOOLS)).status_code == 200

    async def no_tools(here: Running) -> None:
        answer = await ask(here, tools=TOOLS)
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "tools: this model's chat template does not define tools",
            "type": "invalid_request_error",
            "code": "invalid_request_error",
            "param": "tools",
        }
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = await ask(here, messages=history)
        assert answer.json()["error"]["message"] == (
            "messages[1].tool_calls: this model's chat template does not define them"
        )

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with play(tmp_path / "a", engine) as here:
        await no_grammars(here)
    async with play(tmp_path / "b", engine_saying("x"), without_tools) as here:
        await no_tools(here)
