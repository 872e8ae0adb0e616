"""Control calls of a replica's port that take their time, and the reading of the bodies of all of them.

Always holds: a body that cannot be read is an InvalidRequest that says what it should be.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import InvalidRequest
from midstream.core.sessions import SessionsAsked
from midstream.core.transfer import TransferOrder
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request
from midstream.replica.exchange import TaskExchange
from midstream.replica.replica import Replica

_asked = msgspec.json.Decoder(SessionsAsked)
_transfer = msgspec.json.Decoder(TransferOrder)

_Body = TypeVar("_Body")


def decoded(request: Request, decoder: msgspec.json.Decoder[_Body], what: str) -> _Body:
    try:
        return decoder.decode(request.body)
    except NOT_JSON as error:
        raise InvalidRequest(f"not {what}: {error}") from error


class TraceExchange(TaskExchange):
    """The turns of a session, encoded in a thread: they may be many megabytes."""

    def __init__(self, request: Request, client: ClientConnection, replica: Replica) -> None:
        super().__init__(request, client)
        self._replica = replica

    async def _answer(self) -> None:
        asked = decoded(self._request, _asked, "a question about sessions")
        if asked.key is None:
            raise InvalidRequest("which session's trace", param="key")
        session = (asked.tenant, asked.key)
        body = await asyncio.to_thread(lambda: msgspec.json.encode({"trace": self._replica.trace(session)}))
        self._whole(200, body, {})


class TransferExchange(TaskExchange):
    """An order about weights that a trainer sends. It is carried out, whether or not the gateway waits for the answer."""

    def __init__(self, request: Request, client: ClientConnection, replica: Replica) -> None:
        super().__init__(request, client)
        self._replica = replica

    async def _answer(self) -> None:
        order = decoded(self._request, _transfer, "an order of a transfer")
        answer = await self._replica.transfers.answer(order)
        self._whole(200, msgspec.json.encode(answer), {})
