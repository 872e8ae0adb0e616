"""One request to a replica: placed by session and load, and what happens when that replica fails.

Always holds:
- A request is sent to another replica only while no response byte has been passed on (resume.py has streams go on), and
  never to more than LOST_SENDS_MAX replicas that then failed with it. After a 429 it is sent to one more.
- A request that is probably why replicas were lost (poison.py) is refused, now and when it comes again.
- A request of a session that lives on a replica gets that replica's 503 or 429, as long as the replica is usable.
- A session whose first request there was refused (425, 429, 503) has no home yet.
- While replicas may still have to say which sessions they hold, a request whose session is not known waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from midstream.errors import (
    HEADER_LOST,
    InvalidRequest,
    MidstreamError,
    Overloaded,
    ReplicaUnavailable,
    RequestLostReplicas,
    SnapshotTransition,
)
from midstream.fleet.prefixes import Prompt, read_prompt
from midstream.fleet.view import ReplicaView
from midstream.gateway.exchange import ControlExchange
from midstream.gateway.poison import KEPT_S, LARGE_BYTES, LOSSES_ALONE, Key, Life, key_of
from midstream.gateway.sessions import session_key
from midstream.http1 import ClientConnection
from midstream.http_message import Request
from midstream.types import HEADER_FOLLOW_PREFIX, HEADER_PLACED, HEADER_SESSION, Session

if TYPE_CHECKING:
    from midstream.gateway.proxy import Placed, Proxy

logger = logging.getLogger(__name__)

LOST_SENDS_MAX = 2  # replicas that fail with a request before a client has to ask again
HELD_BYTES_MAX = 64 * 2**10  # of a 503 or 429 that is held back until it is known to be whole

_SESSION = HEADER_SESSION.encode()
_PLACED = HEADER_PLACED.encode()
_FOLLOW = HEADER_FOLLOW_PREFIX.encode()
_LOST = HEADER_LOST.encode()
_REFUSALS = frozenset((SnapshotTransition.status, Overloaded.status, ReplicaUnavailable.status))


class InferenceExchange(ControlExchange):
    """One request to a replica: placed by session and load, moved to another one when its replica fails."""

    # Set only when a replica is lost, which few requests see.
    _suspect: Key | None = None  # a replica was lost with it, now or when it came before
    _lives: frozenset[Life] = frozenset()  # lost with it
    _died = False  # the replica's answer: its engine was lost with the request
    _served = False  # its answer is not a refusal
    _obvious = False  # the replica was given up, and no other request on it can have been the cause
    _boot = ""  # of the replica that it was sent to

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection, path_class: str) -> None:
        super().__init__(proxy, request, client, path_class)
        self._session: Session | None = None
        self._prompt: Prompt | None = None  # of a request that may follow it
        self._deployment = proxy.deployments.default
        self._view: ReplicaView | None = None  # the last one chosen
        self._placed: Placed | None = None
        self._waits = False  # for replicas to say which sessions they hold
        self._on_view = False  # counted in the view's in_flight
        self._tried: set[str] = set()
        self._lost_sends = 0  # replicas that failed with this request
        self._overloaded = False  # one had too much to do to take it
        self._held: tuple[int, bytes, list[tuple[bytes, bytes]]] | None = None  # the head of a 503 or 429
        self._held_body = b""

    def start(self) -> None:
        try:
            self._deployment = self._proxy.deployment_of(self._request, self._caller.grant)
            key = session_key(self._request.first, self._request.body)
            follows = _follows(self._request.first)
        except MidstreamError as error:
            self._fail(error)
            return
        if key is not None:
            self._session = (self._tenant, key)
        several = len(self._deployment.replicas.views) > 1
        if (key is None or follows) and several and self._proxy.follows_prefixes:
            self._prompt = read_prompt(self._tenant, self._request.body, short=follows)
        self._suspect = self._proxy.suspects.find(self._tenant, self._request.target, self._request.body)
        if self._suspect is not None and self._proxy.suspects.refuses(self._suspect):
            self._fail(_lost_replicas())
            return
        self._send_to_a_replica()

    def give_up(self, reason: str, together: Collection[InferenceExchange] = ()) -> None:
        """The replica does not answer any more, though its connection may be open. together: all that are given up with it."""
        self._obvious = self._is_the_largest(together)
        begun = self._connection is not None and self._connection.answering
        self._lost_here = self._lost_here or self._connection is not None
        in_chunk = self._leave()
        if self._answered:
            self._cut_short(in_chunk, reason)
        elif begun:
            self._fail(self._lost_with_it() or ReplicaUnavailable(reason))
        else:
            self._unreachable(reason)

    def _lost_with_it(self) -> RequestLostReplicas | None:
        """Note that a replica was lost with this request; the error, if it was probably the cause. A stream that had begun is
        a suspect only once a second replica was lost with it."""
        suspects, request = self._proxy.suspects, self._request
        assert self._view is not None
        self._lives |= {Life(self._view.name, self._boot)}
        if self._answered and len(self._lives) < LOSSES_ALONE:
            return None
        if self._suspect is None:
            self._suspect = key_of(self._tenant, request.target, request.body)
        beside = [other for other in self._beside() if other is not self]
        company = any(other.was_lost and other.differs(self._suspect) for other in beside)
        if not suspects.lost(self._suspect, self._lives, company=company, obvious=self._obvious):
            return None
        logger.error(
            "%s was lost with a request of %d bytes of tenant %r; it is refused from now on",
            self._view.name,
            len(request.body),
            self._tenant,
        )
        return _lost_replicas()

    def _beside(self) -> Collection[InferenceExchange]:
        """Exchanges on the same replica."""
        upstream = None if self._view is None else self._proxy.upstreams.get(self._view)
        return () if upstream is None else upstream.exchanges

    def _is_the_largest(self, together: Collection[InferenceExchange]) -> bool:
        """It has much to read, and all others have less, but for those that are equal to it."""
        large = len(self._request.body) >= LARGE_BYTES and not self._answered
        return large and all(other.size < self.size or other.equals(self) for other in together)

    @property
    def size(self) -> int:
        return len(self._request.body)

    def equals(self, other: InferenceExchange) -> bool:
        """The same is asked for the same tenant."""
        mine, theirs = self._request, other._request
        return (self._tenant, mine.target, mine.body) == (other._tenant, theirs.target, theirs.body)

    @property
    def was_lost(self) -> bool:
        """A replica was lost with it before."""
        return self._suspect is not None or bool(self._lives)

    def differs(self, key: Key) -> bool:
        return self._suspect != key

    # -- upstream.ResponseSink

    def response_head(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        if status in _REFUSALS:
            self._not_begun()
        self._served = status == 200
        self._died = status == ReplicaUnavailable.status and any(name == _LOST for name, _ in headers)
        if status in _REFUSALS and (self._died or self._may_go_elsewhere(status)):
            self._held, self._held_body = (status, reason, headers), body
        else:
            super().response_head(status, reason, headers, body)

    def response_body(self, data: bytes) -> None:
        if self._held is None:
            super().response_body(data)
            return
        self._held_body += data
        if len(self._held_body) > HELD_BYTES_MAX:
            self._release()

    def response_end(self) -> None:
        if self._suspect is not None and self._served:
            self._proxy.suspects.forget(self._suspect)
        error = self._lost_with_it() if self._died else None
        if error is not None:
            self._held = self._connection = None
            self._fail(error)
            return
        if self._held is not None and self._may_go_elsewhere(self._held[0]):
            status, self._held, self._connection = self._held[0], None, None
            self._overloaded = self._overloaded or status == Overloaded.status
            self._lost_here = status != Overloaded.status  # it may have failed while it worked on the request
            self._go_elsewhere(died=False)  # it was noted
            return
        self._release()
        super().response_end()

    def relay_begun(self) -> None:
        super().relay_begun()
        self._served = True

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            super().response_head(*held, self._held_body)

    # -- which replica

    def _send_to_a_replica(self) -> None:
        self._left()
        if self._deployment.replicas.learning and self._may_be_told():
            self._waits = True
            self._deployment.replicas.wait(self._send_to_a_replica)
            return
        placed = self._placed = self._place()
        if placed is None:
            self._not_placed()
            return
        self._view = placed.view
        self._view.in_flight += 1
        if self._prompt is not None:
            self._deployment.prefixes.begin(self._prompt)
        upstream = self._proxy.upstream(self._view)
        upstream.exchanges.add(self)
        self._on_view = True
        self._lost_here = self._obvious = False
        report = self._view.report
        self._boot = "" if report is None else report.boot
        self._pool = upstream.pool
        self._send()

    def _place(self) -> Placed | None:
        return self._proxy.place(self._deployment, self._session, self._tried, self._eligible(), self._prompt)

    def _eligible(self) -> Callable[[ReplicaView], bool] | None:
        """Who may take it of those that are usable; None: all."""
        return None

    def _not_placed(self) -> None:
        self._fail(ReplicaUnavailable("no replica can take the request now"))

    def _not_begun(self) -> None:
        """A replica refused this request: a session that has nothing there yet may begin elsewhere. One that another request
        began there meanwhile has the replica's own stamp."""
        assert self._placed is not None
        if self._session is not None and self._placed.stamp:
            self._deployment.sessions.forget(self._session, self._placed.view.name, self._placed.stamp)

    def _may_be_told(self) -> bool:
        """A replica may yet say that it holds the session, or become usable."""
        replicas, session = self._deployment.replicas, self._session
        if session is None:
            return not replicas.fleet.members
        home = self._deployment.sessions.home(session)
        view = None if home is None else replicas.named(home)
        return view is None or not view.usable

    def _may_go_elsewhere(self, status: int) -> bool:
        """A replica that says it cannot take the request need not have the last word."""
        view, placed = self._view, self._placed
        assert view is not None
        assert placed is not None
        if status == SnapshotTransition.status or (status == Overloaded.status and self._overloaded):
            return False
        return (
            (self._session is None or placed.stamp is not None or not view.usable)
            and (status == Overloaded.status or self._lost_sends + 1 < LOST_SENDS_MAX)
            and self._proxy.has_another(self._deployment, {*self._tried, view.name}, self._eligible())
        )

    def _refused(self) -> None:
        assert self._view is not None
        self._deployment.replicas.refused(self._view)

    def _unreachable(self, reason: str) -> None:
        assert self._view is not None
        self._proxy.metrics.upstream_errors[self._view.name] += 1
        logger.warning("%s failed before it answered: %s", self._view.name, reason)
        self._deployment.replicas.failed(self._view)
        self._go_elsewhere(died=self._lost_here)

    def _cut_short(self, in_chunk: bool, reason: str) -> None:
        error = self._lost_with_it()
        if error is None:
            super()._cut_short(in_chunk, reason)
        else:
            self._left()
            self._end_early(error, in_chunk)

    def _go_elsewhere(self, *, died: bool) -> None:
        """died: the replica was lost, or its engine, with the request."""
        assert self._view is not None
        error = self._lost_with_it() if died else None
        if error is not None:
            self._fail(error)
            return
        self._tried.add(self._view.name)
        self._lost_sends += self._lost_here
        if self._lost_sends >= LOST_SENDS_MAX:
            self._fail(ReplicaUnavailable("replicas failed while they worked on this request"))
            return
        self._proxy.metrics.retries["other_replica"] += 1
        self._send_to_a_replica()

    def _left(self) -> None:
        if self._waits:
            self._waits = False
            self._deployment.replicas.wait_no_more(self._send_to_a_replica)
        if self._on_view and self._view is not None:
            self._on_view = False
            self._view.in_flight -= 1
            if self._prompt is not None:
                self._deployment.prefixes.end(self._prompt)
            if self._answered and self._view.failures:
                self._view.failures = 0
            self._proxy.upstreams[self._view].exchanges.discard(self)

    # -- what kinds of exchanges differ in

    def _upstream_headers(self) -> list[bytes]:
        lines = [self._proxy.replica_header] if self._proxy.replica_header else []
        if self._session is not None:
            key = quote(self._session[1], safe="", errors="surrogatepass")
            lines.append(_SESSION + b": " + key.encode())
            if self._placed is not None and self._placed.stamp is not None:
                lines.append(_PLACED + b": %d" % self._placed.stamp)
        return lines

    def _response_headers(self) -> bytes:
        assert self._view is not None
        assert self._placed is not None
        reason = self._placed.decision.reason
        return f"x-midstream-replica: {self._view.name}\r\nx-midstream-route-reason: {reason}\r\n".encode()

    def _where(self) -> str:
        return "a replica" if self._view is None else self._view.name


def _lost_replicas() -> RequestLostReplicas:
    return RequestLostReplicas(
        f"replicas were lost while they worked on this request; it is not tried again within {KEPT_S:g} s"
    )


def _follows(headers: Mapping[bytes, bytes]) -> bool:
    """Whether an unknown session begins where its prompt's beginning is known. Raises InvalidRequest."""
    value = headers.get(_FOLLOW)
    if value is not None and value.strip() != b"1":
        raise InvalidRequest(f"{HEADER_FOLLOW_PREFIX} is 1, or is left out", param=HEADER_FOLLOW_PREFIX)
    return value is not None
