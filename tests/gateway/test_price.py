"""The price of a move: what pays, what is offered to whom, and that no session goes back and forth. Times are numbers."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.core.kv import KvStats
from midstream.core.price import (
    GAIN_S_MIN,
    MARGIN,
    MOVE_EVERY_S,
    Handed,
    Moved,
    RoomOffer,
    Target,
    TurnPace,
    best,
    offers,
    pays,
)
from midstream.core.types import EngineStats, Session
from midstream.replica.moves import Movable, Moves
from midstream.replica.sessions import TurnStats


def target(name: str, room: int = 10_000, load: int = 0, rate: float = 1000.0, waiting: int = 0) -> Target:
    return Target(name, room, load, TurnPace(prefill_tokens_s=rate, waiting=waiting, token_s=0.01))


def handed(**fields: object) -> Handed:
    usual = {"reason": "wait", "tokens": 2000, "needs": 3000, "saved_s": 10.0, "age_s": 5.0, "begun": True}
    return Handed(**{**usual, "prefill_tokens_s": 500.0, **fields})  # type: ignore[arg-type]


@given(
    saved=st.floats(0, 1e4),
    tokens=st.integers(0, 10**6),
    rate=st.floats(0, 1e6),
    paid=st.integers(0, 10**6),
)
@settings(max_examples=examples(200))
def test_a_move_pays_only_if_it_saves_more_than_both_prefills(
    saved: float, tokens: int, rate: float, paid: int
) -> None:
    if not pays(saved, tokens, rate, paid):
        return
    assert rate > 0, "what was not measured is no gain"
    assert saved > MARGIN * (tokens + paid) / rate + GAIN_S_MIN
    assert pays(saved + 1, tokens, rate, paid)
    assert pays(saved, tokens // 2, rate, paid // 2)


_targets = st.lists(
    st.builds(
        target,
        name=st.sampled_from("abcdef"),
        room=st.integers(-100, 10_000),
        load=st.integers(0, 4),
        rate=st.sampled_from([0.0, 100.0, 5000.0]),
        waiting=st.integers(0, 1),
    ),
    max_size=6,
    unique_by=lambda one: one.name,
)


@given(homes=st.lists(st.sampled_from("abcdefgh"), unique=True), targets=_targets)
@settings(max_examples=examples(200))
def test_no_room_is_offered_twice_and_none_where_turns_wait(homes: list[str], targets: list[Target]) -> None:
    found = offers(homes, targets)
    able = [one for one in targets if one.room_tokens > 0 and not one.pace.waiting]
    assert sum(offer.room_tokens for offer in found.values()) <= sum(one.room_tokens for one in able)
    for home in homes:
        assert (home in found) == any(one.name != home for one in able)
    assert all(offer.room_tokens <= max(one.room_tokens for one in able) for offer in found.values())
    assert offers(homes, targets[::-1]) == found, "gateways agree, in whatever order replicas are listed"


@given(turn=st.builds(handed, tokens=st.integers(1, 9000), needs=st.integers(1, 9000)), targets=_targets)
@settings(max_examples=examples(200))
def test_a_turn_goes_where_it_fits_and_costs_least(turn: Handed, targets: list[Target]) -> None:
    found = best(turn, targets)
    able = [one for one in targets if one.room_tokens >= turn.needs and not one.pace.waiting]
    costs = {one.name: turn.tokens / (one.pace.prefill_tokens_s or turn.prefill_tokens_s) for one in able}
    paying = {name: cost for name, cost in costs.items() if cost < turn.saved_s}
    if found is None:
        assert paying == {}
        return
    one, cost = found
    assert cost == pytest.approx(min(paying.values()))
    assert paying[one.name] == pytest.approx(cost)


def test_a_slow_home_hands_over_to_an_idle_one_only_and_a_new_session_pays_nothing() -> None:
    busy, idle = target("busy", load=1), target("idle", room=4000)
    slow = best(handed(reason="slow"), [busy, idle])
    assert slow is not None
    assert slow[0].name == "idle"
    assert best(handed(reason="slow"), [busy]) is None
    new = best(handed(begun=False, saved_s=0.0), [busy])
    assert new is not None
    assert (new[0].name, new[1]) == ("busy", 0.0)
    # Its home leaves: whatever it costs.
    assert best(handed(saved_s=0.0), [busy]) is None
    assert best(handed(saved_s=0.0, reason="leaving"), [busy]) is not None


# -- what a replica hands over


def measured(
    moves: Moves, now: float, rate: float = 1000.0, token_s: float = 0.01, answer: int = 101
) -> None:
    turn = TurnStats(prompt_tokens=1000, longest=answer, first_token_s=1000 / rate)
    turn.generation_s = token_s * (answer - 1)
    moves.ended(turn, 0.0, now)


def waiting(number: int, waited_s: float, tokens: int = 1000, *, begun: bool = True) -> Movable:
    return Movable(("", f"s{number}"), tokens, tokens, begun, waited_s)


OFFER = RoomOffer(room_tokens=10_000, prefill_tokens_s=1000.0, token_s=0.01)


def test_a_turn_that_waits_goes_once_it_has_waited_for_longer_than_its_history_costs() -> None:
    moves = Moves()
    measured(moves, 0.0)
    turns = [waiting(1, 1.4), waiting(2, 1.6), waiting(3, 1.6, tokens=2000)]
    assert moves.of_waiting(turns, 1.0) == {}, "nothing is offered"
    moves.take(OFFER, 1.0)
    assert list(moves.of_waiting(turns, 1.0)) == [1]
    assert moves.of_waiting(turns, 1.0 + 3.0) == {}, "the offer has lapsed"
    # Others waited for long before: so will these.
    moves.ended(TurnStats(), 5.0, 4.0)
    moves.take(OFFER, 5.0)
    assert sorted(moves.of_waiting(turns, 5.0)) == [0, 1, 2]
    assert moves.report(5.0, 3, [1.3, 1.4]).wait_s == 5.0
    assert moves.report(5.0, 3, [6.5]).wait_s == 6.5
    assert moves.report(5.0, 3).wait_s == 0.0


def test_a_rate_is_of_the_engine_alone_and_never_more_than_a_report_may_have() -> None:
    moves = Moves()
    # It waited for room for 1 s, and for 30 s until a swap was over.
    moves.ended(TurnStats(prompt_tokens=1000, admitted_s=31.0, first_token_s=33.5, queued_s=0.5), 1.0, 0.0)
    assert moves.report(0.0).prefill_tokens_s == 500.0
    fast = Moves()
    fast.ended(TurnStats(prompt_tokens=100_000, first_token_s=1e-6), 0.0, 0.0)
    fast.take(RoomOffer(leaving=True), 0.0)
    found = fast.on_arrival(waiting(1, 0.0), 0.0)
    for said in (fast.report(0.0), found):
        assert said is not None
        assert msgspec.json.decode(msgspec.json.encode(said), type=type(said)) == said


@pytest.mark.parametrize("begun", [True, False])
def test_turns_of_one_session_go_together_or_not_at_all(begun: bool) -> None:
    moves = Moves()
    measured(moves, 0.0)
    one, other, last = (
        waiting(1, 9.0, begun=begun),
        waiting(2, 8.0, begun=begun),
        waiting(1, 1.3, begun=begun),
    )
    # Each of the two would fit, but has 600 tokens beside its context.
    one, last = (turn._replace(needs=1600, beside=600) for turn in (one, last))
    moves.take(RoomOffer(room_tokens=2199, prefill_tokens_s=1000.0), 1.0)
    found = moves.of_waiting([one, other, last], 1.0)
    assert list(found) == ([1] if begun else []), "no smaller one passes a new session before it"
    moves.take(RoomOffer(room_tokens=2999, prefill_tokens_s=1000.0), 1.0)
    found = moves.of_waiting([one, other, last], 1.0)
    assert sorted(found) == [0, 2], "the longest wait counts for both"
    assert {(each.tokens, each.needs) for each in found.values()} == {(2000, 2200)}
    # Nothing is computed twice without a gain.
    moves.take(RoomOffer(room_tokens=9999, prefill_tokens_s=250.0), 1.0)
    assert list(moves.of_waiting([one, last], 1.0)) == ([] if begun else [0, 1])


def test_new_sessions_go_in_their_order_into_the_room_that_is_offered() -> None:
    moves = Moves()
    new = [waiting(n, 0.0, tokens, begun=False) for n, tokens in enumerate((4000, 5000, 2000, 500))]
    moves.take(OFFER, 0.0)
    found = moves.of_waiting(new, 0.0)
    # The third one does not fit any more, and the fourth does not pass it.
    assert list(found) == [0, 1]
    assert not any(one.begun for one in found.values())
    moves.take(OFFER, 1.0)
    assert list(moves.of_waiting(new[2:], 1.0)) == [0, 1]


def test_a_turn_leaves_a_busy_engine_for_an_idle_one_by_what_was_measured_at_both() -> None:
    moves = Moves(lambda: EngineStats(running=3, kv=KvStats()))
    measured(moves, 0.0, token_s=0.05)
    arrives = waiting(1, 0.0)
    # 100 gaps of 50 ms here, of 10 ms there: 4 s are saved, and 1,000 tokens cost 1 s.
    moves.take(OFFER, 0.0)
    assert moves.on_arrival(arrives, 0.0) is None, "it is not idle"
    idle = RoomOffer(room_tokens=10_000, prefill_tokens_s=1000.0, token_s=0.01, idle=True)
    moves.take(idle, 0.0)
    assert moves.on_arrival(waiting(1, 0.0, tokens=4000), 0.0) is None
    found = moves.on_arrival(arrives, 0.0)
    assert found is not None
    assert (found.reason, round(found.saved_s, 1)) == ("slow", 4.0)
    assert moves.on_arrival(waiting(2, 0.0), 0.0) is None, "it has one now"
    moves.take(RoomOffer(room_tokens=10_000, prefill_tokens_s=1000.0, idle=True), 1.0)
    assert moves.on_arrival(arrives, 1.0) is None, "nothing was measured there"


def test_a_replica_that_leaves_hands_over_whatever_may_go() -> None:
    moves = Moves()
    moves.take(RoomOffer(leaving=True), 0.0)
    arrives = moves.on_arrival(waiting(1, 0.0), 0.0)
    assert arrives is not None
    assert arrives.reason == "leaving"
    assert list(moves.of_waiting([waiting(2, 0.0), waiting(3, 9.0, begun=False)], 0.0)) == [0, 1]


@pytest.mark.parametrize("seed", range(examples(20)))
def test_no_session_goes_back_and_forth(seed: int) -> None:
    """Two replicas that are full in turn, as badly as can be: each move saves what it costs, and what the one before did."""
    rng = random.Random(seed)
    homes = {name: Moves() for name in "ab"}
    for moves in homes.values():
        measured(moves, 0.0)
    lives: dict[Session, str] = {("", f"s{n}"): "a" for n in range(5)}
    moved_at: dict[Session, float] = {}
    spent: dict[Session, float] = {}
    now = 0.0
    for _ in range(400):
        now += rng.uniform(0.0, 5.0)
        home, other = rng.choice(["ab", "ba"])
        here = [session for session, name in lives.items() if name == home]
        turns = [Movable(session, rng.randint(100, 3000), 1, True, rng.uniform(0, 8)) for session in here]
        homes[home].take(OFFER, now)
        for at, one in homes[home].of_waiting(turns, now).items():
            session, turn = here[at], turns[at]
            assert now - moved_at.get(session, float("-inf")) >= MOVE_EVERY_S
            assert one.saved_s > MARGIN * (turn.tokens / 1000 + spent.get(session, 0.0))
            found = best(one, [target(other)])
            assert found is not None
            lives[session], moved_at[session] = other, now
            homes[other].came(session, Moved(age_s=one.age_s), now)
            homes[other].ended(
                TurnStats(prompt_tokens=turn.tokens, first_token_s=turn.tokens / 1000),
                0.0,
                now,
                moved=session,
            )
            spent[session] = turn.tokens / 1000
    assert moved_at, "the history shows nothing"
    assert sum(moves.moved for moves in homes.values()) >= len(moved_at)
