"""Makes a whole checkpoint from its parent and a trainer's delta (records.py).

Always holds:
- `out` appears whole, after every checksum of the delta was compared, or not at all. Parent and delta are only read.
- A rebuilt file has the parent's header, so names, dtypes, shapes and metadata are the parent's. Tensors that the delta does
  not name have the parent's bytes.
- Memory holds one blob and a few pieces per thread, never a tensor, whatever the blob says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from midstream.core.errors import SnapshotCorrupt, SnapshotIncompatible
from midstream.core.types import TrainerFormat
from midstream.snapshots.arc2.blob import PIECE_BYTES, BlobError, Buffers, decoded
from midstream.snapshots.arc2.files import (
    Cancelled,
    Meter,
    Progress,
    disk_errors,
    length,
    read,
    rebuilt_checkpoint,
    run_largest_first,
    weights_files,
    write,
)
from midstream.snapshots.layout import SKYRL_MANIFEST, FileLayout
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.trainer_deltas.checksums import CHECKSUMS
from midstream.snapshots.trainer_deltas.records import (
    ChangedTensor,
    Lineage,
    TrainerDelta,
    check_lineage,
    read_trainer_delta,
    torch_dtype,
)

NO_LINEAGE = Lineage()
#: It says what is in the delta. A file of that name in the checkpoint is the parent's.
NOT_OF_DELTA = (SKYRL_MANIFEST,)
#: Positions of an `overwrite` blob that are held at once.
POSITIONS_HELD = 2**18
_COUNT_BYTES = 4


class _Tensor(NamedTuple):
    """A tensor of the parent, and how the delta changes it; None: not at all."""

    name: str
    file: str
    where: tuple[int, int]
    change: ChangedTensor | None


#: Takes a piece of a rebuilt tensor: the tensor, the offset in it, the bytes.
_Sink = Callable[[_Tensor, int, memoryview], None]


def rebuild(
    parent: Path,
    delta: Path,
    out: Path,
    compression: TrainerFormat,
    *,
    lineage: Lineage = NO_LINEAGE,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> None:
    """Make `out`, which must not exist, the whole checkpoint that `delta` turns `parent` into.

    lineage: names that the versions in the delta must fit. threads: None for one per core. Raises the errors of
    arc2.rebuild.rebuild.
    """
    layouts, tensors = _matched(parent, delta, compression, lineage)
    with rebuilt_checkpoint(parent, delta, out, layouts, NOT_OF_DELTA) as files:

        def put(tensor: _Tensor, offset: int, piece: memoryview) -> None:
            write(files[tensor.file], piece, tensor.where[0] + offset)

        _apply_all(parent, delta, tensors, put, threads, cancelled, progress)


def verify(
    parent: Path,
    delta: Path,
    compression: TrainerFormat,
    *,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
) -> None:
    """Make all checks of `rebuild`, and write nothing."""
    with disk_errors(delta.name):
        _, tensors = _matched(parent, delta, compression, NO_LINEAGE)
        changed = [tensor for tensor in tensors if tensor.change is not None]
        _apply_all(parent, delta, changed, None, threads, cancelled, progress)


def _matched(
    parent: Path, delta: Path, compression: TrainerFormat, lineage: Lineage
) -> tuple[dict[str, FileLayout], list[_Tensor]]:
    layouts = weights_files(parent)
    said = read_trainer_delta(delta, compression)
    check_lineage(said, lineage)
    tensors = [
        _Tensor(name, file, layout.ranges[name], said.tensors.get(name))
        for file, layout in layouts.items()
        for name in layout.tensors
    ]
    if unknown := sorted(said.tensors.keys() - {tensor.name for tensor in tensors}):
        raise SnapshotIncompatible(
            f"{said.said_in}: {listed(unknown)} is in the delta, but not in its parent"
        )
    for tensor in tensors:
        _check_kind(said, tensor, layouts[tensor.file])
    return layouts, tensors


def _check_kind(said: TrainerDelta, tensor: _Tensor, layout: FileLayout) -> None:
    """What the delta says of a tensor's type and shape must be the parent's."""
    change, spec = tensor.change, layout.tensors[tensor.name]
    if change is None:
        return
    size = length(tensor.where)
    for what, ours, theirs in (
        ("dtype", torch_dtype(spec.dtype), change.dtype),
        ("shape", spec.shape, change.shape),
        ("size", size, change.size),
    ):
        if theirs is not None and theirs != ours:
            raise SnapshotIncompatible(
                f"{said.said_in}: {shown(tensor.name)} has {what} {shown_value(theirs)}, its parent's is {shown_value(ours)}"
            )


def _apply_all(
    parent: Path,
    delta: Path,
    tensors: list[_Tensor],
    sink: _Sink | None,
    threads: int | None,
    cancelled: Cancelled | None,
    progress: Progress | None,
) -> None:
    """Rebuild every tensor, piece by piece, and compare the checksums. `sink` gets the pieces."""
    buffers = Buffers()
    tasks = [(length(one.where), partial(_apply, parent, delta, one, sink, buffers)) for one in tensors]
    run_largest_first(tasks, threads, cancelled, progress)


def _apply(
    parent: Path, delta: Path, tensor: _Tensor, sink: _Sink | None, buffers: Buffers, meter: Meter
) -> None:
    change = tensor.change
    checksum = None if change is None else CHECKSUMS[change.algorithm]()
    offset = 0
    with (parent / tensor.file).open("rb") as file:
        old = partial(_old, file.fileno(), tensor.where[0], buffers)
        try:
            for part in _new(delta, change, length(tensor.where), old, buffers):
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


#: The parent's bytes: from where in the tensor, how many. They are valid until the next call, and may be written to.
_Old = Callable[[int, int], memoryview]


def _old(file: int, begin: int, buffers: Buffers, offset: int, count: int) -> memoryview:
    part = buffers.old.at(begin + offset, count)
    read(file, part, begin + offset)
    return part


def _new(
    delta: Path, change: ChangedTensor | None, size: int, old: _Old, buffers: Buffers
) -> Iterator[memoryview]:
    """The new bytes of a tensor in pieces. A piece is valid until the next one is asked for. Raises BlobError."""
    if change is None:
        return (old(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES))
    begin, end = change.blob
    blob = buffers.blob.at(begin, end - begin)
    with (delta / change.file).open("rb") as file:
        read(file.fileno(), blob, begin)
    if change.encoding == "xor":
        return _xored(decoded("arc_v2", blob, size, buffers), old)
    return _overwritten(blob, size, old)


def _xored(pieces: Iterator[memoryview], old: _Old) -> Iterator[memoryview]:
    offset = 0
    for piece in pieces:
        part = old(offset, len(piece))
        array = np.frombuffer(part, np.uint8)
        np.bitwise_xor(array, np.frombuffer(piece, np.uint8), out=array)
        yield part
        offset += len(piece)


def _overwritten(blob: memoryview, size: int, old: _Old) -> Iterator[memoryview]:
    """An `overwrite` blob: how many bytes change, their positions in ascending order, four bytes each, then their values.

    Positions and values are decoded side by side, so that neither is held whole.
    """
    count = _count_in(blob)
    if count > size:
        raise BlobError(f"changes {count} bytes, the tensor has {size}")
    whole = _COUNT_BYTES + 5 * count
    positions, values = (_Taker(decoded("arc_v2", blob, whole)) for _ in range(2))
    positions.skip(_COUNT_BYTES)
    values.skip(_COUNT_BYTES + 4 * count)
    pairs = _pairs(positions, values, count, size)
    where, what = next(pairs, _NONE)
    for begin in range(0, size, PIECE_BYTES):
        part = old(begin, min(PIECE_BYTES, size - begin))
        array = np.frombuffer(part, np.uint8)
        while len(where):
            fitting = int(np.searchsorted(where, begin + len(part)))
            array[where[:fitting] - begin] = what[:fitting]
            where, what = where[fitting:], what[fitting:]
            if len(where):
                break
            where, what = next(pairs, _NONE)
        yield part
    # What is behind them is an error of the blob.
    values.check_end()


_Pairs = tuple[np.ndarray, np.ndarray]
_NONE: _Pairs = (np.empty(0, np.int64), np.empty(0, np.uint8))


def _pairs(positions: _Taker, values: _Taker, count: int, size: int) -> Iterator[_Pairs]:
    last = -1
    for done in range(0, count, POSITIONS_HELD):
        held = min(POSITIONS_HELD, count - done)
        where = np.frombuffer(positions.take(4 * held), "<u4").astype(np.int64)
        if where[0] <= last or bool((np.diff(where) <= 0).any()):
            raise BlobError("has positions that do not ascend")
        last = int(where[-1])
        if last >= size:
            raise BlobError(f"changes byte {last}, the tensor has {size}")
        yield where, np.frombuffer(values.take(held), np.uint8)


def _count_in(blob: memoryview) -> int:
    try:
        with Buffers().zstd.stream_reader(blob, read_across_frames=True) as reader:
            begin = reader.read(_COUNT_BYTES)
    except zstandard.ZstdError as error:
        raise BlobError(f"is not valid zstd: {str(error)[:200]}") from error
    if len(begin) != _COUNT_BYTES:
        raise BlobError("says no number of changed bytes")
    return int.from_bytes(begin, "little")


class _Taker:
    """Takes bytes off pieces, as many as are asked for."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")

    def take(self, count: int) -> bytes:
        parts = []
        while count:
            if not self._piece:
                self._piece = next(self._pieces)
            part, self._piece = self._piece[:count], self._piece[count:]
            parts.append(bytes(part))
            count -= len(part)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        while count:
            step = min(count, PIECE_BYTES)
            self.take(step)
            count -= step

    def check_end(self) -> None:
        """Raise BlobError where the blob goes on, or is not whole."""
        for _ in self._pieces:
            pass
