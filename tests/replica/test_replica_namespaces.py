"""The `reset_prompt_cache` table, row by row, and several swaps in a row."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.types import ResetPromptCache, Session
from midstream.replica.namespaces import Namespaces, cache_salt

OLD: Session = ("", "old")
NEW: Session = ("", "new")


@pytest.mark.parametrize(
    ("policy", "same_session_reuses", "new_session_reuses"),
    [("all", False, False), ("new_session", True, False), ("none", True, True)],
)
def test_who_reuses_prompt_prefixes_after_a_swap(
    policy: ResetPromptCache, same_session_reuses: bool, new_session_reuses: bool
) -> None:
    namespaces = Namespaces()
    before = namespaces.admit(OLD)
    namespaces.commit(policy)
    assert (namespaces.admit(OLD) == before) is same_session_reuses
    assert (namespaces.admit(NEW) == before) is new_session_reuses
    # No session: like a new one.
    assert (namespaces.admit(None) == before) is new_session_reuses


@pytest.mark.parametrize(
    ("policies", "session_of_boot_stays", "session_of_second_snapshot_stays"),
    [
        (["new_session", "new_session"], True, True),
        (["new_session", "none"], True, True),
        (["none", "new_session"], True, True),
        (["new_session", "all"], False, False),
        (["all", "new_session"], False, True),
        (["all", "none"], False, True),
        (["none", "all"], False, False),
    ],
)
def test_two_swaps_in_a_row(
    policies: list[ResetPromptCache], session_of_boot_stays: bool, session_of_second_snapshot_stays: bool
) -> None:
    namespaces = Namespaces()
    boot = namespaces.admit(OLD)
    namespaces.commit(policies[0])
    second = namespaces.admit(NEW)
    namespaces.commit(policies[1])
    assert (namespaces.admit(OLD) == boot) is session_of_boot_stays
    assert (namespaces.admit(NEW) == second) is session_of_second_snapshot_stays


def test_all_after_new_session_leads_to_a_namespace_never_used_before() -> None:
    namespaces = Namespaces()
    seen = {namespaces.admit(OLD)}
    policies: list[ResetPromptCache] = ["new_session", "all", "all", "new_session"]
    for policy in policies:
        namespaces.commit(policy)
        assert namespaces.admit(None) not in seen
        seen.add(namespaces.admit(None))


def test_equal_keys_of_two_tenants_are_two_sessions() -> None:
    namespaces = Namespaces()
    namespaces.admit(("a", "key"))
    namespaces.commit("new_session")
    assert namespaces.admit(("b", "key")) != namespaces.admit(("a", "key"))


def test_the_least_recently_used_session_is_forgotten_first() -> None:
    namespaces = Namespaces(sessions_max=2)
    first = namespaces.admit(("", "a"))
    namespaces.admit(("", "b"))
    namespaces.admit(("", "a"))
    # B goes.
    namespaces.admit(("", "c"))
    namespaces.commit("new_session")
    assert repr(namespaces) == "Namespaces(current=1, sessions=2)"
    assert namespaces.admit(("", "a")) == first
    assert namespaces.admit(("", "b")) != first


def test_a_session_that_has_not_been_seen_for_an_hour_is_new_and_takes_no_memory() -> None:
    now = 0.0
    namespaces = Namespaces(clock=lambda: now)
    first = namespaces.admit(OLD)
    namespaces.admit(NEW)
    now = 3000.0
    namespaces.admit(OLD)
    namespaces.commit("new_session")
    # NEW was seen 3601 s ago, OLD 601 s ago.
    now = 3601.0
    assert namespaces.admit(OLD) == first
    assert repr(namespaces) == "Namespaces(current=1, sessions=1)"
    assert namespaces.admit(NEW) == 1
    now = 10_000.0
    assert namespaces.admit(None) == 1
    assert repr(namespaces) == "Namespaces(current=1, sessions=0)"
    assert namespaces.admit(OLD) == 1


def test_pins_expire_at_a_swap_too() -> None:
    now = 0.0
    namespaces = Namespaces(clock=lambda: now)
    namespaces.admit(OLD)
    now = 3600.0
    namespaces.commit("none")
    assert repr(namespaces) == "Namespaces(current=0, sessions=1)"
    now = 3600.5
    namespaces.commit("none")
    assert repr(namespaces) == "Namespaces(current=0, sessions=0)"


def test_the_age_limit_is_that_of_the_last_swap() -> None:
    namespaces = Namespaces()
    seen = [namespaces.kv_age_max]
    for age_max in (2, 0, None):
        namespaces.commit("none", age_max)
        seen.append(namespaces.kv_age_max)
    assert seen == [None, 2, 0, None]
    assert namespaces.admit(None) == 0


@pytest.mark.parametrize("part", range(4), ids=["namespace", "tenant", "isolation key", "model"])
def test_a_salt_is_another_one_when_one_part_is(part: int) -> None:
    parts: list[Any] = [0, "tenant", "isolation", "model"]
    before = cache_salt(*parts)
    assert cache_salt(*parts) == before
    parts[part] = 1 if part == 0 else "other"
    assert cache_salt(*parts) != before


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.text(max_size=3), st.text(max_size=3), st.text(max_size=3)),
        max_size=8,
    )
)
def test_salts_are_equal_only_for_equal_namespace_tenant_isolation_key_and_model(rows: list[Any]) -> None:
    assert len({cache_salt(*row) for row in rows}) == len(set(rows))
