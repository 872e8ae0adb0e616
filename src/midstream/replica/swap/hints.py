"""Files that are fetched before their snapshot is signalled.

Owns: the queue of hints, and the task that prefetches them.
Always holds: one prefetch runs at a time, and none while a snapshot is fetched. The hints of that snapshot are dropped then.
A hint that fails affects no other one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from midstream.core.errors import SnapshotError
from midstream.core.types import Hint

log = logging.getLogger(__name__)

#: A large checkpoint has a few hundred files.
HINTS_MAX = 1024


class Hints:
    def __init__(self, prefetch: Callable[[Hint], Awaitable[None]]) -> None:
        self._prefetch = prefetch
        self._waiting: dict[Hint, None] = {}
        self._running: Hint | None = None
        self._task: asyncio.Task[None] | None = None
        self._loading: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Hints(waiting={len(self._waiting)}, running={self._running}, loading={self._loading})"

    def add(self, hint: Hint) -> None:
        """Fetch these files when nothing else is fetched; returns at once. A hint too many is dropped."""
        if self._closed or hint.snapshot == self._loading or hint == self._running:
            return
        if len(self._waiting) >= HINTS_MAX and hint not in self._waiting:
            log.warning("%d hints wait already; one of %s is dropped", HINTS_MAX, hint.snapshot)
            return
        self._waiting[hint] = None
        self._go_on()

    @asynccontextmanager
    async def loading(self, snapshot: str) -> AsyncIterator[None]:
        """While inside, the snapshot's own fetch has the bucket and the disk for itself."""
        self._loading = snapshot
        try:
            await self._stop()
            self._waiting = {hint: None for hint in self._waiting if hint.snapshot != snapshot}
            yield
        finally:
            self._loading = None
            self._go_on()

    async def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        await self._stop()

    async def _stop(self) -> None:
        """Returns once nothing runs any more."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _go_on(self) -> None:
        at_work = self._task is not None and not self._task.done()
        if self._waiting and not at_work and self._loading is None and not self._closed:
            self._task = asyncio.create_task(self._work(), name="prefetch")
            self._task.add_done_callback(lambda _: self._go_on())

    async def _work(self) -> None:
        while self._waiting and self._loading is None:
            hint = self._running = next(iter(self._waiting))
            del self._waiting[hint]
            try:
                await self._prefetch(hint)
            except asyncio.CancelledError:
                self._waiting = {hint: None} | self._waiting
                raise
            except (SnapshotError, OSError) as error:
                log.warning("files of %s could not be fetched early: %s", hint.snapshot, error)
            except Exception:
                # A bug here must not stop the replica, as hints only save time.
                log.exception("files of %s could not be fetched early", hint.snapshot)
            finally:
                self._running = None
