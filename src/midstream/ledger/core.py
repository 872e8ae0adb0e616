"""The ledger's SQL, synchronous. `Ledger` (ledger/__init__.py) runs it in a thread.

Always holds:
- Durable before visible: a method that changes the desired state returns after its commit.
- Writers of one deployment are serialised: on SQLite by the write lock every writing transaction begins with (waited for
  up to BUSY_TIMEOUT_S), on PostgreSQL by the deployment's row, which every writer updates first.
- Readers wait for nobody and hold nobody up; what `state` reads does not grow with the number of stage changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from midstream.errors import ConfigError, NotFound, ReplicaUnavailable
from midstream.ledger.records import (
    BootHistory,
    Death,
    DeploymentRow,
    DeploymentState,
    SignalResult,
    SnapshotRow,
    TransitionRow,
    stronger_reset,
)
from midstream.ledger.schema import (
    SCHEMA_VERSION,
    deaths,
    deployments,
    metadata,
    schema_version,
    snapshots,
    transitions,
)
from midstream.types import BASE_SNAPSHOT, Desired, ResetPromptCache, Stage, Transition, TransitionType

BUSY_TIMEOUT_S = 10.0
MAX_FALLBACKS = 8
TAIL_ROWS = 2  # of a boot that ended: its last stage change, and the one that says how far it had got
_READS_ONLY = "midstream_reads_only"


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
            sa.event.listen(self.engine, "begin", _begin_sqlite)
        self._reader = self.engine.execution_options(**{_READS_ONLY: True})
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
    def _begin(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        try:
            with engine.begin() as db:
                yield db
        except DBAPIError as error:
            raise LedgerUnavailable(f"the ledger cannot be used now: {_reason(error)}") from error

    def _write(self) -> AbstractContextManager[sa.Connection]:
        return self._begin(self.engine)

    def _read(self) -> AbstractContextManager[sa.Connection]:
        return self._begin(self._reader)

    def ensure_deployment(
        self, name: str, model: str, bucket_url: str, transition: TransitionType, now: float
    ) -> DeploymentRow:
        values = {"model": model, "bucket_url": bucket_url, "transition": transition}
        with self._write() as db:
            fresh: dict[str, Any] = {
                **values,
                "name": name,
                "desired_snapshot": BASE_SNAPSHOT,
                "created_at": now,
            }
            fresh |= dict.fromkeys(("generation", "last_generation"), 0)
            fresh |= dict.fromkeys(("reset_all_generation", "reset_new_session_generation"), 0)
            db.execute(_insert_new(db, deployments).values(fresh))
            row = _locked_deployment(db, name)
            if row.generation > 0 and row.model != model:
                raise ConfigError(
                    f"the ledger's deployment {name} serves {row.model}, not {model}; use another --state-dir"
                )
            db.execute(deployments.update().where(deployments.c.name == name).values(values))
            return _deployment_row(_deployment(db, name))

    def deployment(self, name: str) -> DeploymentRow:
        with self._read() as db:
            return _deployment_row(_deployment(db, name))

    def deployments(self) -> list[DeploymentRow]:
        with self._read() as db:
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
        fingerprint: str | None,
    ) -> SignalResult:
        with self._write() as db:
            row = _locked_deployment(db, name)
            known = _snapshot(db, row.id, identity)
            same_files = known is not None and known.fingerprint == fingerprint
            if same_files and row.desired_snapshot == identity:
                if failed_generation != row.generation and not _failed_somewhere(db, row):
                    return SignalResult(_as_desired(known, row), changed=False)
                reset = stronger_reset(
                    reset, known.reset_prompt_cache
                )  # nobody may have loaded the first one
            generation = max(row.last_generation, generation_floor) + 1
            signalled: dict[str, Any] = {
                "url": url,
                "reset_prompt_cache": reset,
                "signalled_at": now,
                "generation": generation,
                "fingerprint": fingerprint,
            }
            if not same_files:
                signalled |= {"since_generation": generation, "ready_order": None}
            if known is None:
                fresh = {
                    "deployment_id": row.id,
                    "identity": identity,
                    "kind": "full",
                    "first_signalled_at": now,
                }
                db.execute(snapshots.insert().values({**fresh, **signalled}))
            else:
                db.execute(snapshots.update().where(snapshots.c.id == known.id).values(signalled))
            db.execute(_desire(row, identity, generation, reset, now))
            desired = _as_desired(_snapshot(db, row.id, identity), _deployment(db, name))
            return SignalResult(desired, changed=True)

    def new_generation(self, name: str, floor: int) -> int:
        with self._write() as db:
            row = _locked_deployment(db, name)
            generation = max(int(row.last_generation), floor) + 1
            this = deployments.c.id == row.id
            db.execute(deployments.update().where(this).values(last_generation=generation))
            return generation

    def state(self, name: str) -> DeploymentState:
        with self._read() as db:
            row = _deployment(db, name)
            if row.desired_snapshot == BASE_SNAPSHOT:
                return DeploymentState(None, ever_ready=row.first_ready_at is not None)
            desired = _snapshot(db, row.id, row.desired_snapshot)
            fallbacks = _fallbacks(db, row)
            return DeploymentState(
                _as_desired(desired, row),
                tuple(_as_desired(snapshot, row) for snapshot in fallbacks),
                since={snapshot.identity: snapshot.since_generation for snapshot in (desired, *fallbacks)},
                ever_ready=row.first_ready_at is not None,
                first_signalled_at=row.first_signalled_at,
                reset_all=row.reset_all_generation,
                reset_new_session=row.reset_new_session_generation,
                deaths=_deaths(db, row),
            )

    def record(self, name: str, replica: str, boot: str, rows: Sequence[Transition]) -> int:
        with self._write() as db:
            key = _locked_deployment(db, name).id
            added = 0
            for t in rows:
                new = _insert_transition(db, key, replica, boot, t)
                if new and t.stage is Stage.IDLE and t.snapshot != BASE_SNAPSHOT:
                    _note_ready(db, key, t)
                added += new
            return added

    def boot_history(self, name: str, replica: str, boot: str, ended: str | None) -> BootHistory:
        with self._read() as db:
            ours = (transitions.c.deployment_id == _deployment(db, name).id) & (
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
            rows = tuple(_transition_row(row) for row in db.execute(tail))
            return BootHistory(last_seq=-1, previous_boot=ended, tail=rows[::-1])

    def record_death(self, name: str, boot: str, death: Death, seq: int | None, now: float) -> bool:
        with self._write() as db:
            key = _locked_deployment(db, name).id
            values = {"replica": death.replica, "identity": death.identity, "generation": death.generation}
            values |= {"deployment_id": key, "boot": boot, "detail": death.detail}
            if not db.execute(_insert_new(db, deaths).values(values)).rowcount:
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
                _insert_transition(db, key, death.replica, boot, failed)
            return True

    def boot_transitions(self, name: str, replica: str, boot: str) -> list[TransitionRow]:
        with self._read() as db:
            this = (
                (transitions.c.deployment_id == _deployment(db, name).id)
                & (transitions.c.replica == replica)
                & (transitions.c.boot == boot)
            )
            rows = db.execute(sa.select(transitions).where(this).order_by(transitions.c.seq))
            return [_transition_row(row) for row in rows]

    def snapshots(self, name: str) -> list[SnapshotRow]:
        with self._read() as db:
            query = sa.select(snapshots).where(snapshots.c.deployment_id == _deployment(db, name).id)
            return [_snapshot_row(row) for row in db.execute(query.order_by(snapshots.c.id))]

    def transitions(self, name: str, newest: int | None) -> list[TransitionRow]:
        with self._read() as db:
            query = sa.select(transitions).where(transitions.c.deployment_id == _deployment(db, name).id)
            rows = db.execute(query.order_by(transitions.c.id.desc()).limit(newest)).all()
            return [_transition_row(row) for row in reversed(rows)]


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own; _begin_immediate does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(db: sa.Connection) -> None:
    # A transaction that reads first and writes later fails at once when another wrote in between; one that takes
    # the write lock at its start waits instead. They are few and short.
    db.exec_driver_sql("BEGIN" if db.get_execution_options().get(_READS_ONLY) else "BEGIN IMMEDIATE")


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


def _locked_deployment(db: sa.Connection, name: str) -> Any:
    touch = deployments.update().where(deployments.c.name == name)
    db.execute(touch.values(generation=deployments.c.generation))
    return _deployment(db, name)


def _deployment(db: sa.Connection, name: str) -> Any:
    row = db.execute(sa.select(deployments).where(deployments.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    return row


def _snapshot(db: sa.Connection, key: int, identity: str) -> Any:
    this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == identity)
    return db.execute(sa.select(snapshots).where(this)).one_or_none()


def _as_desired(snapshot: Any, row: Any) -> Desired:
    """A snapshot as it may be sent.

    It carries the deployment's generation, also as a fallback: a replica takes (snapshot, generation) pairs, and an
    older generation could be mistaken for a late message.
    """
    return Desired(
        snapshot=snapshot.identity,
        generation=row.generation,
        url=snapshot.url,
        reset_prompt_cache=snapshot.reset_prompt_cache,
        transition=row.transition,
        fingerprint=snapshot.fingerprint,
    )


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
    query = sa.select(deaths).where(deaths.c.deployment_id == row.id, deaths.c.generation >= row.generation)
    found = sorted(db.execute(query), key=lambda death: death.id)
    return tuple(Death(d.replica, d.identity, d.generation, d.detail) for d in found)


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


def _insert_transition(db: sa.Connection, key: int, replica: str, boot: str, t: Transition) -> int:
    values = {"deployment_id": key, "replica": replica, "boot": boot, "seq": t.seq, "identity": t.snapshot}
    values |= {"generation": t.generation, "at": t.at, "stage": t.stage.value, "detail": t.detail}
    return db.execute(_insert_new(db, transitions).values(values)).rowcount


def _note_ready(db: sa.Connection, key: int, t: Transition) -> None:
    this = (snapshots.c.deployment_id == key) & (snapshots.c.identity == t.snapshot)
    first = snapshots.update().where(this).values(ready_at=sa.func.coalesce(snapshots.c.ready_at, t.at))
    if not db.execute(first).rowcount:
        return  # signalled through another ledger
    highest = sa.select(sa.func.max(snapshots.c.ready_order)).where(snapshots.c.deployment_id == key)
    order = (db.execute(highest).scalar() or 0) + 1
    current = this & (snapshots.c.since_generation <= t.generation)
    db.execute(snapshots.update().where(current).values(ready_order=order))
    of_all = sa.func.coalesce(deployments.c.first_ready_at, t.at)
    db.execute(deployments.update().where(deployments.c.id == key).values(first_ready_at=of_all))


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
        fingerprint=row.fingerprint,
        ready_at=row.ready_at,
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
