"""The KV budget: books of needs, the queue of first turns, and what it is bounded by. Times are numbers."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples

from midstream.core.errors import InvalidRequest, Overloaded
from midstream.core.headers import HEADER_EXPECTED_TOKENS
from midstream.core.types import Session
from midstream.replica.kv_account import TURNS_EXPECTED, Beginning, KvAccount
from midstream.replica.kv_budget import expected_tokens
from midstream.replica.kv_queue import OVERTAKEN, KvQueue, Waiting


def alone(number: int) -> Beginning:
    return Beginning(number, number)


def session_of(name: str, tenant: str = "") -> Session:
    return tenant, name


# -- the account


def test_what_sessions_share_is_claimed_once_and_outlives_the_one_that_computed_it() -> None:
    account = KvAccount()
    account.capacity = 10_000
    group = Beginning(1, 2)
    for n in range(4):
        account.begin(session_of(f"s{n}"), group, 100, 0.0)
        account.found(session_of(f"s{n}"), 0 if n == 0 else 96)
        account.end_turn(session_of(f"s{n}"), 120, 0.0)
    # The others' own: what they generated, since they asked for their group's prompt.
    assert account.between == 120 + 3 * 20
    account.end(session_of("s0"))
    account.check()
    # The prompt belongs to another one now.
    assert account.between == 120 + 2 * 20
    for n in (1, 2):
        account.end(session_of(f"s{n}"))
    assert account.between == 120
    account.end(session_of("s3"))
    assert (account.claimed, len(account)) == (0, 0)


def test_a_need_is_learned_from_what_others_of_its_group_came_to() -> None:
    account = KvAccount()
    account.capacity = 10_000
    assert account.asks(alone(1), 100) == 100
    for n, final in enumerate((200, 400, 600, 800)):
        account.begin(session_of(f"s{n}"), alone(7), 100, 0.0)
        account.found(session_of(f"s{n}"), 0)
        account.end_turn(session_of(f"s{n}"), 150, 0.0)
        account.begin(session_of(f"s{n}"), alone(7), 150, 0.0)
        account.end_turn(session_of(f"s{n}"), final, 0.0)
        account.end(session_of(f"s{n}"))
    assert account.asks(alone(7), 100) == 600
    # Of those that came so far, most end at 800 at the latest.
    assert account.asks(alone(7), 500) == 800
    # None is known that came further than this one. Each turn's prompt was 50 tokens longer than the one before.
    assert account.asks(alone(7), 900) == 900 + TURNS_EXPECTED * 50
    assert account.asks(alone(7), 100, said=150) == 150
    # Whatever is said, it is no more than there is.
    assert account.asks(alone(7), 100, said=10**9) == 10_000


def test_a_header_that_says_too_little_is_counted_and_does_not_hide_what_the_session_has() -> None:
    account = KvAccount()
    account.capacity = 1000
    account.begin(session_of("s"), alone(1), 100, 0.0, said=120)
    assert account.claimed == 120
    account.end_turn(session_of("s"), 700, 1.0)
    assert account.claimed == 700
    account.end(session_of("s"))
    assert (account.understated, account.claimed) == (1, 0)


def test_a_session_that_is_silent_longer_than_others_loses_its_claim_until_it_comes_back() -> None:
    account = KvAccount()
    account.capacity = 1000
    for n in range(5):
        account.begin(session_of("a"), alone(1), 100, 10.0 * n)
        account.end_turn(session_of("a"), 100, 10.0 * n + 1)
    # Nine seconds between its turns, so twice that.
    assert account.silent_s() == 18.0
    assert account.demote(41.0 + 17.9) == 41.0 + 18.0
    assert account.claimed > 0
    assert account.demote(41.0 + 18.0) is None
    assert (account.claimed, len(account)) == (0, 1)
    account.begin(session_of("a"), alone(1), 110, 80.0)
    assert account.claimed >= 110
    account.check()


def test_where_no_session_has_a_second_turn_nothing_is_kept_for_one() -> None:
    """A key for each request must not hold up the next ones."""
    account = KvAccount()
    account.capacity = 1000
    for n in range(4):
        account.begin(session_of(f"s{n}"), alone(n), 100, float(n))
        account.end_turn(session_of(f"s{n}"), 110, float(n))
        account.demote(n + 5.5)
    account.begin(session_of("next"), alone(9), 100, 10.0)
    account.end_turn(session_of("next"), 110, 11.0)
    account.demote(11.0)
    assert account.claimed == 0


@pytest.mark.parametrize("ends", [True, False])
def test_where_no_session_has_a_second_turn_each_claims_what_it_has(ends: bool) -> None:
    """Room for what answers may come to stood empty: single turns, a key each, took 1.4 to 1.5 times as long."""
    account = KvAccount()
    account.capacity = 1000
    for n in range(4):
        account.begin(session_of(f"s{n}"), alone(n), 100, float(n))
        account.end_turn(session_of(f"s{n}"), 900, float(n))
        if ends:
            account.end(session_of(f"s{n}"))
    account.demote(20.0)
    assert account.asks(alone(9), 100) == 100
    assert account.asks(alone(9), 100, said=300) == 300
    # As soon as sessions come back, it is learned from them.
    account.begin(session_of("agent"), alone(8), 100, 20.0)
    account.end_turn(session_of("agent"), 200, 21.0)
    account.begin(session_of("agent"), alone(8), 210, 22.0)
    assert account.asks(alone(9), 100) == 900


class AccountMachine(RuleBasedStateMachine):
    """Turns, ends and silences of sessions that share beginnings, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.account = KvAccount()
        self.account.capacity = 1000
        self.now = 0.0
        self.turns: dict[str, int] = {}
        self.context: dict[str, int] = {}

    @rule(
        name=st.sampled_from("abcdefgh"),
        family=st.integers(0, 1),
        group=st.integers(0, 2),
        tokens=st.integers(1, 300),
        said=st.none() | st.integers(1, 5000),
    )
    def begin(self, name: str, family: int, group: int, tokens: int, said: int | None) -> None:
        self.account.begin(("", name), Beginning(family, 10 * family + group), tokens, self.now, said)
        self.turns[name] = self.turns.get(name, 0) + 1

    @rule(name=st.sampled_from("abcdefgh"), cached=st.integers(0, 400))
    def found(self, name: str, cached: int) -> None:
        self.account.found(("", name), cached)

    @rule(name=st.sampled_from("abcdefgh"), tokens=st.integers(0, 400))
    def end_turn(self, name: str, tokens: int) -> None:
        if self.turns.get(name):
            self.turns[name] -= 1
            self.account.end_turn(("", name), tokens, self.now)

    @rule(name=st.sampled_from("abcdefgh"))
    def end(self, name: str) -> None:
        self.account.end(("", name))
        self.turns.pop(name, None)

    @rule(seconds=st.floats(0.0, 50.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.account.demote(self.now)
        assert due is None or due > self.now

    @rule()
    def lose_all(self) -> None:
        self.account.reset()
        self.turns.clear()

    @invariant()
    def books(self) -> None:
        self.account.check()
        assert 0 <= self.account.claimed <= 1000 * 8

    def teardown(self) -> None:
        for name in "abcdefgh":
            self.account.end(("", name))
        self.account.check()
        assert (self.account.claimed, len(self.account), self.account.between) == (0, 0, 0)


AccountMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAccount = AccountMachine.TestCase


# -- the queue


@dataclass(order=True)
class Arrival:
    at: float
    name: str
    need: int = field(compare=False)
    lasts_s: float = field(compare=False)
    tenant: str = field(default="", compare=False)


def arrivals_of(seed: int, count: int, tenants: int = 1) -> list[Arrival]:
    draw = random.Random(seed)
    now, arrivals = 0.0, []
    for n in range(count):
        now += draw.expovariate(2.0) if draw.random() < 0.6 else 0.0
        need = draw.choice([50, 100, 200, 400, 900, 5000])
        lasts_s = draw.expovariate(1 / draw.choice([1.0, 5.0, 30.0]))
        arrivals.append(Arrival(now, f"s{n}", need, lasts_s, f"t{draw.randrange(tenants)}"))
    return arrivals


def waits_by_ours(arrivals: list[Arrival], capacity: int) -> tuple[dict[str, float], KvQueue]:
    account = KvAccount()
    account.capacity = capacity
    queue = KvQueue(account, waiting_max=10_000)
    ends: list[tuple[float, str, str]] = []
    waits: dict[str, float] = {}
    now = 0.0

    def begins(one: Arrival) -> None:
        waits[one.name] = now - one.at
        heapq.heappush(ends, (now + one.lasts_s, one.tenant, one.name))

    todo = list(arrivals)
    while todo or ends:
        if todo and (not ends or todo[0].at <= ends[0][0]):
            one = todo.pop(0)
            now = one.at
            turn = Waiting((one.tenant, one.name), alone(hash(one.name)), 10, one.need, 0, now)
            turn.go = lambda one=one: begins(one)  # type: ignore[misc]
            if not queue.join(turn):
                account.begin(turn.session, turn.first, 10, now, one.need)
                begins(one)
        else:
            now, tenant, name = heapq.heappop(ends)
            account.end((tenant, name))
        queue.admit(now)
        account.check()
    assert not len(queue), "somebody waits for ever"
    return waits, queue


def waits_by_fcfs(arrivals: list[Arrival], capacity: int) -> dict[str, float]:
    """The same cache without any of our code: whoever came first begins first."""
    waiting: list[Arrival] = []
    ends: list[tuple[float, int]] = []
    waits: dict[str, float] = {}
    used, todo = 0, list(arrivals)
    while todo or ends:
        if todo and (not ends or todo[0].at <= ends[0][0]):
            one = todo.pop(0)
            now = one.at
            waiting.append(one)
        else:
            now, freed = heapq.heappop(ends)
            used -= freed
        while waiting:
            need = min(waiting[0].need, capacity)
            if used and used + need > capacity:
                break
            one = waiting.pop(0)
            used += need
            waits[one.name] = now - one.at
            heapq.heappush(ends, (now + one.lasts_s, need))
    return waits


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([500, 1000, 3000]))
def test_no_trajectory_waits_longer_than_a_fifth_more_than_first_come_first_served(
    seed: int, capacity: int
) -> None:
    arrivals = arrivals_of(seed, 60)
    ours, _ = waits_by_ours(arrivals, capacity)
    fcfs = waits_by_fcfs(arrivals, capacity)
    assert ours.keys() == fcfs.keys()
    assert {name: wait for name, wait in ours.items() if wait > 1.2 * fcfs[name] + 1e-9} == {}


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_between_tenants_nobody_is_overtaken_by_more_than_a_fifth_of_what_was_before_it(seed: int) -> None:
    seen: list[Waiting] = []

    class Watched(KvQueue):
        def _begin(self, one: Waiting, now: float) -> None:
            super()._begin(one, now)
            seen.append(one)

    account = KvAccount()
    account.capacity = 1000
    queue = Watched(account, waiting_max=10_000)
    draw, number = random.Random(seed), 0
    for step in range(200):
        if draw.random() < 0.6:
            number += 1
            turn = Waiting(
                (f"t{draw.randrange(3)}", str(number)),
                alone(number),
                10,
                draw.choice([50, 300, 900]),
                0,
                step,
            )
            if not queue.join(turn):
                account.begin(turn.session, turn.first, 10, step, turn.said)
        elif account._sessions:
            account.end(draw.choice(sorted(account._sessions)))
        queue.admit(step)
    assert all(one.overtaken <= OVERTAKEN * one.ahead for one in seen)


def test_a_tenant_with_little_is_not_kept_behind_the_flood_of_another() -> None:
    account = KvAccount()
    account.capacity = 1000
    queue = KvQueue(account, waiting_max=100)
    order: list[str] = []
    for n in range(30):
        turn = Waiting(("flood", f"f{n}"), alone(n), 10, 100, 0, 0.0)
        turn.go = lambda n=n: order.append(f"f{n}")  # type: ignore[misc]
        if not queue.join(turn):
            account.begin(turn.session, turn.first, 10, 0.0, 100)
    small = Waiting(("small", "s"), alone(99), 10, 100, 0, 0.0)
    small.go = lambda: order.append("small")
    assert queue.join(small)
    assert queue.position(("small", "s")) == 21
    account.end(("flood", "f0"))
    queue.admit(1.0)
    assert order == ["small"]


def test_a_session_larger_than_the_budget_runs_alone_and_the_rest_after_it() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=10)
    large, small = (
        Waiting(("", n), alone(i), t, None, 0, 0.0) for i, (n, t) in enumerate([("l", 900), ("s", 10)])
    )
    assert not queue.join(large)
    account.begin(large.session, large.first, 900, 0.0)
    assert queue.join(small)
    account.end(large.session)
    queue.admit(1.0)
    assert small.session in account


def test_a_queue_that_is_full_refuses_and_says_when_to_come_again() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=1)
    account.begin(("", "runs"), alone(1), 100, 0.0)
    assert queue.join(Waiting(("", "waits"), alone(2), 10, None, 0, 0.0))
    with pytest.raises(Overloaded) as refused:
        queue.join(Waiting(("", "too many"), alone(3), 10, None, 0, 0.0))
    assert (refused.value.status, refused.value.retry_after_s, queue.refused) == (429, 1, 1)


def test_where_nothing_is_known_of_the_cache_nothing_waits() -> None:
    queue = KvQueue(KvAccount(), waiting_max=0)
    queue.account.begin(("", "other"), alone(1), 10**9, 0.0)
    assert not queue.join(Waiting(("", "s"), alone(2), 10**9, None, 0, 0.0))


def test_a_lower_priority_number_goes_first_and_a_twin_of_a_session_with_it() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=9)
    account.begin(("", "runs"), alone(1), 100, 0.0)
    order: list[str] = []
    for name, priority in (("late", 5), ("soon", 1), ("soon", 9)):
        turn = Waiting(("", name), alone(hash(name)), 60, None, priority, 0.0)
        turn.go = lambda name=name: order.append(name)  # type: ignore[misc]
        assert queue.join(turn)
    account.end(("", "runs"))
    queue.admit(1.0)
    assert order == ["soon", "soon"]


@pytest.mark.parametrize("value", ["0", "-1", "1e9", "many", "", "99999999999", "٣"])
def test_a_header_that_is_no_number_of_tokens_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match=HEADER_EXPECTED_TOKENS):
        expected_tokens({HEADER_EXPECTED_TOKENS: value})
    assert expected_tokens({HEADER_EXPECTED_TOKENS: "142000"}) == 142000
    assert expected_tokens({}) is None


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from([300, 1000]))
def test_where_too_many_began_the_oldest_go_on_and_all_of_them_end(seed: int, capacity: int) -> None:
    """Contexts that nobody expected: each turn that runs fits beside those of all sessions that began before its own."""
    draw = random.Random(seed)
    account = KvAccount()
    account.capacity = capacity
    queue = KvQueue(account, waiting_max=100)
    left = {n: draw.randrange(1, 8) for n in range(12)}
    context = dict.fromkeys(left, 20)
    running: set[int] = set()
    waiting: set[int] = set()
    now = 0.0

    def goes(n: int) -> None:
        waiting.discard(n)
        running.add(n)
        before = [m for m in left if m != n and number(m) < number(n)]
        older = sum(min(context[m], context[m]) for m in before if ("", str(m)) in account)
        assert not older or older + context[n] <= capacity, "an older one has no room"

    def number(n: int) -> int:
        return account.number(("", str(n))) or 10**9

    for _ in range(3000):
        if not left:
            break
        now += 0.01
        n = draw.choice(sorted(left))
        session = "", str(n)
        if n in running:
            running.remove(n)
            context[n] += draw.choice([5, 50, 120])
            account.found(session, 0)
            account.end_turn(session, context[n], now)
            left[n] -= 1
            if not left[n]:
                del left[n]
                account.end(session)
        elif n not in waiting:
            turn = Waiting(session, alone(n), context[n], None, 0, now, begun=session in account)
            turn.go = lambda n=n: goes(n)  # type: ignore[misc]
            if queue.join(turn):
                waiting.add(n)
            else:
                account.begin(session, alone(n), context[n], now)
                running.add(n)
        queue.admit(now)
        account.check()
    assert (left, len(queue), account.claimed, account.live) == ({}, 0, 0, 0)


def test_a_client_that_asks_again_after_its_own_time_limit_has_its_place_again() -> None:
    """Else clients with a limit of ten minutes never begin behind a queue of eleven (prime-rl#3211)."""
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=9)
    account.begin(("", "runs"), alone(1), 100, 0.0)
    turns = {name: Waiting(("", name), alone(at), 60, None, 0, float(at)) for at, name in enumerate("abc", 2)}
    assert all(queue.join(turn) for turn in turns.values())
    for name in "ab":
        queue.leave(turns[name], 600.0)
    assert queue.position(("", "c")) == 1
    assert queue.join(Waiting(("", "b"), alone(9), 60, None, 0, 601.0))
    assert queue.join(Waiting(("", "a"), alone(8), 60, None, 0, 700.0))
    # The one that came back in time is before what came after it; the other is the last.
    assert [queue.position(("", name)) for name in "bca"] == [1, 2, 3]


def test_requests_without_a_session_hold_up_no_session_for_ever() -> None:
    """They never wait, so there may always be some. A session that needs the whole cache begins all the same."""
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=9)
    account.without_session(10)
    assert not queue.join(Waiting(("", "large"), alone(1), 10, 10**9, 0, 0.0))


def test_a_flood_of_requests_without_a_session_leaves_sessions_half_of_the_cache() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=9)
    account.without_session(5000)
    for name in ("a", "b"):
        turn = Waiting(("", name), alone(hash(name)), 10, 25, 0, 0.0)
        assert not queue.join(turn)
        account.begin(turn.session, turn.first, 10, 0.0, 25)
    assert queue.join(Waiting(("", "c"), alone(3), 10, 25, 0, 0.0))
    account.without_session(-5000)
    account.check()
    assert account.claimed == 50


def test_a_prompt_is_claimed_again_once_all_that_had_it_were_silent_for_too_long() -> None:
    """Their KV may be gone, so it is not there for the next session of the group."""
    account = KvAccount()
    account.capacity = 10_000
    group = Beginning(1, 2)
    for name in "ab":
        account.begin(session_of(name), group, 1000, 0.0)
        account.found(session_of(name), 0 if name == "a" else 992)
        account.end_turn(session_of(name), 1100, 0.0)
    account.demote(1000.0)
    assert (account.claimed, account.live) == (0, 0)
    assert account.asks(group, 1000) >= 1000
    account.begin(session_of("c"), group, 1000, 1000.0)
    assert account.live == 1000
    # One that comes back shares what the new one has.
    account.begin(session_of("a"), group, 1200, 1001.0)
    assert account.live <= 2200
    account.check()


def test_what_members_share_has_an_owner_after_those_that_need_no_more_than_they_share() -> None:
    account = KvAccount()
    account.capacity = 10_000
    group = Beginning(1, 2)
    for name in "ab":
        account.begin(session_of(name), group, 1000, 0.0)
        account.found(session_of(name), 0 if name == "a" else 992)
    account.end(session_of("a"))
    assert account.live == 1000
    account.check()


def test_a_turn_that_was_refused_or_left_teaches_nothing() -> None:
    account = KvAccount()
    account.capacity = 10_000
    for n in range(8):
        account.begin(session_of(f"s{n}"), alone(n), 500, 0.0)
        account.end_turn(session_of(f"s{n}"), 0, 0.0)
        account.end(session_of(f"s{n}"))
    assert account.asks(alone(9), 100) == 100


def test_what_one_more_turn_costs_does_not_grow_with_what_waits() -> None:
    """Judging all that wait at each arrival took 10 s for 4,096 of them."""
    judged = 0

    class Counted(KvAccount):
        def asks(self, first: Beginning, tokens: int, said: int | None = None, beside: int = 0) -> int:
            nonlocal judged
            judged += 1
            return super().asks(first, tokens, said, beside)

    account = Counted()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=500)
    account.begin(("", "runs"), alone(0), 90, 0.0)
    for n in range(1, 401):
        assert queue.join(Waiting(("", str(n)), alone(n), 50, None, 0, 0.0))
        queue.admit(0.0)
    assert judged < 5 * 400


def test_turns_of_sessions_that_have_begun_are_bounded_too() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=2)
    for name in ("old", "young"):
        account.begin(("", name), alone(hash(name)), 50, 0.0)
    account.end_turn(("", "old"), 90, 1.0)
    account.end_turn(("", "young"), 60, 1.0)

    def turn() -> Waiting:
        return Waiting(("", "young"), alone(1), 70, None, 0, 2.0, begun=True)

    assert all(queue.join(turn()) for _ in range(2))
    with pytest.raises(Overloaded, match="turns of sessions"):
        queue.join(turn())
    # New ones have their own bound.
    assert queue.join(Waiting(("", "new"), alone(5), 70, None, 0, 2.0))


def test_a_turn_whose_gate_is_closed_stays_and_holds_up_nobody() -> None:
    account = KvAccount()
    account.capacity = 100
    queue = KvQueue(account, waiting_max=9)
    account.begin(("", "runs"), alone(0), 100, 0.0)
    shut, order = [True], []
    for name in ("swaps", "serves"):
        turn = Waiting(("", name), alone(hash(name)), 60, None, 0, 0.0)
        turn.shut = (lambda: shut[0]) if name == "swaps" else turn.shut
        turn.go = lambda name=name: order.append(name)  # type: ignore[misc]
        assert queue.join(turn)
    account.end(("", "runs"))
    queue.admit(1.0)
    assert order == ["serves"]
    account.end(("", "serves"))
    queue.admit(2.0)
    assert (order, len(queue)) == (["serves"], 1)
    shut[0] = False
    queue.admit(3.0)
    assert order == ["serves", "swaps"]


def test_what_an_engine_says_late_of_a_session_that_was_silent_changes_nothing() -> None:
    account = KvAccount()
    account.capacity = 100
    account.begin(session_of("s"), alone(1), 10, 0.0)
    account.end_turn(session_of("s"), 0, 0.0)
    account.demote(1000.0)
    account.found(session_of("s"), 5)
    account.check()
    assert account.claimed == 0


def test_a_turn_from_before_a_session_was_closed_may_end_before_or_behind_its_new_one() -> None:
    account = KvAccount()
    account.capacity = 100
    account.begin(session_of("s"), alone(1), 10, 0.0)
    account.end(session_of("s"))
    account.begin(session_of("s"), alone(1), 10, 1.0)
    account.end_turn(session_of("s"), 20, 2.0)
    account.demote(1000.0)
    account.end_turn(session_of("s"), 30, 1000.0)
    account.check()
    account.demote(2000.0)
    assert account.claimed == 0
