"""The durable truth: deployments, the snapshots signalled for them, and every stage change a replica reported.

Always holds:
- A signal is committed before anyone can act on it; after a crash at any point, reopening the ledger shows either the
  state before the signal or the whole of it.
- Identities are idempotency keys. Signalling the identity that is already desired changes nothing, unless its files
  are others now (another fingerprint) or a replica failed on it: then it is asked for again under a new generation.
  Signalling any other identity supersedes the desired one, also when it is an older one (a rollback).
- A stage change is stored once, however often it is reported.
- An incremental snapshot is stored with the whole chain it stands on, as it was when it was signalled.
- Once a replica has served an identity, it means those bytes, until the ledger is reset or it is overwritten on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, Unpack

from midstream.ledger.core import LedgerCore
from midstream.ledger.database import LedgerUnavailable
from midstream.ledger.records import (
    CHAIN_MAX,
    NO_FLEET,
    BootHistory,
    Death,
    DeploymentChange,
    DeploymentRow,
    DeploymentState,
    Disagreement,
    Fleet,
    Signal,
    Signalled,
    SignalResult,
    SnapshotRow,
    TransitionRow,
    Verdict,
    stronger_reset,
)
from midstream.types import SnapshotCheck, SnapshotContent, Transition, TransitionType

__all__ = [
    "CHAIN_MAX",
    "BootHistory",
    "Death",
    "DeploymentChange",
    "DeploymentRow",
    "DeploymentState",
    "Disagreement",
    "Fleet",
    "Ledger",
    "LedgerUnavailable",
    "Signal",
    "SignalResult",
    "Signalled",
    "SnapshotRow",
    "TransitionRow",
    "Verdict",
    "sqlite_url",
    "stronger_reset",
]

ANSWER_S = (
    20.0  # how long a call may take, waiting for its turn included; above what database.py bounds waits with
)
CLOSE_S = 2.0  # how long closing waits for a call under way

T = TypeVar("T")


def sqlite_url(path: Path) -> str:
    """The database URL of an SQLite file."""
    return f"sqlite:///{path.absolute()}"


class Ledger:
    """One database, used through one worker thread so that the event loop never waits for a disk.

    All methods raise LedgerUnavailable (503, retryable) when the database does not answer; the transaction was then
    rolled back, or the answer to its commit was lost. A method that is cancelled may still commit: its thread finishes.
    """

    def __init__(self, url: str, *, now: Callable[[], float] = time.time) -> None:
        """Open or create. Raises ConfigError when the file is no ledger or was written by another schema version."""
        self._core = LedgerCore(url)
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._at_work: Callable[[], object] | None = None  # what the thread does, or did last
        self._closed = False

    def __repr__(self) -> str:
        return f"<Ledger {self._core.database.shown}>"

    def close(self) -> None:
        """Finish what is running, unless the database is silent, and close it. Idempotent."""
        if not self._closed:
            self._closed = True
            last = self._thread.submit(lambda: None)
            self._thread.shutdown(wait=False)
            if last not in wait((last,), CLOSE_S).done:
                self._core.database.interrupt()
                self._thread.shutdown(wait=True, cancel_futures=True)
        self._core.close()

    async def _run(self, work: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._worked, work)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await running
        except TimeoutError as error:
            if self._at_work is work:  # else it waits for its turn behind others
                self._core.database.interrupt()
            raise LedgerUnavailable(f"the ledger did not answer within {ANSWER_S:g} s") from error

    def _worked(self, work: Callable[[], T]) -> T:
        self._at_work = work
        return work()

    async def ensure_deployment(
        self,
        name: str,
        model: str,
        bucket_url: str,
        transition: TransitionType | None = None,
        replicas: int = 1,
    ) -> DeploymentRow:
        """Create the deployment, or bring model, bucket and transition (None: as stored, first ASYNC) up to date.

        replicas: how many are asked for when it is created; an existing one keeps its own. One that was being deleted is
        there again. Raises ConfigError when it has snapshots of another model: they cannot be served by this one.
        """
        now = self._now()
        return await self._run(
            lambda: self._core.ensure_deployment(name, model, bucket_url, transition, replicas, now)
        )

    async def create_deployment(
        self,
        name: str,
        *,
        model: str,
        bucket_url: str,
        transition: TransitionType = "ASYNC",
        replicas_min: int = 1,
        replicas_max: int = 1,
        fields: Mapping[str, Any] | None = None,
    ) -> DeploymentRow:
        """fields: whatever else the API was told of it, JSON values. Raises Conflict when there is one of this name."""
        now = self._now()
        more = dict(fields or {})
        counts = (replicas_min, replicas_max)
        return await self._run(
            lambda: self._core.create_deployment(name, model, bucket_url, transition, counts, more, now)
        )

    async def update_deployment(self, name: str, **change: Unpack[DeploymentChange]) -> DeploymentRow:
        """Change what is given, leave the rest. Raises NotFound."""
        now = self._now()
        return await self._run(lambda: self._core.update_deployment(name, change, now))

    async def delete_deployment(self, name: str) -> None:
        """Remove it with its snapshots and everything known of its replicas. Raises NotFound."""
        await self._run(lambda: self._core.delete_deployment(name))

    async def reset_ledger(self, name: str, generation_floor: int = 0) -> int:
        """Forget every snapshot: the base weights are desired again and the next signal must be a full snapshot.

        The generation of that; resetting again changes nothing. Raises NotFound.
        """
        return await self._run(lambda: self._core.reset_ledger(name, generation_floor))

    async def deployment(self, name: str) -> DeploymentRow:
        """Raises NotFound."""
        return await self._run(lambda: self._core.deployment(name))

    async def deployments(self) -> list[DeploymentRow]:
        """All of them, by name."""
        return await self._run(self._core.deployments)

    async def signal(
        self, name: str, signal: Signal, fleet: Fleet = NO_FLEET, *, chain_max: int = CHAIN_MAX
    ) -> SignalResult:
        """Make a snapshot the desired one; committed when this returns.

        fleet: what the replicas report. The new generation is above all they have seen, also when this ledger is younger.
        chain_max: how many incremental snapshots may stand on one full one.

        When only asked for again, the policy that holds is the stronger of the two. Raises NotFound for an unknown
        deployment and SnapshotRefused for an incremental snapshot that cannot be taken now (ledger/chain.py), and for files
        that are not what the identity means (ledger/contents.py).
        """
        now = self._now()
        return await self._run(lambda: self._core.signal(name, signal, fleet, chain_max, now))

    async def new_generation(self, name: str, floor: int = 0) -> int:
        """A generation nobody has seen, above `floor`, to ask a replica for the same once more. Raises NotFound."""
        return await self._run(lambda: self._core.new_generation(name, floor))

    async def state(self, name: str) -> DeploymentState:
        """What the replicas of a deployment should serve now. Raises NotFound."""
        return await self._run(lambda: self._core.state(name))

    async def record(self, name: str, replica: str, boot: str, rows: Sequence[Transition]) -> int:
        """Store a replica's stage changes; those already stored are skipped. How many were new."""
        rows = tuple(rows)
        return await self._run(lambda: self._core.record(name, replica, boot, rows))

    async def learn_content(self, name: str, found: SnapshotContent) -> None:
        """A replica serves this: the identity means these files from now on, unless it meant others already.

        Passed over when the identity was signalled with other files since.
        """
        await self._run(lambda: self._core.learn_content(name, found))

    async def learn_weights(self, name: str, check: SnapshotCheck) -> None:
        """What this kind of engine makes of the snapshot, unless that is known; passed over as in learn_content."""
        await self._run(lambda: self._core.learn_weights(name, check))

    async def boot_history(self, name: str, replica: str, boot: str, ended: str | None = None) -> BootHistory:
        """What is stored of a boot of a replica and of the one before it: `ended`, or else the last one stored."""
        return await self._run(lambda: self._core.boot_history(name, replica, boot, ended))

    async def record_death(self, name: str, boot: str, death: Death, seq: int | None) -> bool:
        """Store that `boot` ended while it was loading a snapshot; False when that is stored already.

        seq: of the stage change to ERROR to store with it; None when the replica reported one itself.
        """
        now = self._now()
        return await self._run(lambda: self._core.record_death(name, boot, death, seq, now))

    async def disagree(self, name: str, found: Disagreement, floor: int = 0) -> Disagreement:
        """Store that a replica's check differs from the others', with a generation above `floor` to load it again under.

        `found.retry_generation` is passed over. Storing the same again changes nothing.
        """
        now = self._now()
        return await self._run(lambda: self._core.disagree(name, found, floor, now))

    async def settle_disagreement(
        self, name: str, replica: str, boot: str, retry_generation: int, verdict: Verdict, detail: str = ""
    ) -> bool:
        """Store how it ended; False when there is no such disagreement. detail: "": as it was."""
        now = self._now()
        return await self._run(
            lambda: self._core.settle(name, replica, boot, retry_generation, verdict, detail, now)
        )

    async def boot_transitions(self, name: str, replica: str, boot: str) -> list[TransitionRow]:
        """What is stored of one boot of a replica, in order."""
        return await self._run(lambda: self._core.boot_transitions(name, replica, boot))

    async def signalled(self, name: str, after: int = 0, newest: int = 1024) -> tuple[int, list[Signalled]]:
        """The generation of the last reset (0: none), and the `newest` snapshots signalled under generations above `after`."""
        return await self._run(lambda: self._core.signalled(name, after, newest))

    async def snapshots(self, name: str) -> list[SnapshotRow]:
        """Every snapshot ever signalled, in the order of first signals."""
        return await self._run(lambda: self._core.snapshots(name))

    async def transitions(self, name: str, newest: int | None = None) -> list[TransitionRow]:
        """The `newest` stage changes (None: all), in the order they were stored."""
        return await self._run(lambda: self._core.transitions(name, newest))
