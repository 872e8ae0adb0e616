"""HTTP/1.1 requests in, bytes out, on a raw asyncio protocol: the server side of the gateway's and the replicas' ports.

Owns: one client connection: limits, refusals, keep-alive, pipelining order, and its timeouts. How a request is read is in
http/reader.py; what it means is the service's business (proxy/service.py, replica/app.py).
Always holds:
- Requests of a connection are served one at a time, in the order they came.
- A request that cannot be read is refused and its connection closed.
- Memory per connection is bounded: by the body limit, the header limit, and the transport's write buffer. What all
  connections hold of bodies that no exchange has yet is counted in the service's budget, before it is read.
- A body that comes too slowly is refused; the time in which its connection serves another request does not count.
- When the client disconnects, its exchange is notified at once.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import httptools

from midstream.core.errors import InvalidRequest, MidstreamError, RequestTimeout
from midstream.http.auth import Caller
from midstream.http.budget import Budget, Share
from midstream.http.heap import LARGE, heap
from midstream.http.message import ConnectionLimits, Request, error_response
from midstream.http.reader import RequestReader

# Pipelined requests that are read ahead before reading pauses.
QUEUED_REQUESTS_MAX = 16
QUEUED_BYTES_MAX = 2**20
# A refused client may continue to send for so long before its connection is cut.
LINGER_S = 2.0
_NEVER = math.inf
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Exchange(Protocol):
    """What serves one request. All calls come from the connection that carries it."""

    @property
    def answered(self) -> bool:
        """The head of its response was written."""

    def start(self) -> None: ...
    def client_paused(self) -> None: ...
    def client_resumed(self) -> None: ...
    def client_gone(self) -> None: ...
    def cut(self, reason: str) -> None: ...


class HttpService(Protocol):
    """What the connections of a server share."""

    draining: bool
    budget: Budget

    def connected(self, client: ClientConnection) -> None: ...
    def disconnected(self, client: ClientConnection) -> None: ...
    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Who sends it; None: it needs no key. Raise MidstreamError to refuse it before its body is read."""

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        """Raise MidstreamError to refuse a request; its connection stays open."""

    def refused(self, error: MidstreamError, request: Request | None, client: ClientConnection) -> None:
        """A request was answered with `error` without becoming an exchange. request: without its body; None: it has no head."""


class RefusedRequest(NamedTuple):
    error: MidstreamError
    request: Request | None


class ClientConnection(RequestReader, asyncio.Protocol):
    """One client connection. An exchange writes to it through write, finish, end_short and reset."""

    __slots__ = (
        *("_service", "_share", "_now", "write", "_queue", "_queued_bytes", "_exchange", "_pumping"),
        *("_reading", "_deaf", "_transport", "_unfinished_bytes", "_exchange_bytes", "_arrived_before"),
        *("_stays_s", "closes_after_response", "writable", "deadline", "peer", "__weakref__"),
    )

    def __init__(
        self, service: HttpService, limits: ConnectionLimits, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(limits)
        self._service = service
        self._share = Share(service.budget)
        self._now = loop.time
        #: For exchanges: bytes of a response.
        self.write: Callable[[bytes], None]
        self._queue: deque[Request | RefusedRequest] = deque()
        self._queued_bytes = 0
        self._exchange: Exchange | None = None
        #: The response under way must say `connection: close`.
        self.closes_after_response = False
        self._pumping = False
        self._reading = True
        # Nothing that arrives counts any more.
        self._deaf = False
        self._transport: asyncio.Transport
        # Bytes held of the body that is arriving.
        self._unfinished_bytes = 0
        # Bytes of the body that its exchange has.
        self._exchange_bytes = 0
        # Bytes of the arriving body that had come when its window began.
        self._arrived_before = 0
        # How long a retiring connection stays idle, if the response under way promised that it stays open.
        self._stays_s: float | None = None
        self.writable = True
        self.deadline = _NEVER
        # The host that it comes from.
        self.peer = "-"

    def __repr__(self) -> str:
        return f"ClientConnection({'busy' if self._exchange else 'idle'}, {len(self._queue)} queued)"

    # -- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self.write = transport.write
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # It cannot be asked for when the client has left.
            self.peer = str((transport.get_extra_info("peername") or ("-",))[0])
        self.deadline = self._now() + self._limits.head_timeout_s
        self._service.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._forget_queue()
        # Nothing refers to this connection in a circle: what it holds would wait for a collection.
        self._made_parser = None
        self._start_message()
        exchange = self._exchange
        self._exchange_over()
        if exchange is not None:
            exchange.client_gone()
        self._share.is_of(None, self)
        self._service.disconnected(self)

    def eof_received(self) -> bool:
        """A client that stops sending has left: there is no half-closed mode, so generation stops at once."""
        if self._exchange is not None:
            self._transport.abort()
        return False

    def pause_writing(self) -> None:
        self.writable = False
        if self._exchange is not None:
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        self.writable = True
        if self._exchange is not None:
            self._exchange.client_resumed()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        begun, had_head = self._in_message, self._head_done
        try:
            request = self.feed(data)
        except MidstreamError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            self._parse_failed(error)
        else:
            if request is not None and self._exchange is None and not self._queue:
                if not self._begin(request) and not self._deaf:
                    self._wait_for_request()
                return
            if request is not None:
                self._take_request(request)
        if self._queue:
            self._pump()
        elif self._exchange is None and not self._deaf:
            begins = self._in_message and not (begun and self._head_done == had_head)
            if begins:
                # A head or a body has begun, and with it another time limit.
                self.deadline = _NEVER
            self._wait_for_request()
            if begins:
                # What came of the body with its head counts in its first window.
                self._arrived_before = 0

    # -- the reader's calls

    def _take_head(self, method: bytes, target: bytes, first: Mapping[bytes, bytes], length: int) -> None:
        alone = self._exchange is None and not self._queue
        # A whole body becomes an exchange before anything else is read.
        self._roomless_bytes = length if alone else 0
        if not alone:
            self._count_held()
        self._caller = caller = self._service.check_head(method, target, first)
        # A request without a key leaves the connection, and what is under way on it, with its tenant.
        if caller is not None and caller.tenant != self._share.tenant:
            self._share.is_of(caller.tenant, self)
        if length:
            self._share.check_room(length)

    def _hold_more(self, more: int) -> None:
        self._share.check_room(more)
        self._unfinished_bytes += more
        self._count_held()

    def _take_request(self, request: Request) -> None:
        self._queue.append(request)
        self._queued_bytes += len(request.body)
        self._unfinished_bytes = 0
        if not request.keep_alive:
            # No request follows the last one: further bytes are dropped.
            self._deaf = True

    # -- an exchange's calls

    def count_in_flight(self) -> None:
        """Count the new exchange as a request of its tenant until it is over. Raises Overloaded."""
        self._share.begin_request()

    def finish(self) -> None:
        """The response is complete; begin the next request, or close."""
        self._exchange = None
        if self._exchange_bytes >= LARGE or self._share.counted_for is not None:
            self._exchange_over()
        if self._stays_s is not None:
            stays_s, self._stays_s = self._stays_s, None
            self._pump()
            if self.idle:
                self.deadline = min(self.deadline, self._now() + stays_s)
        elif self.closes_after_response:
            self._close()
        elif self._pumping:
            return
        elif self._queue or not self._reading:
            self._pump()
        elif self._in_message and not self._deaf:
            self._wait_for_request()

    def end_short(self, last: bytes = b"") -> None:
        """Write `last` and close without completing the response, so that the client sees that it is short."""
        self._exchange_over()
        if last:
            self._transport.write(last)
        self._close()

    def reset(self) -> None:
        """Break the connection so that even a response without framing is seen to be short."""
        self._exchange_over()
        self._deaf = True
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    # -- the server's calls

    def check_deadline(self, now: float) -> None:
        if now < self.deadline:
            if self._exchange is None and self.deadline is _NEVER and self.idle:
                # Most idle connections have their next request before they are looked at.
                self.deadline = now + self._limits.keep_alive_s
            return
        self.deadline = _NEVER
        if self._in_message and not self._deaf:
            if (
                self._head_done
                and self._body_bytes >= self._arrived_before + self._limits.body_bytes_per_window
            ):
                self._time_body()
                return
            self._refuse(self._too_slow())
            self._pump()
        elif self._exchange is None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        return self._exchange is None and not self._queue and not self._in_message and not self._deaf

    def drain(self) -> None:
        """Close now when idle; otherwise the response that is under way is the last."""
        self._stays_s = None
        self.closes_after_response = True
        if self._exchange is None and not self._queue:
            self._close()

    def retire(self, idle_s: float) -> None:
        """Say in the head of the next response that it is the last one. When idle, close after so many seconds at the latest.

        Closing at once could meet the client's next request.
        """
        if self.idle:
            self.deadline = min(self.deadline, self._now() + idle_s)
        elif self._exchange is not None and self._exchange.answered and not self.closes_after_response:
            self._stays_s = idle_s
        else:
            self.closes_after_response = True

    def cut(self, reason: str) -> None:
        """End whatever is under way, visibly."""
        self.closes_after_response = True
        self._forget_queue()
        if self._exchange is not None:
            self._exchange.cut(reason)
        else:
            self._close()

    # -- inside

    def _close(self) -> None:
        """Close once everything written is sent, or the client stopped taking it for a while."""
        self._deaf = True
        self._forget_queue()
        self.deadline = self._now() + self._limits.keep_alive_s
        self._transport.close()

    def _forget_queue(self) -> None:
        self._queue.clear()
        if self._queued_bytes or self._unfinished_bytes:
            heap.freed(self._queued_bytes + self._unfinished_bytes)
        self._queued_bytes = self._unfinished_bytes = 0
        self._count_held()

    def _exchange_over(self) -> None:
        self._exchange = None
        if self._exchange_bytes >= LARGE:
            heap.freed(self._exchange_bytes)
        self._exchange_bytes = 0
        if self._share.counted_for is not None:
            self._share.end_request()

    def _pump(self) -> None:
        """Start the next request when none is under way, and read ahead only so far."""
        self._pumping = True
        while self._exchange is None and self._queue and not self._transport.is_closing():
            item = self._queue.popleft()
            if isinstance(item, RefusedRequest):
                self._answer_refusal(item)
                break
            self._queued_bytes -= len(item.body)
            self._begin(item)
        self._pumping = False
        if self._exchange is None and not self._deaf:
            self._wait_for_request()
        if self._queue or not self._reading:
            self._throttle()

    def _begin(self, request: Request) -> bool:
        """Begin an exchange for the request. False if the request was refused instead."""
        self.closes_after_response = not request.keep_alive or self._service.draining
        self._exchange_bytes = len(request.body)
        self.deadline = _NEVER
        if self._share.held_bytes:
            self._share.holds(self._queued_bytes + self._unfinished_bytes)
        try:
            self._exchange = self._service.exchange(request, self)
        except MidstreamError as error:
            self._service.refused(error, request, self)
            heap.freed(self._exchange_bytes)
            self._exchange_bytes = 0
            self._transport.write(error_response(error, close=self.closes_after_response))
            if self.closes_after_response:
                self._close()
            return False
        self._exchange.start()
        return True

    def _wait_for_request(self) -> None:
        if self._owes_continue:
            self._owes_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.deadline is not _NEVER:
            return
        if not self._in_message:
            self.deadline = self._now() + self._limits.keep_alive_s
        elif self._head_done:
            self._time_body()
        else:
            self.deadline = self._now() + self._limits.head_timeout_s

    def _count_held(self) -> None:
        self._share.holds(self._unfinished_bytes + self._queued_bytes)

    # -- how long a body may take

    def _time_body(self) -> None:
        """A window begins."""
        self._arrived_before = self._body_bytes
        self.deadline = self._now() + self._limits.body_window_s

    def _too_slow(self) -> RequestTimeout:
        limits = self._limits
        if not self._head_done:
            return RequestTimeout(f"the request's head was not complete after {limits.head_timeout_s:g} s")
        return RequestTimeout(
            f"the request's body came too slowly: at least {limits.body_bytes_per_window:g} bytes are expected in "
            f"{limits.body_window_s:g} s (min_body_rate) until it is complete"
        )

    def _throttle(self) -> None:
        ahead = len(self._queue) >= QUEUED_REQUESTS_MAX or self._queued_bytes > QUEUED_BYTES_MAX
        if ahead == self._reading and not self._transport.is_closing():
            self._reading = not ahead
            if ahead:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _parse_failed(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, MidstreamError):
            self._refuse(cause)
        elif isinstance(error, httptools.HttpParserCallbackError):
            self._transport.abort()
            raise error
        elif not self._deaf:
            # So the parser calls how HTTP/2 begins.
            why = "this port speaks HTTP/1.1, not HTTP/2" if "PRI" in str(error) else error
            self._refuse(InvalidRequest(f"malformed HTTP request: {why}"))

    def _refuse(self, error: MidstreamError) -> None:
        """Answer with `error` when its turn comes; the bytes after it mean nothing."""
        self._deaf = True
        refusal = RefusedRequest(error, self.unfinished)
        self._in_message = self._owes_continue = False
        self._start_message()
        heap.freed(self._unfinished_bytes)
        self._unfinished_bytes = 0
        self._count_held()
        self._queue.append(refusal)

    def _answer_refusal(self, refusal: RefusedRequest) -> None:
        """Answer, then drop what the client still sends for a while: closing at once could destroy the answer."""
        self._service.refused(*refusal, self)
        self._transport.write(error_response(refusal.error, close=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._now() + LINGER_S
