"""The dashboard: a page that shows the server as it runs, and the event stream that feeds it.

    GET /dashboard    GET /dashboard/FILE    GET /dashboard/events

Always holds:
- The page and its files say nothing of the server, so they need no key. The events need a key with `observe`, as the API does;
  sessions, ledgers and policies are read from the API itself, with the same key.
- An open page costs a look a second, which all open pages share. A part is sent when it changed. Nothing is asked of replicas.
- The streams end when this process listens no more, so that they do not hold up its end; the page opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from midstream.api.board import Board
from midstream.api.pages import Pages, kinds_of
from midstream.core.endpoints import HTML, Endpoint
from midstream.core.pages import DASHBOARD, DASHBOARD_EVENTS, DASHBOARD_FILES
from midstream.core.scopes import OBSERVE, Grant, ScopeNeed
from midstream.fleet.access import grant_of

LOOK_EVERY_S = 1.0
#: A stream on which nothing changes says so, so that whatever is between knows that it is alive.
QUIET_S = 15.0


class DashboardApi:
    """listening: whether this process takes new connections."""

    def __init__(self, board: Board, listening: Callable[[], bool]) -> None:
        self._pages = Pages("midstream.dashboard", ("index.html", *DASHBOARD_FILES))
        self._board, self._listening = board, listening
        self._looked_at = float("-inf")
        # What is shown to a grant, encoded once for all pages of such keys.
        self._shown: dict[Grant, dict[str, bytes]] = {}

    @Endpoint("GET", DASHBOARD, None, "Shows the dashboard.", kinds=HTML)
    async def page(self, request: Request) -> Response:
        return self._pages.shown(request, "index.html")

    @Endpoint(
        "GET",
        DASHBOARD + "/{file}",
        None,
        "Gives a file of the dashboard.",
        kinds=kinds_of(DASHBOARD_FILES),
        files=DASHBOARD_FILES,
    )
    async def file(self, request: Request) -> Response:
        return self._pages.shown(request, request.path_params["file"])

    @Endpoint(
        "GET",
        DASHBOARD_EVENTS,
        ScopeNeed((OBSERVE,), "some"),
        "Streams what the dashboard shows.",
        kinds=("text/event-stream",),
    )
    async def events(self, request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            self._stream(grant_of(request)), media_type="text/event-stream", headers=headers
        )

    async def _stream(self, grant: Grant) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        sent: dict[str, bytes] = {}
        swap = sample = 0
        spoke_at = clock()
        while True:
            # Asked first: a process that is about to listen has no page open.
            ends = not self._listening()
            found = self._look(grant)
            parts = [_event(name, data) for name, data in found.items() if sent.get(name) != data]
            sent = found
            if swaps := self._board.swaps(grant, swap):
                swap = max(one.number for one in swaps)
                parts.append(_event("swaps", msgspec.json.encode(swaps)))
            if samples := list(self._board.samples(grant, sample)):
                sample = samples[-1][0]
                parts.append(_event("samples", msgspec.json.encode([one for _, one in samples])))
            if not parts and clock() - spoke_at >= QUIET_S:
                parts.append(b": nothing changed\n\n")
            if parts:
                spoke_at = clock()
                yield b"".join(parts)
            if ends:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, grant: Grant) -> dict[str, bytes]:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_EVERY_S / 2:
            self._looked_at = now
            self._board.look()
            self._shown.clear()
        found = self._shown.get(grant)
        if found is None:
            sections = self._board.sections(grant)
            found = self._shown[grant] = {name: msgspec.json.encode(of) for name, of in sections.items()}
        return found


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
