"""Anthropic's Messages API: messages, their streams, counts, calls and errors, and midstream's records beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from midstream_conformance.answers import Json
from midstream_conformance.checks.asking import STOP_TRIES, stop_at
from midstream_conformance.checks.wires import (
    CALL_TOKENS,
    CALLED,
    PARAMETERS,
    PLACES,
    RECORDS,
    Order,
    answer_of,
    apart,
    check_continues,
    check_labels,
    check_order,
    check_tokens,
    events_of,
    names,
    own_of,
    question,
    tokens_of,
)
from midstream_conformance.endpoint import NO_KEY, TRAJECTORY_HEADER, error_of, refusal
from midstream_conformance.outcome import Skipped, expect
from midstream_conformance.rows import ANTHROPIC, MESSAGES, Evidence, row
from midstream_conformance.session import Session

PATH = "/messages"
COUNT = "/messages/count_tokens"
#: Anthropic's own server refuses a request without it.
VERSION = {"anthropic-version": "2023-06-01"}
TOKENS = 16
GREEDY: Json = {"max_tokens": TOKENS, "temperature": 0}
REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "refusal")
REQUESTS = f"{MESSAGES}: What a request may hold"
ANSWERS = f"{MESSAGES}: What an answer holds"
TOOL: Json = {"name": CALLED, "input_schema": PARAMETERS}
ORDER: Order = {
    "": {"message_start": "between blocks"},
    "between blocks": {"content_block_start": "in a block", "message_delta": "told"},
    "in a block": {"content_block_delta": "in a block", "content_block_stop": "between blocks"},
    "told": {"message_stop": "over"},
    "over": {},
}


def said(*content: Any) -> list[Json]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": given} for i, given in enumerate(content)]


async def ask(
    session: Session, messages: list[Json], headers: Mapping[str, str] | None = None, **fields: Any
) -> Json:
    return await answer_of(
        session, PATH, {**GREEDY, "messages": messages, **fields}, {**VERSION, **(headers or {})}
    )


async def plain_and_streamed(session: Session, asked: str, **fields: Any) -> tuple[Json, list[Json]]:
    """A greedy message and the events of its stream, without cached KV."""
    plain = await ask(session, said(asked), apart(session), **fields)
    body = {**GREEDY, "messages": said(asked), **fields}
    return plain, await events_of(session, PATH, body, {**VERSION, **apart(session)})


def joined(events: Iterable[Json]) -> Json:
    """The message that a stream's events make up: its content, stop reason and usage."""
    message: Json = {"content": [], "usage": {}}
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**message, **event["message"], "content": []}
            case "content_block_start":
                message["content"].append({**event["content_block"]})
            case "content_block_delta":
                _add(message["content"][event["index"]], event["delta"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = message["usage"] | event["usage"]
    for block in message["content"]:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial"))
    return message


def _add(block: Json, delta: Mapping[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["partial"] = block.get("partial", "") + delta["partial_json"]
    elif delta["type"] in ("text_delta", "thinking_delta"):
        name = delta["type"].removesuffix("_delta")
        block[name] += delta[name]


def text_of(message: Json) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_tokens(usage: Mapping[str, Any]) -> int:
    """Those that were read from the cache, or written to it, included."""
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return int(usage["input_tokens"]) + sum(int(usage.get(name) or 0) for name in cached)


@row(
    "messages.shape",
    "An answer is a message of text blocks with a stop_reason; max_tokens ends it at so many output_tokens",
    ANTHROPIC,
    ("messages",),
)
async def shape(session: Session) -> Evidence:
    message = await ask(session, said(question(session)))
    wanted = {"type": "message", "role": "assistant", "stop_sequence": None}
    found = {name: message.get(name, "none") for name in wanted}
    expect(found == wanted, f"{wanted} was expected", got=found)
    expect(isinstance(message.get("id"), str) and message["id"], "there is no id", got=message.get("id"))
    reason, used = message.get("stop_reason"), message["usage"]["output_tokens"]
    expect(reason in REASONS, "stop_reason is none of the API's", got=reason)
    kinds = {block.get("type") for block in message["content"]}
    sound = kinds <= {"text", "thinking"} and (kinds or reason == "end_turn")
    expect(sound, "blocks of text were expected", got=sorted(kinds))
    whole = used == TOKENS if reason == "max_tokens" else 0 < used <= TOKENS
    expect(whole, "output_tokens is not what stop_reason and max_tokens say", got=used, reason=reason)
    expect(prompt_tokens(message["usage"]) > 0, "usage counts no prompt", usage=message["usage"])
    return {"output_tokens": used, "stop_reason": reason}


@row(
    "messages.events",
    "A stream's events are named as their data, and come in Anthropic's order, with blocks counted from 0",
    ANTHROPIC,
    ("messages",),
)
async def events(session: Session) -> Evidence:
    fields = {**GREEDY, "messages": said(question(session))}
    found = await events_of(session, PATH, fields, VERSION)
    check_order(ORDER, found)
    blocks = -1
    for event in found:
        blocks += event["type"] == "content_block_start"
        index = event.get("index", blocks)
        expect(index == blocks, f"{event['type']}: index {blocks} was expected", got=index)
    expect(blocks >= 0, "the stream has no content block")
    return {"events": len(found), "blocks": blocks + 1}


@row(
    "messages.stream",
    "A stream joins up to the plain greedy answer: its content, stop_reason and usage",
    ANTHROPIC,
    ("messages",),
)
async def stream(session: Session) -> Evidence:
    plain, found = await plain_and_streamed(session, question(session))
    streamed = joined(found)
    for name in ("content", "stop_reason", "stop_sequence", "usage", "model"):
        one, two = plain.get(name), streamed.get(name)
        expect(one == two, f"{name} differs", plain=one, streamed=two)
    begun = [event["message"]["usage"] for event in found if event["type"] == "message_start"]
    counts = [prompt_tokens(usage) for usage in (plain["usage"], *begun)]
    expect(len({*counts}) == 1, "message_start counts another prompt", plain=counts[0], streamed=counts[1:])
    expect(text_of(plain) or plain["stop_reason"] == "end_turn", "the answers are empty")
    return {"characters": len(text_of(plain)), "events": len(found)}


@row(
    "messages.count",
    "count_tokens gives the input tokens that usage counts, with system and tools as well",
    ANTHROPIC,
    ("messages",),
)
async def count(session: Session) -> Evidence:
    asked = said(question(session))
    counted = []
    more: list[Json] = [{}, {"system": "Be brief."}, {"tools": [TOOL]}]
    for fields in more:
        sent = {"messages": asked, **fields}
        response = await session.endpoint.post(COUNT, sent, VERSION)
        if _lacks(session, response):
            raise Skipped(f"{COUNT}: {refusal(response)}")
        expect(response.status_code == 200, f"{COUNT}: {refusal(response)}")
        counted.append(response.json()["input_tokens"])
        usage = (await ask(session, asked, max_tokens=1, **fields))["usage"]
        expect(prompt_tokens(usage) == counted[-1], "count_tokens is not what usage counts",
               counted=counted[-1], usage=usage, fields=sorted(sent))  # fmt: skip
    expect(counted[0] < min(counted[1:]), "system or tools count for nothing", counted=counted)
    return {"counted": counted}


@row(
    "messages.stop",
    "A stop sequence ends the text before it, and the message names it, plain and streamed",
    ANTHROPIC,
    ("messages",),
)
async def stop(session: Session) -> Evidence:
    fields: Json = {"max_tokens": 48}
    for _ in range(STOP_TRIES):
        asked = question(session)
        text = text_of(await ask(session, said(asked), apart(session), **fields))
        at = stop_at(text)
        if at is not None:
            break
    else:
        raise Skipped(f"{STOP_TRIES} answers of this model had no printable character to stop at")
    fields["stop_sequences"] = [text[at]]
    plain, found = await plain_and_streamed(session, asked, **fields)
    wanted = (text[:at], "stop_sequence", text[at])
    for where, message in (("plain", plain), ("stream", joined(found))):
        got = (text_of(message), message.get("stop_reason"), message.get("stop_sequence"))
        expect(got == wanted, f"{where}: text, stop_reason and stop_sequence are not those of the stop",
               expected=wanted, got=got)  # fmt: skip
    return {"stopped_after_characters": at, "of": len(text)}


@row(
    "messages.call",
    "A forced call is a tool_use block whose input fits the schema, joined from a stream too; its result is taken",
    ANTHROPIC,
    ("messages", "grammars"),
)
async def call(session: Session) -> Evidence:
    asked, choice = question(session), {"type": "tool", "name": CALLED}
    fields: Json = {"tools": [TOOL], "tool_choice": choice, "max_tokens": CALL_TOKENS}
    plain, found = await plain_and_streamed(session, asked, **fields)
    for where, message in (("plain", plain), ("stream", joined(found))):
        blocks = [block for block in message["content"] if block["type"] == "tool_use"]
        got = [(block["name"], block["input"].get("where"), len(block["input"])) for block in blocks]
        sound = len(got) == 1 and got[0][0] == CALLED and got[0][1] in PLACES and got[0][2] == 1
        expect(sound, f"{where}: one call of {CALLED} with its input was expected", got=got)
        expect(message["stop_reason"] == "tool_use", f"{where}: stop_reason is {message['stop_reason']}")
    (used,) = (block for block in plain["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "It is green."}
    after = await ask(session, said(asked, plain["content"], [result]), tools=[TOOL])
    return {
        "input": used["input"],
        "events": len(found),
        "next_output_tokens": after["usage"]["output_tokens"],
    }


@row(
    "messages.errors",
    "Errors have Anthropic's shape and name the field, of counts and streams too; an unknown model is a not_found_error",
    f"{MESSAGES}: What an answer holds, errors",
    ("messages",),
)
async def errors(session: Session) -> Evidence:
    good: Json = {**GREEDY, "messages": said(question(session))}
    cases: list[tuple[str, Json]] = [
        ("max_tokens", {name: value for name, value in good.items() if name != "max_tokens"}),
        ("max_tokens", {**good, "max_tokens": -1, "stream": True}),
        ("messages", {**good, "messages": []}),
        ("messages", {**good, "messages": [{"role": "robot", "content": "x"}]}),
        ("temperature", {**good, "temperature": 9}),
        ("stop_sequences", {**good, "stop_sequences": [1]}),
        ("tools", {**good, "tools": [{"name": CALLED}]}),
    ]
    for field, body in cases:
        response = await session.endpoint.post(PATH, body, VERSION)
        _refused(response, 400, "invalid_request_error", field)
    counted = await session.endpoint.post(COUNT, {"messages": []}, VERSION)
    if not _lacks(session, counted):
        _refused(counted, 400, "invalid_request_error", "messages")
    unknown = {**good, "model": "accounts/nobody/models/none"}
    _refused(await session.endpoint.post(PATH, unknown, VERSION), 404, "not_found_error", "none")
    return {"cases": len(cases) + 2}


@row(
    "messages.refused",
    "What would change the answer and is not supported is refused by name: images, Anthropic's own tools, prefill",
    REQUESTS,
    ("messages", "midstream"),
)
async def refused(session: Session) -> Evidence:
    asked = question(session)
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    picture = [{"type": "text", "text": asked}, {"type": "image", "source": source}]
    paper = [{"type": "document", "source": {**source, "media_type": "application/pdf"}}]
    cases: list[tuple[tuple[str, ...], Json]] = [
        (("messages[0].content[1]", "image"), {"messages": said(picture)}),
        (("messages[0].content[0]", "document"), {"messages": said(paper)}),
        (("tools[0]", "web_search_20250305"), {"tools": [{"type": "web_search_20250305", "name": "search"}]}),
        (("tools[0]", "bash_20250124"), {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (("messages[1]", "prefill"), {"messages": said(asked, "It is")}),
        (("thinking",), {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        (("mcp_servers",), {"mcp_servers": [{"type": "url", "url": "http://nobody", "name": "n"}]}),
    ]
    for named, fields in cases:
        response = await session.endpoint.post(PATH, {**GREEDY, "messages": said(asked), **fields}, VERSION)
        _refused(response, 400, "invalid_request_error", *named)
    return {"cases": len(cases)}


def _lacks(session: Session, counted: httpx.Response) -> bool:
    """Whether the endpoint has no count_tokens. Of midstream it is promised."""
    return counted.status_code == 404 and not session.target.midstream


def _refused(response: httpx.Response, status: int, kind: str, *named: str) -> None:
    """named: what the error names, a field or what it holds."""
    what = ", ".join(named) or "the key"
    expect(response.status_code == status, f"{what}: {status} was expected, got {refusal(response)}")
    body, error = response.json(), error_of(response)
    sound = body.get("type") == "error" and error.get("type") == kind and error.get("message")
    expect(sound, f"{what}: the body is not {{'type': 'error', 'error': {{'type': '{kind}', 'message'}}}}",
           body=response.text[:200])  # fmt: skip
    expect(all(names(error, name) for name in named), f"{what}: the error does not name it", error=error)


@row(
    "messages.key",
    "x-api-key holds the key; a wrong one, or none, is a 401 authentication_error, of counts too",
    f"{MESSAGES}: introduction",
    ("messages", "keys"),
)
async def key(session: Session) -> Evidence:
    endpoint = session.endpoint
    body: Json = {"model": endpoint.model, "messages": said(question(session))}
    for path, sent in ((PATH, {**body, "max_tokens": 1}), (COUNT, body)):
        whole = endpoint.prefix + path
        response = await endpoint.request("POST", whole, sent, VERSION, x_api_key=True)
        if path == COUNT and _lacks(session, response):
            continue
        expect(response.status_code == 200, f"{path}, the right key: {refusal(response)}")
        for wrong in ("no-such-key", NO_KEY):
            response = await endpoint.request("POST", whole, sent, VERSION, key=wrong, x_api_key=True)
            _refused(response, 401, "authentication_error")
    return {"paths": 2}


@row(
    "messages.labels",
    "model and midstream.snapshot name the snapshot that serves, beside every delta, and snapshots covers all tokens",
    ANSWERS,
    ("messages", "midstream"),
)
async def labels(session: Session) -> Evidence:
    plain, found = await plain_and_streamed(session, question(session))
    deltas = [event for event in found if event["type"].startswith(("message_start", "message_delta"))]
    deltas += [event for event in found if event["type"] == "content_block_delta"]
    models = [plain["model"], joined(found)["model"]]
    tokens = plain["usage"]["output_tokens"]
    return await check_labels(session, models, [plain, *deltas], own_of(plain), tokens)


@row(
    "messages.records",
    "midstream has the ids and log-probabilities of all tokens that usage counts, streamed too; a score gives the same",
    ANSWERS,
    ("messages", "midstream"),
)
async def records(session: Session) -> Evidence:
    asked = question(session)
    plain, found = await plain_and_streamed(session, asked, **RECORDS)
    told = tokens_of([plain])
    counts = [prompt_tokens(plain["usage"]), plain["usage"]["output_tokens"]]
    expect(counts == [len(told.prompt), len(told.ids)], "usage does not count the tokens",
           usage=plain["usage"], prompt=len(told.prompt), tokens=len(told.ids))  # fmt: skip
    return await check_tokens(session, told, tokens_of(found), asked)


@row(
    "messages.turns",
    "A session's next turn begins with the exact tokens of the one before; one whose answer was edited is a branch",
    "docs/exact-sessions.md: What continues a turn",
    ("messages", "midstream"),
)
async def turns(session: Session) -> Evidence:
    headers = {TRAJECTORY_HEADER: session.key()}
    asked, again, last = (question(session) for _ in range(3))
    first = await ask(session, said(asked), headers, **RECORDS)
    second = await ask(session, said(asked, first["content"], again), headers, **RECORDS)
    kept = check_continues(tokens_of([first]), [second])
    history = said(asked, first["content"], again, second["content"], last)
    body = {**GREEDY, "messages": history, **RECORDS}
    third = await events_of(session, PATH, body, {**VERSION, **headers})
    kept += check_continues(tokens_of([second]), third)
    edited = said(asked, text_of(first) + " And more.", again)
    branch = own_of(await ask(session, edited, headers, **RECORDS)).get("branch") or {}
    expect(branch.get("why") == "edited", "an edited answer is no branch", branch=branch)
    return {"exact_tokens": kept}
