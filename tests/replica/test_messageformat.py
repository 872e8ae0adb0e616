"""What a chat template leaves out of messages: it is in the prompt otherwise, or the request is refused with its place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_templates import STYLES, TEMPLATES, tools_of
from replica_fakes import MODEL, FakeEngine, byte_tokenizer, running, write_tokenizer

from midstream.core.errors import InvalidRequest
from midstream.core.types import ModelInfo
from midstream.replica.prompting import PromptReader
from midstream.replica.request.checked import check, check_messages
from midstream.replica.request.schema import ChatBody
from midstream.replica.text.chat import TextModel
from midstream.replica.text.text_jobs import TextJobs
from midstream.replica.text.tools import prepare_history

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_CALLS = (
    '{%- for c in m.tool_calls %}{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}"
)
_TOOLS = "{%- if tools %}{{ tools | tojson }}{%- endif %}"
#: Each leaves something out without a word, or refuses it.
LOSSY = {
    # As Qwen3: no branch for developers.
    "no developer": "{%- for m in messages %}{%- if m.role in ('system', 'user', 'assistant', 'tool') %}"
    f"{_TURN}{{%- endif %}}{{%- endfor %}}",
    # As gpt-oss: system and developer messages are shown where they come first, once.
    "first alone": "{%- if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{%- endif %}"
    f"{{%- for m in messages %}}{{%- if m.role in ('user', 'assistant') %}}{_TURN}{{%- endif %}}{{%- endfor %}}",
    # As Qwen3.5: it refuses roles that it does not know, and later system messages.
    "strict": "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('role') }}"
    f"{{%- endif %}}{_TURN}{{%- endfor %}}",
    "users and answers": "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
    f"{_TURN}{{%- endif %}}{{%- endfor %}}",
    # As Llama 3: the text of a message with calls is left out.
    "calls alone": f"{_TOOLS}{{%- for m in messages %}}{{%- if m.tool_calls %}}{_CALLS}{{%- else %}}{_TURN}"
    "{%- endif %}{%- endfor %}",
    "names and thoughts": f"{_TOOLS}{{%- for m in messages %}}{{{{ m.name }}}}{{{{ m.thinking }}}}{{%- if m.tool_calls %}}"
    f"{_CALLS}{{%- endif %}}{_TURN}{{%- endfor %}}",
    "another name for thinking": f"{{%- for m in messages %}}{{{{ m.reasoning }}}}{_TURN}{{%- endfor %}}",
}
INFO = ModelInfo(max_model_len=8192, vocab_size=259)
TEXTS = LOSSY | {name: (TEMPLATES / f"{name}.jinja").read_text() for name in STYLES}


def model_of(template: str) -> TextModel:
    return TextModel(byte_tokenizer(), template, {})


def rendered(text: TextModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """As a request without a session is rendered. Raises InvalidRequest."""
    body = ChatBody(messages=messages, tools=tools)
    (prompt,) = PromptReader(text, INFO, TextJobs()).unread(body, check(body, INFO), 0).read(None)
    assert prompt.text is not None
    return prompt.text


class Writer:
    """Writes conversations; each text in them is a word of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.words = rng, list[str]()

    def word(self) -> str:
        self.words.append(f"w{len(self.words)}w")
        return self.words[-1]

    def message(self, role: str, call: str | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"role": role, "content": self.word()}
        if role == "tool":
            made["tool_call_id"] = call
        elif self.rng.random() < 0.1:
            made["name"] = self.word()
        return made

    def conversation(self) -> list[dict[str, Any]]:
        leading = self.rng.choices(("system", "developer"), k=self.rng.choice((0, 1, 1, 2)))
        made = [self.message(role) for role in leading]
        for number in range(self.rng.randrange(1, 4)):
            made.append(self.message("user"))
            answer = self.message("assistant")
            if self.rng.random() < 0.3:
                name = f"call{number:05}"
                arguments = f'{{"x": "{self.word()}"}}'
                call = {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
                answer["tool_calls"] = [call]
                if self.rng.random() < 0.5:
                    answer["content"], _ = "", self.words.remove(answer["content"])
                made += [answer, self.message("tool", name)]
            else:
                made.append(answer)
            if self.rng.random() < 0.15:
                made.append(self.message(self.rng.choice(("system", "developer"))))
        made.append(self.message("user"))
        return made


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_is_in_the_prompt_or_refused(name: str) -> None:
    text, shown = model_of(TEXTS[name]), 0
    for seed in range(60):
        rng = random.Random(f"{name} {seed}")
        writer = Writer(rng)
        messages = writer.conversation()
        tools = tools_of("qwen2.5") if text.tools.listed and rng.random() < 0.5 else None
        try:
            prompt = rendered(text, messages, tools)
        except InvalidRequest:
            continue
        shown += 1
        assert [word for word in writer.words if word not in prompt] == []
    assert shown


@pytest.mark.parametrize("name", LOSSY)
def test_a_developers_words_are_a_system_messages_where_the_template_has_no_such_role(name: str) -> None:
    text = model_of(LOSSY[name])
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    if name == "users and answers":
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role: .* leaves out system messages"):
            rendered(text, messages, None)
        return
    prompt = rendered(text, messages, None)
    assert prompt.index("be kind") < prompt.index("be brief") < prompt.index("hi")
    alone = rendered(text, messages[1:], None)
    role = "system" if name in ("no developer", "strict") else "developer"
    assert alone == rendered(text, [{"role": role, "content": "be brief"}, messages[2]], None)


@pytest.mark.parametrize(
    ("name", "messages", "place"),
    [
        (
            "first alone",
            [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
            r"messages\[1\]\.role",
        ),
        (
            "users and answers",
            [{"role": "user", "content": "a"}, {"role": "tool", "content": "found", "tool_call_id": "c"}],
            r"messages\[1\]\.role",
        ),
        ("no developer", [{"role": "user", "name": "Ann", "content": "a"}], r"messages\[0\]\.name"),
        (
            "no developer",
            [{"role": "assistant", "content": "a", "reasoning": "hm"}],
            r"messages\[0\]\.reasoning_content",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_with_its_place(
    name: str, messages: list[dict[str, Any]], place: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{place}: this model's chat template leaves out"):
        rendered(model_of(LOSSY[name]), messages, None)


@pytest.mark.parametrize("name", ["first alone", "strict"])
def test_a_later_system_message_is_refused_in_the_words_upon_which_claude_code_leaves_it_out(
    name: str,
) -> None:
    """It sends them since 2.1.154, and again without them upon a 400 in the words of Anthropic's API (colibri#725)."""
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]
    with pytest.raises(InvalidRequest, match="role 'system' is not supported on this model"):
        rendered(model_of(LOSSY[name]), messages, None)


def test_what_a_template_refuses_without_later_system_messages_too_is_not_laid_to_them() -> None:
    messages = [{"role": role, "content": "a"} for role in ("user", "system", "critic")]
    with pytest.raises(InvalidRequest, match=r"^messages: the chat template refused them: "):
        model_of(LOSSY["strict"]).render(messages)


def test_text_beside_calls_is_refused_where_the_template_shows_calls_alone() -> None:
    text = model_of(LOSSY["calls alone"])
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\]\.content: this model's chat template leaves out"
    ):
        rendered(text, messages, tools_of("qwen2.5"))
    # The tokens of a turn have it.
    text.message_format(tools=True).check(prepare_history(messages, "object"), 2)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["names and thoughts", "another name for thinking"])
def test_thinking_is_shown_under_whatever_name_a_template_reads(name: str, field: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: "hm hm"}]
    assert "hm hm" in rendered(model_of(LOSSY[name]), messages, None)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"reasoning_content": ["hm"]}, "reasoning_content: must be a string"),
        ({"name": 3}, "name: must be a string"),
        ({"reasoning_content": "a", "reasoning": "b"}, "reasoning: must equal reasoning_content"),
        ({"refusal": "I cannot"}, "refusal: not supported; send its text as content"),
    ],
)
def test_other_texts_of_a_message_are_read_or_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.{said}"):
        check_messages([{"role": "assistant", "content": "", **message}])


async def test_a_developers_words_are_in_the_prompt_on_every_path(tmp_path: Path) -> None:
    engine = FakeEngine()

    def write(directory: Path) -> Path:
        write_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(LOSSY["no developer"])
        return directory

    async with running(tmp_path, engine, write=write) as here:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": 1}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": chat,
            "/v1/responses": {"model": MODEL, "input": messages, "max_output_tokens": 16, "store": False},
            "/tokenize": {"model": MODEL, "messages": messages},
            "/v1/chat/completions/render": chat,
        }
        told = []
        for path, body in bodies.items():
            answer = await here.http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            told.append(answer.json())
        prompts = [engine.requests[0].prompt, engine.requests[1].prompt]
        prompts += [tuple(told[2]["tokens"]), tuple(told[3]["token_ids"])]
        assert len({*prompts}) == 1
        assert b"system\nbe brief" in bytes(token for token in prompts[0] if token < 256)
