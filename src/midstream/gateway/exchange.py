"""The mechanics of one exchange: a request sent to an upstream, its response passed on, its endings.

Always holds:
- Bodies pass byte for byte in both directions, and each read of a response is written in the same turn of the loop.
- A request is sent again only while no response byte has arrived: over a fresh connection when a pooled one was stale.
- A response that an upstream could not finish is seen to be short: an error event and no final chunk on an event
  stream, a broken connection otherwise.
- A failure to connect for want of the gateway's own resources (descriptors, ports, memory) is never the upstream's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from midstream import sse
from midstream.errors import EngineFailed, MidstreamError, ReplicaUnavailable
from midstream.gateway.metrics import Histogram
from midstream.gateway.upstream import UpstreamConnection
from midstream.http1 import ClientConnection
from midstream.http_message import HOP_BY_HOP, Request, error_response
from midstream.types import HEADER_OVERWRITE, HEADER_TENANT

if TYPE_CHECKING:
    from midstream.gateway.proxy import Proxy

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # counted, never sent
_OWN_SHORTAGES = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
)
_OVERWRITE = HEADER_OVERWRITE.encode()
_TENANT = HEADER_TENANT.encode()


class ControlExchange:
    """One request to the control app, and what every exchange shares. Implements Exchange and ResponseSink."""

    _shows_labels = False  # the upstream's own x-midstream- headers are for the client

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection, path_class: str) -> None:
        self._proxy = proxy
        self._request = request
        self._client = client
        self._target, self._body = (
            request.target,
            request.body,
        )  # what is sent; a stream goes on by another request
        self._path_class = path_class
        self._pool = proxy.control
        self._connection: UpstreamConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._fresh = False  # the connection in use was opened for this request
        self._lost_here = False  # this upstream was sent the request and lost it
        self._started_s = proxy.clock()
        self._answered = False  # a response head was written to the client
        self._event_stream = False
        self._chunked = False
        self._tail = b""  # the last bytes written of an event stream
        self._caller = proxy.caller(request)
        self._tenant = self._caller.tenant
        self._resumable = False  # the replica is asked to say what another one needs to go on with its stream

    # -- http1.Exchange

    @property
    def answered(self) -> bool:
        return self._answered

    def start(self) -> None:
        self._send()

    def client_paused(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def client_resumed(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def client_gone(self) -> None:
        if not self._answered:
            self._count(CLIENT_LEFT)
        self._leave()

    def cut(self, reason: str) -> None:
        in_chunk = self._leave()
        self._end_early(ReplicaUnavailable(reason), in_chunk)

    # -- upstream.ResponseSink

    def response_head(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        self._answered = True
        self._count(status)
        self._observe(self._proxy.metrics.first_byte_s)
        client, http10 = self._client, self._request.http10
        dropped = HOP_BY_HOP
        parts = [b"HTTP/1.1 %d " % status, reason, b"\r\n"]
        for name, value in headers:
            if name == b"transfer-encoding":
                self._chunked = True
                parts.append(b"" if http10 else b"transfer-encoding: chunked\r\n")
            elif name == b"connection" and value.lower() not in (b"close", b"keep-alive"):
                dropped = dropped | _listed(value)
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self._event_stream = True
            if name not in dropped and (self._shows_labels or not name.startswith(b"x-midstream-")):
                parts += (name, b": ", value, b"\r\n")
        parts.append(self._response_headers())
        parts.append(b"connection: close\r\n\r\n" if client.closes_after_response else b"\r\n")
        parts.append(body)
        client.write(b"".join(parts))
        self._tail = body[-4:]

    def response_body(self, data: bytes) -> None:
        self._client.write(data)
        if self._event_stream:
            self._tail = data if len(data) > 3 else (self._tail + data)[-4:]

    def relay_begun(self) -> None:
        self._answered = True
        self._count(200)
        self._observe(self._proxy.metrics.first_byte_s)

    def relay_stood(self, *, chunked: bool, events: bool, between_events: bool, marks: bytes | None) -> None:
        self._chunked, self._event_stream = chunked, events
        self._tail = b"" if between_events else b"inside"

    def response_end(self) -> None:
        self._connection = None
        self._left()
        self._observe(self._proxy.metrics.total_s)
        self._client.finish()

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        connection, self._connection = self._connection, None
        if self._answered:
            self._cut_short(connection is not None and connection.in_chunk, reason)
        elif answered:
            self._fail(EngineFailed(f"{self._where()}: {reason}"))
        else:
            self._lost_here = True
            if self._fresh:
                self._unreachable(reason)
            else:  # perhaps only stale: a fresh connection tells
                self._proxy.metrics.retries["stale_connection"] += 1
                self._send(fresh=True)

    # -- sending

    def _send(self, *, fresh: bool = False) -> None:
        connection = None if fresh or self._request.http10 else self._pool.take()
        if connection is None:
            self._fresh = True
            self._opening = asyncio.get_running_loop().create_task(self._open())
        else:
            self._fresh = False
            self._send_over(connection)

    async def _open(self) -> None:
        try:
            connection = await self._pool.open(decode=self._request.http10)
        except OSError as error:  # TimeoutError among them
            self._opening = None
            reason = str(error) or "connecting took too long"
            if error.errno in _OWN_SHORTAGES:
                logger.error("the gateway cannot connect to %s: %s", self._where(), reason)
                self._fail(ReplicaUnavailable("the gateway is short of resources"))
                return
            if isinstance(error, ConnectionRefusedError):
                self._refused()
            self._unreachable(reason)
        else:
            self._opening = None
            self._send_over(connection)

    def _send_over(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        request, client = self._request, self._client
        head = self._request_head()
        if (
            connection.wire is not None
            and client.wire is not None
            and client.writable
            and not client.closes_after_response
            and request.method == b"POST"
            and not self._answered
        ):
            extra = self._response_headers()
            connection.relay(self, head, self._body, client.wire, extra, marks=self._resumable)
            return
        connection.send(self, head, self._body, head_request=request.method == b"HEAD")
        if not client.writable:
            connection.pause()

    def _request_head(self) -> bytes:
        request = self._request
        if request.lines is not None:
            return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n%b" % (
                self._target,
                request.lines,
                len(self._body),
                self._added_lines(),
            )
        dropped = self._proxy.dropped_headers
        listed = request.first.get(b"connection")
        if listed is not None and listed.lower() not in (b"close", b"keep-alive"):
            dropped = dropped | _listed(listed)
        lines = [request.method + b" " + self._target + b" HTTP/1.1"]
        lines += [
            b": ".join(header)
            for header in request.headers
            if header[0] not in dropped and not header[0].startswith(b"x-midstream-")
        ]
        if self._body or request.method in (b"POST", b"PUT", b"PATCH"):
            lines.append(b"content-length: %d" % len(self._body))
        lines.append(self._added_lines())
        return b"\r\n".join(lines)

    def _added_lines(self) -> bytes:
        """What the gateway adds to a request's head, with the empty line that ends it."""
        lines = self._upstream_headers()
        if b"x-request-id" not in self._request.first:
            lines.append(b"x-request-id: " + self._proxy.request_id())
        if self._tenant:
            lines.append(_TENANT + b": " + self._tenant.encode())
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    # -- what kinds of exchanges differ in

    def _upstream_headers(self) -> list[bytes]:
        """Of the caller's own x-midstream- headers, only what a signal may say."""
        given = self._request.first.get(_OVERWRITE)
        said = [] if given is None else [_OVERWRITE + b": " + given]
        return [*self._proxy.scopes_header(self._caller), *said]

    def _response_headers(self) -> bytes:
        return b""

    def _where(self) -> str:
        return "the control app"

    def _refused(self) -> None:
        """Nobody listens where the upstream should be."""

    def _unreachable(self, reason: str) -> None:
        """A fresh connection failed before any response byte."""
        self._fail(ReplicaUnavailable(f"{self._where()}: {reason}"))

    def _left(self) -> None:
        """This exchange is on no upstream any more."""

    # -- endings

    def _fail(self, error: MidstreamError) -> None:
        """Answer with `error` instead of a response."""
        self._left()
        self._count(error.status)
        client, request = self._client, self._request
        close = client.closes_after_response
        request_id = request.first.get(b"x-request-id")
        extra = b"" if request_id is None else b"x-request-id: %b\r\n" % request_id
        client.write(error_response(error, close=close, with_body=request.method != b"HEAD", extra=extra))
        client.finish()

    def _cut_short(self, in_chunk: bool, reason: str) -> None:
        self._left()
        logger.warning("a response of %s was cut short: %s", self._where(), reason)
        self._end_early(EngineFailed(f"{self._where()} failed in the middle of the response"), in_chunk)

    def _end_early(self, error: MidstreamError, in_chunk: bool) -> None:
        """End a response that cannot be completed so that no client takes it for whole."""
        if not self._answered:
            self._fail(error)
            return
        self._proxy.metrics.cut_responses[self._where()] += 1
        http10 = self._request.http10
        between_events = not self._tail or self._tail.endswith(b"\n\n" if http10 else b"\n\n\r\n")
        if self._event_stream and self._chunked and between_events and not in_chunk:
            event = sse.event(error.event_body())
            self._client.end_short(event if http10 else b"%x\r\n%b\r\n" % (len(event), event))
        else:
            self._client.reset()

    def _leave(self) -> bool:
        """Let go of the upstream; a connection in use is closed, which stops the work behind it.

        Whether the response stopped inside a chunk's data.
        """
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._left()
        return connection is not None and connection.in_chunk

    def _count(self, status: int) -> None:
        self._proxy.metrics.requests[self._path_class, status] += 1

    def _observe(self, histograms: Mapping[str, Histogram]) -> None:
        histograms[self._path_class].observe(self._proxy.clock() - self._started_s)


def _listed(connection: bytes) -> frozenset[bytes]:
    """Header names that a Connection header declares to be hop-by-hop."""
    return frozenset(name.strip().lower() for name in connection.split(b","))
