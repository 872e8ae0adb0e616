"""Exchanges of a replica's port: how a response is written, whole or in chunks, at once or by a task.

Always holds: every error has the shape that the request's client reads. The head of a stream is sent with its first event, so
an earlier error has its own status. A stream that fails later ends with an error event; a gateway's is broken off where its
engine died, for the gateway to judge. A client that disconnects ends the
task of its exchange at once.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any

import msgspec

from midstream.core.errors import MidstreamError
from midstream.core.sse import error_event
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request, response_head

log = logging.getLogger(__name__)

_JSON = "application/json"
#: A status, and the value of the JSON body.
Answer = tuple[int, Any]


class Outbox:
    """Bytes for clients, written together at the end of the loop's turn, that is when every stream of a step is encoded.

    A write wakes the client; one between two encodings finds it asleep again each time (see docs/log.md).
    """

    def __init__(self) -> None:
        self._pending: dict[ClientConnection, bytes] = {}

    def add(self, client: ClientConnection, data: bytes) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending[client] = self._pending[client] + data if client in self._pending else data

    def take(self, client: ClientConnection) -> bytes:
        """What has not been written yet; it is the caller's now."""
        return self._pending.pop(client, b"")

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for client, data in pending.items():
            client.write(data)


class BaseExchange(abc.ABC):
    """Writes the head and the body of a response, whole or in chunks. `_fixed`: headers of every response."""

    def __init__(self, request: Request, client: ClientConnection) -> None:
        self._request = request
        self._client = client
        self._fixed: dict[str, str] = {}
        self._started = False
        #: The client takes more. Its connection tells of every change.
        self.writable = client.writable
        self._may_write = asyncio.Event()

    @property
    def answered(self) -> bool:
        return self._started

    @abc.abstractmethod
    def start(self) -> None:
        """Answer the request, now or from here on."""

    def client_paused(self) -> None:
        self.writable = False
        self._may_write.clear()

    def client_resumed(self) -> None:
        self.writable = True
        self._may_write.set()

    def client_gone(self) -> None:  # noqa: B027 - optional to override
        """Nothing is under way."""

    def cut(self, reason: str) -> None:
        self._client.reset()

    def _whole(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        head = {"content-type": _JSON, "content-length": str(len(data)), **headers}
        self._head(status, head, data)

    def _begin(self, headers: Mapping[str, str], data: bytes) -> None:
        """The head of a response of unknown length, with its first data."""
        framing = {} if self._request.http10 else {"transfer-encoding": "chunked"}
        self._head(200, {**framing, **headers}, self._framed(data))

    def _head(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._started = True
        headers = {"date": formatdate(usegmt=True), **headers, **self._fixed}
        head = response_head(status, headers, close=self._client.closes_after_response)
        self._client.write(head + body)

    def _framed(self, data: bytes) -> bytes:
        return data if self._request.http10 else b"%x\r\n%b\r\n" % (len(data), data)

    def _end(self, last: bytes = b"") -> None:
        """The end of a response that `_begin` began."""
        last = self._framed(last) if last else b""
        self._client.write(self._unwritten() + (last if self._request.http10 else last + b"0\r\n\r\n"))

    def _unwritten(self) -> bytes:
        """Bytes that have to be written first."""
        return b""

    def _fail(self, error: MidstreamError) -> None:
        if self._started:
            self._end(error_event(error))
        else:
            self._whole(error.status, msgspec.json.encode(error.body()), error.headers())


class FailedExchange(BaseExchange):
    def __init__(self, request: Request, client: ClientConnection, error: MidstreamError) -> None:
        super().__init__(request, client)
        self._error = error

    def start(self) -> None:
        self._fail(self._error)
        self._client.finish()


class InstantExchange(BaseExchange):
    """A question with a known answer."""

    def __init__(
        self, request: Request, client: ClientConnection, answer: Callable[[Request], Answer]
    ) -> None:
        super().__init__(request, client)
        self._answer = answer

    def start(self) -> None:
        try:
            status, value = self._answer(self._request)
            self._whole(status, msgspec.json.encode(value), {})
        except MidstreamError as error:
            self._fail(error)
        self._client.finish()


class TaskExchange(BaseExchange):
    """A response that takes its time, in a task that ends when the client leaves."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def client_gone(self) -> None:
        self._task.cancel()

    def cut(self, reason: str) -> None:
        self._task.cancel()
        self._client.reset()

    async def _run(self) -> None:
        try:
            await self._answer()
        except MidstreamError as error:
            self._fail(error)
        except Exception:
            # A bug. The client still gets the one error shape, and no stream ends silently.
            log.exception("%s: unexpected failure", line_of(self._request))
            self._fail(MidstreamError("internal error; see the replica's log"))
        self._client.finish()

    @abc.abstractmethod
    async def _answer(self) -> None:
        """The whole response. Raises MidstreamError."""

    async def drained(self) -> None:
        """Returns when the client takes more."""
        await self._may_write.wait()


def line_of(request: Request) -> str:
    return f"{request.method.decode()} {request.target.partition(b'?')[0].decode('latin-1')}"
