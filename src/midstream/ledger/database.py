"""The database under the ledger: opened or created, its transactions, its failures.

Always holds: a writing transaction sees all commits before it got its lock. A reading one sees one moment. No message has a
secret of a database URL.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from midstream.core.errors import ConfigError, ReplicaUnavailable
from midstream.core.private import private_file
from midstream.ledger.clock import machine_ahead_s
from midstream.ledger.deployments import count_policies
from midstream.ledger.schema import (
    ADDED,
    COUNTED_FROM,
    SCHEMA_VERSION,
    UPGRADED_FROM,
    change_counter,
    insert_new,
    metadata,
    schema_version,
)

BUSY_TIMEOUT_S = 10.0
#: On SQLite: a commit outlives a power cut.
SYNCHRONOUS = "FULL"
CONNECT_TIMEOUT_S = 5
#: PostgreSQL's advisory lock of a process that creates tables.
_CREATING = 0x6D696473
_READS_ONLY = "midstream_reads_only"
#: PostgreSQL's code of a write that is refused: after a failover, the connection is to a standby.
_READ_ONLY_TRANSACTION = "25006"
#: The counter's only row, before the first change.
_NO_CHANGE = {"id": 1, "last": 0, "forgotten": 0}
_DRIVERS = ("sqlite", "postgresql+psycopg")


class LedgerUnavailable(ReplicaUnavailable):
    """503: the database did not answer; nothing was changed, a retry may succeed."""


class Database:
    """One SQLite file or PostgreSQL database. Not for use from several threads at once."""

    def __init__(self, url: str) -> None:
        """Open, or create the tables. Raises ConfigError when it cannot be used."""
        self.engine = _engine(url)
        self.shown = _shown(self.engine.url)
        #: The driver's connections.
        self._open: set[Any] = set()
        if self.engine.dialect.name == "sqlite":
            sa.event.listen(self.engine, "connect", _configure_sqlite)
            sa.event.listen(self.engine, "begin", _begin_sqlite)
            self._reader = self.engine.execution_options(**{_READS_ONLY: True})
        else:
            options: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._reader = self.engine.execution_options(**options)
            sa.event.listen(self.engine, "connect", lambda connection, _: self._open.add(connection))
            sa.event.listen(self.engine, "close", lambda connection, _: self._open.discard(connection))
        try:
            with self.engine.begin() as db:
                version = _prepare_schema(db)
                known = version == SCHEMA_VERSION
                #: Of the clock of a machine whose database has none.
                self.ahead_s = machine_ahead_s(db) if known and not self.is_server else None
        except SQLAlchemyError as error:
            self.close()
            raise ConfigError(f"ledger {self.shown}: cannot be opened: {_reason(error)}") from error
        if version != SCHEMA_VERSION:
            self.close()
            raise ConfigError(
                f"ledger {self.shown}: has schema version {version}, this midstream reads version {SCHEMA_VERSION}; "
                "use the midstream that wrote it, or another --state-dir or --database"
            )

    @property
    def is_server(self) -> bool:
        """Whether it is a server, which other machines may use, too."""
        return self.engine.dialect.name != "sqlite"

    def close(self) -> None:
        self.engine.dispose()

    def interrupt(self) -> None:
        """Break the connections to a server: a call that waits for it fails now. From any thread. The next use connects."""
        for connection in list(self._open):
            with (
                suppress(self.engine.dialect.loaded_dbapi.Error, OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that may change the ledger. Raises LedgerUnavailable; it was then rolled back."""
        return self._begin(self.engine)

    def read(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that only reads. Raises LedgerUnavailable."""
        return self._begin(self._reader)

    @contextmanager
    def _begin(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        try:
            with engine.begin() as db:
                yield db
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _READ_ONLY_TRANSACTION:
                self.engine.dispose()
            raise LedgerUnavailable(f"the ledger cannot be used now: {_reason(error)}") from error


def _engine(url: str) -> sa.Engine:
    for short in ("postgres://", "postgresql://"):
        if url.startswith(short):
            url = "postgresql+psycopg://" + url.removeprefix(short)
    try:
        parsed = sa.make_url(url)
    except (SQLAlchemyError, ValueError) as error:
        # Not with its text, which may hold the URL with its password.
        raise ConfigError(
            "the ledger's database URL is not one: expected postgresql://user:password@host/name"
        ) from error
    shown = _shown(parsed)
    if parsed.drivername not in _DRIVERS:
        raise ConfigError(f"ledger {shown}: expected a URL that begins with postgresql:// or sqlite:///")
    if parsed.drivername == "sqlite":
        if parsed.database not in (None, "", ":memory:"):
            try:
                private_file(Path(str(parsed.database)))
            except OSError as error:
                raise ConfigError(f"ledger {shown}: cannot be opened: {error.strerror or error}") from error
        return sa.create_engine(parsed)
    try:
        return sa.create_engine(parsed, pool_pre_ping=True, connect_args=_connect_arguments(parsed))
    except ImportError as error:
        raise ConfigError(
            f"ledger {shown}: PostgreSQL needs the package psycopg: pip install 'midstream[postgres]'"
        ) from error


def _connect_arguments(url: sa.URL) -> dict[str, Any]:
    """Arguments of libpq that limit every wait. Those in the URL win."""
    milliseconds = int(BUSY_TIMEOUT_S * 1000)
    options = f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}"
    asked = url.query.get("options", ())
    bounds: dict[str, Any] = {
        # Behind a PgBouncer, the next transaction may find another client's statements under the same names.
        "prepare_threshold": None,
        "connect_timeout": CONNECT_TIMEOUT_S,
        # Not a standby, which a name may still lead to after a failover. Of several hosts, the primary.
        "target_session_attrs": "read-write",
        "keepalives_idle": CONNECT_TIMEOUT_S,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": milliseconds,
    }
    bounds = {name: value for name, value in bounds.items() if name not in url.query}
    return bounds | {"options": " ".join((options, *((asked,) if isinstance(asked, str) else asked)))}


def _shown(url: sa.URL) -> str:
    """The URL without its password, and without its query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _configure_sqlite(connection: Any, _record: Any) -> None:
    # The driver begins no transactions by itself; _begin_sqlite does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(db: sa.Connection) -> None:
    # A transaction that reads first and writes later fails at once when another wrote in between; one that takes
    # the write lock at its start waits instead. They are few and short.
    db.exec_driver_sql("BEGIN" if db.get_execution_options().get(_READS_ONLY) else "BEGIN IMMEDIATE")


def _prepare_schema(db: sa.Connection) -> int:
    """The schema version of the database. Creates the tables in an empty one, and those that the version before lacked."""
    if db.dialect.name == "postgresql":
        db.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
    if not sa.inspect(db).has_table(schema_version.name):
        metadata.create_all(db)
        insert_new(db, schema_version, {"version": SCHEMA_VERSION})
        insert_new(db, change_counter, _NO_CHANGE)
    found = int(db.execute(sa.select(sa.func.max(schema_version.c.version))).scalar_one() or 0)
    if found in UPGRADED_FROM:
        metadata.create_all(db)
        _add_columns(db)
        insert_new(db, change_counter, _NO_CHANGE)
        if found < COUNTED_FROM:
            count_policies(db)
        db.execute(schema_version.update().values(version=SCHEMA_VERSION))
        return SCHEMA_VERSION
    return found


def _add_columns(db: sa.Connection) -> None:
    quoted = db.dialect.identifier_preparer.quote
    for column in ADDED:
        table = column.table.name
        if column.name not in {one["name"] for one in sa.inspect(db).get_columns(table)}:
            kind = column.type.compile(db.dialect)
            db.exec_driver_sql(f"ALTER TABLE {quoted(table)} ADD COLUMN {quoted(column.name)} {kind}")


def _reason(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().split("\n", 1)[0]
