"""What identities mean: the bytes of each one's own files, and the weights that each kind of engine makes of them.

Each function is part of its caller's transaction. key: the deployment's primary key.
Always holds: the content that a replica has served under an identity stays its meaning until the ledger is reset or a signal
overwrites it on purpose. So does the content of what was pushed, from its signal. A content that only a manifest gave is
replaced by the next signal. The first digest learnt stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import sqlalchemy as sa

from midstream.core.errors import SnapshotRefused
from midstream.core.types import Content, SnapshotCheck, SnapshotContent
from midstream.ledger.records import Signal
from midstream.ledger.schema import contents, insert_new, weights
from midstream.snapshots.content import by_content, content_fingerprint, difference, size_difference

#: How many contents are kept in memory, by their digest.
REMEMBERED = 4096


def _of_identities(table: Any) -> Any:
    names: Any = sa.bindparam("names", expanding=True)
    return (table.c.deployment_id == sa.bindparam("key")) & table.c.identity.in_(names)


# Made once, as in deployments.py.
_DIGESTS = sa.select(contents.c.identity, contents.c.digest).where(_of_identities(contents))
_WEIGHTS = sa.select(weights).where(_of_identities(weights))


@dataclass(frozen=True)
class Meant:
    """What a signal makes of its identity's meaning.

    content: to be stored; None when it is unknown. keeps: the stored content stays. overwrites: a content that was served is
    replaced.
    """

    key: int
    identity: str
    content: Content | None
    keeps: bool
    overwrites: bool = False

    def store(self, db: sa.Connection) -> None:
        if self.keeps:
            return
        for table in (contents, weights):
            db.execute(table.delete().where(_this(table, self.key, self.identity)))
        if self.content is not None:
            db.execute(contents.insert().values(_row(self.key, self.identity, self.content, proven=False)))


class Contents:
    """Reads contents, each from the database once. Not for use from several threads at once."""

    def __init__(self) -> None:
        self._read: dict[str, Content] = {}

    def of(self, db: sa.Connection, key: int, identities: Collection[str]) -> dict[str, Content]:
        """The known contents, by identity."""
        rows = db.execute(_DIGESTS, {"key": key, "names": sorted(identities)}).all()
        if len(self._read) > REMEMBERED:
            self._read.clear()
        if missing := [row.identity for row in rows if row.digest not in self._read]:
            query = sa.select(contents.c.digest, contents.c.files)
            this = (contents.c.deployment_id == key) & contents.c.identity.in_(missing)
            for found in db.execute(query.where(this)):
                self._read[found.digest] = msgspec.convert(found.files, Content)
        return {row.identity: self._read[row.digest] for row in rows}

    def meant(self, db: sa.Connection, key: int, signal: Signal, *, pushed: bool = False) -> Meant:
        """Raises SnapshotRefused when the files are known not to be what the identity means.

        pushed: the identity was signalled by its content alone.
        """
        known = db.execute(sa.select(contents).where(_this(contents, key, signal.identity))).one_or_none()
        stored = None if known is None else msgspec.convert(known.files, Content)
        if stored is None or known is None or not (known.proven or pushed):
            keeps = stored is not None and stored == signal.content
            return Meant(key, signal.identity, signal.content, keeps)
        other = _difference(signal, stored)
        if signal.overwrite:
            keeps = signal.content == stored
            return Meant(key, signal.identity, signal.content, keeps, overwrites=not keeps)
        if other is None:
            return Meant(key, signal.identity, stored, keeps=True)
        raise SnapshotRefused(
            f"identity: the files at {signal.identity!r} are not those that were {'served' if known.proven else 'pushed'} "
            f"under this name: {other}. Publish them under another name, or say that they replace it (header "
            f"x-midstream-overwrite: 1)",
            param="identity",
        )

    def learn(self, db: sa.Connection, key: int, found: SnapshotContent) -> bool:
        """The content that a replica serves becomes the meaning, in place of one that only a manifest gave.

        Whether anything was learnt."""
        this = _this(contents, key, found.snapshot)
        if insert_new(db, contents, _row(key, found.snapshot, found.files, proven=True)):
            return True
        known = db.execute(sa.select(contents).where(this)).one()
        if not known.proven:
            row = _row(key, found.snapshot, found.files, proven=True)
            db.execute(contents.update().where(this).values(row))
        return not known.proven


def is_pushed(known: Any) -> bool:
    """Whether a snapshot was signalled by its content alone. known: its row, or None."""
    return known is not None and by_content(known.fingerprint)


def as_known(signal: Signal, known: Any) -> Signal:
    """Files that were pushed keep their fingerprint when they are signalled from the bucket. known: the row of the identity."""
    if not is_pushed(known) or signal.content is None or signal.previous is not None:
        return signal
    same = content_fingerprint(signal.content) == known.fingerprint
    return replace(signal, fingerprint=known.fingerprint) if same else signal


def prove(db: sa.Connection, key: int, identities: Collection[str]) -> None:
    """A replica serves files that have the contents of these identities."""
    these = (contents.c.deployment_id == key) & contents.c.identity.in_(sorted(identities))
    db.execute(contents.update().where(these).values(proven=True))


def learn_weights(db: sa.Connection, key: int, check: SnapshotCheck) -> bool:
    """Store the digest of the weights. True if it was not known before."""
    if check.weights is None:
        return False
    kind, _, digest = check.weights.rpartition(":")
    values = {"deployment_id": key, "identity": check.snapshot, "kind": kind, "digest": digest}
    return insert_new(db, weights, values)


def weights_of(db: sa.Connection, key: int, identities: Collection[str]) -> dict[str, dict[str, str]]:
    """The known digests of weights, by identity and then by kind of engine."""
    found: dict[str, dict[str, str]] = {}
    for row in db.execute(_WEIGHTS, {"key": key, "names": sorted(identities)}):
        found.setdefault(row.identity, {})[row.kind] = row.digest
    return found


def _difference(signal: Signal, stored: Content) -> str | None:
    """The first difference that sizes and manifest show, without reading the files; None when they show none."""
    if signal.content is not None:
        return difference(stored, signal.content)
    return None if signal.sizes is None else size_difference(stored, signal.sizes)


def _this(table: Any, key: int, identity: str) -> Any:
    return (table.c.deployment_id == key) & (table.c.identity == identity)


def _row(key: int, identity: str, content: Content, *, proven: bool) -> dict[str, Any]:
    files = msgspec.to_builtins(content)
    digest = hashlib.sha256(msgspec.json.encode(content)).hexdigest()
    return {"deployment_id": key, "identity": identity, "files": files, "digest": digest, "proven": proven}
