"""Whole files of incremental snapshots: which are wanted in the bucket, and which chains begin with them.

Each function is part of its caller's transaction. key: the deployment's primary key.

Owns: the rows of rebases. A replica makes the files of such a row, and brings them into the bucket (fleet/push_upkeep.py).
Always holds:
- One snapshot of a deployment is wanted at a time: one whose signal came when its chain was long.
- The identity and its own files stay what they are. What stands on the snapshot, or fetches it, begins with the whole files.
- A signal on a full chain is refused for good only where no whole files of that chain can come any more.
- Whole files stand for exactly the links that they were made from, and for no others that come to have the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from midstream.core.retry import Backoff
from midstream.core.types import Content, SnapshotFiles
from midstream.ledger import deployments
from midstream.ledger.changes import mark
from midstream.ledger.records import Kept, Unkept
from midstream.ledger.schema import insert_new, rebases, storable
from midstream.snapshots.content import content_fingerprint
from midstream.snapshots.identity import WHOLE_SUFFIX, directory_name

#: After a snapshot whose whole files did not come into the bucket, none is wanted for so long.
AGAIN = Backoff(first_s=5.0, last_s=60.0)


@dataclass(frozen=True)
class Wholes:
    """Full snapshots, by the lineage of the links that each stands for."""

    by_lineage: Mapping[str, SnapshotFiles] = field(default_factory=dict)

    def cut(self, chain: tuple[SnapshotFiles, ...]) -> tuple[SnapshotFiles, ...]:
        """The chain from the last link on that has whole files."""
        names = {whole.snapshot for whole in self.by_lineage.values()}
        for at in reversed(range(len(chain))):
            if chain[at].snapshot in names and (whole := self.by_lineage.get(lineage(chain[: at + 1]))):
                return (whole, *chain[at + 1 :])
        return chain

    def content(self, link: SnapshotFiles) -> Content | None:
        """None: the link is not one of these full snapshots."""
        return next(
            (
                whole.content
                for whole in self.by_lineage.values()
                if (whole.snapshot, whole.fingerprint) == (link.snapshot, link.fingerprint)
            ),
            None,
        )


NO_WHOLES = Wholes()


def lineage(chain: Sequence[SnapshotFiles]) -> str:
    """A digest of which files these links are."""
    links = [(link.snapshot, link.url, link.fingerprint, link.compression) for link in chain]
    return hashlib.sha256(msgspec.json.encode(links)).hexdigest()


def of(db: sa.Connection, key: int, identities: Collection[str]) -> Wholes:
    """The whole files of these snapshots that are in the bucket."""
    these = (rebases.c.deployment_id == key) & rebases.c.identity.in_(sorted(identities))
    found = {}
    for row in db.execute(sa.select(rebases).where(these & (rebases.c.kept == "kept"))):
        content = msgspec.convert(row.files, Content)
        found[row.lineage] = SnapshotFiles(
            snapshot=row.identity, url=row.url, fingerprint=content_fingerprint(content), content=content
        )
    return Wholes(found)


def urls(db: sa.Connection, key: int) -> dict[str, str]:
    """Where whole files are, by lineage."""
    mine = (rebases.c.deployment_id == key) & (rebases.c.kept == "kept")
    return {
        row.lineage: row.url for row in db.execute(sa.select(rebases.c.lineage, rebases.c.url).where(mine))
    }


def problem(db: sa.Connection, key: int) -> str:
    """Why whole files that are wanted are not in the bucket; empty when no try failed."""
    newest = _newest(db, key)
    failed = newest is not None and newest.kept != "kept" and newest.reason
    return f"{newest.identity}: {newest.reason}" if failed else ""


def want(db: sa.Connection, key: int, chain: Sequence[SnapshotFiles], after: int, now: float) -> None:
    """Want the whole files of `chain` if it has `after` incremental snapshots or more, and no others are wanted."""
    if not _is_long(chain, after):
        return
    newest = _newest(db, key)
    if newest is not None and newest.kept == "wanted":
        return
    failed = newest is not None and newest.kept == "given up" and newest.reason != ""
    # One that is wanted is tried at once: its files leave the caches of replicas soon after it is not desired any more.
    if failed and now < newest.wanted_at + AGAIN.pause_s(newest.keep_tries):
        return
    own = chain[-1]
    this = {"deployment_id": key, "identity": own.snapshot, "lineage": lineage(chain)}
    values = {
        "url": own.url + WHOLE_SUFFIX,
        "wanted_at": now,
        "kept": "wanted",
        "keep_at": now,
        "keep_tries": newest.keep_tries if failed else 0,
        "reason": newest.reason if failed else "",
    }
    same = (rebases.c.deployment_id == key) & (rebases.c.lineage == this["lineage"])
    # One that was given up is wanted again.
    db.execute(rebases.delete().where(same & (rebases.c.kept == "given up")))
    insert_new(db, rebases, {**this, **values})


def may_come(
    db: sa.Connection, key: int, chain: Sequence[SnapshotFiles], after: int, *, desired: bool
) -> bool:
    """Whether the chain may yet begin with whole files. after: as of `want`; 0: they would be of no use. desired: it is that of
    the desired snapshot."""
    if after == 0:
        return False
    newest = _newest(db, key)
    if newest is not None and newest.kept == "wanted":
        prefixes = (lineage(chain[: end + 1]) for end in range(1, len(chain)))
        if newest.lineage in prefixes:
            return True
    # If it is not wanted yet, a later signal has it wanted.
    return desired and _is_long(chain, after)


def _is_long(chain: Sequence[SnapshotFiles], after: int) -> bool:
    """Whether it has `after` incremental snapshots or more, and is known by what it stands on."""
    return 0 < after < len(chain) and all(link.fingerprint is not None for link in chain)


def _newest(db: sa.Connection, key: int) -> Any:
    query = sa.select(rebases).where(rebases.c.deployment_id == key)
    return db.execute(query.order_by(rebases.c.id.desc()).limit(1)).one_or_none()


def due(db: sa.Connection, now: float) -> Sequence[Any]:
    """Rows whose files somebody is to bring into the bucket now."""
    query = sa.select(rebases).where(rebases.c.keep_at <= now)
    return db.execute(query.order_by(rebases.c.keep_at)).all()


def as_unkept(row: Any, deployment: Any, chain: tuple[SnapshotFiles, ...], *, desired: bool) -> Unkept:
    """chain: as replicas have it, () where the identity means others now. deployment: its row."""
    return Unkept(
        key=row.id,
        deployment=deployment.name,
        group="",
        identity=row.identity,
        bucket=row.url.rpartition("/")[0],
        tries=row.keep_tries,
        keep_at=row.keep_at,
        content=None,
        desired=desired,
        of="rebase",
        name=directory_name(row.url),
        chain=chain,
        lineage=row.lineage,
        reason=row.reason,
    )


def settle(
    db: sa.Connection, rebase: Unkept, kept: Kept, again_s: float, tries: int, reason: str, now: float
) -> None:
    """How a try ended. rebase.content: of the files, if they are there now."""
    values: dict[str, Any] = {"kept": kept, "keep_at": now + again_s if kept == "wanted" else None}
    values |= {"keep_tries": tries, "reason": storable(reason)}
    if rebase.content is not None:
        values["files"] = msgspec.to_builtins(rebase.content)
    deployment = deployments.hold(db, rebase.deployment)
    # Keys of rows that a reset removed are given again.
    this = (rebases.c.id == rebase.key) & (rebases.c.deployment_id == deployment.id)
    this &= (rebases.c.lineage == rebase.lineage) & (rebases.c.kept == "wanted")
    # A gateway whose claim is over changes nothing of what another one has finished.
    changed = db.execute(rebases.update().where(this).values(values)).rowcount
    if changed and (kept != "wanted" or reason != rebase.reason):
        # Chains begin with these files from now on, or people see why they do not.
        mark(db, rebase.deployment)
