"""Calls of paths beside OpenAI's, named from the root. Registers no row.

Always holds: a call names the model and the deployment, so that it is for them where the endpoint has several.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from midstream_conformance.answers import Json, data_of
from midstream_conformance.checks.wires import body_of, names
from midstream_conformance.endpoint import error_of, refusal
from midstream_conformance.outcome import expect, fail
from midstream_conformance.session import Session


async def call(
    session: Session,
    path: str,
    body: Json | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
) -> httpx.Response:
    """The response, whatever its status."""
    named = {**session.endpoint.hot_load_headers, **(headers or {})}
    return await session.endpoint.request(method, path, body, named)


async def answered(
    session: Session,
    path: str,
    body: Json | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "POST",
) -> Json:
    """The object that a 200 has. Raises Failed on another status."""
    return body_of(await call(session, path, body, headers, method=method), path)


async def streamed(
    session: Session, path: str, body: Json, headers: Mapping[str, str] | None = None
) -> list[Json]:
    """The events before [DONE]. Raises Failed unless the stream ends with it, and at an error inside."""
    response = await call(session, path, {**body, "stream": True}, headers)
    expect(response.status_code == 200, f"{path} (stream): {refusal(response)}")
    *blocks, rest = response.content.replace(b"\r\n", b"\n").split(b"\n\n")
    expect(not rest.strip(), f"{path}: the stream ends inside an event", rest=str(rest[:80]))
    events = [event for event in map(data_of, blocks) if event is not None]
    expect(
        events[-1:] == ["[DONE]"],
        f"{path}: the stream's last event is not [DONE]",
        last=str(events[-1:])[:80],
    )
    found = [event for event in events if isinstance(event, dict)]
    expect(len(found) == len(events) - 1, f"{path}: [DONE] comes more than once")
    for event in found:
        if event.get("error"):
            fail(f"{path} (stream): ended with the error {event['error']}")
    return found


def refused(response: httpx.Response, what: str, field: str) -> None:
    """Raises Failed unless it is a 400 with an error object that names `field`."""
    expect(response.status_code == 400, f"{what}: 400 was expected, got {refusal(response)}")
    error = error_of(response)
    expect(
        error.get("message") and names(error, field), f"{what}: the error does not name {field}", error=error
    )
