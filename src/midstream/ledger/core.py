"""The ledger's SQL, synchronous. `Ledger` (ledger/__init__.py) runs it in a thread.

Always holds:
- Durable before visible: a method that changes the desired state returns after its commit.
- Writers of one deployment are serialised: on SQLite by the write lock every transaction begins with (waited for
  up to BUSY_TIMEOUT_S), on PostgreSQL by the deployment's row, which every writer updates first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from midstream.errors import ConfigError, NotFound, ReplicaUnavailable
from midstream.ledger.records import (
    DeploymentRow,
    DeploymentState,
    SignalResult,
    SnapshotRow,
    TransitionRow,
)
from midstream.ledger.schema import (
    SCHEMA_VERSION,
    deployments,
    metadata,
    schema_version,
    snapshots,
    transitions,
)
from midstream.types import BASE_SNAPSHOT, Desired, ResetPromptCache, Stage, Transition, TransitionType

BUSY_TIMEOUT_S = 10.0
MAX_FALLBACKS = 8


class LedgerUnavailable(ReplicaUnavailable):
    """503: the database did not answer; nothing was changed, a retry may succeed."""


class LedgerCore:
    """All statements. Not for use from several threads at once."""

    def __init__(self, url: str) -> None:
        """Open or create the ledger at `url` (an SQLAlchemy URL). Raises ConfigError when it cannot be used."""
        try:
            self.engine = sa.create_engine(url)
        except (SQLAlchemyError, ImportError) as error:
            raise ConfigError(f"the ledger's database URL cannot be used: {error}") from error
        shown = self.engine.url.render_as_string(hide_password=True)
        if self.engine.dialect.name == "sqlite":
            sa.event.listen(self.engine, "connect", _configure_sqlite)
            sa.event.listen(self.engine, "begin", _begin_immediate)
        try:
            with self.engine.begin() as db:
                version = _prepare_schema(db)
        except SQLAlchemyError as error:
            self.engine.dispose()
            raise ConfigError(f"ledger {shown}: cannot be opened: {_reason(error)}") from error
        if version != SCHEMA_VERSION:
            self.engine.dispose()
            raise ConfigError(
                f"ledger {shown}: has schema version {version}, this midstream reads version {SCHEMA_VERSION}; "
                "use the midstream that wrote it, or another --state-dir"
            )

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        try:
            with self.engine.begin() as db:
                yield db
        except DBAPIError as error:
            raise LedgerUnavailable(f"the ledger cannot be used now: {_reason(error)}") from error

    def ensure_deployment(
        self, name: str, model: str, bucket_url: str, transition: TransitionType, now: float
    ) -> DeploymentRow:
        values = {"model": model, "bucket_url": bucket_url, "transition": transition}
        with self._begin() as db:
            fresh = {
                **values,
                "name": name,
                "desired_snapshot": BASE_SNAPSHOT,
                "generation": 0,
                "created_at": now,
            }
            db.execute(_insert_new(db, deployments).values(fresh))
            _, row = _lock_deployment(db, name)
            if row.generation > 0 and row.model != model:
                raise ConfigError(
                    f"the ledger's deployment {name} serves {row.model}, not {model}; use another --state-dir"
                )
            db.execute(deployments.update().where(deployments.c.name == name).values(values))
            return _deployment(db, name)[1]

    def deployment(self, name: str) -> DeploymentRow:
        with self._begin() as db:
            return _deployment(db, name)[1]

    def deployments(self) -> list[DeploymentRow]:
        with self._begin() as db:
            rows = db.execute(sa.select(deployments).order_by(deployments.c.name))
            return [_deployment_row(row) for row in rows]

    def signal(
        self,
        name: str,
        identity: str,
        url: str,
        reset: ResetPromptCache,
        now: float,
        failed_generation: int | None,
        generation_floor: int,
    ) -> SignalResult:
        with self._begin() as db:
            key, row = _lock_deployment(db, name)
            known_failed = failed_generation == row.generation
            wanted = row.desired_snapshot == identity
            if wanted and not known_failed and not _failed_somewhere(db, key, identity, row.generation):
                desired = _desired(db, key, row)
                assert desired is not None
                return SignalResult(desired, changed=False)
            generation = max(row.generation, generation_floor) + 1
            signalled: dict[str, Any] = {
                "url": url,
                "reset_prompt_cache": reset,
                "signalled_at": now,
                "generation": generation,
            }
            fresh = {"deployment_id": key, "identity": identity, "kind": "full", "first_signalled_at": now}
            db.execute(_insert_new(db, snapshots).values({**fresh, **signalled}))
            this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == identity)
            db.execute(snapshots.update().where(this).values(signalled))
            db.execute(
                deployments.update()
                .where(deployments.c.id == key)
                .values(desired_snapshot=identity, generation=generation)
            )
            desired = _desired(db, key, _deployment(db, name)[1])
            assert desired is not None
            return SignalResult(desired, changed=True)

    def state(self, name: str) -> DeploymentState:
        with self._begin() as db:
            key, row = _deployment(db, name)
            desired = _desired(db, key, row)
            return DeploymentState(desired, _fallbacks(db, key, row) if desired is not None else ())

    def record(self, name: str, replica: str, boot: str, rows: Sequence[Transition]) -> int:
        with self._begin() as db:
            key, _ = _lock_deployment(db, name)
            common = {"deployment_id": key, "replica": replica, "boot": boot}
            added = 0
            for t in rows:
                values = {"seq": t.seq, "identity": t.snapshot, "generation": t.generation, "at": t.at}
                values |= {"stage": t.stage.value, "detail": t.detail}
                added += db.execute(_insert_new(db, transitions).values({**common, **values})).rowcount
            return added

    def boot_transitions(self, name: str, replica: str, boot: str) -> list[TransitionRow]:
        with self._begin() as db:
            key, _ = _deployment(db, name)
            this = (
                (transitions.c.deployment_id == key)
                & (transitions.c.replica == replica)
                & (transitions.c.boot == boot)
            )
            rows = db.execute(sa.select(transitions).where(this).order_by(transitions.c.seq))
            return [_transition_row(row) for row in rows]

    def snapshots(self, name: str) -> list[SnapshotRow]:
        with self._begin() as db:
            key, _ = _deployment(db, name)
            query = sa.select(snapshots).where(snapshots.c.deployment_id == key)
            return [_snapshot_row(row) for row in db.execute(query.order_by(snapshots.c.id))]

    def transitions(self, name: str) -> list[TransitionRow]:
        with self._begin() as db:
            key, _ = _deployment(db, name)
            query = sa.select(transitions).where(transitions.c.deployment_id == key)
            return [_transition_row(row) for row in db.execute(query.order_by(transitions.c.id))]


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own; _begin_immediate does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_immediate(db: sa.Connection) -> None:
    # A transaction that reads first and writes later fails at once when another wrote in between; one that takes
    # the write lock at its start waits instead. They are few and short.
    db.exec_driver_sql("BEGIN IMMEDIATE")


def _prepare_schema(db: sa.Connection) -> int:
    """The schema version found, after creating the tables in an empty database."""
    if not sa.inspect(db).has_table(schema_version.name):
        metadata.create_all(db)
        db.execute(_insert_new(db, schema_version).values(version=SCHEMA_VERSION))
    return int(db.execute(sa.select(sa.func.max(schema_version.c.version))).scalar_one() or 0)


def _insert_new(db: sa.Connection, table: sa.Table) -> Any:
    """An INSERT that does nothing when a unique constraint says the row is there."""
    dialect = postgresql if db.dialect.name == "postgresql" else sqlite
    return dialect.insert(table).on_conflict_do_nothing()


def _lock_deployment(db: sa.Connection, name: str) -> tuple[int, DeploymentRow]:
    touch = deployments.update().where(deployments.c.name == name)
    db.execute(touch.values(generation=deployments.c.generation))
    return _deployment(db, name)


def _deployment(db: sa.Connection, name: str) -> tuple[int, DeploymentRow]:
    row = db.execute(sa.select(deployments).where(deployments.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    return row.id, _deployment_row(row)


def _desired(db: sa.Connection, key: int, row: DeploymentRow) -> Desired | None:
    if row.desired_snapshot == BASE_SNAPSHOT:
        return None
    this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == row.desired_snapshot)
    snapshot = db.execute(sa.select(snapshots).where(this)).one()
    return _as_desired(snapshot, row)


def _as_desired(snapshot: Any, row: DeploymentRow) -> Desired:
    return Desired(
        snapshot=snapshot.identity,
        generation=row.generation,
        url=snapshot.url,
        reset_prompt_cache=snapshot.reset_prompt_cache,
        transition=row.transition,
    )


def _fallbacks(db: sa.Connection, key: int, row: DeploymentRow) -> tuple[Desired, ...]:
    """Snapshots that became ready on a replica, the last one first.

    They carry the deployment's generation: a replica takes (snapshot, generation) pairs, and an older generation
    could be mistaken for a late message.
    """
    ready = (
        sa.select(transitions.c.identity, sa.func.max(transitions.c.id).label("last"))
        .where(transitions.c.deployment_id == key, transitions.c.stage == Stage.IDLE.value)
        .group_by(transitions.c.identity)
        .subquery()
    )
    query = (
        sa.select(snapshots)
        .join(ready, ready.c.identity == snapshots.c.identity)
        .where(snapshots.c.deployment_id == key, snapshots.c.identity != row.desired_snapshot)
        .order_by(ready.c.last.desc())
        .limit(MAX_FALLBACKS)
    )
    return tuple(_as_desired(snapshot, row) for snapshot in db.execute(query))


def _failed_somewhere(db: sa.Connection, key: int, identity: str, generation: int) -> bool:
    """Whether some replica's last word about this signal is that it failed."""
    this = (
        (transitions.c.deployment_id == key)
        & (transitions.c.identity == identity)
        & (transitions.c.generation == generation)
    )
    last = sa.select(sa.func.max(transitions.c.id)).where(this).group_by(transitions.c.replica)
    failed = sa.select(transitions.c.id).where(
        transitions.c.id.in_(last), transitions.c.stage == Stage.ERROR.value
    )
    return db.execute(failed.limit(1)).first() is not None


def _deployment_row(row: Any) -> DeploymentRow:
    return DeploymentRow(
        name=row.name,
        model=row.model,
        bucket_url=row.bucket_url,
        transition=row.transition,
        desired_snapshot=row.desired_snapshot,
        generation=row.generation,
        created_at=row.created_at,
    )


def _snapshot_row(row: Any) -> SnapshotRow:
    return SnapshotRow(
        identity=row.identity,
        kind=row.kind,
        url=row.url,
        reset_prompt_cache=row.reset_prompt_cache,
        first_signalled_at=row.first_signalled_at,
        signalled_at=row.signalled_at,
        generation=row.generation,
    )


def _transition_row(row: Any) -> TransitionRow:
    return TransitionRow(
        replica=row.replica,
        boot=row.boot,
        seq=row.seq,
        identity=row.identity,
        generation=row.generation,
        stage=Stage(row.stage),
        at=row.at,
        detail=row.detail,
    )


def _reason(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().split("\n", 1)[0]
