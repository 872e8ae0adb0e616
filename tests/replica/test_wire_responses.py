"""OpenAI's Responses API on a replica: what it reads, the order of its events, stored responses, streams that go on."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from replica_fakes import MODEL, Running, ids
from test_replica_tool_api import CALLS
from test_wire_messages import an_engine, events, play, told, without_times, writes_of

from midstream.core.errors import InvalidRequest
from midstream.core.responses import holder_of, new_id
from midstream.core.resumption import HEADER_RESUMABLE, PATH_RESUME
from midstream.replica.request.schema import ChatBody
from midstream.replica.request.unknown import header_value
from midstream.replica.stored import Shelf, Stored, StoredResponses
from midstream.replica.wire.responses import read, rename

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Asks.", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "stop", "parameters": None},
]
RECORDS = {"logprobs": True, "return_token_ids": True}
INCLUDE = ["message.output_text.logprobs"]
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
TEXT_ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def ask(here: Running, *, headers: Any = None, **fields: Any) -> httpx.Response:
    return await here.http.post(PATH, json={"model": MODEL, "input": "a", **fields}, headers=headers or {})


async def stored(here: Running, id: str, what: str = "response", tenant: str = "") -> Any:
    asked = {"tenant": tenant, "id": id, "what": what}
    return (await here.http.post("/replica/responses", json=asked)).json()["found"]


def shelf(store: StoredResponses | None = None, *, resumed: bool = False) -> Shelf:
    return Shelf(store or StoredResponses("replica-0"), "t", resumed)


def chat(given: Any = "a", **fields: Any) -> ChatBody:
    body = read(json.dumps({"model": "m", "input": given, **fields}).encode(), shelf()).body
    assert isinstance(body, ChatBody)
    return body


# Reading


def test_items_become_the_messages_of_a_chat() -> None:
    body = chat(
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "xy"]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "So", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":1}'},
            {"type": "function_call", "call_id": "c2", "name": "stop", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "assistant", "content": "p"},
            {"role": "assistant", "content": "q"},
            {"role": "user", "content": "and?"},
        ],
        instructions="Be kind.",
    )  # fmt: skip
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]
    assert body.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "xy"},
        {"role": "assistant", "content": "So", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "p"},
        {"role": "assistant", "content": "q"},
        {"role": "user", "content": "and?"},
    ]


def test_fields_become_those_of_a_chat() -> None:
    body = chat(
        max_output_tokens=9, temperature=0.5, top_p=0.9, tools=TOOLS, tool_choice={"type": "function", "name": "stop"},
        parallel_tool_calls=False, include=INCLUDE, top_logprobs=2, user="u", seed=3, prompt_cache_key="k",
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "medium"},
        reasoning={"effort": "none", "summary": "auto"}, metadata={"a": "b"}, midstream={"snapshot": "v1"},
        stream_options={"include_obfuscation": False}, truncation="disabled", background=False, session_id="s",
    )  # fmt: skip
    assert (body.max_tokens, body.temperature, body.top_p, body.parallel_tool_calls) == (9, 0.5, 0.9, False)
    assert (body.logprobs, body.top_logprobs, body.user, body.seed) == (True, 2, "u", 3)
    assert (body.prompt_cache_key, body.session_id, body.midstream) == ("k", "s", {"snapshot": "v1"})
    assert body.tool_choice == {"type": "function", "function": {"name": "stop"}}
    assert body.tools is not None
    assert [tool["function"]["name"] for tool in body.tools] == ["weather", "stop"]
    assert body.response_format is not None
    assert body.response_format["json_schema"]["schema"] == SCHEMA
    assert chat(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert (chat().logprobs, chat(text={"format": {"type": "text"}}).response_format) == (None, None)


def part(kind: str, **more: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": kind, **more}]}]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"nonsense": 1}, "nonsense", "Extra inputs are not permitted, field: 'nonsense'"),
        ({"messages": []}, "messages", "Extra inputs"),
        ({"input": None}, "input", "input: expected"),
        ({"input": []}, "input", "at least one item"),
        ({"input": part("input_image", image_url="u")}, "input", "input[0].content[0]: blocks of type 'input_image'"),
        ({"input": part("input_file", file_id="f")}, "input", "'input_file'"),
        ({"input": part("input_audio")}, "input", "'input_audio'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: items of type 'item_reference'"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "'web_search_call'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role: must be one of user"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content: must be a string"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "input[0].call_id: this field is required"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", "input[0].output: this field is required"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": 3}, "temperature", "<= 2.0"),
        ({"top_logprobs": 21, "include": INCLUDE}, "top_logprobs", "<= 20"),
        ({"include": ["file_search_call.results"]}, "include", "'file_search_call.results' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' are not supported"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "'mcp'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tools[0].name: expected"),
        ({"tools": [{"type": "function", "name": "a", "x": 1}]}, "tools[0].x", "Extra inputs"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "the name 'weather' is given twice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "colour"}, "strict": True}]},
         "tools[0].parameters", "tools[0].parameters: "),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}, "text", "text.format: "),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format: "),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity: "),
        ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning.effort: "),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"include_routing_matrix": True}, "include_routing_matrix", "requires logprobs"),
        ({"midstream": {"x": 1}}, "midstream.x", "Extra inputs"),
        ({"input": "x" * 9000}, "input", "input"),
    ],
)  # fmt: skip
async def test_mistakes_are_refused_by_the_names_of_this_api(
    tmp_path: Path, fields: dict[str, Any], param: str, said: str
) -> None:
    async with play(tmp_path, lambda: an_engine("a", tools=True), tools=True) as here:
        answer = await ask(here, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert (error["param"], said in error["message"]) == (param, True), error
        assert here.engine.requests == []


@pytest.mark.parametrize(
    ("at", "place", "param"), [(0, "instructions", "instructions"), (1, "input[0]", "input")]
)
def test_a_message_is_named_by_its_place_in_the_request(at: int, place: str, param: str) -> None:
    body = json.dumps({"input": [{"role": "user", "content": "a"}], "instructions": "i"}).encode()
    error = InvalidRequest(f"messages[{at}].content: too long", param="messages")
    rename(error, read(body, shelf()).details)
    assert (error.message, str(error), error.param) == (*[f"{place}.content: too long"] * 2, param)


# Answers


async def test_a_plain_response_with_all_its_records(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        more = {
            "include_routing_matrix": True,
            "return_router_weights": True,
            "return_sampling_mask": True,
            "top_logprobs": 2,
            "perf_metrics_in_response": True,
        }
        answer = await ask(here, max_output_tokens=4, metadata={"a": "b"}, include=INCLUDE, **RECORDS, **more)
        response = answer.json()
        assert re.fullmatch("resp_[0-9a-f]{32}_replica-0", response["id"])
        assert (response["object"], response["model"]) == ("response", f"{MODEL}@base")
        # It was cut.
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        (message,) = response["output"]
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
        (text,) = message["content"]
        assert (text["type"], text["text"], text["annotations"]) == ("output_text", "hello", [])
        prompt, made = list(here.engine.requests[0].prompt), list(ids("hello"))
        assert response["usage"] == {
            "input_tokens": len(prompt), "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": len(prompt) + 4,
        }  # fmt: skip
        assert (response["metadata"], response["store"], response["tools"]) == ({"a": "b"}, True, [])
        ours = response["midstream"]
        assert (ours["snapshot"], ours["token_ids"], ours["prompt_token_ids"]) == ("base", made, prompt)
        assert ours["snapshots"] == [{"snapshot": "base", "start": 0, "end": 4}]
        entries = ours["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == [-float(len(prompt) + i) for i in range(4)]
        assert text["logprobs"] == entries
        columns = ("routing_matrix", "router_weights", "sampling_mask")
        assert all(entry[name] for entry in entries for name in columns)
        assert ours["kv_snapshots"] == [{"snapshot": "base", "start": 0, "end": len(prompt) + 3}]
        plain = (await ask(here, max_output_tokens=4)).json()
        assert set(plain["midstream"]) == {"snapshot", "snapshots"}
        assert plain["output"][0]["content"][0]["logprobs"] == []


async def test_a_stream_of_text_is_the_events_of_openais_api(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        fields: dict[str, Any] = {"max_output_tokens": 3, "include": INCLUDE, "instructions": "Be kind."}
        found = events((await ask(here, stream=True, **fields)).text)
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        deltas = ["response.output_text.delta"] * 3
        assert [event["type"] for event in found] == [*ORDER, *deltas, *TEXT_ENDS, "response.incomplete"]
        created, progress, added, begun = found[:4]
        assert created["response"]["midstream"] == {"snapshot": "base"}
        for event in (created, progress):
            response = event["response"]
            assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
            assert response["instructions"] == "Be kind."
        item = added["item"]
        assert item == {
            "id": item["id"], "type": "message", "role": "assistant", "status": "in_progress", "content": []
        }  # fmt: skip
        assert begun["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        said = [event for event in found if event["type"] == deltas[0]]
        assert [event["delta"] for event in said] == ["he", "l", "l"]
        place = {(e["item_id"], e["output_index"], e["content_index"]) for e in found if "content_index" in e}
        assert place == {(item["id"], 0, 0)}
        scores = [entry for event in said for entry in event["logprobs"]]
        assert len(scores) == 3
        done, part_done, item_done, last = found[-4:]
        assert (done["text"], done["logprobs"]) == ("hell", scores)
        assert part_done["part"] == begun["part"] | {"text": "hell", "logprobs": scores}
        assert item_done["item"] == item | {"status": "incomplete", "content": [part_done["part"]]}
        assert last["response"]["output"] == [item_done["item"]]
        assert last["response"]["usage"]["output_tokens"] == 3
        here.engine.reply = (*ids("hey"), 258)
        whole = events((await ask(here, stream=True)).text)
        assert whole[-1]["type"] == "response.completed"
        assert whole[-1]["response"]["output"][0]["status"] == "completed"
        here.engine.reply = (258,)
        for response in (
            (await ask(here)).json(),
            events((await ask(here, stream=True)).text)[-1]["response"],
        ):
            # An answer that says nothing is one.
            assert [part["text"] for item in response["output"] for part in item["content"]] == [""]


@pytest.mark.parametrize("text", [f"I look.\n{CALLS}", CALLS, f"{CALLS}\nso", "no call"])
async def test_items_are_the_same_plain_and_streamed(tmp_path: Path, text: str) -> None:
    async with play(tmp_path, lambda: an_engine(text, tools=True), tools=True) as here:
        fields: dict[str, Any] = {"max_output_tokens": 400, "tools": TOOLS, **RECORDS}
        whole = (await ask(here, **fields)).json()
        found = events((await ask(here, stream=True, **fields)).text)
        last = found[-1]["response"]
        assert (found[-1]["type"], whole["status"]) == ("response.completed", "completed")
        made = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert made == last["output"]
        for items in (made, whole["output"]):
            for item in items:
                assert item.pop("id")
                assert re.fullmatch("call_[0-9a-f]{24}", item.pop("call_id", "call_" + "0" * 24))
        assert made == whole["output"]
        calls = [event for event in found if event["type"].startswith("response.function_call_arguments")]
        arguments = [item["arguments"] for item in made if item["type"] == "function_call"]
        assert [event["arguments"] for event in calls if "arguments" in event] == arguments
        assert "".join(event.get("delta", "") for event in calls) == "".join(arguments)
        assert len(arguments) == (0 if text == "no call" else 2)
        # No record is lost.
        assert list(chain.from_iterable(told(found, "token_ids"))) == list(here.engine.reply)
        assert whole["midstream"]["token_ids"] == list(here.engine.reply)
        entries = [entry for some in told(found, "logprobs") for entry in some["content"]]
        assert entries == whole["midstream"]["logprobs"]["content"]
        (prompt,) = [e["response"]["midstream"]["prompt_token_ids"] for e in found[:1]]
        assert prompt == whole["midstream"]["prompt_token_ids"]


# Streams that go on elsewhere

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("hello ", {"max_output_tokens": 6, **RECORDS, "perf_metrics_in_response": True}),
    "bare": ("hello ", {"max_output_tokens": 6}),
    "calls": (f"I look.\n{CALLS}", {"max_output_tokens": 400, "tools": TOOLS, **RECORDS}),
    "calls only": (CALLS, {"max_output_tokens": 400, "tools": TOOLS}),
}


@pytest.mark.parametrize("name", RESUMED)
async def test_after_any_write_the_rest_is_event_for_event_what_it_would_have_been(
    tmp_path: Path, name: str
) -> None:
    text, fields = RESUMED[name]

    async def scenario(here: Running, there: Running) -> None:
        first = (await ask(here, max_output_tokens=2, tools=fields.get("tools", []))).json()["id"]
        # What it continues is not where the stream goes on.
        for more in ({}, {"previous_response_id": first}):
            body = {"model": MODEL, "input": "a", "stream": True, **fields, **more}
            answer = await here.http.post(PATH, json=body, headers={HEADER_RESUMABLE: "1"})
            assert answer.headers[HEADER_RESUMABLE] == "1"
            writes = writes_of(answer.text)
            whole = without_ends(events(answer.text))
            for cut in range(1, len(writes), 5 if "tools" in fields else 1):
                state = "\n".join(re.findall(r"(?m)^: m (.*)$", "".join(writes[:cut])))
                sent = {"path": PATH, "lost": "r", "exact": True, "state": state, "body": body}
                rest = await there.http.post(PATH_RESUME, json=sent)
                assert rest.status_code == 200, rest.text
                found = events("".join(writes[:cut]) + rest.text)
                seams = [one.pop("resumed") for one in objects(found) if "resumed" in one]
                assert len(seams) == (1 if objects(events(rest.text)) else 0)
                got = without_ends(found)
                assert [e["type"] for e in got] == [e["type"] for e in whole]
                for one, other in zip(got, whole, strict=True):
                    assert one == other
            # It is kept where it ended, unless a part of its conversation is lost.
            kept = await stored(there, whole[-1]["response"]["id"])
            assert kept is None if more else kept["output"] == whole[-1]["response"]["output"]

    tools = "tools" in fields
    async with play(tmp_path, lambda: an_engine(text, tools=tools), tools=tools, replicas=2) as (here, there):
        await scenario(here, there)


def objects(found: list[Any]) -> list[Any]:
    return [
        one
        for event in found
        for one in (event.get("midstream"), event.get("response", {}).get("midstream"))
        if one
    ]


def without_ends(found: list[Any]) -> list[Any]:
    for event in found:
        without_times([event.get("response", {})])
    return found


async def test_log_probabilities_that_the_end_repeats_make_a_stream_stay(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        body = {"model": MODEL, "input": "a", "stream": True, "max_output_tokens": 2, "include": INCLUDE}
        answer = await here.http.post(PATH, json=body, headers={HEADER_RESUMABLE: "1"})
        assert HEADER_RESUMABLE not in answer.headers


async def test_a_stream_that_fails_ends_with_an_error_event_of_this_api(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        here.engine.fail_after = 2
        last = events((await ask(here, stream=True, max_output_tokens=9)).text)[-1]
        assert (last["type"], last["code"]) == ("error", "engine_error")
        assert "out of pages" in last["message"]


# Stored responses


async def test_a_response_is_kept_for_its_tenant_until_it_is_deleted(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        for stream in (False, True):
            answer = await ask(here, max_output_tokens=2, stream=stream, headers={"x-midstream-tenant": "t"})
            made = events(answer.text)[-1]["response"] if stream else answer.json()
            assert await stored(here, made["id"], tenant="t") == made
            assert await stored(here, made["id"], tenant="u") is None
            assert await stored(here, made["id"], "delete", "u") is None
            denied = await ask(here, previous_response_id=made["id"], headers={"x-midstream-tenant": "u"})
            assert denied.status_code == 404
            (item,) = await stored(here, made["id"], "items", "t")
            assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "a"}])
            assert await stored(here, made["id"], "delete", "t") is True
            assert await stored(here, made["id"], tenant="t") is None
        answer = await ask(here, max_output_tokens=2, store=False)
        assert await stored(here, answer.json()["id"]) is None


async def test_a_missing_response_is_a_404_that_says_who_may_hold_it(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        for id, holder in {
            "resp_1_replica-7": "replica-7", "resp_1_replica-0": None, "resp_1": None, "x": None, "resp_1_a b": None,
        }.items():  # fmt: skip
            answer = await ask(here, previous_response_id=id)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (404, "previous_response_id")
            assert (error["type"], id in error["message"]) == ("not_found_error", True)
            assert answer.headers.get("x-midstream-held-by") == holder


@pytest.mark.parametrize("session", [{}, {"x-midstream-session": "s"}])
@pytest.mark.parametrize("resent", [False, True])
async def test_the_next_turn_begins_with_the_very_tokens_of_the_last(
    tmp_path: Path, session: dict[str, str], resent: bool
) -> None:
    """As a tokenizer would not cut them: it has a token for "he"."""
    letters = tuple(b"hello ")

    async with play(tmp_path) as here:
        here.engine.reply = letters
        items: list[Any] = [{"role": "user", "content": "he said"}]
        given: dict[str, Any] = {"input": items}
        for number in range(3):
            answer = await ask(here, max_output_tokens=6, stream=False, headers=session, **given)
            made = answer.json()
            exact = not resent or bool(session) or number == 0
            assert ("branch" in made["midstream"]) is False, made
            if exact and number:
                before = here.engine.requests[number - 1].prompt
                assert here.engine.requests[number].prompt[: len(before) + 6] == before + letters
            asks = {"role": "user", "content": f"{number}"}
            items = [*items, *made["output"], asks]
            given = {"input": items} if resent else {"input": [asks], "previous_response_id": made["id"]}
        first, second = (request.prompt for request in here.engine.requests[:2])
        added = ids("<|im_end|><|im_start|>user\n0<|im_end|><|im_start|>assistant\n")
        if session or not resent:
            assert second == first + letters + added
        listed = await stored(here, made["id"], "items")
        assert [item.get("role") for item in listed] == ["user", "assistant", "user", "assistant", "user"]


async def test_a_thread_without_a_session_has_a_trace_as_long_as_it_is_stored(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        first = (await ask(here, max_output_tokens=2)).json()["id"]
        second = (await ask(here, max_output_tokens=2, previous_response_id=first)).json()["id"]
        asked = {"tenant": "", "key": first}
        (trace,) = (await here.http.post("/replica/trace", json=asked)).json().values()
        assert [turn["parent"] for turn in trace["turns"]] == [0, 1]
        await stored(here, first, "delete")
        assert here.replica.trees.size
        # What continues it still does.
        third = await ask(here, max_output_tokens=2, previous_response_id=second)
        assert "branch" not in third.json()["midstream"]
        for id in (second, third.json()["id"]):
            await stored(here, id, "delete")
        assert (here.replica.trees.size, here.replica.responses.size) == (0, 0)


async def test_a_branch_is_said_in_the_first_event(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        items = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "?"},
            {"role": "user", "content": "b"},
        ]
        headers = {"x-midstream-session": "s"}
        found = events((await ask(here, input=items, stream=True, max_output_tokens=2, headers=headers)).text)
        assert found[0]["response"]["midstream"]["branch"] == {"why": "unknown", "messages": 0}
        assert sum("branch" in one for one in objects(found)) == 1


def test_stored_bytes_are_bounded_and_count_what_is_continued() -> None:
    gone: list[Any] = []
    store = StoredResponses("r", gone.append, bytes_max=10_000)

    def put(id: str, parent: Stored | None = None, size: int = 2000) -> Stored:
        node = Stored(
            id, parent, id if parent is None else parent.thread, b"[]", b'{"output":[]}'.ljust(size)
        )
        store.keep("t", node)
        return node

    first = put("a")
    second = put("b", first)
    put("c")
    assert (len(store), store.find("u", "a")) == (3, None)
    # Used: it and what it continues.
    assert store.find("t", "b") is second
    put("d")
    assert [store.find("t", id) is not None for id in "abcd"] == [True, True, False, True]
    assert gone == [("t", "c")]
    assert store.delete("t", "a")
    assert (store.find("t", "a"), second.input) == (None, [])
    assert store.size == sum(node.size for node in (first, second)) + first.size
    assert store.delete("t", "b")
    assert not store.delete("t", "b")
    assert gone[1:] == [("t", "a")]
    put("e", size=20_000)
    assert (len(store), store.size) == (0, 0)


def test_ids_name_the_replica_where_its_name_can_stand_in_one() -> None:
    assert holder_of("resp_" + new_id("10.0.0.1:8000")) == "10.0.0.1:8000"
    for name in ("[::1]:80", "a b", "a/b", "", "x" * 200, "a_b"):
        assert holder_of("resp_" + new_id(name)) == ""


def test_deep_or_broken_json_is_a_400() -> None:
    for body in (b"[" * 100_000, b"{", b'{"model":"m"', b"\xff"):
        with pytest.raises(InvalidRequest):
            read(body, shelf())


def test_a_resumed_request_is_read_without_what_it_continues() -> None:
    body = json.dumps({"input": "a", "previous_response_id": "resp_1_x"}).encode()
    assert not read(body, shelf(resumed=True)).whole


@pytest.mark.parametrize("alone", [False, True])
async def test_tools_that_are_no_functions_are_ignored_with_unknown_fields(
    tmp_path: Path, alone: bool
) -> None:
    """Codex always sends some: codex#10635, llama.cpp#23041, command-code#885."""
    function = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
    others = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    tools = others if alone else [others[0], function, others[1]]

    async with play(tmp_path, lambda: an_engine("a", tools=True), tools=True) as here:
        headers = {"x-midstream-unknown-fields": "ignore"}
        answer = await ask(here, headers=headers, tools=tools, client_metadata={"x": "1"})
        assert answer.status_code == 200, answer.text
        named = ["client_metadata", "tools[0]", "tools[1]" if alone else "tools[2]"]
        assert answer.headers["x-midstream-ignored-fields"] == header_value(named)
        assert [tool["name"] for tool in answer.json()["tools"]] == ([] if alone else ["shell"])
        refused = await ask(here, tools=tools)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("tools[0].type: tools of type 'custom' are not")
