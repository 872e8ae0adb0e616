"""Carries out what the swap machine decides: fetch, rebuild, verify, stage, commit, check.

Owns: the one attempt in work, and the gate and namespaces at the moment of the switch; what the last check found.
Always holds: one attempt at a time, never an orphaned one; whether an attempt is superseded is decided in the step in which
the newer target comes; an attempt that has reached COMMIT always switches, whoever is cancelled, and only its check may be
given up, for other weights; a check has an end; no request that is pinned to a snapshot sees a switch to another one; what was
staged in vain is dropped; the gate is open again however an attempt ends; between the engine's switch and the new namespace
nobody is admitted. A failure that leaves open what the engine serves ends the runner: its owner starts a new boot. What serves
and fails its check is loaded once more.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.errors import SnapshotError
from midstream.replica.admission import Door
from midstream.replica.check import Checker, NotSound
from midstream.replica.hints import Hints
from midstream.replica.service import Kept
from midstream.replica.swap import BEFORE_COMMIT, Event, SwapMachine
from midstream.types import (
    BASE_SNAPSHOT,
    Desired,
    Hint,
    ModelInfo,
    SnapshotCheck,
    SnapshotContent,
    Stage,
    SwapTiming,
)

log = logging.getLogger(__name__)

DRAIN_LOG_EVERY_S = 10.0


#: So many attempts in a row are dropped for a newer target; the next is finished whatever comes, or a trainer that signals
#: faster than a load takes would keep its replicas on old weights for ever.
#: After as many held ones in a row, the next keeps what it has staged and switches when this replica's turn comes.
GIVEN_UP_MAX = 2

CHECK_S_MAX = 300.0  # a check that takes longer counts as failed
QUIET_S = 0.25  # when nothing but an async switch is left to do: telling others of it must not compete with the first steps


class SnapshotSource(abc.ABC):
    """Where snapshots come from. Failures are SnapshotError; any method may be cancelled at any await."""

    @abc.abstractmethod
    async def fetch(self, desired: Desired, *, anew: bool = False) -> Path | None:
        """A local directory with the snapshot's files, complete but not yet trusted. None: what has been fetched has to be
        applied to a parent first (`rebuild`). anew: from the bucket, whatever is here. Raises SnapshotError."""

    @abc.abstractmethod
    async def rebuild(self, desired: Desired) -> Path:
        """After `fetch` returned None: the directory with the whole files. Raises SnapshotError."""

    @abc.abstractmethod
    async def verify(self, path: Path, desired: Desired) -> None:
        """Raises SnapshotError unless the files at `path` are a whole snapshot that fits the served model."""

    async def contents(self, desired: Desired) -> tuple[SnapshotContent, ...]:
        """What its files were found to be, link by link, where `desired` does not say; after `fetch` or `rebuild`."""
        return ()

    @abc.abstractmethod
    async def release(self, keep: Sequence[Desired]) -> None:
        """Local files may go, but for those of `keep` and of the chains they stand on: first what serves, always, then what
        is about to be loaded, if anything is. Called after every attempt, also a failed one."""

    @abc.abstractmethod
    async def prefetch(self, hint: Hint) -> None:
        """Fetch what will be asked for soon, so that `fetch` finds it. Never while a `fetch` runs; it is cancelled before
        one begins. Raises SnapshotError."""


class _GivenUp(Exception):
    """The attempt was given up while its last await returned or swallowed the cancellation."""


@dataclass(frozen=True)
class Files:
    """Where a snapshot's files come from. base_directory: those of the base weights, which are always here."""

    source: SnapshotSource
    hints: Hints
    base_directory: Path


class SwapRunner:
    def __init__(
        self,
        *,
        engine: Engine,
        files: Files,
        kept: Kept,
        machine: SwapMachine,
        checker: Checker,
        monotonic: Callable[[], float],
        on_change: Callable[[], None],
        on_engine_death: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._source, self._hints = files.source, files.hints
        self._base_directory = files.base_directory
        self._gate, self._pins, self._namespaces = kept.gate, kept.pins, kept.namespaces
        self._checker = checker
        self._monotonic = monotonic
        self._on_change = on_change
        self._on_engine_death = on_engine_death
        self._wake = asyncio.Event()
        self._attempt: asyncio.Task[None] | None = None
        self._given_up_in_a_row = 0
        self._held_in_vain = 0  # attempts in a row that were given up while they waited for their turn
        self._failed_check = False  # the attempt in work did
        self._holding = False  # it waits to be let go
        self._given_up = False  # the attempt in work is to end; the accepted target has to be taken up anew
        self._load_again = False  # what serves failed its check for the first time
        self._let_go = asyncio.Event()  # replaced at every accepted target
        self.quiet = False  # a switch is so near that nobody should be told of anything
        self.machine = machine
        self.info: ModelInfo | None = None  # of the engine, set before `run`
        self.last_swap: SwapTiming | None = None
        self.check: SnapshotCheck | None = None  # of what serves
        self.contents: tuple[SnapshotContent, ...] = ()  # likewise

    def desire(self, desired: Desired) -> bool:
        """Take note of a target; returns at once. False when it is already accepted."""
        if not self.machine.accept(desired):
            return False
        patience = self._held_in_vain if self._holding else self._given_up_in_a_row
        if self.machine.behind and patience < GIVEN_UP_MAX and self.machine.supersedable:
            self._give_up()
        let_go, self._let_go = self._let_go, asyncio.Event()
        let_go.set()
        self._wake.set()
        self._on_change()
        return True

    async def run(self) -> None:
        """Converge on the accepted target until cancelled; a commit under way is finished first."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.machine.behind or self._given_up or self._load_again:
                await self._one_target()

    async def _one_target(self) -> None:
        self._given_up = self._failed_check = False
        last_try, self._load_again = self._load_again and not self.machine.behind, False
        desired = self.machine.begin()
        self._on_change()
        if desired is None:
            return
        attempt = asyncio.create_task(self._load(desired), name=f"swap to {desired.snapshot}")
        self._attempt = attempt
        try:
            await self._to_its_end(attempt)
        finally:
            self._attempt = None
            self._engine.drop_staged()
            self._end_quiet()
        self._given_up_in_a_row = self._given_up_in_a_row + 1 if self._given_up else 0
        if not attempt.cancelled():
            attempt.result()
        elif not self._given_up:
            raise RuntimeError(f"the swap to {desired.snapshot} was cancelled by nobody known")
        self._load_again = self._failed_check and not last_try and not self.machine.behind
        await self._to_its_end(asyncio.create_task(self._release(), name="release of old snapshots"))

    def _give_up(self) -> None:
        """End the attempt in work, which may be ended. No await may stand between looking and cancelling.

        Cancelled once: a second time would cut short what it cleans up.
        """
        if self._attempt is not None and not self._given_up:
            self._given_up = True
            self._held_in_vain += self._holding
            self._attempt.cancel()

    async def _to_its_end(self, task: asyncio.Task[None]) -> None:
        """Returns when `task` is done. A cancellation of the runner meanwhile is passed on only then."""
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                cancelled = True
                if self.machine.stage in BEFORE_COMMIT:
                    self._give_up()
        if cancelled:
            raise asyncio.CancelledError

    async def _load(self, desired: Desired) -> None:
        """One attempt. Raises only what leaves open what the engine serves."""
        try:
            await self._steps(desired)
            await self._check(desired)
        except _GivenUp:
            log.debug("the swap to %s was given up", desired.snapshot)
        except EngineDied as error:
            self._fail(f"the engine died: {error}")
            self._on_engine_death(str(error))
        except (
            Exception
        ) as error:  # any failure before COMMIT is the snapshot's error row; while it commits, the boot's end
            in_doubt = self.machine.stage is Stage.COMMITTING and not isinstance(error, StagingFailed)
            if in_doubt or not isinstance(error, SnapshotError | StagingFailed | NotSound | OSError):
                log.exception("loading snapshot %s failed unexpectedly", desired.snapshot)
            self._failed_check = self.machine.stage is Stage.CHECKING
            self._fail(str(error) or type(error).__name__)
            if in_doubt:  # the engine may have switched or not
                raise

    def _fail(self, message: str) -> None:
        if not self._given_up:
            self.machine.fail(message)
            self._on_change()

    def _advance(self, event: Event) -> float:
        if self._given_up:
            raise _GivenUp
        self.machine.advance(event)
        self._on_change()
        return self._monotonic()

    async def _steps(self, desired: Desired) -> None:
        started = self._monotonic()
        base = desired.snapshot == BASE_SNAPSHOT  # its files are those of the model directory
        path = self._base_directory if base else await self._fetch(desired)
        fetched = rebuilt = self._advance(Event.FETCHED if path else Event.FETCHED_DELTA)
        if path is None:
            path = await self._source.rebuild(desired)
            rebuilt = self._advance(Event.REBUILT)
        if not base:
            await self._source.verify(path, desired)
        contents = () if base else await self._source.contents(desired)
        verified = self._advance(Event.VERIFIED)
        await self._engine.stage(desired.snapshot, path)
        self._begin_quiet(desired)
        staged = self._advance(Event.STAGED)
        await self._held()
        timing = await self._switch(self.machine.target or desired)  # as it was let go
        self.last_swap = msgspec.structs.replace(
            timing,
            snapshot=desired.snapshot,
            fetch_ms=(fetched - started) * 1e3,
            rebuild_ms=(rebuilt - fetched) * 1e3,
            verify_ms=(verified - rebuilt) * 1e3,
            stage_ms=(staged - verified) * 1e3,
        )
        self.check, self.contents = None, contents
        self._held_in_vain = 0
        self._advance(Event.COMMITTED)

    async def _fetch(self, desired: Desired) -> Path | None:
        """What this boot serves already is loaded again only when it was found wanting: its local files may be to blame."""
        anew = self.machine.loaded is not None and self.machine.same_files(desired)
        async with self._hints.loading(desired.snapshot):
            return await self._source.fetch(desired, anew=anew)

    def _begin_quiet(self, desired: Desired) -> None:
        if desired.transition == "ASYNC" and not self.machine.held:
            self.quiet = True
            asyncio.get_running_loop().call_later(QUIET_S, self._end_quiet)

    def _end_quiet(self) -> None:
        if self.quiet:
            self.quiet = False
            self._on_change()

    async def _held(self) -> None:
        """Wait until the target is let go. Once there is a newer one, give up; superseded too often, wait all the same: it is
        let go before the newer one."""
        self._holding = True
        try:
            while self.machine.held:
                newer = self.machine.accepted if self.machine.behind else None
                if newer is not None and not (newer.hold and self._held_in_vain >= GIVEN_UP_MAX):
                    self._given_up = True
                    self._held_in_vain += 1
                    raise _GivenUp
                await self._let_go.wait()
        finally:
            self._holding = False

    async def _switch(self, desired: Desired) -> SwapTiming:
        """Sync: close and drain first; async: wait for pinned requests; both still supersedable. Then hold newcomers while the
        engine commits."""
        try:
            if desired.transition == "SYNC":
                self._gate.set(Door.CLOSED)
                await self._drained(desired)
            else:
                await self._unpinned(desired)
                self._gate.set(Door.HELD)
            self._advance(Event.COMMIT)
            timing = await self._engine.commit(desired.snapshot)
            reset = "all" if self.machine.distrusted else desired.reset_prompt_cache
            self._namespaces.commit(reset, desired.max_cache_age)
            return timing
        finally:
            if self._gate.door in (Door.HELD, Door.CLOSED):
                self._gate.set(Door.OPEN)
            self._pins.reopen()

    async def _unpinned(self, desired: Desired) -> None:
        """Returns when no request is pinned to what serves, unless that is what comes; nobody is from here on."""
        if self.machine.same_files(desired):
            return
        if len(self._pins):
            log.info("the switch to %s waits for %d pinned requests", desired.snapshot, len(self._pins))
            self._end_quiet()
        ended = await self._pins.end(desired.snapshot)
        if ended:
            log.warning("%d pinned requests were ended for the switch to %s", ended, desired.snapshot)

    async def _check(self, desired: Desired) -> None:
        started = self._monotonic()
        assert self.info is not None
        try:
            async with asyncio.timeout(CHECK_S_MAX):
                self.check = await self._checker.check(self.info, desired.snapshot, desired.generation)
        except TimeoutError:
            raise NotSound(f"its check did not end within {CHECK_S_MAX:g} s") from None
        if self.last_swap is not None:
            check_ms = (self._monotonic() - started) * 1e3
            self.last_swap = msgspec.structs.replace(self.last_swap, check_ms=check_ms)
        self._advance(Event.CHECKED)

    async def _drained(self, desired: Desired) -> None:
        """No limit: a sync swap waits for the last request, and says so while it does."""
        while True:
            try:
                async with asyncio.timeout(DRAIN_LOG_EVERY_S):
                    await self._gate.drained()
                return
            except TimeoutError:
                log.info("the switch to %s waits for %d requests to end", desired.snapshot, self._gate.inside)

    async def _release(self) -> None:
        """After every attempt, also a failed one: what serves stays on disk, and what is about to be loaded."""
        machine = self.machine
        keep = [machine.loaded or Desired(snapshot=BASE_SNAPSHOT, generation=0)]
        if machine.accepted is not None and (machine.behind or self._given_up):
            keep.append(machine.accepted)
        try:
            await self._source.release(keep)
        except (SnapshotError, OSError) as error:
            log.warning("old snapshot files could not be released: %s", error)
