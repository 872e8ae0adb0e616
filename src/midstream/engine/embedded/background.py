"""Work beside the steps: one job after the other, on one thread.

Always holds: jobs run in the order in which they came. So a model is disposed of after every job that reads it. A job that
raises an error does not stop the jobs behind it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from midstream.core.beside import lower_priority

logger = logging.getLogger(__name__)

#: Beside steps that keep every core busy, a thread with this niceness gets less than half a core.
NICENESS = 1

Job = Callable[[], None]


class Background:
    def __init__(self, name: str = "background", niceness: int = NICENESS) -> None:
        self._name = name
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lower_priority(self._niceness)
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                # A job handles its own errors. One that does not must not stop the jobs behind it.
                logger.exception("a job beside the steps failed")
            # Free what the job holds before waiting for the next one.
            del job
