"""How long another process has been silent while this process listened, or stood still. Pure, but for `cpu_ticks`.

Always holds: time in which our own event loop stood still does not count. Messages from that time are read afterwards.
"""

from __future__ import annotations

from pathlib import Path

CHECK_INTERVAL_S = 1.0


class SilenceTimer:
    def __init__(self, now: float) -> None:
        self.updated_at = now
        self.silent_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def update(self, now: float) -> float:
        """Seconds of silence. Of the time since the last update, no more counts than a late update on a busy machine takes.

        now: in seconds.
        """
        self.silent_s += min(now - self.updated_at, 2 * CHECK_INTERVAL_S)
        self.updated_at = now
        return self.silent_s


class StillnessTimer:
    """How long a process has neither been heard nor used a processor. cpu_ticks: None where it is unknown.

    A process that computes for long is not still. One that was stopped, or waits for something that never comes, is.
    """

    def __init__(self, now: float) -> None:
        self._timer = SilenceTimer(now)
        self._cpu_ticks: int | None = None

    def heard(self) -> None:
        self._timer.silent_s = 0.0

    def update(self, now: float, cpu_ticks: int | None) -> float:
        """Seconds of stillness, at the time `now` in seconds."""
        if cpu_ticks is None or cpu_ticks != self._cpu_ticks:
            self._timer.heard()
            self._cpu_ticks = cpu_ticks
        return self._timer.update(now)


def cpu_ticks(pid: int) -> int | None:
    """Processor time that all threads of a process have used, in ticks of the kernel's clock. None where it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
