"""Groups in which a trainer sends weights to the replicas, and the updates of each group.

Owns: the phases of a group as a table. Each function is part of its caller's transaction.
Always holds:
- A deployment has one open group at most, by a constraint.
- A group moves only from the state that its writer has seen. Each move has a serial number. So of two gateways, one moves it.
- An update is committed in the transaction that takes its signal. A group that has ended commits nothing.
- A group has a deadline, except while it waits for its next update. Any gateway may end a group that is past it.
- One gateway at a time brings the files of an update into the bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from midstream.core.errors import Conflict
from midstream.core.table import Table
from midstream.core.types import Desired, PolicyFate
from midstream.ledger import deployments
from midstream.ledger.contents import Contents
from midstream.ledger.records import Kept, Unkept, from_row
from midstream.ledger.schema import deployments as deployments_table
from midstream.ledger.schema import insert_new, rebases, storable, transfer_updates, transfers
from midstream.ledger.snapshots import find as find_snapshot
from midstream.snapshots.identity import snapshot_url


class Phase(enum.StrEnum):
    JOINING = "joining"
    #: The group waits for its next update.
    JOINED = "joined"
    STARTING = "starting"
    STARTED = "started"
    RECEIVING = "receiving"
    FINISHING = "finishing"
    #: The replicas have finished, and the name was refused, or what is said of policies. They hold the weights for another
    #: finish, until the deadline.
    UNNAMED = "unnamed"
    ENDED = "ended"


class Event(enum.StrEnum):
    JOINED = "joined"
    START = "start"
    STARTED = "started"
    UPDATE = "update"
    RECEIVED = "received"
    #: Members are left out of the rest of the update.
    FENCED = "fenced"
    FINISH = "finish"
    COMMITTED = "committed"
    #: The signal was refused, for its name or for policies.
    NAME_REFUSED = "name refused"
    #: The update was refused. The replicas forget it.
    DROPPED = "dropped"
    END = "end"


class Order(enum.StrEnum):
    """What the gateway that made the move asks of the replicas."""

    NONE = "nothing"
    BEGIN = "begin"
    BEGIN_ANEW = "drop, begin"
    RECEIVE = "check, receive"
    FINISH = "finish"
    RELEASE = "drop, leave: those that are fenced"
    DROP = "drop"
    LEAVE = "drop, leave"


#: A group that was started again drops what it had received.
MOVES: Table[Phase, Event, Order] = Table(
    Phase.JOINING,
    {
        (Phase.JOINING, Event.JOINED): (Phase.JOINED, Order.NONE),
        (Phase.JOINED, Event.START): (Phase.STARTING, Order.BEGIN),
        (Phase.STARTED, Event.START): (Phase.STARTING, Order.BEGIN),
        (Phase.STARTING, Event.STARTED): (Phase.STARTED, Order.NONE),
        (Phase.STARTED, Event.UPDATE): (Phase.RECEIVING, Order.RECEIVE),
        (Phase.RECEIVING, Event.RECEIVED): (Phase.STARTED, Order.NONE),
        (Phase.RECEIVING, Event.FENCED): (Phase.RECEIVING, Order.RELEASE),
        (Phase.STARTED, Event.FINISH): (Phase.FINISHING, Order.FINISH),
        (Phase.FINISHING, Event.FENCED): (Phase.FINISHING, Order.RELEASE),
        (Phase.FINISHING, Event.COMMITTED): (Phase.JOINED, Order.NONE),
        (Phase.FINISHING, Event.DROPPED): (Phase.JOINED, Order.DROP),
        (Phase.FINISHING, Event.NAME_REFUSED): (Phase.UNNAMED, Order.NONE),
        (Phase.UNNAMED, Event.FINISH): (Phase.FINISHING, Order.FINISH),
        (Phase.UNNAMED, Event.START): (Phase.STARTING, Order.BEGIN_ANEW),
        **{(phase, Event.END): (Phase.ENDED, Order.LEAVE) for phase in Phase if phase is not Phase.ENDED},
    },
)
_WITHOUT_DEADLINE = (Phase.JOINED, Phase.ENDED)


class TransferMember(NamedTuple):
    """rank: of its receiver in the group, or the first of its engine's `ranks`. fenced: why it takes no further part; empty
    while it does."""

    replica: str
    boot: str
    rank: int
    fenced: str = ""
    ranks: int = 1


@dataclass(frozen=True)
class Transfer:
    """A group. trainer: HOST:PORT of its store. number: of the last update that was started, 0 before the first.

    deadline, opened_at, ended_at: by the ledger's clock (clock.py). reason: why it ended.
    """

    key: int
    deployment: str
    group: str
    serial: int
    phase: Phase
    members: tuple[TransferMember, ...]
    trainer: str
    number: int
    deadline: float | None
    opened_at: float
    ended_at: float | None = None
    reason: str = ""

    @property
    def active(self) -> tuple[TransferMember, ...]:
        return tuple(member for member in self.members if not member.fenced)

    def late(self, now: float) -> bool:
        """It is past its deadline."""
        return self.deadline is not None and self.deadline < now


@dataclass(frozen=True, kw_only=True)
class Committing:
    """What a signal commits. transfer: as it was seen last. replicas: those that have the files.

    keep: somebody is to bring them into the bucket. ends: why the group ends with this update; empty: it does not.
    """

    transfer: Transfer
    replicas: tuple[str, ...]
    keep: bool
    ends: str = ""


class Begun(NamedTuple):
    """What a trainer says of an update when it begins, and may replace when it ends. identity: of the snapshot. policies: what
    becomes of the deployment's policies."""

    identity: str | None = None
    policies: PolicyFate | None = None


NOTHING_SAID = Begun()


@dataclass(frozen=True)
class TransferUpdate:
    """An update of a group. committed_at: None: it was not committed, so it became no snapshot. identity: of that; before, the
    name that the trainer gave when it began, if any. policies: what becomes of them; before, what the trainer said of them."""

    number: int
    started_at: float
    committed_at: float | None
    identity: str | None
    generation: int | None
    replicas: tuple[str, ...]
    kept: Kept
    policies: PolicyFate | None = None


class GroupMoved(Conflict):
    """Another call, or another gateway, moved the group first."""


def open_group(
    db: sa.Connection,
    name: str,
    group: str,
    members: Sequence[TransferMember],
    trainer: str,
    within_s: float,
    now: float,
) -> Transfer:
    row = deployments.hold(db, name)
    deployments.check_takes(row)
    fresh: dict[str, Any] = {
        "deployment_id": row.id,
        "open_of": row.id,
        "name": group,
        "serial": 1,
        "phase": MOVES.first,
        "members": [list(member) for member in members],
        "trainer": trainer,
        "number": 0,
        "deadline": now + within_s,
        "opened_at": now,
        "reason": "",
    }
    if not insert_new(db, transfers, fresh):
        raise GroupMoved(f"another trainer's group was made for {name} meanwhile")
    found = db.execute(sa.select(transfers).where(transfers.c.name == group)).one()
    return _transfer(found, name)


def current(db: sa.Connection, name: str) -> Transfer | None:
    """The open group."""
    row = deployments.find(db, name)
    found = db.execute(sa.select(transfers).where(transfers.c.open_of == row.id)).one_or_none()
    return None if found is None else _transfer(found, name)


def move(
    db: sa.Connection,
    seen: Transfer,
    event: Event,
    now: float,
    *,
    within_s: float | None = None,
    members: Sequence[TransferMember] | None = None,
    reason: str = "",
    begun: Begun = NOTHING_SAID,
) -> Transfer:
    """Its deployment is held. within_s: of a new deadline; None: the deadline stays, or the next phase has none. begun: what is
    said of an update that begins. Raises GroupMoved."""
    phase, _ = MOVES.move(seen.phase, event)
    values: dict[str, Any] = {"phase": phase, "serial": seen.serial + 1}
    if phase in _WITHOUT_DEADLINE:
        values["deadline"] = None
    elif within_s is not None:
        values["deadline"] = now + within_s
    if members is not None:
        values["members"] = [list(member) for member in members]
    if phase is Phase.STARTING:
        values["number"] = seen.number + 1
    if phase is Phase.ENDED:
        values |= {"open_of": None, "ended_at": now, "reason": storable(reason)}
    this = (transfers.c.id == seen.key) & (transfers.c.serial == seen.serial)
    found = db.execute(transfers.update().where(this).values(values).returning(*transfers.c)).one_or_none()
    if found is None:
        other = db.execute(sa.select(transfers).where(transfers.c.id == seen.key)).one_or_none()
        raise GroupMoved(_moved(other))
    if phase is Phase.STARTING:
        fresh = {"transfer_id": seen.key, "number": found.number, "started_at": now, **begun._asdict()}
        db.execute(transfer_updates.insert().values(**fresh, replicas=[], kept="", keep_tries=0))
    return _transfer(found, seen.deployment)


def _moved(row: Any) -> str:
    if row is None or row.phase == Phase.ENDED:
        why = "it is gone" if row is None else f"it has ended: {row.reason}"
        return f"{why}; call /init_weight_transfer_engine"
    return f"another call moved the trainer's group meanwhile: it is {row.phase}"


def commit(
    db: sa.Connection, committing: Committing, desired: Desired, policies: PolicyFate, now: float
) -> None:
    """The signal of the update was taken, in this transaction."""
    seen = committing.transfer
    moved = move(db, seen, Event.COMMITTED, now)
    values = {
        "committed_at": now,
        "identity": desired.snapshot,
        "policies": policies,
        "generation": desired.generation,
        "fingerprint": desired.fingerprint,
        "replicas": list(committing.replicas),
        "kept": "wanted" if committing.keep else "off",
        "keep_at": now if committing.keep else None,
    }
    db.execute(transfer_updates.update().where(_this_update(seen)).values(values))
    if committing.ends:
        move(db, moved, Event.END, now, reason=committing.ends)


def _this_update(of: Transfer) -> Any:
    return (transfer_updates.c.transfer_id == of.key) & (transfer_updates.c.number == of.number)


def last_update(db: sa.Connection, of: Transfer) -> TransferUpdate | None:
    """None: none has begun."""
    found = db.execute(sa.select(transfer_updates).where(_this_update(of))).one_or_none()
    return None if found is None else from_row(found, TransferUpdate)


def committed(db: sa.Connection, of: Transfer) -> TransferUpdate | None:
    """The group's last update, if it was committed."""
    found = last_update(db, of)
    return None if found is None or found.committed_at is None else found


def every_open(db: sa.Connection) -> list[Transfer]:
    """Open groups of all deployments."""
    of = transfers.c.open_of == deployments_table.c.id
    query = sa.select(transfers, deployments_table.c.name.label("of")).join(deployments_table, of)
    return [_transfer(row, row.of) for row in db.execute(query.order_by(transfers.c.id))]


def waiting_s(db: sa.Connection, now: float) -> dict[str, float]:
    """By deployment: how long its oldest update that somebody is to bring into the bucket has been committed."""
    joined = transfer_updates.join(transfers).join(deployments_table)
    oldest = sa.func.min(transfer_updates.c.committed_at)
    query = sa.select(deployments_table.c.name, oldest).select_from(joined)
    query = query.where(transfer_updates.c.keep_at.is_not(None)).group_by(deployments_table.c.name)
    return {name: max(0.0, now - since) for name, since in db.execute(query)}


def unkept(db: sa.Connection, now: float, contents: Contents) -> list[Unkept]:
    """Committed updates that somebody is to bring into the bucket now."""
    of = deployments_table.c
    query = sa.select(
        transfer_updates, transfers.c.name.label("group"), of.name.label("of"), of.id.label("owner"),
        of.bucket_url, of.desired_snapshot,
    )  # fmt: skip
    query = query.select_from(transfer_updates.join(transfers).join(deployments_table))
    due = query.where(transfer_updates.c.keep_at <= now).order_by(transfer_updates.c.keep_at)
    return [_unkept(db, row, contents) for row in db.execute(due).all()]


def _unkept(db: sa.Connection, row: Any, contents: Contents) -> Unkept:
    snapshot = find_snapshot(db, row.owner, row.identity)
    meant = row.fingerprint, snapshot_url(row.bucket_url, row.identity)
    known = snapshot is not None and (snapshot.fingerprint, snapshot.url) == meant
    desired = row.desired_snapshot == row.identity
    known = known and (desired or snapshot.ready_order is not None)
    content = contents.of(db, row.owner, [row.identity]).get(row.identity) if known else None
    return Unkept(
        row.id, row.of, row.group, row.identity, row.bucket_url, row.keep_tries, row.keep_at, content, desired
    )


def claim(db: sa.Connection, update: Unkept, within_s: float, now: float) -> bool:
    """Whether the caller is to bring its files into the bucket. No other gateway tries before `within_s` is over."""
    table = rebases if update.of == "rebase" else transfer_updates
    this = (table.c.id == update.key) & (table.c.keep_at == update.keep_at)
    values = {"keep_at": now + within_s, "keep_tries": update.tries + 1}
    return db.execute(table.update().where(this).values(values).returning(table.c.id)).first() is not None


def settle(db: sa.Connection, update: Unkept, kept: Kept, again_s: float, tries: int, now: float) -> None:
    """How a try ended. again_s: until the next one, if the files are still wanted."""
    values: dict[str, Any] = {"kept": kept, "keep_at": None}
    if kept == "wanted":
        values |= {"keep_at": now + again_s, "keep_tries": tries}
    # Keys of rows that went with their deployment are given again, names of groups are not.
    group = sa.select(transfers.c.id).where(transfers.c.name == update.group).scalar_subquery()
    this = (transfer_updates.c.id == update.key) & (transfer_updates.c.transfer_id == group)
    # A gateway whose claim is over changes nothing of what another one has finished.
    this &= transfer_updates.c.kept == "wanted"
    db.execute(transfer_updates.update().where(this).values(values))


def newest(db: sa.Connection, name: str, count: int) -> list[tuple[Transfer, list[TransferUpdate]]]:
    """The newest groups of a deployment, the last one first, each with its newest updates, the last one first."""
    row = deployments.find(db, name)
    query = sa.select(transfers).where(transfers.c.deployment_id == row.id)
    found = db.execute(query.order_by(transfers.c.id.desc()).limit(count)).all()
    shown = []
    for one in found:
        updates = sa.select(transfer_updates).where(transfer_updates.c.transfer_id == one.id)
        rows = db.execute(updates.order_by(transfer_updates.c.number.desc()).limit(count)).all()
        shown.append((_transfer(one, name), [from_row(update, TransferUpdate) for update in rows]))
    return shown


def _transfer(row: Any, deployment: str) -> Transfer:
    return Transfer(
        key=row.id,
        deployment=deployment,
        group=row.name,
        serial=int(row.serial),
        phase=Phase(row.phase),
        members=tuple(msgspec.convert(row.members, tuple[TransferMember, ...])),
        trainer=row.trainer,
        number=int(row.number),
        deadline=row.deadline,
        opened_at=row.opened_at,
        ended_at=row.ended_at,
        reason=row.reason,
    )
