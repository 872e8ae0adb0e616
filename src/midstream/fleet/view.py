"""What the gateway knows of one replica, and whether placement may use it.

Always holds: `usable` and `admitting` follow from `admitted`, `report` and `standing`, and subscribers are notified when they
change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from midstream.core.measures import Trajectories
from midstream.core.reports import ReplicaReport, Reported

Standing = Literal["member", "leaving", "gone"]


class ReplicaEntry(msgspec.Struct, frozen=True):
    """What somebody said of one replica. url: where it is, if others than our supervisor run it. weight: its part of new work;
    None: not said (1). drain: it takes no new requests."""

    url: str | None = None
    weight: float | None = None
    drain: bool = False


class ReplicaView:
    """One replica at one address.

    index: its place among the members now: an order to show them in, not a key. name: unique in the whole gateway.
    heard: its last report; None: unreachable. report: what that says of the policy of this view. admitted: placement may
    use it; set by the reconciler, cleared on a new boot. in_flight: requests this gateway has on it now. weight: its part of
    new work. trajectories: what its turns were like.
    own: started by our supervisor.
    """

    __slots__ = (
        "_admitted",
        "_in_flight",
        "_on_change",
        "_report",
        "_reported",
        "_standing",
        "_suspended",
        "admitting",
        "failures",
        "heard",
        "index",
        "last_words",
        "load",
        "name",
        "own",
        "trajectories",
        "url",
        "usable",
        "weight",
    )

    def __init__(
        self,
        index: int,
        name: str,
        url: str,
        weight: float = 1.0,
        on_change: Callable[[], None] = lambda: None,
        own: bool = True,
    ) -> None:
        self.index = index
        self.name = name
        self.url = url
        self.weight = weight
        self.own = own
        # What the replica reported of itself before it fell silent. Empty: it is heard.
        self.last_words = ""
        # Requests on it: this gateway's, or all that it reported if those are more.
        self.load = 0
        # Requests in a row that failed on it before it answered one.
        self.failures = 0
        self.trajectories: Trajectories | None = None
        # Placement may send requests to it.
        self.usable = False
        # It admits new requests, as far as is known.
        self.admitting = False
        self._on_change = on_change
        self.heard: ReplicaReport | None = None
        self._report: Reported | None = None
        self._reported = 0
        self._in_flight = 0
        self._admitted = False
        self._standing: Standing = "member"
        self._suspended = False

    def __repr__(self) -> str:
        return f"ReplicaView({self.name}, {self.url}, {self.standing}, usable={self.usable}, {self.in_flight} in flight)"

    @property
    def replica(self) -> ReplicaView:
        """The view that counts the replica's requests and owns the connections to it: this one, but for a policy's."""
        return self

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self.count(count - self._in_flight)

    def count(self, more: int) -> None:
        """So many more requests of this gateway are on it."""
        self._in_flight = count = self._in_flight + more
        self.load = count if count > self._reported else self._reported

    def hear(self, report: ReplicaReport | None) -> None:
        """The replica reports of itself; None: it is not heard any more."""
        if report is not None:
            self.last_words = ""
        self.heard = report
        self._reported = 0 if report is None else report.in_flight
        self.in_flight = self._in_flight
        self.report = None if report is None else report.about(report.own)

    @property
    def report(self) -> Reported | None:
        return self._report

    @report.setter
    def report(self, report: Reported | None) -> None:
        self._report = report
        self._settle()

    @property
    def admitted(self) -> bool:
        return self._admitted

    @admitted.setter
    def admitted(self, admitted: bool) -> None:
        self._admitted = admitted
        self._settle()

    @property
    def standing(self) -> Standing:
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._standing = standing
        self._settle()

    @property
    def suspended(self) -> bool:
        """It fails requests, though it is heard."""
        return self._suspended

    @suspended.setter
    def suspended(self, suspended: bool) -> None:
        self._suspended = suspended
        self._settle()

    def _settle(self) -> None:
        report = self._report
        well = report is not None and report.ready and not self._suspended
        usable = self._admitted and well and self._standing == "member"
        admitting = report is not None and report.own.admitting
        if (usable, admitting) != (self.usable, self.admitting):
            self.usable, self.admitting = usable, admitting
            self._on_change()


def last_words(report: ReplicaReport) -> str:
    """What a replica that is not heard any more was about, as it last said."""
    engine = report.engine
    said = [
        f"{report.in_flight} requests on it",
        f"{engine.running} running and {engine.waiting} waiting in its engine",
    ]
    if report.long_texts:
        said.append(f"{report.long_texts} long texts being read")
    if report.stalled_s:
        said.append(f"its event loop had stood still for {report.stalled_s:g} s")
    if report.engine_silent_s:
        said.append(f"its engine had been silent for {report.engine_silent_s} s")
    return "when it was last heard: " + ", ".join(said)
