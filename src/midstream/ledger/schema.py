"""The ledger's tables, the same on SQLite and PostgreSQL.

Always holds: one snapshots row per (deployment, identity) and one transitions row per (replica, boot, seq), as database
constraints; that is what makes repeated signals and repeated reports harmless. Times are seconds since the epoch.
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

SCHEMA_VERSION = 1

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
    Column("generation", BigInteger, nullable=False),
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
    UniqueConstraint("deployment_id", "identity"),
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
    Index("transitions_by_identity", "deployment_id", "identity"),
)
