"""The new bytes of a tensor by an `overwrite` blob, as Miles writes them: positions, and the bytes that are there now.

Always holds: memory has a few pieces and POSITIONS_HELD positions, never a tensor, whatever the blob says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import zstandard

from midstream.snapshots.arc2.blob import PIECE_BYTES, BlobError, Buffers, decoded

#: Positions that are held at once.
POSITIONS_HELD = 2**18
_COUNT_BYTES = 4
#: The parent's bytes: from where in the tensor, how many. They are valid until the next call, and may be written to.
Old = Callable[[int, int], memoryview]


def overwritten(blob: memoryview, size: int, old: Old) -> Iterator[memoryview]:
    """An `overwrite` blob: how many bytes change, their positions in ascending order, four bytes each, then their values.

    size: of the tensor. Positions and values are decoded side by side, so that neither is held whole. Raises BlobError.
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
        """Raises BlobError if bytes are left of the blob, or if it is not whole."""
        for _ in self._pieces:
            pass
