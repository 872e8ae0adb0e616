"""What the gateway knows of one replica at one address, whatever the policy.

Always holds:
- Each fact of a replica stands here once. What a policy sees of it is derived (view.py).
- A request counts on the replica itself, so all policies see its load.
- A change of one policy's report is news of that policy alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Literal

from midstream.core.measures import Trajectories
from midstream.core.reports import NOT_HELD, PolicyReport, ReplicaReport, Reported
from midstream.core.types import Stage
from midstream.fleet.loads import LoadTable

Standing = Literal["member", "leaving", "gone"]
#: A policy's name, and when it was made: another one may get the name later.
PolicyKey = tuple[str, float]
#: The deployment's own weights.
OWN: PolicyKey = ("", 0.0)


class KnownReplica:
    """One replica at one address.

    index: its place among the members now: an order to show them in, not a key. name: unique in the whole gateway.
    heard: its last report; None: unreachable. in_flight: requests this gateway has on it now. weight: its part of new work.
    suspended: it fails requests, though it is heard. trajectories: what its turns were like. own: started by our supervisor.
    table: where it is listed with its load, at `place`. noted: as in loads.py. boot: that it reported last; "": none.
    renewed_at: when that was another one than before, in monotonic seconds. The turns of sessions outlive an engine, and no
    boot but the one that had them says so.
    """

    __slots__ = (
        "_in_flight",
        "_on_report",
        "_policies",
        "_reported",
        "boot",
        "failures",
        "heard",
        "index",
        "kv_filled",
        "last_words",
        "leaves_at",
        "load",
        "name",
        "noted",
        "own",
        "place",
        "policies_max",
        "renewed_at",
        "room",
        "standing",
        "suspended",
        "table",
        "trajectories",
        "url",
        "weight",
    )

    def __init__(
        self,
        name: str,
        url: str,
        weight: float = 1.0,
        own: bool = True,
        on_report: Callable[[KnownReplica, Collection[PolicyKey] | None], None] = lambda replica, news: None,
    ) -> None:
        """on_report: is called after each report, with the policies of which it says something new; None: with all."""
        self.index = 0
        self.name = name
        self.url = url
        self.weight = weight
        self.own = own
        self.standing: Standing = "member"
        self.suspended = False
        # When its machine goes, in seconds since the epoch. None: that is not known.
        self.leaves_at: float | None = None
        # What the replica reported of itself before it fell silent. Empty: it is heard.
        self.last_words = ""
        # Requests on it: this gateway's, or all that it reported if those are more.
        self.load = 0
        self.table: LoadTable | None = None
        self.place, self.noted = 0, True
        # The share of its KV budget that is claimed; None: it has none.
        self.kv_filled: float | None = None
        # Requests in a row that failed on it before it answered one.
        self.failures = 0
        self.trajectories: Trajectories | None = None
        self.heard: ReplicaReport | None = None
        self.renewed_at, self.boot = -math.inf, ""
        # How many policies it holds at once, as it last said.
        self.policies_max: int | None = None
        # Policies that could be loaded beside those that are, and those that could make way.
        self.room = (0, 0)
        self._policies: dict[PolicyKey, PolicyReport] = {}
        self._reported = 0
        self._in_flight = 0
        self._on_report = on_report

    def __repr__(self) -> str:
        return f"KnownReplica({self.name}, {self.url}, {self.standing}, {self.in_flight} in flight)"

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
        if not self.noted and self.table is not None:
            self.noted = True
            self.table.changed.append(self)

    def hear(self, report: ReplicaReport | None) -> None:
        """The replica reports of itself; None: it is not heard any more."""
        before, self.heard = self.heard, report
        self._reported = 0 if report is None else report.in_flight
        self.kv_filled = None if report is None else report.kv_waits.filled
        self.in_flight = self._in_flight
        held, policies = self._policies, () if report is None else report.policies
        self._policies = {_key(one): one for one in policies}
        if report is not None:
            if self.boot not in ("", report.boot):
                self.renewed_at = time.monotonic()
            self.boot = report.boot
            self.last_words = ""
            self.policies_max = report.policies_max
        others = [one for one in policies if one.policy]
        idle = sum(one.in_flight == 0 and one.stage in (Stage.IDLE, Stage.ERROR) for one in others)
        self.room = (max(0, (self.policies_max or 0) - len(others)), idle)
        if _of_boot(before) != _of_boot(report):
            self._on_report(self, None)
        else:
            keys = held.keys() | self._policies.keys()
            news = {key for key in keys if held.get(key) != self._policies.get(key)}
            self._on_report(self, news)

    def about(self, policy: PolicyKey) -> Reported | None:
        """What it says of a policy; None: it is not heard."""
        return None if self.heard is None else self.heard.about(self._policies.get(policy, NOT_HELD))

    def holds(self, policy: PolicyKey) -> bool:
        """Whether it has the policy in any stage. It always has its own weights."""
        return policy == OWN or policy in self._policies

    def reports(self, policy: PolicyKey) -> bool:
        """Whether it said in its last report that it has the policy, whatever was learned since."""
        policies = () if self.heard is None else self.heard.policies
        return any(_key(one) == policy for one in policies)

    def forget(self, policy: PolicyKey) -> None:
        """It does not hold the policy, whatever it reported last."""
        self._policies.pop(policy, None)


def _key(report: PolicyReport) -> PolicyKey:
    return (report.policy, report.made) if report.policy else OWN


def _of_boot(report: ReplicaReport | None) -> tuple[object, ...]:
    """What every policy sees of a report."""
    if report is None:
        return ()
    return report.boot, report.alive, report.card, report.max_model_len


def last_words(report: ReplicaReport) -> str:
    """What a replica that is not heard any more was about, as it last said."""
    engine = report.engine
    parts = [
        f"{report.in_flight} requests on it",
        f"{engine.running} running and {engine.waiting} waiting in its engine",
    ]
    if report.long_texts:
        parts.append(f"{report.long_texts} long texts being read")
    if report.stalled_s:
        parts.append(f"its event loop had stood still for {report.stalled_s:g} s")
    if report.engine_silent_s:
        parts.append(f"its engine had been silent for {report.engine_silent_s} s")
    return "when it was last heard: " + ", ".join(parts)
