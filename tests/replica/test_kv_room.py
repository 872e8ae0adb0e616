"""What fits into a KV cache beside what sessions are expected to come to: growth, choices, sessions that were closed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.core.kv import KvStats
from midstream.replica.kv_account import (
    GROUP_KNOWN_FROM,
    TURNS_EXPECTED,
    Beginning,
    KvAccount,
    SessionNeed,
)
from midstream.replica.kv_budget import KvBudget, KvTurn
from midstream.replica.kv_lengths import Forecast, most_at_once
from midstream.replica.kv_queue import KvQueue, Waiting


def alone(number: int) -> Beginning:
    return Beginning(number, number)


def account_of(capacity: int) -> KvAccount:
    account = KvAccount()
    account.capacity = capacity
    return account


def turns(account: KvAccount, name: str, group: Beginning, *contexts: int, at: float = 0.0) -> None:
    """One turn for each context: the prompt is what was there before, the first one half of the first context."""
    before = contexts[0] // 2
    for context in contexts:
        account.begin(("", name), group, before, at)
        account.found(("", name), 0)
        account.end_turn(("", name), context, at)
        before = context


# -- growth


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=7))
def test_the_most_at_once_is_what_sessions_have_that_grow_token_by_token(
    sizes: list[tuple[int, int]],
) -> None:
    steps = [sum(live + step for live, growth in sizes if growth >= step) for step in range(31)]
    assert most_at_once(Forecast(*size) for size in sizes) == max(steps)


def test_a_session_begins_beside_one_that_ends_before_it_has_grown() -> None:
    """Their needs together are 140 of 100. One after the other they have 90 at most."""
    account = account_of(100)
    account.begin(("", "old"), alone(1), 60, 0.0, said=70)
    assert account.admits(alone(2), 10, said=70)
    assert not account.admits(alone(2), 10 + 11, said=80)
    account.begin(("", "new"), alone(2), 10, 0.0, said=70)
    assert (account.of_sessions, account.claimed) == (140, 90)
    account.check()


def test_sessions_that_grow_alike_need_room_for_all_of_it() -> None:
    account = account_of(100)
    account.begin(("", "a"), alone(1), 10, 0.0, said=60)
    assert account.admits(alone(2), 10, said=50)
    assert not account.admits(alone(2), 11, said=60)


def test_of_the_first_sessions_the_youngest_pause_before_their_histories_are_long() -> None:
    """Nobody knows what they come to. Each grew by 20 tokens: the cache has room for what they have, not for what comes."""
    account = account_of(400)
    for n in range(8):
        turns(account, f"s{n}", alone(n), 20, 40)
    assert account.live == 8 * 40 < account.capacity
    goes_on = [account.carries(("", f"s{n}"), 40) for n in range(8)]
    assert goes_on == [True] * 3 + [False] * 5
    # As soon as it is known what they come to, they go on one after the other.
    for n in range(GROUP_KNOWN_FROM):
        turns(account, f"known{n}", alone(100 + n), 45)
        account.end(("", f"known{n}"))
    for n in range(8):
        assert account.carries(("", f"s{n}"), 40)
        turns(account, f"s{n}", alone(n), 40)


def test_a_session_that_has_more_than_any_that_ended_grows_as_much_again() -> None:
    account = account_of(10_000)
    turns(account, "long", alone(1), 20, 1000)
    grown = 1000 - 10
    assert account.of_sessions == 1000 + max(grown, TURNS_EXPECTED * 10 - grown)


def test_sessions_that_go_on_elsewhere_teach_nothing_of_what_sessions_come_to() -> None:
    """A replica that leaves hands all of them over. If it is taken back, its sessions come back as before."""
    account = account_of(10_000)
    for n in range(GROUP_KNOWN_FROM):
        turns(account, f"s{n}", alone(n), 100, 800)
        account.end(("", f"s{n}"))
    asked, silent_s = account.asks(alone(99), 100), account.silent_s()
    assert asked == 800
    for n in range(300):
        turns(account, f"moves{n}", alone(1000 + n), 200)
        assert account.end(("", f"moves{n}"), elsewhere=True)
    assert (account.asks(alone(99), 100), account.silent_s()) == (asked, silent_s)
    account.check()


def test_a_session_that_nobody_else_took_is_as_old_as_before() -> None:
    """One that names a snapshot which only its home has is handed over and comes back turn by turn."""
    account = account_of(100)
    for name in ("old", "pinned", "young"):
        turns(account, name, alone(hash(name)), 10, 20)
    account.begin(("", "old"), alone(hash("old")), 90, 0.0)
    queue = KvQueue(account, waiting_max=9)
    order: list[str] = []
    for name in ("young", "pinned"):
        one = Waiting(("", name), alone(hash(name)), 50, None, 0, 0.0, go=partial(order.append, name))
        one.begun = True
        if name == "pinned":
            account.end(one.session, elsewhere=True)
        assert queue.join(one)
    account.end_turn(("", "old"), 90, 0.0)
    account.end(("", "old"))
    queue.admit(0.0)
    assert order[0] == "pinned"
    # One that is closed begins anew.
    account.end(("", "pinned"), elsewhere=True)
    account.end(("", "pinned"))
    assert account.number(("", "pinned")) > account.number(("", "young"))
    account.check()


def test_the_next_turn_of_a_known_session_looks_at_no_other_one_where_all_fit() -> None:
    looked = 0

    class Looked(KvAccount):
        def _claiming(self) -> Iterator[SessionNeed]:
            nonlocal looked
            looked += 1
            return super()._claiming()

    account = Looked()
    account.capacity = 2000
    for n in range(4):
        turns(account, f"s{n}", alone(n), 20, 40)
    # Each may come to 240 more.
    assert all(account.carries(("", f"s{n}"), 40) for n in range(4))
    assert account.carries(("", "unknown"), 40)
    assert looked == 0
    assert not account.carries(("", "s3"), 1900)
    assert looked == 1


# -- several choices


def test_a_turn_of_several_choices_claims_each_of_them_while_it_runs() -> None:
    account = account_of(1000)
    beside = account.beside(30, 4, 50)
    assert beside == 30 + 3 * 50
    account.begin(("", "s"), alone(1), 100, 0.0, beside=beside)
    assert (account.live, account.claimed) == (280, 280)
    assert not account.admits(alone(2), 721)
    account.found(("", "s"), 0)
    account.end_turn(("", "s"), 120, 1.0, beside)
    account.check()
    assert account.live == 120
    # What answers come to is learned, and is no more than what the request allows.
    assert (account.beside(0, 4, 50), account.beside(0, 4, 5)) == (60, 15)


def test_turns_of_one_session_that_overlap_take_only_their_own_choices_out() -> None:
    account = account_of(1000)
    for beside in (30, 50):
        account.begin(("", "s"), alone(1), 100, 0.0, beside=beside)
    account.end_turn(("", "s"), 0, 1.0, 30)
    account.check()
    assert account.live == 150
    account.end_turn(("", "s"), 0, 1.0, 50)
    account.check()
    assert account.live == 100


# -- sessions that were closed


@pytest.mark.parametrize("closed", [True, False])
def test_a_turn_of_a_session_that_was_closed_waits_for_room_as_a_new_one(closed: bool) -> None:
    account = account_of(100)
    queue = KvQueue(account, waiting_max=9)
    for n in range(2):
        account.begin(("", f"s{n}"), alone(n), 45, 0.0)
        account.end_turn(("", f"s{n}"), 50, 0.0)
    account.begin(("", "s0"), alone(0), 90, 1.0)
    went: list[str] = []
    turn = Waiting(("", "s1"), alone(1), 60, None, 0, 1.0, go=lambda: went.append("s1"), begun=True)
    assert queue.join(turn)
    if closed:
        account.end(("", "s1"))
        queue.ended(("", "s1"))
    queue.admit(2.0)
    assert went == [], "it began without room"
    assert (turn.begun, queue.position(("", "s1"))) == (not closed, 1)
    account.end(("", "s0"))
    queue.admit(3.0)
    assert went == ["s1"]
    account.check()


def test_a_turn_of_a_rewarded_session_waits_for_room_before_all_new_ones() -> None:
    account = account_of(100)
    queue = KvQueue(account, waiting_max=9)
    account.begin(("", "runs"), alone(0), 90, 0.0)
    order: list[str] = []
    for name, begun in (("new", False), ("rewarded", True)):
        turn = Waiting(("", name), alone(hash(name)), 60, None, 0, 1.0, begun=begun)
        turn.go = lambda name=name: order.append(name)  # type: ignore[misc]
        assert queue.join(turn), f"{name} began without room"
    account.end(("", "runs"))
    queue.admit(2.0)
    assert order == ["rewarded"]


def test_one_that_left_behind_the_queue_has_its_place_again_for_a_time() -> None:
    """A swap that took too long refused it."""
    account = account_of(100)
    queue = KvQueue(account, waiting_max=9)
    account.begin(("", "runs"), alone(0), 100, 0.0)
    assert queue.join(Waiting(("", "waits"), alone(1), 50, None, 0, 5.0))
    queue.keep_place(("", "refused"), 1.0, 100.0)
    queue.keep_place(("", "late"), 2.0, 30.0)
    for name in ("refused", "late"):
        assert queue.join(Waiting(("", name), alone(hash(name)), 50, None, 0, 101.0))
    assert [queue.position(("", name)) for name in ("refused", "waits", "late")] == [1, 2, 3]


# -- claims that lapse


@pytest.mark.parametrize("by", ["report", "turn"])
async def test_whoever_looks_at_claims_that_lapsed_lets_in_what_waits_for_them(by: str) -> None:
    """Found by a simulated history: a report ended the claim, and the one that waited for it began when its timer was due."""
    now = [0.0]
    budget = KvBudget(
        share=1.0,
        waiting_max=9,
        stats=lambda: KvStats(block_tokens=1, total=100),
        known=lambda session: session[1] in ("silent", "runs"),
        ended=lambda session: None,
        monotonic=lambda: now[0],
    )

    def turn(name: str, said: int) -> KvTurn:
        return KvTurn(("", name), (hash(name),) * 10, said=said)

    for one in (silent := turn("silent", 60), turn("runs", 20)):
        await budget.enter(one)
    budget.leave(silent, 10)
    waiting = asyncio.ensure_future(budget.enter(turn("waits", 70)))
    await asyncio.sleep(0)
    assert len(budget.queue) == 1
    now[0] = 1000.0
    if by == "report":
        assert budget.report().waiting == 0
    else:
        await budget.enter(turn("runs", 20))
    assert len(budget.queue) == 0
    await waiting


def test_what_a_turn_waited_for_room_is_no_silence_of_its_client() -> None:
    """Else waits made sessions keep their claims for longer, and these made waits longer."""
    account = account_of(1000)
    for n in range(20):
        account.begin(("", "s"), alone(1), 10, 100.0 * n, came_at=100.0 * n - 97.0)
        account.end_turn(("", "s"), 20, 100.0 * n + 1.0)
    assert (account.returns_s(), account.silent_s()) == (2.0, 5.0)


# -- who owns what


class Families:
    """Sessions whose contexts are known token by token, before a cache that has what live sessions have, and nothing else."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.account = account_of(100_000)
        self.contexts: dict[str, tuple[int, ...]] = {}
        self.groups: dict[str, int] = {}
        self.number = 0

    def begin(self) -> None:
        self.number += 1
        name, group = f"s{self.number}", self.draw.randrange(4)
        prompt = (*range(40), *range(1000 * (group + 1), 1000 * (group + 1) + 60))
        cached = max((_alike(prompt, other) for other in self.contexts.values()), default=0)
        self.account.begin(("", name), Beginning(0, 1 + group), len(prompt), 0.0)
        self.account.found(("", name), cached)
        self.account.end_turn(("", name), len(prompt), 0.0)
        self.contexts[name], self.groups[name] = prompt, group

    def grow(self, name: str) -> None:
        more = tuple(-1000 * self.number - at for at in range(self.draw.randrange(1, 50)))
        self.number += 1
        self.contexts[name] += more
        self.account.begin(("", name), Beginning(0, 1 + self.groups[name]), len(self.contexts[name]), 0.0)
        self.account.end_turn(("", name), len(self.contexts[name]), 0.0)

    def come(self, *, kv: bool) -> None:
        """A session with a history moves here. kv: it brings its own."""
        self.number += 1
        name, group = f"s{self.number}", self.draw.randrange(4)
        first = (*range(40), *range(1000 * (group + 1), 1000 * (group + 1) + 60))
        context = first + tuple(-1000 * self.number - at for at in range(self.draw.randrange(1, 50)))
        cached = max((_alike(context, other) for other in self.contexts.values()), default=0)
        come = Beginning(0, 1 + group, len(first))
        new = self.account.asks(come, len(context))
        self.account.begin(("", name), come, len(context), 0.0)
        assert self.account.live <= self.account.of_sessions
        assert new >= len(context) - len(first)
        self.account.found(("", name), len(context) if kv else cached)
        self.account.end_turn(("", name), len(context), 0.0)
        assert self.account.opened(("", name)) == len(first)
        self.contexts[name], self.groups[name] = context, group
        # No other one has these tokens.
        self.number += 1

    def end(self, name: str) -> None:
        del self.contexts[name], self.groups[name]
        self.account.end(("", name))

    def union(self) -> int:
        """Tokens of all contexts, each once."""
        places = {context[: at + 1] for context in self.contexts.values() for at in range(len(context))}
        return len(places)

    def step(self) -> None:
        names = sorted(self.contexts)
        match self.draw.choice("bbgemk") if names else self.draw.choice("bm"):
            case "b":
                self.begin()
            case "g":
                self.grow(self.draw.choice(names))
            case "e":
                self.end(self.draw.choice(names))
            case "m":
                self.come(kv=False)
            case "k":
                # Where no two groups are there, nothing says what they share.
                self.come(kv=len(set(self.groups.values())) > 1)


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("seed", range(examples(30)))
def test_each_token_of_the_contexts_of_groups_and_families_is_owned_once(seed: int) -> None:
    families = Families(seed)
    for _ in range(60):
        families.step()
        families.account.check()
        assert families.account.live == families.union()


def test_what_ended_sessions_left_of_a_groups_prompt_has_an_owner_again() -> None:
    """Another group shares 40 tokens of it. The cache still has all 100, and the ones behind these 40 are nobody else's."""
    account = account_of(1000)
    for name, group, cached in (("a", 1, 0), ("b", 2, 40), ("c", 2, 100)):
        account.begin(("", name), Beginning(0, group), 100, 0.0)
        account.found(("", name), cached)
        account.end_turn(("", name), 100, 0.0)
        if name == "b":
            account.end(("", "b"))
    assert account.live == 160
