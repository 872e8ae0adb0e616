"""Long texts are rendered and tokenized beside the event loop.

Owns: the threads that do it, the order of tenants, and giving freed memory back to the system.
Always holds: at most THREADS jobs run at a time, and one per tenant. Jobs beyond WAITING_MAX are refused. A job whose client
left stops at its next step (`Leave.check`); it keeps its tenant's turn until then, and its result is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from midstream.core.errors import Overloaded

log = logging.getLogger(__name__)

THREADS = 2
WAITING_MAX = 256
#: The memory of a larger request, in bytes, is given back to the system.
TRIM_FROM = 2**20
#: Several such requests are one occasion.
TRIM_DELAY_S = 1.0

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
    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        """trim: gives freed memory back to the system; None: the C library's way."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._turns: dict[str, _Turn] = {}
        self._trim = trim_memory if trim is None else trim
        self._trimming: asyncio.TimerHandle | None = None
        #: Jobs that run or wait.
        self.jobs = 0

    def __repr__(self) -> str:
        return f"TextJobs({self.jobs} jobs of {len(self._turns)} tenants)"

    async def run(self, tenant: str, job: Callable[[Leave], _T]) -> _T:
        """The job's result, from a thread. Raises what it raises, and Overloaded."""
        if self.jobs >= WAITING_MAX:
            raise Overloaded(f"{self.jobs} long texts wait to be tokenized; retry it later")
        turn = self._turns.setdefault(tenant, _Turn())
        turn.users += 1
        self.jobs += 1
        leave = Leave()
        try:
            await turn.lock.acquire()
            try:
                working = self._threads.submit(job, leave)
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
        try:
            return await asyncio.wrap_future(working)
        finally:
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

    def took(self, size: int) -> None:
        """A request of `size` bytes ends. Its memory goes back to the system soon."""
        if size >= TRIM_FROM and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._give_back)

    def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _give_back(self) -> None:
        self._trimming = None
        self._threads.submit(self._trim)


def trim_memory() -> None:
    """Free pages of the C library's heaps go back to the system, where it can do that (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError) as error:
        log.debug("freed memory stays with the process: %s", error)
