"""Anthropic's Messages API on a replica: what it reads, what it answers, and how its streams go on elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, running, write_tokenizer
from test_replica_tool_api import CALLS, EOS, tokens, write_tool_model

from midstream.core.errors import InvalidRequest
from midstream.core.resumption import HEADER_RESUMABLE, PATH_RESUME
from midstream.replica.request.schema import ChatBody
from midstream.replica.wire.messages import read, rename

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: list[Any] = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Asks.",
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "stop", "input_schema": {"type": "object"}},
]
RECORDS = {"logprobs": True, "return_token_ids": True}


def an_engine(text: str = "hello ", *, tools: bool = False) -> FakeEngine:
    engine = FakeEngine(text)
    engine.tells_kv = True
    if tools:
        engine.info = msgspec.structs.replace(engine.info, vocab_size=264, max_model_len=4096, grammars=True)
        engine.reply = (*tokens(text), EOS)
    return engine


@asynccontextmanager
async def play(
    directory: Path, make: Callable[[], FakeEngine] = an_engine, *, tools: bool = False,
    replicas: int = 1,
) -> AsyncIterator[Any]:  # fmt: skip
    async with AsyncExitStack() as stack:
        made = []
        for number in range(replicas):
            (directory / str(number)).mkdir()
            write = write_tool_model if tools else write_tokenizer
            made.append(
                await stack.enter_async_context(running(directory / str(number), make(), write=write))
            )
        yield made[0] if replicas == 1 else made


async def ask(here: Running, path: str = PATH, *, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": USER, **fields}
    return await here.http.post(path, json=body, headers=headers or {})


def events(text: str) -> list[Any]:
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def told(found: list[Any], name: str) -> list[Any]:
    return [event["midstream"][name] for event in found if name in event.get("midstream", {})]


def chat(**fields: Any) -> ChatBody:
    given = {"model": "m", "max_tokens": 5, "messages": USER, **fields}
    body = read(json.dumps(given).encode()).body
    assert isinstance(body, ChatBody)
    return body


# Reading


def test_blocks_become_the_messages_of_a_chat() -> None:
    body = chat(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "kind.", "cache_control": {}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "So"},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ås"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )  # fmt: skip
    function = {"name": "weather", "arguments": '{"city": "Ås"}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert body.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "xy"},
        {"role": "assistant", "content": "So", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "1"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no", "is_error": True},
        {"role": "user", "content": "and?"},
    ]


def test_fields_become_those_of_a_chat() -> None:
    body = chat(
        tools=TOOLS, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, metadata={"user_id": "u"},
        service_tier="auto", thinking={"type": "adaptive"}, betas=["b"], midstream={"snapshot": "v1"}, seed=3,
        prompt_cache_key="k", tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    assert body.tools == [
        {"type": "function", "function": {"name": "weather", "description": "Asks.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
    ]
    assert (body.stop, body.temperature, body.top_p, body.top_k, body.user) == (["x"], 0.5, 0.9, 4, "u")
    assert (body.tool_choice, body.parallel_tool_calls, body.seed) == ("required", False, 3)
    assert (body.midstream, body.prompt_cache_key, body.thinking) == ({"snapshot": "v1"}, "k", None)
    assert body.response_format is not None
    assert body.response_format["json_schema"]["schema"] == SCHEMA
    choices = [chat(tools=TOOLS, tool_choice=choice).tool_choice
               for choice in ({"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "stop"})]  # fmt: skip
    assert choices == ["auto", "none", {"type": "function", "function": {"name": "stop"}}]


def block(kind: str, role: str = "user", **more: Any) -> list[Any]:
    return [{"role": role, "content": [{"type": kind, **more}]}, *USER]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"nonsense": 1}, "nonsense", "Extra inputs are not permitted, field: 'nonsense'"),
        ({"n": 2}, "n", "Extra inputs"),
        ({"max_tokens": None}, "max_tokens", "max_tokens: expected int"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"temperature": 1.5}, "temperature", "<= 1.0"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "messages[0].role: must be user"),
        ({"messages": [*USER, {"role": "system", "content": [{"type": "image"}]}]}, "messages",
         "messages[1].content[0]: blocks of type 'image'"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "Extra inputs"),
        ({"messages": [*USER, {"role": "assistant", "content": "{"}]}, "messages", "(prefill)"),
        ({"messages": block("image", source={})}, "messages", "messages[0].content[0]: blocks of type 'image'"),
        ({"messages": block("document", source={})}, "messages", "'document'"),
        ({"messages": block("tool_use", id="a")}, "messages", "'tool_use'"),
        ({"messages": block("tool_use", "assistant", id="a")}, "messages",
         "messages[0].content[0].name: this field is required"),
        ({"messages": block("tool_result", tool_use_id="a", content=[{"type": "image"}])}, "messages",
         "messages[0].content[0].content[0]: blocks of type 'image'"),
        ({"system": [{"type": "image"}]}, "system", "system[0]: blocks of type 'image'"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences: strings must not be empty"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences", "at most 64"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "'bash_20250124' is one of"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "'web_search_20250305'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "tools[0].input_schema: this field is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "tools[0].name: expected"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "the name 'weather' is given twice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "not among the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice", "tool_choice.type: this field is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice", "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [{"name": "a", "input_schema": {"type": "colour"}, "strict": True}]}, "tools[0].input_schema",
         "tools[0].input_schema: "),
        ({"thinking": {"type": "enabled"}}, "thinking", "thinking.budget_tokens: "),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking", "thinking.budget_tokens: "),
        ({"thinking": {"type": "always"}}, "thinking", "thinking: "),
        ({"output_config": {"effort": "high"}}, "output_config", "output_config.effort: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}, "output_config",
         "output_config.format: "),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management", "not supported"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management", "not "),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers", "not supported"),
        ({"metadata": {"user_id": "a\nb"}}, "metadata.user_id", "metadata.user_id must not contain control"),
        ({"top_logprobs": 1}, "top_logprobs", "requires logprobs"),
        ({"include_routing_matrix": True}, "include_routing_matrix", "requires logprobs"),
        ({"midstream": {"x": 1}}, "midstream.x", "Extra inputs"),
    ],
)  # fmt: skip
async def test_mistakes_are_refused_by_the_names_of_this_api(
    tmp_path: Path, fields: dict[str, Any], param: str, said: str
) -> None:
    async with play(tmp_path, lambda: an_engine("a", tools=True), tools=True) as here:
        answer = await ask(here, **{"max_tokens": 2, **fields})
        body = answer.json()
        assert (answer.status_code, body["type"]) == (400, "error"), body
        assert body["error"]["type"] == "invalid_request_error"
        assert (body["error"]["param"], said in body["error"]["message"]) == (param, True), body
        assert here.engine.requests == []


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_to_keep_all_thinking_is_no_edit_of_the_context(keep: Any) -> None:
    """Claude Code asks for it with each request (claude-code#21612, 9router#1468)."""
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    assert chat(messages=USER, context_management=kept).messages == USER


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        lambda cch: BILLING.format(cch) + "\nBe kind.\nx-anthropic-billing-header: kept",
        lambda cch: [{"type": "text", "text": text} for text in (BILLING.format(cch), "Be kind.")],
        lambda cch: [{"type": "text", "text": BILLING.format(cch)}],
    ],
    ids=["text", "blocks", "alone"],
)
def test_what_claude_code_writes_of_each_request_is_no_part_of_the_prompt(
    system: Callable[[str], Any],
) -> None:
    """Its hash differs in each request, so no turn continued another (claude-code#68900, sglang#21064, vllm-mlx#277)."""
    first, second = (chat(system=system(cch), messages=USER).messages for cch in ("36ee5", "0aaa9"))
    assert first == second
    assert "cch=" not in str(first)
    assert [one["role"] for one in first] == (["user"] if len(first) == 1 else ["system", "user"])
    assert len(first) == 1 or first[0]["content"].startswith("Be kind.")


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (BILLING.format("36ee5") + "You are kind.\nBe brief.", "You are kind.\nBe brief."),
        (BILLING.format("36ee5") + " You are kind.", " You are kind."),
        ("x-anthropic-billing-header: say what this line is for", None),
        ("x-anthropic-billing-header: a=b; and more", " and more"),
        (" " + BILLING.format("36ee5"), None),
    ],
)
def test_what_somebody_wrote_beside_claude_codes_line_is_kept(system: str, kept: str | None) -> None:
    """Proxies put the blocks of a system prompt together without a new line."""
    messages = chat(system=system, messages=USER).messages
    assert messages[0] == {"role": "system", "content": system if kept is None else kept}


def test_system_messages_may_stand_behind_others() -> None:
    """As Claude Code sends them since 2.1.154 (ollama#16372)."""
    body = chat(
        system="Be kind.",
        messages=[
            *USER,
            {
                "role": "system",
                "content": [{"type": "text", "text": "Agents: "}, {"type": "text", "text": "a"}],
            },
            {"role": "assistant", "content": "So"},
            {"role": "user", "content": "and?"},
            {"role": "system", "content": "Be brief."},
        ],
    )
    assert [(one["role"], one["content"]) for one in body.messages] == [
        ("system", "Be kind."),
        *((one["role"], one["content"]) for one in USER),
        ("system", "Agents: a"),
        ("assistant", "So"),
        ("user", "and?"),
        ("system", "Be brief."),
    ]


@pytest.mark.parametrize(("at", "place", "param"), [(0, "system", "system"), (2, "messages[1]", "messages")])
def test_a_message_is_named_by_its_place_in_the_request(at: int, place: str, param: str) -> None:
    results = [{"type": "tool_result", "tool_use_id": i} for i in ("a", "b")]
    given = {
        "model": "m",
        "max_tokens": 1,
        "system": "s",
        "messages": [*USER, {"role": "user", "content": results}],
    }
    error = InvalidRequest(f"messages[{at}].content: too long", param="messages")
    rename(error, read(json.dumps(given).encode()).details)
    assert (error.message, str(error), error.param) == (*[f"{place}.content: too long"] * 2, param)


async def test_max_tokens_is_required_but_for_counting(tmp_path: Path) -> None:
    async with play(tmp_path, lambda: an_engine("a", tools=True), tools=True) as here:
        answer = await ask(here)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
        fields: dict[str, Any] = {"system": "Be kind.", "tools": TOOLS, "tool_choice": {"type": "any"}}
        counted = await ask(here, COUNT, **fields)
        usage = (await ask(here, max_tokens=1, **fields)).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        assert counted.json()["input_tokens"] == len(here.engine.requests[0].prompt)
        again = await ask(here, "/inference" + COUNT, max_tokens=5, **fields)
        assert again.json() == counted.json()
        wrong = await ask(here, COUNT, messages=block("image"))
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
        assert len(here.engine.requests) == 1


# Answers


async def test_a_plain_message_with_all_its_records(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        more = {
            "include_routing_matrix": True,
            "return_router_weights": True,
            "return_sampling_mask": True,
            "top_logprobs": 2,
            "perf_metrics_in_response": True,
        }
        answer = await ask(here, max_tokens=4, **RECORDS, **more, headers={"x-request-id": "r"})
        message = answer.json()
        assert answer.headers["request-id"] == "r"
        assert re.fullmatch("msg_[0-9a-f]{32}", message["id"])
        assert (message["type"], message["role"]) == ("message", "assistant")
        assert message["model"] == f"{MODEL}@base"
        assert message["content"] == [{"type": "text", "text": "hello"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
        prompt = here.engine.requests[0].prompt
        assert message["usage"] == {
            "input_tokens": len(prompt) - 3, "output_tokens": 4,
            "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0,
        }  # fmt: skip
        ours = message["midstream"]
        made = list(ids("hello"))
        assert (ours["snapshot"], ours["token_ids"]) == ("base", made)
        assert ours["prompt_token_ids"] == list(prompt)
        assert ours["snapshots"] == [{"snapshot": "base", "start": 0, "end": 4}]
        entries = ours["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == made
        assert [entry["logprob"] for entry in entries] == [-float(len(prompt) + i) for i in range(4)]
        assert all(
            e["routing_matrix"]
            and e["router_weights"]
            and e["sampling_mask"]
            and e["sampling_logprob"]
            and len(e["top_logprobs"]) == 2
            for e in entries
        )
        assert ours["kv_snapshots"] == [{"snapshot": "base", "start": 0, "end": len(prompt) + 3}]
        assert ours["perf_metrics"]["prompt-tokens"] == len(prompt)
        plain = (await ask(here, max_tokens=4)).json()["midstream"]
        assert set(plain) == {"snapshot", "snapshots"}


async def test_why_a_message_ended(tmp_path: Path) -> None:
    async with play(tmp_path) as here:

        async def ended(**fields: Any) -> tuple[str, str | None, str]:
            whole = (await ask(here, **fields)).json()
            *_, last, stop = events((await ask(here, stream=True, **fields)).text)
            assert stop == {"type": "message_stop"}
            assert last["delta"] == {
                "stop_reason": whole["stop_reason"],
                "stop_sequence": whole["stop_sequence"],
            }
            return whole["stop_reason"], whole["stop_sequence"], "".join(b["text"] for b in whole["content"])

        assert await ended(max_tokens=3) == ("max_tokens", None, "hell")
        stops = ["zzz", "lo h"]
        assert await ended(max_tokens=30, stop_sequences=stops) == ("stop_sequence", "lo h", "hel")
        here.engine.reply = (*ids("hey"), 258)
        assert await ended(max_tokens=30) == ("end_turn", None, "hey")
        assert await ended(max_tokens=30, stop_sequences=["zzz"]) == ("end_turn", None, "hey")
        here.engine.reply = (*ids("hey"), 257)
        named = await ended(max_tokens=30, stop_sequences=["<|im_start|>"])
        assert named == ("stop_sequence", "<|im_start|>", "hey")
        assert (await ended(max_tokens=4000))[0] == "model_context_window_exceeded"


async def test_a_stream_is_the_events_of_anthropics_api(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        found = events((await ask(here, max_tokens=3, stream=True)).text)
        start, begin, *deltas, end, last, stop = found
        message = start["message"]
        assert (message["type"], message["content"], message["stop_reason"]) == ("message", [], None)
        size = len(here.engine.requests[0].prompt)
        known = {"input_tokens": size - 3, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0}
        assert message["usage"] == known | {"output_tokens": 0}
        empty = {"type": "text", "text": ""}
        assert begin == {"type": "content_block_start", "index": 0, "content_block": empty}
        assert [d["delta"] for d in deltas] == [{"type": "text_delta", "text": t} for t in ("he", "l", "l")]
        assert {d["index"] for d in deltas} == {0}
        assert [d["midstream"] for d in deltas] == [{"snapshot": "base"}] * 3
        assert end == {"type": "content_block_stop", "index": 0}
        assert last["usage"] == known | {"output_tokens": 3}
        assert (last["type"], last["delta"]["stop_reason"]) == ("message_delta", "max_tokens")
        assert stop == {"type": "message_stop"}


async def test_no_record_of_a_stream_is_lost_where_a_token_shows_nothing(tmp_path: Path) -> None:
    async with play(tmp_path, lambda: an_engine(CALLS, tools=True), tools=True) as here:
        fields: dict[str, Any] = {"max_tokens": 400, "tools": TOOLS, **RECORDS}
        found = events((await ask(here, stream=True, **fields)).text)
        whole = (await ask(here, **fields)).json()
        assert (
            list(chain.from_iterable(told(found, "token_ids")))
            == list(here.engine.reply)
            == whole["midstream"]["token_ids"]
        )
        entries = [entry for part in told(found, "logprobs") for entry in part["content"]]
        assert entries == whole["midstream"]["logprobs"]["content"]
        assert told(found, "prompt_token_ids") == [whole["midstream"]["prompt_token_ids"]]
        # A token before the first block, with an event of its own.
        assert [event["type"] for event in found[:2]] == ["message_start", "midstream_tokens"]


@pytest.mark.parametrize("text", [f"I look.\n{CALLS}", CALLS, f"{CALLS}\nso", "no call"])
async def test_blocks_of_text_and_of_calls_are_the_same_plain_and_streamed(tmp_path: Path, text: str) -> None:
    async with play(tmp_path, lambda: an_engine(text, tools=True), tools=True) as here:
        fields: dict[str, Any] = {"max_tokens": 400, "tools": TOOLS}
        whole = (await ask(here, **fields)).json()
        found = events((await ask(here, stream=True, **fields)).text)
        blocks: list[Any] = []
        for event in found:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "said": ""})
            elif event["type"] == "content_block_delta":
                assert event["index"] == len(blocks) - 1
                blocks[-1]["said"] += event["delta"].get("text", event["delta"].get("partial_json"))
        assert [e["type"] for e in found].count("content_block_stop") == len(blocks)
        made = [
            {"type": "text", "text": b["said"]} if b["type"] == "text"
            else {"type": "tool_use", "name": b["name"], "input": json.loads(b["said"])} for b in blocks
        ]  # fmt: skip
        identified = [b.pop("id") for b in whole["content"] if b["type"] == "tool_use"]
        assert made == whole["content"]
        assert all(re.fullmatch("toolu_[0-9a-f]{24}", found) for found in identified)
        assert len(set(identified)) == len(identified)
        called = text != "no call"
        assert whole["stop_reason"] == ("tool_use" if called else "end_turn")
        assert len(identified) == (2 if called else 0)


# Streams that go on elsewhere

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("hello ", {"max_tokens": 6, **RECORDS, "perf_metrics_in_response": True}),
    "bare": ("hello ", {"max_tokens": 6}),
    "stop": ("hello ", {"max_tokens": 40, "stop_sequences": ["o hello h"], **RECORDS}),
    "calls": (f"I look.\n{CALLS}", {"max_tokens": 400, "tools": TOOLS, **RECORDS}),
    "calls only": (CALLS, {"max_tokens": 400, "tools": TOOLS}),
}


@pytest.mark.parametrize("name", RESUMED)
async def test_after_any_write_the_rest_is_event_for_event_what_it_would_have_been(
    tmp_path: Path, name: str
) -> None:
    text, fields = RESUMED[name]
    body = {"model": MODEL, "messages": USER, "stream": True, **fields}

    async def scenario(here: Running, there: Running) -> None:
        answer = await here.http.post(PATH + "?beta=true", json=body, headers={HEADER_RESUMABLE: "1"})
        assert answer.headers[HEADER_RESUMABLE] == "1"
        writes = writes_of(answer.text)
        whole = without_times(events(answer.text))
        step = 5 if "tools" in fields else 1
        for cut in range(1, len(writes), step):
            state = "\n".join(re.findall(r"(?m)^: m (.*)$", "".join(writes[:cut])))
            sent = {"path": PATH + "?beta=true", "lost": "r", "exact": True, "state": state, "body": body}
            rest = await there.http.post(PATH_RESUME, json=sent)
            assert rest.status_code == 200, rest.text
            found = events("".join(writes[:cut]) + rest.text)
            seams = [
                event["midstream"].pop("resumed")
                for event in found
                if "resumed" in event.get("midstream", {})
            ]
            assert len(seams) == (1 if any("midstream" in e for e in events(rest.text)) else 0)
            assert all(seam["from"] == "r" for seam in seams)
            assert without_times(found) == whole

    tools = "tools" in fields
    async with play(tmp_path, lambda: an_engine(text, tools=tools), tools=tools, replicas=2) as (here, there):
        await scenario(here, there)


def writes_of(text: str) -> list[str]:
    """Each begins with the lines of the resume log."""
    return [": m " + part for part in re.split(r"(?:^|(?<=\n\n)): m ", text)[1:]]


def without_times(found: list[Any]) -> list[Any]:
    for event in found:
        metrics = event.get("midstream", {}).get("perf_metrics")
        if metrics:
            event["midstream"]["perf_metrics"] = metrics["prompt-tokens"]
    return found


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_stream_that_fails_ends_with_an_error_event_of_this_api(
    tmp_path: Path, resumed: bool
) -> None:
    body = {"model": MODEL, "messages": USER, "stream": True, "max_tokens": 9}

    async with play(tmp_path, replicas=2) as (here, there):
        whole = await here.http.post(PATH, json=body, headers={HEADER_RESUMABLE: "1"})
        there.engine.fail_after = 5
        if resumed:
            state = "\n".join(re.findall(r"(?m)^: m (.*)$", "".join(writes_of(whole.text)[:3])))
            sent = {"path": PATH, "lost": "r", "exact": True, "state": state, "body": body}
            answer = await there.http.post(PATH_RESUME, json=sent)
        else:
            answer = await there.http.post(PATH, json=body)
        last = events(answer.text)[-1]
        assert last["type"] == "error"
        assert (last["error"]["type"], last["error"]["status_code"]) == ("api_error", 500)
        assert "out of pages" in last["error"]["message"]


async def test_the_session_is_named_by_the_metadata(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        await ask(here, max_tokens=1, metadata={"user_id": "u"})
        await ask(here, max_tokens=1, metadata={"user_id": "u"}, prompt_cache_key="k")
        for key in ("u", "k"):
            stats = here.replica.sessions.one(("", key))
            assert stats is not None
            assert stats.turns == 1


def test_errors_have_anthropics_names() -> None:
    from midstream.core import errors

    cases = {
        errors.Unauthorized: "authentication_error", errors.Forbidden: "permission_error",
        errors.NotFound: "not_found_error", errors.Conflict: "invalid_request_error",
        errors.SnapshotTransition: "overloaded_error", errors.Overloaded: "rate_limit_error",
        errors.EngineFailed: "api_error", errors.ReplicaUnavailable: "overloaded_error",
        errors.PayloadTooLarge: "request_too_large", errors.RequestTimeout: "timeout_error",
    }  # fmt: skip
    for kind, name in cases.items():
        error = kind("what")
        error.shape = "anthropic"
        assert error.body() == {
            "type": "error",
            "error": {"type": name, "message": "what", "code": kind.code, "param": None},
        }
    swap = errors.SnapshotTransition("later")
    assert "x-should-retry" not in swap.headers()
    swap.shape = "anthropic"
    assert swap.headers() == {"retry-after": "1", "x-should-retry": "true"}


def test_deep_or_broken_json_is_a_400() -> None:
    for body in (b"[" * 100_000, b"{", b'{"model":"m"', b"\xff"):
        with pytest.raises(InvalidRequest):
            read(body)
