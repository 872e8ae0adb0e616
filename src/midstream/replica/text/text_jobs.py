"""Long texts are rendered and tokenized beside the event loop.

Owns: the threads that do it, and the order of tenants.
Always holds: at most THREADS jobs run at a time, and one per tenant. Jobs beyond WAITING_MAX are refused. A job stops at its
next step after its client left (`Leave.check`); it keeps its tenant's turn until then, and its result is discarded. Nothing of
a job that failed waits for a collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from midstream.core.errors import AnotherBoot, Overloaded

THREADS = 2
WAITING_MAX = 256

_T = TypeVar("_T")


class Left(Exception):
    """The client left, and the job's result is not needed."""


class Leave:
    """Tells a job, between its steps, whether its client left."""

    def __init__(self) -> None:
        self._left = threading.Event()

    def set(self) -> None:
        self._left.set()

    def check(self) -> None:
        """Raises Left once the client has left."""
        if self._left.is_set():
            raise Left


class _Turn:
    """The lock of one tenant, and who holds it or waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class TextJobs:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._turns: dict[str, _Turn] = {}
        #: Jobs that run or wait.
        self.jobs = 0
        self._texts = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"TextJobs({self.jobs} jobs of {len(self._turns)} tenants)"

    async def read(self, tenant: str, job: Callable[[Leave], _T]) -> _T:
        """Like `run`, for a text, which may take long. Raises Overloaded, too, while WAITING_MAX texts are read or wait."""
        if self._texts >= WAITING_MAX:
            raise Overloaded(f"{self._texts} long texts wait to be tokenized; retry it later")
        self._texts += 1
        try:
            return await self.run(tenant, job)
        finally:
            self._texts -= 1

    async def run(self, tenant: str, job: Callable[[Leave], _T]) -> _T:
        """The job's result, from a thread. Raises what it raises, and AnotherBoot once they are closed."""
        turn = self._turns.setdefault(tenant, _Turn())
        turn.users += 1
        self.jobs += 1
        leave = Leave()
        try:
            await turn.lock.acquire()
            try:
                self._check_open()
                working = self._threads.submit(self._begun, job, leave)
            except BaseException:
                turn.lock.release()
                raise
        except BaseException:
            self._ended(tenant, turn)
            raise
        loop = asyncio.get_running_loop()

        def ended(_: Future[_T]) -> None:
            # The loop may have ended before the thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._worked, tenant, turn)

        working.add_done_callback(ended)
        waiting = asyncio.wrap_future(working)
        try:
            return await waiting
        finally:
            # An error refers to this frame. If the frame referred to who holds the error, request and body would stay.
            del working, waiting
            leave.set()

    def _worked(self, tenant: str, turn: _Turn) -> None:
        """A thread is free again. A tenant keeps its turn until its step ends, also if the client has left."""
        turn.lock.release()
        self._ended(tenant, turn)

    def _ended(self, tenant: str, turn: _Turn) -> None:
        self.jobs -= 1
        turn.users -= 1
        if not turn.users:
            del self._turns[tenant]

    def _begun(self, job: Callable[[Leave], _T], leave: Leave) -> _T:
        self._check_open()
        return job(leave)

    def _check_open(self) -> None:
        if self._closed:
            raise AnotherBoot("the replica is ending; retry this request")

    def close(self) -> None:
        """Running jobs continue; those that wait end with AnotherBoot, as their requests may begin elsewhere."""
        self._closed = True
        self._threads.shutdown(wait=False)
