"""Calls on the wires of harnesses: streams stay alive while one is made, and one in open thinking is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES
from msgspec.structs import replace
from replica_fakes import IM_END, MODEL, FakeEngine, byte_tokenizer, running, write_tokenizer

from midstream.replica.text.chat import TextModel
from midstream.replica.text.tools import prepare_history
from midstream.replica.turns.message_keys import key_of_answer, keys_of
from midstream.replica.wire.blocks import PING_TOKENS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "%s"}}\n</tool_call>'


def body(path: str, *, stream: bool) -> dict[str, Any]:
    tool = {"name": "look", "description": "looks"}
    if path == CHAT:
        function = {"type": "function", "function": tool | {"parameters": SCHEMA}}
        own: dict[str, Any] = {"messages": [USER], "tools": [function], "max_tokens": 400}
    elif path == RESPONSES:
        flat = {"type": "function", **tool, "parameters": SCHEMA}
        own = {"input": "hi", "tools": [flat], "max_output_tokens": 400, "store": False}
    else:
        own = {"messages": [USER], "tools": [tool | {"input_schema": SCHEMA}], "max_tokens": 400}
    return {"model": MODEL, "stream": stream, **own}


def thinking(directory: Path) -> Path:
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    return directory


def ask(directory: Path, text: str, path: str, *, stream: bool) -> str:
    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=2048)
    engine.reply = (*text.encode(), IM_END)

    async def main() -> str:
        async with running(directory, engine, write=thinking) as here:
            answer = await here.http.post(path, json=body(path, stream=stream))
            assert answer.status_code == 200, answer.text
            return answer.text

    return asyncio.run(main())


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("path", "kind"), [(MESSAGES, "ping"), (RESPONSES, "keepalive")])
def test_a_long_call_has_events_while_it_is_made(tmp_path: Path, path: str, kind: str) -> None:
    told = events(ask(tmp_path, CALL % ("a" * 200), path, stream=True))
    kinds = [event["type"] for event in told]
    # A token is a letter here.
    assert kinds.count(kind) == len(CALL % ("a" * 200)) // PING_TOKENS
    if path == RESPONSES:
        assert [event["sequence_number"] for event in told] == [*range(len(told))]
    whole = json.loads(ask(tmp_path, CALL % ("a" * 200), path, stream=False))
    items = whole["output"] if path == RESPONSES else whole["content"]
    assert len(items) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_call_in_thinking_that_stays_open_is_said(tmp_path: Path, path: str, stream: bool) -> None:
    for text, expected in (
        ("<think>\nhm " + CALL % "a", True),
        ("<think>\nhm " + CALL % "a" + "\n</think>\n\n" + CALL % "b", False),
        ("<think>\nhm </tool_call>", False),
        (CALL % "a", False),
    ):
        told = ask(tmp_path, text, path, stream=stream)
        given = events(told) if stream else [json.loads(told)]
        if path == RESPONSES:
            given = [event.get("response", event) for event in given]
        said = [
            one["midstream"]["call_in_thinking"]
            for one in given
            if "call_in_thinking" in one.get("midstream", ())
        ]
        assert said == ([] if not expected else [[0]] if path == CHAT else [True])


VERBATIM = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{%- for m in messages %}{{ m.role + ':' + m.content }}"
    '{%- for c in m.tool_calls %}{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{%- if c.function.arguments is string %}{{ c.function.arguments }}{%- else %}{{ c.function.arguments | tojson }}"
    "{%- endif %}{{ '}\\n</tool_call>' }}{%- endfor %}{%- endfor %}"
)


@pytest.mark.parametrize("name", ["verbatim", "qwen2.5", "qwen3-coder", "llama3", "mistral"])
@pytest.mark.parametrize("given", ["", " \n", None, "left out"])
def test_a_call_without_arguments_has_empty_ones_in_every_template(name: str, given: str | None) -> None:
    template = VERBATIM if name == "verbatim" else (TEMPLATES / f"{name}.jinja").read_text()
    text = TextModel(byte_tokenizer(), template, {})

    def messages(function: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"id": "call00001", "type": "function", "function": function}
        earlier = {"role": "assistant", "content": "", "tool_calls": [call]}
        return prepare_history([USER, earlier], text.tools.arguments)

    function = {"name": "look"} if given == "left out" else {"name": "look", "arguments": given}
    made = messages(function)
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    assert text.render(made, tools) == text.render(messages({"name": "look", "arguments": "{}"}), tools)
    # It is the call that was sampled.
    before, after = keys_of(made, None)
    assert key_of_answer(before, "", [("look", "{}")]) == after
