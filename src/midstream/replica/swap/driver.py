"""Does the I/O of swaps: fetch, rebuild, verify, stage, switch, check. What happens next is for the tables to say.

Owns: the task of the one attempt in work, and the gate, the pins and the namespaces at the moment of the switch.
Always holds: one attempt at a time, none of them orphaned; whether an attempt is superseded is decided in the step in which the
newer target comes; a switch that has begun is finished, whoever is cancelled; no pinned request sees another snapshot than its
own; an attempt's staged weights are dropped when it ends; however an attempt ends, the gate is open again unless what serves
failed its check; between the engine's switch and the new namespace no request is admitted, and none under weights that were
neither proved before the switch nor checked after it. A failure that leaves open what the engine serves ends the driver,
and its owner starts a new boot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, SnapshotNotFinite
from midstream.core.types import (
    BASE_SNAPSHOT,
    Desired,
    ModelInfo,
    SnapshotCheck,
    SnapshotContent,
    SwapTiming,
)
from midstream.engine.base import EngineDied, Slot, StagingFailed
from midstream.replica.gate import Door, Gate
from midstream.replica.namespaces import Namespaces, event_of
from midstream.replica.pins import Pins
from midstream.replica.swap.ahead import Ahead
from midstream.replica.swap.attempts import AttemptAction, AttemptPhase, Attempts
from midstream.replica.swap.checker import Checker, NotSound, same_weights
from midstream.replica.swap.history import SwapHistory
from midstream.replica.swap.meanings import Meanings
from midstream.replica.swap.source import Files
from midstream.replica.swap.table import SwapEvent, SwapMachine
from midstream.replica.swap.ties import NO_TIES, Ties

log = logging.getLogger(__name__)

DRAIN_LOG_EVERY_S = 10.0
#: Timings of swaps that a report has.
SWAPS_REPORTED = 4
#: A check that takes longer has failed.
CHECK_S_MAX = 300.0
#: From STAGED on, the replica reports no changes for so long: reports would compete with the engine's steps around the switch.
QUIET_S = 0.25
_EXPECTED = (SnapshotError, StagingFailed, NotSound, EngineDied, OSError)


def _called(desired: Desired) -> str:
    """In a line of the log."""
    return f"{desired.snapshot} of policy {desired.policy}" if desired.policy else desired.snapshot


class _GivenUp(Exception):
    """The attempt was given up, and what it waited for returned or swallowed the cancellation."""


@dataclass(frozen=True)
class Entrance:
    """What decides which requests reach the engine, and with which cache."""

    gate: Gate
    pins: Pins
    namespaces: Namespaces


@dataclass(frozen=True)
class SwapCallbacks:
    """What the driver calls. change: after every change of the report. settled: as each attempt ends. death: why
    the engine is gone. swapped: how each attempt went. served: behind a switch, by which files."""

    change: Callable[[], None]
    settled: Callable[[], None]
    death: Callable[[str], None]
    swapped: Callable[[SwapHistory], None] = lambda history: None
    served: Callable[[str, Path], None] = lambda snapshot, directory: None


class SwapDriver:
    """Drives the swaps of one boot. machine: its table of stages."""

    def __init__(
        self,
        *,
        engine: Slot,
        files: Files,
        entrance: Entrance,
        machine: SwapMachine,
        checker: Checker,
        monotonic: Callable[[], float],
        callbacks: SwapCallbacks,
    ) -> None:
        self._engine = engine
        self._files = files
        self._gate, self._pins, self._namespaces = entrance.gate, entrance.pins, entrance.namespaces
        self._checker = checker
        self._monotonic = monotonic
        self._on_change, self._on_settled = callbacks.change, callbacks.settled
        self._on_engine_death, self._on_swapped = callbacks.death, callbacks.swapped
        self._on_served = callbacks.served
        self._attempts = Attempts(machine, proved=engine.proves_staged)
        self._attempt: asyncio.Task[None] | None = None
        #: Of the attempt in work.
        self._history: SwapHistory
        self._wake = asyncio.Event()
        self._turn = asyncio.Event()
        #: A switch is so near that the replica should report no changes.
        self.quiet = False
        self._quiet_ends: asyncio.TimerHandle | None = None
        self._at_work = False
        self.machine = machine
        #: Of the engine; set before `run`, as `ties` are.
        self.info: ModelInfo | None = None
        self.ties: Ties = NO_TIES
        self._swaps: deque[SwapTiming] = deque(maxlen=SWAPS_REPORTED)
        #: Of the serving weights: their check, and what their files were found to be.
        self.check: SnapshotCheck | None = None
        #: Of the weights that served before.
        self._check_before: SnapshotCheck | None = None
        self.contents: tuple[SnapshotContent, ...] = ()
        # Reads the weights behind their check, which is the next.
        self._reading: asyncio.Task[None] | None = None
        self._read: SnapshotCheck | None = None
        self.meanings = Meanings()

    def __repr__(self) -> str:
        return f"SwapDriver({self.machine!r}, {self._attempts!r})"

    @property
    def swaps(self) -> tuple[SwapTiming, ...]:
        """The last ones of this boot, SWAPS_REPORTED at most, oldest first."""
        return tuple(self._swaps)

    @property
    def resting(self) -> bool:
        """True while there is nothing to load and no file to release."""
        return not (self._at_work or self._attempts.due)

    def desire(self, desired: Desired) -> bool:
        """Take note of a target, and of other replicas; returns at once. False when the target is already accepted."""
        self._files.source.chains.meet(desired.peers)
        if not self.machine.accept(desired):
            return False
        self._act(self._attempts.signalled())
        self._wake.set()
        self._on_change()
        return True

    async def run(self) -> None:
        """Converge on the accepted target until cancelled; a switch under way is finished first."""
        self._read_weights()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._attempts.due:
                    self._at_work = True
                    await self._next_attempt()
                if self._at_work:
                    self._at_work = False
                    self._on_change()
        finally:
            self._stop_reading()

    async def _next_attempt(self) -> None:
        desired = self._attempts.begin()
        self._on_change()
        if desired is None:
            return
        self._turn.clear()
        attempt = asyncio.create_task(self._load(desired), name=f"swap to {desired.snapshot}")
        self._attempt = attempt
        try:
            await self._run_to_end(attempt)
        finally:
            self._engine.drop_staged()
            self._end_quiet()
            self._on_settled()
        if not attempt.cancelled():
            attempt.result()
        self._attempts.ended()
        await self._run_to_end(asyncio.create_task(self._release(), name="release of old snapshots"))

    async def _run_to_end(self, task: asyncio.Task[None]) -> None:
        """Returns when `task` is done. A cancellation of the driver meanwhile is passed on only then."""
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                cancelled = True
                self._act(self._attempts.stopped())
        if cancelled:
            raise asyncio.CancelledError

    def _act(self, action: AttemptAction) -> None:
        if action is AttemptAction.CANCEL and self._attempt is not None:
            self._attempt.cancel()
        elif action is AttemptAction.GO_ON:
            self._turn.set()

    def _made(self, progress: SwapEvent) -> float:
        """The attempt has made progress. Returns the time, in seconds. Raises _GivenUp."""
        if self._attempts.progress(progress) is AttemptAction.ABANDON:
            raise _GivenUp
        self._on_change()
        now = self._monotonic()
        self._history.marks.append((progress, now))
        return now

    async def _load(self, desired: Desired) -> None:
        """One attempt. Raises only what leaves open what the engine serves."""
        history = self._history = SwapHistory(desired, self._monotonic())
        try:
            await self._prepare_and_switch(desired)
            await self._check(desired)
            history.outcome = self._compare(desired)
        except _GivenUp:
            log.debug("the swap to %s was given up", _called(desired))
        except Exception as error:
            # Any failure before the switch becomes the target's error.
            died = isinstance(error, EngineDied)
            message = f"the engine died: {error}" if died else str(error) or type(error).__name__
            action = self._attempts.failed(error, message)
            if action is AttemptAction.END_BOOT or not isinstance(error, _EXPECTED):
                log.exception("loading snapshot %s failed unexpectedly", _called(desired))
            if action is not AttemptAction.NOTHING:
                history.outcome, history.error = "failed", message
                self._engine.unfit(desired.snapshot)
                self._on_change()
            if died:
                self._on_engine_death(str(error))
            if action is AttemptAction.END_BOOT:
                raise
        finally:
            self._open()
            self._read_weights()
            history.ended_s = self._monotonic()
            if history.outcome == "superseded" and self._attempts.phase is AttemptPhase.STOPPED:
                history.outcome = "stopped"
            self._on_swapped(history)

    async def _prepare_and_switch(self, desired: Desired) -> None:
        source, started = self._files.source, self._monotonic()
        base = desired.snapshot == BASE_SNAPSHOT
        path = self._files.base_directory if base else await self._fetch(desired)
        fetched = rebuilt = self._made(SwapEvent.FETCHED if path else SwapEvent.FETCHED_DELTA)
        if path is None:
            path = await source.rebuild(desired, Ahead(self._engine, desired.snapshot))
            rebuilt = self._made(SwapEvent.REBUILT)
        if not base:
            await self._verify(path, desired)
        contents = () if base else await source.contents(desired)
        verified = self._made(SwapEvent.VERIFIED)
        await self.ties.before_stage(desired)
        await self._engine.stage(desired.snapshot, path)
        await source.check_unchanged()
        self._begin_quiet(desired)
        staged = self._made(SwapEvent.STAGED)
        await self._wait_for_turn()
        try:
            await self.ties.before_switch(desired)
            # A target may be let go with other fields than it came with.
            timing = self._history.timing = await self._switch(self.machine.target or desired, contents)
        finally:
            self.ties.over()
        self._on_served(desired.snapshot, path)
        done = msgspec.structs.replace(
            timing,
            snapshot=desired.snapshot,
            generation=desired.generation,
            fetch_ms=(fetched - started) * 1e3,
            rebuild_ms=(rebuilt - fetched) * 1e3,
            verify_ms=(verified - rebuilt) * 1e3,
            stage_ms=(staged - verified) * 1e3,
        )
        self._swaps.append(done)
        self._check_before, self.check, self.contents = self.check, None, contents
        self._made(SwapEvent.COMMITTED)

    async def _fetch(self, desired: Desired) -> Path | None:
        """A snapshot that this boot serves is loaded again because of a failed check: the local files may be to blame."""
        refetch = self.machine.loaded is not None and self.machine.same_files(desired)
        async with self._files.hints.loading(desired.snapshot):
            ahead = Ahead(self._engine, desired.snapshot)
            return await self._files.source.fetch(desired, refetch=refetch, making=ahead)

    async def _verify(self, path: Path, desired: Desired) -> None:
        """Files that were here, and may be damaged, are fetched once more. So what was published is not blamed for them."""
        source = self._files.source
        try:
            await source.verify(path, desired)
        except (SnapshotCorrupt, SnapshotMissing, SnapshotNotFinite) as error:
            if not await source.blames_itself(path):
                raise
            log.warning("%s is fetched once more, as files here are damaged: %s", _called(desired), error)
            await source.verify(await self._fetch(desired) or await source.rebuild(desired), desired)

    async def _wait_for_turn(self) -> None:
        if self._attempts.phase is AttemptPhase.HELD:
            self._act(self._attempts.signalled())
            await self._turn.wait()

    def _open(self) -> None:
        """Newcomers may enter, unless what serves failed its check."""
        self._move_door(Door.OPEN if self.machine.sound else Door.UNSOUND)

    def _move_door(self, door: Door) -> None:
        """A gate that is down stays so: the boot is over, or the replica takes no more requests."""
        if self._gate.door is not Door.DOWN:
            self._gate.set(door)

    async def _switch(self, desired: Desired, contents: tuple[SnapshotContent, ...]) -> SwapTiming:
        """Sync: close the gate and wait for all requests. Async: wait for pinned ones in the way. Then hold newcomers until
        the engine has switched, and where it could not prove the weights before, until they are checked."""
        try:
            if desired.transition == "SYNC":
                self._move_door(Door.CLOSED)
                if self._engine.awaits_commit and self._gate.inside:
                    raise StagingFailed("a SYNC switch waits for requests, which wait for it in vLLM")
                await self._drained(desired)
            else:
                await self._unpinned(desired)
                self._move_door(Door.HELD)
            self._made(SwapEvent.COMMIT)
            # As the gateway asked for it last: a message that lets it go may say more than the one that asked for it.
            desired = self.machine.target or desired
            self._pins.switching(self.machine, desired)
            overwritten = self.meanings.switching(desired, contents, self.machine)
            self._engine.announce(self.meanings.coming(desired.snapshot), overwritten)
            self._stop_reading()
            timing = await self._engine.commit(desired.snapshot)
            self.meanings.switched()
            reset = self.machine.reset_of(desired)
            self._namespaces.commit(reset, desired.max_cache_age, event_of(desired))
            if reset == "all":
                self._engine.abandon_kv()
            self.ties.switched(desired, reset)
            if self._engine.proves_staged:
                self._open()
            return timing
        finally:
            self._pins.reopen()

    async def _drained(self, desired: Desired) -> None:
        """Waits without a limit until no request is inside, and says so while it does."""
        while True:
            try:
                async with asyncio.timeout(DRAIN_LOG_EVERY_S):
                    await self._gate.drained()
                return
            except TimeoutError:
                log.info("the switch to %s waits for %d requests to end", _called(desired), self._gate.inside)

    async def _unpinned(self, desired: Desired) -> None:
        """Waits until no pinned request is in the way of the target; no new one is from here on."""
        if self.machine.same_files(desired):
            return
        waited_for = self._pins.in_the_way(desired)
        if waited_for:
            log.info("the switch to %s waits for %d pinned requests", _called(desired), waited_for)
            self._end_quiet()
        ended = await self._pins.end(desired, at_once=self._engine.awaits_commit)
        if ended:
            log.warning("%d pinned requests were ended for the switch to %s", ended, _called(desired))

    async def _check(self, desired: Desired) -> None:
        # The engine may be paused, and unable to check anything in a pause.
        await self._engine.until_computing()
        started = self._monotonic()
        try:
            self.check = await self._checked(desired)
        except EngineDied:
            raise
        # Whatever ended the check, the weights were not proved: nothing that waits for the proof is let go.
        except Exception:
            self._engine.settle(desired.snapshot, sound=False)
            raise
        self._engine.settle(desired.snapshot, sound=True)
        if self._swaps:
            check_ms = (self._monotonic() - started) * 1e3
            self._swaps[-1] = msgspec.structs.replace(self._swaps[-1], check_ms=check_ms)
        self._made(SwapEvent.CHECKED)

    @property
    def _proved_before(self) -> SnapshotCheck | None:
        """The check of the weights before, if the digest of the next ones may come behind their check.

        A boot that serves its first snapshot may be about to join the others. And of two snapshots in a row, one is read.
        """
        before = self._check_before
        return None if before is None or before.unread or before.snapshot == BASE_SNAPSHOT else before

    def _compare(self, desired: Desired) -> Literal["ready", "unchanged"]:
        """Says if the trainer sent the weights that served before under another name. It may well send the base weights."""
        same = "" if self.check is None else same_weights(self.check, self._check_before)
        if same and self._swaps:
            self._swaps[-1] = msgspec.structs.replace(self._swaps[-1], same_weights_as=same)
        if not same or same == BASE_SNAPSHOT:
            return "ready"
        log.warning(
            "%s has the same weights as %s, which served before: does the trainer send what it trains?",
            _called(desired),
            same,
        )
        return "unchanged"

    def _compare_again(self, check: SnapshotCheck) -> None:
        """A digest has come. Weights that the canary cannot tell apart may differ."""
        swap = self._swaps[-1] if self._swaps else None
        if swap is None or not swap.same_weights_as or same_weights(check, self._check_before):
            return
        log.info(
            "%s has other weights than %s, as their digests differ", check.snapshot, swap.same_weights_as
        )
        self._swaps[-1] = msgspec.structs.replace(swap, same_weights_as="")

    def _read_weights(self) -> None:
        """Where the check could not wait for it, get the digest of what serves. The next switch ends that."""
        check = self.check
        if self._reading is not None and not self._reading.done() and self._read is check:
            # An attempt ended before its switch.
            return
        self._stop_reading()
        if check is None or not check.unread:
            return

        async def read() -> None:
            try:
                digest = await self._checker.digest()
            except EngineDied:
                return
            if self.check is check:
                self.check = msgspec.structs.replace(check, weights=digest, unread=False)
                self._compare_again(self.check)
                self._on_change()

        self._read = check
        self._reading = asyncio.create_task(read(), name=f"digest of {check.snapshot}")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _checked(self, desired: Desired) -> SnapshotCheck:
        """Raises NotSound, EngineDied.

        An engine that proves weights before they serve computes the check before all else, so one that is late has failed.
        Elsewhere a check waits behind other requests, and a pause may begin in it. That says nothing of the weights: the check
        begins again. An engine that hangs is noticed by its own watch.
        """
        assert self.info is not None
        while True:
            try:
                async with asyncio.timeout(CHECK_S_MAX):
                    return await self._checker.check(
                        self.info, desired.snapshot, desired.generation, before=self._proved_before
                    )
            except TimeoutError:
                late = f"its check did not end within {CHECK_S_MAX:g} s"
                if self._engine.proves_staged:
                    raise NotSound(late) from None
                log.warning("%s: %s; it begins again", _called(desired), late)
                await self._engine.until_computing()

    async def _release(self) -> None:
        """Lets the source delete files. The serving snapshot and the one to be loaded next stay."""
        machine = self.machine
        keep = [machine.loaded or Desired(snapshot=BASE_SNAPSHOT, generation=0)]
        if machine.accepted is not None and (machine.behind or self._attempts.phase is AttemptPhase.NEXT):
            keep.append(machine.accepted)
        try:
            await self._files.source.release(keep)
        except (SnapshotError, OSError) as error:
            log.warning("old snapshot files could not be released: %s", error)

    def _begin_quiet(self, desired: Desired) -> None:
        if desired.transition == "ASYNC" and not self.machine.held:
            self.quiet = True
            self._quiet_ends = asyncio.get_running_loop().call_later(QUIET_S, self._end_quiet)

    def _end_quiet(self) -> None:
        if self._quiet_ends is not None:
            self._quiet_ends.cancel()
            self.quiet, self._quiet_ends = False, None
            self._on_change()
