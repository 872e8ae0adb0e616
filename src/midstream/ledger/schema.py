"""The ledger's tables, the same on SQLite and PostgreSQL.

Always holds: one snapshots row per (deployment, identity), one transitions row per (replica, boot, seq) and one deaths row
per (replica, boot), as database constraints; that is what makes repeated signals and repeated reports harmless. What is read
on every pass is on the deployments and snapshots rows, or found by an index: the transitions only ever grow. Times are seconds
since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
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

SCHEMA_VERSION = 2

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
    Column("desired_snapshot", String(512), nullable=False),
    Column("generation", BigInteger, nullable=False),  # of the last effective signal
    Column(
        "last_generation", BigInteger, nullable=False
    ),  # given to a signal or a retry: the next is above it
    Column(
        "reset_all_generation", BigInteger, nullable=False
    ),  # of the last signal with this policy; 0: none
    Column("reset_new_session_generation", BigInteger, nullable=False),
    Column("first_signalled_at", Float),
    Column("first_ready_at", Float),  # when a published snapshot was ready on a replica for the first time
    Column("created_at", Float, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", _RowId, primary_key=True),
    Column("deployment_id", _RowId, ForeignKey("deployments.id"), nullable=False),
    Column("identity", String(512), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("url", Text, nullable=False),
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
    UniqueConstraint("deployment_id", "replica", "boot"),
    Index("deaths_by_generation", "deployment_id", "generation"),
)
