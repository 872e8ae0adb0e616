"""What a request means: who may send it, which replica serves it, and what happens when that replica fails.

Owns: the life of one exchange, from the parsed request to the last response byte.
Always holds:
- Bodies pass byte for byte in both directions, and each read of a response is written in the same turn of the loop.
- A request is sent again only while no response byte has arrived: over a fresh connection when a pooled one was stale,
  to another replica when a fresh one failed.
- A response that a replica could not finish is seen to be short: an error event and no final chunk on an event stream,
  a broken connection otherwise.
- `in_flight` of a view counts exactly the exchanges that are on it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import msgspec

from midstream.config import GatewaySettings
from midstream.errors import EngineFailed, InvalidRequest, MidstreamError, NotFound, ReplicaUnavailable
from midstream.gateway.auth import Authenticator
from midstream.gateway.http1 import ClientConnection, Exchange, Request, error_response
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.placement import Candidate, Decision, Session, place_request, place_session, stays
from midstream.gateway.replicas import ReplicaSet, ReplicaView
from midstream.gateway.sessions import SessionTable, session_key
from midstream.gateway.upstream import UpstreamConnection, UpstreamPool
from midstream.names import ServedNames
from midstream.types import HEADER_SESSION, HEADER_TENANT

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # counted, never sent
LOST_SENDS_MAX = 2  # a request that two replicas died on may be what kills them: it is not shown to a third

INFERENCE_PATHS = {
    prefix + path: path.removeprefix(b"/v1/").replace(b"/", b"_").decode()
    for prefix in (b"", b"/inference")
    for path in (b"/v1/completions", b"/v1/chat/completions")
}
_CONTROL = "control"
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"content-length", b"expect"}
_CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
_SESSION = HEADER_SESSION.encode()
_TENANT = HEADER_TENANT.encode()


class Proxy:
    """The service behind every client connection: shared state of all exchanges."""

    def __init__(
        self,
        settings: GatewaySettings,
        names: ServedNames,
        replicas: ReplicaSet,
        metrics: GatewayMetrics,
        pools: Sequence[UpstreamPool],
        control: UpstreamPool,
    ) -> None:
        """`pools`: one per view, in the order of the views; `control`: connections to the control app."""
        self.views = replicas.views
        self.pools = pools
        self.control = control
        self.metrics = metrics
        self.sessions = SessionTable(settings.max_sessions)
        metrics.sessions = self.sessions
        self.clients: set[ClientConnection] = set()
        self.draining = False
        self._empty: asyncio.Future[None] | None = None
        self.dropped_headers = _NOT_FORWARDED
        self._auth = Authenticator(settings.api_keys)
        if self._auth.required:  # a credential ends where it was checked
            self.dropped_headers |= _CREDENTIALS
        self._bound = settings.load_bound
        self._accepted = names.accepted()
        self._turn = 0
        self._request_ids = itertools.count()
        self._request_prefix = os.urandom(8).hex()

    # -- http1.Service

    def connected(self, client: ClientConnection) -> None:
        self.clients.add(client)

    def disconnected(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        if self._empty is not None and not self.clients and not self._empty.done():
            self._empty.set_result(None)

    async def all_left(self) -> None:
        """Wait until no client connection is open."""
        if self.clients:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None:
        if not target.startswith(b"/"):
            raise InvalidRequest("the request target must be a path")
        if target.partition(b"?")[0] != b"/health":
            self._auth.tenant(headers)

    def refused(self, error: MidstreamError) -> None:
        self.metrics.requests["refused", error.status] += 1

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        path = request.target.partition(b"?")[0]
        path_class = INFERENCE_PATHS.get(path) if request.method == b"POST" else None
        if path_class is None:
            return ControlExchange(self, request, client, _CONTROL)
        return InferenceExchange(self, request, client, path_class)

    # -- for exchanges

    def tenant(self, request: Request) -> str:
        try:
            return self._auth.tenant(request.first)
        except MidstreamError:  # /health, which needs no key
            return ""

    def request_id(self) -> bytes:
        return f"{self._request_prefix}-{next(self._request_ids):x}".encode()

    def check_names(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise NotFound when the request names another deployment or model than this one."""
        for header in (b"fireworks-deployment", b"fireworks-model"):
            value = headers.get(header)
            if value is not None:
                name = value.decode("utf-8", "replace").strip()
                if name.partition("@")[0] not in self._accepted:
                    raise NotFound(f"{name!r} is not served here", param=header.decode())

    def place(self, session: Session | None, tried: set[int]) -> Decision | None:
        """Choose a replica that is usable and not in `tried`, and remember it for the session."""
        usable = [view.index for view in self.views if view.usable and view.index not in tried]
        home = None if session is None else self.sessions.home(session)
        decision = stays(home, usable)
        if decision is None:
            loads = [Candidate(i, self.views[i].name, self.views[i].in_flight) for i in usable]
            if session is None:
                decision = place_request(loads, self._turn)
                self._turn += 1
            else:
                decision = place_session(session, loads, self._bound, home)
                if decision is not None:
                    self.sessions.settle(session, decision.index)
        if decision is not None:
            self.metrics.routes[decision.reason] += 1
            if logger.isEnabledFor(logging.DEBUG):
                self._log(session, decision)
        return decision

    def _log(self, session: Session | None, decision: Decision) -> None:
        key = "-" if session is None else session[1]
        view = self.views[decision.index]
        logger.debug("Hash key '%s' mapped to worker: %s (index=%d)", key, view.url, view.index)
        logger.debug("Placement of '%s': %s: %s", key, decision.reason, decision.explanation)


class ControlExchange:
    """One request to the control app, and what every exchange shares. Implements Exchange and ResponseSink."""

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection, path_class: str) -> None:
        self._proxy = proxy
        self._request = request
        self._client = client
        self._path_class = path_class
        self._pool = proxy.control
        self._connection: UpstreamConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._fresh = False  # the connection in use was opened for this request
        self._lost_sends = 0
        self._answered = False  # a response head was written to the client
        self._event_stream = False
        self._chunked = False
        self._tail = b""  # the last bytes written of an event stream
        self._tenant = proxy.tenant(request)

    # -- http1.Exchange

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
        in_chunk = self._connection is not None and self._connection.in_chunk
        self._leave()
        self._end_early(ReplicaUnavailable(reason), in_chunk)

    # -- upstream.ResponseSink

    def response_head(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        self._answered = True
        self._count(status)
        client, http10 = self._client, self._request.http10
        dropped = _HOP_BY_HOP
        parts = [b"HTTP/1.1 %d " % status, reason, b"\r\n"]
        for name, value in headers:
            if name == b"transfer-encoding":
                self._chunked = True
                parts.append(b"" if http10 else b"transfer-encoding: chunked\r\n")
            elif name == b"connection" and value.lower() not in (b"close", b"keep-alive"):
                dropped = dropped | _listed(value)
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self._event_stream = True
            if name not in dropped and not name.startswith(b"x-midstream-"):
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

    def response_end(self) -> None:
        self._connection = None
        self._left()
        self._client.finish()

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        connection, self._connection = self._connection, None
        if self._answered:
            self._cut_short(connection, reason)
        elif answered:
            self._fail(EngineFailed(f"{self._where()}: {reason}"))
        elif not self._fresh:
            self._proxy.metrics.retries["stale_connection"] += 1
            self._send(fresh=True)
        else:
            self._lost_sends += 1
            self._unreachable(reason)

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
            self._unreachable(str(error) or "connecting took too long")
        else:
            self._opening = None
            self._send_over(connection)

    def _send_over(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        request = self._request
        connection.send(self, self._request_head(), request.body, head_request=request.method == b"HEAD")
        if not self._client.writable:
            connection.pause()

    def _request_head(self) -> bytes:
        request = self._request
        dropped = self._proxy.dropped_headers
        listed = request.first.get(b"connection")
        if listed is not None and listed.lower() not in (b"close", b"keep-alive"):
            dropped = dropped | _listed(listed)
        lines = [request.method + b" " + request.target + b" HTTP/1.1"]
        lines += [
            b": ".join(header)
            for header in request.headers
            if header[0] not in dropped and not header[0].startswith(b"x-midstream-")
        ]
        if request.body or request.method in (b"POST", b"PUT", b"PATCH"):
            lines.append(b"content-length: %d" % len(request.body))
        if b"x-request-id" not in request.first:
            lines.append(b"x-request-id: " + self._proxy.request_id())
        if self._tenant:
            lines.append(_TENANT + b": " + self._tenant.encode())
        lines += self._session_header()
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    # -- what kinds of exchanges differ in

    def _session_header(self) -> list[bytes]:
        return []

    def _response_headers(self) -> bytes:
        return b""

    def _where(self) -> str:
        return "the control app"

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

    def _cut_short(self, connection: UpstreamConnection | None, reason: str) -> None:
        self._left()
        logger.warning("a response of %s was cut short: %s", self._where(), reason)
        in_chunk = connection is not None and connection.in_chunk
        self._end_early(EngineFailed(f"{self._where()} failed in the middle of the response"), in_chunk)

    def _end_early(self, error: MidstreamError, in_chunk: bool = False) -> None:
        """End a response that cannot be completed so that no client takes it for whole."""
        if not self._answered:
            self._fail(error)
            return
        self._proxy.metrics.cut_responses[self._where()] += 1
        http10 = self._request.http10
        between_events = not self._tail or self._tail.endswith(b"\n\n" if http10 else b"\n\n\r\n")
        if self._event_stream and self._chunked and between_events and not in_chunk:
            event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
            self._client.end_short(event if http10 else b"%x\r\n%b\r\n" % (len(event), event))
        else:
            self._client.reset()

    def _leave(self) -> None:
        """Let go of the upstream; a connection in use is closed, which stops the work behind it."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._left()

    def _count(self, status: int) -> None:
        self._proxy.metrics.requests[self._path_class, status] += 1


class InferenceExchange(ControlExchange):
    """One request to a replica: placed by session and load, moved to another one when its replica fails."""

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection, path_class: str) -> None:
        super().__init__(proxy, request, client, path_class)
        self._key: str | None = None
        self._view: ReplicaView | None = None  # the last one chosen
        self._decision: Decision | None = None
        self._on_view = False  # counted in the view's in_flight
        self._tried: set[int] = set()

    def start(self) -> None:
        try:
            self._proxy.check_names(self._request.first)
            self._key = session_key(self._request.first, self._request.body)
        except MidstreamError as error:
            self._fail(error)
            return
        self._send_to_a_replica()

    def _send_to_a_replica(self) -> None:
        self._left()
        session = None if self._key is None else (self._tenant, self._key)
        decision = self._proxy.place(session, self._tried)
        if decision is None:
            self._fail(ReplicaUnavailable("no replica can take the request now"))
            return
        self._decision = decision
        self._view = self._proxy.views[decision.index]
        self._view.in_flight += 1
        self._on_view = True
        self._pool = self._proxy.pools[decision.index]
        self._send()

    def _unreachable(self, reason: str) -> None:
        assert self._view is not None
        self._proxy.metrics.upstream_errors[self._view.name] += 1
        logger.warning("%s failed before it answered: %s", self._view.name, reason)
        self._tried.add(self._view.index)
        if self._lost_sends >= LOST_SENDS_MAX:
            self._fail(ReplicaUnavailable("replicas failed while they worked on this request"))
            return
        self._proxy.metrics.retries["other_replica"] += 1
        self._send_to_a_replica()

    def _left(self) -> None:
        if self._on_view and self._view is not None:
            self._on_view = False
            self._view.in_flight -= 1

    def _session_header(self) -> list[bytes]:
        if self._key is None:
            return []
        return [_SESSION + b": " + quote(self._key, safe="", errors="surrogatepass").encode()]

    def _response_headers(self) -> bytes:
        assert self._view is not None
        assert self._decision is not None
        reason = self._decision.reason
        return f"x-midstream-replica: {self._view.name}\r\nx-midstream-route-reason: {reason}\r\n".encode()

    def _where(self) -> str:
        return "a replica" if self._view is None else self._view.name


def _listed(connection: bytes) -> frozenset[bytes]:
    """Header names that a Connection header declares to be hop-by-hop."""
    return frozenset(name.strip().lower() for name in connection.split(b","))
