"""A small HTTP/1.1 client for calls of our own: a gateway's to replicas, a replica's to vLLM, the supervisor's and the Tinker
front's to a gateway. `pooled_call` takes a connection of http/upstream.py, the others open one for themselves.

Proxied bytes do not pass here.
Always holds: `call` and `open_stream` send one request, and `ended` is set exactly once, when the response is complete or the
connection is gone, which probes show if nothing else does. `pooled_call` sends a request again at most once, if the server
closed a connection that was idle until then and answered nothing. docs/decisions/0032 says why this is not httpx.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import httptools

from midstream.core.call_attempts import CallAttempts, Heard, NoAnswer
from midstream.core.http_answer import HttpAnswer
from midstream.core.probes import PROBED
from midstream.http.upstream import UpstreamConnection, UpstreamHead, UpstreamPool


class CallFailed(Exception):
    """The other side refused the connection, broke it, or did not speak HTTP."""


class NotListening(CallFailed):
    """No process listens at the address."""


class NotTrusted(CallFailed):
    """The other side's certificate is not one that the caller trusts, or not for its address."""


class Lost(CallFailed):
    """The connection ended before the response did: the other side may have worked on the request."""


class _Unanswered(Lost):
    """Not a byte of a response had come."""


class _Complete(Exception):
    """The response has ended."""


class ResponseStream(asyncio.Protocol):
    """Sends `request` on connect and hands the decoded body to `on_body` as it arrives, all of a read in one piece.

    `ended` resolves to None after a complete response and to the reason after anything else.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._take_body = on_body
        # Of this read.
        self._parts: list[bytes] = []
        # Set before the parser is made, which looks it up once.
        self.on_body = self._parts.append
        # While it is connected: they refer to each other.
        self._parser: httptools.HttpResponseParser
        self.status = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            try:
                self._parser.feed_data(data)
            finally:
                # Also of what came before an error.
                self._hand_on()
        except Exception as error:  # noqa: BLE001 - the response ends with what its consumer raised
            self._end(f"bad response: {_cause(error)}")

    def _hand_on(self) -> None:
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._take_body(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self._hand_on()
            self._end(None)
            # What follows is parsed no further.
            raise _Complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc else "connection closed before the response ended")
        del self._parser

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self.abort()


def _cause(error: BaseException) -> BaseException:
    """What the parser's caller raised, if it raised something. Who kept it would be kept by its traceback."""
    return (isinstance(error, httptools.HttpParserError) and error.__context__) or error


async def open_stream(
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    on_body: Callable[[bytes], None],
    timeout_s: float,
    headers: str = "",
    *,
    tls: ssl.SSLContext | None = None,
) -> ResponseStream:
    """Connect and send; the response arrives through `on_body`. Raises CallFailed when connecting fails.

    `headers`: further header lines, each with its line end; each character is one byte (Latin-1). tls: of an https URL.
    """
    stream = ResponseStream(_request(url, method, path, body, headers), on_body)
    await _connect(stream, url, timeout_s, tls)
    return stream


async def call(
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    timeout_s: float | None,
    headers: str = "",
    *,
    connect_s: float | None = None,
    tls: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """The answer to one request. Raises CallFailed on anything but a response complete in time.

    timeout_s: of the response, in seconds; None waits for as long as the connection lasts. connect_s: of the connection;
    None: as timeout_s. tls: of an https URL.
    """
    whole = _WholeResponse(_request(url, method, path, body, headers))
    await _connect(whole, url, timeout_s if connect_s is None else connect_s, tls)
    try:
        async with asyncio.timeout(timeout_s):
            reason = await whole.ended
    except TimeoutError as error:
        raise CallFailed(f"no response within {timeout_s:g} s") from error
    finally:
        whole.abort()
    if reason is not None:
        raise Lost(reason)
    return HttpAnswer(whole.status, whole.headers, b"".join(whole.parts))


async def pooled_call(
    pool: UpstreamPool,
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    timeout_s: float,
    headers: str = "",
) -> HttpAnswer:
    """As `call`, over a connection of the pool to `url`, which decodes. The request must be one that may come twice.

    timeout_s: of the response, and of a connection that has to be opened."""
    request = _request(url, method, path, body, headers)
    idle = pool.take()
    if idle is not None:
        with contextlib.suppress(_Unanswered):
            return await _over(idle, request, timeout_s)
    async with _connecting(timeout_s):
        opened = await pool.open()
    return await _over(opened, request, timeout_s)


async def _over(connection: UpstreamConnection, request: bytes, timeout_s: float) -> HttpAnswer:
    """Raises CallFailed."""
    taken = _Taken()
    connection.send(taken, request, b"", head_request=False)
    try:
        async with asyncio.timeout(timeout_s):
            return await taken.answer
    except TimeoutError as error:
        raise CallFailed(f"no response within {timeout_s:g} s") from error
    finally:
        if not taken.over:
            connection.abandon()


class _Taken:
    """A sink of one response."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        #: The connection has no more to say of it.
        self.over = False
        self._head: UpstreamHead
        self._parts: list[bytes] = []

    def response_head(self, head: UpstreamHead) -> None:
        self._head = head
        self._parts.append(head.body)

    def response_body(self, data: bytes) -> None:
        self._parts.append(data)

    def response_end(self) -> None:
        self.over, head = True, self._head
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.first.items()}
        if not self.answer.done():
            self.answer.set_result(HttpAnswer(head.status, headers, b"".join(self._parts)))

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        self.over = True
        if not self.answer.done():
            self.answer.set_exception(Lost(reason) if answered else _Unanswered(reason))


async def until_answered(
    attempts: CallAttempts,
    send: Callable[[], Awaitable[HttpAnswer]],
    sleep: Callable[[float], Awaitable[None]],
) -> HttpAnswer:
    """The answer that `attempts` takes. Raises its errors. send: makes one attempt, which may raise CallFailed."""
    while True:
        attempts.begin()
        heard: Heard
        try:
            heard = await send()
        except CallFailed as error:
            heard = NoAnswer(str(error), lost=isinstance(error, Lost))
        step = attempts.after(heard)
        if isinstance(step, HttpAnswer):
            return step
        await sleep(step)


class _WholeResponse(ResponseStream):
    def __init__(self, request: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        super().__init__(request, self.parts.append)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


def _request(url: str, method: str, path: str, body: bytes | None, headers: str) -> bytes:
    # A host may have letters of any script.
    head = f"{method} {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n".encode()
    head += headers.encode("latin-1")
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
    return head + b"\r\n" + (body or b"")


async def _connect(
    stream: ResponseStream, url: str, timeout_s: float | None, tls: ssl.SSLContext | None
) -> None:
    """Raises CallFailed."""
    parts = urlsplit(url)
    secure = tls if parts.scheme == "https" else None
    if parts.scheme == "https" and secure is None:
        raise CallFailed(f"{url}: no certificates are given to check it against")
    port = parts.port or (443 if secure else 80)
    async with _connecting(timeout_s):
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: stream, parts.hostname or "", port, ssl=secure
        )
        # It may have ended already. uvloop has no socket then.
        with contextlib.suppress(OSError):
            for option in PROBED if (sock := transport.get_extra_info("socket")) else ():
                sock.setsockopt(*option)


@asynccontextmanager
async def _connecting(timeout_s: float | None) -> AsyncIterator[None]:
    """Raises CallFailed for what fails within."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise CallFailed(f"no connection within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise NotListening(str(error)) from error
    except ssl.SSLCertVerificationError as error:
        raise NotTrusted(str(error)) from error
    except OSError as error:
        raise CallFailed(str(error) or type(error).__name__) from error
