"""What all requests share: which deployment and which replica serve a request, and the connections to them.

Owns: placement, the pools of connections to replicas, control app and front, and who is on which replica.
How one of them goes is in request.py and request_state.py; what happens when its replica fails is in replica_route.py.
Always holds:
- A session's home changes only when its replica is not usable, or hands a turn of it over. A replica that fails a request
  while it stays usable is passed over for that request alone.
- With one deployment no body is looked into for its model, unless the key is for some deployments only.
- A request for inference reaches a replica only of a deployment that its key may sample from.
- `in_flight` of a replica counts exactly the requests that are on it.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from midstream.core.config import GatewaySettings
from midstream.core.errors import Unauthorized
from midstream.core.headers import (
    HEADER_DEPLOYMENT,
    HEADER_MODEL,
    HEADER_POLICY,
    HEADER_TENANT,
    HEADER_TOKEN,
    HEADER_UNKNOWN_FIELDS,
)
from midstream.core.price import Handed, Moved
from midstream.core.scopes import EVERYTHING, OBSERVE, SAMPLE, Grant
from midstream.core.tracing import HEADER_TRACEPARENT, Tracer
from midstream.core.types import Session
from midstream.core.wires import UserField
from midstream.fleet.access import meant, scopes_header
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.placement import Decision, Fleet, sticky
from midstream.fleet.prefixes import PrefixTable, PromptBeginnings
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.sessions import body_model
from midstream.fleet.subscription import token_header
from midstream.fleet.view import ReplicaView
from midstream.http.auth import CREDENTIALS, NOBODY, Authenticator, Caller
from midstream.http.message import HOP_BY_HOP, Request
from midstream.http.upstream import UpstreamPool
from midstream.proxy.audit import AuditLog
from midstream.proxy.heads import UpstreamLines
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.poison import Suspects

logger = logging.getLogger(__name__)

_TOKEN, _POLICY, _TENANT = HEADER_TOKEN.encode(), HEADER_POLICY.encode(), HEADER_TENANT.encode()
_DEPLOYMENT, _MODEL = HEADER_DEPLOYMENT.encode(), HEADER_MODEL.encode()
_IGNORE, _REFUSE = [HEADER_UNKNOWN_FIELDS.encode() + b": ignore\r\n"], list[bytes]()
_SUPERVISOR = msgspec.structs.replace(NOBODY, grant=Grant(frozenset({(OBSERVE, None)})))
_NOT_FORWARDED = HOP_BY_HOP | {b"content-length", b"expect"}


@dataclass(frozen=True)
class Pools:
    """Connections. to: makes the pool of a base URL. control: to the control app. front: to the Tinker front."""

    to: Callable[[str], UpstreamPool]
    control: UpstreamPool
    front: UpstreamPool | None = None


class Proxy:
    """The state that all requests of a gateway process share."""

    def __init__(
        self,
        settings: GatewaySettings,
        deployments: Deployments,
        metrics: GatewayMetrics,
        pools: Pools,
        *,
        replica_token: str | None = None,
        unreachable_s: float = 10.0,
    ) -> None:
        """replica_token: the secret sent to replicas only. unreachable_s: how long a replica may send nothing
        before the requests on it are given up.
        """
        self.deployments = deployments
        self.upstreams: dict[KnownReplica, Upstream] = {}
        self._token = (replica_token or "").encode()
        self.replica_header = token_header(replica_token).encode()
        #: What durations are measured with.
        self.clock = time.perf_counter
        self._unreachable_s = unreachable_s
        self._pool_to = pools.to
        self.control = pools.control
        self.front = pools.front
        self.metrics = metrics
        #: Set before the first request where spans are exported.
        self.tracer: Tracer | None = None
        self.suspects = Suspects()
        self.dropped_headers = _NOT_FORWARDED
        self.auth = Authenticator(settings.api_keys)
        self.audit = AuditLog(deployments)
        # A credential goes no further than the check.
        if self.auth.required:
            self.dropped_headers |= frozenset(CREDENTIALS)
        self.upstream_lines = UpstreamLines(self.dropped_headers)
        # The span's own takes the place of the client's.
        self.traced_lines = self.upstream_lines.without(frozenset((HEADER_TRACEPARENT.encode(),)))
        self._bound = settings.load_bound
        self.follows_prefixes = settings.follow_prefixes
        self.ignores_fields = settings.unknown_fields == "ignore"
        self._turn = 0
        self._request_ids = itertools.count()
        self._request_id_line = b"x-request-id: %b-" % os.urandom(8).hex().encode()

    # -- the server's calls

    def check_replicas(self, now: float) -> None:
        """Give up the requests on replicas that have been unreachable for long, and let those go on elsewhere whose replica's
        time is over. Call it regularly."""
        for replica, upstream in list(self.upstreams.items()):
            if replica.leaves_at is not None and time.time() >= replica.leaves_at:
                for request in list(upstream.requests):
                    request.leave(f"{replica.name} leaves")
            if replica.heard is not None:
                upstream.unheard_since = None
                continue
            if upstream.unheard_since is None:
                upstream.unheard_since = now
            if now - upstream.unheard_since >= self._unreachable_s:
                # The list says who was there: each one leaves as it is given up.
                together = list(upstream.requests)
                for request in together:
                    request.give_up(_silent(replica, self._unreachable_s), together)
            if replica.standing == "gone" and not upstream.requests:
                del self.upstreams[replica]
                upstream.pool.close()

    def close(self) -> None:
        """Close every connection to a replica, to the control app and to the front."""
        for upstream in self.upstreams.values():
            upstream.pool.close()
        self.control.close()
        if self.front is not None:
            self.front.close()

    # -- for routes

    def caller(self, request: Request) -> Caller:
        """The caller of a request whose head was not checked for a key (service.py)."""
        try:
            return self.auth.caller(request.first)
        except Unauthorized:
            # /health needs no key: the server's own supervisor has none.
            given = request.first.get(_TOKEN, b"")
            known = bool(self._token) and hmac.compare_digest(given, self._token)
            return _SUPERVISOR if known else NOBODY

    def scopes_header(self, caller: Caller) -> list[bytes]:
        """The scopes of the caller, for the control app; none if keys are not in use."""
        return [scopes_header(caller.grant)] if self.auth.required else []

    def deployment_lines(self, deployment: Deployment) -> list[bytes]:
        """The head lines that describe the deployment to a replica: its policy, and unknown fields if they are ignored."""
        own = deployment.host.ignores_fields
        lines = _IGNORE if own or (own is None and self.ignores_fields) else _REFUSE
        if deployment.policy:
            return [*lines, b"%b: %b\r\n" % (_POLICY, deployment.policy.encode())]
        return lines

    def sender_lines(self, request: Request, caller: Caller) -> list[bytes]:
        """The head lines for an upstream that say which request this is, and whose."""
        lines = []
        if b"x-request-id" not in request.first:
            lines.append(self._request_id_line + b"%x\r\n" % next(self._request_ids))
        if caller.tenant:
            lines.append(b"%b: %b\r\n" % (_TENANT, caller.tenant.encode()))
        return lines

    def deployment_of(self, request: Request, grant: Grant, user: UserField = "user") -> Deployment:
        """The deployment that a request for inference is for. user: as in core/wires.py.

        Raises Forbidden, NotFound, and InvalidRequest when its model's name fits several.
        """
        headers, default = request.first, self.deployments.default
        named = _DEPLOYMENT in headers or _MODEL in headers
        if grant is EVERYTHING and not named and self.deployments.single:
            # Nearly all requests take this branch.
            return default
        deployment = _decoded(headers.get(_DEPLOYMENT))
        model = _decoded(headers.get(_MODEL))
        limited = grant is not EVERYTHING and not grant.everywhere((SAMPLE,))
        in_body = deployment is None and model is None and (limited or not self.deployments.single)
        asked = body_model(request.body, user) if in_body else None

        def find() -> Deployment:
            if asked is not None:
                return self.deployments.find(asked, param="model")
            return self.deployments.decide(deployment, model) or default

        if limited:
            return meant(grant, (SAMPLE,), find, deployment, asked or model)
        return find()

    def upstream(self, replica: KnownReplica) -> Upstream:
        found = self.upstreams.get(replica)
        if found is None:
            found = self.upstreams[replica] = Upstream(self._pool_to(replica.url))
        return found

    def routes_at(self, view: ReplicaView) -> list[Any]:
        """The replica_route.ReplicaRoute of each request that is on the replica."""
        upstream = self.upstreams.get(view.replica)
        return [] if upstream is None else [one.route for one in upstream.requests]

    def place(
        self,
        deployment: Deployment,
        session: Session | None,
        tried: Collection[str] = (),
        eligible: Callable[[ReplicaView], bool] | None = None,
        prompt: PromptBeginnings | None = None,
        body: bytes = b"",
    ) -> Placed | None:
        """Choose a replica that is usable, not in `tried`, and `eligible`.

        A request that may move avoids replicas that take nothing new.

        It becomes the session's home, unless the session has a usable one that only cannot serve this request. prompt: a
        request without a session, or with an unknown one, goes where the beginning of its prompt is cached. body: what the
        group of a new session is read from.
        """
        replicas, prefixes = deployment.replicas, deployment.prefixes
        lives = None if session is None else deployment.sessions.lives(session)
        home = None if lives is None else lives[0]
        at_home = None if home is None else replicas.named(home)
        if at_home is not None and not at_home.usable:
            at_home = None
        if at_home is not None and at_home.name not in tried and (eligible is None or eligible(at_home)):
            placed = Placed(at_home, sticky(at_home.name))
            if session is not None and lives is not None and lives[1] == 0:
                # Its home only served it in passing, so that other gateways may know another one.
                placed.stamp = deployment.sessions.settle(session, at_home.name)
        else:
            fleet = replicas.fleet
            if tried or eligible is not None:
                fleet = _rest(replicas, tried, eligible)
            found = None if prompt is None or home is not None else self._follow(fleet, prefixes, prompt)
            if found is None and session is None:
                found = fleet.place_request(self._turn)
                self._turn += 1
            elif found is None and session is not None:
                found = self._place_session(deployment, fleet, session, home, body)
            if found is None:
                return None
            placed = Placed(*found)
            if session is not None:
                # A policy may not be loaded yet where its session lives.
                stays = at_home is not None or (home is not None and deployment.lives_on(home))
                placed.stamp = 0 if stays else deployment.sessions.settle(session, placed.view.name)
                if home is not None and placed.stamp:
                    self._moves(placed, replicas, home)
                    if placed.came_from:
                        deployment.sessions.moved[session] = placed.stamp
        if prompt is not None:
            prefixes.learn(prompt, placed.view.name)
        self._note(placed, session)
        return placed

    def _place_session(
        self,
        deployment: Deployment,
        fleet: Fleet[ReplicaView],
        session: Session,
        home: str | None,
        body: bytes,
    ) -> tuple[ReplicaView, Decision] | None:
        """body: of its first request, if it has no home."""
        counts, prefixes, group = deployment.sessions.counts, deployment.prefixes, None
        if home is not None and deployment.replicas.leaves(home):
            return fleet.place_leaving(session, self._bound, home, counts)
        if home is None and self.follows_prefixes and len(fleet) > 1:
            group = prefixes.group(session[0], body)
        found = fleet.place_session(session, self._bound, home, counts, group)
        if found is not None and group is not None:
            prefixes.joined(group, found[0].name)
        return found

    def _moves(self, placed: Placed, replicas: ReplicaSet, home: str) -> None:
        """A session whose home is not usable has moved. What that knows of its turns goes with it, if it is heard."""
        before = replicas.heard(home)
        self.metrics.moves["lost" if before is None else "leaving"] += 1
        placed.moved = Moved(url="" if before is None else before.url)
        placed.came_from = "" if before is None else home

    def _note(self, placed: Placed, session: Session | None) -> None:
        self.metrics.routes[placed.decision.reason] += 1
        # A session that is placed or moves is worth a line; a turn that goes home, or a request without a session, is not.
        level = logging.INFO if placed.stamp else logging.DEBUG
        if logger.isEnabledFor(level):
            _log(level, session, placed.view.replica, placed.decision)

    def hand_over(
        self,
        deployment: Deployment,
        session: Session | None,
        placed: Placed,
        handed: Handed | None,
        tried: Collection[str],
        eligible: Callable[[ReplicaView], bool] | None = None,
    ) -> Placed:
        """Where a turn goes that its home, `placed`, hands over. If no other replica takes it for less, that keeps it."""
        self.metrics.retries["handed_over"] += 1
        home = placed.view
        found = (
            None if handed is None else self._other_home(deployment, session, home, handed, tried, eligible)
        )
        if handed is None or found is None:
            stamp = placed.stamp
            if session is not None and stamp:
                stamp = deployment.sessions.settle(session, home.name)
            return Placed(home, placed.decision, stamp)
        other = Placed(*found)
        if session is not None and deployment.sessions.home(session) != other.view.name:
            # 0: its session lives on where this one turn cannot be served.
            other.stamp = (
                placed.stamp if placed.stamp == 0 else deployment.sessions.settle(session, other.view.name)
            )
            if other.stamp:
                url = home.url if handed.begun else ""
                other.moved = Moved(url=url, begun=handed.begun, age_s=handed.age_s, opened=handed.opened)
                if handed.begun:
                    other.came_from = home.name
                    deployment.sessions.moved[session] = other.stamp
                self.metrics.moves[handed.reason] += 1
        self._note(other, session)
        return other

    def _other_home(
        self,
        deployment: Deployment,
        session: Session | None,
        home: ReplicaView,
        handed: Handed,
        tried: Collection[str],
        eligible: Callable[[ReplicaView], bool] | None,
    ) -> tuple[ReplicaView, Decision] | None:
        replicas, tried = deployment.replicas, {*tried, home.name}
        fleet = _rest(replicas, tried, eligible)
        if session is None:
            self._turn += 1
            return fleet.place_request(self._turn)
        lives = deployment.sessions.home(session)
        for view in fleet.members:
            if view.name == lives:
                # Another turn of it was handed over before.
                return view, sticky(view.name)
        found = deployment.mover.place(handed, home.name, tried, eligible, replicas)
        if found is None and handed.reason == "leaving":
            return fleet.place_leaving(session, self._bound, home.name, deployment.sessions.counts)
        return found

    def _follow(
        self, fleet: Fleet[ReplicaView], prefixes: PrefixTable, prompt: PromptBeginnings
    ) -> tuple[ReplicaView, Decision] | None:
        known = prefixes.find(prompt)
        return None if known is None else fleet.place_prefix(known, self._bound)

    def has_another(
        self,
        deployment: Deployment,
        tried: Collection[str],
        eligible: Callable[[ReplicaView], bool] | None = None,
    ) -> bool:
        """A replica that is usable, not in `tried`, and `eligible`."""
        return bool(_others(deployment.replicas, tried, eligible))


class Placed(msgspec.Struct):
    """Where a request goes. stamp: that of the session placed there, or 0 if for this request alone; None: no session is
    placed. moved: what its new home learns of a session that lived elsewhere, on `came_from` if that may take it back."""

    view: ReplicaView
    decision: Decision
    stamp: int | None = None
    moved: Moved | None = None
    came_from: str = ""


class AtReplica(Protocol):
    """A request that is on a replica (request.py)."""

    #: Its replica_route.ReplicaRoute.
    route: Any

    def give_up(self, reason: str, together: Collection[AtReplica]) -> None:
        """The replica does not answer any more. together: all requests that are given up with it."""

    def leave(self, reason: str) -> None:
        """The replica's time is over. The request continues on another replica, if it can."""


class Upstream:
    """The gateway's connections to one replica, and the requests on it."""

    __slots__ = ("pool", "requests", "unheard_since")

    def __init__(self, pool: UpstreamPool) -> None:
        self.pool = pool
        self.requests: dict[AtReplica, None] = {}
        # When check_replicas first saw it without a report.
        self.unheard_since: float | None = None

    def __repr__(self) -> str:
        return f"Upstream({len(self.requests)} requests, {self.pool})"


def _log(level: int, session: Session | None, at: KnownReplica, decision: Decision) -> None:
    key = "-" if session is None else session[1]
    # It is a client's. What could end a line, or hide a part of it, is shown as an escape.
    if not key.isprintable():
        key = key.encode("unicode_escape").decode()
    named = {"replica": at.name, "session": None if session is None else session[1]}
    logger.log(level, "Hash key '%s' mapped to worker: %s (index=%d)", key, at.url, at.index, extra=named)
    logger.debug("Placement of '%s': %s: %s", key, decision.reason, decision.explanation)


def _rest(
    replicas: ReplicaSet, tried: Collection[str], eligible: Callable[[ReplicaView], bool] | None
) -> Fleet[ReplicaView]:
    """The replicas that may take a request which some must not take."""
    left = _others(replicas, tried, eligible)
    return Fleet([view for view in left if view.admitting] or left)


def _others(
    replicas: ReplicaSet, tried: Collection[str], eligible: Callable[[ReplicaView], bool] | None
) -> list[ReplicaView]:
    return [
        view
        for view in replicas.views
        if view.usable and view.name not in tried and (eligible is None or eligible(view))
    ]


def _silent(replica: KnownReplica, lasts_s: float) -> str:
    message = f"nothing was heard of {replica.name} for {lasts_s:g} s"
    return f"{message}; {replica.last_words}" if replica.last_words else message


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
