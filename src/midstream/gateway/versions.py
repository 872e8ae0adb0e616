"""Which replicas may serve a request that asks for certain snapshots, and whether it waits for one. Pure.

Always holds:
- Staleness counts signals behind the newest snapshot that was ready on a replica, or serves on one that is usable.
- A request waits for its session's home for HOME_WAIT_S at most while another replica could take it, and for whatever is
  not there yet until its deadline. What cannot come without another signal is waited for only by a request that says how long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from midstream.errors import SnapshotNotServed
from midstream.fleet.signal_order import SignalOrder
from midstream.fleet.view import ReplicaView
from midstream.types import ReplicaReport, Stage
from midstream.versions import NOTHING, Admitted, Refusal, Wish

DEFAULT_WAIT_S = 10.0
HOME_WAIT_S = 2.0
REFUSALS_MAX = 16  # of one request, by replicas that serve another snapshot than their reports said
_AT_REST = (Stage.IDLE, Stage.ERROR)


class Verdict(NamedTuple):
    """until: the latest moment to decide again, also if nothing changes."""

    action: Literal["send", "wait", "refuse"]
    until: float = 0.0


SEND, REFUSE = Verdict("send"), Verdict("refuse")


class Admission:
    """What one request wants, and what was made of it so far. began: now, on the clock that `judge` is given."""

    def __init__(self, wish: Wish, order: SignalOrder, began: float) -> None:
        self.wish = wish
        self._order = order
        self._began = began
        self._body = False  # what the body asks for is part of the wish
        self._newest = 0
        self._expected = ""  # of the replica it was sent to last
        self._refusals = 0
        self._heard: dict[ReplicaView, tuple[ReplicaReport | None, Refusal | None]] = {}

    def __repr__(self) -> str:
        return f"Admission({self.wish}, {self._refusals} refusals)"

    @property
    def doubted(self) -> bool:
        """A replica was found to serve something else than it reported: any new report may say better."""
        return bool(self._heard)

    @property
    def body_known(self) -> bool:
        """Whether what the body asks for is part of the wish."""
        return self._body

    def learn_body(self, wish: Wish) -> None:
        """What the body asks for. Raises InvalidRequest when the headers ask for something else."""
        self.wish, self._body = self.wish.with_(wish), True

    def refused(self, view: ReplicaView, refusal: Refusal, under: ReplicaReport | None) -> None:
        """The replica it was sent to did not take it. Until the next report that is what is known of that replica, unless it
        has reported another snapshot since the request was sent, `under` an older report: the refusal may be older still.

        Raises InvalidRequest when the body asks for something else than the headers.
        """
        told = not self._body and refusal.wish != NOTHING
        self.learn_body(refusal.wish)
        self._refusals += 1
        as_expected = not told and refusal.serving == self._expected
        pinnable = refusal.pinnable or self.wish.snapshot is None
        if _served(view.report) == _served(under):
            self._heard[view] = (view.report, None if as_expected and pinnable else refusal)

    def judge(
        self, views: Sequence[ReplicaView], tried: Collection[str], home: ReplicaView | None, now: float
    ) -> Verdict:
        """What to do with it now. home: of its session; tried: names of replicas that are out of the question."""
        usable = [view for view in views if view.usable]
        self._newest = self._order.newest(view.report.snapshot for view in usable if view.report is not None)
        fitting = {view.name for view in usable if self.fits(view)}
        wait_s = DEFAULT_WAIT_S if self.wish.wait_s is None else self.wish.wait_s
        deadline = self._began + wait_s
        if self._refusals > REFUSALS_MAX:
            return REFUSE
        if fitting - set(tried):
            at_home = self._began + min(wait_s, HOME_WAIT_S)
            late = home is None or home.name in tried or home.name in fitting or now >= at_home
            return SEND if late or not self._may_come(home) else Verdict("wait", at_home)
        if fitting or all(view.name in tried for view in usable):
            return SEND  # to nobody: what failed it, or is missing, is not a snapshot
        if now < deadline and (self.wish.wait_s is not None or self._is_coming(views)):
            return Verdict("wait", deadline)
        return REFUSE

    def go_on(self) -> None:
        """It was let in: from here on only its pin counts."""
        self.wish, self._body = Wish(self.wish.snapshot), True

    def fits(self, view: ReplicaView) -> bool:
        """Whether the replica may serve it, as of the last `judge`."""
        report, refusal = self._heard.get(view, (None, None))
        if view.report is None:
            return False
        if report is view.report:
            return refusal is not None and self._met(refusal.serving, refusal.pinnable)
        return self._met(view.report.snapshot, view.report.pinnable)

    def header(self, view: ReplicaView) -> Admitted | None:
        """What to tell the replica it is sent to."""
        if self.wish.empty:
            return None
        report, refusal = self._heard.get(view, (None, None))
        assert view.report is not None
        known = refusal.serving if refusal is not None and report is view.report else view.report.snapshot
        self._expected = known
        return Admitted(known, pinned=self.wish.snapshot is not None, body=self._body)

    def refusal(self, views: Sequence[ReplicaView]) -> SnapshotNotServed:
        """What to answer when it ends in vain."""
        wish, asked = self.wish, []
        if wish.snapshot is not None:
            asked.append(f"snapshot {wish.snapshot!r}")
        if wish.min_snapshot is not None:
            known = self._order.position(wish.min_snapshot) is not None
            asked.append(
                f"{wish.min_snapshot!r} or a later one" + ("" if known else " (which was not signalled)")
            )
        if wish.max_staleness is not None:
            asked.append(f"at most {wish.max_staleness} snapshots behind the newest")
        serving = [
            {
                "replica": view.name,
                "snapshot": view.report.snapshot if view.report else None,
                "stage": view.report.stage.value if view.report else None,
            }
            for view in views
        ]
        message = f"no replica can serve what the request asks for: {' and '.join(asked)}"
        return SnapshotNotServed(message, serving, self._order.name(self._newest))

    def _met(self, snapshot: str, pinnable: bool, newest: int | None = None) -> bool:
        wish, position = self.wish, self._order.position(snapshot)
        if wish.snapshot is not None and not (snapshot == wish.snapshot and pinnable):
            return False
        if wish.min_snapshot is not None and snapshot != wish.min_snapshot:
            least = self._order.position(wish.min_snapshot)
            if position is None or least is None or position < least:
                return False
        if wish.max_staleness is None:
            return True
        newest = self._newest if newest is None else newest
        return position is not None and self._order.between(position, newest) <= wish.max_staleness

    def _may_come(self, view: ReplicaView | None) -> bool:
        """Whether the replica may serve it later, by what it loads now or will be told to load."""
        report = None if view is None else view.report
        if report is None:
            return False
        coming = [self._order.desired] if report.stage is not Stage.ERROR else []
        if report.target is not None and report.stage not in _AT_REST:
            coming.append(report.target)
        return any(
            self._met(snapshot, True, max(self._newest, self._order.position(snapshot) or 0))
            for snapshot in coming
            if snapshot != report.snapshot or not report.pinnable  # other files of that name
        )

    def _is_coming(self, views: Sequence[ReplicaView]) -> bool:
        asked = (self.wish.snapshot, self.wish.min_snapshot)
        unheard = any(name is not None and self._order.position(name) is None for name in asked)
        return unheard or any(self._may_come(view) for view in views)


def _served(report: ReplicaReport | None) -> tuple[str, bool] | None:
    return None if report is None else (report.snapshot, report.pinnable)
