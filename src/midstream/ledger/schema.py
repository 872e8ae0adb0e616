"""The ledger's tables, the same on SQLite and PostgreSQL.

Always holds: one snapshots row per (deployment, identity), one transitions row per (replica, boot, seq) and one deaths row
per (replica, boot), as database constraints; that is what makes repeated signals and repeated reports harmless. What is read
on every pass is on the deployments and snapshots rows, or found by an index: the transitions only ever grow. Times are seconds
since the epoch. JSON columns hold plain values; no column holds a credential.
"""

from __future__ import annotations

from collections.abc import Mapping
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

SCHEMA_VERSION = 4
UPGRADED_FROM = 3  # it lacked only tables: contents and weights

metadata = MetaData()

#: BIGINT on PostgreSQL; SQLite only numbers rows by itself in an INTEGER key.
_RowId = BigInteger().with_variant(Integer, "sqlite")

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
    Column("fields", JSON, nullable=False),  # what else the API was told of it, by its names there
    Column("deleting", Boolean, nullable=False),
    Column("desired_snapshot", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),  # of the last effective signal
    Column(
        "last_generation", BigInteger, nullable=False
    ),  # given to a signal or a retry: the next is above it
    Column(
        "reset_all_generation", BigInteger, nullable=False
    ),  # of the last signal with this policy; 0: none
    Column("reset_new_session_generation", BigInteger, nullable=False),
    # Given to the last reset of the ledger, 0: never. What replicas report of lower ones is forgotten.
    Column("reset_ledger_generation", BigInteger, nullable=False),
    Column("first_signalled_at", Float),
    Column("first_ready_at", Float),  # when a published snapshot was ready on a replica for the first time
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),  # when its settings were set the last time
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("kind", String(16), nullable=False),  # full, delta
    Column("url", Text, nullable=False),
    Column("previous", String(512)),  # what a delta is the difference to
    Column("compression", String(16)),
    Column("checksum_format", String(16)),
    # Of a delta, as types.SnapshotFiles: the files it stands on as they were when it was signalled, the full snapshot
    # first, its parent last.
    Column("parents", JSON, nullable=False),
    Column("max_cache_age", BigInteger),
    Column("ignore_config", JSON, nullable=False),
    Column("reset_prompt_cache", String(16), nullable=False),
    Column("first_signalled_at", Float, nullable=False),
    Column("signalled_at", Float, nullable=False),
    Column("generation", BigInteger, nullable=False),  # of its last effective signal
    Column("fingerprint", String(128)),  # of its files at that signal
    Column("since_generation", BigInteger, nullable=False),  # of its first signal with these files
    Column("ready_at", Float),  # when it was ready on a replica for the first time
    Column(
        "ready_order", BigInteger
    ),  # grows with every replica that becomes ready; NULL: not with these files
    UniqueConstraint("deployment_id", "identity"),
    Index("snapshots_by_readiness", "deployment_id", "ready_order"),
)

transitions = Table(
    "transitions",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
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
deaths = Table(
    "deaths",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("replica", String(256), nullable=False),
    Column("boot", String(64), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
    Column("forgiven", Boolean, nullable=False),  # the replica has loaded it since, or one signalled later
    UniqueConstraint("deployment_id", "replica", "boot"),
    Index("deaths_by_generation", "deployment_id", "generation"),
)

#: Replicas whose weights were not those of the others that serve the same files.
disagreements = Table(
    "disagreements",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("replica", String(256), nullable=False),
    Column("boot", String(64), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),  # of the check that differed
    Column("retry_generation", BigInteger, nullable=False),  # under which it is loaded once more
    Column("at", Float, nullable=False),
    Column("detail", Text, nullable=False),
    Column("verdict", String(16), nullable=False),
    UniqueConstraint("deployment_id", "replica", "boot", "identity", "generation"),
    Index("disagreements_by_age", "deployment_id", "id"),
)


#: What an identity means: the own files of the snapshot, byte for byte.
contents = Table(
    "contents",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("files", JSON, nullable=False),  # as types.Content
    Column("digest", String(64), nullable=False),  # of `files`: two rows with one digest have equal files
    # Some replica has served it: the identity means this until it is overwritten on purpose. Else a manifest said it.
    Column("proven", Boolean, nullable=False),
    UniqueConstraint("deployment_id", "identity"),
)

#: What engines made of it: the digest of the weights in memory, one per kind of engine.
weights = Table(
    "weights",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("kind", String(128), nullable=False),
    Column("digest", String(128), nullable=False),
    UniqueConstraint("deployment_id", "identity", "kind"),
)


def storable(text: str) -> str:
    """A message as every database takes it: it may quote names of a file that somebody uploaded."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def insert_new(db: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless a unique constraint says it is there; whether it is new."""
    dialect = postgresql if db.dialect.name == "postgresql" else sqlite
    insert: Any = dialect.insert(table).values(values).on_conflict_do_nothing()
    return db.execute(insert.returning(*table.primary_key.columns)).first() is not None
