"""What a request asks on its way (request_state.py): where it may go, and what an answer or a loss means for it.

Owns: the port between the policies and the one class that does the I/O (request.py). Owns also the simplest policy, for the
one control app. Requests for replicas ask ReplicaRoute (replica_route.py).
Always holds: a policy does no I/O on the request; it answers with an event of the table.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from midstream.core.errors import EngineFailed, ErrorShape, MidstreamError, ReplicaUnavailable
from midstream.core.headers import HEADER_OVERWRITE
from midstream.core.tracing import Attribute
from midstream.core.wires import TRAINER_HEALTH
from midstream.http.message import Request
from midstream.proxy.request_state import RequestEvent, RequestPhase

if TYPE_CHECKING:
    from midstream.fleet.replica_set import ReplicaSet
    from midstream.proxy.poison import Losses
    from midstream.proxy.proxy import AtReplica, Proxy
    from midstream.proxy.resume import ResumeLog
from midstream.http.upstream import UpstreamHead

logger = logging.getLogger(__name__)
#: They need no key.
HEALTH_PATHS = frozenset((b"/health", *(path.encode() for path in TRAINER_HEALTH)))

_OWN_SHORTAGES = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
)
_OVERWRITE = HEADER_OVERWRITE.encode()


class Until(NamedTuple):
    """When to ask again: at a change of the replicas, with `any_report` at any report; at the latest at `at` (loop time)."""

    replicas: ReplicaSet
    any_report: bool = True
    at: float | None = None


class Judgement(NamedTuple):
    """subject: the error of FAILED, the Until of NOT_YET, or the bytes that the client gets before the END of its response."""

    event: RequestEvent
    subject: MidstreamError | Until | bytes = b""


class ConnectionLoss(NamedTuple):
    """A connection was lost. answered: at least one byte of a response had arrived. whole: it was a response so far.
    fresh: the connection was opened for this request."""

    reason: str
    answered: bool
    whole: bool
    fresh: bool


PLACED, STALE, ELSEWHERE, HEAD = (
    Judgement(event)
    for event in (RequestEvent.PLACED, RequestEvent.STALE, RequestEvent.ELSEWHERE, RequestEvent.HEAD)
)


class Route:
    """A request to the control app."""

    path_class = "control"
    #: Whether its answer has a line in the audit log.
    audited: bool
    #: Whether the metrics count it.
    counted: bool
    #: Whether it has a span, where spans are exported.
    traced = False
    #: Whether the upstream's own x-midstream- headers are for the client.
    shows_labels: bool
    #: How its client reads errors.
    errors: ErrorShape = "openai"
    #: Of the stream that is passed on, if another replica may continue it.
    log: ResumeLog | None
    #: The replicas that were lost with it, if any were.
    losses: Losses | None

    def __init__(self, proxy: Proxy, request: Request) -> None:
        self._proxy = proxy
        self._request = request
        # Every request asks for these, and what a class holds takes longer to look up.
        self.audited, self.counted, self.shows_labels = True, True, False
        self.log = self.losses = None
        self.caller = request.caller or proxy.caller(request)
        self.pool = proxy.control
        # What is sent; the rest of a stream is asked for by another request than the client's.
        self.target, self.body = request.target, request.body

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where()})"

    # -- before there is an upstream

    def start(self) -> None:
        """Read what the request says of its way. Raises MidstreamError to refuse it."""

    def place(self) -> Judgement:
        """PLACED, NOT_YET or FAILED."""
        return PLACED

    # -- at an upstream

    def enter(self, request: AtReplica) -> None:
        """It goes to the upstream that was chosen."""

    def leave(self) -> None:
        """It is at no upstream any more. May be called again."""

    def not_connected(self, phase: RequestPhase, error: OSError) -> Judgement:
        """No connection could be opened."""
        return self._failed(shortage(error, self.where()) or self._down(reason_of_failure(error)))

    def own_lines(self) -> list[bytes]:
        """Header lines for the upstream, with their ends: the caller's own x-midstream- headers that a signal may have."""
        given = self._request.first.get(_OVERWRITE)
        lines = [] if given is None else [b"%b: %b\r\n" % (_OVERWRITE, given)]
        return [*self._proxy.scopes_header(self.caller), *lines]

    def response_lines(self) -> list[bytes]:
        """Header lines for the client, with their ends."""
        return []

    # -- what an upstream answers

    def head(self, phase: RequestPhase, head: UpstreamHead) -> RequestEvent:
        """HEAD, or the reason of a refusal."""
        return RequestEvent.HEAD

    def held(self, phase: RequestPhase, refusal: RequestEvent, head: UpstreamHead) -> Judgement:
        """A refusal has been read: HEAD (the client gets it after all), ELSEWHERE or FAILED."""
        return HEAD

    def ended(self) -> None:
        """The client's response is whole. Called only if replicas were lost with it."""

    def lost(self, phase: RequestPhase, loss: ConnectionLoss) -> Judgement:
        """STALE, ELSEWHERE, LOST, END or FAILED."""
        if phase is RequestPhase.PASSING:
            return self._cut_short(loss.reason)
        if loss.answered:
            return self._failed(EngineFailed(f"{self.where()}: {loss.reason}"))
        return self._failed(self._down(loss.reason)) if loss.fresh else self._stale()

    def silent(
        self, phase: RequestPhase, reason: str, *, answering: bool, together: Collection[AtReplica]
    ) -> Judgement:
        """Nothing was heard of the upstream for long: as `lost`. together: all that are given up."""
        raise NotImplementedError

    def leaves(self, phase: RequestPhase, reason: str) -> Judgement | None:
        """Its upstream's time is over: ELSEWHERE or LOST; None: it stays."""
        return None

    def where(self) -> str:
        return "the control app"

    def span_attributes(self) -> dict[str, Attribute]:
        """What a span says of its way."""
        return {}

    def shaped(self, error: MidstreamError) -> MidstreamError:
        """The error as this request's client expects it."""
        error.shape = self.errors
        return error

    # -- inside

    def _failed(self, error: MidstreamError) -> Judgement:
        return Judgement(RequestEvent.FAILED, error)

    def _stale(self) -> Judgement:
        """Nothing answered on a pooled connection, which was perhaps only stale: a fresh one shows it."""
        self._proxy.metrics.retries["stale_connection"] += 1
        return STALE

    def _cut_short(self, reason: str) -> Judgement:
        logger.warning("a response of %s was cut short: %s", self.where(), reason)
        error = EngineFailed(f"{self.where()} failed in the middle of the response")
        return Judgement(RequestEvent.FAILED, error)

    def _down(self, reason: str) -> ReplicaUnavailable:
        return ReplicaUnavailable(f"{self.where()}: {reason}")


def is_probe(request: Request) -> bool:
    """True if the request only asks whether the server is there. A 503 to such a request is an answer and no error."""
    return request.method == b"HEAD" or request.target.partition(b"?")[0] in HEALTH_PATHS


def reason_of_failure(error: OSError) -> str:
    return str(error) or "connecting took too long"


def shortage(error: OSError, where: str) -> ReplicaUnavailable | None:
    """The error when the gateway itself lacks descriptors, ports or memory, which is never the upstream's fault."""
    if error.errno not in _OWN_SHORTAGES:
        return None
    logger.error("the gateway cannot connect to %s: %s", where, reason_of_failure(error))
    return ReplicaUnavailable("the gateway is short of resources")
