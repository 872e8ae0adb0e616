"""Reasoning: the tags that a template shows, and where each character and record of an answer goes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

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
from midstream.replica.response.choice import Choice
from midstream.replica.response.stages import ReasoningStage
from midstream.replica.text.chat import TextModel
from midstream.replica.text.reasoning import ReasoningFormat, ReasoningParser
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


def test_reasoning_has_its_own_field_plain_and_streamed_and_can_stay_in_the_content(tmp_path: Path) -> None:
    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(QWEN)
        return directory

    said = "<think>\nhm\n</think>\n\nyes"
    engine = FakeEngine()
    engine.reply = (*ids(said), IM_END)

    async def main() -> None:
        async with running(tmp_path, engine, write=write) as here:

            async def ask(**fields: Any) -> Any:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "logprobs": True}
                return await here.http.post("/v1/chat/completions", json=body | fields)

            choice = (await ask()).json()["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
            assert [e["token_id"] for e in choice["logprobs"]["content"]] == list(engine.reply)
            kept = (await ask(separate_reasoning=False)).json()["choices"][0]["message"]
            assert kept == {"role": "assistant", "content": said}
            events = [event for event in sse((await ask(stream=True)).text) if event != "[DONE]"]
            deltas = [event["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
            assert "".join(delta.get("content", "") for delta in deltas) == "yes"
            assert "think" not in json.dumps(deltas)

    asyncio.run(main())
