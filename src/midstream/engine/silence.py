"""How long a process has been silent, as far as it was listened to. Pure.

Always holds: time in which our own event loop stood still is not the process's silence: what it said then is read afterwards.
"""

from __future__ import annotations

LOOK_S = 1.0  # between two looks


class Silence:
    def __init__(self, now: float) -> None:
        self._looked_at = now
        self.lasts_s = 0.0

    def __repr__(self) -> str:
        return f"Silence({self.lasts_s:g} s)"

    def heard(self) -> None:
        self.lasts_s = 0.0

    def look(self, now: float) -> float:
        """How long it lasts. Of the time since the last look as much counts as a look is late on a busy machine."""
        self.lasts_s += min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        return self.lasts_s
