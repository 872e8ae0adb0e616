"""What replicas report: stage changes, contents, deaths while they load a snapshot, and checks that differ.

Each function is part of its caller's transaction. key: the deployment's primary key.
Always holds: a report that is repeated changes nothing. A report on snapshots that a reset has forgotten is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from midstream.core.types import BASE_SNAPSHOT, SnapshotCheck, SnapshotContent, Stage, Transition
from midstream.ledger import contents, snapshots
from midstream.ledger.changes import mark
from midstream.ledger.deployments import find, hold, lock, next_generation
from midstream.ledger.records import BootHistory, Death, Disagreement, TransitionRow, from_row
from midstream.ledger.schema import deaths, deployments, disagreements, insert_new, storable, transitions
from midstream.ledger.schema import snapshots as snapshots_table

#: The newest ones, of all replicas.
MAX_DEATHS = 256
#: The newest ones, looked through for the last one of each replica.
MAX_DISAGREEMENTS = 256
#: Of a boot that ended: its last stage change, and the one that says how far it had got.
TAIL_TRANSITIONS = 2

# Made once, as in deployments.py.
_DEATHS = sa.select(deaths).where(deaths.c.deployment_id == sa.bindparam("key"), ~deaths.c.forgiven)
# By generation, as the index has them.
_DEATHS = _DEATHS.order_by(deaths.c.generation.desc()).limit(MAX_DEATHS)
_DISAGREEMENTS = sa.select(disagreements).where(disagreements.c.deployment_id == sa.bindparam("key"))
_DISAGREEMENTS = _DISAGREEMENTS.order_by(disagreements.c.id.desc()).limit(MAX_DISAGREEMENTS)

# -- stage changes


def record(db: sa.Connection, name: str, replica: str, boot: str, changes: Sequence[Transition]) -> int:
    deployment = hold(db, name)
    added = 0
    for change in changes:
        if change.generation < deployment.reset_ledger_generation:
            continue
        new = _insert(db, deployment.id, replica, boot, change)
        if new and change.stage is Stage.CHECKING:
            _note_served(db, deployment.id, change)
        ready = _made_ready(db, deployment.id, replica, boot, change) if new else None
        if ready is not None and ready[0] != BASE_SNAPSHOT:
            _note_ready(db, deployment.id, replica, *ready, change.at)
            mark(db, name)
        added += new
    return added


def boot_history(db: sa.Connection, name: str, replica: str, boot: str, ended: str | None) -> BootHistory:
    ours = (transitions.c.deployment_id == find(db, name).id) & (transitions.c.replica == replica)
    this = ours & (transitions.c.boot == boot)
    last = db.execute(sa.select(sa.func.max(transitions.c.seq)).where(this)).scalar()
    if last is not None:
        return BootHistory(last_seq=int(last))
    if ended is None:
        stored_last = sa.select(transitions.c.boot).where(ours).order_by(transitions.c.id.desc()).limit(1)
        ended = db.execute(stored_last).scalar()
    if ended is None:
        return BootHistory(last_seq=-1)
    tail = sa.select(transitions).where(ours & (transitions.c.boot == ended))
    tail = tail.order_by(transitions.c.seq.desc()).limit(TAIL_TRANSITIONS)
    found = tuple(from_row(row, TransitionRow) for row in db.execute(tail))
    return BootHistory(last_seq=-1, previous_boot=ended, tail=found[::-1])


def boot_transitions(db: sa.Connection, name: str, replica: str, boot: str) -> list[TransitionRow]:
    this = (
        (transitions.c.deployment_id == find(db, name).id)
        & (transitions.c.replica == replica)
        & (transitions.c.boot == boot)
    )
    rows = db.execute(sa.select(transitions).where(this).order_by(transitions.c.seq))
    return [from_row(row, TransitionRow) for row in rows]


def newest(db: sa.Connection, name: str, count: int | None) -> list[TransitionRow]:
    """Stage changes, in the order they were stored. count: how many at most, None for all."""
    query = sa.select(transitions).where(transitions.c.deployment_id == find(db, name).id)
    rows = db.execute(query.order_by(transitions.c.id.desc()).limit(count)).all()
    return [from_row(row, TransitionRow) for row in reversed(rows)]


def failed_on_desired(db: sa.Connection, row: Any) -> bool:
    """True if the last stage change of a replica for the desired snapshot, since its last signal, is to ERROR."""
    this = (
        (transitions.c.deployment_id == row.id)
        & (transitions.c.identity == row.desired_snapshot)
        & (transitions.c.generation >= row.generation)
    )
    last = sa.select(sa.func.max(transitions.c.id)).where(this).group_by(transitions.c.replica)
    failed = sa.select(transitions.c.id).where(
        transitions.c.id.in_(last), transitions.c.stage == Stage.ERROR.value
    )
    return db.execute(failed.limit(1)).first() is not None


def _insert(db: sa.Connection, key: int, replica: str, boot: str, change: Transition) -> bool:
    values = {
        "deployment_id": key,
        "replica": replica,
        "boot": boot,
        "seq": change.seq,
        "identity": change.snapshot,
        "generation": change.generation,
        "at": change.at,
        "stage": change.stage.value,
        "detail": storable(change.detail),
    }
    return insert_new(db, transitions, values)


def _note_served(db: sa.Connection, key: int, change: Transition) -> None:
    """The replica fetched the contents known then, of every link that was not signalled again since."""
    served = snapshots.find(db, key, change.snapshot)
    if served is None or served.generation > change.generation:
        return
    table = snapshots_table
    identities = sorted(snapshots.chain_identities([served]))
    links = (table.c.deployment_id == key) & table.c.identity.in_(identities)
    reported = sa.select(table.c.identity).where(links & (table.c.generation <= change.generation))
    contents.prove(db, key, db.execute(reported).scalars().all())


def _made_ready(
    db: sa.Connection, key: int, replica: str, boot: str, change: Transition
) -> tuple[str, int] | None:
    """Identity and generation of what the change shows to be ready.

    A replica also continues to serve a snapshot if its check was abandoned for a newer target, unless an earlier check failed
    and none has passed since.
    """
    if change.stage is Stage.IDLE:
        return change.snapshot, change.generation
    if change.stage is not Stage.FETCHING:
        return None
    ours = (transitions.c.deployment_id == key) & (transitions.c.replica == replica)
    before = sa.select(transitions).where(
        ours & (transitions.c.boot == boot) & (transitions.c.seq < change.seq)
    )
    before = before.order_by(transitions.c.seq.desc())
    last = db.execute(before.limit(1)).one_or_none()
    if last is None or (last.seq, last.stage) != (change.seq - 1, Stage.CHECKING.value):
        return None
    return (last.identity, last.generation) if _sound(db, before) else None


def _sound(db: sa.Connection, newest_first: sa.Select[Any]) -> bool:
    """True if no check failed in these stage changes of one boot, or one passed after the last failure."""
    ends = (Stage.CHECKING.value, Stage.IDLE.value, Stage.ERROR.value)
    failed_at = None
    for row in db.execute(newest_first.where(transitions.c.stage.in_(ends))):
        if row.stage == Stage.IDLE.value:
            return True
        if row.stage == Stage.CHECKING.value and failed_at == row.seq + 1:
            return False
        failed_at = row.seq if row.stage == Stage.ERROR.value else None
    return True


def _note_ready(db: sa.Connection, key: int, replica: str, identity: str, generation: int, at: float) -> None:
    table, this = snapshots_table, snapshots.this_one(key, identity)
    signalled = sa.select(table.c.generation).where(this).scalar_subquery()
    made_up = (deaths.c.identity == identity) | (deaths.c.generation < signalled)
    mine = (deaths.c.deployment_id == key) & (deaths.c.replica == replica)
    db.execute(deaths.update().where(mine & made_up).values(forgiven=True))
    first = table.update().where(this).values(ready_at=sa.func.coalesce(table.c.ready_at, at))
    # Without a row it was signalled through another ledger.
    if not db.execute(first).rowcount:
        return
    highest = sa.select(sa.func.max(table.c.ready_order)).where(table.c.deployment_id == key)
    order = (db.execute(highest).scalar() or 0) + 1
    current = this & (table.c.since_generation <= generation)
    db.execute(table.update().where(current).values(ready_order=order))
    of_all = sa.func.coalesce(deployments.c.first_ready_at, at)
    db.execute(deployments.update().where(deployments.c.id == key).values(first_ready_at=of_all))


# -- contents


def learn_content(
    db: sa.Connection, name: str, found: SnapshotContent, known_contents: contents.Contents
) -> None:
    row = hold(db, name)
    known = snapshots.find(db, row.id, found.snapshot)
    same_files = known is not None and known.fingerprint == found.fingerprint
    if same_files and known_contents.learn(db, row.id, found):
        mark(db, name)


def learn_weights(db: sa.Connection, name: str, check: SnapshotCheck) -> None:
    row = hold(db, name)
    known = snapshots.find(db, row.id, check.snapshot)
    same_files = known is not None and known.since_generation <= check.generation
    if same_files and contents.learn_weights(db, row.id, check):
        mark(db, name)


# -- deaths


def record_death(db: sa.Connection, name: str, boot: str, death: Death, seq: int | None, now: float) -> bool:
    row = lock(db, name)
    if death.generation < row.reset_ledger_generation:
        return False
    values = {
        "deployment_id": row.id,
        "replica": death.replica,
        "boot": boot,
        "identity": death.identity,
        "generation": death.generation,
        "detail": storable(death.detail),
        "forgiven": False,
    }
    if not insert_new(db, deaths, values):
        return False
    if seq is not None:
        failed = Transition(
            seq=seq,
            at=now,
            snapshot=death.identity,
            generation=death.generation,
            stage=Stage.ERROR,
            detail=death.detail,
        )
        _insert(db, row.id, death.replica, boot, failed)
    return True


def deaths_of(db: sa.Connection, key: int) -> tuple[Death, ...]:
    """The newest that count still, oldest first."""
    found = db.execute(_DEATHS, {"key": key})
    return tuple(from_row(row, Death) for row in sorted(found, key=lambda row: row.id))


# -- checks that differ


def disagree(db: sa.Connection, name: str, found: Disagreement, floor: int, now: float) -> Disagreement:
    row = lock(db, name)
    this = _disagreement_of(row.id, found.replica, found.boot) & (
        (disagreements.c.identity == found.identity) & (disagreements.c.generation == found.generation)
    )
    known = db.execute(sa.select(disagreements).where(this)).one_or_none()
    if known is None:
        values = {
            "deployment_id": row.id,
            "replica": found.replica,
            "boot": found.boot,
            "at": now,
            "identity": found.identity,
            "generation": found.generation,
            "verdict": "reload",
            "detail": storable(found.detail),
            "retry_generation": next_generation(db, row, floor),
        }
        db.execute(disagreements.insert().values(values))
    return from_row(db.execute(sa.select(disagreements).where(this)).one(), Disagreement)


def settle(db: sa.Connection, name: str, found: Disagreement, now: float) -> bool:
    key = lock(db, name).id
    this = _disagreement_of(key, found.replica, found.boot) & (
        disagreements.c.retry_generation == found.retry_generation
    )
    values = {"verdict": found.verdict, "at": now, "detail": storable(found.detail)}
    return bool(db.execute(disagreements.update().where(this).values(values)).rowcount)


def disagreements_of(db: sa.Connection, key: int) -> tuple[Disagreement, ...]:
    """The last one of each replica."""
    found = db.execute(_DISAGREEMENTS, {"key": key}).all()
    last = {row.replica: from_row(row, Disagreement) for row in reversed(found)}
    return tuple(last.values())


def _disagreement_of(key: int, replica: str, boot: str) -> Any:
    mine = (disagreements.c.replica == replica) & (disagreements.c.boot == boot)
    return (disagreements.c.deployment_id == key) & mine
