"""Incremental snapshots as directories: making one from two checkpoints, and a whole checkpoint from parent and delta.

A delta directory has one safetensors file per shard of its parent, of the same name and tensor names, each tensor a `U8` blob
(arc2.py), and in its metadata the checksum of each tensor's new bytes. Other files come with it or are the parent's.

Always holds:
- `out` appears whole, by a rename, after every checksum was compared, or not at all; parent and delta are only read.
- A rebuilt shard has the parent's own header: its names, dtypes, shapes and metadata are the parent's.
- What the compiled code rebuilds counts only if its checksum is right; else libzstd has the word.
- Beside buffers of a piece per thread, memory holds the blobs being worked on, never the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from midstream.errors import SnapshotCorrupt, SnapshotIncompatible, SnapshotMissing
from midstream.snapshots.arc2 import PIECE_BYTES, BlobError, adler32, decoded
from midstream.snapshots.delta_encode import DeltaStats, TensorSource, encode_delta, encode_tensors
from midstream.snapshots.delta_files import (
    Cancelled,
    Meter,
    Progress,
    RebuildCancelled,
    checkpoint_tensors,
    copy_index,
    copy_others,
    directory,
    disk_errors,
    length,
    read,
    run,
    shard_names,
    write,
)
from midstream.snapshots.layout import INDEX_FILE, FileLayout, read_file_layout
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.native.library import Rebuild, Refused, library
from midstream.types import CompressionFormat

__all__ = [
    "DeltaStats",
    "RebuildCancelled",
    "TensorSource",
    "encode_delta",
    "encode_tensors",
    "rebuild",
    "verify",
]


def rebuild(
    parent: Path,
    delta: Path,
    out: Path,
    compression: CompressionFormat,
    *,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> None:
    """Make `out`, which must not exist, the whole checkpoint that `delta` turns `parent` into.

    threads: None for one per core. Raises SnapshotMissing (a file is not there), SnapshotCorrupt (a file, blob or checksum is
    wrong), SnapshotIncompatible (the delta is not one of this parent), RebuildCancelled, SnapshotError (the disk refuses).
    The message names file and tensor.
    """
    shards = _matched(parent, delta)
    with directory(out) as work:
        with contextlib.ExitStack() as stack:
            files = _Files({shard.name: _new_file(shard, work / shard.name, stack) for shard in shards})
            _apply_all(shards, files, compression, threads, cancelled, progress)
        copy_index(parent, work)
        copy_others(parent, work)
        copy_others(delta, work)


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
    """All checks of `rebuild` without writing anything.

    result: a checkpoint that must hold the very tensors the delta makes, in whatever files; SnapshotIncompatible otherwise.
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


@dataclass(frozen=True)
class _Shard:
    """A parent's file and the delta's of the same name."""

    parent: Path
    delta: Path
    old: FileLayout
    new: FileLayout

    @property
    def name(self) -> str:
        return self.parent.name


_Sink = Callable[[_Shard, str, int, memoryview], None]  # a piece of a rebuilt tensor, and its offset there


@dataclass(frozen=True)
class _Files:
    """Writes pieces where they belong in the open files of the new shards."""

    targets: dict[str, int]

    def __call__(self, shard: _Shard, name: str, offset: int, piece: memoryview) -> None:
        write(self.targets[shard.name], piece, shard.old.ranges[name][0] + offset)


def _matched(parent: Path, delta: Path) -> list[_Shard]:
    files = shard_names(parent)
    _check_index(parent, delta)
    _check_files(parent, delta, files)
    shards = []
    for file in files:
        old, new = read_file_layout(parent / file), read_file_layout(delta / file, gaps=True)
        shard = _Shard(parent / file, delta / file, old, new)
        _check_tensors(shard)
        shards.append(shard)
    return shards


def _check_files(parent: Path, delta: Path, files: list[str]) -> None:
    if not delta.is_dir():
        raise SnapshotMissing(f"{shown(delta.name)}: is not there")
    present = {p.name for p in delta.glob("*.safetensors") if not p.name.startswith(".")}
    if absent := sorted(set(files) - present):
        raise SnapshotMissing(
            f"{listed(absent)}: is not in the delta; it needs one file per file of the parent"
        )
    if extra := sorted(name for name in present - set(files) if not (parent / name).exists()):
        raise SnapshotIncompatible(f"{listed(extra)}: is in the delta, but not in its parent")


def _check_index(parent: Path, delta: Path) -> None:
    """A delta's index, when it has one, places every tensor where the parent's does."""
    if not (delta / INDEX_FILE).exists():
        return
    if not (parent / INDEX_FILE).exists():
        raise SnapshotIncompatible(f"{INDEX_FILE}: is in the delta, but not in its parent")
    old, new = _weight_map(parent), _weight_map(delta)
    if differing := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
        name = differing[0]
        raise SnapshotIncompatible(
            f"{INDEX_FILE}: {shown(name)} is in {shown_value(new.get(name))} in the delta, "
            f"in {shown_value(old.get(name))} in its parent"
        )


def _weight_map(directory: Path) -> dict[str, Any]:
    try:
        index = json.loads((directory / INDEX_FILE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise SnapshotCorrupt(f"{INDEX_FILE}: is not valid JSON: {shown(str(error))}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise SnapshotCorrupt(f"{INDEX_FILE}: has no weight_map")
    return weight_map


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
    compression: CompressionFormat,
    threads: int | None,
    cancelled: Cancelled | None,
    progress: Progress | None,
) -> None:
    """Rebuild every tensor, piece by piece, and compare its checksum; `sink` gets the pieces as they come."""
    work = [(shard, name) for shard in shards for name in shard.old.tensors]
    work.sort(key=lambda item: length(item[0].old.ranges[item[1]]), reverse=True)  # the last ones are short
    meter = Meter(sum(length(s.old.ranges[name]) for s, name in work), cancelled, progress)
    run([partial(_apply, shard, name, sink, compression, meter) for shard, name in work], threads, meter)


def _apply(
    shard: _Shard, name: str, sink: _Sink | None, compression: CompressionFormat, meter: Meter
) -> None:
    begin, end = shard.old.ranges[name]
    at, expected = f"{shown(shard.name)}: {shown(name)}", shard.new.metadata[name]
    blob = _blob(shard, name)
    with shard.parent.open("rb") as parent:
        native = library() if compression == "arc_v2" and (sink is None or isinstance(sink, _Files)) else None
        if native is not None:
            target = None if sink is None else cast(_Files, sink).targets[shard.name]
            if _apply_native(native, blob, parent.fileno(), target, (begin, end), meter) == expected:
                return
        pieces = decoded(compression, blob, end - begin)
        checksum, offset = 1, 0
        try:
            for part in _rebuilt(pieces, parent.fileno(), begin, end):
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


def _apply_native(
    native: ctypes.CDLL,
    blob: memoryview,
    old: int,
    new: int | None,
    where: tuple[int, int],
    meter: Meter,
) -> str | None:
    """The rebuilt tensor's checksum; None when only libzstd can tell what is wrong with the blob, if anything."""
    begin, end = where
    position = begin
    try:
        with Rebuild(native, blob, end - begin) as work:
            while count := work.step(old, position, new, position):
                position += count
                meter.advance(count)
            return str(work.checksum())
    except Refused:
        meter.advance(begin - position)  # all of it again
        return None


def _rebuilt(pieces: Iterator[memoryview], parent: int, begin: int, end: int) -> Iterator[memoryview]:
    """The new bytes of the tensor from `begin` to `end`, each piece valid until the next is asked for."""
    old = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
    for piece in pieces:
        part = old[: len(piece)]
        read(parent, part, begin)
        array = np.frombuffer(part, np.uint8)
        np.bitwise_xor(array, np.frombuffer(piece, np.uint8), out=array)
        yield part
        begin += len(piece)


def _blob(shard: _Shard, name: str) -> memoryview:
    begin, end = shard.new.ranges[name]
    blob = memoryview(bytearray(end - begin))
    with shard.delta.open("rb") as file:
        read(file.fileno(), blob, begin)
    return blob


def _new_file(shard: _Shard, path: Path, stack: contextlib.ExitStack) -> int:
    """A shard to fill: the parent's header, and room for its tensors."""
    target = stack.enter_context(path.open("xb"))
    with shard.parent.open("rb") as source:
        target.write(source.read(shard.old.data_start))
    target.truncate(shard.parent.stat().st_size)
    return target.fileno()
