"""Which replica is to load a policy, as properties: at least one, no more than needed, never where it cannot be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.fleet.placement import load_limit
from midstream.fleet.residency import LOAD_BOUND, SPREAD_MARGIN, PolicyPlace, where

states = st.sampled_from(["absent", "absent", "coming", "serves", "failed"])
place = st.builds(
    PolicyPlace,
    name=st.just(""),
    state=states,
    room=st.integers(0, 3),
    idle=st.integers(0, 3),
    load=st.integers(0, 60),
    weight=st.sampled_from([1.0, 1.0, 0.5, 2.0]),
)
fleets = st.lists(place, max_size=6).map(
    lambda found: [one._replace(name=f"replica-{number}") for number, one in enumerate(found)]
)
homes = st.sampled_from([None, "replica-0", "replica-3", "gone"])
policies = st.sampled_from(["red", "blue", "green-7"])


def named(places: list[PolicyPlace], name: str | None) -> PolicyPlace | None:
    return next((one for one in places if one.name == name), None)


@given(policies, fleets, homes)
def test_it_is_loaded_only_where_it_is_not_and_can_be(
    policy: str, places: list[PolicyPlace], home: str | None
) -> None:
    chosen = named(places, where(policy, places, home))
    if chosen is not None:
        assert chosen.state == "absent"
        assert chosen.room + chosen.idle > 0


@given(policies, fleets)
def test_what_nobody_has_is_loaded_wherever_it_can_be_and_where_the_most_room_is(
    policy: str, places: list[PolicyPlace]
) -> None:
    places = [one._replace(state="failed" if one.state == "failed" else "absent") for one in places]
    chosen = named(places, where(policy, places))
    able = [one for one in places if one.takes]
    assert (chosen is not None) is bool(able)
    if chosen is not None:
        assert chosen.room == max(one.room for one in able)


@given(policies, fleets)
def test_what_is_on_its_way_or_has_a_holder_with_time_is_loaded_nowhere_else(
    policy: str, places: list[PolicyPlace]
) -> None:
    total, weights = sum(one.load for one in places), sum(one.weight for one in places)
    has_time = any(
        one.state == "serves" and one.load < load_limit(total, LOAD_BOUND, one.weight, weights)
        for one in places
    )
    if has_time or any(one.state == "coming" for one in places):
        assert where(policy, places) is None


@given(policies, fleets)
def test_it_spreads_only_to_a_replica_that_has_clearly_less_to_do(
    policy: str, places: list[PolicyPlace]
) -> None:
    serving = [one for one in places if one.state == "serves"]
    chosen = named(places, where(policy, places))
    if serving and chosen is not None:
        assert all(one.filled >= chosen.filled + SPREAD_MARGIN for one in serving)


@given(policies, fleets, homes)
def test_a_sessions_home_is_asked_first(policy: str, places: list[PolicyPlace], home: str | None) -> None:
    at_home = named(places, home)
    if at_home is not None and at_home.takes:
        assert where(policy, places, home) == home


@given(policies, fleets, homes, st.data())
def test_equal_gateways_agree_in_whatever_order_they_list_replicas(
    policy: str, places: list[PolicyPlace], home: str | None, data: st.DataObject
) -> None:
    turned = data.draw(st.permutations(places))
    assert where(policy, places, home) == where(policy, turned, home)


def test_a_busy_holder_is_relieved_and_policies_are_spread_over_equal_replicas() -> None:
    serves = PolicyPlace("replica-0", "serves", load=20)
    assert where("red", [serves, PolicyPlace("replica-1", room=1)]) == "replica-1"
    assert where("red", [serves, PolicyPlace("replica-1", idle=1, load=13)]) is None, "not clearly less"
    assert where("red", [serves, PolicyPlace("replica-1")]) is None, "all its policies are in use"
    equal = [PolicyPlace(f"replica-{number}", room=1) for number in range(4)]
    assert len({where(f"policy-{number}", equal) for number in range(40)}) == 4
