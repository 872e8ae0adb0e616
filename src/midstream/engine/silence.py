"""How long another process has been silent while this process listened. Pure.

Always holds: time in which our own event loop stood still does not count. Messages from that time are read afterwards.
"""

from __future__ import annotations

CHECK_INTERVAL_S = 1.0


class SilenceTimer:
    def __init__(self, now: float) -> None:
        self._updated_at = now
        self.silent_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def update(self, now: float) -> float:
        """Seconds of silence. Of the time since the last update, no more counts than a late update on a busy machine takes."""
        self.silent_s += min(now - self._updated_at, 2 * CHECK_INTERVAL_S)
        self._updated_at = now
        return self.silent_s
