"""When the heap of a process is trimmed: after the last large body, and seldom."""

from __future__ import annotations

import asyncio

import pytest

from midstream.http import heap as module
from midstream.http.heap import LARGE, Heap


def test_small_bodies_trim_nothing_and_there_is_a_trim_after_the_last_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> list[str]:
        monkeypatch.setattr(module, "TRIM_AFTER_S", 0)
        told = list[str]()
        heap = Heap(lambda: told.append("trim"))

        async def until_still() -> None:
            while heap._loop:  # noqa: ASYNC110
                await asyncio.sleep(0)

        heap.freed(LARGE - 1)
        await until_still()
        heap.freed(LARGE)
        assert told == [], "who lets go of a body does not wait"
        await until_still()
        told.append("alone")
        for _ in range(5):
            heap.freed(LARGE)
        await until_still()
        return told

    assert asyncio.run(main()) == ["trim", "alone", "trim", "trim"]


def test_a_trim_that_a_loop_ended_with_does_not_hold_up_those_of_the_next_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims = list[str]()
    heap = Heap(lambda: trims.append("trim"))

    async def lets_go_and_ends() -> None:
        heap.freed(LARGE)

    async def lets_go_and_stays() -> None:
        monkeypatch.setattr(module, "TRIM_AFTER_S", 0)
        heap.freed(LARGE)
        while heap._loop:  # noqa: ASYNC110
            await asyncio.sleep(0)

    asyncio.run(lets_go_and_ends())
    assert trims == []
    asyncio.run(lets_go_and_stays())
    assert trims == ["trim"]
