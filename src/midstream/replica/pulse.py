"""Measures whether the replica's event loop stands still. A loop that stands still cannot report it, so the report follows.

Always holds: a stall is reported for KEPT_S after it ended; the log names each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

BEAT_S = 0.25
#: A beat that is later than this is a stall.
STALL_S = 0.5
KEPT_S = 30.0


class Pulse:
    def __init__(
        self,
        name: str,
        on_change: Callable[[], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._on_change = on_change
        self._clock = clock
        self._sleep = sleep
        self._until = 0.0
        self.stalled_s = 0.0

    def __repr__(self) -> str:
        return f"Pulse({self._name}, stalled {self.stalled_s:g} s)"

    async def run(self) -> None:
        """Until cancelled."""
        before = self._clock()
        while True:
            await self._sleep(BEAT_S)
            now = self._clock()
            self._beat(now, now - before - BEAT_S)
            before = now

    def _beat(self, now: float, late_s: float) -> None:
        if late_s >= STALL_S:
            log.warning("%s: the event loop stood still for %.1f s", self._name, late_s)
            self.stalled_s, self._until = max(self.stalled_s, round(late_s, 1)), now + KEPT_S
            self._on_change()
        elif self.stalled_s and now >= self._until:
            self.stalled_s = 0.0
            self._on_change()
