"""The turns of a session that moved here, fetched from its home before, so that its next turn continues them token for token.

Always holds:
- The turn that brings its session here waits for them, and so does every other turn of the session. If the home before does
  not answer, the session goes on without them, and its response says so as after the loss of a replica.
- The home before learns that the session is taken once a turn of it was let in here, and not before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import unquote

import msgspec

from midstream.core.headers import HEADER_MOVED, HEADER_SESSION, HEADER_TENANT, HEADER_TOKEN
from midstream.core.price import Moved
from midstream.core.sessions import SessionsAsked, SessionTaken
from midstream.core.types import Session
from midstream.core.versions import from_header
from midstream.http.call import CallFailed, call
from midstream.http.tls import tls_for
from midstream.replica.sessions import stamp_of
from midstream.replica.turns.travel import unpacked
from midstream.replica.turns.tree import Trees

log = logging.getLogger(__name__)

PATH_TURNS, PATH_TAKEN = "/replica/turns", "/replica/sessions/taken"
#: The kernel of a machine that runs accepts a connection at once, however slow the process is. So a machine that is gone holds
#: up a turn for CONNECT_S, and a process that hangs or is slow for FETCH_S.
CONNECT_S, FETCH_S = 1.0, 5.0


class EarlierTurns:
    """token: what replicas ask for; "": nothing."""

    def __init__(self, trees: Trees, token: str = "") -> None:
        self._trees = trees
        self._token = f"{HEADER_TOKEN}: {token}\r\n" if token else ""
        #: By session, of all that are on their way.
        self.fetching: dict[Session, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"EarlierTurns({len(self.fetching)} fetched, {len(self._telling)} told)"

    async def bring(self, headers: Mapping[str, str]) -> None:
        """Returns once the turns of the request's session are here. Needed if it moved, and while any are fetched."""
        session = _session(headers)
        task = self.fetching.get(session)
        if task is None and (url := _home_before(headers)):
            task = self.fetching[session] = asyncio.create_task(self._fetch(session, url))
            task.add_done_callback(lambda _: self.fetching.pop(session, None))
        if task is not None:
            # A client that leaves takes nothing from the others that wait for it.
            await asyncio.shield(task)

    def let_in(self, headers: Mapping[str, str]) -> None:
        """A request was let in that brought its session here. The home before need keep nothing for that."""
        if (url := _home_before(headers)) and (stamp := stamp_of(headers)):
            tenant, key = _session(headers)
            task = asyncio.create_task(self._tell(SessionTaken(tenant=tenant, key=key, stamp=stamp), url))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _fetch(self, session: Session, url: str) -> None:
        try:
            data = await self._ask(PATH_TURNS, SessionsAsked(tenant=session[0], key=session[1]), url)
            self._trees.bring(session, await asyncio.to_thread(unpacked, data))
        except (CallFailed, ValueError) as error:
            log.warning("turns of a session that moved here stayed at %s: %s", url, error)

    async def _tell(self, taken: SessionTaken, url: str) -> None:
        try:
            await self._ask(PATH_TAKEN, taken, url)
        except CallFailed as error:
            # It keeps the session's KV for as long as that may be silent.
            log.debug("%s was not told that a session has moved here: %s", url, error)

    async def _ask(self, path: str, about: SessionsAsked | SessionTaken, url: str) -> bytes:
        """Raises CallFailed."""
        asked = msgspec.json.encode(about)
        tls = tls_for(url, None)
        # The process itself takes part in a TLS connection.
        connect_s = FETCH_S if tls else CONNECT_S
        answer = await call(url, "POST", path, asked, FETCH_S, self._token, connect_s=connect_s, tls=tls)
        if answer.status != 200:
            raise CallFailed(answer.message)
        return answer.body


def _session(headers: Mapping[str, str]) -> Session:
    return headers.get(HEADER_TENANT, ""), unquote(headers.get(HEADER_SESSION, ""))


def _home_before(headers: Mapping[str, str]) -> str:
    """Its URL; "": the request did not bring its session here, or the home before has nothing of it."""
    moved = from_header(headers.get(HEADER_MOVED, ""), Moved)
    return "" if moved is None or not headers.get(HEADER_SESSION) else moved.url
