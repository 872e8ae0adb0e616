"""What one policy of a deployment sees of one replica, and whether placement may send the policy's requests there.

The deployment's own weights are the policy with the empty name.

Always holds:
- `report` is the replica's report of this policy. It is `ready` only while the replica serves a snapshot of the policy.
- `usable` and `admitting` follow from `admitted`, `report` and the replica's facts. The owner is notified when they change.
- A new boot of the replica is not admitted until the reconciler (loop.py) admits it. Neither is a policy that the replica
  does not hold any more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from midstream.core.reports import Reported
from midstream.fleet.known_replica import KnownReplica, PolicyKey


class ReplicaEntry(msgspec.Struct, frozen=True):
    """What somebody said of one replica. url: where it is, if others than our supervisor run it. weight: its part of new work;
    None: not said (1). drain: it takes no new requests. leaves_at: when its machine goes, in seconds since the epoch."""

    url: str | None = None
    weight: float | None = None
    drain: bool = False
    leaves_at: float | None = None


class ReplicaView:
    """One replica as one policy sees it.

    replica: what is known of it, whatever the policy. report: what it says of the policy; None: it is not heard. held: it holds
    the policy. admitted: placement may use it, as the reconciler decided.
    asked_until, failed_until: of a policy that follows demand: until when the replica may load it because it was asked to, and
    until when it is not asked because it failed (0.0: it did not fail). In the loop's time.
    """

    __slots__ = (
        "_admitted",
        "_boot",
        "_key",
        "_on_change",
        "admitting",
        "asked_until",
        "failed_until",
        "held",
        "name",
        "replica",
        "report",
        "url",
        "usable",
    )

    def __init__(
        self, replica: KnownReplica, key: PolicyKey, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.replica = replica
        self.name, self.url = replica.name, replica.url
        self._key = key
        self._on_change = on_change
        self._boot: str | None = None
        self._admitted = False
        self.asked_until = self.failed_until = 0.0
        # Placement may send requests to it.
        self.usable = False
        # It admits new requests, as far as is known.
        self.admitting = False
        self.held = False
        self.report: Reported | None = None
        self.hear()

    def __repr__(self) -> str:
        replica = self.replica
        return f"ReplicaView({replica}, usable={self.usable})"

    @property
    def weight(self) -> float:
        return self.replica.weight

    @property
    def admitted(self) -> bool:
        return self._admitted

    @admitted.setter
    def admitted(self, admitted: bool) -> None:
        self._admitted = admitted
        self.settle()

    def hear(self) -> None:
        """The replica's report of the policy is another one."""
        self.held = self.replica.holds(self._key)
        self.report = report = self.replica.about(self._key)
        if report is not None and (report.boot != self._boot or not self.held):
            self._boot, self._admitted = report.boot, False
        self.settle()

    def settle(self) -> None:
        """Whether it is usable may be another question now."""
        report, replica = self.report, self.replica
        well = report is not None and report.ready and not replica.suspended
        usable = self._admitted and well and replica.standing == "member"
        admitting = report is not None and report.own.admitting
        if (usable, admitting) != (self.usable, self.admitting):
            self.usable, self.admitting = usable, admitting
            self._on_change()
