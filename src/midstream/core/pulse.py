"""Measures how long a process's event loop stands still. A loop that stands still cannot report it, so the report follows.

Owns: one timer of the loop, and how late it comes.
Always holds:
- A delay of any cause is reported for KEPT_S after it ended, from LATE_S on. The log names each.
- A stall is the process's own doing: a step that computed or blocked for longer than STALL_S. Each is counted once. Time in
  which a thread of the process was ready and had no core is subtracted, because a busy machine takes that from any process. The
  loop's thread may wait for a lock that such a thread holds. What the loop's thread computed always counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: A stall is seen when it is longer than STALL_S and this together.
BEAT_S = 0.02
#: A process that computed less than IDLE_S between two beats is idle, and beats so seldom: to wake up costs it a tenth of a
#: millisecond.
IDLE_S, IDLE_BEAT_S = 0.002, 0.1
STALL_S = 0.05
LATE_S = 0.5
KEPT_S = 30.0
#: What the system says of threads is read once in so many beats, and after a late one: it takes as long as many beats.
LOOKS = 25
_THREADS = "/proc/self/task"


def own_s(late_s: float, computed_s: float, unserved_s: float | None) -> float:
    """How much of a delay the process caused. computed_s: CPU time of the loop's thread meanwhile.

    unserved_s: how long its threads were ready and had no core. None: the system does not count it, and only computing counts.
    """
    blocked_s = 0.0 if unserved_s is None else late_s - unserved_s
    return max(blocked_s, min(late_s, computed_s))


class ThreadTimes:
    """What the system says of this process's threads. Linux alone does."""

    def __init__(self) -> None:
        # By thread: its file, and what that said last, in nanoseconds.
        self._files: dict[str, int] = {}
        self._waited: dict[str, int] = {}

    def unserved_s(self) -> float | None:
        """How long the threads together were ready and had no core, since the last call. None: the system does not count it."""
        self._find()
        if not self._files:
            return None
        found = 0
        for thread, file in list(self._files.items()):
            try:
                # Nanoseconds on a core, nanoseconds ready without one, turns on a core.
                waited = int(os.pread(file, 80, 0).split()[1])
            except (OSError, IndexError):
                # The thread has ended.
                self._forget(thread)
            else:
                found += waited - self._waited.get(thread, waited)
                self._waited[thread] = waited
        return found / 1e9

    def close(self) -> None:
        for thread in list(self._files):
            self._forget(thread)

    def _find(self) -> None:
        """Threads that began."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(_THREADS):
                if thread not in self._files:
                    path = f"{_THREADS}/{thread}/schedstat"
                    self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _forget(self, thread: str) -> None:
        os.close(self._files.pop(thread))
        self._waited.pop(thread, None)


class Pulse:
    """on_change: `stalled_s` is another one. on_stall: gets the seconds of each stall."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._scheduler: ThreadTimes | None = None
        #: By the last beat: when the next one is due, and the CPU time of the thread then.
        self._due = self._computed_s = 0.0
        self._beats = 0
        #: The longest delay of KEPT_S, in seconds; 0: none.
        self.stalled_s = 0.0
        self.on_change: Callable[[], None] = lambda: None
        self.on_stall: Callable[[float], None] = lambda seconds: None

    def __repr__(self) -> str:
        return f"Pulse({self._name}, stalled {self.stalled_s:g} s)"

    def start(self) -> None:
        """Measure the running loop, in its own thread. Earlier stalls do not count."""
        self._scheduler = ThreadTimes()
        self._next(self._scheduler, BEAT_S)

    def stop(self) -> None:
        if self._timer is not None and self._scheduler is not None:
            self._timer.cancel()
            self._scheduler.close()
            self._timer = self._scheduler = None

    def _next(self, scheduler: ThreadTimes, beat_s: float) -> None:
        if self._beats % LOOKS == 0:
            scheduler.unserved_s()
        self._beats += 1
        self._computed_s = time.thread_time()
        self._due = time.monotonic() + beat_s
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(beat_s, self._beat, scheduler)

    def _beat(self, scheduler: ThreadTimes) -> None:
        now = time.monotonic()
        late_s, computed_s = now - self._due, time.thread_time() - self._computed_s
        # Since it was read last, which may be some beats ago: what a busy machine takes is rather counted too high.
        unserved_s = scheduler.unserved_s() if late_s > STALL_S else None
        self.look(now, late_s, computed_s, unserved_s)
        self._next(scheduler, IDLE_BEAT_S if computed_s < IDLE_S else BEAT_S)

    def look(self, now_s: float, late_s: float, computed_s: float, unserved_s: float | None) -> None:
        """One beat, so late. computed_s, unserved_s: as own_s() takes them. now_s: on a clock that does not jump."""
        if late_s > STALL_S:
            stall_s = own_s(late_s, computed_s, unserved_s)
            if late_s >= LATE_S:
                log.warning("%s: the event loop stood still for %.1f s", self._name, late_s)
            if stall_s > STALL_S:
                line = "%s: a step of %.0f ms, %.0f ms of them computing"
                log.info(line, self._name, 1000 * stall_s, 1000 * min(computed_s, stall_s))
                self.on_stall(stall_s)
        if late_s >= LATE_S:
            self.stalled_s, self._until = max(self.stalled_s, round(late_s, 1)), now_s + KEPT_S
            self.on_change()
        elif self.stalled_s and now_s >= self._until:
            self.stalled_s = 0.0
            self.on_change()
