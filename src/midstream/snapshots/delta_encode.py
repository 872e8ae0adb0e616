"""Making an incremental snapshot: the delta directory that turns one checkpoint into another (delta.py says what it is).

Always holds: `out` appears whole or not at all; parent and child are only read; a child that differs in a name, shape or dtype
is refused before anything is computed; blobs of one shard at most are in memory.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from midstream.errors import SnapshotIncompatible
from midstream.snapshots.arc2 import PIECE_BYTES, Encoder
from midstream.snapshots.delta_files import (
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
    shard_names,
)
from midstream.snapshots.layout import FileLayout, read_file_layout
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.native.library import STEP_BYTES, Encode, library
from midstream.types import CompressionFormat


class TensorSource(Protocol):
    """One tensor to encode. `dtype` as safetensors names it; `data` is called once, from a worker thread."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def data(self) -> Any: ...  # a contiguous buffer of the little-endian bytes


@dataclass(frozen=True)
class DeltaStats:
    """bytes_in: of the child's tensors; bytes_out: of the blobs; changed: tensors that differ from the parent's."""

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
    compression: CompressionFormat = "arc_v2",
    *,
    level: int | None = None,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> DeltaStats:
    """Make `out`, which must not exist, the delta that turns the checkpoint `parent` into `child`.

    The weights of a `child` in other shards are laid out as the parent's; its other files go with the delta. Raises
    SnapshotIncompatible when a name, shape or dtype differs, SnapshotMissing and SnapshotCorrupt as read_spec does.
    """
    tensors = checkpoint_tensors(child)
    return _encode(parent, child, tensors, out, compression, level, threads, cancelled, progress)


def encode_tensors(
    parent: Path,
    tensors: Mapping[str, TensorSource],
    out: Path,
    compression: CompressionFormat = "arc_v2",
    *,
    others: Path | None = None,
    level: int | None = None,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> DeltaStats:
    """As `encode_delta`, from tensors in memory. `others`: where config.json and the like are; None: beside the parent."""
    return _encode(parent, others or parent, tensors, out, compression, level, threads, cancelled, progress)


def _encode(
    parent: Path,
    others: Path,
    tensors: Mapping[str, TensorSource],
    out: Path,
    compression: CompressionFormat,
    level: int | None,
    threads: int | None,
    cancelled: Cancelled | None,
    progress: Progress | None,
) -> DeltaStats:
    started = time.perf_counter()
    layouts = {file: read_file_layout(parent / file) for file in shard_names(parent)}
    _check_same(layouts, tensors)
    total = sum(length(r) for layout in layouts.values() for r in layout.ranges.values())
    meter = Meter(total, cancelled, progress)
    bytes_out = changed = 0
    with directory(out) as work:
        for file, layout in layouts.items():
            blobs = _encode_shard(parent / file, layout, tensors, compression, level, threads, meter)
            changed += sum(blob.changed for blob in blobs.values())
            bytes_out += sum(blob.size for blob in blobs.values())
            _write_delta_file(work / file, blobs)
        copy_index(parent, work)
        copy_others(others, work)
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
    compression: CompressionFormat,
    level: int | None,
    threads: int | None,
    meter: Meter,
) -> dict[str, _Blob]:
    blobs: dict[str, _Blob] = {}
    names = sorted(layout.ranges, key=lambda name: length(layout.ranges[name]), reverse=True)
    with path.open("rb") as file:

        def encode(name: str) -> None:
            source, at = tensors[name], f"{shown(path.name)}: {shown(name)}"
            blobs[name] = _encode_tensor(
                file.fileno(), layout.ranges[name], source, compression, level, meter, at
            )

        run([partial(encode, name) for name in names], threads, meter)
    return {name: blobs[name] for name in layout.ranges}


def _encode_tensor(
    parent: int,
    where: tuple[int, int],
    source: TensorSource,
    compression: CompressionFormat,
    level: int | None,
    meter: Meter,
    at: str,
) -> _Blob:
    size, begin = length(where), where[0]
    new = memoryview(source.data()).cast("B") if size else memoryview(b"")
    if len(new) != size:
        raise SnapshotIncompatible(f"{at}: has {len(new)} bytes in the child, {size} in the parent")
    native = library() if compression == "arc_v2" and level is None and size else None
    if native is not None:
        return _encode_native(native, parent, begin, new, meter)
    encoder = Encoder(compression, size, level)
    old = memoryview(bytearray(min(PIECE_BYTES, size)))
    for position in range(0, size, PIECE_BYTES):
        part, piece = old[: size - position], new[position : position + PIECE_BYTES]
        read(parent, part, begin + position)
        encoder.add(part, piece)
        meter.advance(len(piece))
    parts, checksum = encoder.finish()
    return _Blob(parts, checksum, encoder.changed)


def _encode_native(native: ctypes.CDLL, parent: int, begin: int, new: memoryview, meter: Meter) -> _Blob:
    with Encode(native, len(new)) as work:
        for position in range(0, len(new), STEP_BYTES):
            piece = new[position : position + STEP_BYTES]
            work.step(parent, begin + position, piece, position + len(piece) == len(new))
            meter.advance(len(piece))
        blob, checksum, changed = work.finish()
    return _Blob([blob], str(checksum), changed)


def _write_delta_file(path: Path, blobs: Mapping[str, _Blob]) -> None:
    header: dict[str, Any] = {"__metadata__": {name: blob.checksum for name, blob in blobs.items()}}
    end = 0
    for name, blob in blobs.items():
        begin, end = end, end + blob.size
        header[name] = {"dtype": "U8", "shape": [blob.size], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs.values():
            file.writelines(blob.parts)
