"""Blobs and checksums of one tensor: the reference's own files, other frames than ours, and everything cut or wrong."""

from __future__ import annotations

import contextlib
import mmap
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.types import CompressionFormat
from midstream.snapshots.arc2.blob import (
    PIECE_BYTES,
    BlobEncoder,
    BlobError,
    Buffers,
    PageBuffer,
    decoded,
)

FORMATS: tuple[CompressionFormat, ...] = ("arc_v1", "arc_v2")


def encode(
    compression: CompressionFormat, old: bytes, new: bytes, level: int | None = None
) -> tuple[bytes, str]:
    encoder = BlobEncoder(compression, len(old), level)
    for start in range(0, len(old), PIECE_BYTES):
        encoder.add(
            memoryview(bytearray(old[start : start + PIECE_BYTES])),
            memoryview(new)[start : start + PIECE_BYTES],
        )
    parts, checksum = encoder.finish()
    return b"".join(parts), checksum


def decode(compression: CompressionFormat, blob: bytes, size: int) -> bytes:
    return b"".join(bytes(piece) for piece in decoded(compression, memoryview(blob), size))


def xor(old: bytes, new: bytes) -> bytes:
    return (np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)).tobytes()


def sparse(size: int, every: int = 100) -> bytes:
    data = np.zeros(size, np.uint8)
    picked = np.random.default_rng(size).random(size) < 1 / every
    data[picked] = np.random.default_rng(size + 1).integers(1, 256, picked.sum())
    return data.tobytes()


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize(
    "size", [0, 1, 7, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 11]
)
def test_round_trip_at_the_edges_of_pieces(compression: CompressionFormat, size: int) -> None:
    old = random.Random(size).randbytes(size)
    new = xor(old, sparse(size))
    blob, checksum = encode(compression, old, new)
    assert checksum == str(zlib.adler32(new))
    assert xor(old, decode(compression, blob, size)) == new
    whole = zlib.decompress(blob) if compression == "arc_v1" else zstandard.decompress(blob)
    assert whole == xor(old, new)


@given(
    st.sampled_from(FORMATS),
    st.binary(max_size=300),
    st.integers(0, 2**32),
    st.sampled_from([None, 1, 9]),
)
def test_round_trip_of_any_bytes(
    compression: CompressionFormat, new: bytes, seed: int, level: int | None
) -> None:
    old = random.Random(seed).randbytes(len(new))
    blob, checksum = encode(compression, old, new, level)
    assert checksum == str(zlib.adler32(new))
    assert xor(old, decode(compression, blob, len(new))) == new


def test_blobs_of_ours_are_one_frame_that_tells_its_size() -> None:
    """The reference's decoder reads the size of the first frame only."""
    difference = sparse(5 * PIECE_BYTES)
    blob, _ = encode("arc_v2", bytes(len(difference)), difference)
    assert zstandard.get_frame_parameters(blob).content_size == len(difference)
    assert zstandard.ZstdDecompressor().decompress(blob) == difference


def test_frames_without_size_with_checksum_and_several_in_a_blob() -> None:
    data = sparse(2 * PIECE_BYTES + 5)
    plain = zstandard.ZstdCompressor(write_content_size=False)
    checked = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    skippable = b"\x51\x2a\x4d\x18\x03\x00\x00\x00abc"
    cut = [0, 10, PIECE_BYTES + 3, len(data)]
    parts = [(plain, checked)[i % 2].compress(data[a:b]) for i, (a, b) in enumerate(pairwise(cut))]
    for blob in (
        plain.compress(data),
        checked.compress(data),
        b"".join(parts),
        skippable.join(parts) + skippable,
    ):
        assert decode("arc_v2", blob, len(data)) == data
    # The frames really have no size.
    with pytest.raises(zstandard.ZstdError):
        zstandard.decompress(plain.compress(data))


def test_a_frame_whose_own_checksum_is_wrong_is_refused() -> None:
    blob = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(sparse(5000)))
    blob[-1] ^= 1
    with pytest.raises(BlobError, match="is not valid zstd"):
        decode("arc_v2", bytes(blob), 5000)


@pytest.mark.parametrize("compression", FORMATS)
def test_a_blob_cut_anywhere_is_refused(compression: CompressionFormat) -> None:
    """Also where all bytes can be had but the end of the frame is missing."""
    data = sparse(3000)
    compressors = {
        "arc_v1": zlib.compress,
        "arc_v2": zstandard.ZstdCompressor(write_checksum=True).compress,
    }
    blob = compressors[compression](data)
    for end in range(len(blob)):
        with pytest.raises(BlobError):
            decode(compression, blob[:end], len(data))
    assert decode(compression, blob, len(data)) == data


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize("tail", [b"\0", b"garbage", b"\x28\xb5\x2f\xfd"])
def test_anything_behind_the_blob_is_refused(compression: CompressionFormat, tail: bytes) -> None:
    for size in (0, 3000, 70000, PIECE_BYTES + 1):
        blob, _ = encode(compression, bytes(size), sparse(size))
        with pytest.raises(BlobError):
            decode(compression, blob + tail, size)


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize("size", [0, 1, 2999, 3001, 300000])
def test_a_blob_of_another_size_is_refused(compression: CompressionFormat, size: int) -> None:
    blob, _ = encode(compression, bytes(3000), sparse(3000))
    with pytest.raises(BlobError, match=r"holds (3000 bytes, the tensor has|more than the)"):
        decode(compression, blob, size)


def raw_frame(data: bytes, window_log: int) -> bytes:
    """One zstd frame without a content size: its window, and `data` as one raw block."""
    return (
        b"\x28\xb5\x2f\xfd\x00"
        + bytes([window_log - 10 << 3])
        + (len(data) << 3 | 1).to_bytes(3, "little")
        + data
    )


def test_a_window_of_two_gibibytes_is_read_and_a_larger_one_refused() -> None:
    assert decode("arc_v2", raw_frame(b"weights", 31), 7) == b"weights"
    with pytest.raises(BlobError, match="is not valid zstd"):
        decode("arc_v2", raw_frame(b"weights", 32), 7)


def test_a_frame_that_promises_more_bytes_than_it_holds_is_refused() -> None:
    # A content size of eight bytes, a window of 1 KiB.
    header = b"\x28\xb5\x2f\xfd" + bytes([3 << 6, 0])
    block = (7 << 3 | 1).to_bytes(3, "little") + b"weights"
    assert decode("arc_v2", header + (7).to_bytes(8, "little") + block, 7) == b"weights"
    with pytest.raises(BlobError, match="is not valid zstd"):
        decode("arc_v2", header + (2**60).to_bytes(8, "little") + block, 7)


BOMB = """
import re, sys
from pathlib import Path
from midstream.snapshots.arc2.blob import BlobError, decoded
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
blob = Path(sys.argv[2]).read_bytes()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
try:
    b"".join(bytes(piece) for piece in decoded(sys.argv[1], memoryview(blob), 1000))
except BlobError as error:
    print(status("VmHWM") - before, error)
"""


@pytest.mark.parametrize("compression", FORMATS)
def test_a_bomb_costs_no_memory(compression: CompressionFormat, tmp_path: Path) -> None:
    size = 2**30
    makers: dict[str, Any] = {
        "arc_v1": lambda: zlib.compressobj(1),
        "arc_v2": lambda: zstandard.ZstdCompressor().compressobj(size=size),
    }
    compressor = makers[compression]()
    zeros = bytes(2**20)
    with (tmp_path / "blob").open("wb") as file:
        for _ in range(size // len(zeros)):
            file.write(compressor.compress(zeros))
        file.write(compressor.flush())
    done = subprocess.run(
        [sys.executable, "-c", BOMB, compression, str(tmp_path / "blob")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, _, refused = done.stdout.partition(" ")
    assert "holds more than the 1000 bytes" in refused
    assert int(grown) < 50 * 1024


@given(st.sampled_from(FORMATS), st.binary(max_size=60), st.integers(0, 50))
def test_any_bytes_either_decode_to_the_size_or_are_refused(
    compression: CompressionFormat, blob: bytes, size: int
) -> None:
    with contextlib.suppress(BlobError):
        assert len(decode(compression, blob, size)) == size


@given(st.sampled_from(FORMATS), st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_never_gives_more_or_less_bytes(
    compression: CompressionFormat, position: int, flip: int
) -> None:
    blob = bytearray(encode(compression, bytes(2000), sparse(2000))[0])
    blob[position % len(blob)] ^= flip
    with contextlib.suppress(BlobError):
        assert len(decode(compression, bytes(blob), 2000)) == 2000


def test_our_frames_are_about_as_small_as_the_references() -> None:
    """Level 3 is what the reference writes: ours may be 3 % larger."""
    difference = sparse(4 * 10**6)
    ours, _ = encode("arc_v2", bytes(len(difference)), difference)
    assert len(ours) < 1.03 * len(zstandard.ZstdCompressor(level=3).compress(difference))


@pytest.mark.parametrize("compression", FORMATS)
def test_buffers_serve_the_next_blob_whatever_became_of_the_last_one(compression: CompressionFormat) -> None:
    buffers, data = Buffers(), sparse(PIECE_BYTES + 5)
    blob = encode(compression, bytes(len(data)), data)[0]

    def pieces(of: bytes, size: int) -> Iterator[bytes]:
        return (bytes(piece) for piece in decoded(compression, memoryview(of), size, buffers))

    for wrong in (blob[:-1], blob + b"\0", blob[: len(blob) // 2] + bytes(len(blob) // 2)):
        with pytest.raises(BlobError):
            b"".join(pieces(wrong, len(data)))
        assert b"".join(pieces(blob, len(data))) == data
    assert data.startswith(next(pieces(blob, len(data))))
    small = encode(compression, bytes(10), data[:10])[0]
    assert b"".join(pieces(small, 10)) == data[:10]
    assert b"".join(pieces(blob, len(data))) == data


@pytest.mark.parametrize("position", [0, 1, 8, 4095, 4096, 10**12 + 17])
def test_memory_for_bytes_of_a_file_lies_in_its_page_as_they_do(position: int) -> None:
    pages = PageBuffer()
    for size in (0, 1, PIECE_BYTES, 5):
        room = pages.at(position, size)
        assert len(room) == size
        if size:
            assert np.frombuffer(room, np.uint8).ctypes.data % mmap.PAGESIZE == position % mmap.PAGESIZE


def test_every_thread_has_buffers_of_its_own() -> None:
    buffers = Buffers()

    def own() -> tuple[memoryview, ...]:
        return buffers.difference.at(0, 1), buffers.old.at(0, 1), buffers.blob.at(0, 1)

    with ThreadPoolExecutor(1) as pool:
        others, decoder = pool.submit(lambda: (own(), buffers.zstd)).result()
    mine = own()
    for room in others:
        room[:1] = b"x"
    assert [bytes(room[:1]) for room in mine] == [b"\0"] * 3
    assert decoder is not buffers.zstd
