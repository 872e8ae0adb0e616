"""Placement as properties: sticky, minimal moves, bounded load, deterministic."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.core.types import Session
from midstream.fleet.placement import (
    ARRAYS_FROM,
    FILLED_FROM,
    GROUP_SLACK,
    Candidate,
    Decision,
    Fleet,
    load_limit,
    stays,
)
from midstream.fleet.prefixes import Known, SessionGroup
from midstream.fleet.sessions import SessionTable

BOUND = 0.25
sessions = st.tuples(st.sampled_from(["", "t1", "t2"]), st.text(min_size=1, max_size=8))
loads = st.lists(st.integers(0, 50), min_size=1, max_size=9)
weight = st.sampled_from([1.0, 1.0, 0.5, 2.0, 3.7])
loaded = st.lists(st.tuples(st.integers(0, 50), weight), min_size=1, max_size=9)


def fleet(loads: list[int], weights: list[float] | None = None) -> Fleet[Candidate]:
    weights = weights or [1.0] * len(loads)
    return Fleet(Candidate(f"replica-{i}", *both) for i, both in enumerate(zip(loads, weights, strict=True)))


def number(replica: str) -> int:
    return int(replica.removeprefix("replica-"))


def chosen(found: tuple[Candidate, Decision] | None) -> int:
    assert found is not None
    assert found[0].name == found[1].replica
    return number(found[1].replica)


@given(sessions, loaded)
def test_a_new_session_never_exceeds_the_load_limit(
    session: Session, members: list[tuple[int, float]]
) -> None:
    loads, weights = [load for load, _ in members], [weight for _, weight in members]
    index = chosen(fleet(loads, weights).place_session(session, BOUND))
    assert loads[index] + 1 <= math.ceil((1 + BOUND) * (sum(loads) + 1) * weights[index] / sum(weights))


@given(sessions, loaded, st.randoms())
def test_equal_gateways_agree_whatever_the_order_they_list_replicas_in(
    session: Session, members: list[tuple[int, float]], random: Random
) -> None:
    listed = [Candidate(f"replica-{i}", load, weight) for i, (load, weight) in enumerate(members)]
    first, turned = Fleet(listed), Fleet(random.sample(listed, len(listed)))
    assert first.place_session(session, BOUND) == turned.place_session(session, BOUND)
    assert first.place_request(3) == turned.place_request(3)


@given(sessions, st.lists(st.tuples(st.integers(0, 9), weight), min_size=ARRAYS_FROM, max_size=ARRAYS_FROM))
def test_a_large_fleet_is_decided_upon_as_a_small_one_is(
    session: Session, members: list[tuple[int, float]]
) -> None:
    large = fleet([load for load, _ in members], [weight for _, weight in members])
    assert large._arrays is not None
    counts = {name: len(session[1]) % (place + 2) for place, name in enumerate(large._places)}
    by_arrays = large.place_session(session, BOUND, None, counts)
    large._arrays = None
    assert large.place_session(session, BOUND, None, counts) == by_arrays


@given(sessions, st.integers(2, 9), st.data())
def test_among_idle_replicas_only_the_leavers_sessions_move(
    session: Session, count: int, data: st.DataObject
) -> None:
    everyone = fleet([0] * count)
    home = chosen(everyone.place_session(session, BOUND))
    leaver = data.draw(st.integers(0, count - 1))
    again = chosen(everyone.only(lambda one: number(one.name) != leaver).place_session(session, BOUND))
    assert again != leaver
    assert leaver == home or again == home


@given(loads, st.integers(0, 1000))
def test_a_request_without_session_goes_to_the_least_loaded_in_turn(in_flight: list[int], turn: int) -> None:
    least = [i for i, load in enumerate(in_flight) if load == min(in_flight)]
    picks = [chosen(fleet(in_flight).place_request(turn + n)) for n in range(len(least))]
    assert sorted(picks) == least


def test_requests_without_session_fill_replicas_by_weight() -> None:
    loads = [0, 0]
    for turn in range(30):
        loads[chosen(fleet(loads, [2.0, 1.0]).place_request(turn))] += 1
    assert loads == [20, 10]


def test_a_known_prompt_is_followed_up_to_the_load_limit_and_a_little_further_where_it_is_known_alone() -> (
    None
):
    alone, shared = (Known("replica-0", 0.75, alone) for alone in (True, False))
    found = fleet([4, 0]).place_prefix(shared, 1.0)
    assert found is not None
    assert found[1] == Decision(
        "replica-0", "prefix", "75% of its prompt is known on replica-0, load 4, limit 5"
    )
    assert fleet([2, 0]).place_prefix(shared, 0.25) is None
    assert fleet([2, 0]).place_prefix(alone, 0.25), "two requests are no load to flee from"
    assert fleet([8, 0]).place_prefix(alone, 0.25) is None
    assert fleet([0, 0]).place_prefix(Known("replica-2", 0.75, True), 0.25) is None


def test_samples_of_one_prompt_that_run_together_are_spread_evenly() -> None:
    group = Known("replica-0", 1.0, True, shared=True)
    assert fleet([1, 0]).place_prefix(group, BOUND) is None, "one each"
    assert fleet([1, 1]).place_prefix(group, BOUND), "the third one may as well go where the prompt is"
    assert fleet([9, 0], [9.0, 1.0]).place_prefix(group, BOUND) is None
    assert fleet([8, 1], [9.0, 1.0]).place_prefix(group, BOUND), "by weight"


def test_no_candidates_no_decision() -> None:
    assert fleet([]).place_session(("", "s"), BOUND) is None
    assert fleet([]).place_request(0) is None
    assert fleet([]).place_prefix(Known("replica-0", 1.0, True), BOUND) is None


def test_decisions_explain_themselves() -> None:
    request = fleet([3, 1]).place_request(7)
    assert request is not None
    assert request[1] == Decision("replica-1", "balanced", "no session: load 1, the least of 2")
    assert stays("r1", ["r0", "r1"]) == Decision("r1", "sticky", "session is known on r1")
    assert stays("r1", ["r0"]) is None
    assert stays(None, ["r0"]) is None
    moved = fleet([9, 0]).place_session(("", "s"), BOUND, home="replica-2")
    assert moved is not None
    assert (moved[1].replica, moved[1].reason) == ("replica-1", "moved")
    assert moved[1].explanation.startswith("replica-2 cannot serve it: rendezvous candidate ")
    assert moved[1].explanation.endswith(" of 2, load 0, limit 7")


def test_tenant_and_key_are_never_confused() -> None:
    picks = [
        tuple(chosen(fleet([0] * 64).place_session(s, BOUND)) for s in ((f"a{n}", "b"), ("a", f"{n}b")))
        for n in range(20)
    ]
    assert any(a != b for a, b in picks)


@pytest.mark.parametrize(("count", "replicas"), [(64, 4), (10_000, 4), (10_000, 100)])
def test_sessions_that_are_counted_are_balanced_like_by_a_table(count: int, replicas: int) -> None:
    everyone, table = fleet([0] * replicas), SessionTable(count)
    for number in range(count):
        session = ("", f"s{number}")
        found = everyone.place_session(session, 1e9, None, table.counts)
        assert found is not None
        table.settle(session, found[0].name)
    assert sum(table.counts.values()) == count
    assert max(table.counts.values()) <= count / replicas * 1.02 + 3


@given(sessions, st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_of_the_two_first_candidates_the_second_is_taken_if_it_has_clearly_fewer_sessions(
    session: Session, counts: list[int]
) -> None:
    everyone = fleet([0] * len(counts))
    first = chosen(everyone.place_session(session, 1e9))
    second = chosen(everyone.only(lambda one: number(one.name) != first).place_session(session, 1e9))
    held = {f"replica-{place}": count for place, count in enumerate(counts)}
    expected = second if counts[first] > 1.02 * counts[second] + 1 else first
    assert chosen(everyone.place_session(session, 1e9, None, held)) == expected


@pytest.mark.parametrize("weights", [[1.0] * 4, [4.0, 2.0, 1.0, 1.0], [1.0] * 64])
def test_many_idle_sessions_spread_by_weight(weights: list[float]) -> None:
    everyone = fleet([0] * len(weights), weights)
    each = 1000
    counts = Counter(chosen(everyone.place_session(("", f"s{n}"), 1e9)) for n in range(each * len(weights)))
    for index, weight in enumerate(weights):
        share = each * len(weights) * weight / sum(weights)
        assert abs(counts[index] - share) < 4.5 * math.sqrt(share)


class Traffic(RuleBasedStateMachine):
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
        up = fleet(self.in_flight).only(lambda one: one.name in self.up)
        limit = load_limit(sum(one.load for one in up.members), BOUND, 1.0, len(up))
        decision = stays(home, self.up)
        if decision is None:
            found = up.place_session(session, BOUND, home)
            assert found is not None
            decision = found[1]
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


TestTraffic = Traffic.TestCase


def test_a_new_session_goes_where_the_kv_cache_has_clearly_more_room() -> None:
    """Of its first two candidates; a little more room than the other's is what one gateway knows before another."""
    names = ["a", "b"]
    even = Fleet([Candidate(name, 0, filled=0.5) for name in names])
    homes = {n: even.place_session(("", f"s{n}"), 1.0)[0].name for n in range(40)}  # type: ignore[index]
    assert set(homes.values()) == {"a", "b"}
    for filled, expected in ((0.53, None), (0.56, "b"), (3.2, "b")):
        fleet = Fleet([Candidate("a", 0, filled=filled), Candidate("b", 0, filled=0.5)])
        placed = {n: fleet.place_session(("", f"s{n}"), 1.0)[0].name for n in homes}  # type: ignore[index]
        assert placed == (homes if expected is None else dict.fromkeys(homes, expected))
    # One whose cache is not known is judged by its sessions, as before.
    unknown = Fleet([Candidate("a", 0, filled=0.9), Candidate("b", 0)])
    assert {n: unknown.place_session(("", f"s{n}"), 1.0)[0].name for n in homes} == homes  # type: ignore[index]


def test_room_in_the_kv_cache_is_no_reason_before_one_of_two_replicas_is_half_full() -> None:
    """Else the first sessions of a run all go to the replica that has none, and leave their sticky places empty."""

    def placed(filled: float) -> dict[int, str]:
        fleet = Fleet([Candidate("a", 0, filled=filled), Candidate("b", 0, filled=0.0)])
        return {n: fleet.place_session(("", f"s{n}"), 1.0)[0].name for n in range(40)}  # type: ignore[index]

    homes = placed(0.0)
    assert set(homes.values()) == {"a", "b"}
    assert placed(0.2) == placed(FILLED_FROM) == homes
    assert placed(FILLED_FROM + 0.01) == dict.fromkeys(homes, "b")


# -- groups


def placed_in_groups(groups: list[int], replicas: int, bound: float = BOUND) -> list[Counter[str]]:
    """Sessions of each group on each replica, when all begin and none ends. groups: which one each session is of."""
    loads, homes = Counter[str](), dict[int, str]()
    found = [Counter[str]() for _ in range(1 + max(groups))]
    for count, group in enumerate(groups):
        everyone = Fleet(Candidate(f"replica-{i}", loads[f"replica-{i}"]) for i in range(replicas))
        told = SessionGroup(("", f"group {group}"), homes.get(group, ""))
        placed = everyone.place_session(("", f"s{count}"), bound, None, loads, told)
        assert placed is not None
        homes[group] = placed[0].name
        loads[homes[group]] += 1
        found[group][homes[group]] += 1
    return found


@given(loaded, st.lists(st.integers(0, 50), min_size=9, max_size=9), sessions, st.integers(0, 8))
def test_a_session_joins_its_group_only_as_far_as_chance_makes_replicas_differ(
    members: list[tuple[int, float]], counts: list[int], session: Session, group: int
) -> None:
    everyone = fleet([load for load, _ in members], [weight for _, weight in members])
    held = {f"replica-{place}": count for place, count in enumerate(counts)}
    told = SessionGroup(("", "g"), f"replica-{group}")
    alone = chosen(everyone.place_session(session, BOUND, None, held))
    joined = chosen(everyone.place_session(session, BOUND, None, held, told))
    assert joined in (alone, group)
    weights = [weight for _, weight in members]

    def near(of: list[int]) -> bool:
        there, other = of[group] / weights[group], of[alone] / weights[alone]
        return there <= other + GROUP_SLACK + math.sqrt(other)

    if group < len(members):
        assert (joined == group) == (group == alone or (near([load for load, _ in members]) and near(counts)))


@given(st.randoms(), st.sampled_from([(1, 64), (4, 16), (16, 6), (6, 64), (96, 1)]), st.integers(2, 8))
def test_groups_of_any_size_leave_replicas_balanced(
    random: Random, sizes: tuple[int, int], replicas: int
) -> None:
    groups, streams = sizes
    order = [group for group in range(groups) for _ in range(streams)]
    random.shuffle(order)
    counts = Counter[str]()
    for one in placed_in_groups(order, replicas):
        counts += one
    mean = len(order) / replicas
    assert max(counts.values()) <= load_limit(len(order), BOUND, 1, replicas) + GROUP_SLACK + math.sqrt(mean)


@pytest.mark.parametrize("replicas", [4, ARRAYS_FROM])
def test_a_group_is_on_one_replica_or_two(replicas: int) -> None:
    order = [group for group in range(4 * replicas) for _ in range(6)]
    pieces = sum(len(one) for one in placed_in_groups(order, replicas))
    assert pieces <= 2 * 4 * replicas
    alone = placed_in_groups(list(range(len(order))), replicas)
    apart = sum(len({*one, *other}) for one, other in zip(alone[::2], alone[1::2], strict=True))
    assert apart > len(order) * 0.8, "sessions of no group are apart"


def test_a_large_group_is_on_all_replicas() -> None:
    (one,) = placed_in_groups([0] * 64, 4)
    assert sorted(one) == [f"replica-{place}" for place in range(4)]
    assert max(one.values()) <= 22


def test_a_group_that_begins_has_the_same_candidates_on_all_gateways() -> None:
    for number in range(20):
        told = SessionGroup(("t", f"g{number}"))
        first, other = (fleet([0] * 8).place_session(("t", key), BOUND, None, {}, told) for key in ("a", "b"))
        assert first == other


def test_a_session_does_not_join_where_it_would_wait_while_it_would_not_elsewhere() -> None:
    told = SessionGroup(("", "g"), "a")
    for there, other, joins in ((1.3, 0.9, False), (1.3, 1.1, True), (0.9, 0.4, True), (1.3, None, True)):
        everyone = Fleet([Candidate("a", 1, filled=there), Candidate("b", 0, filled=other)])
        placed = everyone.place_session(("", "s"), 1e9, None, {"a": 1}, told)
        assert placed is not None
        assert (placed[0].name == "a") == joins, (there, other)
