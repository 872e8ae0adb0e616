"""The reconciler: keeps comparing what is desired with what replicas report, and acts on the difference.

Always holds:
- Level-triggered: each pass looks at the whole state, so a lost wake, message or report only delays. Wakes coalesce;
  a pass every `poll_s` is the backstop.
- Every stage change in a report is stored in the ledger once, in order within a boot, also those that happened while
  this process was down and are still in the report.
- What is kept here (`_recorded`, `_attempts`, `_state`) can be thrown away at any time: it saves work, it decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from midstream.control.reconcile import decide
from midstream.errors import ReplicaUnavailable
from midstream.gateway.replicas import ReplicaSet, ReplicaView
from midstream.ledger import DeploymentState, Ledger, LedgerUnavailable
from midstream.types import Desired, ReplicaReport, Stage, Transition

logger = logging.getLogger(__name__)


class Reconciler:
    """One deployment's replicas against its ledger. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        replica_set: ReplicaSet,
        deployment: str,
        *,
        poll_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deployment`: its full name; the ledger must have it. `poll_s` is also the pause before a message is repeated."""
        self._ledger = ledger
        self._replicas = replica_set
        self._deployment = deployment
        self._poll_s = poll_s
        self._monotonic = monotonic
        self._state: DeploymentState | None = None
        self._read_at = float("-inf")
        self._wake = asyncio.Event()
        self._recorded: dict[str, tuple[str, int]] = {}  # replica -> boot, last seq stored
        self._attempts: dict[
            str, tuple[str, str, int, float]
        ] = {}  # replica -> boot, snapshot, generation, when
        self._sending: dict[str, asyncio.Task[None]] = {}
        replica_set.subscribe(self.wake)

    def __repr__(self) -> str:
        desired = self._state.desired if self._state else None
        return f"<Reconciler {self._deployment} desired={desired} sending={len(self._sending)}>"

    def wake(self) -> None:
        """Something about a replica changed: look again soon."""
        self._wake.set()

    def signalled(self) -> None:
        """The ledger has a new signal: read it and look again at once."""
        self._read_at = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                await self.reconcile_once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._sending.values():
                task.cancel()

    async def reconcile_once(self) -> None:
        """One pass over all replicas. Messages are sent by tasks of their own: a slow replica holds up no other."""
        for view in self._replicas.views:
            if view.report is not None:
                await self._record(view, view.report)
        state = await self._current_state()
        if state is None:
            return
        for view in self._replicas.views:
            action = decide(state, view.report, view.admitted)
            if action.admit and not view.admitted:
                logger.info("%s joins with snapshot %s", view.name, view.report and view.report.snapshot)
            view.admitted = action.admit
            if action.send is not None and view.report is not None:
                self._send(view, view.report.boot, action.send)

    async def settle(self) -> None:
        """Wait until every message under way was taken or refused."""
        await asyncio.gather(*self._sending.values())

    async def _current_state(self) -> DeploymentState | None:
        now = self._monotonic()
        if now - self._read_at >= self._poll_s:
            self._read_at = now  # before reading: a signal that arrives meanwhile makes it stale again
            try:
                self._state = await self._ledger.state(self._deployment)
            except LedgerUnavailable as error:
                logger.warning("going on with the last known state: %s", error)
        return self._state

    async def _record(self, view: ReplicaView, report: ReplicaReport) -> None:
        try:
            boot, last = self._recorded.get(view.name, ("", -1))
            if boot != report.boot:
                stored = await self._ledger.boot_transitions(self._deployment, view.name, report.boot)
                last = stored[-1].seq if stored else -1
                self._recorded[view.name] = (report.boot, last)
            new = [moved for moved in report.transitions if moved.seq > last]
            if not new:
                return
            if new[0].seq > last + 1:
                missed = f"{last + 1} to {new[0].seq - 1}"
                logger.warning("%s: stage changes %s were not heard of in time", view.name, missed)
            await self._ledger.record(self._deployment, view.name, report.boot, new)
        except LedgerUnavailable as error:
            logger.warning("stage changes of %s are stored later: %s", view.name, error)
            return
        self._recorded[view.name] = (report.boot, new[-1].seq)
        if any(moved.stage is Stage.IDLE for moved in new):
            self._read_at = float("-inf")  # a snapshot became ready: it may serve as a fallback
        _log_failures(view, new)

    def _send(self, view: ReplicaView, boot: str, desired: Desired) -> None:
        key = (boot, desired.snapshot, desired.generation)
        now = self._monotonic()
        *last_key, last_at = self._attempts.get(view.name, ("", "", 0, float("-inf")))
        if view.name in self._sending or (tuple(last_key) == key and now - last_at < self._poll_s):
            return
        self._attempts[view.name] = (*key, now)
        task = asyncio.create_task(self._deliver(view, desired), name=f"desired to {view.name}")
        self._sending[view.name] = task
        task.add_done_callback(lambda _: self._sent(view))

    async def _deliver(self, view: ReplicaView, desired: Desired) -> None:
        try:
            await self._replicas.send_desired(view, desired)
        except ReplicaUnavailable as error:
            logger.info("%s was not told to load %s: %s", view.name, desired.snapshot, error)

    def _sent(self, view: ReplicaView) -> None:
        del self._sending[view.name]
        self._wake.set()  # what is desired may have changed meanwhile


def _log_failures(view: ReplicaView, new: list[Transition]) -> None:
    for moved in new:
        if moved.stage is Stage.ERROR:
            logger.warning("%s failed to load snapshot %s: %s", view.name, moved.snapshot, moved.detail)
