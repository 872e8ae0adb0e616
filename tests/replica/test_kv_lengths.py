"""How far sessions come, as those that ended and those that are under way say."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from midstream.replica.kv_account import Beginning, KvAccount
from midstream.replica.kv_lengths import LEARNED_FROM, Lengths

counts = st.lists(st.integers(1, 50), max_size=20)


def lengths_of(ended: list[int], under_way: list[int]) -> Lengths:
    found = Lengths()
    for length in ended:
        found.add(length)
        found.judge(under_way)
    return found


def test_lengths_are_judged_again_once_a_sixteenth_is_new() -> None:
    found, judged = Lengths(), 0
    for length in range(1000):
        if found.add(length):
            found.judge([])
            judged += 1
        assert found.longest > 0.9 * length - 1
    assert 16 < judged < 16 + 16 * 4 + 1000 / 16


@given(counts, st.integers(0, 60), st.sampled_from([0.25, 0.4, 0.6, 0.99]))
def test_if_all_have_ended_a_share_is_counted(ended: list[int], above: int, share: float) -> None:
    further = sorted(length for length in ended if length > above)
    expected = further[math.ceil(share * len(further) - 1e-6) - 1] if further else None
    assert lengths_of(ended, []).likely(share, above) == expected


@given(counts, counts, st.integers(0, 60), st.sampled_from([0.25, 0.4, 0.6, 0.99]))
def test_those_under_way_never_make_sessions_shorter(
    ended: list[int], under_way: list[int], above: int, share: float
) -> None:
    alone, both = (
        lengths_of(ended, []).likely(share, above),
        lengths_of(ended, under_way).likely(share, above),
    )
    assert both is None or (alone is not None and both >= alone)


def test_the_first_that_end_are_not_taken_for_all() -> None:
    """400 sessions of 1 to 100 tokens that grow together have 30 now. So 3 of 10 have ended."""
    draw = Random(1)
    finals = [draw.randint(1, 100) for _ in range(400)]
    ended = [final for final in finals if final <= 30][:LEARNED_FROM]
    found = lengths_of(ended, [30] * sum(final > 30 for final in finals))
    assert found.likely(0.6, 0) is None
    assert found.longest == 30
    assert abs((found.likely(0.2, 0) or 0) - 20) <= 4
    assert abs((found.likely(0.1, 10) or 0) - 19) <= 4


def test_sessions_that_have_come_less_far_say_nothing_of_a_length() -> None:
    assert lengths_of([40], [10] * 9).likely(0.6, 0) == 40
    assert lengths_of([40], [41] * 9).likely(0.6, 0) is None
    assert lengths_of([40], [40] * 9).likely(0.6, 0) is None


def test_the_latest_are_remembered() -> None:
    found = lengths_of([5] * LEARNED_FROM + [9] * LEARNED_FROM, [])
    assert (len(found), found.likely(0.25, 0), found.longest) == (LEARNED_FROM, 9, 9)


def turn(account: KvAccount, name: str, prompt: int, context: int, group: int) -> None:
    account.begin(("", name), Beginning(group, group), prompt, 0.0)
    account.found(("", name), 0)
    account.end_turn(("", name), context, 0.0)


def test_a_wave_whose_short_sessions_end_first_is_not_expected_to_be_short() -> None:
    """With 4 of 16 ended, all were expected to end where these did, and the next wave began beside them."""
    account = KvAccount()
    account.capacity = 4000
    for n in range(16):
        turn(account, f"s{n}", 50, 100, n)
        turn(account, f"s{n}", 120, 200, n)
    for n in range(4):
        account.end(("", f"s{n}"))
    assert account.asks(Beginning(99, 99), 50) > 200 + 100
    account.check()


def test_sessions_that_end_at_different_times_need_less_than_all_at_their_longest() -> None:
    """By one expected length for all, 8 began where 11 fit."""
    account = KvAccount()
    account.capacity = 4000
    for n in range(40):
        turn(account, f"old{n}", 10, 10 + 20 * n, 100 + n)
        turn(account, f"old{n}", 10 + 20 * n, 11 + 20 * n, 100 + n)
        account.end(("", f"old{n}"))
    begun, one_length = 0, account.asks(Beginning(99, 99), 10)
    while account.admits(Beginning(begun, begun), 10):
        account.begin(("", f"s{begun}"), Beginning(begun, begun), 10, 0.0)
        begun += 1
    assert (account.capacity // one_length, begun) == (8, 11)
    assert account.claimed <= account.capacity
    account.check()
