"""What rows of other wires than OpenAI's completions share: their answers, named events and token records. Registers no row.

Always holds: an answer given here was a 200. Otherwise Failed is raised. The events of a stream are whole: each one's name is
the `type` of its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from midstream_conformance.answers import Json, Odd, largest_difference
from midstream_conformance.checks.asking import serving
from midstream_conformance.endpoint import ISOLATION_HEADER, TRAJECTORY_HEADER, refusal
from midstream_conformance.outcome import Failed, expect, fail
from midstream_conformance.session import Session

#: Fields of midstream's own that ask for the records of tokens.
RECORDS: Json = {"return_token_ids": True, "logprobs": True}
#: Of a call that a schema forces: the function's name and its parameters.
CALLED = "look"
PLACES = ("here", "there")
PARAMETERS: Json = {
    "type": "object",
    "properties": {"where": {"enum": list(PLACES)}},
    "required": ["where"],
    "additionalProperties": False,
}
CALL_TOKENS = 96


def question(session: Session) -> str:
    """A prompt that was not sent yet."""
    return f"Say something about {session.key()}."


def apart(session: Session) -> dict[str, str]:
    """Headers of a request of a new session that finds nothing in the cache."""
    return {TRAJECTORY_HEADER: session.key(), ISOLATION_HEADER: session.key()}


async def answer_of(
    session: Session, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Json:
    """The body of the answer to a POST of `path` below the prefix."""
    response = await session.endpoint.post(path, fields, headers)
    return body_of(response, path)


def body_of(response: httpx.Response, what: str) -> Json:
    expect(response.status_code == 200, f"{what}: {refusal(response)}")
    body = response.json()
    if not isinstance(body, dict):
        raise Odd(f"{what}: the body is no object")
    return body


async def events_of(
    session: Session, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> list[Json]:
    """The data of a stream's events, in order. Raises Failed at one of the type `error`."""
    response = await session.endpoint.post(path, {**fields, "stream": True}, headers)
    expect(response.status_code == 200, f"{path} (stream): {refusal(response)}")
    kind = response.headers.get("content-type", "")
    expect(kind.startswith("text/event-stream"), f"{path} (stream): content-type is {kind!r}")
    *blocks, rest = response.content.replace(b"\r\n", b"\n").split(b"\n\n")
    if rest.strip():
        raise Odd(f"{path}: the stream ends inside an event: {rest[:80]!r}")
    events = [event for event in map(_event, blocks) if event is not None]
    for event in events:
        if event["type"] == "error":
            raise Failed(f"{path} (stream): ended with the error {event.get('error', event)}")
    return events


def _event(block: bytes) -> Json | None:
    """None: a comment."""
    fields: dict[bytes, list[bytes]] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    if b"data" not in fields:
        return None
    data = json.loads(b"\n".join(fields[b"data"]))
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise Odd(f"an event's data has no type: {str(data)[:80]!r}")
    named = b"".join(fields.get(b"event", ())).decode()
    if named != data["type"]:
        raise Odd(f"an event is named {named!r}, and its data has the type {data['type']!r}")
    return data


#: State to the events that may come in it and the state behind each. The last state has none.
Order = Mapping[str, Mapping[str, str]]


def check_order(order: Order, events: Iterable[Json]) -> None:
    """Raises Failed where an event that `order` knows comes where it may not, and where the stream ends too early.

    An event that it does not know may come anywhere: clients are asked to skip such ones.
    """
    state = next(iter(order))
    known = {name for after in order.values() for name in after}
    for position, event in enumerate(events):
        name = event["type"]
        if name in order[state]:
            state = order[state][name]
        elif name in known:
            fail(f"event {position}, {name}, may not come here", expected=sorted(order[state]))
    expect(not order[state], "the stream ends too early", expected=sorted(order[state]))


# midstream's own object


@dataclass(frozen=True)
class AnswerTokens:
    """Token records of one answer, plain or joined over a stream. logprobs: nats, of `ids`."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.ids


def own_of(holder: Mapping[str, Any]) -> Json:
    """The object `midstream` of a body or an event; empty when there is none."""
    found = holder.get("midstream")
    return found if isinstance(found, dict) else {}


def tokens_of(holders: Iterable[Mapping[str, Any]]) -> AnswerTokens:
    """Raises Failed when no holder has the prompt's ids, or when log-probabilities are of other tokens than `token_ids`."""
    prompt: list[int] | None = None
    ids: list[int] = []
    entries: list[Json] = []
    for own in map(own_of, holders):
        prompt = own.get("prompt_token_ids", prompt)
        ids += own.get("token_ids", ())
        entries += (own.get("logprobs") or {}).get("content", ())
    expect(prompt, "midstream.prompt_token_ids is not there")
    scored = [entry["token_id"] for entry in entries]
    expect(ids and scored == ids, "midstream.logprobs are not of midstream.token_ids", ids=ids, scored=scored)
    return AnswerTokens(list(prompt or ()), ids, [float(entry["logprob"]) for entry in entries])


async def check_tokens(session: Session, plain: AnswerTokens, streamed: AnswerTokens, asked: str) -> Json:
    """Raises Failed unless a stream's records are those of the plain greedy answer to the question `asked`, the prompt is the
    one of a chat completion, and a score of the tokens gives the same log-probabilities, where the engine can score.
    """
    expect(streamed.tokens == plain.tokens, "the stream's tokens are others than the plain answer's",
           plain=plain.ids, streamed=streamed.ids)  # fmt: skip
    chat = await session.endpoint.chat(asked, max_tokens=1, return_token_ids=True)
    expect(chat.body.get("prompt_token_ids") == plain.prompt, "a chat completion has another prompt",
           here=plain.prompt, chat=chat.body.get("prompt_token_ids"))  # fmt: skip
    apart_by = {"stream": largest_difference(plain.logprobs, streamed.logprobs)}
    if not session.target.missing("prompt_logprobs"):
        scores = await session.endpoint.score(plain.tokens)
        apart_by["score"] = largest_difference(plain.logprobs, scores[len(plain.prompt) :])
    for what, nats in apart_by.items():
        expect(nats <= session.tolerance, f"log-probabilities differ from those of the {what}", nats=nats)
    return {"tokens": len(plain.ids), **apart_by}


def check_continues(before: AnswerTokens, after: Sequence[Mapping[str, Any]]) -> int:
    """How many tokens the answer whose body or events `after` is has of the turn before. Raises Failed unless its prompt begins
    with all of them, and unless it is no branch.
    """
    branches = [own["branch"] for own in map(own_of, after) if "branch" in own]
    expect(not branches, "the turn is a branch", branch=branches)
    prompt = tokens_of(after).prompt
    same = next((i for i, (a, b) in enumerate(zip(before.tokens, prompt, strict=False)) if a != b), None)
    begun = prompt[: len(before.tokens)] == before.tokens
    expect(begun, "the prompt does not begin with the tokens of the turn before",
           first_difference=same, turn=len(before.tokens), prompt=len(prompt))  # fmt: skip
    return len(before.tokens)


async def check_labels(
    session: Session, models: Sequence[str], holders: Sequence[Mapping[str, Any]], spans: Json, tokens: int
) -> Json:
    """Raises Failed unless all `models` and each object `midstream` of `holders` name one snapshot that serves, and the spans
    of `snapshots` cover all tokens.
    """
    known = await serving(session)
    named = {model.partition("@")[2] for model in models}
    named |= {str(own_of(holder).get("snapshot")) for holder in holders}
    expect(len(named) == 1 and named <= {*known}, "the label is not the one snapshot that is served",
           labels=sorted(named), serving=known)  # fmt: skip
    (label,) = named
    wanted = [{"snapshot": label, "start": 0, "end": tokens}]
    expect(spans.get("snapshots") == wanted, f"midstream.snapshots: {wanted} was expected", got=spans)
    return {"label": label, "events": len(holders)}


# Refusals


def names(error: Mapping[str, Any], field: str) -> bool:
    """Whether the error is about `field`: `param` or the message says so."""
    return str(error.get("param") or "").startswith(field) or field in str(error.get("message"))
