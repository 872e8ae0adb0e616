"""The front's durable rows: sessions, sampling sessions, models and checkpoints, in one SQLite file.

Always holds:
- A row made under a client's counter (session and sampling_session_seq_id or model_seq_id) is made once. Asking again gives
  that row, or TinkerRefusal 400 when the request differs.
- Every row belongs to one tenant; another tenant's row is as unknown as none.
- A session without use for IDLE_S goes with its sampling sessions and those of its models that have no checkpoints. Beyond
  MAX_SESSIONS of a tenant, the session that is idle the longest goes, too. Checkpoints stay until they are deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from midstream.core.clock import steady
from midstream.core.errors import ConfigError
from midstream.core.private import private_file
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.tables import SCHEMA_VERSION, checkpoints, metadata, models, sampling_sessions, sessions
from midstream_tinker.trainer.types import LoraConfig
from midstream_tinker.types import CheckpointKind, Policy

IDLE_S = 24 * 3600.0
# Heartbeats come every 10 s. After so long without one, the session's client is dead or asleep.
SILENT_S = 300.0
# How late `seen` may be on disk.
SEEN_EVERY_S = 60.0
MAX_SESSIONS = 1000
MAX_SAMPLING_SESSIONS = 20_000
# Models of one session.
MAX_MODELS = 1000
EXPIRE_EVERY_S = 300.0
BUSY_TIMEOUT_MS = 10_000


class TinkerSession(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    # Seconds since the epoch.
    created: float
    seen: float
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None


class SamplingSession(msgspec.Struct, frozen=True, kw_only=True):
    """snapshot: the one asked for; run: its newer snapshots will do as well (policy "run")."""

    id: str
    tenant: str
    session_id: str
    seq: int
    base_model: str
    model_path: str | None
    snapshot: str | None
    run: str | None
    policy: Policy
    created: float


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    # <session_id>:train:<seq>
    id: str
    tenant: str
    session_id: str
    seq: int
    base_model: str
    lora: LoraConfig
    restored_from: str | None
    created: float
    user_metadata: dict[str, Any] | None = None


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """snapshot: of sampler weights, the identity they were published under. size: of the files, bytes."""

    uri: str
    tenant: str
    model_id: str
    kind: CheckpointKind
    name: str
    created: float
    snapshot: str | None
    base_model: str
    size: int | None = None
    user_metadata: dict[str, Any] | None = None


_R = TypeVar("_R", bound=msgspec.Struct)
_M = TypeVar("_M", SamplingSession, ModelRow)

_UNNAMED = sa.and_(sampling_sessions.c.policy == "adapter", sampling_sessions.c.model_path.is_(None))
_NEWEST = (sampling_sessions.c.created.desc(), sampling_sessions.c.seq.desc())


class Store:
    """All calls are short and synchronous, for use in one thread."""

    def __init__(self, path: Path | str, clock: Callable[[], float] = steady) -> None:
        """Open or create. Raises ConfigError when it cannot be used. ":memory:" keeps nothing."""
        self._clock = clock
        self._path = path
        try:
            if path != ":memory:":
                private_file(Path(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror or error}") from error
        self._engine = sa.create_engine(
            f"sqlite:///{path}", poolclass=sa.pool.StaticPool, hide_parameters=True
        )
        sa.event.listen(self._engine, "connect", _configure)
        sa.event.listen(self._engine, "begin", lambda db: db.exec_driver_sql("BEGIN IMMEDIATE"))
        try:
            with self._engine.begin() as db:
                version = _prepare(db)
        except SQLAlchemyError as error:
            raise ConfigError(f"{path}: cannot be opened: {error}") from error
        if version != SCHEMA_VERSION:
            raise ConfigError(f"{path}: has schema version {version}, this midstream reads {SCHEMA_VERSION}")
        # Session to its `seen`, as it is on disk.
        self._seen: dict[str, float] = {}
        self._sampling: dict[str, SamplingSession] = {}
        # Not at once: those who used it before are given time to say that they still do.
        self._expired = clock()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        """Raises TinkerRefusal (503): nothing was changed."""
        try:
            with self._engine.begin() as db:
                yield db
        except SQLAlchemyError as error:
            # The error without the statement.
            why = getattr(error, "orig", None) or type(error).__name__
            raise TinkerRefusal(503, f"the server's records cannot be used now: {why}") from error

    # There is one connection and one thread: a reader would gain nothing by another mode.
    _read = _write

    # -- sessions

    def create_session(
        self,
        tenant: str,
        *,
        display_name: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> TinkerSession:
        """Raises TinkerRefusal (400) when the tenant has MAX_SESSIONS sessions in use."""
        now = self._clock()
        self.expire()
        session = TinkerSession(
            id=f"session_{secrets.token_hex(12)}",
            tenant=tenant,
            created=now,
            seen=now,
            display_name=display_name,
            user_metadata=None if user_metadata is None else dict(user_metadata),
        )
        with self._write() as db:
            self._room_for_session(db, tenant, now)
            db.execute(sessions.insert().values(msgspec.structs.asdict(session)))
        self._seen[session.id] = now
        return session

    def session(self, tenant: str, session_id: str) -> TinkerSession | None:
        return self._one(TinkerSession, sessions, _mine(sessions, tenant, session_id))

    def sessions(self, tenant: str) -> list[TinkerSession]:
        """The newest first."""
        return self._of(TinkerSession, sessions, sessions.c.tenant == tenant)

    def touch_session(self, tenant: str, session_id: str) -> bool:
        """It is in use; whether there is such a session."""
        now = self._clock()
        if now - self._seen.get(session_id, 0.0) < SEEN_EVERY_S:
            return self.session(tenant, session_id) is not None
        with self._write() as db:
            changed = db.execute(
                sessions.update().where(_mine(sessions, tenant, session_id)).values(seen=now)
            )
        if changed.rowcount:
            self._seen[session_id] = now
        return bool(changed.rowcount)

    # -- sampling sessions

    def create_sampling_session(
        self,
        tenant: str,
        session_id: str,
        seq: int,
        *,
        base_model: str,
        policy: Policy,
        model_path: str | None = None,
        snapshot: str | None = None,
        run: str | None = None,
    ) -> SamplingSession:
        """The one under (session, seq). Raises TinkerRefusal: 404 no such session, 400 made before otherwise."""
        fresh = SamplingSession(
            id=f"sampling_{secrets.token_hex(8)}",
            tenant=tenant,
            session_id=session_id,
            seq=seq,
            base_model=base_model,
            model_path=model_path,
            snapshot=snapshot,
            run=run,
            policy=policy,
            created=self._clock(),
        )
        with self._write() as db:
            there = self._made(db, sampling_sessions, fresh)
            if there is not None:
                if (there.base_model, there.model_path, there.policy) != (base_model, model_path, policy):
                    _otherwise("sampling_session_seq_id", seq, f"{there.model_path or there.base_model}")
                return there
            db.execute(sampling_sessions.insert().values(msgspec.structs.asdict(fresh)))
            if _drop_oldest(db, sampling_sessions, tenant, MAX_SAMPLING_SESSIONS):
                self._sampling.clear()
        return fresh

    def sampling_session_at(self, tenant: str, session_id: str, seq: int) -> SamplingSession | None:
        """The one under this counter of the client's."""
        under = _under(sampling_sessions, session_id, seq)
        return self._one(SamplingSession, sampling_sessions, under, sampling_sessions.c.tenant == tenant)

    def sampling_session(self, tenant: str, sampling_session_id: str) -> SamplingSession | None:
        """Asked at every sample: it is then in use, and its session."""
        found = self._sampling.get(sampling_session_id)
        if found is None:
            found = self._one(
                SamplingSession, sampling_sessions, sampling_sessions.c.id == sampling_session_id
            )
            if found is None:
                return None
            if len(self._sampling) >= MAX_SAMPLING_SESSIONS:
                self._sampling.clear()
            self._sampling[found.id] = found
        if found.tenant != tenant:
            return None
        if self._clock() - self._seen.get(found.session_id, 0.0) >= SEEN_EVERY_S:
            self.touch_session(tenant, found.session_id)
        return found

    def unnamed_adapters(self) -> set[str]:
        """The adapters that were saved without a name and that sampling sessions stand for, of all tenants."""
        asked = sa.select(sampling_sessions.c.snapshot).where(_UNNAMED)
        with self._read() as db:
            return set(db.execute(asked).scalars())

    def drop_unnamed(self, run: str, keep: int) -> None:
        """Of a run's sampling sessions on adapters without a name, the newest `keep` stay."""
        mine = sa.and_(_UNNAMED, sampling_sessions.c.run == run)
        newest = sa.select(sampling_sessions.c.id).where(mine).order_by(*_NEWEST).limit(-1).offset(keep)
        with self._write() as db:
            if db.execute(sampling_sessions.delete().where(sampling_sessions.c.id.in_(newest))).rowcount:
                self._sampling.clear()

    def sampling_sessions(self, tenant: str, session_id: str) -> list[SamplingSession]:
        table = sampling_sessions
        return self._of(SamplingSession, table, table.c.tenant == tenant, table.c.session_id == session_id)

    # -- models

    def create_model(
        self,
        tenant: str,
        session_id: str,
        seq: int,
        *,
        base_model: str,
        lora: LoraConfig,
        restored_from: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> ModelRow:
        """The one under (session, seq). Raises TinkerRefusal: 404 no such session, 400 made before otherwise, or too many."""
        fresh = ModelRow(
            id=f"{session_id}:train:{seq}",
            tenant=tenant,
            session_id=session_id,
            seq=seq,
            base_model=base_model,
            lora=lora,
            restored_from=restored_from,
            created=self._clock(),
            user_metadata=None if user_metadata is None else dict(user_metadata),
        )
        with self._write() as db:
            there = self._made(db, models, fresh)
            if there is not None:
                if (there.base_model, there.lora, there.restored_from) != (base_model, lora, restored_from):
                    _otherwise("model_seq_id", seq, there.restored_from or there.base_model)
                return there
            _room_for_model(db, session_id)
            db.execute(models.insert().values(msgspec.to_builtins(fresh)))
        return fresh

    def model(self, tenant: str, model_id: str) -> ModelRow | None:
        return self._one(ModelRow, models, _mine(models, tenant, model_id))

    def models(self, tenant: str, session_id: str | None = None) -> list[ModelRow]:
        """The newest first."""
        of_session = () if session_id is None else (models.c.session_id == session_id,)
        return self._of(ModelRow, models, models.c.tenant == tenant, *of_session)

    # -- checkpoints

    def add_checkpoint(self, tenant: str, row: CheckpointRow) -> None:
        """In place of one with the same uri of the tenant's."""
        assert row.tenant == tenant
        with self._write() as db:
            db.execute(checkpoints.delete().where(_mine_at(tenant, row.uri)))
            db.execute(checkpoints.insert().values(msgspec.to_builtins(row)))

    def checkpoint(self, tenant: str, uri: str) -> CheckpointRow | None:
        return self._one(CheckpointRow, checkpoints, _mine_at(tenant, uri))

    def checkpoints(self, tenant: str, model_id: str | None = None) -> list[CheckpointRow]:
        """The newest first; of one model, or all."""
        of_model = () if model_id is None else (checkpoints.c.model_id == model_id,)
        return self._of(CheckpointRow, checkpoints, checkpoints.c.tenant == tenant, *of_model)

    def delete_checkpoint(self, tenant: str, uri: str) -> bool:
        """Whether there was one."""
        with self._write() as db:
            return bool(db.execute(checkpoints.delete().where(_mine_at(tenant, uri))).rowcount)

    # -- age

    def expire(self) -> None:
        """Drop what has been idle for too long; does little when called often."""
        now = self._clock()
        if now - self._expired < EXPIRE_EVERY_S:
            return
        self._expired = now
        with self._write() as db:
            idle = db.execute(sa.select(sessions.c.id).where(sessions.c.seen < now - IDLE_S)).scalars().all()
            for session_id in idle:
                self._drop_session(db, session_id)

    def _room_for_session(self, db: sa.Connection, tenant: str, now: float) -> None:
        mine = sessions.c.tenant == tenant
        count = db.execute(sa.select(sa.func.count()).where(mine)).scalar_one()
        if count < MAX_SESSIONS:
            return
        oldest = db.execute(sa.select(sessions).where(mine).order_by(sessions.c.seen).limit(1)).one()
        if now - oldest.seen < SILENT_S:
            message = (
                f"this API key has {count} sessions in use, which is the most there may be; end some of them"
            )
            # A 429 would hold the client up for minutes, in silence.
            raise TinkerRefusal(400, message)
        self._drop_session(db, oldest.id)

    def _drop_session(self, db: sa.Connection, session_id: str) -> None:
        """With what stands under it, but models that have checkpoints."""
        kept = sa.select(checkpoints.c.model_id)
        db.execute(models.delete().where(models.c.session_id == session_id, models.c.id.not_in(kept)))
        db.execute(sampling_sessions.delete().where(sampling_sessions.c.session_id == session_id))
        db.execute(sessions.delete().where(sessions.c.id == session_id))
        self._seen.pop(session_id, None)
        self._sampling.clear()

    def _made(self, db: sa.Connection, table: sa.Table, fresh: _M) -> _M | None:
        """What was made under the session and the counter of `fresh`. Raises TinkerRefusal (404): no such session."""
        mine = _mine(sessions, fresh.tenant, fresh.session_id)
        if db.execute(sa.select(sessions.c.id).where(mine)).first() is None:
            raise no_session(fresh.session_id)
        row = db.execute(sa.select(table).where(_under(table, fresh.session_id, fresh.seq))).first()
        return None if row is None else _as(row, type(fresh))

    def _one(self, struct: type[_R], table: sa.Table, *where: sa.ColumnElement[bool]) -> _R | None:
        with self._read() as db:
            row = db.execute(sa.select(table).where(*where)).first()
        return None if row is None else _as(row, struct)

    def _of(self, struct: type[_R], table: sa.Table, *where: sa.ColumnElement[bool]) -> list[_R]:
        """The newest first."""
        with self._read() as db:
            rows = db.execute(sa.select(table).where(*where).order_by(table.c.created.desc()))
            return [_as(row, struct) for row in rows]


def no_session(session_id: str) -> TinkerRefusal:
    message = f"there is no session {session_id!r} of this API key; it may have been idle for a day"
    return TinkerRefusal(404, message, "session_id")


def _mine(table: sa.Table, tenant: str, row_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.id == row_id, table.c.tenant == tenant)


def _mine_at(tenant: str, uri: str) -> sa.ColumnElement[bool]:
    return sa.and_(checkpoints.c.uri == uri, checkpoints.c.tenant == tenant)


def _under(table: sa.Table, session_id: str, seq: int) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.session_id == session_id, table.c.seq == seq)


def _room_for_model(db: sa.Connection, session_id: str) -> None:
    count = db.execute(sa.select(sa.func.count()).where(models.c.session_id == session_id)).scalar_one()
    if count >= MAX_MODELS:
        raise TinkerRefusal(
            400, f"this session has made {count} models, the most it may; begin a new one", "session_id"
        )


def _as(row: sa.Row[Any], struct: type[_R]) -> _R:
    return msgspec.convert(row, struct, from_attributes=True)


def _otherwise(param: str, seq: int, what: str) -> NoReturn:
    raise TinkerRefusal(
        400, f"{param} {seq} was used before in this session, for another request: {what}", param
    )


def _drop_oldest(db: sa.Connection, table: sa.Table, tenant: str, keep: int) -> bool:
    """All of the tenant's but the newest `keep`; whether there were more."""
    newest = sa.select(table.c.id).where(table.c.tenant == tenant).order_by(table.c.created.desc())
    older = newest.limit(-1).offset(keep)
    return bool(db.execute(table.delete().where(table.c.tenant == tenant, table.c.id.in_(older))).rowcount)


def _configure(connection: Any, _record: Any) -> None:
    # Transactions begin as the engine's listener says.
    connection.isolation_level = None
    for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MS}", "journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _prepare(db: sa.Connection) -> int:
    version = int(db.exec_driver_sql("PRAGMA user_version").scalar_one())
    if version == 0 and not sa.inspect(db).get_table_names():
        metadata.create_all(db)
        db.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return SCHEMA_VERSION
    return version
