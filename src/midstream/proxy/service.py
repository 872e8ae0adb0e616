"""The service behind every client connection of the gateway's port: who may send a request, and on which route it goes.

Owns: the client connections of a gateway process, and what they hold together (http/budget.py).
Always holds:
- A request without a valid key, or for inference without a scope to sample, is refused before its body is read.
- A session that a path names reaches a replica as the gateway's own header alone. No other header is made of a path.
- A request for inference counts against its tenant's bound from the moment its exchange is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from midstream.core.config import GatewaySettings
from midstream.core.errors import MidstreamError, Unauthorized
from midstream.core.pages import DASHBOARD_EVENTS, PAGES_OPEN
from midstream.core.scopes import EVERYTHING, SAMPLE, forbidden
from midstream.core.wires import WIRES_OF_TARGETS, is_read_in_session, split_session, wire_of
from midstream.http.auth import ANYBODY, Caller
from midstream.http.budget import Budget, BudgetBounds
from midstream.http.http1 import ClientConnection, Exchange
from midstream.http.message import Request
from midstream.proxy.front import PREFIX as FRONT_PREFIX
from midstream.proxy.front import FrontRoute, FrontUnauthorized
from midstream.proxy.proxy import Proxy
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.request import ProxiedRequest
from midstream.proxy.responses_route import RESPONSES, ResponsesRoute
from midstream.proxy.route import HEALTH_PATHS, Route, is_probe

#: Paths that answer without a key, with what every client may see.
_OPEN = HEALTH_PATHS | {path.encode() for path in PAGES_OPEN}
_EVENTS = DASHBOARD_EVENTS.encode()


class GatewayService:
    """Implements http1.Service. proxy: what its exchanges share."""

    def __init__(self, settings: GatewaySettings, proxy: Proxy) -> None:
        self._proxy = proxy
        self.clients: dict[ClientConnection, None] = {}
        together, of_one = settings.unfinished_body_bytes
        self.budget = Budget(
            BudgetBounds(
                unfinished_body_bytes=together,
                unfinished_body_bytes_per_tenant=of_one,
                connections_per_tenant=settings.max_connections_per_tenant,
                requests_per_tenant=settings.max_requests_per_tenant,
            )
        )
        self.draining = False
        self._empty: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"GatewayService({len(self.clients)} connections{', draining' if self.draining else ''})"

    # -- http1.Service

    def connected(self, client: ClientConnection) -> None:
        self.clients[client] = None

    def disconnected(self, client: ClientConnection) -> None:
        self.clients.pop(client, None)
        if self._empty is not None and not self.clients and not self._empty.done():
            self._empty.set_result(None)

    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> Caller | None:
        path = target if target in WIRES_OF_TARGETS else target.partition(b"?")[0]
        if path in _OPEN and not _has_body(headers):
            return None
        if not self._proxy.auth.required:
            return ANYBODY
        try:
            caller = self._proxy.auth.caller(headers)
        except Unauthorized as error:
            if self._proxy.front is not None and target.startswith(FRONT_PREFIX):
                raise FrontUnauthorized(error.message) from error
            raise
        grant = caller.grant
        inference = grant is not EVERYTHING and wire_of(split_session(path)[1]) is not None
        if inference and not grant.anywhere((SAMPLE,)):
            raise forbidden((SAMPLE,), "any deployment")
        return caller

    def refused(self, error: MidstreamError, request: Request | None, client: ClientConnection) -> None:
        if request is None or not is_probe(request):
            self._proxy.metrics.requests["refused", error.status] += 1
        if request is None:
            return
        wire = wire_of(split_session(request.target)[1].partition(b"?")[0])
        if wire is None:
            caller = request.caller or self._proxy.caller(request)
            self._proxy.audit.answered(request, caller, client.peer, error.status)
        else:
            error.shape = wire.errors

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        session: bytes | None = None
        target = request.target
        wire = WIRES_OF_TARGETS.get(target)
        if wire is None or request.method != b"POST":
            session, target = split_session(target)
            path = target.partition(b"?")[0]
            wire = wire_of(path) if request.method == b"POST" else None
        if wire is not None:
            if session is not None:
                # The same request under another session is the same to those who judge what it does to replicas.
                request.target = target
            if self.budget.counts_requests:
                client.count_in_flight()
            kind = ResponsesRoute if wire.name == RESPONSES else ReplicaRoute
            route: Route = kind(self._proxy, request, wire, session)
        elif self._proxy.front is not None and request.target.startswith(FRONT_PREFIX):
            route = FrontRoute(self._proxy, request)
        else:
            route = Route(self._proxy, request)
            if path == _EVENTS:
                # It lasts as long as a page is open, which is not how long a control call takes.
                route.path_class = "dashboard"
            route.counted = not is_probe(request)
            if session is not None and is_read_in_session(request.method, path):
                route.target = target
        return ProxiedRequest(self._proxy, request, client, route)

    # -- the server's calls

    async def all_left(self) -> None:
        """Wait until no client connection is open."""
        if self.clients:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
