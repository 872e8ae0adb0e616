"""Pauses of a replica: its requests are held back, wait or end, until it is resumed.

Always holds: of two messages the one with the greater serial counts, whichever came last. What was carried out is known. A
pause that failed is tried again when its message comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from midstream.core.types import Pause
from midstream.engine.base import Engine, EngineDied
from midstream.replica.policies import ServedPolicies

log = logging.getLogger(__name__)


class Pausing:
    """on_change: called when `carried_out` has changed."""

    def __init__(self, engine: Engine, policies: ServedPolicies, on_change: Callable[[], None]) -> None:
        self._engine, self._policies, self._on_change = engine, policies, on_change
        self.carried_out = self._asked = Pause()
        self._task: asyncio.Task[None] | None = None

    def ask(self, wanted: Pause) -> None:
        """Pause or resume, unless a newer message said otherwise."""
        stale = wanted.serial < self._asked.serial
        again = wanted.serial == self._asked.serial
        under_way = self._task is not None and not self._task.done()
        if stale or (again and (wanted != self._asked or under_way or self.carried_out == wanted)):
            return
        self._asked = wanted
        self._policies.pause(wanted.mode is not None)
        if not under_way:
            self._task = asyncio.create_task(self._carry_out(), name="pause")
            self._task.add_done_callback(_log_failure)

    async def _carry_out(self) -> None:
        while self.carried_out != self._asked:
            wanted = self._asked
            if wanted.mode == "abort":
                self._policies.abort(held=False)
            # A dead engine has nothing that could stand still. Its next boot begins with the gate closed.
            with contextlib.suppress(EngineDied):
                if wanted.mode == "keep":
                    await self._engine.pause()
                elif self.carried_out.mode == "keep":
                    await self._engine.resume()
            self.carried_out = wanted
            self._on_change()

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a pause failed", exc_info=error)
