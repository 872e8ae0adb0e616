"""What a trainer's delta (records.py) changes in its parent.

Always holds: every tensor that it names is the parent's, of the type, shape and size that it says. The others stay.
"""

from __future__ import annotations

from pathlib import Path

from midstream.core.errors import SnapshotIncompatible
from midstream.core.types import TrainerFormat
from midstream.snapshots.arc2.files import length, weights_files
from midstream.snapshots.changes import ChangedTensor, DeltaChanges, changes_of
from midstream.snapshots.layout import SKYRL_MANIFEST, FileLayout
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.trainer_deltas.records import (
    Lineage,
    check_lineage,
    read_trainer_delta,
    torch_dtype,
)


def changes(parent: Path, delta: Path, compression: TrainerFormat, lineage: Lineage) -> DeltaChanges:
    """lineage: names that the versions in the delta must fit. Raises the errors of arc2.changes.changes."""
    layouts = weights_files(parent)
    record = read_trainer_delta(delta, compression)
    check_lineage(record, lineage)
    layout_of = {name: layout for layout in layouts.values() for name in layout.tensors}
    if unknown := sorted(record.tensors.keys() - layout_of.keys()):
        raise SnapshotIncompatible(
            f"{record.said_in}: {listed(unknown)} is in the delta, but not in its parent"
        )
    for name, change in record.tensors.items():
        _check_kind(record.said_in, name, change, layout_of[name])
    # A file of that name in the checkpoint is the parent's.
    return changes_of(layouts, record.tensors, SKYRL_MANIFEST)


def _check_kind(said_in: str, name: str, change: ChangedTensor, layout: FileLayout) -> None:
    """What the delta says of a tensor's type and shape must be the parent's."""
    spec = layout.tensors[name]
    for what, ours, theirs in (
        ("dtype", torch_dtype(spec.dtype), change.dtype),
        ("shape", spec.shape, change.shape),
        ("size", length(layout.ranges[name]), change.size),
    ):
        if theirs is not None and theirs != ours:
            raise SnapshotIncompatible(
                f"{said_in}: {shown(name)} has {what} {shown_value(theirs)}, its parent's is {shown_value(ours)}"
            )
