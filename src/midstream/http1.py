"""HTTP/1.1 requests in, bytes out, on a raw asyncio protocol: the server side of the gateway's and the replicas' ports.

Owns: one client connection: parsing, limits, refusals, keep-alive, pipelining order, and its timeouts. What a request
means is the service's business (gateway/proxy.py, replica/app.py).
Always holds:
- Requests of a connection are served one at a time, in the order they came.
- A request that two parsers could frame differently is refused and its connection closed.
- An exchange sees a request as if it had come in origin form and without an Upgrade header: an absolute-form target gives
  its authority to Host, and an offer to switch protocols is passed over.
- Memory per connection is bounded: by the body limit, the header limit, and the transport's write buffer.
- When the client goes away, the exchange that serves it is told at once.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from midstream.errors import HeadersTooLarge, InvalidRequest, MidstreamError, PayloadTooLarge, RequestTimeout
from midstream.http_message import Limits, Request, error_response

if TYPE_CHECKING:
    from midstream.gateway.wire import WireTransport

QUEUED_REQUESTS_MAX = 16  # pipelined requests read ahead before reading pauses
QUEUED_BYTES_MAX = 2**20
LINGER_S = 2.0  # how long a refused client may go on sending before its connection is cut
_NEVER = math.inf
_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@]+)((?:/[^?]*)?(?:\?.*)?)", re.IGNORECASE | re.DOTALL)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Exchange(Protocol):
    """What serves one request. All calls come from the connection that carries it."""

    def start(self) -> None: ...
    def client_paused(self) -> None: ...
    def client_resumed(self) -> None: ...
    def client_gone(self) -> None: ...
    def cut(self, reason: str) -> None: ...


class Service(Protocol):
    """What the connections of a server share."""

    draining: bool

    def connected(self, client: ClientConnection) -> None: ...
    def disconnected(self, client: ClientConnection) -> None: ...
    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None:
        """Raise MidstreamError to refuse a request before its body is read."""

    def exchange(self, request: Request, client: ClientConnection) -> Exchange: ...
    def refused(self, error: MidstreamError) -> None:
        """A request was answered with `error` without becoming an exchange."""


class ClientConnection(asyncio.Protocol):
    """One client connection. An exchange writes to it through write, finish, end_short and reset."""

    def __init__(self, service: Service, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._limits = limits
        self._now = loop.time
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request | MidstreamError] = deque()
        self._queued_bytes = 0
        self._read_bytes = 0  # of the read being parsed
        self._exchange: Exchange | None = None
        self._keep_alive = True
        self._pumping = False
        self._reading = True
        self._deaf = False  # nothing that arrives counts any more
        self._owes_continue = False
        self._offers_upgrade = False  # the head just parsed will be parsed again without its Upgrade header
        self._transport: asyncio.Transport
        self.wire: WireTransport | None = None  # a transport that reads plain requests by itself
        self._headers: list[tuple[bytes, bytes]]
        self._first: dict[bytes, bytes]
        self._body: list[bytes]
        self._in_message = False
        self.writable = True
        self.deadline = _NEVER
        self._start_message()

    def __repr__(self) -> str:
        return f"ClientConnection({'busy' if self._exchange else 'idle'}, {len(self._queue)} queued)"

    # -- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._transport = transport
        self.wire = transport.get_extra_info("wire")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = self._now() + self._limits.head_timeout_s
        self._service.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._queue.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()
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
        if self._in_message and not self._head_done:
            self._head_fed += len(data)
        try:
            self._feed(data)
            if self._head_fed > self._limits.max_header_bytes and not self._head_done:
                raise self._head_too_large()
        except MidstreamError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            self._parse_failed(error)
        if self._in_message and self._head_done and self._exchange is None:
            self.deadline = self._now() + self._limits.body_idle_s
        self._pump()

    # -- a wire's calls

    def raw_received(self, data: bytes) -> bool:
        """Bytes that the wire does not read by itself. Whether what follows is a new request."""
        self.data_received(data)
        return not self._in_message

    def request_begun(self, target: bytes, first: Mapping[bytes, bytes]) -> bool:
        """The head of a plain request has come and its body only in part. Whether the rest is wanted."""
        if self._deaf or not self._admits(target, first):
            return False
        self._in_message = self._head_done = True
        if self._exchange is None:
            self.deadline = self._now() + self._limits.body_idle_s
        return True

    def request_received(
        self, target: bytes, first: Mapping[bytes, bytes], lines: bytes, body: bytes
    ) -> None:
        """A plain request: a POST that may be kept alive, of HTTP/1.1, within the limits. `lines`: what is to be sent on."""
        if self._deaf:
            return
        if self._in_message:
            self._in_message = False
        elif not self._admits(target, first):
            return
        request = Request(b"POST", target, [], first, body, False, True, lines)
        if self._exchange is None and not self._queue:
            self._begin(request)
        else:
            self._queue.append(request)
            self._queued_bytes += len(body)
            self._pump()

    def _admits(self, target: bytes, first: Mapping[bytes, bytes]) -> bool:
        try:
            self._service.check_head(b"POST", target, first)
        except MidstreamError as error:
            self._refuse(error)
            self._pump()
            return False
        return True

    # -- the parser's calls

    def on_message_begin(self) -> None:
        self._in_message = True
        self._start_message()
        if self._exchange is None and not self._queue:
            self.deadline = self._now() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:
            self._headers.append((name.lower(), value))
        else:  # trailers are dropped
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > self._limits.max_header_bytes:
                raise self._head_too_large()

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._head_fed + self._read_bytes > self._limits.max_header_bytes:
            self._check_head_size()
        self._first = dict(reversed(self._headers))
        version = self._parser.get_http_version()
        self._http10 = version == "1.0"
        if not self._http10 and version != "1.1":
            raise InvalidRequest(f"HTTP/{version} is not supported")
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                raise InvalidRequest("tunnels are not supported")
            self._offers_upgrade = True
            return
        self._check_framing()
        if not self._target.startswith(b"/"):
            self._take_absolute_form()
        length = int(self._first.get(b"content-length", 0))
        if length > self._limits.max_body_bytes:
            raise self._body_too_large()
        self._service.check_head(self._parser.get_method(), self._target, self._first)
        expects = self._first.get(b"expect", b"").strip().lower() == b"100-continue"
        if expects and not self._http10 and (length or b"transfer-encoding" in self._first):
            self._owes_continue = True

    def on_body(self, body: bytes) -> None:
        self._owes_continue = False
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._body_too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_message = self._owes_continue = False
        keep_alive = not self._http10 and self._parser.should_keep_alive()
        request = Request(
            self._parser.get_method(),
            self._target,
            self._headers,
            self._first,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            self._http10,
            keep_alive,
        )
        self._queue.append(request)
        self._queued_bytes += self._body_bytes
        self._body = []  # an idle connection holds no body
        if not keep_alive:
            self._deaf = True  # what follows the last request is nobody's

    # -- an exchange's calls

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    @property
    def closes_after_response(self) -> bool:
        """The response must say `connection: close`."""
        return not self._keep_alive or self._service.draining

    def finish(self, *, close: bool = False) -> None:
        """The response is complete; go on with the next request, or close."""
        self._exchange = None
        if close or self.closes_after_response:
            self._close()
        elif not self._pumping:
            self._pump()

    def end_short(self, last: bytes = b"") -> None:
        """Write `last` and close without completing the response, so that the client sees that it is short."""
        self._exchange = None
        if last:
            self._transport.write(last)
        self._close()

    def reset(self) -> None:
        """Break the connection so that even a response without framing is seen to be short."""
        self._exchange = None
        self._deaf = True
        if self.wire is not None:
            self.wire.reset()
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    # -- the server's calls

    def check_deadline(self, now: float) -> None:
        if now < self.deadline:
            return
        if (
            self.wire is not None
            and (last := self.wire.last_read())
            and now < last + self._limits.body_idle_s
        ):
            self.deadline = last + self._limits.body_idle_s
            return
        self.deadline = _NEVER
        if self._in_message and not self._deaf:
            self._refuse(RequestTimeout("the request did not arrive in time"))
            self._pump()
        elif self._exchange is None:
            self._transport.abort()

    def drain(self) -> None:
        """Close now when idle; otherwise the response that is under way is the last."""
        if self._exchange is None and not self._queue:
            self._close()
        elif self.wire is not None:
            self.wire.close_after()

    def cut(self, reason: str) -> None:
        """End whatever is under way, visibly."""
        self._queue.clear()
        if self._exchange is not None:
            self._exchange.cut(reason)
        else:
            self._close()

    # -- inside

    def _feed(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while True:
            self._read_bytes = len(rest)
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                parsed = upgrade.args[0]
            rest = memoryview(rest)[parsed:]
            self._parse_without_offer()

    def _parse_without_offer(self) -> None:
        """The parser takes what follows the head of an upgrade request for another protocol: give a new one that head
        again, as what it is here, so that it goes on with the body."""
        self._offers_upgrade = False
        line = b"%b %b HTTP/%b" % (
            self._parser.get_method(),
            self._target,
            b"1.0" if self._http10 else b"1.1",
        )
        kept = [name + b": " + value for name, value in self._headers if name != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        head = b"\r\n".join([line, *kept, b"\r\n"])
        self._read_bytes = len(head)
        self._parser.feed_data(head)

    def _start_message(self) -> None:
        self._head_done = False
        self._head_fed = self._trailer_bytes = self._body_bytes = 0
        self._target = b""
        self._headers = []
        self._first = {}
        self._body = []
        self._http10 = False

    def _close(self) -> None:
        """Close once everything written is sent, or the client stopped taking it for a while."""
        self._deaf = True
        self._queue.clear()
        self.deadline = self._now() + self._limits.keep_alive_s
        self._transport.close()

    def _pump(self) -> None:
        """Start the next request when none is under way, and read ahead only so far."""
        self._pumping = True
        while self._exchange is None and self._queue and not self._transport.is_closing():
            item = self._queue.popleft()
            if isinstance(item, MidstreamError):
                self._answer_refusal(item)
                break
            self._queued_bytes -= len(item.body)
            self._begin(item)
        self._pumping = False
        if self._exchange is None and not self._deaf:
            self._wait_for_request()
        self._throttle()

    def _begin(self, request: Request) -> None:
        self._keep_alive = request.keep_alive
        self.deadline = _NEVER
        self._exchange = self._service.exchange(request, self)
        self._exchange.start()

    def _wait_for_request(self) -> None:
        if self._owes_continue:
            self._owes_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.deadline is _NEVER:
            limits = self._limits
            self.deadline = self._now() + (limits.body_idle_s if self._in_message else limits.keep_alive_s)

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
            self._refuse(InvalidRequest(f"malformed HTTP request: {error}"))

    def _refuse(self, error: MidstreamError) -> None:
        """Answer with `error` when its turn comes; the bytes after it mean nothing."""
        self._deaf = True
        self._in_message = self._owes_continue = False
        self._start_message()
        self._queue.append(error)

    def _answer_refusal(self, error: MidstreamError) -> None:
        """Answer, then drop what the client still sends for a while: closing at once could destroy the answer."""
        self._service.refused(error)
        self._transport.write(error_response(error, close=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._now() + LINGER_S

    def _check_head_size(self) -> None:
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._limits.max_header_bytes:
            raise self._head_too_large()

    def _check_framing(self) -> None:
        if b"host" not in self._first and not self._http10:
            raise InvalidRequest("a request needs a Host header")
        coding = self._first.get(b"transfer-encoding")
        if coding is not None and (self._http10 or coding.strip().lower() != b"chunked"):
            raise InvalidRequest("the only transfer coding supported is chunked, from HTTP/1.1 clients")
        if len(self._first) != len(self._headers):
            for once in (b"host", b"transfer-encoding", b"content-length"):
                if sum(name == once for name, _ in self._headers) > 1:
                    raise InvalidRequest(f"more than one {once.decode()} header")
        if b"content-length" in self._first and coding is not None:
            raise InvalidRequest("both Content-Length and Transfer-Encoding are present")

    def _take_absolute_form(self) -> None:
        """Keep path and query of `http://authority/path?query`; its authority is the Host that counts."""
        form = _ABSOLUTE_FORM.fullmatch(self._target)
        if form is None:
            raise InvalidRequest("the request target must be a path or an http URL")
        authority, target = form.groups()
        self._target = target if target.startswith(b"/") else b"/" + target
        self._headers = [(b"host", authority), *(h for h in self._headers if h[0] != b"host")]
        self._first = dict(reversed(self._headers))

    def _head_too_large(self) -> MidstreamError:
        return HeadersTooLarge(f"the request head is over {self._limits.max_header_bytes} bytes")

    def _body_too_large(self) -> MidstreamError:
        return PayloadTooLarge(f"the request body is over {self._limits.max_body_bytes} bytes")
