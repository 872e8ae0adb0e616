"""Questions that rows of several groups ask. Registers no row.

Always holds: an answer given here has what its question asked for. Otherwise Failed is raised, or Skipped when it cannot be
found out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from midstream.client.status import read_status
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.answers import Answer
from midstream_conformance.endpoint import TRAJECTORY_HEADER, error_of, refusal
from midstream_conformance.outcome import Skipped, expect
from midstream_conformance.session import Session
from midstream_conformance.traffic import Crossing, cross
from midstream_conformance.variants import Variant

GREEDY: dict[str, Any] = {"temperature": 0, "prompt_cache_max_len": 0, "ignore_eos": True}
# A model that generates any bytes has a short answer of whole characters one time in four.
STOP_TRIES = 40


async def plain_and_streamed(
    session: Session, prompt: str | Sequence[Any], *, path: str = "/completions", **fields: Any
) -> tuple[Answer, Answer]:
    """A greedy request, asked plain and as a stream, in one session and without cached KV. prompt: messages, of a chat."""
    headers = {TRAJECTORY_HEADER: session.key()}
    asked = {**GREEDY, **fields}
    plain = await session.endpoint.complete(prompt, headers=headers, path=path, **asked)
    streamed = await session.endpoint.complete(prompt, headers=headers, path=path, stream=True, **asked)
    return plain, streamed


async def everywhere(session: Session, ask: Callable[[str], Awaitable[Answer]]) -> list[Answer]:
    """The answers of `ask(key)`, of every replica at least one.

    Raises Skipped when new sessions do not reach every replica. Where the endpoint does not say who answers, many are asked.
    """
    found = await session.on_every_replica(ask)
    named = [replica for replica in found if replica]
    if named and len(named) < (session.target.replicas or 1):
        raise Skipped(f"new sessions reached {len(named)} of {session.target.replicas} replicas only")
    return [answer for answers in found.values() for answer in answers]


async def serving(session: Session) -> list[str]:
    """The snapshots that the replicas serve, as the hot-load API says, each once."""
    response = await session.endpoint.request("GET", HOT_LOAD_PATH)
    expect(response.status_code == 200, f"GET {HOT_LOAD_PATH}: {refusal(response)}")
    return sorted({str(replica.snapshot) for replica in read_status(response.json()).replicas})


async def together(asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """The answers of requests that are under way at the same time; raises what the first of them raises when all have ended."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in found if isinstance(answer, Answer)]


async def async_crossing(session: Session, old: Variant, new: Variant) -> Crossing:
    """An async switch under traffic, and the scores of what crossed it; made once."""

    async def run(session: Session) -> Crossing:
        async with session.transition("ASYNC"):
            return await cross(session, old, new)

    return await session.once(f"switch from {old} to {new} under traffic", run)


async def must_not_load(session: Session, identity: str, before: str, *, previous: str | None = None) -> str:
    """Signal `identity`, which must be refused with a 400 or fail, while `before` keeps serving. Returns the error."""
    response = await session.snapshots.post(identity, previous=previous)
    if response.is_success:
        said = await session.snapshots.wait_failed(identity)
    else:
        expect(response.status_code == 400, f"400 was expected, got {refusal(response)}")
        said = str(error_of(response).get("message") or "")
    labels = await session.labels()
    expect(labels == [before], f"{before} should keep serving", labels=labels)
    expect(said, "there is no error message")
    return said


def stop_at(text: str) -> int | None:
    """Where a character that is fit to stop at first occurs, behind whole characters only."""
    for at in range(1, len(text.partition("\ufffd")[0])):
        if text[at].isascii() and text[at].isalnum() and text[at] not in text[:at]:
            return at
    return None
