"""The tables of the front's store.

Always holds: one row per counter of a client's, as a database constraint. Times are seconds since the epoch. No column holds a
credential: a tenant is a digest of its key.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Float, Index, MetaData, String, Table, Text, UniqueConstraint

SCHEMA_VERSION = 1

metadata = MetaData()

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("created", Float, nullable=False),
    # The last sign of life, up to a minute late.
    Column("seen", Float, nullable=False),
    Column("display_name", Text),
    Column("user_metadata", JSON),
    Index("sessions_by_tenant", "tenant", "seen"),
    Index("sessions_by_age", "seen"),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("model_path", Text),
    Column("snapshot", Text),
    Column("run", Text),
    Column("policy", String(16), nullable=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("session_id", "seq"),
    Index("sampling_sessions_by_tenant", "tenant", "created"),
)

models = Table(
    "models",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("restored_from", Text),
    Column("created", Float, nullable=False),
    Column("user_metadata", JSON),
    UniqueConstraint("session_id", "seq"),
    Index("models_by_tenant", "tenant", "created"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("uri", String(1024), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("model_id", String(128), nullable=False),
    # weights or sampler_weights.
    Column("kind", String(16), nullable=False),
    Column("name", String(512), nullable=False),
    Column("created", Float, nullable=False),
    Column("snapshot", Text),
    Column("base_model", Text, nullable=False),
    Column("size", BigInteger),
    Column("user_metadata", JSON),
    Index("checkpoints_by_model", "model_id"),
    Index("checkpoints_by_tenant", "tenant", "created"),
)
