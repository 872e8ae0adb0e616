"""Waiting for threads and coroutines: nothing is left running, and a cancellation is never lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.snapshots.tasks import all_of, finished


async def test_a_call_in_a_thread_is_awaited_to_its_end_however_often_it_is_cancelled() -> None:
    """It uses files that are closed next: another file may have their numbers by then."""
    go_on, ended = threading.Event(), threading.Event()

    def call() -> None:
        go_on.wait(120)
        ended.set()

    try:
        task = asyncio.create_task(finished(call))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=0)
        assert not done, "it was given up while the thread went on"
        go_on.set()
        await asyncio.wait([task])
        assert (task.cancelled(), ended.is_set()) == (True, True)
    finally:
        go_on.set()


async def test_copying_leaves_the_threads_that_requests_need_alone() -> None:
    """Long prompts are tokenized in asyncio's own threads, of which a small machine has as many as a fetch copies with."""
    go_on = threading.Event()

    copies = [asyncio.create_task(finished(go_on.wait, 120)) for _ in range(40)]
    for _ in range(3):
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(60):
            await asyncio.to_thread(lambda: None)
    finally:
        go_on.set()
        await asyncio.gather(*copies)


async def test_results_come_in_order_and_the_first_error_ends_the_others() -> None:
    ended: list[str] = []

    async def step(name: str, failing: bool = False) -> str:
        try:
            await asyncio.sleep(0 if failing or name == "quick" else 60)
        finally:
            ended.append(name)
        if failing:
            raise SnapshotCorrupt(name)
        return name

    assert await all_of(step(name) for name in ()) == []
    assert await all_of([step("quick"), step("quick")]) == ["quick", "quick"]
    with pytest.raises(SnapshotCorrupt, match="bad"):
        await all_of([step("slow"), step("bad", failing=True)])
    assert sorted(ended[2:]) == ["bad", "slow"]


async def test_an_error_in_the_moment_of_a_cancellation_does_not_replace_it() -> None:
    """The cancelled attempt would be reported as one that failed, and its error shown for the newer snapshot."""

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise SnapshotError("the connection was closed") from None

    async def fails(error: asyncio.Event) -> None:
        await error.wait()
        raise SnapshotError("in the same moment")

    task = asyncio.create_task(all_of([fails_when_cancelled(), fails_when_cancelled()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()

    error = asyncio.Event()
    task = asyncio.create_task(all_of([fails(error), fails_when_cancelled()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    error.set()
    # It has failed; `task` does not know yet.
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
