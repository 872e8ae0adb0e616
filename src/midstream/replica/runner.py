"""Carries out what the swap machine decides: fetch, verify, stage, commit.

Owns: the one attempt in work, and the gate and namespaces at the moment of the switch.
Always holds: one attempt at a time; a newer target cancels an attempt that has not reached COMMIT and waits for one that
has; the gate is open again however an attempt ends; between the engine's switch and the new namespace nobody is admitted.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.errors import SnapshotError
from midstream.replica.admission import Door, Gate
from midstream.replica.namespaces import Namespaces
from midstream.replica.swap import Event, SwapMachine
from midstream.types import BASE_SNAPSHOT, Desired, Stage, SwapTiming

log = logging.getLogger(__name__)


class SnapshotSource(abc.ABC):
    """Where snapshots come from. Failures are SnapshotError; any method may be cancelled at any await."""

    @abc.abstractmethod
    async def fetch(self, desired: Desired) -> Path:
        """A local directory with the snapshot's files, complete but not yet trusted. Raises SnapshotError."""

    @abc.abstractmethod
    async def verify(self, path: Path) -> None:
        """Raises SnapshotError unless the files at `path` are a whole snapshot that fits the served model."""

    @abc.abstractmethod
    async def release(self, keep: set[str]) -> None:
        """Local files of every snapshot but `keep` may go."""


class SwapRunner:
    def __init__(
        self,
        *,
        engine: Engine,
        source: SnapshotSource,
        gate: Gate,
        namespaces: Namespaces,
        machine: SwapMachine,
        base_directory: Path,
        monotonic: Callable[[], float],
        on_change: Callable[[], None],
        on_engine_death: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._source = source
        self._gate = gate
        self._namespaces = namespaces
        self._base_directory = base_directory
        self._monotonic = monotonic
        self._on_change = on_change
        self._on_engine_death = on_engine_death
        self._wake = asyncio.Event()
        self.machine = machine
        self.last_swap: SwapTiming | None = None

    def desire(self, desired: Desired) -> bool:
        """Take note of a target; returns at once. False when it is already accepted."""
        if not self.machine.accept(desired):
            return False
        self._wake.set()
        self._on_change()
        return True

    async def run(self) -> None:
        """Converge on the accepted target until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.machine.behind:
                await self._one_target()

    async def _one_target(self) -> None:
        desired = self.machine.begin()
        self._on_change()
        if desired is None:
            return
        attempt = asyncio.create_task(self._attempt(desired), name=f"swap to {desired.snapshot}")
        wake = asyncio.create_task(self._superseded())
        try:
            await asyncio.wait((attempt, wake), return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done() and self.machine.stage is Stage.COMMITTING:
                await asyncio.wait((attempt,))
        finally:
            await _end(wake)
            await _end(attempt)
        if not attempt.cancelled():
            attempt.result()

    async def _superseded(self) -> None:
        while not self.machine.behind:
            await self._wake.wait()
            self._wake.clear()

    async def _attempt(self, desired: Desired) -> None:
        try:
            await self._load(desired)
        except EngineDied as error:
            self._fail(f"the engine died: {error}")
            self._on_engine_death(str(error))
        except (SnapshotError, StagingFailed, OSError) as error:
            self._fail(str(error) or type(error).__name__)
        except Exception as error:
            log.exception("loading snapshot %s failed unexpectedly", desired.snapshot)
            self._fail(f"unexpected {type(error).__name__}: {error}")
        else:
            await self._release(desired.snapshot)

    def _fail(self, message: str) -> None:
        self.machine.fail(message)
        self._on_change()

    def _advance(self, event: Event) -> float:
        self.machine.advance(event)
        self._on_change()
        return self._monotonic()

    async def _load(self, desired: Desired) -> None:
        started = self._monotonic()
        base = (
            desired.snapshot == BASE_SNAPSHOT
        )  # the weights the server started with lie in the model directory
        path = self._base_directory if base else await self._source.fetch(desired)
        fetched = self._advance(Event.FETCHED)
        if not base:
            await self._source.verify(path)
        verified = self._advance(Event.VERIFIED)
        await self._engine.stage(desired.snapshot, path)
        staged = self._advance(Event.STAGED)
        timing = await self._switch(desired)
        self.last_swap = msgspec.structs.replace(
            timing,
            snapshot=desired.snapshot,
            fetch_ms=(fetched - started) * 1e3,
            verify_ms=(verified - fetched) * 1e3,
            stage_ms=(staged - verified) * 1e3,
        )
        self._advance(Event.COMMITTED)

    async def _switch(self, desired: Desired) -> SwapTiming:
        """Sync: close and drain first, still supersedable. Then hold newcomers while the engine commits."""
        try:
            if desired.transition == "SYNC":
                self._gate.set(Door.CLOSED)
                await self._gate.drained()
            else:
                self._gate.set(Door.HELD)
            self._advance(Event.COMMIT)
            timing = await self._engine.commit(desired.snapshot)
            self._namespaces.commit(desired.reset_prompt_cache)
            return timing
        finally:
            if self._gate.door in (Door.HELD, Door.CLOSED):
                self._gate.set(Door.OPEN)

    async def _release(self, serving: str) -> None:
        try:
            await self._source.release({serving})
        except (SnapshotError, OSError) as error:
            log.warning("old snapshot files could not be released: %s", error)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has cleaned up. Its exception, if any, stays in it."""
    task.cancel()
    await asyncio.wait((task,))
