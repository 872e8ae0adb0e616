"""Signals: a snapshot becomes the desired one of a deployment; and the state that follows from all signals and reports.

Each function is part of its caller's transaction.

Whether an incremental snapshot may be signalled now, and which snapshots it stands on. Pure.

Always holds: a chain begins with a full snapshot, names no snapshot twice, and has at most the allowed number of incremental
ones. It has the files of each link as they were when that link was signalled.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import msgspec
import sqlalchemy as sa

from midstream.core.errors import SnapshotRefused
from midstream.core.types import BASE_SNAPSHOT, Content, Desired, SnapshotFiles
from midstream.ledger import deployments, rebases, reports
from midstream.ledger.contents import Contents, as_known, is_pushed, weights_of
from midstream.ledger.rebases import NO_WHOLES, Wholes
from midstream.ledger.records import (
    Death,
    DeploymentRow,
    DeploymentState,
    Disagreement,
    FleetReports,
    Signal,
    SignalResult,
    SnapshotRow,
    from_row,
    stronger_reset,
)
from midstream.ledger.schema import contents as contents_table
from midstream.ledger.schema import deaths as deaths_table
from midstream.ledger.schema import deployments as deployments_table
from midstream.ledger.schema import disagreements as disagreements_table
from midstream.ledger.schema import snapshots
from midstream.ledger.snapshots import (
    as_desired,
    as_snapshot,
    base_desired,
    chain_identities,
    fallbacks,
    find,
)
from midstream.snapshots.identity import snapshot_url

METADATA = "incremental_snapshot_metadata"
PREVIOUS = f"{METADATA}.previous_snapshot_identity"


@dataclass(frozen=True)
class SignalledState:
    """The state of the deployment when a signal comes.

    desired: BASE_SNAPSHOT when nothing was signalled, or the ledger was reset. failed: a replica failed on it.
    serving: (snapshot, generation it was loaded under) of each ready replica.
    """

    desired: str
    failed: bool
    serving: tuple[tuple[str, int], ...] = ()


class ChainFull(Exception):
    """As many incremental snapshots stand on a full one as may."""


def check_full(signal: Signal, known: SnapshotRow | None) -> None:
    """Raise SnapshotRefused when the files of a signal without metadata are those of an incremental snapshot."""
    if known is None or known.kind == "full" or signal.fingerprint is None:
        return
    if signal.fingerprint == known.fingerprint:
        raise SnapshotRefused(
            f"{METADATA}: {signal.identity!r} has the files that were signalled as an incremental snapshot on "
            f"{known.previous!r}; repeat its metadata, or write a full snapshot",
            param=METADATA,
        )


def parents_of(
    signal: Signal,
    known: SnapshotRow | None,
    parent: SnapshotRow | None,
    parent_since: int,
    standing: SignalledState,
    chain_max: int,
    wholes: Wholes = NO_WHOLES,
) -> tuple[SnapshotFiles, ...]:
    """The chain under an incremental snapshot, the full one first. Raises SnapshotRefused, naming the field.

    known: the stored snapshot of the same identity. parent: that of `signal.previous`. parent_since: the first generation that
    meant the parent's current files. wholes: what the chain may begin with.
    """
    if known is not None and _same_delta(signal, known):
        # It is asked for again, or rolled back to: the chain stays.
        return known.parents
    if signal.previous == signal.identity:
        raise _refused(f"{signal.identity!r} cannot be a delta on itself")
    if standing.desired == BASE_SNAPSHOT or signal.previous == BASE_SNAPSHOT:
        raise _refused(
            "the first snapshot must be full: no published snapshot is there to be the parent "
            "(nothing was signalled yet, or the ledger was reset)"
            if standing.desired == BASE_SNAPSHOT
            else f"{BASE_SNAPSHOT!r} names the weights of the start, which cannot be a parent; publish a full snapshot"
        )
    if signal.identity == standing.desired and not standing.failed:
        raise SnapshotRefused(
            f"{METADATA}: {signal.identity!r} is already desired with other files or another parent; "
            "publish this under a new identity, or as a full snapshot",
            param=METADATA,
        )
    if parent is None:
        raise _refused(f"there is no snapshot {signal.previous!r} in the ledger; publish a full snapshot")
    own = SnapshotFiles(
        snapshot=parent.identity,
        url=parent.url,
        fingerprint=parent.fingerprint,
        compression=parent.compression,
    )
    chain = tuple(msgspec.structs.replace(link, content=None) for link in wholes.cut((*parent.parents, own)))
    if any(link.snapshot == signal.identity for link in chain):
        raise _refused(f"{signal.previous!r} stands on {signal.identity!r} itself; use a new identity")
    _check_position(parent.identity, parent_since, standing)
    if len(chain) > chain_max:
        raise ChainFull(
            f"{PREVIOUS}: {signal.identity!r} would be incremental snapshot number {len(chain)} on the full snapshot "
            f"{chain[0].snapshot!r}, at most {chain_max} are allowed"
        )
    return chain


def _check_position(previous: str, since: int, standing: SignalledState) -> None:
    served = {snapshot for snapshot, _ in standing.serving}
    if served == {previous} and all(generation >= since for _, generation in standing.serving):
        return
    if previous == standing.desired and not standing.failed:
        return
    serve = (
        f"every ready replica serves {min(served)!r}"
        if len(served) == 1
        else "replicas differ in what they serve"
    )
    if previous == standing.desired:
        raise _refused(
            f"{previous!r} failed on a replica; publish a full snapshot or a delta on what still serves ({serve})"
        )
    raise _refused(
        f"{previous!r} is neither the desired snapshot, {standing.desired!r}, nor what every ready replica serves "
        f"({serve}); publish a full snapshot or a delta on one of these"
    )


def _same_delta(signal: Signal, known: SnapshotRow) -> bool:
    return (known.previous, known.compression, known.fingerprint) == (
        signal.previous,
        signal.compression,
        signal.fingerprint,
    )


def _refused(why: str) -> SnapshotRefused:
    return SnapshotRefused(f"{PREVIOUS}: {why}", param=PREVIOUS)


def _desired_of(table: sa.Table) -> Any:
    """Joins a row of the desired snapshot to its deployment's."""
    mine = table.c.deployment_id == deployments_table.c.id
    return mine & (table.c.identity == deployments_table.c.desired_snapshot)


def _some(table: sa.Table, *also: Any) -> Any:
    return sa.exists().where(table.c.deployment_id == deployments_table.c.id, *also)


# Made once, as in deployments.py.
_LISTED = sa.select(
    deployments_table,
    snapshots,
    contents_table.c.files,
    _some(deaths_table, ~deaths_table.c.forgiven).label("has_deaths"),
    _some(disagreements_table).label("has_disagreements"),
)
_LISTED = _LISTED.select_from(
    deployments_table.outerjoin(snapshots, _desired_of(snapshots)).outerjoin(
        contents_table, _desired_of(contents_table)
    )
)
_LISTED = _LISTED.where(deployments_table.c.name.in_(sa.bindparam("names", expanding=True)))

#: Field of a deployment's row: DeploymentState.first_boots.
_FIRST_BOOTS = "_first_boots"
#: Stands for the directory in the name of a snapshot that was sent, and not found in a bucket.
PUSHED = "push"
#: Of a directory's name, in the name of a snapshot that got none.
NAMED_CHARS = 64
#: Of a content's digest, in the name of a snapshot that was sent.
NAMED_DIGITS = 12


def accept(
    db: sa.Connection,
    name: str,
    signal: Signal,
    fleet: FleetReports,
    chain_max: int,
    contents: Contents,
    now: float,
) -> SignalResult:
    row = deployments.lock(db, name)
    deployments.check_takes(row)
    generation = max(row.last_generation, fleet.generation_floor) + 1
    signal = _placed(db, row, signal, generation)
    known = find(db, row.id, signal.identity)
    signal = as_known(signal, known)
    meant = contents.meant(db, row.id, signal, pushed=is_pushed(known))
    failed = fleet.failed_generation == row.generation or reports.failed_on_desired(db, row)
    standing = SignalledState(row.desired_snapshot, failed, fleet.serving)
    parents = _parents(db, row, known, signal, standing, chain_max)
    same_files = (
        known is not None
        and not meant.overwrites
        and (known.fingerprint, known.compression, as_snapshot(known).parents)
        == (signal.fingerprint, signal.compression, parents)
    )
    if same_files and row.desired_snapshot == signal.identity:
        # Asked for once more, it ends no policies that were made since.
        ends = signal.policies == "end" and deployments.ends_before(row) < row.generation
        if not failed and not ends and tuple(known.ignore_config) == signal.ignore_config:
            return SignalResult(_desired(db, known, row, contents), changed=False)
        # No replica may have loaded it under the first signal.
        signal = _at_least(signal, known)
    fields = deployments.decide_policies(db, row, signal.policies, generation)
    values = _values(signal, parents) | {"signalled_at": now, "generation": generation}
    if not same_files:
        values |= {"since_generation": generation, "ready_order": None}
    if known is None:
        fresh = {"deployment_id": row.id, "identity": signal.identity, "first_signalled_at": now}
        db.execute(snapshots.insert().values({**fresh, **values}))
    else:
        db.execute(snapshots.update().where(snapshots.c.id == known.id).values(values))
    meant.store(db)
    desiring = _desire(row, signal, generation, fleet.boots, now, fields)
    row = db.execute(desiring.returning(*deployments_table.c)).one()
    stored = find(db, row.id, signal.identity)
    return SignalResult(_desired(db, stored, row, contents), changed=True)


def _placed(db: sa.Connection, row: Any, signal: Signal, generation: int) -> Signal:
    """The signal with an identity and a url."""
    if not signal.identity:
        signal = replace(signal, identity=_name_of(db, row, signal, generation))
    if not signal.url:
        signal = replace(signal, url=snapshot_url(row.bucket_url, signal.identity))
    return signal


def _name_of(db: sa.Connection, row: Any, signal: Signal, generation: int) -> str:
    """Generations grow, and the name begins with one: no snapshot has it, and names are in the order of their signals.

    What was sent has the digest of its content in its name, so that no bucket has other files under it.
    """
    desired = find(db, row.id, row.desired_snapshot)
    if desired is not None and desired.fingerprint == signal.fingerprint:
        url = signal.url or snapshot_url(row.bucket_url, desired.identity)
        if desired.url == url:
            return str(desired.identity)
    directory = unquote(signal.url.rstrip("/").rpartition("/")[2])
    if not directory:
        assert signal.fingerprint is not None
        return f"update-{generation:06d}-{PUSHED}-{signal.fingerprint.rpartition(':')[2][:NAMED_DIGITS]}"
    return f"update-{generation:06d}-{re.sub('[^A-Za-z0-9._-]', '-', directory)[:NAMED_CHARS]}"


def state(db: sa.Connection, name: str, contents: Contents) -> DeploymentState:
    row = deployments.find(db, name)
    troubles = reports.deaths_of(db, row.id), reports.disagreements_of(db, row.id)
    if row.desired_snapshot == BASE_SNAPSHOT:
        return _state(row, (), {}, {}, *troubles)
    named = (find(db, row.id, row.desired_snapshot), *fallbacks(db, row))
    names = chain_identities(named)
    known, wholes = contents.of(db, row.id, names), _wholes(db, row.id, names, named)
    weights = weights_of(db, row.id, {snapshot.identity for snapshot in named})
    found = _state(row, named, known, weights, *troubles, wholes)
    return replace(found, rebase_problem=rebases.problem(db, row.id)) if named[0].compression else found


def listed(db: sa.Connection, names: Sequence[str]) -> list[tuple[DeploymentRow, DeploymentState]]:
    """Rows and states of those that there are, in the order of their names: one query, and two for each with a trouble.

    A state has no fallbacks, no weights, and the content of no parent.
    """
    found = []
    for row in db.execute(_LISTED, {"names": list(names)}):
        of, desired = _part(row, deployments_table), _part(row, snapshots)
        named = () if desired.id is None else (desired,)
        files = row._mapping[contents_table.c.files]
        known = {} if files is None else {desired.identity: msgspec.convert(files, Content)}
        deaths = reports.deaths_of(db, of.id) if row.has_deaths else ()
        disagreements = reports.disagreements_of(db, of.id) if row.has_disagreements else ()
        found.append((from_row(of, DeploymentRow), _state(of, named, known, {}, deaths, disagreements)))
    return sorted(found, key=lambda one: one[0].name)


def _part(row: Any, table: sa.Table) -> SimpleNamespace:
    return SimpleNamespace(**{column.name: row._mapping[column] for column in table.c})


def _state(
    row: Any,
    named: Sequence[Any],
    known: Mapping[str, Content],
    weights: Mapping[str, Mapping[str, str]],
    deaths: tuple[Death, ...],
    disagreements: tuple[Disagreement, ...],
    wholes: Wholes = NO_WHOLES,
) -> DeploymentState:
    """named: the rows of the desired snapshot and its fallbacks; none while the base weights are desired."""
    if not named:
        return DeploymentState(
            base_desired(row) if row.generation else None,
            since={BASE_SNAPSHOT: 0},
            reset_all=row.reset_all_generation,
            deaths=deaths,
            disagreements=disagreements,
            proven=True,
            pause=deployments.pause_of(row),
        )
    desired, *others = named
    return DeploymentState(
        as_desired(desired, row, known, wholes),
        tuple(as_desired(snapshot, row, known, wholes) for snapshot in others),
        weights=weights,
        since={snapshot.identity: snapshot.since_generation for snapshot in named},
        ever_ready=row.first_ready_at is not None,
        first_boots=frozenset(row.fields.get(_FIRST_BOOTS, ())),
        reset_all=row.reset_all_generation,
        reset_new_session=row.reset_new_session_generation,
        deaths=deaths,
        disagreements=disagreements,
        proven=desired.ready_order is not None,
        pause=deployments.pause_of(row),
    )


def _desired(db: sa.Connection, snapshot: Any, deployment: Any, contents: Contents) -> Desired:
    names = chain_identities([snapshot])
    wholes = _wholes(db, deployment.id, names, [snapshot])
    return as_desired(snapshot, deployment, contents.of(db, deployment.id, names), wholes)


def _wholes(db: sa.Connection, key: int, names: Collection[str], snapshots: Sequence[Any]) -> Wholes:
    """What their chains may begin with."""
    incremental = any(snapshot.compression is not None for snapshot in snapshots)
    return rebases.of(db, key, names) if incremental else NO_WHOLES


def _parents(
    db: sa.Connection, row: Any, known: Any, signal: Signal, standing: SignalledState, chain_max: int
) -> tuple[SnapshotFiles, ...]:
    """The snapshots that it stands on, () for a full one. Raises SnapshotRefused."""
    known = as_snapshot(known) if known is not None else None
    if signal.previous is None:
        check_full(signal, known)
        return ()
    if signal.parents:
        return signal.parents
    parent = find(db, row.id, signal.previous)
    if parent is None:
        return parents_of(signal, known, None, 0, standing, chain_max)
    wholes = rebases.of(db, row.id, chain_identities([parent]))
    since = parent.since_generation
    return parents_of(signal, known, as_snapshot(parent), since, standing, chain_max, wholes)


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


def _desire(
    row: Any,
    signal: Signal,
    generation: int,
    boots: tuple[str, ...],
    now: float,
    fields: Mapping[str, Any],
) -> sa.Update:
    """fields: further ones of the deployment's row."""
    if row.first_signalled_at is None:
        fields = {**fields, _FIRST_BOOTS: list(boots)}
    values: dict[str, Any] = {
        "desired_snapshot": signal.identity,
        "generation": generation,
        "last_generation": generation,
    }
    if row.first_signalled_at is None:
        values["first_signalled_at"] = now
    if fields:
        values["fields"] = {**row.fields, **fields}
    if signal.reset_prompt_cache != "none":
        values[f"reset_{signal.reset_prompt_cache}_generation"] = generation
    return deployments_table.update().where(deployments_table.c.id == row.id).values(values)
