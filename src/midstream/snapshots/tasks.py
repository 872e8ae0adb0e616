"""Waiting for threads and for several coroutines, so that nothing is left running and no cancellation is lost.

Always holds: what was started here has ended when the caller goes on; a caller that was cancelled sees its cancellation,
whatever else went wrong in the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

#: Of its own: asyncio's threads are few on a small machine, and requests wait for them. More than copies and a rebuild take.
_THREADS = ThreadPoolExecutor(12, "snapshots")

T = TypeVar("T")


async def finished(call: Callable[..., T], *args: object, on_cancel: Callable[[], None] | None = None) -> T:
    """`call` in a thread, awaited to its end even when cancelled: it uses files that the caller closes or moves next.

    `on_cancel` may tell the call that nobody wants its result any more.
    """
    task = asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await _ended([task])
        raise


async def all_of(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. Raises the first error, once the others, which are cancelled then, have ended.

    Unlike asyncio.TaskGroup, an error beside the caller's own cancellation does not replace it.
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


async def _ended(futures: Sequence[asyncio.Future[Any]]) -> bool:
    """Wait until all have ended, however often that is cancelled; whether it was. What they raise is nobody's any more."""
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
