"""The clock and the randomness of a simulated history. Import this before anything of midstream.

Always holds: while a world is installed, `time` tells its time, and whatever asks the system for random bytes gets the world's.
Without one, everything is as it was. Modules that bind `time.monotonic` as a default get the replacement, too.
"""

from __future__ import annotations

import os
import random
import time
from typing import Protocol

#: Of a simulated clock at its beginning, in seconds since the epoch.
EPOCH_S = 1_800_000_000.0


class World(Protocol):
    @property
    def now(self) -> float:
        """Seconds since the history began."""

    def wall(self) -> float:
        """Seconds since the epoch, as the process that asks sees them."""

    def random_bytes(self, count: int) -> bytes: ...


_world: World | None = None
_REAL = (time.monotonic, time.time, time.perf_counter, os.urandom)


def install(world: World | None) -> None:
    global _world
    _world = world


def _monotonic() -> float:
    return _REAL[0]() if _world is None else _world.now


def _time() -> float:
    return _REAL[1]() if _world is None else _world.wall()


def _perf_counter() -> float:
    return _REAL[2]() if _world is None else _world.now


def _urandom(count: int) -> bytes:
    return _REAL[3](count) if _world is None else _world.random_bytes(count)


#: Of the machine, whatever is installed.
real_monotonic = _REAL[0]

time.monotonic, time.time, time.perf_counter = _monotonic, _time, _perf_counter
os.urandom = _urandom
# `random` and `secrets` have their own name for it.
random._urandom = _urandom  # type: ignore[attr-defined]
