"""The turns of a session that moved here, fetched from its home before, so that its next turn continues them token for token.

Always holds: the turn that brings its session here waits for them, and so does every other turn of the session. If the home
before does not answer, the session goes on without them, and its response says so as after the loss of a replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import unquote

import msgspec

from midstream.core.headers import HEADER_MOVED, HEADER_SESSION, HEADER_TENANT, HEADER_TOKEN
from midstream.core.price import Moved
from midstream.core.sessions import SessionsAsked
from midstream.core.types import Session
from midstream.core.versions import from_header
from midstream.http.call import CallFailed, call
from midstream.http.tls import tls_for
from midstream.replica.turns.travel import unpacked
from midstream.replica.turns.tree import Trees

log = logging.getLogger(__name__)

PATH_TURNS = "/replica/turns"
FETCH_S = 5.0


class EarlierTurns:
    """token: what replicas ask for; "": nothing."""

    def __init__(self, trees: Trees, token: str = "") -> None:
        self._trees = trees
        self._token = f"{HEADER_TOKEN}: {token}\r\n" if token else ""
        self._fetching: dict[Session, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"EarlierTurns({len(self._fetching)} fetched)"

    async def bring(self, headers: Mapping[str, str]) -> None:
        """Returns once the turns of the request's session are here, if it moved."""
        moved = headers.get(HEADER_MOVED)
        if moved is None and not self._fetching:
            # Nearly always.
            return
        session = headers.get(HEADER_TENANT, ""), unquote(headers.get(HEADER_SESSION, ""))
        task = self._fetching.get(session)
        if task is None and moved is not None:
            given = from_header(moved, Moved)
            if given is None or not given.url or not session[1]:
                return
            task = self._fetching[session] = asyncio.create_task(self._fetch(session, given.url))
            task.add_done_callback(lambda _: self._fetching.pop(session, None))
        if task is not None:
            # A client that leaves takes nothing from the others that wait for it.
            await asyncio.shield(task)

    async def _fetch(self, session: Session, url: str) -> None:
        asked = msgspec.json.encode(SessionsAsked(tenant=session[0], key=session[1]))
        try:
            answer = await call(url, "POST", PATH_TURNS, asked, FETCH_S, self._token, tls=tls_for(url, None))
            if answer.status != 200:
                raise CallFailed(answer.message)
            self._trees.bring(session, await asyncio.to_thread(unpacked, answer.body))
        except (CallFailed, ValueError) as error:
            log.warning("turns of a session that moved here stayed at %s: %s", url, error)
