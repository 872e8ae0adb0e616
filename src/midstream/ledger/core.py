"""The ledger's SQL, synchronous. `Ledger` (ledger/__init__.py) runs it in a thread.

Always holds:
- Durable before visible: a method that changes the desired state returns after its commit.
- Writers of one deployment are serialised: on SQLite by the write lock every writing transaction begins with (waited for
  up to database.BUSY_TIMEOUT_S), on PostgreSQL by the deployment's row, which every writer updates first.
- Readers wait for nobody and hold nobody up; what `state` reads does not grow with the number of stage changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa

from midstream.ledger import deployments as resources
from midstream.ledger.chain import Standing, check_full, parents_of
from midstream.ledger.contents import Contents, learn_weights, prove, weights_of
from midstream.ledger.database import Database
from midstream.ledger.records import (
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
from midstream.ledger.rows import (
    as_death,
    as_desired,
    as_disagreement,
    as_snapshot,
    as_transition,
    base_desired,
    chain_identities,
)
from midstream.ledger.schema import (
    deaths,
    deployments,
    disagreements,
    insert_new,
    snapshots,
    storable,
    transitions,
)
from midstream.types import (
    BASE_SNAPSHOT,
    Desired,
    ResetPromptCache,
    SnapshotCheck,
    SnapshotContent,
    SnapshotFiles,
    Stage,
    Transition,
    TransitionType,
)

MAX_FALLBACKS = 8
MAX_DEATHS = 256  # the newest, of all replicas
MAX_DISAGREEMENTS = 256  # the newest, looked through for the last one of each replica
TAIL_ROWS = 2  # of a boot that ended: its last stage change, and the one that says how far it had got


class LedgerCore:
    """All statements. Not for use from several threads at once."""

    def __init__(self, url: str) -> None:
        """Open or create the ledger at `url` (an SQLAlchemy URL). Raises ConfigError when it cannot be used."""
        self.database = Database(url)
        self._write = self.database.write
        self._read = self.database.read
        self._contents = Contents()

    def close(self) -> None:
        self.database.close()

    def ensure_deployment(
        self,
        name: str,
        model: str,
        bucket_url: str,
        transition: TransitionType | None,
        replicas: int,
        now: float,
    ) -> DeploymentRow:
        with self._write() as db:
            return resources.ensure(db, name, model, bucket_url, transition, replicas, now)

    def create_deployment(
        self,
        name: str,
        model: str,
        bucket_url: str,
        transition: TransitionType,
        replicas: tuple[int, int],
        fields: dict[str, Any],
        now: float,
    ) -> DeploymentRow:
        with self._write() as db:
            return resources.create(db, name, model, bucket_url, transition, replicas, fields, now)

    def update_deployment(self, name: str, change: DeploymentChange, now: float) -> DeploymentRow:
        with self._write() as db:
            return resources.update(db, name, change, now)

    def delete_deployment(self, name: str) -> None:
        with self._write() as db:
            resources.delete(db, name)

    def reset_ledger(self, name: str, floor: int) -> int:
        with self._write() as db:
            return resources.reset(db, name, floor)

    def deployment(self, name: str) -> DeploymentRow:
        with self._read() as db:
            return resources.as_row(resources.find(db, name))

    def deployments(self) -> list[DeploymentRow]:
        with self._read() as db:
            rows = db.execute(sa.select(deployments).order_by(deployments.c.name))
            return [resources.as_row(row) for row in rows]

    def signal(self, name: str, signal: Signal, fleet: Fleet, chain_max: int, now: float) -> SignalResult:
        with self._write() as db:
            row = resources.lock(db, name)
            known = _snapshot(db, row.id, signal.identity)
            meant = self._contents.meant(db, row.id, signal)
            failed = fleet.failed_generation == row.generation or _failed_somewhere(db, row)
            parents = _parents(
                db, row, known, signal, Standing(row.desired_snapshot, failed, fleet.serving), chain_max
            )
            same_files = (
                known is not None
                and _files_of(as_snapshot(known)) == (signal.fingerprint, signal.compression, parents)
                and not meant.overwrites
            )
            if same_files and row.desired_snapshot == signal.identity:
                if not failed and tuple(known.ignore_config) == signal.ignore_config:
                    return SignalResult(self._desired(db, known, row), changed=False)
                signal = _at_least(signal, known)  # nobody may have loaded the first one
            generation = max(row.last_generation, fleet.generation_floor) + 1
            values = _values(signal, parents) | {"signalled_at": now, "generation": generation}
            if not same_files:
                values |= {"since_generation": generation, "ready_order": None}
            if known is None:
                fresh = {"deployment_id": row.id, "identity": signal.identity, "first_signalled_at": now}
                db.execute(snapshots.insert().values({**fresh, **values}))
            else:
                db.execute(snapshots.update().where(snapshots.c.id == known.id).values(values))
            meant.store(db)
            db.execute(_desire(row, signal.identity, generation, signal.reset_prompt_cache, now))
            desired = self._desired(db, _snapshot(db, row.id, signal.identity), resources.find(db, name))
            return SignalResult(desired, changed=True)

    def _desired(self, db: sa.Connection, snapshot: Any, deployment: Any) -> Desired:
        known = self._contents.of(db, deployment.id, chain_identities([snapshot]))
        return as_desired(snapshot, deployment, known)

    def learn_content(self, name: str, found: SnapshotContent) -> None:
        with self._write() as db:
            row = resources.lock(db, name)
            known = _snapshot(db, row.id, found.snapshot)
            if known is not None and known.fingerprint == found.fingerprint:
                self._contents.learn(db, row.id, found)

    def learn_weights(self, name: str, check: SnapshotCheck) -> None:
        with self._write() as db:
            row = resources.lock(db, name)
            known = _snapshot(db, row.id, check.snapshot)
            if known is not None and known.since_generation <= check.generation:
                learn_weights(db, row.id, check)

    def new_generation(self, name: str, floor: int) -> int:
        with self._write() as db:
            return _next_generation(db, resources.lock(db, name), floor)

    def state(self, name: str) -> DeploymentState:
        with self._read() as db:
            row = resources.find(db, name)
            disputed = _disagreements(db, row.id)
            if row.desired_snapshot == BASE_SNAPSHOT:
                return DeploymentState(
                    base_desired(row) if row.generation else None,
                    since={BASE_SNAPSHOT: 0},
                    reset_all=row.reset_all_generation,
                    deaths=_deaths(db, row),
                    disagreements=disputed,
                    proven=True,
                )
            desired = _snapshot(db, row.id, row.desired_snapshot)
            fallbacks = _fallbacks(db, row)
            named = (desired, *fallbacks)
            known = self._contents.of(db, row.id, chain_identities(named))
            return DeploymentState(
                as_desired(desired, row, known),
                tuple(as_desired(snapshot, row, known) for snapshot in fallbacks),
                weights=weights_of(db, row.id, {snapshot.identity for snapshot in named}),
                since={snapshot.identity: snapshot.since_generation for snapshot in named},
                ever_ready=row.first_ready_at is not None,
                first_signalled_at=row.first_signalled_at,
                reset_all=row.reset_all_generation,
                reset_new_session=row.reset_new_session_generation,
                deaths=_deaths(db, row),
                disagreements=disputed,
                proven=desired.ready_order is not None,
            )

    def record(self, name: str, replica: str, boot: str, rows: Sequence[Transition]) -> int:
        with self._write() as db:
            deployment = resources.lock(db, name)
            added = 0
            for t in rows:
                if t.generation < deployment.reset_ledger_generation:
                    continue  # of what was forgotten
                new = _insert_transition(db, deployment.id, replica, boot, t)
                if new and t.stage is Stage.CHECKING:
                    _note_served(db, deployment.id, t)
                if new and t.stage is Stage.IDLE and t.snapshot != BASE_SNAPSHOT:
                    _note_ready(db, deployment.id, replica, t)
                added += new
            return added

    def boot_history(self, name: str, replica: str, boot: str, ended: str | None) -> BootHistory:
        with self._read() as db:
            ours = (transitions.c.deployment_id == resources.find(db, name).id) & (
                transitions.c.replica == replica
            )
            this = ours & (transitions.c.boot == boot)
            last = db.execute(sa.select(sa.func.max(transitions.c.seq)).where(this)).scalar()
            if last is not None:
                return BootHistory(last_seq=int(last))
            if ended is None:
                newest = sa.select(transitions.c.boot).where(ours).order_by(transitions.c.id.desc()).limit(1)
                ended = db.execute(newest).scalar()
            if ended is None:
                return BootHistory(last_seq=-1)
            tail = sa.select(transitions).where(ours & (transitions.c.boot == ended))
            tail = tail.order_by(transitions.c.seq.desc()).limit(TAIL_ROWS)
            rows = tuple(as_transition(row) for row in db.execute(tail))
            return BootHistory(last_seq=-1, previous_boot=ended, tail=rows[::-1])

    def record_death(self, name: str, boot: str, death: Death, seq: int | None, now: float) -> bool:
        with self._write() as db:
            row = resources.lock(db, name)
            values = {"replica": death.replica, "identity": death.identity, "generation": death.generation}
            values |= {"deployment_id": row.id, "boot": boot, "forgiven": False}
            values["detail"] = storable(death.detail)
            if death.generation < row.reset_ledger_generation:
                return False
            if not insert_new(db, deaths, values):
                return False
            if seq is not None:
                failed = Transition(
                    seq=seq,
                    at=now,
                    snapshot=death.identity,
                    generation=death.generation,
                    stage=Stage.ERROR,
                    detail=death.detail,
                )
                _insert_transition(db, row.id, death.replica, boot, failed)
            return True

    def disagree(self, name: str, found: Disagreement, floor: int, now: float) -> Disagreement:
        with self._write() as db:
            row = resources.lock(db, name)
            this = _disagreement_of(row, found.replica, found.boot) & (
                (disagreements.c.identity == found.identity)
                & (disagreements.c.generation == found.generation)
            )
            known = db.execute(sa.select(disagreements).where(this)).one_or_none()
            if known is None:
                values = {"deployment_id": row.id, "replica": found.replica, "boot": found.boot, "at": now}
                values |= {"identity": found.identity, "generation": found.generation, "verdict": "reload"}
                values |= {
                    "detail": storable(found.detail),
                    "retry_generation": _next_generation(db, row, floor),
                }
                db.execute(disagreements.insert().values(values))
            return as_disagreement(db.execute(sa.select(disagreements).where(this)).one())

    def settle(
        self,
        name: str,
        replica: str,
        boot: str,
        retry_generation: int,
        verdict: Verdict,
        detail: str,
        now: float,
    ) -> bool:
        with self._write() as db:
            row = resources.lock(db, name)
            this = _disagreement_of(row, replica, boot) & (
                disagreements.c.retry_generation == retry_generation
            )
            values: dict[str, Any] = {"verdict": verdict, "at": now}
            if detail:
                values["detail"] = storable(detail)
            return bool(db.execute(disagreements.update().where(this).values(values)).rowcount)

    def boot_transitions(self, name: str, replica: str, boot: str) -> list[TransitionRow]:
        with self._read() as db:
            this = (
                (transitions.c.deployment_id == resources.find(db, name).id)
                & (transitions.c.replica == replica)
                & (transitions.c.boot == boot)
            )
            rows = db.execute(sa.select(transitions).where(this).order_by(transitions.c.seq))
            return [as_transition(row) for row in rows]

    def signalled(self, name: str, after: int, newest: int) -> tuple[int, list[Signalled]]:
        with self._read() as db:
            row = resources.find(db, name)
            since = (
                (transitions.c.deployment_id == row.id)
                & (transitions.c.identity == snapshots.c.identity)
                & (transitions.c.generation >= snapshots.c.generation)
                & (transitions.c.stage == Stage.IDLE.value)
            )
            query = sa.select(snapshots.c.identity, snapshots.c.generation, sa.exists().where(since))
            query = query.where(snapshots.c.deployment_id == row.id, snapshots.c.generation > after)
            rows = db.execute(query.order_by(snapshots.c.generation.desc()).limit(newest))
            return int(row.reset_ledger_generation), [Signalled(*r) for r in rows]

    def snapshots(self, name: str) -> list[SnapshotRow]:
        with self._read() as db:
            key = resources.find(db, name).id
            query = sa.select(snapshots).where(snapshots.c.deployment_id == key).order_by(snapshots.c.id)
            rows = db.execute(query).all()
            known = self._contents.of(db, key, {row.identity for row in rows})
            return [as_snapshot(row, known) for row in rows]

    def transitions(self, name: str, newest: int | None = None) -> list[TransitionRow]:
        with self._read() as db:
            query = sa.select(transitions).where(transitions.c.deployment_id == resources.find(db, name).id)
            rows = db.execute(query.order_by(transitions.c.id.desc()).limit(newest)).all()
            return [as_transition(row) for row in reversed(rows)]


def _parents(
    db: sa.Connection, row: Any, known: Any, signal: Signal, standing: Standing, chain_max: int
) -> tuple[SnapshotFiles, ...]:
    """What the snapshot stands on, () for a full one. Raises SnapshotRefused."""
    known = as_snapshot(known) if known is not None else None
    if signal.previous is None:
        check_full(signal, known)
        return ()
    parent = _snapshot(db, row.id, signal.previous)
    if parent is None:
        return parents_of(signal, known, None, 0, standing, chain_max)
    return parents_of(signal, known, as_snapshot(parent), parent.since_generation, standing, chain_max)


def _files_of(known: SnapshotRow) -> tuple[str | None, str | None, tuple[SnapshotFiles, ...]]:
    return known.fingerprint, known.compression, known.parents


def _at_least(signal: Signal, known: Any) -> Signal:
    """The signal with cache rules that do what those of the one before did, too."""
    ages = [age for age in (signal.max_cache_age, known.max_cache_age) if age is not None]
    return replace(
        signal,
        reset_prompt_cache=stronger_reset(signal.reset_prompt_cache, known.reset_prompt_cache),
        max_cache_age=min(ages, default=None),
    )


def _values(signal: Signal, parents: tuple[SnapshotFiles, ...]) -> dict[str, Any]:
    return {
        "kind": "full" if signal.previous is None else "delta",
        "url": signal.url,
        "previous": signal.previous,
        "compression": signal.compression,
        "checksum_format": signal.checksum_format,
        "parents": msgspec.to_builtins(parents),
        "max_cache_age": signal.max_cache_age,
        "ignore_config": list(signal.ignore_config),
        "reset_prompt_cache": signal.reset_prompt_cache,
        "fingerprint": signal.fingerprint,
    }


def _next_generation(db: sa.Connection, row: Any, floor: int) -> int:
    generation = max(int(row.last_generation), floor) + 1
    db.execute(deployments.update().where(deployments.c.id == row.id).values(last_generation=generation))
    return generation


def _snapshot(db: sa.Connection, key: int, identity: str) -> Any:
    this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == identity)
    return db.execute(sa.select(snapshots).where(this)).one_or_none()


def _desire(row: Any, identity: str, generation: int, reset: ResetPromptCache, now: float) -> sa.Update:
    values: dict[str, Any] = {
        "desired_snapshot": identity,
        "generation": generation,
        "last_generation": generation,
        "first_signalled_at": now if row.first_signalled_at is None else row.first_signalled_at,
    }
    if reset != "none":
        values[f"reset_{reset}_generation"] = generation
    return deployments.update().where(deployments.c.id == row.id).values(values)


def _fallbacks(db: sa.Connection, row: Any) -> Sequence[Any]:
    """Snapshots that became ready on a replica, the last one first."""
    others = (snapshots.c.deployment_id == row.id) & (snapshots.c.identity != row.desired_snapshot)
    query = sa.select(snapshots).where(others & snapshots.c.ready_order.is_not(None))
    return db.execute(query.order_by(snapshots.c.ready_order.desc()).limit(MAX_FALLBACKS)).all()


def _deaths(db: sa.Connection, row: Any) -> tuple[Death, ...]:
    query = sa.select(deaths).where(deaths.c.deployment_id == row.id, ~deaths.c.forgiven)
    newest = db.execute(query.order_by(deaths.c.generation.desc()).limit(MAX_DEATHS))  # as the index has them
    return tuple(as_death(death) for death in sorted(newest, key=lambda death: death.id))


def _disagreement_of(row: Any, replica: str, boot: str) -> Any:
    mine = (disagreements.c.replica == replica) & (disagreements.c.boot == boot)
    return (disagreements.c.deployment_id == row.id) & mine


def _disagreements(db: sa.Connection, key: int) -> tuple[Disagreement, ...]:
    this = sa.select(disagreements).where(disagreements.c.deployment_id == key)
    newest = db.execute(this.order_by(disagreements.c.id.desc()).limit(MAX_DISAGREEMENTS)).all()
    last = {row.replica: as_disagreement(row) for row in reversed(newest)}
    return tuple(last.values())


def _failed_somewhere(db: sa.Connection, row: Any) -> bool:
    """Whether some replica's last word about the desired snapshot, since its last signal, is that it failed."""
    this = (
        (transitions.c.deployment_id == row.id)
        & (transitions.c.identity == row.desired_snapshot)
        & (transitions.c.generation >= row.generation)
    )
    last = sa.select(sa.func.max(transitions.c.id)).where(this).group_by(transitions.c.replica)
    failed = sa.select(transitions.c.id).where(
        transitions.c.id.in_(last), transitions.c.stage == Stage.ERROR.value
    )
    return db.execute(failed.limit(1)).first() is not None


def _insert_transition(db: sa.Connection, key: int, replica: str, boot: str, t: Transition) -> bool:
    values = {"deployment_id": key, "replica": replica, "boot": boot, "seq": t.seq, "identity": t.snapshot}
    values |= {"generation": t.generation, "at": t.at, "stage": t.stage.value}
    values["detail"] = storable(t.detail)
    return insert_new(db, transitions, values)


def _note_served(db: sa.Connection, key: int, t: Transition) -> None:
    """It was fetched as it was told: with the contents known then, for every link that was not signalled again since."""
    served = _snapshot(db, key, t.snapshot)
    if served is None or served.generation > t.generation:
        return
    links = (snapshots.c.deployment_id == key) & snapshots.c.identity.in_(sorted(chain_identities([served])))
    told = sa.select(snapshots.c.identity).where(links & (snapshots.c.generation <= t.generation))
    prove(db, key, db.execute(told).scalars().all())


def _note_ready(db: sa.Connection, key: int, replica: str, t: Transition) -> None:
    this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == t.snapshot)
    signalled = sa.select(snapshots.c.generation).where(this).scalar_subquery()
    made_up = (deaths.c.identity == t.snapshot) | (deaths.c.generation < signalled)
    mine = (deaths.c.deployment_id == key) & (deaths.c.replica == replica)
    db.execute(deaths.update().where(mine & made_up).values(forgiven=True))
    first = snapshots.update().where(this).values(ready_at=sa.func.coalesce(snapshots.c.ready_at, t.at))
    if not db.execute(first).rowcount:
        return  # signalled through another ledger
    highest = sa.select(sa.func.max(snapshots.c.ready_order)).where(snapshots.c.deployment_id == key)
    order = (db.execute(highest).scalar() or 0) + 1
    current = this & (snapshots.c.since_generation <= t.generation)
    db.execute(snapshots.update().where(current).values(ready_order=order))
    of_all = sa.func.coalesce(deployments.c.first_ready_at, t.at)
    db.execute(deployments.update().where(deployments.c.id == key).values(first_ready_at=of_all))
