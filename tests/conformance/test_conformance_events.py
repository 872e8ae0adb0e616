"""Streams of named events, read: what a client would lose or misread is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted import MODEL, Scripted

from midstream_conformance.answers import Json, Odd
from midstream_conformance.checks import messages, responses
from midstream_conformance.checks.wires import Order, check_order, events_of
from midstream_conformance.outcome import Failed
from midstream_conformance.session import Session
from midstream_conformance.target import Target

pytestmark = pytest.mark.fast

PING = 'event: ping\ndata: {"type": "ping"}\n\n'


def read(text: str, content_type: str = "text/event-stream; charset=utf-8") -> list[Json]:
    server = Scripted()
    server.on["POST", "/v1/messages"] = lambda _: httpx.Response(
        200, content=text.encode(), headers={"content-type": content_type}
    )
    session = Session(server.endpoint(), Target(MODEL, midstream=False), None, tolerance=0.05, limit_s=10)
    return asyncio.run(events_of(session, "/messages", {}))


def test_events_are_read_whatever_the_line_ends_and_comments_are_none() -> None:
    text = ': a comment\n\n{PING}event: x\r\ndata: {"type": "x",\r\ndata: "text": "\u2028"}\r\n\r\n'
    assert read(text.replace("{PING}", PING)) == [{"type": "ping"}, {"type": "x", "text": "\u2028"}]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (PING.replace("event: ping", "event: pong"), Odd, "is named 'pong'"),
        (PING.removeprefix("event: ping\n"), Odd, "is named ''"),
        ('event: ping\ndata: {"kind": "ping"}\n\n', Odd, "has no type"),
        (PING + PING[:-2], Odd, "ends inside an event"),
        (PING + 'event: error\ndata: {"type": "error", "error": {"message": "gone"}}\n\n', Failed, "gone"),
    ],
)
def test_a_stream_that_a_client_could_not_read_is_found(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read(text)


def test_json_where_a_stream_was_asked_for_is_none() -> None:
    with pytest.raises(Failed, match="content-type"):
        read("{}", "application/json")


WHOLE: dict[str, tuple[Order, str]] = {
    "messages": (
        messages.ORDER,
        "message_start ping content_block_start content_block_delta content_block_stop message_delta message_stop",
    ),
    "responses": (
        responses.ORDER,
        " ".join(
            "response." + name
            for name in (
                *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
                *("output_text.done", "content_part.done", "output_item.done", "completed"),
            )
        ),
    ),
}


@pytest.mark.parametrize("wire", WHOLE)
def test_an_order_is_broken_by_each_event_that_is_missing_doubled_or_late(wire: str) -> None:
    order, names = WHOLE[wire]
    right: list[Any] = [{"type": name} for name in names.split()]
    check_order(order, right)
    # Deltas may be many or none, and nobody waits for a ping.
    free = [event["type"].endswith(("delta", "ping")) and event["type"] != "message_delta" for event in right]
    changes: list[Callable[[int], list[Any]]] = [
        lambda i: right[:i] + right[i + 1 :],
        lambda i: right[: i + 1] + right[i:],
        lambda i: right[:i] + right[i + 1 : i + 2] + right[i : i + 1] + right[i + 2 :],
    ]
    for position in range(len(right)):
        last = position == len(right) - 1
        for change in changes[:2] if last else changes:
            near = free[position] or (change is changes[2] and "ping" in right[position + 1]["type"])
            if not near:
                with pytest.raises(Failed):
                    check_order(order, change(position))
