"""Which replica may switch now, when they switch one by one. No I/O.

All prepare the new snapshot up to STAGED and are held there; one at a time is let go. The next one's turn comes when it has
been checked, has failed, or is gone. Only replicas that take requests queue: one that is out of rotation loads as it likes.

Always holds: while a replica is between its release and the end of its check, no other is released. When none is and a replica
is staged, a replica is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from midstream.core.reports import Reported
from midstream.core.types import Stage

# A replica that was let go so long ago and is still staged was not reached.
TURN_S_MAX = 30.0


@dataclass(frozen=True)
class SwitchTurn:
    """The replica that was let go last."""

    replica: str
    boot: str


def next_turn(
    in_rotation: Sequence[Reported], staged: Collection[str], last: SwitchTurn | None, overdue: bool = False
) -> SwitchTurn | None:
    """The replica that may switch, of the reachable ones in rotation, in their order; None: none is ready to.

    staged: names of those that wait, prepared, for what they should serve. last: of the pass before, None after a restart:
    what it knew shows in the reports by then. overdue: it was let go long ago and has not moved: another may go first.
    """
    for report in in_rotation:
        if _switching(report):
            return _turn(report)
    waiting = [_turn(report) for report in in_rotation if report.replica in staged]
    if last in waiting and not (overdue and len(waiting) > 1):
        return last
    return next((turn for turn in waiting if turn != last), None)


class SwitchTurns:
    """The turns of one deployment's replicas, pass after pass of its reconciler."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since = float("-inf")
        #: None: no replica may switch.
        self.current: SwitchTurn | None = None

    def look(self, in_rotation: Sequence[Reported], staged: Collection[str]) -> None:
        """As `next_turn`."""
        now = self._monotonic()
        turn = next_turn(in_rotation, staged, self.current, now - self._since > TURN_S_MAX)
        if turn != self.current:
            self.current, self._since = turn, now

    def may_switch(self, replica: str) -> bool:
        return self.current is not None and self.current.replica == replica


def _turn(report: Reported) -> SwitchTurn:
    return SwitchTurn(report.replica, report.boot)


def _switching(report: Reported) -> bool:
    """Whether it was let go already.

    It may still wait, staged, for requests to end. Meanwhile a sync switch closes the gate, and an async one takes no pinned
    requests.
    """
    waits = not (report.own.admitting and report.own.pinnable)
    return waits or report.own.stage in (Stage.COMMITTING, Stage.CHECKING)
