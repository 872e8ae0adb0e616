"""The durable truth: deployments, the snapshots signalled for them, and every stage change that a replica reported.

Owns: the database, and the one thread that uses it.
Always holds:
- Durable before visible: a method that changes something returns after its commit. After a crash at any point, reopening the
  ledger shows either the state before a signal or the whole of it.
- Identities are idempotency keys. Signalling the identity that is already desired changes nothing, unless its files changed
  (another fingerprint) or a replica failed on it: then it is asked for again under a new generation. Signalling any other
  identity supersedes the desired one, also when it is an older one (a rollback).
- A stage change is stored once, however often it is reported.
- An incremental snapshot is stored with the whole chain that it stands on, as the chain was when it was signalled.
- Once a replica has served an identity, it means those bytes, until the ledger is reset or it is overwritten on purpose.
- A commit that changes what readers see of a deployment or a policy has a serial of its own (changes.py), in their order.
- Writers of one deployment are serialised. On SQLite every writing transaction begins with the write lock, which is waited for
  up to database.BUSY_TIMEOUT_S. On PostgreSQL every writer first updates the deployment's row.
- Readers block no writer and no writer blocks them. The size of what `state` reads does not grow with the number of stage
  changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, Unpack

import sqlalchemy as sa

from midstream.core.errors import RebasePending, SnapshotRefused
from midstream.core.types import (
    Pause,
    PauseMode,
    PolicyFate,
    SnapshotCheck,
    SnapshotContent,
    Transition,
    TransitionType,
)
from midstream.ledger import changes, deployments, rebases, reports, signals, snapshots, transfers
from midstream.ledger.changes import Changes
from midstream.ledger.clock import LedgerClock
from midstream.ledger.contents import Contents
from midstream.ledger.database import Database, LedgerUnavailable
from midstream.ledger.records import (
    CHAIN_MAX,
    NO_FLEET,
    BootHistory,
    Death,
    DeploymentChange,
    DeploymentRow,
    DeploymentState,
    Disagreement,
    FleetReports,
    Kept,
    NewDeployment,
    Signal,
    Signalled,
    SignalResult,
    SnapshotRow,
    TransitionRow,
    Unkept,
)

#: How long a call may take, including the wait for its turn. Above the limits of database.py.
ANSWER_S = 20.0
#: How long closing waits for a call under way.
CLOSE_S = 2.0

P = ParamSpec("P")
T = TypeVar("T")


def sqlite_url(path: Path) -> str:
    """The database URL of an SQLite file."""
    return f"sqlite:///{path.absolute()}"


class Ledger:
    """One database, used through one worker thread so that the event loop never waits for a disk.

    Each method is one transaction. All methods raise LedgerUnavailable (503, retryable) when the database does not answer. The
    transaction was then rolled back, or the answer to its commit was lost. A method that is cancelled may still commit.
    """

    def __init__(self, url: str, *, now: Callable[[], float] | None = None) -> None:
        """Open or create. now: None for the machine's clock.

        Raises ConfigError when the file is no ledger or was written by another schema version.
        """
        self._database = Database(url)
        self._contents = Contents()
        #: This machine's clock: seconds since the epoch.
        self.now = now or time.time
        #: The clock of deadlines and claims. It is right once a method of transfers was called.
        self.clock = LedgerClock(
            lambda: self.now(),
            server=self._database.is_server,
            ahead_s=self._database.ahead_s if now is None else None,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        #: The transaction that the thread runs, or ran last.
        self._at_work: object = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Ledger {self._database.shown}>"

    def close(self) -> None:
        """Finish the call under way, unless the database is silent, and close the database. Idempotent."""
        if not self._closed:
            self._closed = True
            last = self._thread.submit(lambda: None)
            self._thread.shutdown(wait=False)
            if last not in wait((last,), CLOSE_S).done:
                self._database.interrupt()
                self._thread.shutdown(wait=True, cancel_futures=True)
        self._database.close()

    async def _write(
        self, work: Callable[Concatenate[sa.Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        def noted(db: sa.Connection) -> T:
            with changes.noted(db):
                return work(db, *arguments, **named)

        return await self._run(self._database.write, noted)

    async def _read(
        self, work: Callable[Concatenate[sa.Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        return await self._run(self._database.read, lambda db: work(db, *arguments, **named))

    async def _run(
        self,
        begin: Callable[[], AbstractContextManager[sa.Connection]],
        work: Callable[[sa.Connection], T],
    ) -> T:
        def transaction() -> T:
            self._at_work = transaction
            with begin() as db:
                return work(db)

        running = asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await running
        except TimeoutError as error:
            # Otherwise it waits for its turn behind others.
            if self._at_work is transaction:
                self._database.interrupt()
            raise LedgerUnavailable(f"the ledger did not answer within {ANSWER_S:g} s") from error

    async def ensure_deployment(
        self,
        name: str,
        model: str,
        bucket_url: str,
        transition: TransitionType | None = None,
        replicas: int = 1,
    ) -> DeploymentRow:
        """Create the deployment, or bring model, bucket and transition (None: as stored, first ASYNC) up to date.

        replicas: how many a new deployment has; an existing one keeps its own number. A deployment that was being deleted is
        there again. Raises ConfigError when it has snapshots of another model: this model cannot serve them.
        """
        return await self._write(
            deployments.ensure, name, model, bucket_url, transition, replicas, self.now()
        )

    async def create_deployment(
        self, new: NewDeployment, limits: deployments.PolicyLimits = deployments.NO_LIMITS
    ) -> DeploymentRow:
        """Raises NameTaken. A policy's name needs its deployment: raises NotFound without it. limits: raises Conflict where
        there are as many."""
        return await self._write(deployments.create, new, self.now(), limits)

    async def update_deployment(self, name: str, **change: Unpack[DeploymentChange]) -> DeploymentRow:
        """Change the given properties, leave the others. Raises NotFound."""
        return await self._write(deployments.update, name, change, self.now())

    async def revise_deployment(
        self, name: str, change: Callable[[DeploymentRow], DeploymentChange]
    ) -> DeploymentRow:
        """As update_deployment, of a change that depends on the row: no other one comes in between.

        Raises NotFound, and what `change` raises, which then changes nothing."""
        return await self._write(deployments.revise, name, change, self.now())

    async def revise_beside(
        self, name: str, change: Callable[[DeploymentRow, list[DeploymentRow]], DeploymentChange]
    ) -> DeploymentRow:
        """As revise_deployment, of a change that depends on the other deployments, too."""
        return await self._write(deployments.revise_beside, name, change, self.now())

    async def delete_deployment(self, name: str) -> None:
        """Remove it with its snapshots and everything known of its replicas. Raises NotFound."""
        await self._write(deployments.delete, name)

    async def reset_ledger(self, name: str, generation_floor: int = 0) -> int:
        """Forget every snapshot: the base weights are desired again and the next signal must be a full snapshot.

        Returns the generation of the reset. Resetting again changes nothing. Raises NotFound.
        """
        return await self._write(deployments.reset, name, generation_floor)

    async def pause(
        self, name: str, mode: PauseMode | None, *, only: int | None = None, floor: int = 0
    ) -> Pause:
        """Pause the deployment, or resume it (None); committed when this returns. Raises NotFound.

        only: change nothing unless the pause has this serial. One that does not pause is not resumed. floor: the greatest
        serial that a replica has seen; the new one is above it, also when this ledger is younger.
        """
        return await self._write(deployments.pause, name, mode, only, floor)

    async def deployment(self, name: str) -> DeploymentRow:
        """Raises NotFound."""
        return await self._read(deployments.one, name)

    async def deployments(self) -> list[DeploymentRow]:
        """All of them, by name; no policies."""
        return await self._read(deployments.every)

    async def policies(self) -> list[DeploymentRow]:
        """The policies of all deployments, by name: a policy has the row of a deployment, which no replicas are run for."""
        return await self._read(deployments.policies)

    async def changes(self, seen: int | None = None) -> Changes:
        """What changed since the look that had this serial; everything at the first look, and after too many changes.

        One query while nothing changed, however many deployments and policies there are.
        """
        return await self._read(changes.since, seen)

    async def signal(
        self,
        name: str,
        signal: Signal,
        fleet: FleetReports = NO_FLEET,
        *,
        chain_max: int = CHAIN_MAX,
        rebase_after: int = 0,
        committing: transfers.Committing | None = None,
    ) -> SignalResult:
        """Make a snapshot the desired one; committed when this returns.

        fleet: the reports of the replicas. The new generation is above all that they have seen, also when this ledger is
        younger. chain_max: how many incremental snapshots may stand on one full one. rebase_after: from so many on, the whole
        files of the last one are wanted in the bucket; 0: never. committing: the update of a group that the snapshot came by.
        Raises Conflict, and takes nothing, where another gateway has moved that group.

        A snapshot that is only asked for again has the stronger of the two cache policies. Raises NotFound for an unknown
        deployment. Raises SnapshotRefused for an incremental snapshot that cannot be taken now (ledger/signals.py), and for
        files that differ from those that the identity means (ledger/contents.py). Raises RebasePending for one that can be
        taken later (`chain_full`).
        """

        def accept(db: sa.Connection) -> SignalResult:
            now = self.now() if committing is None else self.clock.read(db)
            result = signals.accept(db, name, signal, fleet, chain_max, self._contents, now)
            if committing is not None:
                transfers.commit(db, committing, result.desired, signal.policies, now)
            if result.changed:
                snapshots.want_whole(db, name, result.desired.snapshot, rebase_after, self.clock.read(db))
            return result

        try:
            return await self._write(accept)
        except signals.ChainFull as full:
            raise await self.chain_full(
                name, rebase_after, str(full), signals.PREVIOUS, signal.previous
            ) from full

    async def chain_full(
        self, name: str, rebase_after: int, why: str, param: str, parent: str | None = None
    ) -> SnapshotRefused | RebasePending:
        """The error of a signal that the bound of chains refuses: whether it is taken later, or never.

        parent: what it stands on; None: what is desired. The whole files of what is desired are wanted from now on: where all
        signals are refused, none that is taken would want them.
        """

        def look(db: sa.Connection) -> tuple[bool, str]:
            snapshots.want_whole(db, name, None, rebase_after, self.clock.read(db))
            row = deployments.find(db, name)
            problem = "" if row is None else rebases.problem(db, row.id)
            return snapshots.whole_may_come(db, name, parent, rebase_after), problem

        comes, problem = await self._write(look)
        if not comes:
            return SnapshotRefused(f"{why}; publish a full snapshot", param=param)
        last = f" (the last try failed: {problem})" if problem else ""
        return RebasePending(
            f"{why}. A replica brings whole files into the bucket, on which it can stand: signal it again then{last}",
            param=param,
        )

    async def new_generation(self, name: str, floor: int = 0) -> int:
        """A generation that no replica has seen, above `floor`, to ask a replica for the same once more. Raises NotFound."""
        return await self._write(deployments.new_generation, name, floor)

    async def state(self, name: str) -> DeploymentState:
        """What the replicas of a deployment should serve now. Raises NotFound."""
        return await self._read(signals.state, name, self._contents)

    async def listed(self, names: Sequence[str]) -> list[tuple[DeploymentRow, DeploymentState]]:
        """What a list shows of these, in the order of names; one that is gone is left out. A state has no fallbacks."""
        return await self._read(signals.listed, names)

    async def record(self, name: str, replica: str, boot: str, changes: Sequence[Transition]) -> int:
        """Store a replica's stage changes, skip those already stored. Returns how many were new."""
        return await self._write(reports.record, name, replica, boot, tuple(changes))

    async def learn_content(self, name: str, found: SnapshotContent) -> None:
        """A replica serves this: the identity means these files from now on, unless it meant others already.

        Ignored when the identity was signalled with other files since.
        """
        await self._write(reports.learn_content, name, found, self._contents)

    async def learn_weights(self, name: str, check: SnapshotCheck) -> None:
        """Store the digest of the weights that this kind of engine has of the snapshot, unless one is stored.

        Ignored as in learn_content.
        """
        await self._write(reports.learn_weights, name, check)

    async def boot_history(self, name: str, replica: str, boot: str, ended: str | None = None) -> BootHistory:
        """The stored history of a boot of a replica, and of the boot before it: `ended`, or else the last one stored."""
        return await self._read(reports.boot_history, name, replica, boot, ended)

    async def record_death(self, name: str, boot: str, death: Death, seq: int | None) -> bool:
        """Store that `boot` ended while it was loading a snapshot; False when that is stored already.

        seq: of the stage change to ERROR to store with it; None when the replica reported one itself.
        """
        return await self._write(reports.record_death, name, boot, death, seq, self.now())

    async def disagree(self, name: str, found: Disagreement, floor: int = 0) -> Disagreement:
        """Store that a replica's check differs from the others', with a generation above `floor` to load it again under.

        `found.retry_generation` is ignored. Storing the same again changes nothing.
        """
        return await self._write(reports.disagree, name, found, floor, self.now())

    async def settle_disagreement(self, name: str, found: Disagreement) -> bool:
        """Store how it ended; False when there is no such disagreement."""
        return await self._write(reports.settle, name, found, self.now())

    async def boot_transitions(self, name: str, replica: str, boot: str) -> list[TransitionRow]:
        """The stored stage changes of one boot of a replica, in order."""
        return await self._read(reports.boot_transitions, name, replica, boot)

    async def signalled(self, name: str, after: int = 0, newest: int = 1024) -> tuple[int, list[Signalled]]:
        """The generation of the last reset (0: none), and the `newest` snapshots signalled under generations above `after`."""
        return await self._read(snapshots.signalled, name, after, newest)

    async def snapshots(self, name: str) -> list[SnapshotRow]:
        """Every snapshot ever signalled, in the order of first signals."""
        return await self._read(snapshots.every, name, self._contents)

    async def is_signalled(self, name: str, identity: str) -> bool:
        """Whether the ledger knows the snapshot."""
        return await self._read(snapshots.is_signalled, name, identity)

    async def check_policies(self, name: str, fate: PolicyFate) -> None:
        """Raise the Conflict that full weights are refused with which say this of policies."""
        await self._read(deployments.check_policies, name, fate)

    async def transitions(self, name: str, newest: int | None = None) -> list[TransitionRow]:
        """The `newest` stage changes (None: all), in the order they were stored."""
        return await self._read(reports.newest, name, newest)

    # -- weights that trainers send (transfers.py)

    async def open_transfer(
        self,
        name: str,
        group: str,
        members: Sequence[transfers.TransferMember],
        trainer: str,
        within_s: float,
    ) -> transfers.Transfer:
        """Make a group, which has to be complete within so many seconds. Raises GroupMoved where another one is open."""
        return await self._write(
            lambda db: transfers.open_group(db, name, group, members, trainer, within_s, self.clock.read(db))
        )

    async def transfer(self, name: str) -> transfers.Transfer | None:
        """The open group of a deployment. Raises NotFound."""

        def current(db: sa.Connection) -> transfers.Transfer | None:
            # The caller judges its deadline.
            self.clock.read(db)
            return transfers.current(db, name)

        return await self._read(current)

    async def move_transfer(
        self,
        seen: transfers.Transfer,
        event: transfers.Event,
        *,
        within_s: float | None = None,
        members: Sequence[transfers.TransferMember] | None = None,
        reason: str = "",
        begun: transfers.Begun = transfers.NOTHING_SAID,
    ) -> transfers.Transfer:
        """Move a group on from the state that was seen. Raises GroupMoved when it is another one by now.

        within_s: of a new deadline; None: the deadline stays. members: with those that are fenced. reason: why it ends.
        begun: what is said of an update that begins.
        """
        now = self.clock.read

        def move(db: sa.Connection) -> transfers.Transfer:
            deployments.hold(db, seen.deployment)
            return transfers.move(
                db, seen, event, now(db), within_s=within_s, members=members, reason=reason, begun=begun
            )

        return await self._write(move)

    async def last_update(self, of: transfers.Transfer) -> transfers.TransferUpdate | None:
        """The group's last update; None: none has begun."""
        return await self._read(transfers.last_update, of)

    async def committed_update(self, of: transfers.Transfer) -> transfers.TransferUpdate | None:
        """The group's last update, if it was committed."""
        return await self._read(transfers.committed, of)

    async def open_transfers(self) -> list[transfers.Transfer]:
        """Open groups of all deployments."""
        return await self._read(transfers.every_open)

    async def updates_waiting_s(self) -> dict[str, float]:
        """By deployment: the age of its oldest committed update that is not in the bucket yet."""
        return await self._read(lambda db: transfers.waiting_s(db, self.clock.read(db)))

    async def unkept_updates(self) -> list[Unkept]:
        """What somebody is to bring into the bucket now: committed updates, and incremental snapshots with long chains."""

        def unkept(db: sa.Connection) -> list[Unkept]:
            now = self.clock.read(db)
            return [*transfers.unkept(db, now, self._contents), *snapshots.unrebased(db, now, self._contents)]

        return await self._read(unkept)

    async def claim_keeping(self, update: Unkept, within_s: float) -> bool:
        """Whether the caller is to bring its files into the bucket: no other gateway tries within that time."""
        return await self._write(lambda db: transfers.claim(db, update, within_s, self.clock.read(db)))

    async def settle_keeping(self, update: Unkept, kept: Kept, again_s: float = 0.0, tries: int = 0) -> None:
        """Store how a try ended. "wanted": there is another one after `again_s`; `tries` were made so far."""
        await self._write(lambda db: transfers.settle(db, update, kept, again_s, tries, self.clock.read(db)))

    async def settle_rebase(
        self, rebase: Unkept, kept: Kept, again_s: float = 0.0, tries: int = 0, reason: str = ""
    ) -> None:
        """As settle_keeping, of a rebase. "kept": chains begin with the files of `rebase.content` from now on."""
        await self._write(
            lambda db: rebases.settle(db, rebase, kept, again_s, tries, reason, self.clock.read(db))
        )

    async def newest_transfers(
        self, name: str, newest: int
    ) -> list[tuple[transfers.Transfer, list[transfers.TransferUpdate]]]:
        """The newest groups of a deployment with their newest updates, the last ones first."""
        return await self._read(transfers.newest, name, newest)
