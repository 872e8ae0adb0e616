"""Whether an incremental snapshot may be signalled now, and which snapshots it stands on. Pure.

Always holds: a chain begins with a full snapshot, names no snapshot twice, and has at most the allowed number of incremental
ones. It has the files of each link as they were when that link was signalled.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.core.errors import SnapshotRefused
from midstream.core.types import BASE_SNAPSHOT, SnapshotFiles
from midstream.ledger.records import Signal, SnapshotRow

METADATA = "incremental_snapshot_metadata"
PREVIOUS = f"{METADATA}.previous_snapshot_identity"


@dataclass(frozen=True)
class Standing:
    """The state of the deployment when a signal comes.

    desired: BASE_SNAPSHOT when nothing was signalled, or the ledger was reset. failed: a replica failed on it.
    serving: (snapshot, generation it was loaded under) of each ready replica.
    """

    desired: str
    failed: bool
    serving: tuple[tuple[str, int], ...] = ()


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
    standing: Standing,
    chain_max: int,
) -> tuple[SnapshotFiles, ...]:
    """The chain under an incremental snapshot, the full one first. Raises SnapshotRefused, naming the field.

    known: the stored snapshot of the same identity. parent: that of `signal.previous`. parent_since: the first generation that
    meant the parent's current files.
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
    chain = (*parent.parents, own)
    if any(link.snapshot == signal.identity for link in chain):
        raise _refused(f"{signal.previous!r} stands on {signal.identity!r} itself; use a new identity")
    _check_position(parent.identity, parent_since, standing)
    if len(chain) > chain_max:
        raise _refused(
            f"{signal.identity!r} would be incremental snapshot number {len(chain)} on the full snapshot "
            f"{chain[0].snapshot!r}, at most {chain_max} are allowed; publish a full snapshot"
        )
    return chain


def _check_position(previous: str, since: int, standing: Standing) -> None:
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
