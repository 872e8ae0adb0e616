"""Makes a whole checkpoint, or adapter, from its parent and a delta of any format.

Always holds:
- `out` appears whole, after every checksum of the delta was compared, or not at all. Parent and delta are only read.
- A rebuilt file has the parent's header, so names, dtypes, shapes and metadata are the parent's. Tensors that the delta does
  not change have the parent's bytes.
- Memory holds one blob and a few pieces per thread, never a tensor, whatever the blob says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from midstream.core.errors import SnapshotCorrupt, SnapshotIncompatible
from midstream.core.types import CompressionFormat
from midstream.snapshots.arc2 import changes as of_arc2
from midstream.snapshots.arc2.blob import PIECE_BYTES, BlobError, Buffers, decoded
from midstream.snapshots.arc2.files import (
    Cancelled,
    Making,
    Meter,
    Progress,
    by_layer,
    checkpoint_tensors,
    disk_errors,
    length,
    read,
    rebuilt_checkpoint,
    run_in_order,
    write,
)
from midstream.snapshots.changes import ChangedTensor, DeltaChanges, RebuiltTensor
from midstream.snapshots.checksums import CHECKSUMS
from midstream.snapshots.finite import all_finite
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.trainer_deltas import changes as of_trainers
from midstream.snapshots.trainer_deltas.overwrite import Old, overwritten
from midstream.snapshots.trainer_deltas.records import NO_LINEAGE, Lineage

#: Takes a piece of a rebuilt tensor: the tensor, the offset in it, the bytes.
_Sink = Callable[[RebuiltTensor, int, memoryview], None]


class _Work(NamedTuple):
    """threads: None for one per core."""

    parent: Path
    delta: Path
    threads: int | None
    cancelled: Cancelled | None
    progress: Progress | None


def rebuild(
    parent: Path,
    delta: Path,
    out: Path,
    compression: CompressionFormat,
    *,
    lineage: Lineage = NO_LINEAGE,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
    making: Making | None = None,
) -> bool:
    """Make `out`, which must not exist, the whole checkpoint, or adapter, that `delta` turns `parent` into. Returns whether all
    its numbers were seen to be finite.

    lineage: what a delta that says its versions is compared with. threads: None for one per core. Raises SnapshotMissing (a
    file is not there), SnapshotCorrupt (a file, blob or checksum is wrong), SnapshotIncompatible (the delta has another
    parent), RebuildCancelled, SnapshotError (the disk refuses). The message names file and tensor.
    """
    found = _changes(parent, delta, compression, lineage)
    not_finite: set[str] = set()

    def made(tensor: RebuiltTensor) -> None:
        if making is not None and tensor.name not in not_finite:
            making.made(tensor.name)

    with rebuilt_checkpoint(parent, delta, out, found.layouts, found.not_of_result, making) as files:

        def put(tensor: RebuiltTensor, offset: int, piece: memoryview) -> None:
            # A piece that is not cut between two numbers counts as one that is not finite.
            if tensor.name not in not_finite and not all_finite(tensor.dtype, np.frombuffer(piece, np.uint8)):
                not_finite.add(tensor.name)
            write(files[tensor.file], piece, tensor.where[0] + offset)

        _apply_all(_Work(parent, delta, threads, cancelled, progress), found.tensors, put, made)
    return not not_finite


def verify(
    parent: Path,
    delta: Path,
    compression: CompressionFormat,
    *,
    result: Path | None = None,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> None:
    """Make all checks of `rebuild`, and write nothing.

    result: a checkpoint that must hold the tensors that the delta makes, in whatever files. Raises SnapshotIncompatible if not.
    """
    with disk_errors(delta.name):
        found = _changes(parent, delta, compression, NO_LINEAGE)
        compare = _comparison(found, result) if result else None
        tensors = [tensor for tensor in found.tensors if tensor.change is not None or compare is not None]
        _apply_all(_Work(parent, delta, threads, cancelled, progress), tensors, compare)


def _changes(parent: Path, delta: Path, compression: CompressionFormat, lineage: Lineage) -> DeltaChanges:
    if compression == "arc_v1" or compression == "arc_v2":
        return of_arc2.changes(parent, delta, compression)
    return of_trainers.changes(parent, delta, compression, lineage)


def _comparison(changes: DeltaChanges, result: Path) -> _Sink:
    tensors = checkpoint_tensors(result)
    expected = {name: spec for layout in changes.layouts.values() for name, spec in layout.tensors.items()}
    if differing := sorted(expected.keys() ^ tensors.keys()):
        raise SnapshotIncompatible(f"{listed(differing)}: is in one of parent and {shown(result.name)} only")
    for name, spec in expected.items():
        if (tensors[name].dtype, tensors[name].shape) != (spec.dtype, spec.shape):
            raise SnapshotIncompatible(
                f"{shown(result.name)}: {shown(name)} has another dtype or shape than its parent's"
            )
    data = {name: np.frombuffer(tensor.data(), np.uint8) for name, tensor in tensors.items()}

    def compare(tensor: RebuiltTensor, offset: int, piece: memoryview) -> None:
        there = data[tensor.name][offset : offset + len(piece)]
        if not np.array_equal(there, np.frombuffer(piece, np.uint8)):
            raise SnapshotIncompatible(
                f"{shown(result.name)}: {shown(tensor.name)} is not what the delta makes"
            )

    return compare


def _apply_all(
    work: _Work,
    tensors: list[RebuiltTensor],
    sink: _Sink | None,
    made: Callable[[RebuiltTensor], None] = lambda tensor: None,
) -> None:
    """Rebuild every tensor, piece by piece, and compare the checksums. `sink` gets the pieces, `made` each tensor that is
    done."""
    buffers = Buffers()

    def apply(tensor: RebuiltTensor, meter: Meter) -> None:
        _apply(work, tensor, sink, buffers, meter)
        made(tensor)

    sizes = [(length(tensor.where), tensor) for tensor in tensors]
    total = sum(size for size, _ in sizes)
    ordered = sorted(sizes, key=lambda one: by_layer(one[1].name, one[0], total))
    tasks = [(size, partial(apply, tensor)) for size, tensor in ordered]
    run_in_order(tasks, work.threads, work.cancelled, work.progress)


def _apply(work: _Work, tensor: RebuiltTensor, sink: _Sink | None, buffers: Buffers, meter: Meter) -> None:
    change = tensor.change
    checksum = None if change is None else CHECKSUMS[change.algorithm]()
    offset = 0
    with (work.parent / tensor.file).open("rb") as file:
        old = partial(_old, file.fileno(), tensor.where[0], buffers)
        try:
            for part in _new(work.delta, change, length(tensor.where), old, buffers):
                if checksum is not None:
                    checksum.update(part)
                if sink is not None:
                    sink(tensor, offset, part)
                offset += len(part)
                meter.advance(len(part))
        except BlobError as error:
            assert change is not None
            raise SnapshotCorrupt(f"{shown(change.file)}: {shown(tensor.name)}: its blob {error}") from error
    if change is not None and checksum is not None and (found := checksum.hexdigest()) != change.checksum:
        raise SnapshotCorrupt(
            f"{shown(change.file)}: {shown(tensor.name)}: checksum {found} of the rebuilt tensor,"
            f" {shown_value(change.checksum)} expected"
        )


def _old(file: int, begin: int, buffers: Buffers, offset: int, count: int) -> memoryview:
    part = buffers.old.at(begin + offset, count)
    read(file, part, begin + offset)
    return part


def _new(
    delta: Path, change: ChangedTensor | None, size: int, old: Old, buffers: Buffers
) -> Iterator[memoryview]:
    """The new bytes of a tensor in pieces. A piece is valid until the next one is asked for. Raises BlobError."""
    if change is None:
        return (old(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))
    begin, end = change.blob
    blob = buffers.blob.at(begin, end - begin)
    with (delta / change.file).open("rb") as file:
        read(file.fileno(), blob, begin)
    if change.encoding == "overwrite":
        return overwritten(blob, size, old)
    return _xored(decoded(change.encoding, blob, size, buffers), old)


def _xored(pieces: Iterator[memoryview], old: Old) -> Iterator[memoryview]:
    offset = 0
    for piece in pieces:
        part = old(offset, len(piece))
        array = np.frombuffer(part, np.uint8)
        np.bitwise_xor(array, np.frombuffer(piece, np.uint8), out=array)
        yield part
        offset += len(piece)
