"""Which replicas may serve a request with a version constraint, and whether the request waits for one. Pure.

Owns: the judgement of one request's constraint. The headers give it first, then a replica's refusal, which contains the
constraint of the body. The gateway reads the body itself before it lets a request wait or refuses it.

Always holds:
- Staleness counts signals behind the newest snapshot that was ready on a replica, or that a usable replica serves.
- An exact snapshot may be one that stays loaded beside the one that serves. What is judged by the order of signals alone is
  judged by what serves.
- A request waits for its session's home for at most HOME_WAIT_S while another replica could take it.
- A request waits until its deadline for a snapshot that may come. If only another signal could bring the snapshot, the
  request waits only if it says how long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from midstream.core.decoding import NOT_JSON, decoded
from midstream.core.errors import SnapshotNotServed
from midstream.core.headers import HEADER_MODEL
from midstream.core.reports import Reported
from midstream.core.served_names import ServedNames
from midstream.core.types import Stage
from midstream.core.versions import (
    HEADER_ADMITTED,
    HEADER_REFUSED,
    NOTHING,
    Admitted,
    Refusal,
    VersionConstraint,
    as_header,
    constraint_of_body,
    constraint_of_version,
    from_header,
    version_number,
)
from midstream.core.wires import UserField
from midstream.fleet.sessions import body_model
from midstream.fleet.signal_order import SignalOrder
from midstream.fleet.view import ReplicaView
from midstream.http.message import Request

#: Only a replica reads a longer body.
BODY_READ_BYTES_MAX = 2**20
_MODEL = HEADER_MODEL.encode()
_ADMITTED = HEADER_ADMITTED.encode()
_REFUSED = HEADER_REFUSED.encode()
DEFAULT_WAIT_S = 10.0
HOME_WAIT_S = 2.0
#: How often replicas may refuse one request because they serve another snapshot than they reported.
REFUSALS_MAX = 16
#: Known snapshots that a refusal of an unknown one names.
NAMED_MAX = 5
_AT_REST = (Stage.IDLE, Stage.ERROR)


class _Asking(msgspec.Struct):
    """model: None means the one that serves, as on a replica."""

    model: str | None = None
    midstream: dict[str, Any] | None = None
    weight_version: dict[str, Any] | None = None


_body = msgspec.json.Decoder(_Asking)


class VersionVerdict(NamedTuple):
    """until: the latest moment to decide again, also if nothing changes."""

    action: Literal["send", "wait", "refuse"]
    until: float = 0.0


SEND, REFUSE = VersionVerdict("send"), VersionVerdict("refuse")


class VersionJudge:
    """The constraint of one request, and what replicas said of it. began: when the request came, on the clock of `judge`."""

    def __init__(self, constraint: VersionConstraint, order: SignalOrder, began: float) -> None:
        self.constraint = constraint
        self._order = order
        self._began = began
        #: Whether the constraint has the body's demands, too.
        self._body = False
        self._newest = 0
        #: The snapshot for which the request was sent to the last replica.
        self._expected = ""
        self._refusals = 0
        self._heard: dict[ReplicaView, tuple[Reported | None, Refusal | None]] = {}

    def __repr__(self) -> str:
        return f"VersionJudge({self.constraint}, {self._refusals} refusals)"

    @property
    def doubted(self) -> bool:
        """True if a replica served another snapshot than it had reported, so that its next report may change the judgement."""
        return bool(self._heard)

    def _learn_body(self, constraint: VersionConstraint) -> None:
        """Add the body's constraint. Raises InvalidRequest when the headers contradict it."""
        self.constraint, self._body = self.constraint.with_(constraint), True

    def refused(self, view: ReplicaView, refusal: Refusal, under: Reported | None) -> None:
        """The replica did not take the request, which was placed when `under` was its report.

        The refusal counts until the replica's next report. It does not count if the replica has reported another snapshot
        since the request was placed: then the refusal may be older. Raises InvalidRequest if the body contradicts the headers.
        """
        learnt = not self._body and refusal.constraint != NOTHING
        self._learn_body(refusal.constraint)
        self._refusals += 1
        as_expected = not learnt and refusal.serving == self._expected
        pinnable = refusal.pinnable or self.constraint.snapshot is None
        if _served(view.report) == _served(under):
            self._heard[view] = (view.report, None if as_expected and pinnable else refusal)

    def decide(
        self,
        views: Sequence[ReplicaView],
        tried: Collection[str],
        home: ReplicaView | None,
        now: float,
        names: ServedNames,
        request: Request,
        user: UserField = "user",
    ) -> VersionVerdict:
        """Like `judge`, but reads the body before the request waits or is refused. names: those that its model may have.
        user: as in core/wires.py.

        Raises NotFound for another model, and InvalidRequest for a body that contradicts the headers.
        """
        verdict = self.judge(views, tried, home, now)
        if verdict is SEND or self._body or len(request.body) > BODY_READ_BYTES_MAX:
            return verdict
        self._learn_body(constraint_of_request(names, request.first, request.body, user))
        return self.judge(views, tried, home, now)

    def judge(
        self, views: Sequence[ReplicaView], tried: Collection[str], home: ReplicaView | None, now: float
    ) -> VersionVerdict:
        """What to do with the request now. home: the replica of its session. tried: names of replicas that cannot take it."""
        usable = [view for view in views if view.usable]
        self._newest = self._order.newest(one.report.own.snapshot for one in usable if one.report is not None)
        fitting = {view.name for view in usable if self.fits(view)}
        wait_s = DEFAULT_WAIT_S if self.constraint.wait_s is None else self.constraint.wait_s
        deadline = self._began + wait_s
        if self._refusals > REFUSALS_MAX:
            return REFUSE
        if fitting - set(tried):
            at_home = self._began + min(wait_s, HOME_WAIT_S)
            late = home is None or home.name in tried or home.name in fitting or now >= at_home
            return SEND if late or not self._may_come(home) else VersionVerdict("wait", at_home)
        if fitting or all(view.name in tried for view in usable):
            # No replica can take it for a reason other than its snapshot. Placement answers that.
            return SEND
        if now < deadline and (self.constraint.wait_s is not None or self._is_coming(views)):
            return VersionVerdict("wait", deadline)
        return REFUSE

    def go_on(self) -> None:
        """The response has begun: from here on only the pin counts."""
        self.constraint, self._body = VersionConstraint(self.constraint.snapshot), True

    def fits(self, view: ReplicaView) -> bool:
        """Whether the replica may serve the request, as of the last `judge`."""
        report, refusal = self._heard.get(view, (None, None))
        if view.report is None:
            return False
        asked = self.constraint.snapshot
        if report is not view.report:
            newest = view.report.own
            here, serving, pinnable = asked in newest.resident, newest.snapshot, newest.pinnable
        elif refusal is not None:
            here, serving, pinnable = refusal.here, refusal.serving, refusal.pinnable
        else:
            return False
        return self._met(asked if here and asked is not None else serving, pinnable)

    def lines(self, view: ReplicaView, under: Reported) -> list[bytes]:
        """Header lines for the replica: the decision on which the request is sent there. under: the report that was judged."""
        if self.constraint.empty:
            return []
        report, refusal = self._heard.get(view, (None, None))
        known = refusal.serving if refusal is not None and report is under else under.own.snapshot
        # Where it may be sent, an exact one serves or stays.
        known = self.constraint.snapshot or known
        self._expected = known
        admitted = Admitted(known, pinned=self.constraint.snapshot is not None, body=self._body)
        return [b"%b: %b\r\n" % (_ADMITTED, as_header(admitted).encode())]

    def refusal(self, views: Sequence[ReplicaView]) -> SnapshotNotServed:
        """The error when no replica can meet the constraint."""
        constraint, asked = self.constraint, []
        if constraint.snapshot is not None:
            asked.append(f"snapshot {constraint.snapshot!r}{self._unknown(constraint.snapshot)}")
        if constraint.min_snapshot is not None:
            asked.append(
                f"{constraint.min_snapshot!r} or a later one{self._unknown(constraint.min_snapshot)}"
            )
        if constraint.max_staleness is not None:
            asked.append(f"at most {constraint.max_staleness} snapshots behind the newest")
        serving = [
            {
                "replica": view.name,
                "snapshot": view.report.own.snapshot if view.report else None,
                "stage": view.report.own.stage.value if view.report else None,
                "resident": list(view.report.own.resident) if view.report else [],
            }
            for view in views
        ]
        newest = self._order.name(self._newest)
        target = version_number(constraint.snapshot or constraint.min_snapshot or "")
        message = f"no replica can serve what the request asks for: {' and '.join(asked)}"
        return SnapshotNotServed(
            f"{message}; the newest is {newest!r}",
            serving,
            newest,
            target_version=target,
            applied=None if newest is None else version_number(newest),
        )

    def _unknown(self, snapshot: str) -> str:
        if self._order.position(snapshot) is not None:
            return ""
        known = ", ".join(repr(name) for name in self._order.latest(NAMED_MAX)) or "none yet"
        return f" (which was not signalled; the newest signals: {known})"

    def _met(self, snapshot: str, pinnable: bool, newest: int | None = None) -> bool:
        constraint, position = self.constraint, self._order.position(snapshot)
        if constraint.snapshot is not None and not (snapshot == constraint.snapshot and pinnable):
            return False
        if constraint.min_snapshot is not None and snapshot != constraint.min_snapshot:
            least = self._order.position(constraint.min_snapshot)
            if position is None or least is None or position < least:
                return False
        if constraint.max_staleness is None:
            return True
        newest = self._newest if newest is None else newest
        return position is not None and self._order.between(position, newest) <= constraint.max_staleness

    def _may_come(self, view: ReplicaView | None) -> bool:
        """Whether the replica may meet the constraint later, with what it loads now or is desired to load."""
        report = None if view is None else view.report
        if report is None:
            return False
        coming = [self._order.desired] if report.own.stage is not Stage.ERROR else []
        if report.own.target is not None and report.own.stage not in _AT_REST:
            coming.append(report.own.target)
        return any(
            self._met(snapshot, True, max(self._newest, self._order.position(snapshot) or 0))
            for snapshot in coming
            # One that is not pinnable may load other files of its snapshot's name.
            if snapshot != report.own.snapshot or not report.own.pinnable
        )

    def _is_coming(self, views: Sequence[ReplicaView]) -> bool:
        asked = (self.constraint.snapshot, self.constraint.min_snapshot)
        unheard = any(name is not None and self._order.position(name) is None for name in asked)
        return unheard or any(self._may_come(view) for view in views)


def _served(report: Reported | None) -> tuple[str, bool, tuple[str, ...]] | None:
    return None if report is None else (report.own.snapshot, report.own.pinnable, report.own.resident)


def refusal_in(headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """The refusal in the headers of a replica's answer."""
    return next((from_header(value, Refusal) for name, value in headers if name == _REFUSED), None)


def constraint_of_request(
    names: ServedNames, headers: Mapping[bytes, bytes], body: bytes, user: UserField = "user"
) -> VersionConstraint:
    """The constraint in a body and in its model's name, as a replica would read it. Names in `headers` are lower-case.
    user: as in core/wires.py.

    NOTHING if the body cannot be read: the replica then names the fault. Raises NotFound for a model that is not served here,
    and InvalidRequest.
    """
    try:
        fields = decoded(_body.decode, body)
    except NOT_JSON:
        return NOTHING
    given = fields.model if user != "routing_key" else body_model(body, user)
    model = names.model if given is None else given
    named = names.wanted(model, headers.get(_MODEL, b"").decode("utf-8", "replace"))
    of_version = constraint_of_version(fields.weight_version).with_(VersionConstraint(named))
    return constraint_of_body(fields.midstream).with_(of_version)
