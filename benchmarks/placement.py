"""Placement at scale, in simulation: 1,000 replicas, 1,000,000 sessions, 1 % of the replicas leaving per minute.

Run by `make bench-placement`. The gateway's own code decides (Proxy.place over a ReplicaSet and a SessionTable); only the
network is left out. A minute is one turn of every session; the requests in flight are the latest IN_FLIGHT_PER_REPLICA x
replicas. Each minute another 1 % of the replicas leaves and those of the minute before return.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from hardware import provenance, write_result

from midstream.core.config import GatewaySettings
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.served_names import ServedNames
from midstream.core.types import Session
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.sessions import SessionTable
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamPool
from midstream.ledger import Ledger
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.proxy import Pools, Proxy

IN_FLIGHT_PER_REPLICA = 16
# Of the replicas, per minute.
CHURN = 0.01


class Fleet:
    """A gateway's routing state, without a network."""

    def __init__(self, replicas: int, sessions: int) -> None:
        names = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
        self.set = ReplicaSet(
            DeploymentReplicas(
                [(f"replica-{n}", f"http://10.0.{n >> 8}.{n & 255}:1") for n in range(replicas)]
            )
        )
        for view in self.set.views:
            view.replica.hear(
                ReplicaReport(replica=view.name, boot="b", alive=True, policies=(PolicyReport(),))
            )
            view.admitted = True
        reconciler = Reconciler(cast(Ledger, None), self.set, names.deployment)
        self.deployment = Deployment(names, self.set, reconciler, SessionTable(sessions + 1))
        deployments = Deployments(self.deployment)
        pool = cast(UpstreamPool, None)
        self.proxy = Proxy(
            GatewaySettings(), deployments, GatewayMetrics(deployments), Pools(lambda url: pool, pool)
        )
        self._under_way: deque[ReplicaView] = deque()
        self._most = IN_FLIGHT_PER_REPLICA * replicas

    def turn(self, session: Session | None) -> str:
        """One request is placed and begins; the oldest ends. Why it went where it went."""
        placed = self.proxy.place(self.deployment, session)
        assert placed is not None
        placed.view.replica.count(1)
        self._under_way.append(placed.view)
        if len(self._under_way) > self._most:
            self._under_way.popleft().replica.count(-1)
        return placed.decision.reason

    def homes(self) -> Counter[str]:
        return Counter(home for home, *_ in self.deployment.sessions._homes.values())


def timed(work: Callable[[], Any], count: int) -> float:
    """CPU microseconds for each of `count`."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(replicas: int, sessions: int, minutes: int) -> dict[str, Any]:
    fleet = Fleet(replicas, sessions)
    fleet.turn(("warm", "up"))
    fleet.deployment.sessions.forget(("warm", "up"))
    gc.collect()
    before = resident_bytes()
    # A new key for each turn, as parsing a request makes one.
    tenant = "tenant-0123456789abcdef"
    new_us = timed(lambda: [fleet.turn((tenant, f"trajectory-{n:020}")) for n in range(sessions)], sessions)
    per_session = (resident_bytes() - before) / sessions
    counts = fleet.homes()
    sticky_us = timed(
        lambda: [fleet.turn((tenant, f"trajectory-{n:020}")) for n in range(sessions)], sessions
    )
    keyless = sessions // 10
    keyless_us = timed(lambda: [fleet.turn(None) for _ in range(keyless)], keyless)
    return {
        "replicas": replicas,
        "sessions": sessions,
        "new_session_us": round(new_us, 2),
        "known_session_us": round(sticky_us, 2),
        "without_session_us": round(keyless_us, 2),
        "bytes_per_session": round(per_session),
        "sessions_max_over_mean": round(max(counts.values()) * replicas / counts.total(), 3),
        "churn": churn(fleet, replicas, sessions, minutes, tenant),
    }


def churn(fleet: Fleet, replicas: int, sessions: int, minutes: int, tenant: str) -> dict[str, Any]:
    """moved_others: sessions that moved though their replica was there; must be none."""
    gone: list[ReplicaView] = []
    leavers = max(1, round(CHURN * replicas))
    moved = others = should = 0
    us, worst = [], 0.0
    for minute in range(minutes):
        for view in gone:
            view.admitted = True
        first = minute * leavers % replicas
        gone = list(fleet.set.views[first : first + leavers])
        for view in gone:
            view.admitted = False
        left = {view.name for view in gone}
        before = fleet.homes()
        should += sum(before[name] for name in left)
        reasons: Counter[str] = Counter()

        def a_minute(reasons: Counter[str] = reasons) -> None:
            for number in range(sessions):
                reasons[fleet.turn((tenant, f"trajectory-{number:020}"))] += 1

        us.append(timed(a_minute, sessions))
        after = fleet.homes()
        moved += reasons["moved"]
        others += reasons["moved"] - sum(before[name] for name in left) + reasons["new"]
        worst = max(worst, max(after.values()) * (replicas - len(left)) / after.total())
    return {
        "minutes": minutes,
        "leaving_per_minute": leavers,
        "moved": moved,
        "of_leavers": should,
        "moved_others": others,
        "us_per_turn": round(sum(us) / len(us), 2),
        "sessions_max_over_mean": round(worst, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 100, 1000])
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/placement.json")
    options = parser.parse_args()
    rows = []
    for replicas in options.replicas:
        large = replicas == max(options.replicas)
        sessions = options.sessions if large else min(options.sessions, 100_000)
        rows.append(measure(replicas, sessions, options.minutes if large else min(options.minutes, 3)))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        configuration = {"in_flight_per_replica": IN_FLIGHT_PER_REPLICA, "churn": CHURN}
        print("wrote", write_result("placement", {**provenance(**configuration), "rows": rows}))


if __name__ == "__main__":
    main()
