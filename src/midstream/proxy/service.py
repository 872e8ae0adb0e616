"""The service behind every client connection of the gateway's port: who may send a request, and on which route it goes.

Owns: the client connections of a gateway process, and what they hold together (http/budget.py).
Always holds:
- A request without a valid key, or for inference without a scope to sample, is refused before its body is read.
- A request for inference counts against its tenant's bound from the moment its exchange is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from midstream.core.config import GatewaySettings
from midstream.core.errors import MidstreamError, Unauthorized
from midstream.core.scopes import EVERYTHING, SAMPLE, forbidden
from midstream.core.sessions import SESSION_HEADERS
from midstream.core.types import HEADER_RECORDS
from midstream.core.wires import check_one_session, split_session, wire_of
from midstream.http.budget import Bounds, Budget
from midstream.http.http1 import ClientConnection, Exchange
from midstream.http.reader import Request
from midstream.proxy.front import PREFIX as FRONT_PREFIX
from midstream.proxy.front import FrontRoute, FrontUnauthorized
from midstream.proxy.proxy import Proxy
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.request import ProxiedRequest
from midstream.proxy.route import Route

_HEALTH = b"/health"
_RECORDS = HEADER_RECORDS.encode()


class GatewayService:
    """Implements http1.Service. proxy: what its exchanges share."""

    def __init__(self, settings: GatewaySettings, proxy: Proxy) -> None:
        self._proxy = proxy
        self.clients: dict[ClientConnection, None] = {}
        together, of_one = settings.unfinished_body_bytes
        self.budget = Budget(
            Bounds(
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

    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> str | None:
        path = target.partition(b"?")[0]
        if path == _HEALTH and not _has_body(headers):
            return None
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
        return caller.tenant

    def refused(self, error: MidstreamError, request: Request | None, client: ClientConnection) -> None:
        self._proxy.metrics.requests["refused", error.status] += 1
        if request is None:
            return
        wire = wire_of(split_session(request.target)[1].partition(b"?")[0])
        if wire is None:
            self._proxy.audit.answered(request, client.peer, error.status)
        else:
            error.shape = wire.errors

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        session, target = split_session(request.target)
        path = target.partition(b"?")[0]
        wire = wire_of(path) if request.method == b"POST" else None
        if wire is not None:
            if session is not None:
                name_session(request, session, target)
            if self.budget.counts_requests:
                client.count_in_flight()
            route: Route = ReplicaRoute(self._proxy, request, wire)
        elif self._proxy.front is not None and path.startswith(FRONT_PREFIX):
            route = FrontRoute(self._proxy, request)
        else:
            route = Route(self._proxy, request)
        return ProxiedRequest(self._proxy, request, client, route)

    # -- the server's calls

    async def all_left(self) -> None:
        """Wait until no client connection is open."""
        if self.clients:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty


def name_session(request: Request, session: bytes, target: bytes) -> None:
    """Say by header what the path says. Raises InvalidRequest when a header names another session."""
    for name in SESSION_HEADERS:
        check_one_session(session, name, request.first.get(name.encode(), b""))
    said = (SESSION_HEADERS[0].encode(), session)
    # Who can set nothing but a base URL has the records all the same.
    request.first = {_RECORDS: b"routes", **request.first}
    request.target = target
    request.headers = [said, *(header for header in request.headers if header[0] != said[0])]
    request.first = {**request.first, said[0]: session}


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
