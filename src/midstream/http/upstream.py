"""Pooled HTTP/1.1 connections: the replica side of the data path, with bodies passed on untouched, and calls (call.py).

The parser finds the end of the head, the status and the end of the message; it never builds the body. A plain head (plain.py)
does not need it, nor does the whole response of such a head.
Always holds:
- A connection serves one exchange at a time. It goes back to the pool only after a complete response that leaves it clean.
  Anything unexpected closes it.
- Body bytes are handed on in the read that brought them, still in their framing (chunked or by length).
- A response with neither length nor chunks is an error and never passed on: its end would look like a crash.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from midstream.http.plain import HEAD_BYTES_MAX, HEAD_END, Header, HeaderLines, NotPlain
from midstream.http.tls import tls_for

MAX_RESPONSE_HEAD_BYTES = 256 * 2**10
# The end of a body in chunks.
_LAST_LINES = b"\r\n\r\n"
# Below this size, one copy is cheaper than a second buffer.
JOINED_BODY_BYTES_MAX = 16 * 2**10
_OK = b"HTTP/1.1 200 OK\r\n"
# What the parser gets for a plain head, to read the chunks that follow.
_CHUNKED_HEAD = _OK + b"transfer-encoding: chunked\r\n\r\n"
_header_lines = HeaderLines((b"upgrade", b"proxy-connection"), chunked=True)
# A look at a method of a dictionary's subclass takes as long as reading two lines.
_read_line = _header_lines.__getitem__
PARSING_FAILED = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class UpstreamHead(msgspec.Struct, frozen=True):
    """`reason` is the status line after the code; header names are lower-case; `first` has the first header of each name;
    `body` came with the head."""

    status: int
    reason: bytes
    headers: list[Header]
    first: Mapping[bytes, bytes]
    body: bytes


class ResponseSink(Protocol):
    """What takes a response, in the order: head with the first of the body, more body, then end; or lost
    instead of the rest."""

    def response_head(self, head: UpstreamHead) -> None: ...
    def response_body(self, data: bytes) -> None: ...
    def response_end(self) -> None: ...
    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        """The connection is gone. `answered`: at least one byte of a response had arrived."""


def _nobody(data: bytes) -> None:
    """No response is under way: an idle connection holds nothing of the last exchange."""


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        # What was decoded of the body and not handed on. None: the body is handed on in its framing.
        self._decoded: list[bytes] | None = None
        # Whether a chunk has begun and is not over comes first. The parser's calls turn it round at both, in C.
        self._in_chunk = [False, True]
        self.on_chunk_header = self.on_chunk_complete = self._in_chunk.reverse
        # While it is connected: they refer to each other.
        self._parser: httptools.HttpResponseParser
        self._transport: asyncio.Transport
        self._sink: ResponseSink | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = b""
        self._head_request = False
        self._in_body = False
        self._complete = False
        # Something follows the response.
        self._extra = False
        # Bytes of the body that are still to come, where the head says its length.
        self._left: int | None = None
        self._keep_alive = False
        self._paused = False
        # The server's answer is no HTTP response.
        self.malformed = False
        #: Gets the body behind its head: of each response the sink's own, until the sink names another.
        self.take_body: Callable[[bytes], object] = _nobody

    # -- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._parser = self._new_parser()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.closed(self)
        self._lose(f"connection lost: {exc}" if exc else "connection closed before the response ended")
        # It refers to this connection, which would wait for a collection.
        del self._parser

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        # The server of an idle connection has nothing to say.
        if sink is None:
            self._transport.abort()
            return
        if not self._in_body:
            if not self._head and self._take_plain(sink, data):
                return
            self._head += data
            self._read_head(sink)
            return
        try:
            self._parser.feed_data(data)
        except PARSING_FAILED as error:
            self._break(f"bad response: {error.__context__ or error}")
            return
        # Most reads of a stream do not end it, and need no more.
        if (self._complete or self._left is not None) and not self._ends_well(data):
            return
        take_body = self.take_body
        take_body(data if self._decoded is None else self._take_decoded())
        if self._complete and self._sink is sink:
            self._finish(sink)

    # -- the parser's calls

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers pass with the body.
        if not self._in_body:
            self._headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # -- an exchange's calls

    def send(self, sink: ResponseSink, head: bytes, body: bytes, *, head_request: bool) -> None:
        """Send one request and deliver its response to `sink`."""
        assert self._sink is None
        self._sink, self.take_body = sink, sink.response_body
        self._head_request = head_request
        self._in_body = self._complete = self._extra = False
        self._head = b""
        self._headers = []
        if len(body) < JOINED_BODY_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def abandon(self) -> None:
        """Close without waiting for the rest: the replica sees the disconnect and stops generating."""
        self._sink = None
        self._transport.abort()

    @property
    def answering(self) -> bool:
        """At least one byte of the response has arrived."""
        return self._in_body or bool(self._head)

    @property
    def in_chunk(self) -> bool:
        """The last byte handed on lies within a chunk's data."""
        return self._in_chunk[0]

    # -- inside

    def _new_parser(self) -> httptools.HttpResponseParser:
        return httptools.HttpResponseParser(self)

    def _take_plain(self, sink: ResponseSink, data: bytes) -> bool:
        """Take a read with a plain head, if the response is whole or comes in chunks. False: nothing has changed."""
        if not data.startswith(_OK) or self._head_request:
            return False
        end = data.find(HEAD_END, len(_OK), HEAD_BYTES_MAX)
        if end < 0:
            return False
        try:
            headers = [*map(_read_line, data[len(_OK) : end].split(b"\r\n"))]
        except NotPlain:
            return False
        first = dict(headers)
        if len(first) != len(headers):
            return False
        rest = data[end + len(HEAD_END) :]
        length = first.get(b"content-length")
        if b"transfer-encoding" in first:
            if length is not None or self._decoded is not None:
                return False
            self._in_body, self._left = True, None
            self._parser.feed_data(_CHUNKED_HEAD)
            self._deliver(sink, UpstreamHead(200, b"OK", headers, first, rest))
            return True
        if length is None or len(rest) != int(length):
            return False
        self._in_body = self._complete = self._keep_alive = True
        sink.response_head(UpstreamHead(200, b"OK", headers, first, rest))
        if self._sink is sink:
            self._finish(sink)
        return True

    def _read_head(self, sink: ResponseSink) -> None:
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = self._head[: end + 4], self._head[end + 4 :]
            self._head = rest
            if not self._feed(head):
                return
            status = self._parser.get_status_code()
            # An interim response is not for the client.
            if status < 200 and status != 101:
                self._headers = []
                self._complete = False
                continue
            self._deliver_head(sink, status, head, rest)
            return
        if len(self._head) > MAX_RESPONSE_HEAD_BYTES:
            self._break("the response head is too large")

    def _deliver_head(self, sink: ResponseSink, status: int, head: bytes, rest: bytes) -> None:
        first = dict(reversed(self._headers))
        # The parser cannot know that no body follows.
        if self._head_request:
            self._parser = self._new_parser()
            self._complete = self._keep_alive = True
        elif not (self._complete or b"content-length" in first or b"transfer-encoding" in first):
            self._break("the response has neither a length nor chunks")
            return
        self._in_body = True
        self._head = b""
        reason = head[13 : head.index(b"\r\n")]
        length = first.get(b"content-length")
        self._left = None if length is None or self._complete else int(length.strip().lstrip(b"0") or 0)
        # There is no body.
        if self._complete:
            self._extra = bool(rest)
            rest = b""
        self._deliver(sink, UpstreamHead(status, reason, self._headers, first, rest))

    def _deliver(self, sink: ResponseSink, head: UpstreamHead) -> None:
        rest = head.body
        if rest and not (self._feed(rest) and self._ends_well(rest)):
            return
        if self._decoded is not None:
            head = msgspec.structs.replace(head, body=self._take_decoded())
        sink.response_head(head)
        if self._complete and self._sink is sink:
            self._finish(sink)

    def _finish(self, sink: ResponseSink) -> None:
        self._sink, self.take_body = None, _nobody
        if self._paused:
            self.resume()
        if self._keep_alive and not self._extra and not self._transport.is_closing():
            self._pool.give_back(self)
        else:
            self._transport.abort()
        sink.response_end()

    def _feed(self, data: bytes) -> bool:
        try:
            self._parser.feed_data(data)
        except PARSING_FAILED as error:
            self._break(f"bad response: {error.__context__ or error}")
            return False
        return True

    def _ends_well(self, data: bytes) -> bool:
        """False if `data`, which was parsed, has more than the response: then the connection is broken."""
        if self._left is not None:
            self._left -= len(data)
        if self._extra or (self._complete and self._goes_on(data)):
            self._break("bytes follow the end of the response")
            return False
        return True

    def _goes_on(self, data: bytes) -> bool:
        """Whether empty lines follow the response's end, which is in `data`. The parser passes them over."""
        if self._left is not None:
            return self._left < 0
        tail = data[-len(_LAST_LINES) - 1 :]
        return not _LAST_LINES.endswith(tail[len(tail.rstrip(b"\r\n")) :])

    def _take_decoded(self) -> bytes:
        data = b"".join(self._decoded or ())
        self._decoded = []
        return data

    def _break(self, reason: str) -> None:
        self.malformed = True
        self._transport.abort()
        self._lose(reason, answered=True)

    def _lose(self, reason: str, *, answered: bool = False) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.upstream_lost(reason, answered=answered or self.answering)


class DecodingConnection(UpstreamConnection):
    """It hands on the decoded body: to HTTP/1.0 clients, which do not know chunks, and to calls of our own."""

    def __init__(self, pool: UpstreamPool) -> None:
        super().__init__(pool)
        self._decoded = []

    def on_body(self, data: bytes) -> None:
        assert self._decoded is not None
        self._decoded.append(data)


Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]
#: Connections that are kept open without a request.
IDLE_MAX = 1024


class UpstreamPool:
    """Connections to one server: idle ones are reused, the most recently used first."""

    def __init__(self, connect: Connect, connect_timeout_s: float, *, decodes: bool = False) -> None:
        """`connect` opens one connection for a protocol factory, e.g. loop.create_connection with an address. decodes: all
        that are kept decode, else none."""
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._decodes = decodes
        self._kept_max = IDLE_MAX
        self._idle: list[UpstreamConnection] = []
        self._all: dict[UpstreamConnection, None] = {}

    def __repr__(self) -> str:
        return f"UpstreamPool({len(self._all)} open, {len(self._idle)} idle)"

    def take(self) -> UpstreamConnection | None:
        """An idle connection, or None. It may turn out to be stale: then nothing answers before it is lost."""
        while self._idle:
            connection = self._idle.pop()
            if not connection._transport.is_closing():
                return connection
        return None

    async def open(self, *, decode: bool = False) -> UpstreamConnection:
        """A fresh connection. Raises OSError, TimeoutError among them."""
        kind = DecodingConnection if decode or self._decodes else UpstreamConnection
        made: list[UpstreamConnection] = []

        def factory() -> asyncio.Protocol:
            made.append(kind(self))
            return made[-1]

        async with asyncio.timeout(self._connect_timeout_s):
            await self._connect(factory)
        return made[-1]

    def opened(self, connection: UpstreamConnection) -> None:
        self._all[connection] = None

    def closed(self, connection: UpstreamConnection) -> None:
        self._all.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        decodes = connection._decoded is not None
        if decodes is not self._decodes or len(self._idle) >= self._kept_max:
            connection.abandon()
        else:
            self._idle.append(connection)

    def close_idle(self, *, for_ever: bool = False) -> None:
        """Close those without a request. for_ever: none is kept from now on; requests under way end as they may."""
        if for_ever:
            self._kept_max = 0
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abandon()

    def close(self) -> None:
        for connection in list(self._all):
            connection.abandon()
        self._idle.clear()


def pool_to(url: str, ca: str | None, connect_timeout_s: float, *, decodes: bool = False) -> UpstreamPool:
    """Connections to the server of a base URL. ca: as of tls.tls_for, which may raise when a connection is opened."""

    async def connect(factory: Callable[[], asyncio.Protocol]) -> object:
        parts, tls = urlsplit(url), tls_for(url, ca)
        port = parts.port or (443 if tls else 80)
        return await asyncio.get_running_loop().create_connection(
            factory, parts.hostname or "", port, ssl=tls
        )

    return UpstreamPool(connect, connect_timeout_s, decodes=decodes)
