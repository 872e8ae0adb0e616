"""Where a request for inference goes: placed by session, version constraint and load, and what follows when its replica fails.

What is known of one such request is in request_facts.py. The judgements are those of placement (fleet/), versions.py, resume.py
and poison.py.
Always holds:
- A request is sent to another replica only while no response byte has been passed on, and at most LOST_SENDS_MAX replicas fail
  with it. After a 429 it is sent to one more. A stream is resumed once, within the same bound.
- Another replica is asked only for what it can do exactly, unless the client takes any. A session moves to where its stream was
  resumed. A resumed stream is still bound to the snapshot that it is pinned to.
- A request that is probably why replicas were lost (poison.py) is refused, now and when it comes again.
- What follows a refusal is the ruling of the table (request_state.RULINGS).
- A request of a session that lives on a replica gets that replica's 503 or 429, as long as the replica is usable. One that says
  that its boot or its engine is gone is not usable any more, whatever it reported last.
- A session has no home yet if its first request there was refused (425, 429, 503).
- A request is served by the boot that it was placed on, also where another process has the replica's address by then. One
  that a later boot refuses is placed again, and no replica counts as lost with it.
- While replicas may still have to report their sessions, a request of an unknown session waits for that.
- A replica that does not hold the request's policy any more refuses it, and it is placed again. Nothing counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from midstream.core.errors import EngineFailed, MidstreamError, ReplicaUnavailable, RequestLostReplicas
from midstream.core.resumption import PATH_RESUME
from midstream.core.scopes import EVERYTHING
from midstream.core.tracing import Attribute
from midstream.core.versions import NOTHING, VersionConstraint, constraint_of_headers
from midstream.core.wires import WirePath
from midstream.fleet.prefixes import FIRST_BOUND, follows, read_prompt
from midstream.fleet.sessions import key_in_path, session_key
from midstream.fleet.view import ReplicaView
from midstream.http.message import Request
from midstream.http.upstream import UpstreamHead
from midstream.proxy import refusals
from midstream.proxy.heads import STAY_LINE
from midstream.proxy.poison import Losses, ReplicaBoot, is_the_largest
from midstream.proxy.policy_wait import PolicyWait
from midstream.proxy.request_facts import WISHES, ClientAsked, Sending, Tries, asked_lines, way_of
from midstream.proxy.request_state import ANSWERED, RESUMING, SEEN, RequestEvent, RequestPhase, Ruling, ruling
from midstream.proxy.resume import (
    END,
    RESUMABLE,
    Rest,
    ResumeLog,
    failover_mode,
    has_ended,
    reason_of,
    unable,
    without_giving_up,
)
from midstream.proxy.route import (
    ELSEWHERE,
    HEAD,
    PLACED,
    ConnectionLoss,
    Judgement,
    Route,
    Until,
    reason_of_failure,
    shortage,
)
from midstream.proxy.versions import VersionJudge, refusal_in

if TYPE_CHECKING:
    from midstream.proxy.proxy import AtReplica, Proxy

logger = logging.getLogger(__name__)
# Of every request, as in request.py.
_SENT, _RESUME_SENT, _HEAD = RequestPhase.SENT, RequestPhase.RESUME_SENT, RequestEvent.HEAD


@lru_cache(4096)
def _route_lines(replica: str, reason: str) -> bytes:
    return f"x-midstream-replica: {replica}\r\nx-midstream-route-reason: {reason}\r\n".encode()


class ReplicaRoute(Route):
    """A request for inference."""

    traced = True
    #: Of the answer that the client gets, or that was refused last.
    _status = 0

    def __init__(self, proxy: Proxy, request: Request, wire: WirePath, in_path: bytes | None = None) -> None:
        """in_path: the session that the path named, of which `request` shows nothing any more."""
        Route.__init__(self, proxy, request)
        self.path_class, self.errors, self.audited = wire.name, wire.errors, False
        self._versions: VersionJudge | None = None
        # Of its stream, once the replica of that was lost.
        self._rest: Rest | None = None
        self._deployment = proxy.deployments.default
        self._asked = ClientAsked(in_path, wire.user)
        self._at = Sending()
        self._tries = Tries()

    @cached_property
    def _policy_wait(self) -> PolicyWait:
        return PolicyWait()

    # -- before there is a replica

    def start(self) -> None:
        request, proxy, asked = self._request, self._proxy, self._asked
        head, named = request.first, asked.in_path
        wishes = not WISHES.isdisjoint(head)
        if wishes:
            asked.wishes, asked.mode = True, failover_mode(head)
        constraint = constraint_of_headers(head) if wishes else None
        if asked.mode == "off" or request.http10:
            asked.resumable = False
        if wishes or not proxy.deployments.single or self.caller.grant is not EVERYTHING:
            self._deployment = proxy.deployment_of(request, self.caller.grant, asked.user_field)
        if constraint is not None:
            self._versions = self._judge_of(constraint)
        key = session_key(head, request.body, asked.user_field) if named is None else key_in_path(named, head)
        follow = wishes and follows(head)
        if key is not None:
            asked.session = (self.caller.tenant, key)
        matters = follow or (key is None and len(request.body) > FIRST_BOUND)
        if matters and proxy.follows_prefixes and len(self._deployment.replicas.views) > 1:
            asked.prompt = read_prompt(self.caller.tenant, request.body, short=follow)
        if proxy.suspects.sizes:
            self.losses = Losses.known(proxy.suspects, self.caller.tenant, request)

    def place(self) -> Judgement:
        if (ordered := self._tries.ordered) is not None:
            self._tries.ordered, self._at.placed = None, ordered
            return PLACED
        deployment, versions, tried = self._deployment, self._versions, self._tries.replicas
        session, prompt = self._asked.session, self._asked.prompt
        if deployment.replicas.learning and self._may_learn():
            return Judgement(RequestEvent.NOT_YET, Until(deployment.replicas))
        if versions is not None and (against := self._judge_version(versions)) is not None:
            return against
        if deployment.policy:
            waits = self._policy_wait.before(deployment, self._lives_on(), tried)
            if waits is not None:
                return waits
        eligible = None if versions is None else versions.fits
        placed = self._proxy.place(deployment, session, tried, eligible, prompt, self._request.body)
        if placed is None:
            return self._placed_nowhere()
        if placed.stamp == 0 and self._rest is not None and session is not None:
            # With the stream its session moves, also from a replica that seems to be usable.
            placed.stamp = deployment.sessions.settle(session, placed.view.name)
        self._at.placed = placed
        return PLACED

    def _placed_nowhere(self) -> Judgement:
        """NOT_YET or FAILED."""
        none = ReplicaUnavailable(f"{self._tries.why}no replica can take the request now")
        if not self._deployment.policy:
            return self._failed(none)
        rest = self._rest
        tried, lost = (self._tries.replicas, "") if rest is None else (frozenset[str](), rest.lost)
        waits = self._policy_wait.judge(self._deployment, tried, lost)
        if waits is None:
            return self._failed(none)
        if rest is None:
            self._tries.replicas = frozenset()
        return waits

    def _judge_version(self, versions: VersionJudge) -> Judgement | None:
        """NOT_YET or FAILED for its version constraint; None: it may be sent."""
        replicas, rest = self._deployment.replicas, self._rest
        if rest is not None and rest.pinned:
            versions.go_on()
            return None
        home = self._home()
        try:
            verdict = versions.decide(
                replicas.views,
                self._tries.replicas,
                home if home is not None and home.usable else None,
                asyncio.get_running_loop().time(),
                self._deployment.names,
                self._request,
                self._asked.user_field,
            )
        except MidstreamError as error:
            return self._failed(error)
        if verdict.action == "refuse":
            return self._failed(versions.refusal(replicas.views))
        if verdict.action == "wait":
            return Judgement(RequestEvent.NOT_YET, Until(replicas, versions.doubted, verdict.until))
        return None

    def _home(self) -> ReplicaView | None:
        """The replica that the session lives on, usable or not."""
        session = self._asked.session
        home = None if session is None else self._deployment.sessions.home(session)
        return None if home is None else self._deployment.replicas.named(home)

    def _lives_on(self) -> str | None:
        """The replica that the session lives on, if it is well: its policy may not be loaded there."""
        if self._rest is not None:
            return None
        home = self._home()
        return home.name if home is not None and self._deployment.lives_on(home.name) else None

    def _may_learn(self) -> bool:
        """A replica may yet say that it holds the session, or become usable."""
        if self._asked.session is None:
            return not self._deployment.replicas.fleet.members
        home = self._home()
        return home is None or not home.usable

    # -- at a replica

    def enter(self, request: AtReplica) -> None:
        at, proxy = self._at, self._proxy
        placed = at.placed
        assert placed is not None
        at.here, at.report, at.replica = request, placed.view.report, placed.view.replica
        at.boot = "" if at.report is None else at.report.boot
        at.replica.count(1)
        if self._asked.prompt is not None:
            self._deployment.prefixes.begin(self._asked.prompt)
        upstream = proxy.upstreams.get(at.replica) or proxy.upstream(at.replica)
        upstream.requests[request] = None
        self.pool = upstream.pool

    def leave(self) -> None:
        at = self._at
        here, at.here = at.here, None
        if here is None:
            return
        at.replica.count(-1)
        if self._asked.prompt is not None:
            self._deployment.prefixes.end(self._asked.prompt)
        self._proxy.upstreams[at.replica].requests.pop(here, None)

    def not_connected(self, phase: RequestPhase, error: OSError) -> Judgement:
        if (short := shortage(error, self.where())) is not None:
            return self._failed(short)
        if isinstance(error, ConnectionRefusedError):
            self._deployment.replicas.refused(self._at.view)
        return self._unreachable(phase, reason_of_failure(error), lost=phase in SEEN)

    def own_lines(self) -> list[bytes]:
        proxy, at = self._proxy, self._at
        begun = self._rest is not None
        lines = asked_lines(proxy.replica_header, self._asked, at, self._request.first, begun=begun)
        if self._tries.handed:
            lines.append(STAY_LINE)
        if self._deployment.policy or self._deployment.ignores_fields or proxy.ignores_fields:
            lines += proxy.deployment_lines(self._deployment)
        if self._versions is not None:
            assert at.report is not None
            lines += self._versions.lines(at.view, at.report)
        return lines

    def response_lines(self) -> list[bytes]:
        placed = self._at.placed
        assert placed is not None
        return [_route_lines(placed.view.name, placed.decision.reason)]

    def span_attributes(self) -> dict[str, Attribute]:
        return way_of(self._deployment, self._asked.session, self._at.placed)

    # -- what a replica answers

    def head(self, phase: RequestPhase, head: UpstreamHead) -> RequestEvent:
        at, status = self._at, head.status
        # Nearly all answers need no look at their headers.
        plain = status == 200 and phase is _SENT
        event = _HEAD if plain else refusals.answer(phase, status, head.headers)
        if at.replica.failures and event not in refusals.NO_SIGN_OF_LIFE:
            at.replica.failures = 0
        if phase is _RESUME_SENT:
            if event is _HEAD and self._rest is not None:
                self._proxy.metrics.retries["resumed"] += 1
                logger.info("%s continues a stream of %s", self.where(), self._rest.lost, extra=self._named())
            return event
        self._status = status
        if event is not _HEAD:
            self._not_begun()
        elif status == 200:
            if self._deployment.sessions.moved:
                self._deployment.sessions.answered(self._asked.session, at.view.name, at.chosen.stamp)
            if self._asked.resumable and RESUMABLE in head.first:
                self.log = ResumeLog()
        return event

    def held(self, phase: RequestPhase, refusal: RequestEvent, head: UpstreamHead) -> Judgement:
        self._tries.refused += (refusal,)
        match ruling(phase, refusal):
            case Ruling.LOSS:
                return self._engine_lost(phase)
            case Ruling.PLACE_AGAIN:
                return self._place_again(refusal)
            case Ruling.JUDGED_AGAIN:
                return self._other_version(head)
            case Ruling.ANOTHER:
                return self._another(refusal)
            case Ruling.MOVE:
                return self._move(head)
            case Ruling.NEXT:
                assert self._rest is not None
                self._rest.why = reason_of(head.body)
                return self._elsewhere(lost=False)
        # Of one API only is there a holder (responses_route.py).
        return HEAD

    def _engine_lost(self, phase: RequestPhase) -> Judgement:
        """The answer itself says that the boot is gone: no request is sent there before the replica reports another one."""
        self._tries.why = f"the engine of {self._at.view.name} stopped while it served this request; "
        self._deployment.replicas.replaced(self._at.view, self._at.boot)
        error = self._note_lost_replica(phase)
        return self._elsewhere(lost=True) if error is None else self._failed(error)

    def _place_again(self, refusal: RequestEvent) -> Judgement:
        """The boot that it was sent to is gone: it goes to another replica, or to the next boot if that has reported by now.
        Or the policy is gone from there: it goes to where that is loaded next."""
        view = self._at.view
        if self._tries.placed_too_often:
            return self._failed(ReplicaUnavailable("replicas restarted again and again"))
        if refusal is RequestEvent.POLICY_NOT_LOADED:
            self._deployment.replicas.mark_missing(view)
        elif self._deployment.replicas.replaced(view, self._at.boot):
            self._tries.replicas |= {view.name}
        self._proxy.metrics.retries["other_boot"] += 1
        return ELSEWHERE

    def _other_version(self, head: UpstreamHead) -> Judgement:
        unfit = refusal_in(head.headers)
        if unfit is None:
            return HEAD
        self._versions = self._versions or self._judge_of(NOTHING)
        try:
            self._versions.refused(self._at.view, unfit, self._at.report)
        except MidstreamError as error:
            return self._failed(error)
        self._proxy.metrics.retries["other_snapshot"] += 1
        return ELSEWHERE

    def _move(self, head: UpstreamHead) -> Judgement:
        """Its home hands the turn over: it goes where that pays, else back. No replica may hand it over again."""
        tries, eligible = self._tries, None if self._versions is None else self._versions.fits
        if tries.handed:
            return HEAD
        turn = (self._asked.session, self._at.chosen, refusals.handed_in(head.headers))
        tries.ordered = self._proxy.hand_over(self._deployment, *turn, tries.replicas, eligible)
        tries.handed = True
        return ELSEWHERE

    def _another(self, refusal: RequestEvent) -> Judgement:
        """A replica that says it cannot take the request need not have the last word."""
        view, placed = self._at.view, self._at.chosen
        may_move = self._asked.session is None or placed.stamp is not None or not view.usable
        if self._tries.is_last(refusal) or not may_move:
            return HEAD
        eligible = None if self._versions is None else self._versions.fits
        if not self._proxy.has_another(self._deployment, {*self._tries.replicas, view.name}, eligible):
            return HEAD
        # A replica that was not overloaded may have failed while it worked on the request.
        return self._elsewhere(lost=refusal is not RequestEvent.BUSY)

    def ended(self) -> None:
        if self.losses is not None and self._status == 200:
            self.losses.answered()

    # -- a replica is lost

    def lost(self, phase: RequestPhase, loss: ConnectionLoss) -> Judgement:
        if phase in (RequestPhase.PASSING, RequestPhase.RESUMED):
            return self._stream_lost(phase, loss.reason)
        if not loss.answered and not loss.fresh:
            return self._stale()
        if loss.answered and not loss.whole and phase not in RESUMING:
            self._not_begun(lost=True)
            return self._failed(EngineFailed(f"{self.where()}: {loss.reason}"))
        # A part of a response may have come; no client has seen it.
        return self._unreachable(phase, loss.reason, lost=True)

    def silent(
        self, phase: RequestPhase, reason: str, *, answering: bool, together: Collection[AtReplica]
    ) -> Judgement:
        if phase in (RequestPhase.PASSING, RequestPhase.RESUMED):
            return self._stream_lost(phase, reason)
        if phase in RESUMING:
            return self._unreachable(phase, reason, lost=phase in SEEN)
        others = ((one.route.caller.tenant, one.route._request) for one in together)
        obvious = is_the_largest(self.caller.tenant, self._request, others)
        if not answering:
            return self._unreachable(phase, reason, lost=phase in SEEN, obvious=obvious)
        self._not_begun(lost=True)
        error = self._note_lost_replica(phase, obvious=obvious)
        return self._failed(error or ReplicaUnavailable(reason))

    def _unreachable(
        self, phase: RequestPhase, reason: str, *, lost: bool, obvious: bool = False
    ) -> Judgement:
        """lost: the replica had been sent the request."""
        self._proxy.metrics.upstream_errors[self._at.view.name] += 1
        logger.warning("%s failed before it answered: %s", self._at.view.name, reason, extra=self._named())
        self._deployment.replicas.failed(self._at.view)
        error = self._note_lost_replica(phase, obvious=obvious) if lost else None
        return self._elsewhere(lost=lost) if error is None else self._failed(error)

    def _elsewhere(self, *, lost: bool) -> Judgement:
        if self._rest is None:
            self._not_begun(lost=True)
        self._tries.replicas |= {self._at.view.name}
        self._tries.lost += lost
        if self._tries.too_many_lost:
            return self._failed(ReplicaUnavailable("replicas failed while they worked on this request"))
        self._proxy.metrics.retries["other_replica"] += 1
        return ELSEWHERE

    def _not_begun(self, *, lost: bool = False) -> None:
        """A replica refused this request: a session that has nothing there yet may begin elsewhere. lost: it was lost before
        it answered. Then only one that moved goes back."""
        placed, session = self._at.chosen, self._asked.session
        if session is not None and placed.stamp and (placed.came_from or not lost):
            self._deployment.sessions.not_begun(session, placed.view.name, placed.stamp, placed.came_from)

    def leaves(self, phase: RequestPhase, reason: str) -> Judgement | None:
        deployment, versions, streams = self._deployment, self._versions, phase is RequestPhase.PASSING
        lines = self.log.lines() if streams and self.log is not None else None
        if phase is RequestPhase.RESUMED or (streams and (lines is None or has_ended(lines))):
            return None
        tried = unable(lines, self._asked.mode == "exact", deployment.replicas.views, deployment.policy)
        tried |= {*self._tries.replicas, self._at.view.name}
        if not self._proxy.has_another(deployment, tried, None if versions is None else versions.fits):
            return None
        return self._elsewhere(lost=False) if lines is None else self._resume(lines, reason, lost=False)

    # -- a stream is lost

    def _stream_lost(self, phase: RequestPhase, reason: str) -> Judgement:
        lines = self.log.lines() if self.log is not None and phase is RequestPhase.PASSING else None
        if lines is not None and has_ended(lines):
            # Only the end of the response is missing.
            return Judgement(RequestEvent.END, END)
        lines, given_up = (lines, False) if lines is None else without_giving_up(lines)
        if not lines:
            self._not_begun(lost=True)
        error = None if given_up else self._note_lost_replica(phase)
        if error is not None or lines is None:
            return self._cut_short(reason) if error is None else Judgement(RequestEvent.FAILED, error)
        why = "its weights failed their check" if given_up else reason
        return self._resume(lines, why, lost=not given_up)

    def _resume(self, lines: bytes, reason: str, *, lost: bool) -> Judgement:
        """Another replica is to continue after what the client has. lines: of the log. If there are none, the client has only
        the head of the response, and the request itself is sent again. lost: the replica counts as lost with it."""
        view, request = self._at.view, self._request
        rest = self._rest = Rest(view.name)
        self.log = None
        logger.warning("%s failed in the middle of a stream: %s", view.name, reason, extra=self._named())
        if lost:
            self._proxy.metrics.upstream_errors[view.name] += 1
            self._deployment.replicas.failed(view)
        if lines:
            self.target = PATH_RESUME.encode()
            try:
                self.body = rest.asked(request.target, request.body, lines, self._asked.mode == "exact")
            except EngineFailed as error:
                return self._failed(error)
            self._tries.replicas |= rest.lacking(self._deployment.replicas.views, self._deployment.policy)
        judged = self._elsewhere(lost=lost)
        return Judgement(RequestEvent.LOST) if judged is ELSEWHERE else judged

    def _failed(self, error: MidstreamError) -> Judgement:
        if self._rest is not None:
            error = self._rest.failed(error, last=self._tries.too_many_lost)
        return Judgement(RequestEvent.FAILED, error)

    # -- which request replicas were lost with

    def _note_lost_replica(self, phase: RequestPhase, *, obvious: bool = False) -> RequestLostReplicas | None:
        """Note that a replica was lost with this request; the error, if it was probably the cause."""
        view, proxy = self._at.view, self._proxy
        routes = proxy.routes_at(view)
        beside = [route.losses for route in routes if route is not self and route.losses is not None]
        if self.losses is None:
            self.losses = Losses(proxy.suspects, self.caller.tenant, self._request)
        lost = ReplicaBoot(view.name, self._at.boot)
        return self.losses.add(lost, beside, begun=phase in ANSWERED, obvious=obvious)

    # -- inside

    def where(self) -> str:
        return self._at.name or "a replica"

    def _named(self) -> dict[str, str | None]:
        """What a line of the log says beside its message."""
        session = None if self._asked.session is None else self._asked.session[1]
        return {"replica": self._at.name, "session": session}

    def _judge_of(self, constraint: VersionConstraint) -> VersionJudge:
        return VersionJudge(constraint, self._deployment.order, asyncio.get_running_loop().time())
