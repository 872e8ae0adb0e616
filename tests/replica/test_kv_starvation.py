"""How long sessions wait for room in a KV cache, beside a simulation that shares no code with ours: tenants and priorities."""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.core.types import Session
from midstream.replica.kv_account import GROUPS_MAX, Beginning, KvAccount
from midstream.replica.kv_lengths import LEARNED_FROM
from midstream.replica.kv_queue import OVERTAKEN, PLACES_MAX, KvQueue, Waiting


class Arrival(NamedTuple):
    at: float
    number: int
    need: int
    lasts_s: float
    tenant: str
    priority: int

    @property
    def session(self) -> Session:
        return self.tenant, str(self.number)


class Begun(NamedTuple):
    """one: that began. waited: the others that waited then."""

    one: Arrival
    waited: tuple[Arrival, ...]


def arrivals_of(seed: int, tenants: int, priorities: int) -> list[Arrival]:
    draw, now, found = random.Random(seed), 0.0, []
    for number in range(60):
        now += draw.expovariate(2.0) if draw.random() < 0.6 else 0.0
        need, lasts_s = draw.choice([50, 100, 400, 900]), draw.expovariate(1 / draw.choice([1.0, 5.0, 30.0]))
        whose = f"t{draw.randrange(tenants)}", draw.randrange(priorities)
        found.append(Arrival(now, number, need, lasts_s, *whose))
    return found


class Ours:
    """Account and queue. order: who began, with who waited then. ahead: tokens of all that ran or waited, by who came then."""

    def __init__(self, capacity: int) -> None:
        self.account = KvAccount()
        self.account.capacity = capacity
        self.queue = KvQueue(self.account, waiting_max=10_000)
        self.now = 0.0
        self.waits: dict[int, float] = {}
        self.order: list[Begun] = []
        self.ahead: dict[int, int] = {}
        self._waiting: list[Arrival] = []
        self._running: list[tuple[float, Arrival]] = []

    def play(self, arrivals: list[Arrival]) -> None:
        todo = list(arrivals)
        while todo or self._running:
            if todo and (not self._running or todo[0].at <= self._running[0][0]):
                self._comes(todo.pop(0))
            else:
                self.now, over = heapq.heappop(self._running)
                self.account.end(over.session)
            self.queue.admit(self.now)
            self.account.check()
        assert self._waiting == [], "somebody waits for ever"

    def _comes(self, one: Arrival) -> None:
        self.now = one.at
        self.ahead[one.number] = sum(other.need for _, other in self._running) + sum(
            other.need for other in self._waiting
        )
        turn = Waiting(one.session, Beginning(one.number, one.number), one.need, None, one.priority, one.at)
        turn.go = lambda: self._begins(one)
        self._waiting.append(one)
        if not self.queue.join(turn):
            self.account.begin(turn.session, turn.first, one.need, one.at)
            self._begins(one)

    def _begins(self, one: Arrival) -> None:
        self._waiting.remove(one)
        self.order.append(Begun(one, tuple(self._waiting)))
        self.waits[one.number] = self.now - one.at
        heapq.heappush(self._running, (self.now + one.lasts_s, one))


def waits_by_rank(arrivals: list[Arrival], capacity: int) -> dict[int, float]:
    """Without any of our code: the lowest priority number first, and of equal ones whoever came first."""
    waiting: list[tuple[int, int, Arrival]] = []
    ends: list[tuple[float, int]] = []
    waits: dict[int, float] = {}
    used, todo = 0, list(arrivals)
    while todo or ends:
        if todo and (not ends or todo[0].at <= ends[0][0]):
            one = todo.pop(0)
            now = one.at
            heapq.heappush(waiting, (one.priority, one.number, one))
        else:
            now, freed = heapq.heappop(ends)
            used -= freed
        while waiting:
            one = waiting[0][2]
            need = min(one.need, capacity)
            if used and used + need > capacity:
                break
            heapq.heappop(waiting)
            used += need
            waits[one.number] = now - one.at
            heapq.heappush(ends, (now + one.lasts_s, need))
    return waits


SEEDS = st.integers(0, 2**32)
CAPACITIES = st.sampled_from([500, 1000, 3000])


@settings(max_examples=examples(100), deadline=None)
@given(seed=SEEDS, capacity=CAPACITIES)
def test_of_one_tenant_each_waits_as_long_as_by_priority_and_then_first_come_first_served(
    seed: int, capacity: int
) -> None:
    arrivals = arrivals_of(seed, 1, 3)
    ours = Ours(capacity)
    ours.play(arrivals)
    reference = waits_by_rank(arrivals, capacity)
    assert {n: round(wait, 6) for n, wait in ours.waits.items()} == {
        n: round(wait, 6) for n, wait in reference.items()
    }


@settings(max_examples=examples(100), deadline=None)
@given(seed=SEEDS, capacity=CAPACITIES, tenants=st.integers(2, 5), priorities=st.integers(1, 3))
def test_of_several_tenants_and_priorities_nobody_is_overtaken_by_more_than_a_fifth_of_what_was_before_it(
    seed: int, capacity: int, tenants: int, priorities: int
) -> None:
    """Nor by anybody less urgent, nor by its own tenant. Counted from the order in which they begin."""
    ours = Ours(capacity)
    ours.play(arrivals_of(seed, tenants, priorities))
    overtaken: dict[int, int] = {}
    for one, waited in ours.order:
        for other in waited:
            assert other.priority >= one.priority, f"{one} goes before {other}"
            if other.priority == one.priority and other.number < one.number:
                assert other.tenant != one.tenant, f"{one} goes before {other}"
                overtaken[other.number] = overtaken.get(other.number, 0) + min(one.need, capacity)
    assert {n: tokens for n, tokens in overtaken.items() if tokens > OVERTAKEN * ours.ahead[n]} == {}


def test_what_is_learned_of_groups_that_never_end_and_clients_that_never_stay_is_bounded() -> None:
    account = KvAccount()
    account.capacity = 10_000
    queue = KvQueue(account, waiting_max=9)
    for n in range(PLACES_MAX + 100):
        group = Beginning(n, n) if n % 2 else Beginning(1, 1)
        account.begin(("", str(n)), group, 10, 0.0)
        account.found(("", str(n)), 0)
        account.end_turn(("", str(n)), 20, 0.0)
        account.end(("", str(n)))
        queue.keep_place(("", str(n)), 0.0, 0.0)
    assert (len(account._groups), len(queue._left)) == (GROUPS_MAX, PLACES_MAX)
    assert {len(one) for one in account._groups.values()} <= {1, LEARNED_FROM}
    assert len(account._lengths) == LEARNED_FROM
    account.check()
    assert not account._members, "a session that is over is remembered"
    assert not account._mates
