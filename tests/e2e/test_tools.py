"""The OpenAI SDK against a running server: tool calls and JSON answers of a real model, on the real engine."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict
from serving import Server

USER: list[Any] = [{"role": "user", "content": "What to wear?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "give_up"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Advice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    coat: bool
    size: Literal["S", "M", "L"]
    layers: int


@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_fits_its_schema_plain_and_streamed(
    client: openai.OpenAI, server: Server, seed: int
) -> None:
    asked: dict[str, Any] = {
        "model": server.model,
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "seed": seed,
        "max_tokens": 200,
        "logprobs": True,
    }
    extra = {"return_token_ids": True, "raw_output": True, "include_routing_matrix": True}
    choice = client.chat.completions.create(**asked, extra_body=extra).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, list(arguments)) == ("weather", ["city", "days"])
    assert arguments["city"] in {"Oslo", "Rome"}
    assert 1 <= arguments["days"] <= 14

    data: dict[str, Any] = choice.model_dump()
    written = (
        f'<tool_call>\n{{"name": "weather", "arguments": {call.function.arguments}}}\n</tool_call><|im_end|>'
    )
    assert data["raw_output"]["completion"] == written
    entries = data["logprobs"]["content"]
    assert [e["token_id"] for e in entries] == data["token_ids"] == data["raw_output"]["completion_token_ids"]
    assert all(e["routing_matrix"] and e["logprob"] < 0 for e in entries)
    # The only token that is allowed there.
    assert entries[0]["sampling_logprob"] == 0.0

    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content is None
    assert final.message.tool_calls is not None
    streamed = [(c.function.name, c.function.arguments) for c in final.message.tool_calls]
    assert streamed == [("weather", call.function.arguments)]


def test_a_conversation_with_calls_goes_on_from_the_cache(client: openai.OpenAI, server: Server) -> None:
    def turn(messages: list[Any]) -> Any:
        return client.chat.completions.create(
            model=server.model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=1,
            max_tokens=200,
            user="wardrobe",
        )

    first = turn(USER)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls
    ]
    second = turn([*USER, message.model_dump(), *results])
    assert [a.choices[0].finish_reason for a in (first, second)] == ["tool_calls"] * 2
    # The last token's KV was not needed.
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == known // 16 * 16


def test_unforced_answers_of_a_random_model_are_text_and_lose_nothing(
    client: openai.OpenAI, server: Server
) -> None:
    lenient = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    asked: Any = {"model": server.model, "messages": USER, "tools": lenient, "seed": 7, "max_tokens": 40}
    plain = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert plain.message.tool_calls is None
    assert plain.message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.message.content


def test_json_answers_parse_and_fit_their_schema_for_every_choice(
    client: openai.OpenAI, server: Server
) -> None:
    schema = Advice.model_json_schema()
    schema["properties"]["layers"] |= {"minimum": 0, "maximum": 9}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "advice", "schema": schema, "strict": True}}
    asked: Any = {"model": server.model, "messages": USER, "max_tokens": 400, "n": 4, "seed": 5}
    answer = client.chat.completions.create(**asked, response_format=wanted)
    values = [Advice.model_validate_json(choice.message.content or "") for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    assert len({(value.coat, value.size, value.layers) for value in values}) > 1
    again = client.chat.completions.create(**asked, response_format=wanted)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    streamed = ["", "", "", ""]
    for chunk in client.chat.completions.create(**asked, response_format=wanted, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == [c.message.content for c in answer.choices]


def test_the_sdks_parse_helper_works_with_a_model_class(client: openai.OpenAI, server: Server) -> None:
    class Yes(BaseModel):
        model_config = ConfigDict(extra="forbid")
        yes: bool

    answer = client.chat.completions.parse(
        model=server.model, messages=USER, response_format=Yes, max_tokens=200, seed=2
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert parsed.yes in (True, False)
