"""The ledger's tables, the same on SQLite and PostgreSQL.

Always holds:
- Constraints allow one snapshots row per (deployment, identity), one transitions row per (replica, boot, seq) and one deaths
  row per (replica, boot). That makes repeated signals and repeated reports harmless. A deployment has one open group at most.
- Each pass of the reconciler reads deployments and snapshots rows, or finds rows by an index: the transitions only ever grow.
- Times are seconds since the epoch. JSON columns hold plain values. No column holds a credential.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import SchemaItem

SCHEMA_VERSION = 9
#: Those versions only lacked tables: contents and weights, changes and counts, transfers and their updates, rebases, the clock.
#: And the columns of ADDED.
UPGRADED_FROM = (3, 4, 5, 6, 7, 8)
#: The first version with counts of policies.
COUNTED_FROM = 5

metadata = MetaData()

#: BIGINT on PostgreSQL; SQLite only numbers rows by itself in an INTEGER key.
_RowId = BigInteger().with_variant(Integer, "sqlite")


def _of_deployment(name: str, *columns: SchemaItem) -> Table:
    """A table of rows that belong to a deployment."""
    mine = Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False)
    return Table(name, metadata, Column("id", _RowId, primary_key=True), mine, *columns)


schema_version = Table(
    "midstream_schema", metadata, Column("version", Integer, primary_key=True, autoincrement=False)
)

deployments = Table(
    "deployments",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("name", String(512), nullable=False, unique=True),
    Column("model", String(512), nullable=False),
    Column("bucket_url", Text, nullable=False),
    Column("transition", String(16), nullable=False),
    Column("replicas_min", Integer, nullable=False),
    Column("replicas_max", Integer, nullable=False),
    # Other properties that the API was given, by its names.
    Column("fields", JSON, nullable=False),
    Column("deleting", Boolean, nullable=False),
    Column("desired_snapshot", String(512), nullable=False),
    # Of the last effective signal.
    Column("generation", BigInteger, nullable=False),
    # The last one given, to a signal or a retry. The next is above it.
    Column("last_generation", BigInteger, nullable=False),
    # Of the last signal with this policy, 0 when there was none.
    Column("reset_all_generation", BigInteger, nullable=False),
    Column("reset_new_session_generation", BigInteger, nullable=False),
    # Given to the last reset of the ledger, 0 before the first. Reports with lower ones are ignored.
    Column("reset_ledger_generation", BigInteger, nullable=False),
    Column("first_signalled_at", Float),
    # When a published snapshot was ready on a replica for the first time.
    Column("first_ready_at", Float),
    Column("created_at", Float, nullable=False),
    # When its settings were set the last time.
    Column("updated_at", Float, nullable=False),
)

snapshots = _of_deployment(
    "snapshots",
    Column("identity", String(512), nullable=False),
    # "full" or "delta".
    Column("kind", String(16), nullable=False),
    Column("url", Text, nullable=False),
    # The snapshot that a delta is a difference to.
    Column("previous", String(512)),
    Column("compression", String(16)),
    Column("checksum_format", String(16)),
    # The files that a delta stands on, as types.SnapshotFiles, as they were when it was signalled: the full snapshot first, its
    # parent last.
    Column("parents", JSON, nullable=False),
    Column("max_cache_age", BigInteger),
    Column("ignore_config", JSON, nullable=False),
    Column("reset_prompt_cache", String(16), nullable=False),
    Column("first_signalled_at", Float, nullable=False),
    Column("signalled_at", Float, nullable=False),
    # Of its last effective signal, and of its files at that signal.
    Column("generation", BigInteger, nullable=False),
    Column("fingerprint", String(128)),
    # Of its first signal with these files.
    Column("since_generation", BigInteger, nullable=False),
    # When it was ready on a replica for the first time.
    Column("ready_at", Float),
    # Grows with every replica that becomes ready. NULL while none was ready with these files.
    Column("ready_order", BigInteger),
    UniqueConstraint("deployment_id", "identity"),
    Index("snapshots_by_readiness", "deployment_id", "ready_order"),
)

transitions = _of_deployment(
    "transitions",
    Column("replica", String(256), nullable=False),
    Column("boot", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("identity", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("stage", String(16), nullable=False),
    Column("at", Float, nullable=False),
    Column("detail", Text, nullable=False),
    UniqueConstraint("deployment_id", "replica", "boot", "seq"),
    Index("transitions_by_attempt", "deployment_id", "identity", "generation"),
    Index("transitions_by_replica", "deployment_id", "replica", "id"),
    Index("transitions_by_age", "deployment_id", "id"),
)

#: Boots of replicas that ended while they were loading a snapshot.
deaths = _of_deployment(
    "deaths",
    Column("replica", String(256), nullable=False),
    Column("boot", String(64), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
    # The replica has loaded the snapshot since, or one that was signalled later.
    Column("forgiven", Boolean, nullable=False),
    UniqueConstraint("deployment_id", "replica", "boot"),
    Index("deaths_by_generation", "deployment_id", "generation"),
)

#: Replicas with other weights than the other replicas that serve the same files.
disagreements = _of_deployment(
    "disagreements",
    Column("replica", String(256), nullable=False),
    Column("boot", String(64), nullable=False),
    Column("identity", String(512), nullable=False),
    # Of the check that differed, and of the load that follows.
    Column("generation", BigInteger, nullable=False),
    Column("retry_generation", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("detail", Text, nullable=False),
    Column("verdict", String(16), nullable=False),
    UniqueConstraint("deployment_id", "replica", "boot", "identity", "generation"),
    Index("disagreements_by_age", "deployment_id", "id"),
)


#: The meaning of an identity: the own files of the snapshot, byte for byte.
contents = _of_deployment(
    "contents",
    Column("identity", String(512), nullable=False),
    # As types.Content, with their digest.
    Column("files", JSON, nullable=False),
    Column("digest", String(64), nullable=False),
    # A replica has served it, so the identity means this until it is overwritten on purpose. Else only a manifest gave it.
    Column("proven", Boolean, nullable=False),
    UniqueConstraint("deployment_id", "identity"),
)

#: The digest of a snapshot's weights in an engine's memory, one per kind of engine.
weights = _of_deployment(
    "weights",
    Column("identity", String(512), nullable=False),
    Column("kind", String(128), nullable=False),
    Column("digest", String(128), nullable=False),
    UniqueConstraint("deployment_id", "identity", "kind"),
)

#: Groups in which a trainer sends weights to replicas (transfers.py).
transfers = _of_deployment(
    "transfers",
    # The deployment's id while the group is open, else NULL: a deployment has one open group at most.
    Column("open_of", _RowId, unique=True),
    Column("name", String(64), nullable=False, unique=True),
    # Grows with each move. A writer that has seen another one changes nothing.
    Column("serial", BigInteger, nullable=False),
    Column("phase", String(16), nullable=False),
    # As transfers.TransferMember.
    Column("members", JSON, nullable=False),
    # HOST:PORT of the trainer's store.
    Column("trainer", String(300), nullable=False),
    # The number of the last update that was started, 0 before the first.
    Column("number", BigInteger, nullable=False),
    # NULL while the group waits for its next update, and after its end.
    Column("deadline", Float),
    Column("opened_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("reason", Text, nullable=False),
    Index("transfers_by_deadline", "deadline"),
    Index("transfers_by_age", "deployment_id", "id"),
)

#: The updates of these groups.
transfer_updates = Table(
    "transfer_updates",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("transfer_id", _RowId, ForeignKey("transfers.id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("started_at", Float, nullable=False),
    # NULL while it is not committed; then the snapshot that it became, its files, and the replicas that have them.
    Column("committed_at", Float),
    Column("identity", String(512)),
    Column("generation", BigInteger),
    Column("fingerprint", String(128)),
    Column("replicas", JSON, nullable=False),
    # What its trainer says of policies; NULL: nothing.
    Column("policies", String(16)),
    # Whether the files are in the bucket: "", "wanted", "kept", "off" or "given up".
    Column("kept", String(16), nullable=False),
    # When somebody is to try next to bring them there; NULL for never.
    Column("keep_at", Float),
    Column("keep_tries", Integer, nullable=False),
    UniqueConstraint("transfer_id", "number"),
    Index("transfer_updates_to_keep", "keep_at"),
)

#: Columns that tables of older versions lack. Each takes NULL.
ADDED = (transfer_updates.c.policies,)

#: Incremental snapshots whose whole files somebody brings into the bucket (rebases.py).
rebases = _of_deployment(
    "rebases",
    Column("identity", String(512), nullable=False),
    # A digest of the links that the whole files are of: the same identity may come to stand on others.
    Column("lineage", String(64), nullable=False),
    # Where the whole files go, and their content; NULL until they are there.
    Column("url", Text, nullable=False),
    Column("files", JSON),
    Column("wanted_at", Float, nullable=False),
    # As in transfer_updates.
    Column("kept", String(16), nullable=False),
    Column("keep_at", Float),
    Column("keep_tries", Integer, nullable=False),
    # Why the last try failed; of the snapshot before, until this one was tried.
    Column("reason", Text, nullable=False),
    UniqueConstraint("deployment_id", "identity", "lineage"),
    Index("rebases_to_keep", "keep_at"),
)

#: One row. last: the serial of the last writing transaction that changed what readers see. forgotten: up to which serial
#: changes were removed.
change_counter = Table(
    "change_counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last", BigInteger, nullable=False),
    Column("forgotten", BigInteger, nullable=False),
)

#: One row, of a database without a clock of its own. ahead_s: how far the time of day was ahead of the machine's clock that
#: cannot jump, when it was first asked for after the start `boot` of the machine.
machine_clock = Table(
    "machine_clock",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("boot", String(64), nullable=False),
    Column("ahead_s", Float, nullable=False),
)

#: Names of deployments and policies, with the serial of each one's last change.
changes = Table(
    "changes",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("serial", BigInteger, nullable=False),
    Index("changes_by_serial", "serial"),
)

#: How many policies a deployment has: in all (scope ""), and of each tenant (scope "=" and its name).
policy_counts = Table(
    "policy_counts",
    metadata,
    Column("deployment", String(512), primary_key=True),
    Column("scope", String(512), primary_key=True),
    Column("count", BigInteger, nullable=False),
)


def storable(text: str) -> str:
    """The text without characters that a database refuses. It may quote a name from a file that somebody uploaded."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def insert_new(db: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless a unique constraint forbids it; whether it is new."""
    return db.execute(_insert_new(db.dialect.name, table), dict(values)).first() is not None


def upsert(db: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows. If the key of a row exists, replace its other columns."""
    db.execute(_upsert(db.dialect.name, table), [dict(row) for row in rows])


@functools.cache
def _upsert(dialect: str, table: Table) -> Any:
    """Like _insert_new."""
    insert: Any = _insert(dialect, table)
    key = list(table.primary_key.columns)
    others = {column.name: insert.excluded[column.name] for column in table.c if column not in key}
    return insert.on_conflict_do_update(index_elements=key, set_=others)


@functools.cache
def _insert_new(dialect: str, table: Table) -> Any:
    """The statement, made once: to make it takes longer than to run it."""
    insert: Any = _insert(dialect, table)
    return insert.on_conflict_do_nothing().returning(*table.primary_key.columns)


def _insert(dialect: str, table: Table) -> Any:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
