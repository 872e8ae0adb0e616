"""The time of day as a process keeps it for what lasts: sessions, models, checkpoints.

Always holds: it advances as time passes. It does not jump when the system's clock is set, so nothing in a process becomes too
old early. The next process reads the system's clock again.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch, by the system's clock at this call, and by the time that has passed since."""
    ahead = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead


#: One for all that compares times with each other.
steady = steady_clock()
