"""Makes a whole checkpoint from its parent and a delta.

A delta directory has a safetensors file for each shard of its parent, with the same name and the same tensor names. Each tensor
is a `U8` blob (blob.py). The metadata has the checksum of each tensor's new bytes. Files that the delta lacks are the parent's.

Always holds:
- `out` appears whole, after every checksum was compared, or not at all. Parent and delta are only read.
- A rebuilt shard has the parent's header, so names, dtypes, shapes and metadata are the parent's.
- Memory holds one blob and two pieces per thread, never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from midstream.core.errors import SnapshotCorrupt, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import ArcFormat
from midstream.snapshots.arc2.blob import BlobError, Buffers, adler32, decoded
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
    weights_files,
    write,
)
from midstream.snapshots.finite import all_finite
from midstream.snapshots.layout import (
    INDEX_FILE,
    FileLayout,
    read_file_layout,
    read_weight_map,
)
from midstream.snapshots.messages import listed, shown, shown_value


def rebuild(
    parent: Path,
    delta: Path,
    out: Path,
    compression: ArcFormat,
    *,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
    making: Making | None = None,
) -> bool:
    """Make `out`, which must not exist, the whole checkpoint, or adapter, that `delta` turns `parent` into. Returns whether all
    its numbers were seen to be finite.

    threads: None for one per core. Raises SnapshotMissing (a file is not there), SnapshotCorrupt (a file, blob or checksum is
    wrong), SnapshotIncompatible (the delta has another parent), RebuildCancelled, SnapshotError (the disk refuses). The
    message names file and tensor.
    """
    shards = _matched(parent, delta)
    not_finite: set[str] = set()

    def made(tensor: str) -> None:
        if making is not None and tensor not in not_finite:
            making.made(tensor)

    layouts = {shard.name: shard.old for shard in shards}
    with rebuilt_checkpoint(parent, delta, out, layouts, making=making) as files:
        _apply_all(shards, _writer(files, not_finite), compression, threads, cancelled, progress, made)
    return not not_finite


def verify(
    parent: Path,
    delta: Path,
    compression: ArcFormat,
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
        shards = _matched(parent, delta)
        compare = _comparison(shards, result) if result else None
        _apply_all(shards, compare, compression, threads, cancelled, progress)


def _comparison(shards: list[_Shard], result: Path) -> _Sink:
    tensors = checkpoint_tensors(result)
    expected = {name: spec for shard in shards for name, spec in shard.old.tensors.items()}
    if differing := sorted(expected.keys() ^ tensors.keys()):
        raise SnapshotIncompatible(f"{listed(differing)}: is in one of parent and {shown(result.name)} only")
    for name, spec in expected.items():
        if (tensors[name].dtype, tensors[name].shape) != (spec.dtype, spec.shape):
            raise SnapshotIncompatible(
                f"{shown(result.name)}: {shown(name)} has another dtype or shape than its parent's"
            )
    data = {name: np.frombuffer(tensor.data(), np.uint8) for name, tensor in tensors.items()}

    def compare(shard: _Shard, name: str, offset: int, piece: memoryview) -> None:
        if not np.array_equal(data[name][offset : offset + len(piece)], np.frombuffer(piece, np.uint8)):
            raise SnapshotIncompatible(f"{shown(result.name)}: {shown(name)} is not what the delta makes")

    return compare


@dataclass(frozen=True, eq=False)
class _Shard:
    """A file of the parent, and the file of the delta with the same name."""

    parent: Path
    delta: Path
    old: FileLayout
    new: FileLayout

    @property
    def name(self) -> str:
        return self.parent.name


#: Takes a piece of a rebuilt tensor: shard, name, offset in the tensor, bytes.
_Sink = Callable[[_Shard, str, int, memoryview], None]


def _writer(files: Mapping[str, int], not_finite: set[str]) -> _Sink:
    """A sink that writes pieces to the open files of the new shards.

    not_finite: gets the tensors of which a piece has a number that is not finite, or was not cut between two numbers.
    """

    def put(shard: _Shard, name: str, offset: int, piece: memoryview) -> None:
        if name not in not_finite and not all_finite(
            shard.old.tensors[name].dtype, np.frombuffer(piece, np.uint8)
        ):
            not_finite.add(name)
        write(files[shard.name], piece, shard.old.ranges[name][0] + offset)

    return put


def _matched(parent: Path, delta: Path) -> list[_Shard]:
    layouts = weights_files(parent)
    _check_index(parent, delta)
    _check_files(parent, delta, layouts.keys())
    shards = []
    for file, layout in layouts.items():
        shard = _Shard(parent / file, delta / file, layout, read_file_layout(delta / file, gaps=True))
        _check_tensors(shard)
        shards.append(shard)
    return shards


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


def _check_tensors(shard: _Shard) -> None:
    file, old, new = shown(shard.name), shard.old.tensors, shard.new.tensors
    if absent := sorted(old.keys() - new.keys()):
        raise SnapshotIncompatible(f"{file}: {listed(absent)} is missing from the delta")
    if extra := sorted(new.keys() - old.keys()):
        raise SnapshotIncompatible(f"{file}: {listed(extra)} is in the delta, but not in its parent")
    for name, spec in new.items():
        if spec.dtype != "U8" or len(spec.shape) != 1:
            raise SnapshotIncompatible(
                f"{file}: {shown(name)} is {spec.dtype}{shown_value(list(spec.shape))}, not a U8 blob of one dimension"
            )
        if not isinstance(shard.new.metadata.get(name), str):
            raise SnapshotCorrupt(f"{file}: {shown(name)} has no checksum in the metadata")


def _apply_all(
    shards: list[_Shard],
    sink: _Sink | None,
    compression: ArcFormat,
    threads: int | None,
    cancelled: Cancelled | None,
    progress: Progress | None,
    made: Callable[[str], None] = lambda tensor: None,
) -> None:
    """Rebuild every tensor, piece by piece, and compare its checksum. `sink` gets the pieces, `made` the name of each tensor
    that is done."""
    buffers = Buffers()

    def apply(shard: _Shard, name: str, meter: Meter) -> None:
        _apply(shard, name, sink, compression, buffers, meter)
        made(name)

    sizes = {(shard, name): length(where) for shard in shards for name, where in shard.old.ranges.items()}
    total = sum(sizes.values())
    ordered = sorted(sizes.items(), key=lambda one: by_layer(one[0][1], one[1], total))
    tasks = [(size, partial(apply, shard, name)) for (shard, name), size in ordered]
    run_in_order(tasks, threads, cancelled, progress)


def _apply(
    shard: _Shard,
    name: str,
    sink: _Sink | None,
    compression: ArcFormat,
    buffers: Buffers,
    meter: Meter,
) -> None:
    begin, end = shard.old.ranges[name]
    at, expected = f"{shown(shard.name)}: {shown(name)}", shard.new.metadata[name]
    blob = _blob(shard, name, buffers)
    with shard.parent.open("rb") as parent:
        pieces = decoded(compression, blob, end - begin, buffers)
        checksum, offset = 1, 0
        try:
            for part in _rebuilt(pieces, parent.fileno(), begin, buffers):
                checksum = adler32(part, checksum)
                if sink is not None:
                    sink(shard, name, offset, part)
                offset += len(part)
                meter.advance(len(part))
        except BlobError as error:
            raise SnapshotCorrupt(f"{at}: its blob {error}") from error
    if str(checksum) != expected:
        raise SnapshotCorrupt(
            f"{at}: checksum {checksum} of the rebuilt tensor, {shown_value(expected)} expected"
        )


def _rebuilt(pieces: Iterator[memoryview], parent: int, begin: int, buffers: Buffers) -> Iterator[memoryview]:
    """The new bytes of the tensor that begins at `begin`. A piece is valid until the next one is asked for."""
    for piece in pieces:
        part = buffers.old.at(begin, len(piece))
        read(parent, part, begin)
        array = np.frombuffer(part, np.uint8)
        np.bitwise_xor(array, np.frombuffer(piece, np.uint8), out=array)
        yield part
        begin += len(piece)


def _blob(shard: _Shard, name: str, buffers: Buffers) -> memoryview:
    begin, end = shard.new.ranges[name]
    blob = buffers.blob.at(begin, end - begin)
    with shard.delta.open("rb") as file:
        read(file.fileno(), blob, begin)
    return blob
