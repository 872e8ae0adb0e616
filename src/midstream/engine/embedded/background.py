"""Work beside the steps: one job after the other, on one thread that gives way to them.

Always holds: jobs run in the order they came, so what is disposed of is read by no job before it; a job that raises costs
itself alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Beside steps that keep every core busy: under half a core.
NICENESS = 1

Job = Callable[[], None]


class Background:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Background(waiting={self._jobs.qsize()})"

    def submit(self, job: Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        give_way()
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:  # jobs answer for themselves; one that does not must not end those behind it
                logger.exception("a job beside the steps failed")
            del job  # with what it holds


def give_way() -> None:
    """Lower this thread's priority, and that of threads it starts."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
