"""Placement at scale, in simulation: 1,000 replicas, 1,000,000 sessions, 1 % of the replicas leaving per minute.

Run by `make bench-placement`. The gateway's own code decides (Proxy.place over a ReplicaSet and a SessionTable); only the
network is left out. A minute is one turn of every session; the requests in flight are the latest IN_FLIGHT_PER_REPLICA x
replicas. Each minute another 1 % of the replicas leaves and those of the minute before return.

Requests have bodies, as the gateway reads the group of a new session from its prompt, and where a request without a session
may go. Their prompts begin with one system prompt, and GROUP consecutive ones are equal to the end.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hardware import provenance, write_result

from midstream.core.config import GatewaySettings
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.served_names import ServedNames
from midstream.core.types import Session
from midstream.fleet.loop import Reconciler
from midstream.fleet.prefixes import read_prompt
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.sessions import SessionTable
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamPool
from midstream.ledger import Ledger
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.proxy import Pools, Proxy

TENANT = "tenant-0123456789abcdef"
#: Samples of one task, which a trainer sends one after the other.
GROUP = 8
PROMPT_BYTES, LONG_PROMPT_BYTES = 2000, 30_000
NO_PROMPT = b'{"model":"m","max_tokens":64}'
#: Requests that are made at a time.
CHUNK = 1000
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

    def turn(self, session: Session | None, body: bytes) -> str:
        """One request is placed and begins; the oldest ends. Why it went where it went."""
        prompt = read_prompt(TENANT, body) if session is None else None
        placed = self.proxy.place(self.deployment, session, prompt=prompt, body=body)
        assert placed is not None
        placed.view.replica.count(1)
        self._under_way.append(placed.view)
        if len(self._under_way) > self._most:
            self._under_way.popleft().replica.count(-1)
        return placed.decision.reason

    def homes(self) -> Counter[str]:
        return Counter(home for home, *_ in self.deployment.sessions._homes.values())


def body_of(number: int, prompt_bytes: int) -> bytes:
    """Of the request with that number. Those of a group have the same prompt, and other fields behind it."""
    task = f"Task {number // GROUP}: " + "x" * (prompt_bytes // 2)
    system = "You are one of many. "
    system *= prompt_bytes // 2 // len(system)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "seed": number}).encode()


def key_of(number: int) -> Session:
    """Another object for each turn, as parsing a request makes one."""
    return TENANT[:-1] + TENANT[-1:], f"trajectory-{number:020}"


Request = tuple[Session | None, bytes]


def timed(fleet: Fleet, requests: Iterator[Request], reasons: Counter[str] | None = None) -> float:
    """CPU microseconds of the fleet for each request. Making them is not counted."""
    took, count = 0.0, 0
    while chunk := list(itertools.islice(requests, CHUNK)):
        began = time.process_time()
        why = [fleet.turn(session, body) for session, body in chunk]
        took += time.process_time() - began
        count += len(chunk)
        if reasons is not None:
            reasons.update(why)
    return took / count * 1e6


def turns(sessions: int, prompt_bytes: int = 0, first: int = 0) -> Iterator[Request]:
    """One of each session. prompt_bytes: 0: without a prompt, which nobody reads of a session that is known."""
    return (
        (key_of(number), body_of(number, prompt_bytes) if prompt_bytes else NO_PROMPT)
        for number in range(first, first + sessions)
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(replicas: int, sessions: int, minutes: int) -> dict[str, Any]:
    fleet = Fleet(replicas, sessions)
    fleet.turn(("warm", "up"), NO_PROMPT)
    fleet.deployment.sessions.forget(("warm", "up"))
    gc.collect()
    before = resident_bytes()
    new_us = timed(fleet, turns(sessions, PROMPT_BYTES))
    per_session = (resident_bytes() - before) / sessions
    counts = fleet.homes()
    sticky_us = timed(fleet, turns(sessions))
    some = sessions // 10
    # Of other tasks than those of sessions.
    keyless = ((None, body_of(number, PROMPT_BYTES)) for number in range(sessions, sessions + some))
    keyless_us = timed(fleet, keyless)
    churned = churn(fleet, replicas, sessions, minutes)
    # The table is full, so each one more makes it forget one.
    others = {
        f"new_session_{name}_us": round(timed(fleet, turns(some, size, (2 + place) * sessions)), 2)
        for place, (name, size) in enumerate((("no_prompt", 0), ("long_prompt", LONG_PROMPT_BYTES)))
    }
    return {
        "replicas": replicas,
        "sessions": sessions,
        "new_session_us": round(new_us, 2),
        **others,
        "known_session_us": round(sticky_us, 2),
        "without_session_us": round(keyless_us, 2),
        "bytes_per_session": round(per_session),
        "sessions_max_over_mean": round(max(counts.values()) * replicas / counts.total(), 3),
        "churn": churned,
    }


def churn(fleet: Fleet, replicas: int, sessions: int, minutes: int) -> dict[str, Any]:
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
        us.append(timed(fleet, turns(sessions), reasons))
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
        configuration = {
            "in_flight_per_replica": IN_FLIGHT_PER_REPLICA,
            "churn": CHURN,
            "group": GROUP,
            "prompt_bytes": PROMPT_BYTES,
            "long_prompt_bytes": LONG_PROMPT_BYTES,
        }
        print("wrote", write_result("placement", {**provenance(**configuration), "rows": rows}))


if __name__ == "__main__":
    main()
