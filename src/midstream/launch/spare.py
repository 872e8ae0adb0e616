"""The spare replica process of a machine: it has imported everything, and waits to be the next replica that begins here.

An engine's imports take longer than all else that a small replica does until it serves, and on busy cores they take the time
of its neighbours. The spare has done them with the lowest priority.

Owns: that process until a replica takes it (launch/spare_replica.py is its other end).
Always holds:
- There is one at most. It is made once a replica has begun here, and none for `after_s`. So a server without replicas has
  none, and replicas that end again and again begin without one.
- Who takes it gets a process that waits for its settings. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from midstream.launch.process import ChildProcess, StartFailed

logger = logging.getLogger(__name__)


class SpareReplica:
    """create: starts the process. Raises StartFailed. after_s: since a replica began last; 0: there is no spare."""

    def __init__(self, create: Callable[[], Awaitable[ChildProcess]], after_s: float) -> None:
        self._create = create
        self._after_s = after_s
        self._changed_at = 0.0
        # Once a replica has begun here: a server may have none, and not what they import.
        self._used = asyncio.Event()
        # The process that waits, and what is done once it is taken.
        self._offer: tuple[ChildProcess, asyncio.Future[None]] | None = None

    def __repr__(self) -> str:
        return (
            f"SpareReplica({None if self._offer is None else self._offer[0].pid}, after {self._after_s:g} s)"
        )

    def take(self) -> ChildProcess | None:
        """For a replica that begins. None if no process waits."""
        self._changed_at = time.monotonic()
        self._used.set()
        offer, self._offer = self._offer, None
        if offer is None or not offer[0].running:
            return None
        offer[1].set_result(None)
        return offer[0]

    async def keep(self) -> None:
        """Have one again whenever it was taken or has ended. Runs until cancelled, and ends it then."""
        if self._after_s:
            await self._used.wait()
        while self._after_s:
            left_s = self._changed_at + self._after_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            try:
                process = await self._create()
            except StartFailed as error:
                logger.warning("there is no spare replica process: %s", error)
            else:
                await self._until_gone(process)
            self._changed_at = time.monotonic()

    async def _until_gone(self, process: ChildProcess) -> None:
        """Offer it once it waits, until it is taken or has ended."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if not await process.waits():
                logger.warning("a spare replica process ended while it started")
                return
            logger.info("a spare replica process waits (pid %d)", process.pid)
            self._offer = (process, taken)
            ended = asyncio.create_task(process.process.wait(), name="spare")
            await asyncio.wait((ended, taken), return_when=asyncio.FIRST_COMPLETED)
            if not ended.cancel() and not taken.done():
                logger.warning("the spare replica process %d ended with code %d", process.pid, ended.result())
        finally:
            if not taken.done():
                self._offer = None
                await process.end()
