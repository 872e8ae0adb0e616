"""The OpenAI SDK in a session, over many turns with tools: each prompt begins with the tokens of the turn before it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from serving import Server

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "maxLength": 8}},
                "required": ["where"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
TURNS = 6
EXTRA = {"return_token_ids": True}


def rollout(
    client: openai.OpenAI,
    server: Server,
    seed: int,
    headers: dict[str, str],
    extra: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What each turn was answered. Every second one is a call; its arguments are sent back in other white space."""
    messages: list[Any] = [{"role": "user", "content": "Begin."}]
    answers = []
    for number in range(TURNS):
        completion = client.chat.completions.create(
            model=server.model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if number % 2 else "auto",
            seed=seed + number,
            max_tokens=80 if number % 2 else 12,
            extra_headers=headers,
            extra_body={**EXTRA, **(extra or {})},
        )
        answers.append(completion.model_dump())
        message = completion.choices[0].message
        said: dict[str, Any] = {"role": "assistant", "content": message.content}
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        if calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(json.loads(call.function.arguments), indent=2),
                    },
                }
                for call in calls
            ]
        messages.append(said)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "a wall"} for call in calls]
        messages.append({"role": "user", "content": f"And {number}?"})
    return answers


def held(answers: list[dict[str, Any]]) -> list[bool]:
    """Of each turn but the first: whether its prompt begins with all tokens of the turn before."""
    kept = []
    for before, after in itertools.pairwise(answers):
        tokens = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
        kept.append(after["prompt_token_ids"][: len(tokens)] == tokens)
    return kept


def test_without_a_session_or_by_the_template_some_turn_loses_them(
    client: openai.OpenAI, server: Server
) -> None:
    plain = rollout(client, server, 100, {})
    assert not all(held(plain))
    headers = {"x-session-id": "by the template", "x-midstream-history": "template"}
    rendered = rollout(client, server, 100, headers)
    lost = [not kept for kept in held(rendered)]
    assert any(lost)
    said = [
        "midstream" in answer and answer["midstream"]["branch"]["why"] == "template"
        for answer in rendered[1:]
    ]
    assert said == lost


def test_a_base_url_is_enough_for_a_session(client: openai.OpenAI, server: Server) -> None:
    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    in_path = client.with_options(base_url=f"{base}/sessions/in%20the%20path/v1")
    answers = rollout(in_path, server, 300, {})
    assert held(answers) == [True] * (TURNS - 1)
    # Its trace has all that a client who can say more would have asked for.
    headers = {"x-session-id": "by header", "x-midstream-records": "routes"}
    extra = {"logprobs": True, "include_routing_matrix": True, "perf_metrics_in_response": True}
    told = rollout(client, server, 300, headers, extra)
    for session in ("in%20the%20path", "by%20header"):
        found = client.get(f"{base}/sessions/{session}/trace", cast_to=httpx.Response).json()
        (one,) = found["traces"]
        turns, tokens = one["turns"], list[int]()
        assert [turn["parent"] for turn in turns] == [*range(TURNS)]
        for turn, answer in zip(turns, told, strict=True):
            choice = answer["choices"][0]
            tokens += turn["added"]
            assert tokens == answer["prompt_token_ids"]
            tokens += turn["token_ids"]
            assert turn["token_ids"] == choice["token_ids"]
            entries = choice["logprobs"]["content"]
            assert turn["logprobs"] == pytest.approx([entry["logprob"] for entry in entries], abs=1e-4)
            assert turn["sampling_logprobs"] == pytest.approx(
                [entry["sampling_logprob"] for entry in entries], abs=1e-4
            )
            assert turn["routing_matrix"] == [entry["routing_matrix"] for entry in entries]
            assert turn["finish_reason"] == choice["finish_reason"]
            assert turn["kv_snapshots"] == choice["kv_snapshots"]
            assert turn["snapshots"] == choice["snapshots"]
