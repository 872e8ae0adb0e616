"""Signals: a snapshot becomes the desired one of a deployment; and the state that follows from all signals and reports.

Each function is part of its caller's transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa

from midstream.core.types import BASE_SNAPSHOT, Desired, SnapshotFiles
from midstream.ledger import deployments, reports
from midstream.ledger.contents import Contents, weights_of
from midstream.ledger.parents import Standing, check_full, parents_of
from midstream.ledger.records import DeploymentState, Fleet, Signal, SignalResult, stronger_reset
from midstream.ledger.schema import deployments as deployments_table
from midstream.ledger.schema import snapshots
from midstream.ledger.snapshots import (
    as_desired,
    as_snapshot,
    base_desired,
    chain_identities,
    fallbacks,
    find,
)

#: Field of a deployment's row: DeploymentState.first_boots.
_FIRST_BOOTS = "_first_boots"


def accept(
    db: sa.Connection,
    name: str,
    signal: Signal,
    fleet: Fleet,
    chain_max: int,
    contents: Contents,
    now: float,
) -> SignalResult:
    row = deployments.lock(db, name)
    known = find(db, row.id, signal.identity)
    meant = contents.meant(db, row.id, signal)
    failed = fleet.failed_generation == row.generation or reports.failed_on_desired(db, row)
    standing = Standing(row.desired_snapshot, failed, fleet.serving)
    parents = _parents(db, row, known, signal, standing, chain_max)
    same_files = (
        known is not None
        and not meant.overwrites
        and (known.fingerprint, known.compression, as_snapshot(known).parents)
        == (signal.fingerprint, signal.compression, parents)
    )
    if same_files and row.desired_snapshot == signal.identity:
        if not failed and tuple(known.ignore_config) == signal.ignore_config:
            return SignalResult(_desired(db, known, row, contents), changed=False)
        # No replica may have loaded it under the first signal.
        signal = _at_least(signal, known)
    generation = max(row.last_generation, fleet.generation_floor) + 1
    values = _values(signal, parents) | {"signalled_at": now, "generation": generation}
    if not same_files:
        values |= {"since_generation": generation, "ready_order": None}
    if known is None:
        fresh = {"deployment_id": row.id, "identity": signal.identity, "first_signalled_at": now}
        db.execute(snapshots.insert().values({**fresh, **values}))
    else:
        db.execute(snapshots.update().where(snapshots.c.id == known.id).values(values))
    meant.store(db)
    db.execute(_desire(row, signal, generation, fleet.boots, now))
    stored = find(db, row.id, signal.identity)
    return SignalResult(_desired(db, stored, deployments.find(db, name), contents), changed=True)


def state(db: sa.Connection, name: str, contents: Contents) -> DeploymentState:
    row = deployments.find(db, name)
    deaths, disagreements = reports.deaths_of(db, row.id), reports.disagreements_of(db, row.id)
    if row.desired_snapshot == BASE_SNAPSHOT:
        return DeploymentState(
            base_desired(row) if row.generation else None,
            since={BASE_SNAPSHOT: 0},
            reset_all=row.reset_all_generation,
            deaths=deaths,
            disagreements=disagreements,
            proven=True,
        )
    desired = find(db, row.id, row.desired_snapshot)
    others = fallbacks(db, row)
    named = (desired, *others)
    known = contents.of(db, row.id, chain_identities(named))
    return DeploymentState(
        as_desired(desired, row, known),
        tuple(as_desired(snapshot, row, known) for snapshot in others),
        weights=weights_of(db, row.id, {snapshot.identity for snapshot in named}),
        since={snapshot.identity: snapshot.since_generation for snapshot in named},
        ever_ready=row.first_ready_at is not None,
        first_boots=frozenset(row.fields.get(_FIRST_BOOTS, ())),
        reset_all=row.reset_all_generation,
        reset_new_session=row.reset_new_session_generation,
        deaths=deaths,
        disagreements=disagreements,
        proven=desired.ready_order is not None,
    )


def _desired(db: sa.Connection, snapshot: Any, deployment: Any, contents: Contents) -> Desired:
    return as_desired(snapshot, deployment, contents.of(db, deployment.id, chain_identities([snapshot])))


def _parents(
    db: sa.Connection, row: Any, known: Any, signal: Signal, standing: Standing, chain_max: int
) -> tuple[SnapshotFiles, ...]:
    """The snapshots that it stands on, () for a full one. Raises SnapshotRefused."""
    known = as_snapshot(known) if known is not None else None
    if signal.previous is None:
        check_full(signal, known)
        return ()
    parent = find(db, row.id, signal.previous)
    if parent is None:
        return parents_of(signal, known, None, 0, standing, chain_max)
    return parents_of(signal, known, as_snapshot(parent), parent.since_generation, standing, chain_max)


def _at_least(signal: Signal, known: Any) -> Signal:
    """The signal with cache rules at least as strict as those of the signal before."""
    ages = [age for age in (signal.max_cache_age, known.max_cache_age) if age is not None]
    return replace(
        signal,
        reset_prompt_cache=stronger_reset(signal.reset_prompt_cache, known.reset_prompt_cache),
        max_cache_age=min(ages, default=None),
    )


def _values(signal: Signal, parents: tuple[SnapshotFiles, ...]) -> dict[str, Any]:
    return {
        "kind": "full" if signal.previous is None else "delta",
        "url": signal.url,
        "previous": signal.previous,
        "compression": signal.compression,
        "checksum_format": signal.checksum_format,
        "parents": msgspec.to_builtins(parents),
        "max_cache_age": signal.max_cache_age,
        "ignore_config": list(signal.ignore_config),
        "reset_prompt_cache": signal.reset_prompt_cache,
        "fingerprint": signal.fingerprint,
    }


def _desire(row: Any, signal: Signal, generation: int, boots: tuple[str, ...], now: float) -> sa.Update:
    values: dict[str, Any] = {
        "desired_snapshot": signal.identity,
        "generation": generation,
        "last_generation": generation,
    }
    if row.first_signalled_at is None:
        values |= {"first_signalled_at": now, "fields": {**row.fields, _FIRST_BOOTS: list(boots)}}
    if signal.reset_prompt_cache != "none":
        values[f"reset_{signal.reset_prompt_cache}_generation"] = generation
    return deployments_table.update().where(deployments_table.c.id == row.id).values(values)
