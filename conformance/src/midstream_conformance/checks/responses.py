"""OpenAI's Responses API: responses, their streams, what is stored of them, and midstream's records beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from midstream_conformance.answers import Json
from midstream_conformance.checks.wires import (
    CALL_TOKENS,
    CALLED,
    PARAMETERS,
    PLACES,
    RECORDS,
    Order,
    answer_of,
    apart,
    body_of,
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
from midstream_conformance.outcome import expect
from midstream_conformance.rows import OPENAI, OWN, RESPONSES, Evidence, row
from midstream_conformance.session import Session

PATH = "/responses"
TOKENS = 16
GREEDY: Json = {"max_output_tokens": TOKENS, "temperature": 0}
STORED = f"{RESPONSES}: Stored responses"
REQUESTS = f"{RESPONSES}: What a request may hold"
EXACT = f"{RESPONSES}: Exact turns"
TOOL: Json = {"type": "function", "name": CALLED, "parameters": PARAMETERS, "strict": True}
ENDS = {"response.completed": "over", "response.incomplete": "over"}
ORDER: Order = {
    "": {"response.created": "created"},
    "created": {"response.in_progress": "between items"},
    "between items": {"response.output_item.added": "in an item", **ENDS},
    "in an item": {
        "response.content_part.added": "in a part",
        "response.function_call_arguments.delta": "in an item",
        "response.function_call_arguments.done": "in an item",
        "response.output_item.done": "between items",
    },
    "in a part": {
        "response.output_text.delta": "in a part",
        "response.reasoning_text.delta": "in a part",
        "response.output_text.done": "behind a text",
        "response.reasoning_text.done": "behind a text",
    },
    "behind a text": {"response.content_part.done": "in an item"},
    "over": {},
}


async def ask(
    session: Session, given: str | list[Json], headers: Mapping[str, str] | None = None, **fields: Any
) -> Json:
    return await answer_of(session, PATH, {**GREEDY, "input": given, **fields}, headers)


async def stored(session: Session, method: str, response_id: str, below: str = "") -> httpx.Response:
    """What the endpoint says to a request about a response that it has made."""
    path = f"{session.endpoint.prefix}{PATH}/{response_id}{below}"
    return await session.endpoint.request(method, path)


async def plain_and_streamed(session: Session, given: str, **fields: Any) -> tuple[Json, list[Json]]:
    """A greedy response and the events of its stream, without cached KV."""
    plain = await ask(session, given, apart(session), **fields)
    return plain, await events_of(session, PATH, {**GREEDY, "input": given, **fields}, apart(session))


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def deltas_of(events: Iterable[Json]) -> list[Json]:
    return [event for event in events if event["type"].endswith(".delta")]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


@row(
    "responses.shape",
    "An answer is a response with message items and a status; max_output_tokens makes it incomplete; usage adds up",
    OPENAI,
    ("responses",),
)
async def shape(session: Session) -> Evidence:
    response = await ask(session, question(session), metadata={"run": "conformance"})
    wanted = {"object": "response", "error": None, "metadata": {"run": "conformance"}}
    found = {name: response.get(name, "none") for name in wanted}
    expect(found == wanted, f"{wanted} was expected", got=found)
    kinds = [item["type"] for item in response["output"]]
    expect("message" in kinds and set(kinds) <= {"message", "reasoning"}, "a message was expected", got=kinds)
    usage, status = response["usage"], response["status"]
    used = usage["output_tokens"]
    ended = (status, (response.get("incomplete_details") or {}).get("reason"))
    sound = ended == ("completed", None) or (ended == ("incomplete", "max_output_tokens") and used == TOKENS)
    expect(sound and 0 < used <= TOKENS, "the status is not what output_tokens says", got=ended, tokens=used)
    added = usage["input_tokens"] + used
    expect(usage["total_tokens"] == added > used, "usage does not add up", usage=usage)
    return {"output_tokens": used, "status": status}


@row(
    "responses.events",
    "A stream's events have sequence numbers from 0 on and come in OpenAI's order; the last one has the items that it gave",
    OPENAI,
    ("responses",),
)
async def events(session: Session) -> Evidence:
    fields = {**GREEDY, "input": question(session)}
    found = await events_of(session, PATH, fields)
    numbers = [event.get("sequence_number") for event in found]
    expect(numbers == [*range(len(found))], "sequence numbers are not 0, 1, 2 and so on", got=numbers)
    check_order(ORDER, found)
    given: list[Json] = []
    said = ""
    for event in found:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            expect(event["output_index"] == len(given), "output_index does not count the items", event=event)
        elif kind == "content_part.added":
            said = ""
        elif kind.endswith(".delta"):
            said += event["delta"]
        elif kind.endswith("_text.done"):
            expect(event["text"] == said, "a text is not what its deltas joined up to",
                   deltas=said, text=event["text"])  # fmt: skip
        elif kind == "output_item.done":
            given.append(event["item"])
    whole = found[-1]["response"]
    expect(given and whole["output"] == given, "the last event has other items than the stream",
           items=len(given), last=len(whole["output"]))  # fmt: skip
    return {"events": len(found), "items": len(given)}


@row(
    "responses.stream",
    "A stream joins up to the plain greedy answer: its text, status and usage",
    OPENAI,
    ("responses",),
)
async def stream(session: Session) -> Evidence:
    plain, found = await plain_and_streamed(session, question(session))
    whole = found[-1]["response"]
    for name in ("status", "incomplete_details", "usage", "model"):
        one, two = plain.get(name), whole.get(name)
        expect(one == two, f"{name} differs", plain=one, streamed=two)
    texts = {
        "plain": text_of(plain),
        "deltas": "".join(event["delta"] for event in deltas_of(found)),
        "last event": text_of(whole),
    }
    expect(len({*texts.values()}) == 1, "the texts differ", **texts)
    expect(texts["plain"] or plain["status"] == "completed", "the answers are empty")
    return {"characters": len(texts["plain"]), "events": len(found)}


@row(
    "responses.call",
    "A forced call is an item whose arguments fit the schema, the same from a stream; its output is taken",
    OPENAI,
    ("responses", "grammars"),
)
async def call(session: Session) -> Evidence:
    given, choice = question(session), {"type": "function", "name": CALLED}
    fields: Json = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": CALL_TOKENS}
    plain, found = await plain_and_streamed(session, given, **fields)
    made = [item for item in plain["output"] if item["type"] == "function_call"]
    expect([item["name"] for item in made] == [CALLED], f"one call of {CALLED} was expected",
           got=plain["output"])  # fmt: skip
    arguments = json.loads(made[0]["arguments"])
    sound = len(arguments) == 1 and arguments.get("where") in PLACES
    expect(sound, "the arguments do not fit the schema", got=arguments)
    joined = "".join(event["delta"] for event in deltas_of(found))
    expect(joined == made[0]["arguments"], "the stream's arguments differ",
           plain=made[0]["arguments"], streamed=joined)  # fmt: skip
    output = {"type": "function_call_output", "call_id": made[0]["call_id"], "output": "It is green."}
    after = await ask(session, [user(given), *plain["output"], output], tools=[TOOL])
    return {"arguments": arguments, "events": len(found), "next_status": after["status"]}


@row(
    "responses.stored",
    "A response that was retrieved is the one that was answered, of a stream too, and its input_items are the request's",
    STORED,
    ("responses",),
)
async def retrieved(session: Session) -> Evidence:
    given = question(session)
    plain, found = await plain_and_streamed(session, given)
    for where, answered in (("plain", plain), ("stream", found[-1]["response"])):
        got = body_of(await stored(session, "GET", answered["id"]), f"GET {PATH}/ID ({where})")
        other = sorted(name for name, value in answered.items() if got.get(name, "none") != value)
        expect(not other, f"{where}: fields differ from what was answered", fields=other)
        items = body_of(await stored(session, "GET", answered["id"], "/input_items"), "input_items")["data"]
        texts = [part["text"] for item in items for part in item["content"]]
        expect(texts == [given], f"{where}: input_items are not the request's input", got=texts)
    return {"output_tokens": plain["usage"]["output_tokens"], "fields": len(plain)}


@row(
    "responses.deleted",
    "A deleted response is a 404, and so is one with store false; one that continued it still has its conversation",
    STORED,
    ("responses",),
)
async def deleted(session: Session) -> Evidence:
    asked, again = question(session), question(session)
    first = await ask(session, asked)
    second = await ask(session, again, previous_response_id=first["id"])
    unstored = await ask(session, asked, store=False)
    body_of(await stored(session, "DELETE", first["id"]), f"DELETE {PATH}/ID")
    for what, response_id in (("deleted", first["id"]), ("store false", unstored["id"])):
        for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            response = await stored(session, method, response_id, below)
            _refused(response, 404)
        response = await session.endpoint.post(
            PATH, {**GREEDY, "input": again, "previous_response_id": response_id}
        )
        sound = response.status_code in (400, 404) and names(error_of(response), "previous_response_id")
        expect(sound, f"{what}: a request could continue it", got=refusal(response))
    kept = body_of(await stored(session, "GET", second["id"], "/input_items"), "input_items")["data"]
    texts = [part["text"] for item in kept for part in item["content"]]
    wanted = [asked, text_of(first), again]
    expect(texts in (wanted, wanted[::-1]), "what continued it has lost its conversation",
           expected=wanted, got=texts)  # fmt: skip
    return {"items_kept": len(texts)}


@row(
    "responses.errors",
    "Errors have OpenAI's shape and name the field, of streams too; an unknown model is a 404",
    f"{RESPONSES}: introduction (errors are as on chat completions)",
    ("responses",),
)
async def errors(session: Session) -> Evidence:
    good: Json = {**GREEDY, "input": question(session)}
    cases: list[tuple[str, Json]] = [
        ("input", GREEDY),
        ("input", {**good, "input": [{"role": "robot", "content": "x"}]}),
        ("max_output_tokens", {**good, "max_output_tokens": -1, "stream": True}),
        ("temperature", {**good, "temperature": 9}),
        ("top_p", {**good, "top_p": "high"}),
        ("metadata", {**good, "metadata": 1}),
        ("text", {**good, "text": {"format": {"type": "json_schema"}}}),
    ]
    for field, body in cases:
        _refused(await session.endpoint.post(PATH, body), 400, field)
    unknown = {**good, "model": "accounts/nobody/models/none"}
    _refused(await session.endpoint.post(PATH, unknown), 404, "none")
    return {"cases": len(cases) + 1}


@row(
    "responses.refused",
    "What would change the answer and is not supported is refused by name: OpenAI's own tools, images, files, background",
    REQUESTS,
    ("responses", "midstream"),
)
async def refused(session: Session) -> Evidence:
    given = question(session)
    own = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer_use_preview")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    file = {"type": "input_file", "file_id": "file-1"}
    cases: list[tuple[tuple[str, ...], Json]] = [
        *((("tools[0]", kind), {"tools": [{"type": kind}]}) for kind in own),
        (("input[0].content[0]", "input_image"), {"input": [{"role": "user", "content": [image]}]}),
        (("input[0].content[0]", "input_file"), {"input": [{"role": "user", "content": [file]}]}),
        (("background",), {"background": True}),
        (("conversation",), {"conversation": "conv_1"}),
        (("prompt",), {"prompt": {"id": "pmpt_1"}}),
        (("truncation",), {"truncation": "auto"}),
    ]
    for named, fields in cases:
        response = await session.endpoint.post(PATH, {**GREEDY, "input": given, **fields})
        _refused(response, 400, *named)
    return {"cases": len(cases)}


def _refused(response: httpx.Response, status: int, *named: str) -> None:
    """named: what the error names, a field or what it holds."""
    what = ", ".join(named) or f"{response.request.method} {response.request.url.path}"
    expect(response.status_code == status, f"{what}: {status} was expected, got {refusal(response)}")
    error = error_of(response)
    sound = isinstance(error.get("message"), str) and {"type", "code", "param"} <= error.keys()
    expect(sound, f"{what}: the body is not {{'error': {{'message', 'type', 'param', 'code'}}}}",
           body=response.text[:200])  # fmt: skip
    expect(all(names(error, name) for name in named), f"{what}: the error does not name it", error=error)


@row(
    "responses.key",
    "Without the key no client makes, reads or deletes a response: each is a 401, and the response stays",
    f"{OWN}: Keys and scopes",
    ("responses", "keys"),
)
async def key(session: Session) -> Evidence:
    endpoint = session.endpoint
    made = await ask(session, question(session))
    path = f"{endpoint.prefix}{PATH}"
    asked: list[tuple[str, str, Json | None]] = [
        ("POST", path, {"model": endpoint.model, "input": "x", "max_output_tokens": 1}),
        ("GET", f"{path}/{made['id']}", None),
        ("GET", f"{path}/{made['id']}/input_items", None),
        ("DELETE", f"{path}/{made['id']}", None),
    ]
    for method, whole, sent in asked:
        for wrong in ("no-such-key", NO_KEY):
            response = await endpoint.request(method, whole, sent, key=wrong)
            _refused(response, 401)
    body_of(await stored(session, "GET", made["id"]), f"GET {PATH}/ID with the key")
    return {"requests": len(asked)}


@row(
    "responses.labels",
    "model and midstream.snapshot name the snapshot that serves, beside every delta, and snapshots covers all tokens",
    REQUESTS,
    ("responses", "midstream"),
)
async def labels(session: Session) -> Evidence:
    plain, found = await plain_and_streamed(session, question(session))
    first, last = found[0]["response"], found[-1]["response"]
    models = [response["model"] for response in (plain, first, last)]
    told = [plain, first, last, *deltas_of(found)]
    return await check_labels(session, models, told, own_of(plain), plain["usage"]["output_tokens"])


@row(
    "responses.records",
    "midstream has the ids and log-probabilities of all tokens that usage counts, streamed too; a score gives the same",
    REQUESTS,
    ("responses", "midstream"),
)
async def records(session: Session) -> Evidence:
    given = question(session)
    plain, found = await plain_and_streamed(session, given, **RECORDS)
    told, usage = tokens_of([plain]), plain["usage"]
    counts = [usage["input_tokens"], usage["output_tokens"]]
    expect(counts == [len(told.prompt), len(told.ids)], "usage does not count the tokens",
           usage=usage, prompt=len(told.prompt), tokens=len(told.ids))  # fmt: skip
    return await check_tokens(session, told, tokens_of([found[0]["response"], *found]), given)


@row(
    "responses.previous",
    "previous_response_id continues the exact tokens of that response, without a session and in a stream too",
    EXACT,
    ("responses", "midstream"),
)
async def previous(session: Session) -> Evidence:
    first = await ask(session, question(session), **RECORDS)
    second = await ask(session, question(session), previous_response_id=first["id"], **RECORDS)
    kept = check_continues(tokens_of([first]), [second])
    body = {**GREEDY, "input": question(session), "previous_response_id": second["id"], **RECORDS}
    third = await events_of(session, PATH, body)
    kept += check_continues(tokens_of([second]), [third[0]["response"], *third])
    return {"exact_tokens": kept}


@row(
    "responses.turns",
    "In a session all items sent again continue the exact tokens, too; an answer that was edited is a branch",
    EXACT,
    ("responses", "midstream"),
)
async def turns(session: Session) -> Evidence:
    headers = {TRAJECTORY_HEADER: session.key()}
    asked, again = user(question(session)), user(question(session))
    first = await ask(session, [asked], headers, **RECORDS)
    second = await ask(session, [asked, *first["output"], again], headers, **RECORDS)
    kept = check_continues(tokens_of([first]), [second])
    edited = {"role": "assistant", "content": text_of(first) + " And more."}
    branch = own_of(await ask(session, [asked, edited, again], headers, **RECORDS)).get("branch") or {}
    expect(branch.get("why") == "edited", "an edited answer is no branch", branch=branch)
    return {"exact_tokens": kept}
