"""How many bytes record files have, whatever order a write and a listing take."""

from __future__ import annotations

import itertools

import pytest

from midstream.replica.held_bytes import HeldBytes

#: What befalls one file and one listing, in the order of each of them.
WRITE = ("begin", "placed", "end")
LISTING = ("begins", "looks", "ends")


def orders() -> list[tuple[str, ...]]:
    steps = [*WRITE, *LISTING]
    found = itertools.permutations(steps)
    return [
        order
        for order in found
        if [one for one in order if one in WRITE] == list(WRITE)
        and [one for one in order if one in LISTING] == list(LISTING)
    ]


@pytest.mark.parametrize("order", orders(), ids="-".join)
def test_a_file_counts_once_however_its_write_and_a_listing_fall_together(order: tuple[str, ...]) -> None:
    held, bucket, seen = HeldBytes(), {"old": 5}, dict[str, int]()

    def looks() -> None:
        seen.update(bucket)
        for name in bucket:
            held.listed(name)

    steps = {
        "begin": lambda: held.begin("a"),
        "placed": lambda: bucket.update(a=3),
        "end": lambda: held.end("a", 3),
        "begins": held.begin_listing,
        "looks": looks,
        "ends": lambda: held.end_listing(sum(seen.values())),
    }
    for step in order:
        steps[step]()
    assert held.total == 8
    # The same bytes again are the same file, also while a listing is under way.
    held.begin("a")
    held.begin_listing()
    looks()
    held.end("a", 3)
    held.end_listing(8)
    assert held.total == 8


def test_what_was_not_written_counts_when_a_listing_has_it_alone() -> None:
    held = HeldBytes()
    held.begin("torn")
    held.end("torn", None)
    assert held.total == 0
    held.begin_listing()
    held.listed("torn")
    held.end_listing(2)
    assert held.total == 2
    held.begin_listing()
    held.end_listing(0)
    assert held.total == 0


def test_a_listing_that_failed_takes_nothing_away() -> None:
    held = HeldBytes()
    held.begin("a")
    held.end("a", 3)
    held.begin_listing()
    held.begin("b")
    held.end("b", 4)
    assert held.total == 7
    held.begin_listing()
    held.listed("a")
    held.listed("b")
    held.end_listing(7)
    assert held.total == 7
