"""Makes a delta: the directory that turns one checkpoint into another. changes.py describes it.

Always holds: `out` appears whole or not at all. Parent and child are only read. A child that differs in a name, shape or dtype
is refused before any work. Memory holds the blobs of one shard at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from midstream.core.errors import SnapshotIncompatible
from midstream.core.types import ArcFormat
from midstream.snapshots.arc2.blob import PIECE_BYTES, BlobEncoder, Buffers
from midstream.snapshots.arc2.files import (
    Cancelled,
    Meter,
    Progress,
    checkpoint_tensors,
    copy_index,
    copy_others,
    directory,
    length,
    read,
    run,
    weights_files,
)
from midstream.snapshots.layout import FileLayout, file_header
from midstream.snapshots.messages import listed, shown, shown_value


class TensorSource(Protocol):
    """One tensor to encode. dtype: as safetensors names it.

    data: called once, from a worker thread; returns a contiguous buffer of the little-endian bytes.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def data(self) -> Any: ...


@dataclass(frozen=True)
class DeltaStats:
    """bytes_in: of the child's tensors. bytes_out: of the blobs. changed: tensors that differ from the parent's."""

    tensors: int
    changed: int
    bytes_in: int
    bytes_out: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.bytes_in / max(1, self.bytes_out)


def encode_delta(
    parent: Path,
    child: Path,
    out: Path,
    compression: ArcFormat = "arc_v2",
    *,
    level: int | None = None,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> DeltaStats:
    """Make `out`, which must not exist, the delta that turns the checkpoint `parent` into `child`. Both may be adapters.

    The delta has the parent's shards, whatever shards the child has. The child's other files go with the delta.
    level: None for ours. threads: None for one per core. Raises SnapshotIncompatible when a name, shape
    or dtype differs, RebuildCancelled, SnapshotError when the disk refuses, and the errors of read_checkpoint.
    """
    tensors = checkpoint_tensors(child)
    return encode_tensors(
        parent,
        tensors,
        out,
        compression,
        others=child,
        level=level,
        threads=threads,
        cancelled=cancelled,
        progress=progress,
    )


def encode_tensors(
    parent: Path,
    tensors: Mapping[str, TensorSource],
    out: Path,
    compression: ArcFormat = "arc_v2",
    *,
    others: Path | None = None,
    level: int | None = None,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> DeltaStats:
    """Like `encode_delta`, from tensors in memory. others: the directory of the other files; None is the parent."""
    started = time.perf_counter()
    layouts = weights_files(parent)
    _check_same(layouts, tensors)
    total = sum(length(r) for layout in layouts.values() for r in layout.ranges.values())
    meter = Meter(total, cancelled, progress)
    encoder, buffers = partial(BlobEncoder, compression, level=level), Buffers()
    bytes_out = changed = 0
    with directory(out) as work:
        for file, layout in layouts.items():
            blobs = _encode_shard(parent / file, layout, tensors, encoder, buffers, threads, meter)
            changed += sum(blob.changed for blob in blobs.values())
            bytes_out += sum(blob.size for blob in blobs.values())
            _write_delta_file(work / file, blobs)
        copy_index(parent, work)
        copy_others(others or parent, work)
    return DeltaStats(len(tensors), changed, total, bytes_out, time.perf_counter() - started)


def _check_same(layouts: Mapping[str, FileLayout], tensors: Mapping[str, TensorSource]) -> None:
    old = {name: spec for layout in layouts.values() for name, spec in layout.tensors.items()}
    if absent := sorted(old.keys() - tensors.keys()):
        raise SnapshotIncompatible(f"{listed(absent)}: is in the parent, but not in the child")
    if extra := sorted(tensors.keys() - old.keys()):
        raise SnapshotIncompatible(f"{listed(extra)}: is in the child, but not in the parent")
    for name, spec in old.items():
        new = tensors[name]
        if (new.dtype, tuple(new.shape)) != (spec.dtype, spec.shape):
            raise SnapshotIncompatible(
                f"{shown(spec.file)}: {shown(name)} is {shown(new.dtype)}{shown_value(list(new.shape))} in the child, "
                f"{spec.dtype}{shown_value(list(spec.shape))} in the parent"
            )


@dataclass(frozen=True)
class _Blob:
    parts: list[bytes]
    checksum: str
    changed: bool

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)


def _encode_shard(
    path: Path,
    layout: FileLayout,
    tensors: Mapping[str, TensorSource],
    encoder: Callable[[int], BlobEncoder],
    buffers: Buffers,
    threads: int | None,
    meter: Meter,
) -> dict[str, _Blob]:
    blobs: dict[str, _Blob] = {}
    names = sorted(layout.ranges, key=lambda name: length(layout.ranges[name]), reverse=True)
    with path.open("rb") as file:

        def encode(name: str) -> None:
            where, at = layout.ranges[name], f"{shown(path.name)}: {shown(name)}"
            blobs[name] = _encode_tensor(
                file.fileno(), where, tensors[name], encoder(length(where)), buffers, meter, at
            )

        run([partial(encode, name) for name in names], threads, meter)
    return {name: blobs[name] for name in layout.ranges}


def _encode_tensor(
    parent: int,
    where: tuple[int, int],
    source: TensorSource,
    encoder: BlobEncoder,
    buffers: Buffers,
    meter: Meter,
    at: str,
) -> _Blob:
    size, begin = length(where), where[0]
    new = memoryview(source.data()).cast("B") if size else memoryview(b"")
    if len(new) != size:
        raise SnapshotIncompatible(f"{at}: has {len(new)} bytes in the child, {size} in the parent")
    for position in range(0, size, PIECE_BYTES):
        piece = new[position : position + PIECE_BYTES]
        old = buffers.old.at(begin + position, len(piece))
        read(parent, old, begin + position)
        encoder.add(old, piece)
        meter.advance(len(piece))
    parts, checksum = encoder.finish()
    return _Blob(parts, checksum, encoder.changed)


def _write_delta_file(path: Path, blobs: Mapping[str, _Blob]) -> None:
    tensors = [(name, "U8", (blob.size,), blob.size) for name, blob in blobs.items()]
    with path.open("xb") as file:
        file.write(file_header(tensors, {name: blob.checksum for name, blob in blobs.items()}))
        for blob in blobs.values():
            file.writelines(blob.parts)
