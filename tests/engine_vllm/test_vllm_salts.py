"""Salts against a model of vLLM's cache: what is under a salt is as old as the first request that used it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.engine.servers.salts import Salts

REQUEST = st.tuples(
    st.sampled_from([b"a", b"b", b"c"]), st.sampled_from([None, 0, 1, 2, 5]), st.booleans(), st.integers(0, 2)
)


@settings(deadline=None)
@given(st.lists(REQUEST, max_size=60))
def test_nothing_older_than_the_bound_and_nothing_of_another_namespace_is_found(
    requests: list[tuple[bytes, int | None, bool, int]],
) -> None:
    salts = Salts(b"boot", namespaces_max=2)
    # Under each salt: by whom, in which epoch.
    computed: dict[str, list[tuple[bytes, int]]] = {}
    now = 0
    for namespace, age_max, passing, switches in requests:
        now += switches
        salt, clean = salts.of(namespace, now, age_max, passing=passing)
        found = computed.setdefault(salt, [])
        assert all(whose == namespace for whose, _ in found)
        assert all(age_max is None or now - when <= age_max for _, when in found)
        assert not clean or all(when == now for _, when in found)
        found.append((namespace, now))


def test_a_cache_is_kept_as_long_as_its_oldest_part_is_not_too_old() -> None:
    salts = Salts(b"boot")
    used = [salts.of(b"a", now, age_max)[0] for now, age_max in enumerate([0, 1, None, None, 3, 3, 6])]
    # 1 switch ago, then of any age.
    assert used[0] == used[1] == used[2] == used[3]
    # 4 switches old.
    assert used[4] != used[3]
    assert used[4] == used[5] == used[6]


def test_a_request_with_a_bound_of_its_own_leaves_the_others_their_cache() -> None:
    salts = Salts(b"boot")
    before, _ = salts.of(b"a", 0, None)
    alone, clean = salts.of(b"a", 3, 0, passing=True)
    assert (alone != before, clean) == (True, True)
    assert salts.of(b"a", 3, None) == (before, False)


def test_another_boot_finds_nothing() -> None:
    assert Salts(b"one").of(b"a", 0, None) != Salts(b"two").of(b"a", 0, None)
