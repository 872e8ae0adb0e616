"""Waits for threads and for several coroutines. Leaves nothing running, and loses no cancellation.

Always holds: the work started here has ended when the caller continues, except that of `behind`. A caller that was cancelled
gets CancelledError, also when the work raises an error at the same time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

#: Requests wait for asyncio's own threads, which are few on a small machine. Copies and a rebuild need fewer than these.
_THREADS = ThreadPoolExecutor(12, "snapshots")

#: For work that keeps a core busy: more threads than cores would only take time from the engine's steps.
_BUSY_THREADS = ThreadPoolExecutor(os.cpu_count() or 1, "busy")

T = TypeVar("T")


async def finished(call: Callable[..., T], *args: object, on_cancel: Callable[[], None] | None = None) -> T:
    """Run `call` in a thread and await its end, even when cancelled: the caller closes or moves its files next.

    on_cancel: called on cancellation, to tell the call that its result is not needed any more.
    """
    return await _finished(_THREADS, call, *args, on_cancel=on_cancel)


async def computed(call: Callable[..., T], *args: object) -> T:
    """Like `finished`, for a call that computes more than it waits."""
    return await _finished(_BUSY_THREADS, call, *args)


async def _finished(
    threads: ThreadPoolExecutor,
    call: Callable[..., T],
    *args: object,
    on_cancel: Callable[[], None] | None = None,
) -> T:
    task = asyncio.get_running_loop().run_in_executor(threads, call, *args)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await _ended([task])
        raise


def behind(call: Callable[..., T], *args: object) -> Future[T]:
    """Run `call` in a thread while the caller continues, for work that another start of the process would do as well."""
    return _THREADS.submit(call, *args)


async def all_of(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. After the first error, cancels the other steps, awaits their end, and raises the error.

    Unlike in asyncio.TaskGroup, an error does not replace a cancellation of the caller at the same time.
    """
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is not None]
        return [task.result() for task in failed or tasks]
    finally:
        for task in tasks:
            task.cancel()
        if await _ended(tasks):
            raise asyncio.CancelledError


async def together(steps: Iterable[Coroutine[Any, Any, T]], most: int) -> list[T]:
    """As `all_of`, and at most so many run at a time: those that each open many files, for example."""
    waiting = list(steps)
    slots = asyncio.Semaphore(most)

    async def one(step: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await step

    try:
        return await all_of(one(step) for step in waiting)
    finally:
        for step in waiting:
            step.close()


async def _ended(futures: Sequence[asyncio.Future[Any]]) -> bool:
    """Wait until all have ended, even if this is cancelled, and return whether it was. Their errors are dropped."""
    cancelled = False
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for future in futures:
        if not future.cancelled():
            future.exception()
    return cancelled
