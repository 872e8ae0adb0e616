"""One request on its way through the proxy: the I/O that the table (request_state.py) asks for.

Owns: the connection to the upstream, the response passed on to the client, the client's error, the wait for a replica. Where
the request goes and what an answer means is asked of its route (route.py).
Always holds:
- Bodies pass byte for byte in both directions, and each read of a response is written in the same turn of the loop. Of a stream
  that can be resumed the client gets whole events, and nothing twice.
- A request is sent again only while no byte of a response has reached the client. It goes over a fresh connection when a pooled
  one was stale, and to another replica when its route says so.
- A response that cannot be completed is visibly short. An event stream gets an error event and no final chunk; the connection
  of any other response is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from midstream.core.errors import MidstreamError, ReplicaUnavailable, forget_frames
from midstream.core.headers import HEADER_MADE
from midstream.core.sse import error_event
from midstream.http.http1 import ClientConnection
from midstream.http.message import Request, error_response
from midstream.http.upstream import UpstreamConnection, UpstreamHead
from midstream.proxy.heads import to_client, to_upstream
from midstream.proxy.request_state import (
    ANSWERED,
    MAY_PASS,
    MOVES,
    RequestAction,
    RequestEvent,
    RequestPhase,
    ruling,
)
from midstream.proxy.resume import ResumeLog
from midstream.proxy.route import ConnectionLoss, Route, Until
from midstream.proxy.spans import RequestSpan

if TYPE_CHECKING:
    from midstream.proxy.proxy import AtReplica, Proxy

_MADE = HEADER_MADE.encode()
# Of every request. A member of an enumeration takes longer to look up than a call takes.
_PLACING, _HEAD = RequestPhase.PLACING, RequestEvent.HEAD
_CONNECTED, _END = RequestEvent.CONNECTED, RequestEvent.END
# Counted, never sent.
CLIENT_LEFT = 499
#: The next move, and what its action is about.
Step = tuple[RequestEvent, Any]
# Of a response that is held back until it is known to be whole.
HELD_BYTES_MAX = 64 * 2**10


class ProxiedRequest:
    """Implements http1.Exchange and upstream.ResponseSink."""

    __slots__ = (
        "_answer",
        "_client",
        "_connection",
        "_event_stream",
        "_fresh",
        "_held",
        "_in_chunk",
        "_log",
        "_opening",
        "_phase",
        "_proxy",
        "_request",
        "_span",
        "_started_s",
        "_tail",
        "_timer",
        "_waits_for",
        "route",
    )

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection, route: Route) -> None:
        self._proxy, self._request, self._client = proxy, request, client
        self.route = route
        # Where it stands in the table, and what the upstream answered last: a head to pass on, or why it is held.
        self._phase = _PLACING
        self._answer = _HEAD
        # As a call of a method, a call of what an attribute holds takes longer.
        clock = proxy.clock
        self._started_s = clock()
        tracer = proxy.tracer
        self._span = None if tracer is None or not route.traced else RequestSpan(tracer, request)
        self._connection: UpstreamConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        # The connection in use was opened for this request.
        self._fresh = False
        self._waits_for: Until | None = None
        self._timer: asyncio.TimerHandle | None = None
        # A response that is held back: its head, and what arrived of its body.
        self._held: UpstreamHead | None = None
        # The log of the stream that is passed on.
        self._log: ResumeLog | None = None
        # It is one in chunks.
        self._event_stream = False
        # The last bytes written of an event stream.
        self._tail = b""
        # The last byte passed on lies within a chunk's data.
        self._in_chunk = False

    def __repr__(self) -> str:
        return f"ProxiedRequest({self._phase}, {self.route})"

    # -- http1.Exchange

    @property
    def answered(self) -> bool:
        return self._phase in ANSWERED

    def start(self) -> None:
        try:
            self.route.start()
        except MidstreamError as error:
            self._on(RequestEvent.FAILED, error)
        else:
            event, subject = self.route.place()
            self._on(event, subject)

    def client_paused(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def client_resumed(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def client_gone(self) -> None:
        self._on(RequestEvent.CLIENT_GONE)

    def cut(self, reason: str) -> None:
        self._on(RequestEvent.FAILED, ReplicaUnavailable(reason))

    # -- upstream.ResponseSink

    def response_head(self, head: UpstreamHead) -> None:
        self._answer = event = self.route.head(self._phase, head)
        self._on(event, head)

    def response_body(self, data: bytes) -> None:
        if self._held is not None:
            self._hold_more(self._held, data)
            return
        self._client.write(data)
        if self._event_stream:
            self._tail = data if len(data) > 3 else (self._tail + data)[-4:]

    def response_end(self) -> None:
        # The connection went back to its pool.
        self._connection = None
        if self._held is not None:
            held, self._held = self._held, None
            judged = self.route.held(self._phase, self._answer, held)
            if judged.event is not RequestEvent.HEAD:
                self._on(*judged)
                return
            self._on(RequestEvent.HEAD, held)
        self._on(_END, b"" if self._log is None else self._log.rest())

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        self._in_chunk = connection.in_chunk
        self._held = None
        loss = ConnectionLoss(reason, answered, not connection.malformed, self._fresh)
        self._on(*self.route.lost(self._phase, loss))

    # -- the proxy's calls

    def give_up(self, reason: str, together: Collection[AtReplica] = ()) -> None:
        """The upstream does not answer any more, though its connection may be open. together: all that are given up."""
        answering = self._connection is not None and self._connection.answering
        self._let_go()
        self._held = None
        self._on(*self.route.silent(self._phase, reason, answering=answering, together=together))

    def leave(self, reason: str) -> None:
        """The upstream's time is over. The request stays there if it cannot go on elsewhere."""
        judged = self.route.leaves(self._phase, reason)
        if judged is not None:
            self._let_go()
            self._held = None
            self._on(*judged)

    # -- moves

    def _on(self, event: RequestEvent, subject: Any = None) -> None:
        """Make the moves of the table from this event on, and do what they ask for. subject: what the action is about."""
        step: Step | None = (event, subject)
        while step is not None:
            event, subject = step
            try:
                self._phase, act = _STEPS[self._phase, event]
            except KeyError:
                # Raises IllegalMove.
                MOVES.move(self._phase, event)
                raise
            step = act(self, subject)

    def _place(self, _: object) -> Step:
        self._let_go()
        if self._log is not None:
            # What was held back of a stream that broke was not passed on.
            self._log, self._tail = None, b""
        self._in_chunk = False
        return self.route.place()

    def _wait(self, until: Until) -> None:
        self._waits_for = until
        until.replicas.wait(self._woken, any_report=until.any_report)
        if until.at is not None:
            self._timer = asyncio.get_running_loop().call_at(until.at, self._woken)

    def _woken(self) -> None:
        self._on(RequestEvent.WOKEN)

    def _connect(self, _: object) -> Step | None:
        self.route.enter(self)
        connection = None if self._request.http10 else self.route.pool.take()
        if connection is None:
            self._connect_afresh(None)
            return None
        self._fresh = False
        return _CONNECTED, connection

    def _connect_afresh(self, _: object) -> None:
        self._fresh = True
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            connection = await self.route.pool.open(decode=self._request.http10)
        except OSError as error:
            # A TimeoutError is one, too.
            self._opening = None
            self._on(*self.route.not_connected(self._phase, error))
        else:
            self._opening = None
            self._on(RequestEvent.CONNECTED, connection)

    def _send(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        request, route, proxy = self._request, self.route, self._proxy
        lines, added = proxy.upstream_lines, [*route.own_lines(), *proxy.sender_lines(request, route.caller)]
        if self._span is not None:
            self._span.sent(route)
            lines = proxy.traced_lines
            added.append(self._span.line)
        body = route.body
        head = to_upstream(request, route.target, len(body), lines, added)
        connection.send(self, head, body, head_request=request.method == b"HEAD")
        if not self._client.writable:
            connection.pause()

    def _hold(self, head: UpstreamHead) -> None:
        self._held = head

    def _hold_more(self, held: UpstreamHead, data: bytes) -> None:
        self._held = held = replace(held, body=held.body + data)
        if len(held.body) <= HELD_BYTES_MAX:
            return
        if ruling(self._phase, self._answer) in MAY_PASS:
            self._held = None
            self._on(RequestEvent.HEAD, held)
        else:
            self._held = replace(held, body=held.body[:HELD_BYTES_MAX])

    def _pass_head(self, head: UpstreamHead) -> None:
        client, route, proxy, write = self._client, self.route, self._proxy, self._client.write
        if route.audited:
            self._audit(head.status, head.headers)
        if route.counted:
            proxy.metrics.requests[route.path_class, head.status] += 1
            clock = proxy.clock
            proxy.metrics.first_byte_s[route.path_class].observe(clock() - self._started_s)
        if self._span is not None:
            self._span.head(head.status)
        first, body = head.first, head.body
        if b"transfer-encoding" in first:
            self._event_stream = first.get(b"content-type", b"").startswith(b"text/event-stream")
        if route.log is not None:
            self._log = log = route.log
            body = log.take(body)
            log.write = write
            if self._connection is not None:
                self._connection.take_body = log.take
        parts = to_client(
            head,
            route.response_lines(),
            http10=self._request.http10,
            close=client.closes_after_response,
            labels=route.shows_labels,
        )
        parts.append(body)
        write(b"".join(parts))
        if self._event_stream:
            self._tail = body[-4:]

    def _continue(self, head: UpstreamHead) -> None:
        """The head of the rest of a stream is not the client's."""
        if head.body:
            self.response_body(head.body)

    # -- endings

    def _finish(self, rest: bytes) -> None:
        # It waits for nothing and has no connection any more.
        route, proxy = self.route, self._proxy
        route.leave()
        if rest:
            self._client.write(rest)
        if route.losses is not None:
            route.ended()
        if route.counted:
            clock = proxy.clock
            proxy.metrics.total_s[route.path_class].observe(clock() - self._started_s)
        if self._span is not None:
            self._span.end(route)
        self._client.finish()

    def _answer_error(self, error: MidstreamError) -> None:
        self._let_go()
        forget_frames(error)
        error = self.route.shaped(error)
        self._count(error.status)
        if self._span is not None:
            self._span.end(self.route, error.status)
        client, request = self._client, self._request
        close = client.closes_after_response
        request_id = request.first.get(b"x-request-id")
        extra = b"" if request_id is None else b"x-request-id: %b\r\n" % request_id
        client.write(error_response(error, close=close, with_body=request.method != b"HEAD", extra=extra))
        client.finish()

    def _end_short(self, error: MidstreamError) -> None:
        """End a response that cannot be completed so that no client takes it for whole."""
        self._let_go()
        forget_frames(error)
        if self._span is not None:
            self._span.end(self.route, error="cut short")
        self._proxy.metrics.cut_responses[self.route.where()] += 1
        http10 = self._request.http10
        between_events = not self._tail or self._tail.endswith(b"\n\n" if http10 else b"\n\n\r\n")
        if self._log is not None:
            between_events = self._log.between_events
        if self._event_stream and between_events and not self._in_chunk:
            error.shape = self.route.errors
            event = error_event(error)
            self._client.end_short(event if http10 else b"%x\r\n%b\r\n" % (len(event), event))
        else:
            self._client.reset()

    def _count_left(self, _: object) -> None:
        self._let_go()
        self._count(CLIENT_LEFT)
        if self._span is not None:
            self._span.end(self.route, CLIENT_LEFT)

    def _leave(self, _: object) -> None:
        self._let_go()
        if self._span is not None:
            self._span.end(self.route, error="the client left")

    def _let_go(self) -> None:
        """Wait no more and leave the upstream: a connection in use is closed, which stops the work behind it."""
        until, self._waits_for = self._waits_for, None
        if until is not None:
            until.replicas.wait_no_more(self._woken)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        connection, self._connection = self._connection, None
        if connection is not None:
            self._in_chunk = connection.in_chunk
            connection.abandon()
        self.route.leave()

    def _count(self, status: int) -> None:
        if self.route.counted:
            self._proxy.metrics.requests[self.route.path_class, status] += 1
        if self.route.audited:
            self._audit(status)

    def _audit(self, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        made = next((value.decode("latin-1") for name, value in headers if name == _MADE), None)
        self._proxy.audit.answered(self._request, self.route.caller, self._client.peer, status, made)


_ACTIONS: dict[RequestAction, Callable[[ProxiedRequest, Any], Step | None]] = {
    RequestAction.PLACE: ProxiedRequest._place,
    RequestAction.WAIT: ProxiedRequest._wait,
    RequestAction.CONNECT: ProxiedRequest._connect,
    RequestAction.CONNECT_AFRESH: ProxiedRequest._connect_afresh,
    RequestAction.SEND: ProxiedRequest._send,
    RequestAction.PASS_HEAD: ProxiedRequest._pass_head,
    RequestAction.HOLD: ProxiedRequest._hold,
    RequestAction.CONTINUE: ProxiedRequest._continue,
    RequestAction.FINISH: ProxiedRequest._finish,
    RequestAction.ANSWER_ERROR: ProxiedRequest._answer_error,
    RequestAction.END_SHORT: ProxiedRequest._end_short,
    RequestAction.COUNT_LEFT: ProxiedRequest._count_left,
    RequestAction.LEAVE: ProxiedRequest._leave,
}
_STEPS = {move: (to, _ACTIONS[action]) for move, (to, action) in MOVES.items()}
