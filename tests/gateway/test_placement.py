"""Placement as properties: sticky, minimal moves, bounded load, deterministic."""

import math
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.gateway.placement import (
    Candidate,
    Decision,
    Session,
    load_limit,
    place_request,
    place_session,
    stays,
)
from midstream.gateway.sessions import SessionTable

BOUND = 0.25
sessions = st.tuples(st.sampled_from(["", "t1", "t2"]), st.text(min_size=1, max_size=8))
loads = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def candidates(in_flight: list[int]) -> list[Candidate]:
    return [Candidate(f"replica-{i}", load) for i, load in enumerate(in_flight)]


def number(replica: str) -> int:
    return int(replica.removeprefix("replica-"))


def chosen(decision: Decision | None) -> int:
    assert decision is not None
    return number(decision.replica)


@given(sessions, loads)
def test_a_new_session_never_exceeds_the_load_limit(session: Session, in_flight: list[int]) -> None:
    index = chosen(place_session(session, candidates(in_flight), BOUND))
    assert in_flight[index] + 1 <= math.ceil((1 + BOUND) * (sum(in_flight) + 1) / len(in_flight))


@given(sessions, loads, st.randoms())
def test_equal_gateways_agree_whatever_the_order_they_list_replicas_in(
    session: Session, in_flight: list[int], random: Random
) -> None:
    shuffled = candidates(in_flight)
    random.shuffle(shuffled)
    assert place_session(session, shuffled, BOUND) == place_session(session, candidates(in_flight), BOUND)


@given(sessions, st.integers(2, 9), st.data())
def test_among_idle_replicas_only_the_leavers_sessions_move(
    session: Session, count: int, data: st.DataObject
) -> None:
    everyone = candidates([0] * count)
    home = chosen(place_session(session, everyone, BOUND))
    leaver = data.draw(st.integers(0, count - 1))
    rest = [candidate for candidate in everyone if number(candidate.name) != leaver]
    again = chosen(place_session(session, rest, BOUND))
    assert again != leaver
    assert leaver == home or again == home


@given(loads, st.integers(0, 1000))
def test_a_request_without_session_goes_to_the_least_loaded_in_turn(in_flight: list[int], turn: int) -> None:
    least = [i for i, load in enumerate(in_flight) if load == min(in_flight)]
    picks = [chosen(place_request(candidates(in_flight), turn + n)) for n in range(len(least))]
    assert sorted(picks) == least


def test_no_candidates_no_decision() -> None:
    assert place_session(("", "s"), [], BOUND) is None
    assert place_request([], 0) is None


def test_decisions_explain_themselves() -> None:
    assert place_request(candidates([3, 1]), 7) == Decision(
        "replica-1", "balanced", "no session: 1 in flight, the least of 2"
    )
    assert stays("r1", ["r0", "r1"]) == Decision("r1", "sticky", "session is known on r1")
    assert stays("r1", ["r0"]) is None
    assert stays(None, ["r0"]) is None
    moved = place_session(("", "s"), candidates([9, 0]), BOUND, home="replica-2")
    assert moved is not None
    assert (moved.replica, moved.reason) == ("replica-1", "moved")
    assert moved.explanation.startswith("replica-2 cannot serve it: rendezvous candidate ")
    assert moved.explanation.endswith(" of 2, 0 in flight, limit 7")


def test_tenant_and_key_are_never_confused() -> None:
    picks = [
        tuple(chosen(place_session(s, candidates([0] * 64), BOUND)) for s in ((f"a{n}", "b"), ("a", f"{n}b")))
        for n in range(20)
    ]
    assert any(a != b for a, b in picks)


def test_many_idle_sessions_spread_evenly() -> None:
    counts = Counter(chosen(place_session(("", f"s{n}"), candidates([0] * 4), BOUND)) for n in range(4000))
    assert max(counts.values()) / 1000 < 1.1


class Fleet(RuleBasedStateMachine):
    """Sessions come, finish and come again while replicas leave and return."""

    @initialize(count=st.integers(1, 6))
    def build(self, count: int) -> None:
        self.in_flight = [0] * count
        self.up = {f"replica-{i}" for i in range(count)}
        self.table = SessionTable(1000)
        self.homes: dict[Session, str] = {}

    @precondition(lambda self: self.up)
    @rule(session=sessions)
    def request(self, session: Session) -> None:
        home = self.table.home(session)
        assert home == self.homes.get(session)
        up = [candidate for candidate in candidates(self.in_flight) if candidate.name in self.up]
        limit = load_limit([candidate.in_flight for candidate in up], BOUND)
        decision = stays(home, self.up) or place_session(session, up, BOUND, home)
        assert decision is not None
        if home in self.up:
            assert (decision.replica, decision.reason) == (home, "sticky")
        else:
            assert decision.reason == ("new" if home is None else "moved")
            assert decision.replica in self.up
            assert self.in_flight[number(decision.replica)] < limit
        self.table.settle(session, decision.replica)
        self.homes[session] = decision.replica
        self.in_flight[number(decision.replica)] += 1

    @rule(index=st.integers(0, 5))
    def finish(self, index: int) -> None:
        if index < len(self.in_flight) and self.in_flight[index]:
            self.in_flight[index] -= 1

    @rule(index=st.integers(0, 5))
    def leave_or_return(self, index: int) -> None:
        if index < len(self.in_flight):
            self.up ^= {f"replica-{index}"}

    @invariant()
    def nobody_moves_unasked(self) -> None:
        assert len(self.table) == len(self.homes)


TestFleet = Fleet.TestCase
