"""The ledger's snapshots, read: as rows, as the values that the rest of midstream sees, and as they are sent to replicas.

Each function is part of its caller's transaction. key: the deployment's primary key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa

from midstream.core.types import BASE_SNAPSHOT, Content, Desired, SnapshotFiles, Stage
from midstream.ledger import deployments, rebases
from midstream.ledger.contents import Contents
from midstream.ledger.rebases import NO_WHOLES, Wholes
from midstream.ledger.records import Signalled, SnapshotRow, Unkept, from_row
from midstream.ledger.schema import deployments as deployments_table
from midstream.ledger.schema import snapshots, transitions

MAX_FALLBACKS = 8


def this_one(key: Any, identity: Any) -> Any:
    return (snapshots.c.deployment_id == key) & (snapshots.c.identity == identity)


# Made once, as in deployments.py.
_FIND = sa.select(snapshots).where(this_one(sa.bindparam("key"), sa.bindparam("name")))
_FALLBACKS = sa.select(snapshots).where(
    snapshots.c.deployment_id == sa.bindparam("key"),
    snapshots.c.identity != sa.bindparam("desired"),
    snapshots.c.ready_order.is_not(None),
)
_FALLBACKS = _FALLBACKS.order_by(snapshots.c.ready_order.desc()).limit(MAX_FALLBACKS)


def find(db: sa.Connection, key: int, identity: str) -> Any:
    """The row of the snapshot; None if it was not signalled."""
    return db.execute(_FIND, {"key": key, "name": identity}).one_or_none()


def is_signalled(db: sa.Connection, name: str, identity: str) -> bool:
    return find(db, deployments.find(db, name).id, identity) is not None


def fallbacks(db: sa.Connection, row: Any) -> Sequence[Any]:
    """Rows of snapshots that became ready on a replica, the last one first. row: of the deployment."""
    return db.execute(_FALLBACKS, {"key": row.id, "desired": row.desired_snapshot}).all()


def every(db: sa.Connection, name: str, contents: Contents) -> list[SnapshotRow]:
    deployment = deployments.find(db, name)
    key = deployment.id
    query = sa.select(snapshots).where(snapshots.c.deployment_id == key).order_by(snapshots.c.id)
    rows = db.execute(query).all()
    known = contents.of(db, key, {row.identity for row in rows})
    whole = rebases.urls(db, key)
    if not whole:
        return [as_snapshot(row, known) for row in rows]
    begun = _beginnings(db, deployment)
    urls = [whole.get(rebases.lineage(chain_of(row))) for row in rows]
    return [
        replace(as_snapshot(row, known), full_url=url, full_needed=url in begun)
        for row, url in zip(rows, urls, strict=True)
    ]


def _beginnings(db: sa.Connection, row: Any) -> set[str]:
    """Where the chains begin that replicas load: of what is desired, and of what they fall back to. row: of the deployment."""
    desired = find(db, row.id, row.desired_snapshot)
    loaded = [*([] if desired is None else [desired]), *fallbacks(db, row)]
    wholes = rebases.of(db, row.id, chain_identities(loaded))
    return {wholes.cut(chain_of(one))[0].url for one in loaded}


def signalled(db: sa.Connection, name: str, after: int, newest: int) -> tuple[int, list[Signalled]]:
    row = deployments.find(db, name)
    ready = (
        (transitions.c.deployment_id == row.id)
        & (transitions.c.identity == snapshots.c.identity)
        & (transitions.c.generation >= snapshots.c.generation)
        & (transitions.c.stage == Stage.IDLE.value)
    )
    query = sa.select(snapshots.c.identity, snapshots.c.generation, sa.exists().where(ready))
    query = query.where(snapshots.c.deployment_id == row.id, snapshots.c.generation > after)
    found = db.execute(query.order_by(snapshots.c.generation.desc()).limit(newest))
    return int(row.reset_ledger_generation), [Signalled(*one) for one in found]


def chain_identities(rows: Sequence[Any]) -> set[str]:
    """The identities of these snapshots and of all that they stand on."""
    links = (link.snapshot for row in rows for link in _files(row.parents))
    return {row.identity for row in rows}.union(links)


def as_snapshot(row: Any, contents: Mapping[str, Content] | None = None) -> SnapshotRow:
    return replace(from_row(row, SnapshotRow), content=(contents or {}).get(row.identity))


def own_files(row: Any) -> SnapshotFiles:
    return SnapshotFiles(
        snapshot=row.identity, url=row.url, fingerprint=row.fingerprint, compression=row.compression
    )


def chain_of(row: Any) -> tuple[SnapshotFiles, ...]:
    """The chain of a snapshot as it was signalled, the full snapshot first."""
    return (*_files(row.parents), own_files(row))


def as_desired(
    row: Any, deployment: Any, contents: Mapping[str, Content], wholes: Wholes = NO_WHOLES
) -> Desired:
    """A snapshot as it may be sent, with the shortest chain that there is. deployment: its row.

    It carries the deployment's generation, also as a fallback. Replicas compare pairs of snapshot and generation, and could
    take an older generation for a late message.
    """
    *parents, own = (
        msgspec.structs.replace(link, content=wholes.content(link) or contents.get(link.snapshot))
        for link in wholes.cut(chain_of(row))
    )
    return Desired(
        snapshot=row.identity,
        generation=deployment.generation,
        signalled=row.generation,
        url=own.url,
        reset_prompt_cache=row.reset_prompt_cache,
        transition=deployment.transition,
        fingerprint=own.fingerprint,
        compression=own.compression,
        content=own.content,
        parents=tuple(parents),
        max_cache_age=row.max_cache_age,
        ignore_config=tuple(row.ignore_config),
        stands_on=deployments.stands_on(deployment),
        ends_before=deployments.ends_before(deployment),
    )


def want_whole(db: sa.Connection, name: str, identity: str | None, after: int, now: float) -> None:
    """As rebases.want, of a snapshot that was just signalled, or of what is desired (None)."""
    row = deployments.find(db, name) if after else None
    snapshot = None if row is None else find(db, row.id, identity or row.desired_snapshot)
    if row is not None and snapshot is not None and snapshot.compression is not None:
        rebases.want(db, row.id, chain_of(snapshot), after, now)


def whole_may_come(db: sa.Connection, name: str, identity: str | None, after: int) -> bool:
    """As rebases.may_come, of the chain of a snapshot that was signalled, or of what is desired (None)."""
    row = deployments.find(db, name)
    snapshot = None if row is None else find(db, row.id, identity or row.desired_snapshot)
    if row is None or snapshot is None or snapshot.compression is None:
        return False
    desired = snapshot.identity == row.desired_snapshot
    return rebases.may_come(db, row.id, chain_of(snapshot), after, desired=desired)


def unrebased(db: sa.Connection, now: float, contents: Contents) -> list[Unkept]:
    """Incremental snapshots whose whole files somebody is to bring into the bucket now."""
    found = []
    for row in rebases.due(db, now):
        of = db.execute(sa.select(deployments_table).where(deployments_table.c.id == row.deployment_id)).one()
        snapshot = find(db, of.id, row.identity)
        chain: tuple[SnapshotFiles, ...] = ()
        desired = of.desired_snapshot == row.identity
        served = snapshot is not None and (desired or snapshot.ready_order is not None)
        if served and rebases.lineage(chain_of(snapshot)) == row.lineage:
            names = chain_identities([snapshot])
            known, wholes = contents.of(db, of.id, names), rebases.of(db, of.id, names)
            chain = as_desired(snapshot, of, known, wholes).files
        found.append(rebases.as_unkept(row, of, chain, desired=desired))
    return found


def base_desired(deployment: Any) -> Desired:
    """The base weights, which are desired after the ledger was reset. deployment: its row."""
    generation = deployment.generation
    return Desired(
        snapshot=BASE_SNAPSHOT,
        generation=generation,
        signalled=generation,
        transition=deployment.transition,
        ends_before=deployments.ends_before(deployment),
    )


def _files(parents: Any) -> tuple[SnapshotFiles, ...]:
    return msgspec.convert(parents, tuple[SnapshotFiles, ...])
