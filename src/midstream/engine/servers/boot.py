"""One boot of the engine: the time from a successful start to the end of the server, and what must not outlive it.

Always holds: what `while_alive` waits for ends with EngineDied when the boot ends. Small tasks end with the engine's stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from midstream.engine.base import EngineDied

T = TypeVar("T")


class ServerBoot:
    """engine: its name, for errors."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        # Of the last boot; set to the reason when it ends.
        self._ended: asyncio.Future[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> bool:
        return self._ended is not None and not self._ended.done()

    def begin(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()

    def end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def check(self) -> None:
        """Raises EngineDied."""
        if not self.running:
            raise EngineDied(f"{self._engine} is not running")

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the boot ends. Raises EngineDied."""
        over, task = self._ended, asyncio.create_task(work)
        assert over is not None
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                raise EngineDied(over.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled():
                # Mark the error as seen, as no other code looks at it.
                task.exception()

    def in_background(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Run `work` until it or the boot ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
