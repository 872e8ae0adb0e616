"""Which deployments and policies changed since a reader last looked: each writing transaction that changed one has a serial.

Each function is part of its caller's transaction.
Always holds:
- Serials are in the order of commits. A writer takes the counter's row as its last lock and holds it until it commits, so a
  reader that sees one serial sees all before it.
- A name has one row, with the serial of its last change, also when its deployment is gone.
- The rows of the last KEPT serials are kept. A reader that is further behind reads everything.
- What a reader reads grows with what changed, not with what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from midstream.ledger.records import DeploymentRow, from_row
from midstream.ledger.schema import change_counter, changes, deployments, upsert

#: Serials that a reader may be behind without reading everything.
KEPT = 20_000
#: Older rows are removed once in so many serials.
REMOVED_EVERY = 1_000
#: Of a connection's `info`: the names that its transaction changed.
_CHANGED = "midstream_changed"

# Statements are made once: to make one takes longer than to run it.
_NEXT = change_counter.update().values(last=change_counter.c.last + 1).returning(change_counter.c.last)
_OF_NAMES = change_counter.outerjoin(changes, changes.c.serial > sa.bindparam("seen"))
_OF_NAMES = _OF_NAMES.outerjoin(deployments, deployments.c.name == changes.c.name)
_SINCE = sa.select(
    change_counter.c.last, change_counter.c.forgotten, changes.c.name.label("changed"), *deployments.c
)
_SINCE = _SINCE.select_from(_OF_NAMES).order_by(changes.c.serial)
_LAST = sa.select(change_counter.c.last)
_EVERYTHING = sa.select(deployments).order_by(deployments.c.name)


@dataclass(frozen=True)
class Changes:
    """serial: to be given with the next look. rows: by name, those that changed; None: it is gone. whole: these are all."""

    serial: int
    rows: Mapping[str, DeploymentRow | None]
    whole: bool = False


@contextmanager
def noted(db: sa.Connection) -> Iterator[None]:
    """What is marked within gets the transaction's serial at its end."""
    marked: dict[str, None] = {}
    db.info[_CHANGED] = marked
    yield
    if marked:
        _number(db, marked)


def mark(db: sa.Connection, name: str) -> None:
    """The transaction changes what readers see of this deployment or policy."""
    db.info[_CHANGED][name] = None


def since(db: sa.Connection, seen: int | None) -> Changes:
    """seen: the serial of the last look; None: the first one."""
    if seen is not None:
        found = db.execute(_SINCE, {"seen": seen}).all()
        last, forgotten = found[0].last, found[0].forgotten
        # A lower counter is another ledger's: one that was restored.
        if forgotten <= seen <= last:
            rows = {
                row.changed: from_row(row, DeploymentRow) if row.name else None
                for row in found
                if row.changed
            }
            return Changes(int(last), rows)
    last = db.execute(_LAST).scalar_one()
    return Changes(
        int(last), {row.name: from_row(row, DeploymentRow) for row in db.execute(_EVERYTHING)}, whole=True
    )


def _number(db: sa.Connection, names: Mapping[str, None]) -> None:
    serial = int(db.execute(_NEXT).scalar_one())
    upsert(db, changes, [{"name": name, "serial": serial} for name in names])
    if serial % REMOVED_EVERY == 0 and serial > KEPT:
        db.execute(changes.delete().where(changes.c.serial <= serial - KEPT))
        db.execute(change_counter.update().values(forgotten=serial - KEPT))
