"""When the heap of a process is trimmed: after the last large body, and seldom."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Mapping

import pytest

from midstream.http import heap as module
from midstream.http.heap import LARGE, Heap
from midstream.http.message import ConnectionLimits, Request
from midstream.http.reader import RequestReader


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


class Reading(RequestReader):
    """Keeps the requests that come."""

    def __init__(self) -> None:
        super().__init__(ConnectionLimits(max_body_bytes=2**30, max_header_bytes=2**16, keep_alive_s=1.0))
        self.requests: list[Request] = []

    def _take_head(self, method: bytes, target: bytes, first: Mapping[bytes, bytes], length: int) -> None: ...
    def _hold_more(self, more: int) -> None: ...

    def _take_request(self, request: Request) -> None:
        self.requests.append(request)


def test_a_large_body_is_not_copied_when_it_is_whole() -> None:
    size, piece = 2**24, bytes(range(256)) * 256
    reader = Reading()
    reader.feed(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size)
    tracemalloc.start()
    try:
        for _ in range(size // len(piece)):
            reader.feed(piece)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.requests[0].body == piece * (size // len(piece))
    assert most < 1.5 * size
