"""The ledger's deployments: made, changed, reset, removed. Each function is part of its caller's transaction.

Always holds: a deployment that is removed or reset leaves no snapshot behind, and a reset one keeps counting generations,
so that nothing a replica was told before can be mistaken for something newer.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from midstream.errors import ConfigError, Conflict, NotFound
from midstream.ledger.records import DeploymentChange, DeploymentRow
from midstream.ledger.schema import (
    contents,
    deaths,
    deployments,
    disagreements,
    insert_new,
    snapshots,
    transitions,
    weights,
)
from midstream.types import BASE_SNAPSHOT, TransitionType

_OF_A_DEPLOYMENT = (transitions, deaths, disagreements, contents, weights, snapshots)


def find(db: sa.Connection, name: str) -> Any:
    """Its row. Raises NotFound."""
    row = db.execute(sa.select(deployments).where(deployments.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    return row


def lock(db: sa.Connection, name: str) -> Any:
    """Its row, after waiting for every other writer of it. Raises NotFound."""
    touch = deployments.update().where(deployments.c.name == name)
    db.execute(touch.values(generation=deployments.c.generation))
    return find(db, name)


def ensure(
    db: sa.Connection,
    name: str,
    model: str,
    bucket_url: str,
    transition: TransitionType | None,
    replicas: int,
    now: float,
) -> DeploymentRow:
    fresh = _fresh(name, model, bucket_url, transition or "ASYNC", (replicas, replicas), {}, now)
    insert_new(db, deployments, fresh)
    row = lock(db, name)
    if row.generation > 0 and row.model != model:
        raise ConfigError(
            f"the ledger's deployment {name} serves {row.model}, not {model}; use another --state-dir"
        )
    values: dict[str, Any] = {"model": model, "bucket_url": bucket_url, "deleting": False}
    if transition is not None:
        values["transition"] = transition
    if any(getattr(row, column) != value for column, value in values.items()):
        values["updated_at"] = now
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return as_row(find(db, name))


def create(
    db: sa.Connection,
    name: str,
    model: str,
    bucket_url: str,
    transition: TransitionType,
    replicas: tuple[int, int],
    fields: dict[str, Any],
    now: float,
) -> DeploymentRow:
    fresh = _fresh(name, model, bucket_url, transition, replicas, fields, now)
    if not insert_new(db, deployments, fresh):
        raise Conflict(f"there is a deployment {name} already")
    return as_row(find(db, name))


def update(db: sa.Connection, name: str, change: DeploymentChange, now: float) -> DeploymentRow:
    row = lock(db, name)
    values: dict[str, Any] = {**change, "updated_at": now}
    if "fields" in change:
        merged = {**row.fields, **change["fields"]}
        values["fields"] = {key: value for key, value in merged.items() if value is not None}
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return as_row(find(db, name))


def delete(db: sa.Connection, name: str) -> None:
    row = lock(db, name)
    _forget(db, row.id)
    db.execute(deployments.delete().where(deployments.c.id == row.id))


def reset(db: sa.Connection, name: str, floor: int) -> int:
    """The generation under which replicas go back to the base weights; 0 when nothing was ever signalled."""
    row = lock(db, name)
    if row.generation == 0 or row.reset_ledger_generation == row.generation:
        return int(row.generation)
    generation = max(int(row.last_generation), floor) + 1
    _forget(db, row.id)
    values: dict[str, Any] = {
        "desired_snapshot": BASE_SNAPSHOT,
        "first_signalled_at": None,
        "first_ready_at": None,
    }
    counters = ("generation", "last_generation", "reset_ledger_generation", "reset_all_generation")
    values |= dict.fromkeys(counters, generation)
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return generation


def _forget(db: sa.Connection, key: int) -> None:
    for table in _OF_A_DEPLOYMENT:
        db.execute(table.delete().where(table.c.deployment_id == key))


def _fresh(
    name: str,
    model: str,
    bucket_url: str,
    transition: TransitionType,
    replicas: tuple[int, int],
    fields: dict[str, Any],
    now: float,
) -> dict[str, Any]:
    resets = ("reset_ledger_generation", "reset_all_generation", "reset_new_session_generation")
    return {
        "name": name,
        "model": model,
        "bucket_url": bucket_url,
        "transition": transition,
        "replicas_min": replicas[0],
        "replicas_max": replicas[1],
        "fields": {key: value for key, value in fields.items() if value is not None},
        "deleting": False,
        "desired_snapshot": BASE_SNAPSHOT,
        "created_at": now,
        "updated_at": now,
        **dict.fromkeys(("generation", "last_generation", *resets), 0),
    }


def as_row(row: Any) -> DeploymentRow:
    return DeploymentRow(
        name=row.name,
        model=row.model,
        bucket_url=row.bucket_url,
        transition=row.transition,
        desired_snapshot=row.desired_snapshot,
        generation=row.generation,
        created_at=row.created_at,
        updated_at=row.updated_at,
        replicas_min=row.replicas_min,
        replicas_max=row.replicas_max,
        fields=row.fields,
        deleting=row.deleting,
    )
