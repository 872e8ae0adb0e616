"""What an ARC2 delta changes in its parent.

A delta directory has a safetensors file for each shard of its parent, with the same name and the same tensor names. Each tensor
is a `U8` blob (blob.py). The metadata has the checksum of each tensor's new bytes. Files that the delta lacks are the parent's.

Always holds: a delta changes every tensor of its parent, if only by nothing. One that names another is refused.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from midstream.core.errors import SnapshotCorrupt, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import ArcFormat
from midstream.snapshots.arc2.files import weights_files
from midstream.snapshots.changes import ChangedTensor, DeltaChanges, changes_of
from midstream.snapshots.checksums import ARC_ADLER32
from midstream.snapshots.layout import INDEX_FILE, FileLayout, read_file_layout, read_weight_map
from midstream.snapshots.messages import listed, shown, shown_value


def changes(parent: Path, delta: Path, compression: ArcFormat) -> DeltaChanges:
    """Raises SnapshotMissing, SnapshotCorrupt, SnapshotIncompatible."""
    layouts = weights_files(parent)
    _check_index(parent, delta)
    _check_files(parent, delta, layouts.keys())
    changed: dict[str, ChangedTensor] = {}
    for file, old in layouts.items():
        new = read_file_layout(delta / file, gaps=True)
        _check_tensors(shown(file), old, new)
        for name, where in new.ranges.items():
            changed[name] = ChangedTensor(file, where, compression, ARC_ADLER32, new.metadata[name])
    return changes_of(layouts, changed)


def _check_files(parent: Path, delta: Path, files: Set[str]) -> None:
    if not delta.is_dir():
        raise SnapshotMissing(f"{shown(delta.name)}: is not there")
    present = {p.name for p in delta.glob("*.safetensors") if not p.name.startswith(".")}
    if absent := sorted(files - present):
        raise SnapshotMissing(
            f"{listed(absent)}: is not in the delta; it needs one file per file of the parent"
        )
    if extra := sorted(name for name in present - files if not (parent / name).exists()):
        raise SnapshotIncompatible(f"{listed(extra)}: is in the delta, but not in its parent")


def _check_index(parent: Path, delta: Path) -> None:
    """A delta need not have an index. The index it has places every tensor where the parent's does.

    Raises SnapshotCorrupt when one cannot be understood: the local files may be damaged, so they are fetched once more.
    """
    if not (delta / INDEX_FILE).exists():
        return
    if not (parent / INDEX_FILE).exists():
        raise SnapshotIncompatible(f"{INDEX_FILE}: is in the delta, but not in its parent")
    old, new = read_weight_map(parent), read_weight_map(delta)
    if differing := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
        name = differing[0]
        raise SnapshotIncompatible(
            f"{INDEX_FILE}: {shown(name)} is in {shown_value(new.get(name))} in the delta, "
            f"in {shown_value(old.get(name))} in its parent"
        )


def _check_tensors(file: str, old: FileLayout, new: FileLayout) -> None:
    if absent := sorted(old.tensors.keys() - new.tensors.keys()):
        raise SnapshotIncompatible(f"{file}: {listed(absent)} is missing from the delta")
    if extra := sorted(new.tensors.keys() - old.tensors.keys()):
        raise SnapshotIncompatible(f"{file}: {listed(extra)} is in the delta, but not in its parent")
    for name, spec in new.tensors.items():
        if spec.dtype != "U8" or len(spec.shape) != 1:
            raise SnapshotIncompatible(
                f"{file}: {shown(name)} is {spec.dtype}{shown_value(list(spec.shape))}, not a U8 blob of one dimension"
            )
        if not isinstance(new.metadata.get(name), str):
            raise SnapshotCorrupt(f"{file}: {shown(name)} has no checksum in the metadata")
