"""ARC2 blobs: one tensor of a delta as the difference of its old and new bytes.

A blob is zlib (`arc_v1`) or zstd (`arc_v2`) of old XOR new over the tensor's little-endian bytes. A checksum is the Adler-32
of the new bytes, as decimal text.

Always holds: decoding a blob yields exactly as many bytes as its tensor has, or raises BlobError. It holds one piece of them
at a time. A blob that is invalid, cut short or followed by other bytes is refused. Nothing is unpickled.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np
import zstandard
from zlib_ng import zlib_ng as zlib

from midstream.core.types import ArcFormat

#: Threads wait for the interpreter lock once per piece, so smaller pieces cost time.
PIECE_BYTES = 2 * 2**20
ZLIB_INPUT_BYTES = 64 * 2**10
MAX_WINDOW_BYTES = 2**31

#: A difference is runs of zeros between single changed bytes, so a small window is enough. Blobs are 4 to 8 % smaller than
#: with level 3, and take two thirds to four fifths of its time.
OWN_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=15, hash_log=10, min_match=6
)

_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_BYTES = (0, 1, 2, 4)
#: For every block of a blob: int.from_bytes of a slice takes eight times as long.
_three_bytes = struct.Struct("<HB").unpack_from
# The stub of zlib-ng declares the class as an instance.
_ZLIB_ERROR = cast(type[Exception], zlib.error)
#: From the next bytes and the checksum of the bytes before them.
adler32: Callable[[memoryview, int], int] = zlib.adler32


class BlobError(Exception):
    """A blob is invalid. The message completes "its blob ..."."""


class Buffers(threading.local):
    """Each thread's memory, kept from tensor to tensor: fresh memory costs a page fault every 4 KiB.

    old: of the parent's file. blob: of the delta's. difference: the blob's next piece.
    """

    def __init__(self) -> None:
        self.old, self.blob, self.difference = PageBuffer(), PageBuffer(), PageBuffer()
        self.zstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


class PageBuffer:
    """Memory that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def at(self, position: int, size: int) -> memoryview:
        """Room for `size` bytes of a file, from `position`. It is valid until the next call.

        It begins as far into a page of memory as they do into a page of the file. When it begins up to 32 bytes
        further, the kernel of an AMD machine takes three times as long to copy them.
        """
        start = position % mmap.PAGESIZE
        if start + size > len(self._memory):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE + size, flags=flags))
        return self._memory[start : start + size]


def decoded(
    compression: ArcFormat, blob: memoryview, size: int, buffers: Buffers | None = None
) -> Iterator[memoryview]:
    """The `size` bytes of old XOR new in pieces. A piece is valid until the next one is asked for. Raises BlobError.

    buffers: serve one blob at a time in each thread. None makes new ones.
    """
    buffers = buffers or Buffers()
    pieces = _zlib_pieces(blob, size) if compression == "arc_v1" else _zstd_pieces(blob, size, buffers)
    done = 0
    for piece in pieces:
        done += len(piece)
        if done > size:
            raise BlobError(f"holds more than the {size} bytes of the tensor")
        yield piece
    if done != size:
        raise BlobError(f"holds {done} bytes, the tensor has {size}")


def _zstd_pieces(blob: memoryview, size: int, buffers: Buffers) -> Iterator[memoryview]:
    _check_frames(blob, empty=size == 0)
    buffer = buffers.difference.at(0, min(PIECE_BYTES, size + 1))
    try:
        with buffers.zstd.stream_reader(blob, read_across_frames=True) as reader:
            while count := reader.readinto(buffer):
                yield buffer[:count]
    except zstandard.ZstdError as error:
        raise BlobError(f"is not valid zstd: {str(error)[:200]}") from error


def _check_frames(blob: memoryview, empty: bool) -> None:
    """Check that frames are whole and that the last one ends with the blob. The stream reader does not report that."""
    position, end = 0, len(blob)
    if end == 0 and not empty:
        raise BlobError("is empty")
    while position < end:
        position = _frame_end(blob, position)
        if position > end:
            raise BlobError("is not valid zstd: its last frame is cut short")


def _frame_end(blob: memoryview, start: int) -> int:
    """Where the frame at `start` ends. The end of a frame that is cut short lies beyond the blob."""
    beyond = len(blob) + 1
    skippable = 0x50 <= blob[start] <= 0x5F and bytes(blob[start + 1 : start + 4]) == b"\x2a\x4d\x18"
    if skippable:
        if start + 8 > len(blob):
            return beyond
        return start + 8 + int.from_bytes(blob[start + 4 : start + 8], "little")
    if bytes(blob[start : start + 4]) != _MAGIC:
        raise BlobError(f"is not valid zstd: no frame begins at byte {start}")
    if start + 5 > len(blob):
        return beyond
    flags = blob[start + 4]
    single_segment = flags >> 5 & 1
    content_size = (single_segment, 2, 4, 8)[flags >> 6]
    position = start + 5 + (1 - single_segment) + _DICTIONARY_BYTES[flags & 3] + content_size
    last = False
    while not last:
        if position + 3 > len(blob):
            return beyond
        low, high = _three_bytes(blob, position)
        block = low | high << 16
        last = bool(block & 1)
        position += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    return position + (4 if flags & 4 else 0)


def _zlib_pieces(blob: memoryview, size: int) -> Iterator[memoryview]:
    if not blob and size == 0:
        return
    decoder = zlib.decompressobj()
    try:
        for start in range(0, len(blob), ZLIB_INPUT_BYTES):
            if decoder.eof:
                raise BlobError("goes on after its end")
            data: bytes | memoryview = blob[start : start + ZLIB_INPUT_BYTES]
            # Behind the end of the stream, unconsumed_tail keeps the bytes that are in unused_data.
            while data and not decoder.eof:
                if piece := decoder.decompress(data, PIECE_BYTES):
                    yield memoryview(piece)
                data = decoder.unconsumed_tail
        while not decoder.eof and (piece := decoder.decompress(b"", PIECE_BYTES)):
            yield memoryview(piece)
    except _ZLIB_ERROR as error:
        raise BlobError(f"is not valid zlib: {str(error)[:200]}") from error
    if not decoder.eof:
        raise BlobError("is not valid zlib: it is cut short")
    if decoder.unused_data:
        raise BlobError("goes on after its end")


class _Compressor(Protocol):
    def compress(self, data: memoryview, /) -> bytes: ...
    def flush(self) -> bytes: ...


class BlobEncoder:
    """Makes one tensor's blob and checksum from pieces of its old and new bytes.

    size: of the tensor, bytes. level: of zlib or zstd; None is 6 for zlib, OWN_PARAMETERS for zstd.
    """

    def __init__(self, compression: ArcFormat, size: int, level: int | None = None) -> None:
        # Whether any old byte differs from the new one.
        self.changed = False
        self._parts: list[bytes] = []
        self._sum = 1
        self._compressor: _Compressor
        if compression == "arc_v1":
            self._compressor = zlib.compressobj(6 if level is None else level)
        else:
            self._compressor = _zstd_compressor(size, level)

    def add(self, old: memoryview, new: memoryview) -> None:
        """Take the next bytes of both, at least one. Overwrites `old` with their XOR."""
        difference = np.frombuffer(old, np.uint8)
        np.bitwise_xor(difference, np.frombuffer(new, np.uint8), out=difference)
        self._sum = adler32(new, self._sum)
        if part := self._compressor.compress(old):
            self._parts.append(part)
        self.changed = self.changed or bool(difference.max())

    def finish(self) -> tuple[list[bytes], str]:
        """The blob's parts in order, and the checksum."""
        if part := self._compressor.flush():
            self._parts.append(part)
        return self._parts, str(self._sum)


def _zstd_compressor(size: int, level: int | None) -> Any:
    parameters = OWN_PARAMETERS
    if level is not None:
        parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=size)
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=size)
