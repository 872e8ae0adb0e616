"""Reasoning: the tags that a template shows, and where each character and record of an answer goes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from replica_fakes import (
    IM_END,
    MODEL,
    TEMPLATE,
    FakeEngine,
    byte_tokenizer,
    ids,
    running,
    sse,
    write_tokenizer,
)

from midstream.core.types import TokenRecord
from midstream.engine.embedded.constraint import Constraints
from midstream.models.tiny_moe import TOKEN_ID, build_tokenizer
from midstream.replica.response.choice import Choice
from midstream.replica.response.stages import ReasoningStage
from midstream.replica.text.chat import TextModel
from midstream.replica.text.reasoning import ReasoningParser
from midstream.replica.text.reasoning_tags import ReasoningFormat
from midstream.replica.text.vocabulary import Vocabulary

QWEN = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content -%}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
OPENED = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] }}"
    "{{ '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)
BRACKETS = QWEN.replace("<think>\\n", "[THINK]").replace("\\n</think>\\n\\n", "[/THINK]")
FORM = ReasoningFormat("<think>", "\n", "\n", "</think>", "\n\n")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, FORM),
        (OPENED, FORM),
        (BRACKETS, ReasoningFormat("[THINK]", "", "", "[/THINK]", "")),
        (TEMPLATE, None),
        (None, None),
    ],
)
def test_the_tags_are_those_that_the_template_writes(template: str | None, form: Any) -> None:
    assert TextModel(byte_tokenizer(), template, {}).reasoning == form


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("x", "<think>\na\n</think>\n\nb", "a", "b"),
        ("x", "<think>\n\n</think>\n\nb", "", "b"),
        ("x<think>\n", "a</thin\n</think>b", "a</thin", "b"),
        ("x<think>\n", "never closed\n", "never closed\n", ""),
        ("x<think>\n\n</think>\n\n", "<think>b", "", "<think>b"),
        ("x", " b <think>c</think>", "", " b <think>c</think>"),
        ("x", "<thi", "", "<thi"),
    ],
)
def test_an_answer_is_the_same_however_it_is_cut(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    for size in range(1, len(text) + 1):
        parser = ReasoningParser(FORM, prompt)
        parts = [part for i in range(0, len(text), size) for part in parser.push(text[i : i + size])]
        parts += parser.flush()
        assert "".join(part.raw for part in parts) == text
        assert "".join(part.reasoning for part in parts) == reasoning
        assert "".join(part.text for part in parts) == content


def test_every_record_and_character_keeps_its_snapshot() -> None:
    text = "<think>\nabc\n</think>\n\ndef"
    tokens = byte_tokenizer().encode(text).ids
    choice = Choice(0, Vocabulary(byte_tokenizer()), (), ())
    stage = ReasoningStage(ReasoningParser(FORM, ""), None)
    pieces = []
    for at, token in enumerate(tokens):
        pieces += stage.feed(choice.feed(TokenRecord(token, 0.0, 0.0, "old" if at < 10 else "new")))
    pieces += stage.feed(choice.end("stop")) + stage.end()
    assert [scored.record.token_id for piece in pieces for scored in piece.tokens] == tokens
    assert all(scored.record.snapshot == piece.snapshot for piece in pieces for scored in piece.tokens)
    labelled = {(p.snapshot, c) for p in pieces for c in p.reasoning + p.text}
    assert labelled == {(("old" if text.index(c) < 10 else "new"), c) for c in "abcdf"} | {("new", "e")}


async def test_reasoning_has_its_own_field_plain_and_streamed_and_can_stay_in_the_content(
    tmp_path: Path,
) -> None:
    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(QWEN)
        return directory

    said = "<think>\nhm\n</think>\n\nyes"
    engine = FakeEngine()
    engine.reply = (*ids(said), IM_END)

    async with running(tmp_path, engine, write=write) as here:

        async def ask(**fields: Any) -> Any:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "logprobs": True}
            return await here.http.post("/v1/chat/completions", json=body | fields)

        choice = (await ask()).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
        assert [e["token_id"] for e in choice["logprobs"]["content"]] == list(engine.reply)
        for wish in ("separate_reasoning", "include_reasoning"):
            kept = (await ask(**{wish: False})).json()["choices"][0]["message"]
            assert kept == {"role": "assistant", "content": said}
        events = [event for event in sse((await ask(stream=True)).text) if event != "[DONE]"]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"
        assert "think" not in json.dumps(deltas)


# Behind the thinking


@cache
def constraints(tokenizer: str, size: int, end: int) -> Constraints:
    return Constraints(tokenizer, size, [end])


def takes(grammar: str | None, text: str, tokenizer: Any, end: int) -> bool:
    """Whether the grammar allows this text and an end behind it."""
    assert grammar is not None
    follower = constraints(tokenizer.to_str(), tokenizer.get_vocab_size(), end).matcher(grammar, [end])
    for token in [*tokenizer.encode(text).ids, end]:
        mask = follower.mask()
        if mask is None or not np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[token]:
            return False
        if token != end:
            follower.accept(token)
    return True


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
CALLS = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + QWEN.replace(
    "{{ m.content + '<|im_end|>' }}",
    '{{ m.content }}{%- for c in m.tool_calls -%}{{ \'<tool_call>\\n{"name": "\' + c.function.name'
    ' + \'", "arguments": \' }}{%- if c.function.arguments is string -%}{{ c.function.arguments }}'
    "{%- else -%}{{ c.function.arguments | tojson }}{%- endif -%}{{ '}\\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>' }}",
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("tokens", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize(
    ("template", "fields", "answer", "other"),
    [
        (QWEN, JSON, '{"a": 1}', "a"),
        (OPENED, JSON, '{"a": 1}', "a"),
        (OPENED, {"structured_outputs": {"choice": ["red", "blue"]}}, "red", "green"),
        (QWEN, {"structured_outputs": {"regex": "[0-9]{3}"}}, "123", "12"),
        (CALLS, {"tools": [TOOL], "tool_choice": "required"}, CALL, "a"),
    ],
    ids=["schema", "opened", "choice", "regex", "call"],
)
async def test_what_must_match_begins_behind_the_thinking(
    tmp_path: Path, template: str, fields: dict[str, Any], answer: str, other: str, tokens: bool
) -> None:
    tokenizer = build_tokenizer().backend_tokenizer if tokens else byte_tokenizer()
    end = TOKEN_ID["<|im_end|>"] if tokens else IM_END

    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "tokenizer.json").write_text(tokenizer.to_str())
        (directory / "chat_template.jinja").write_text(template)
        return directory

    engine = FakeEngine()
    engine.info = msgspec.structs.replace(
        engine.info, grammars=True, vocab_size=264, eos_token_ids=(end,), max_model_len=1024
    )
    async with running(tmp_path, engine, write=write) as here:

        async def asked(**more: Any) -> str | None:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "max_tokens": 1}
            got = await here.http.post("/v1/chat/completions", json=body | fields | more)
            assert got.status_code == 200, got.text
            return here.engine.requests[-1].grammar

        begun = "" if template == OPENED else "<think>\n"
        grammar = await asked()
        for thought in ("hm", '{"a"', "", "<tool_call>", "x" * 50):
            assert takes(grammar, f"{begun}{thought}\n</think>\n\n{answer}", tokenizer, end), thought
            assert not takes(grammar, f"{begun}{thought}\n</think>\n\n{other}", tokenizer, end)
        assert takes(grammar, answer, tokenizer, end) == (template != OPENED)
        assert not takes(grammar, begun + answer, tokenizer, end)
        assert not takes(grammar, f"{begun}hm</think>{answer}</think>{answer}", tokenizer, end)
        grammar = await asked(constrain_reasoning=True)
        assert takes(grammar, answer, tokenizer, end)
        assert not takes(grammar, f"{begun}hm</think>\n\n{answer}", tokenizer, end)


async def test_an_answer_that_must_match_and_its_thinking_are_told_apart_on_each_wire(tmp_path: Path) -> None:
    said = 'hm\n</think>\n\n{"a": 1}'
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, grammars=True)
    engine.reply = (*ids(said), IM_END)

    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(OPENED)
        return directory

    async with running(tmp_path, engine, write=write) as here:
        question = [{"role": "user", "content": "q"}]
        rendered = TextModel(byte_tokenizer(), OPENED, {}).render(question)
        form = {"format": {"type": "json_schema", "schema": SCHEMA, "name": "x"}}
        schema = json.dumps(SCHEMA)
        tokens = {"max_tokens": 60, "structured_outputs": {"json": SCHEMA}}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"model": MODEL, "messages": question} | JSON,
            "/v1/messages": {"model": MODEL, "max_tokens": 60, "messages": question}
            | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "/v1/responses": {"input": "q", "text": form},
            "/v1/completions": {"model": MODEL, "prompt": rendered, "max_tokens": 60} | JSON,
            "/generate": {"text": rendered, "sampling_params": {"json_schema": schema}},
            "/inference/v1/generate": {"token_ids": list(ids(rendered)), "sampling_params": tokens},
        }
        answers = {}
        for path, body in bodies.items():
            for off in (False, True):
                got = await here.http.post(path, json=body | ({"constrain_reasoning": True} if off else {}))
                assert got.status_code == 200, got.text
                grammar = here.engine.requests[-1].grammar
                assert takes(grammar, said, byte_tokenizer(), IM_END) == (not off), path
                answers[path, off] = got.json()
        chat = answers["/v1/chat/completions", False]["choices"][0]["message"]
        assert (chat["reasoning_content"], json.loads(chat["content"])) == ("hm", {"a": 1})
        chat = answers["/v1/chat/completions", True]["choices"][0]["message"]
        assert chat == {"role": "assistant", "content": said}
        blocks = answers["/v1/messages", False]["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert json.loads(blocks[1]["text"]) == {"a": 1}
        items = answers["/v1/responses", False]["output"]
        assert [item["type"] for item in items] == ["reasoning", "message"]
        assert answers["/generate", False]["text"] == answers["/v1/completions", False]["choices"][0]["text"]


async def test_a_completion_of_plain_text_is_held_to_its_schema_from_its_first_token(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, grammars=True)

    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(QWEN)
        return directory

    async with running(tmp_path, engine, write=write) as here:
        prompts = [
            "once",
            TextModel(byte_tokenizer(), QWEN, {}).render([{"role": "user", "content": "q"}]),
        ]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 1} | JSON
        assert (await here.http.post("/v1/completions", json=body)).status_code == 200
        thinks = [
            takes(request.grammar, '<think>hm</think>{"a":1}', byte_tokenizer(), IM_END)
            for request in here.engine.requests[-2:]
        ]
        assert thinks == [False, True]
