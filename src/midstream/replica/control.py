"""Control calls of a replica's port that take their time.

Always holds: an order of a transfer is carried out, whether or not the gateway waits for the answer.
"""

from __future__ import annotations

import asyncio

import msgspec

from midstream.core.decoding import message_of
from midstream.core.errors import InvalidRequest
from midstream.core.sessions import SessionsAsked, SessionTaken
from midstream.core.transfer import TransferOrder
from midstream.core.types import Session
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request
from midstream.replica.exchange import TaskExchange
from midstream.replica.replica import Replica
from midstream.replica.turns.travel import packed

_asked = msgspec.json.Decoder(SessionsAsked)
_taken = msgspec.json.Decoder(SessionTaken)
_transfer = msgspec.json.Decoder(TransferOrder)


def _one_session(request: Request, which: str) -> Session:
    """Raises InvalidRequest."""
    asked = message_of(request.body, _asked, "a question about sessions")
    if asked.key is None:
        raise InvalidRequest(which, param="key")
    return asked.tenant, asked.key


class ControlExchange(TaskExchange):
    def __init__(self, request: Request, client: ClientConnection, replica: Replica) -> None:
        super().__init__(request, client)
        self._replica = replica


class TraceExchange(ControlExchange):
    """The turns of a session, encoded in a thread: they may be many megabytes."""

    async def _answer(self) -> None:
        session = _one_session(self._request, "which session's trace")
        body = await asyncio.to_thread(lambda: msgspec.json.encode({"trace": self._replica.trace(session)}))
        self._whole(200, body, {})


class TurnsExchange(ControlExchange):
    """The turns of a session that moves, for its next home."""

    async def _answer(self) -> None:
        trees = self._replica.trees.all_of(_one_session(self._request, "which session's turns"))
        self._whole(200, await asyncio.to_thread(packed, trees), {})


class TakenExchange(ControlExchange):
    """Another replica has let in a turn of a session that moved. The word may be late: the session may have come back since."""

    async def _answer(self) -> None:
        taken = message_of(self._request.body, _taken, "which session was taken")
        session = taken.tenant, taken.key
        if not self._replica.sessions.placed_since(session, taken.stamp):
            self._replica.budget.taken(session)
        self._whole(200, b"{}", {})


class TransferExchange(ControlExchange):
    """An order about weights that a trainer sends."""

    async def _answer(self) -> None:
        order = message_of(self._request.body, _transfer, "an order of a transfer")
        answer = await self._replica.transfers.answer(order)
        self._whole(200, msgspec.json.encode(answer), {})
