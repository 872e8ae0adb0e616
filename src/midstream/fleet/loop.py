"""The reconciler: keeps comparing what is desired with what replicas report, and acts on the difference.

Always holds:
- Level-triggered: each pass looks at the whole state, so a lost message or report only delays. Wakes coalesce. While something
  is left to be done, a pass every `poll_s` is the backstop. A reconciler with nothing to do costs nothing.
- The ledger is read again after a notice that it changed. A reconciler without such notices reads it every `poll_s`.
- Every stage change in a report is stored in the ledger once, in order within a boot. That includes changes that happened
  while this process was down, if the report still has them. When a boot ends while it loads a snapshot, that is stored
  before anything of the next boot is.
- What a replica serves is the meaning of its name from then on. The ledger learns the snapshot's bytes, and, once all replicas
  agree, the weights that engines make of them.
- The ledger knows a replica with other weights than that, or than the others, before the replica is asked to load them again.
- A replica may have taken up a newer signal from another gateway than this one has read. It gets no message before
  the ledger was read again: an older signal would undo the newer one.
- A deployment that is paused in the ledger is paused on every replica (pauses.py), on those that leave, too.
- What is kept here can be thrown away: a restart sends a message again, or restarts a wait. No failure of a pass ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from midstream.core.config import SwapOrder
from midstream.core.errors import NotFound, ReplicaUnavailable
from midstream.core.reports import Reported
from midstream.core.served_names import POLICY_INFIX
from midstream.core.types import Desired, Pause, SnapshotContent, Stage, Transition
from midstream.fleet.agree import findings, settled, standing_of
from midstream.fleet.pauses import Pauses
from midstream.fleet.reconcile import (
    BACKOFF,
    LOSSES_MAX,
    Delivered,
    Stuck,
    decide,
    failure,
    loss,
    lost_boots,
    serves,
    target_of,
    waits_staged,
)
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.signal_order import KEPT, SignalOrder
from midstream.fleet.switch_turns import SwitchTurns
from midstream.fleet.view import ReplicaView
from midstream.ledger import BootHistory, DeploymentState, Ledger, LedgerUnavailable

logger = logging.getLogger(__name__)


class Reconciler:
    """One deployment's replicas against its ledger. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        replica_set: ReplicaSet,
        deployment: str,
        *,
        swap_order: SwapOrder = "together",
        poll_s: float = 1.0,
        signalled_at_once: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deployment`: its full name; the ledger must have it. `poll_s` is also the pause before a message is repeated.

        signalled_at_once: its owner calls `signalled` after each change of the ledger that concerns the deployment.
        """
        #: None: each replica switches when it is ready.
        self._turns = SwitchTurns(monotonic) if swap_order == "one-by-one" else None
        self._ledger = ledger
        self._replicas = replica_set
        self._deployment = deployment
        self._poll_s = poll_s
        self._signalled_at_once = signalled_at_once
        # The last pass left something to be done later, or could not store or read something.
        self._due = True
        self._monotonic = monotonic
        self._state: DeploymentState | None = None
        self._read_at = float("-inf")
        # The last reading did not fail.
        self._is_read = True
        # The highest generation of any report so far, and of the reports before the last read.
        self._reported = self._covered = 0
        self._wake = asyncio.Event()
        # Replica to its boot and the last sequence number stored.
        self._recorded: dict[str, tuple[str, int]] = {}
        # Replica to its boot, what was sent, and when.
        self._attempts: dict[str, tuple[str, Desired, float]] = {}
        # By replica: what it was sent last.
        self._delivered: dict[str, Delivered] = {}
        self._stuck: dict[str, Stuck] = {}
        # Replica to its boot and the contents stored.
        self._learnt: dict[str, tuple[str, tuple[SnapshotContent, ...]]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._pauses = Pauses(ledger, deployment, poll_s, monotonic)
        # Kept as the ledger has it.
        self.order = SignalOrder()
        # The order is read up to this generation.
        self._order_read = 0
        replica_set.subscribe(self.wake)

    def __repr__(self) -> str:
        desired = self._state.desired if self._state else None
        return f"<Reconciler {self._deployment} desired={desired} sending={len(self._sending)}>"

    def _label(self, replica: str) -> str:
        """The name of the replica in a line of the log, with the policy that the line is about."""
        policy = self._deployment.partition(POLICY_INFIX)[2]
        return f"{replica}, policy {policy}" if policy else replica

    def disagrees(self, report: Reported) -> bool:
        """Whether the replica's weights differ from what the ledger or other replicas have, as far as was read."""
        return self._state is not None and standing_of(self._state, report) is not None

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
                try:
                    await self.reconcile_once()
                except NotFound:
                    # Another gateway removed the row. Whoever reads all rows ends this reconciler.
                    logger.info(
                        "%s is in the ledger no more",
                        self._deployment,
                        extra={"deployment": self._deployment},
                    )
                except Exception:
                    # Whatever the error is, the next pass looks at everything again.
                    self._due = True
                    logger.exception(
                        "reconciling failed for %s; trying again in %g s", self._deployment, self._poll_s
                    )
                    await asyncio.sleep(self._poll_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._sending.values():
                task.cancel()

    def _pause_s(self) -> float | None:
        """Until the next pass, if nothing wakes it before; None: nothing is to be done until then."""
        return self._poll_s if self._replicas.at_work and (self._due or not self._signalled_at_once) else None

    async def reconcile_once(self) -> None:
        """One pass over all replicas. Messages are sent by tasks of their own: a slow replica holds up no other."""
        self._due = False
        await self._reconcile()
        switches = self._turns is not None and self._turns.current is not None
        waits = self._stuck or self._sending or switches or self._pauses.current.mode is not None
        self._due |= bool(waits) or self._read_at == float("-inf")

    async def _reconcile(self) -> None:
        self._forget_leavers({view.name for view in self._replicas.views})
        holders = self._replicas.holders
        for view in self._replicas.views:
            # It may go meanwhile.
            report = view.report
            if report is not None and (view in holders or view.name in self._recorded):
                await self._record(view, report)
                await self._learn_contents(report)
        if not self._replicas.at_work:
            return
        state = await self._current_state()
        if state is None:
            return
        state = await self._judged(state)
        if await self._pauses.end_if_old(state.pause):
            self.signalled()
        self._due |= await self._pauses.outdo((*self._replicas.views, *self._replicas.leaving))
        holders = self._replicas.holders
        retries = {view.name: await self._retry_generation(state, view) for view in holders}
        self._pass_the_turn(state, retries)
        for view in self._replicas.holders:
            turns = self._turns if view.admitted else None
            turn = None if turns is None else turns.may_switch(view.name)
            action = decide(state, view.report, view.admitted, retries.get(view.name, 0), turn)
            admit = action.admit and (view.admitted or self._pauses.lets_join(view))
            if admit and not view.admitted:
                snapshot = None if view.report is None else view.report.own.snapshot
                logger.info(
                    "%s joins with snapshot %s",
                    self._label(view.name),
                    snapshot,
                    extra=_named(view, snapshot),
                )
            view.admitted = admit
            if view.report is not None:
                failed = (
                    state.desired is not None
                    and failure(state, view.report, state.desired, retries.get(view.name, 0)) is not None
                )
                self._replicas.judged(view, failed=failed)
                # What was judged lapses: somebody has to look again.
                self._due |= failed
                self._send_pause(view)
                send = action.send or self._replicas.with_new_peers(view, state.desired)
                self._due |= send is not None or self._pauses.lags(view)
                if send is not None and view.report.own.generation <= self._covered:
                    seen = msgspec.structs.replace(send, seen=view.report.own.generation)
                    self._send(view, view.report.boot, seen)
        for view in self._replicas.leaving:
            self._send_pause(view)
            self._due |= self._pauses.lags(view)

    def _forget_leavers(self, members: set[str]) -> None:
        """A replica that left was stopped on purpose: when one of its name comes, it is not the same that died."""
        self._pauses.forget_leavers(members | {view.name for view in self._replicas.leaving})
        for known in (
            self._recorded,
            self._attempts,
            self._delivered,
            self._stuck,
            self._learnt,
        ):
            for name in known.keys() - members:
                del known[name]

    async def _judged(self, state: DeploymentState) -> DeploymentState:
        """The state after the ledger has stored the findings of the replicas' checks."""
        reports = [view.report for view in self._replicas.holders if view.report is not None]
        found = findings(state, reports, [report.replica for report in reports if self._stays(state, report)])
        if not found:
            return await self._learn_weights(state, reports)
        floor = max(report.own.generation for report in reports)
        for finding in found:
            if finding.verdict != "agreed":
                logger.error(
                    "%s (%s): %s",
                    self._label(finding.replica),
                    finding.verdict,
                    finding.detail,
                    extra={"replica": finding.replica},
                )
            try:
                if finding.verdict == "reload":
                    await self._ledger.disagree(self._deployment, finding, floor)
                else:
                    await self._ledger.settle_disagreement(self._deployment, finding)
            except LedgerUnavailable as error:
                self._later(
                    "what is known of the weights of %s is stored later: %s",
                    self._label(finding.replica),
                    error,
                )
        self._read_at = float("-inf")
        return await self._current_state() or state

    async def _learn_contents(self, report: Reported) -> None:
        known = (report.boot, report.own.contents)
        if not report.own.contents or self._learnt.get(report.replica) == known:
            return
        try:
            for found in report.own.contents:
                await self._ledger.learn_content(self._deployment, found)
        except LedgerUnavailable as error:
            self._later("what %s found in its files is stored later: %s", self._label(report.replica), error)
            return
        self._learnt[report.replica] = known
        self._read_at = float("-inf")

    async def _learn_weights(self, state: DeploymentState, reports: Sequence[Reported]) -> DeploymentState:
        new = settled(state, reports)
        if not new:
            return state
        try:
            for check in new:
                await self._ledger.learn_weights(self._deployment, check)
        except LedgerUnavailable as error:
            self._later("the digests of %s are stored later: %s", state.snapshot, error)
        self._read_at = float("-inf")
        return state

    def _stays(self, state: DeploymentState, report: Reported) -> bool:
        """Whether there is nothing else for it to load."""
        stuck = self._stuck.get(report.replica)
        target = target_of(state, report, stuck.generation if stuck else 0)
        return report.own.stage in (Stage.IDLE, Stage.ERROR) and target is None

    def _pass_the_turn(self, state: DeploymentState, retries: dict[str, int]) -> None:
        if self._turns is None:
            return
        in_rotation = [
            view.report for view in self._replicas.views if view.usable and view.report is not None
        ]
        staged = {r.replica for r in in_rotation if waits_staged(state, r, retries.get(r.replica, 0))}
        self._turns.look(in_rotation, staged)

    async def _retry_generation(self, state: DeploymentState, view: ReplicaView) -> int:
        """The generation under which this replica is asked again for what it failed on, 0 while it is not."""
        if state.desired is None:
            return 0
        stuck = self._stuck.get(view.name)
        if stuck is None or stuck.signal != state.desired.generation:
            # No new signal makes up for lost boots.
            worn = len(lost_boots(state, view.name)) >= LOSSES_MAX
            stuck = replace(stuck if stuck and worn else Stuck(0), signal=state.desired.generation)
        if view.report is None:
            return stuck.generation
        if not decide(state, view.report, view.admitted, stuck.generation).stuck:
            if serves(state, view.report, state.desired):
                self._stuck.pop(view.name, None)
            return stuck.generation
        now = self._monotonic()
        if stuck.due is None:
            extra = len(lost_boots(state, view.name)) - LOSSES_MAX
            delay_s = BACKOFF.pause_s(max(stuck.retries, extra) + 1)
            logger.warning(
                "%s failed on %s; asking again in %g s",
                self._label(view.name),
                state.snapshot,
                delay_s,
                extra=_named(view, state.snapshot),
            )
            stuck = replace(stuck, due=now + delay_s)
        elif now >= stuck.due:
            try:
                generation = await self._ledger.new_generation(self._deployment, view.report.own.generation)
            except LedgerUnavailable as error:
                self._later("%s is asked again later: %s", self._label(view.name), error)
            else:
                stuck = replace(stuck, retries=stuck.retries + 1, generation=generation, due=None)
        self._stuck[view.name] = stuck
        return stuck.generation

    async def settle(self) -> None:
        """Wait until every message under way was taken or refused."""
        await asyncio.gather(*self._sending.values())

    async def _current_state(self) -> DeploymentState | None:
        now = self._monotonic()
        reports = [view.report.own.generation for view in self._replicas.views if view.report is not None]
        newest = max(reports, default=0)
        again_s = float("inf") if self._signalled_at_once and self._is_read else self._poll_s
        if newest > self._reported or now - self._read_at >= again_s:
            self._reported = newest
            # Set before reading: a signal that arrives meanwhile makes it stale again.
            self._read_at, self._is_read = now, False
            try:
                self._state = await self._ledger.state(self._deployment)
                self._covered = newest
                await self._learn_order(self._state)
                self._is_read = True
            except LedgerUnavailable as error:
                self._later("going on with the last known state of %s: %s", self._deployment, error)
        return self._state

    def _later(self, message: str, *about: object) -> None:
        """The ledger cannot be used now: the next pass tries again."""
        self._due = True
        logger.warning(message, *about)

    async def _learn_order(self, state: DeploymentState) -> None:
        generation = 0 if state.desired is None else state.desired.generation
        if generation == self._order_read:
            return
        reset, signals = await self._ledger.signalled(self._deployment, self._order_read, KEPT)
        self.order.learn(signals, reset)
        self._order_read = generation
        self._replicas.look_again()

    async def _record(self, view: ReplicaView, report: Reported) -> None:
        try:
            boot, last = self._recorded.get(view.name, ("", -1))
            if boot != report.boot:
                last = (await self._begin_boot(view.name, boot or None, report.boot)).last_seq
                self._recorded[view.name] = (report.boot, last)
            new = [moved for moved in report.own.transitions if moved.seq > last]
            if not new:
                return
            if new[0].seq > last + 1:
                missed = f"{last + 1} to {new[0].seq - 1}"
                logger.warning(
                    "%s: stage changes %s were not heard of in time", self._label(view.name), missed
                )
            await self._ledger.record(self._deployment, view.name, report.boot, new)
        except LedgerUnavailable as error:
            self._later("stage changes of %s are stored later: %s", self._label(view.name), error)
            return
        self._recorded[view.name] = (report.boot, new[-1].seq)
        for moved in new:
            if moved.stage in (Stage.IDLE, Stage.FETCHING):
                # A snapshot became ready, or its check was given up for another: it may serve as a fallback.
                self._read_at = float("-inf")
            if moved.stage is Stage.IDLE:
                self.order.ready(moved.snapshot, moved.generation)
        _log_stages(view, self._label(view.name), new)

    async def _begin_boot(self, replica: str, ended: str | None, boot: str) -> BootHistory:
        """What the ledger has of `boot`; when it is new, the boot before it is closed first.

        ended: the boot this process saw before, if any.
        """
        history = await self._ledger.boot_history(self._deployment, replica, boot, ended)
        if history.previous_boot is None:
            return history
        lost = loss(replica, history, self._delivered.get(replica), watched=ended is not None)
        if lost is not None:
            await self._ledger.record_death(self._deployment, history.previous_boot, lost.death, lost.seq)
            self._read_at = float("-inf")
            logger.warning(
                "%s lost a boot to snapshot %s: %s",
                self._label(replica),
                lost.death.identity,
                lost.death.detail,
            )
        return history

    def _send(self, view: ReplicaView, boot: str, desired: Desired) -> None:
        now = self._monotonic()
        *last, last_at = self._attempts.get(view.name, ("", None, float("-inf")))
        if view.name in self._sending or (last == [boot, desired] and now - last_at < self._poll_s):
            return
        self._attempts[view.name] = (boot, desired, now)
        self._begin(view.name, self._deliver(view, boot, desired))

    def _begin(self, message: str, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending, name=f"message to {message}")
        self._sending[message] = task
        task.add_done_callback(lambda _: self._sent(message))

    def _send_pause(self, view: ReplicaView) -> None:
        message = f"{view.name}, pause"
        if message not in self._sending and self._pauses.due(view):
            self._begin(message, self._tell_pause(view, self._pauses.current))

    async def _tell_pause(self, view: ReplicaView, pause: Pause) -> None:
        await self._tell(view, self._replicas.send_pause(view, pause), "of a pause", None)

    async def _deliver(self, view: ReplicaView, boot: str, desired: Desired) -> None:
        message = self._replicas.send_desired(view, desired)
        if await self._tell(view, message, f"to load {desired.snapshot}", desired.snapshot):
            known = (desired.snapshot, desired.generation, desired.seen or 0)
            self._delivered[view.name] = Delivered(boot, *known)

    async def _tell(
        self, view: ReplicaView, message: Coroutine[Any, Any, None], what: str, snapshot: str | None
    ) -> bool:
        """Send a replica a message. Returns whether it arrived. The next pass compares, and sends what did not arrive."""
        label = self._label(view.name)
        try:
            await message
        except ReplicaUnavailable as error:
            logger.info("%s did not get %s: %s", label, what, error, extra=_named(view, snapshot))
        # Any other error is a fault of this process. It is logged whole.
        except Exception:
            logger.exception("%s did not get %s", label, what, extra=_named(view, snapshot))
        else:
            return True
        return False

    def _sent(self, message: str) -> None:
        del self._sending[message]
        # The desired snapshot may have changed meanwhile.
        self._wake.set()


def _named(view: ReplicaView, snapshot: str | None) -> dict[str, str | None]:
    """What a line of the log says beside its message."""
    return {"replica": view.name, "snapshot": snapshot}


def _log_stages(view: ReplicaView, label: str, new: list[Transition]) -> None:
    for moved in new:
        named = _named(view, moved.snapshot)
        if moved.stage is Stage.ERROR:
            logger.warning(
                "%s failed to load snapshot %s: %s", label, moved.snapshot, moved.detail, extra=named
            )
        elif moved.stage is Stage.IDLE:
            logger.info("%s serves snapshot %s", label, moved.snapshot, extra=named)
