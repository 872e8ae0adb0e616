"""A small HTTP/1.1 client for calls of our own: a gateway's to replicas, a replica's to vLLM. One connection, one request, one
response.

Proxied bytes do not pass here: they go through http/upstream.py.
Always holds: nothing is retried, nothing is pooled, and `ended` is set exactly once, when the response is
complete or the connection is gone. docs/decisions/0032 says why this is not httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools


class CallFailed(Exception):
    """The other side refused the connection, broke it, or did not speak HTTP."""


class NotListening(CallFailed):
    """Nobody listens at the address."""


class _Complete(Exception):
    """The response has ended."""


class ResponseStream(asyncio.Protocol):
    """Sends `request` on connect and hands the decoded body to `on_body` as it arrives.

    `ended` resolves to None after a complete response and to the reason after anything else.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        # Set before the parser is made, which looks it up once.
        self.on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # The context is the exception that on_body raised, if it raised one.
            cause = error.__context__ or error
            self._end(f"bad response: {cause}")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self._end(None)
            # What follows is parsed no further.
            raise _Complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc else "connection closed before the response ended")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self.abort()


async def open_stream(
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    on_body: Callable[[bytes], None],
    timeout_s: float,
    headers: str = "",
) -> ResponseStream:
    """Connect and send; the response arrives through `on_body`. Raises CallFailed when connecting fails.

    `headers`: further header lines, each with its line end.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{headers}"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"\r\n" + (body or b"")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, stream = await loop.create_connection(lambda: ResponseStream(request, on_body), host, port)
    except TimeoutError as error:
        raise CallFailed(f"no connection within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise NotListening(str(error)) from error
    except OSError as error:
        raise CallFailed(str(error)) from error
    return stream


async def call(
    url: str, method: str, path: str, body: bytes | None, timeout_s: float, headers: str = ""
) -> tuple[int, bytes]:
    """Status and body of one exchange. Raises CallFailed on anything but a response complete in time."""
    parts: list[bytes] = []
    stream = await open_stream(url, method, path, body, parts.append, timeout_s, headers)
    try:
        async with asyncio.timeout(timeout_s):
            reason = await stream.ended
    except TimeoutError as error:
        raise CallFailed(f"no response within {timeout_s:g} s") from error
    finally:
        stream.abort()
    if reason is not None:
        raise CallFailed(reason)
    return stream.status, b"".join(parts)
