"""Placement beside a plain reference, through random histories of one gateway's facts.

The reference keeps nothing between two decisions: it reads every fact of every replica each time, as the rules say.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from random import Random
from typing import cast

import pytest
from reports import replica_report

from midstream.core.config import GatewaySettings
from midstream.core.served_names import ServedNames
from midstream.core.types import Session
from midstream.fleet import placement
from midstream.fleet.loop import Reconciler
from midstream.fleet.placement import Decision
from midstream.fleet.prefixes import Known
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas, Member
from midstream.fleet.sessions import SessionTable
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamPool
from midstream.ledger import Ledger
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.proxy import Placed, Pools, Proxy

BOUND = GatewaySettings().load_bound
WEIGHTS = (1.0, 1.0, 0.5, 2.0, 3.7)
TENANTS = ("", "t")


def blake(*parts: str) -> int:
    data = b"".join(len(part).to_bytes(4, "big") + part for part in (part.encode() for part in parts))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


class Reference:
    """Decides among `views`: what is usable, its load as `load` says, and its weight."""

    def __init__(self, views: list[ReplicaView], load: Counter[str]) -> None:
        usable = [view for view in views if view.usable]
        open_ones = [view for view in usable if view.admitting] or usable
        self.names = sorted(view.name for view in open_ones)
        self.weight = {view.name: view.replica.weight for view in open_ones}
        self.load = {name: load[name] for name in self.names}
        self.even = len(set(self.weight.values())) <= 1

    def limit(self, name: str, bound: float) -> int:
        weights = sum(self.weight[one] for one in self.names)
        return math.ceil((1 + bound) * (sum(self.load.values()) + 1) * self.weight[name] / weights)

    def session(self, session: Session, home: str | None, lives: Counter[str]) -> Decision | None:
        if not self.names:
            return None
        score = {name: splitmix(blake(*session) ^ blake(name)) for name in self.names}
        key: dict[str, float] = {name: -score[name] for name in self.names}
        if not self.even:
            key = {name: -math.log((score[name] + 0.5) / 2**64) / self.weight[name] for name in self.names}
        free = [name for name in self.names if self.load[name] < self.limit(name, BOUND)]
        # Sorting keeps the order of names among equal ones.
        best = sorted(free, key=lambda name: key[name])[:2]
        chosen = best[0]
        if len(best) == 2:
            first, second = (lives[name] / self.weight[name] for name in best)
            if first > second * 1.02 + 1:
                chosen = best[1]
        rank = 1 + sum(key[name] < key[chosen] for name in self.names)
        load, limit = self.load[chosen], self.limit(chosen, BOUND)
        why = f"rendezvous candidate {rank} of {len(self.names)}, load {load}, limit {limit}"
        if home is None:
            return Decision(chosen, "new", f"new session: {why}")
        return Decision(chosen, "moved", f"{home} cannot serve it: {why}")

    def request(self, turn: int) -> Decision | None:
        if not self.names:
            return None
        full = {name: (self.load[name] + 1) / self.weight[name] for name in self.names}
        tied = [name for name in self.names if full[name] == min(full.values())]
        chosen = tied[turn % len(tied)]
        why = f"no session: load {self.load[chosen]}, the least of {len(self.names)}"
        return Decision(chosen, "balanced", why)

    def prefix(self, known: Known) -> Decision | None:
        name = known.replica
        if name not in self.names:
            return None
        limit = self.limit(name, 0.0 if known.shared else BOUND)
        if known.alone and not known.shared:
            limit += 2
        if self.load[name] >= limit:
            return None
        why = f"{known.share:.0%} of its prompt is known on {name}, load {self.load[name]}, limit {limit}"
        return Decision(name, "prefix", why)


class History:
    """One gateway, and what a plain reading of the same events gives."""

    def __init__(self, seed: int, pool: int, sessions_max: int = 50) -> None:
        self.rng = Random(seed)
        self.pool = pool
        self.running: list[ReplicaView] = []
        names = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
        self.facts = DeploymentReplicas()
        self.set = ReplicaSet(self.facts)
        self.policy = ReplicaSet(self.facts, "red", 1.0)
        reconciler = Reconciler(cast(Ledger, None), self.set, names.deployment)
        self.table = SessionTable(sessions_max, clock=lambda: 1000.0)
        self.deployment = Deployment(names, self.set, reconciler, self.table)
        deployments = Deployments(self.deployment)
        pools = Pools(lambda url: cast(UpstreamPool, None), cast(UpstreamPool, None))
        self.proxy = Proxy(GatewaySettings(), deployments, GatewayMetrics(deployments), pools)
        self.turn = 0
        self.boots = Counter[str]()
        # The homes of the latest sessions, the least recently used first.
        self.homes: dict[Session, str] = {}
        self.sessions_max = sessions_max
        self.decided = Counter[str]()
        self.members()
        for view in self.set.views:
            self.report(view)
            view.admitted = True

    # -- what is so now

    def loads(self) -> Counter[str]:
        """By name. Requests on a replica that is not known any more do not count for one of its name."""
        found: Counter[str] = Counter()
        for view in self.set.views:
            here = sum(one.replica is view.replica for one in self.running)
            heard = view.replica.heard
            found[view.name] = max(here, heard.in_flight if heard else 0)
        return found

    def lives(self) -> Counter[str]:
        return Counter(self.homes.values())

    # -- events

    def step(self) -> None:
        events = [(self.begin, 8), (self.end, 6), (self.hear, 3), (self.follow, 2), (self.flip, 2)]
        events += [(self.leave_out, 2), (self.forget, 1), (self.members, 1), (self.of_policy, 1)]
        self.rng.choices([one for one, _ in events], [often for _, often in events])[0]()

    def members(self) -> None:
        """Other replicas, weights and addresses; some leave."""
        rng = self.rng
        chosen = rng.sample(range(self.pool), rng.randint(max(1, self.pool * 7 // 8), self.pool))
        even = rng.random() < 0.5
        of = [
            Member(
                f"replica-{n}",
                f"http://h{n}-{int(rng.random() < 0.05)}:1",
                1.0 if even else rng.choice(WEIGHTS),
            )
            for n in chosen
        ]
        leaving = rng.sample([one.name for one in of], rng.randint(0, len(of) // 8))
        self.facts.set_members(of, leaving)

    def report(self, view: ReplicaView) -> None:
        rng = self.rng
        boot = f"b{self.boots[view.replica.url]}"
        known = replica_report(
            view.name,
            boot,
            ready=rng.random() < 0.95,
            admitting=rng.random() < 0.9,
            in_flight=rng.choice((0, 0, rng.randint(0, 6))),
        )
        view.replica.hear(known)

    def some(self) -> ReplicaView | None:
        return self.rng.choice(self.set.views) if self.set.views else None

    def hear(self) -> None:
        """A report, the same boot's or another one's; or silence."""
        if (view := self.some()) is None:
            return
        if self.rng.random() < 0.1:
            view.replica.hear(None)
            return
        self.boots[view.replica.url] += self.rng.random() < 0.2
        self.report(view)

    def flip(self) -> None:
        """The reconciler admits a replica or all, or does not; a replica is suspended or is not any more."""
        if (view := self.some()) is None:
            return
        if self.rng.random() < 0.3:
            self.facts._suspend(view.replica, not view.replica.suspended)
        elif self.rng.random() < 0.3:
            for one in self.set.views:
                one.admitted = True
        else:
            view.admitted = not view.admitted

    def forget(self) -> None:
        if self.homes:
            session = self.rng.choice(list(self.homes))
            assert self.table.forget(session)
            del self.homes[session]

    def end(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.running:
                self.running.pop(self.rng.randrange(len(self.running))).replica.count(-1)

    def begin(self) -> None:
        """Requests with and without a session."""
        for _ in range(self.rng.randint(1, 6)):
            session = None
            if self.rng.random() < 0.7:
                session = (self.rng.choice(TENANTS), f"s{self.rng.randrange(80)}")
            self.place(session, frozenset())

    def leave_out(self) -> None:
        """A request that some replicas must not take."""
        tried = frozenset(view.name for view in self.set.views if self.rng.random() < 0.2)
        self.place(self.rng.choice((None, ("", f"s{self.rng.randrange(80)}"))), tried)

    def of_policy(self) -> None:
        """A policy sees the same loads."""
        views = list(self.policy.views)
        for view in views:
            view.admitted = True
        found = self.policy.fleet.place_request(self.turn)
        assert (None if found is None else found[1]) == Reference(views, self.loads()).request(self.turn)

    def follow(self) -> None:
        rng = self.rng
        known = Known(
            f"replica-{rng.randrange(self.pool)}", rng.random(), rng.random() < 0.5, rng.random() < 0.5
        )
        found = self.set.fleet.place_prefix(known, BOUND)
        expected = Reference(list(self.set.views), self.loads()).prefix(known)
        assert (None if found is None else found[1]) == expected
        self.decided["prefix"] += expected is not None

    # -- a decision

    def place(self, session: Session | None, tried: frozenset[str]) -> None:
        expected, stays = self.expected(session, tried)
        if session in self.homes:
            # Asking counts as use.
            self.homes[session] = self.homes.pop(session)
        placed = self.proxy.place(self.deployment, session, tried)
        assert (None if placed is None else placed.decision) == expected
        if placed is None or expected is None:
            return
        self.decided[expected.reason] += 1
        self.went(session, placed, stays)

    def expected(self, session: Session | None, tried: frozenset[str]) -> tuple[Decision | None, bool]:
        """The decision, and whether the session's home stays what it is."""
        views = list(self.set.views)
        home = None if session is None else self.homes.get(session)
        at_home = any(view.name == home and view.usable for view in views)
        if home is not None and at_home and home not in tried:
            return Decision(home, "sticky", f"session is known on {home}"), True
        reference = Reference([view for view in views if view.name not in tried], self.loads())
        if session is None:
            decision = reference.request(self.turn)
            self.turn += 1
            return decision, False
        return reference.session(session, home, self.lives()), at_home

    def went(self, session: Session | None, placed: Placed, stays: bool) -> None:
        placed.view.replica.count(1)
        self.running.append(placed.view)
        if session is None:
            return
        home = self.homes.pop(session, None)
        self.homes[session] = home if stays and home is not None else placed.view.name
        if len(self.homes) > self.sessions_max:
            del self.homes[next(iter(self.homes))]


@pytest.mark.parametrize(
    ("pool", "arrays_from", "histories", "steps"),
    [
        pytest.param(7, placement.ARRAYS_FROM, 25, 80, id="small"),
        pytest.param(7, 2, 25, 80, id="small by arrays"),
        pytest.param(80, placement.ARRAYS_FROM, 10, 120, id="large"),
    ],
)
async def test_every_decision_is_that_of_the_plain_rules(
    pool: int, arrays_from: int, histories: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ARRAYS_FROM", arrays_from)
    decided: Counter[str] = Counter()

    for seed in range(histories):
        history = History(seed, pool)
        for _ in range(steps):
            history.step()
        decided.update(history.decided)
    assert min(decided[reason] for reason in ("sticky", "new", "moved", "balanced", "prefix")) > 20, decided
