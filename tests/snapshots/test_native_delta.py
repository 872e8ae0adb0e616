"""The compiled delta code beside libzstd and zlib: every kind of frame, damaged frames, and files that end early."""

from __future__ import annotations

import ctypes
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from midstream.errors import SnapshotCorrupt
from midstream.snapshots import native
from midstream.snapshots.arc2 import OWN_PARAMETERS
from midstream.snapshots.native.library import STEP_BYTES, Encode, Rebuild, Refused, library

Bytes = NDArray[np.uint8]
LONGEST = 1_200_000
SIZES = (1, 2, 3, 31, 1000, 2**17 - 1, 2**17, 2**17 + 1, 300_000, LONGEST)


@pytest.fixture
def compiled() -> ctypes.CDLL:
    found = library()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def old(tmp_path: Path) -> Iterator[tuple[int, Bytes]]:
    """An open file, and the bytes in it."""
    data = np.random.default_rng(0).integers(0, 256, LONGEST, dtype=np.uint8)
    data.tofile(tmp_path / "old")
    with (tmp_path / "old").open("rb") as file:
        yield file.fileno(), data


def difference(size: int, kind: str, rng: np.random.Generator) -> Bytes:
    if kind == "zeros":
        return np.zeros(size, np.uint8)
    if kind == "noise":
        return rng.integers(0, 256, size, dtype=np.uint8)
    if kind == "few symbols":
        return rng.choice(np.array([0, 1, 3, 7, 255], np.uint8), size)
    if kind == "repeated":
        return np.resize(rng.integers(0, 256, int(rng.integers(1, 600)), dtype=np.uint8), size)
    if kind == "exponential":
        return rng.exponential(4, size).astype(np.uint8)
    values = rng.integers(0, 2**16, size // 2 + 1, dtype=np.uint16)
    share = {"sparse": 0.02, "half": 0.5, "all": 1.0}[kind]
    moved = values + (rng.random(len(values)) < share).astype(np.uint16)
    return (values ^ moved).view(np.uint8)[:size]


KINDS = ("zeros", "noise", "few symbols", "repeated", "exponential", "sparse", "half", "all")


def rebuilt(compiled: ctypes.CDLL, blob: bytes, size: int, old: int, new: int | None = None) -> int:
    with Rebuild(compiled, memoryview(blob), size) as work:
        position = 0
        while count := work.step(old, position, new, position):
            position += count
        assert position <= size
        return work.checksum()


def frames(data: bytes) -> Iterator[bytes]:
    """The same data as levels, windows and headers of all sorts give it."""
    for level in (-5, 1, 3, 9, 19) if len(data) < 200_000 else (1, 3):
        yield zstandard.ZstdCompressor(level=level).compress(data)
        yield zstandard.ZstdCompressor(level=level, write_content_size=False).compress(data)
    for window in (10, 15, 20):
        parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window)
        yield zstandard.ZstdCompressor(compression_params=parameters).compress(data)
    own = zstandard.ZstdCompressor(compression_params=OWN_PARAMETERS).compressobj(size=len(data))
    yield own.compress(data) + own.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_gives_the_new_bytes_and_their_checksum(
    compiled: ctypes.CDLL, old: tuple[int, Bytes], tmp_path: Path, kind: str
) -> None:
    file, data = old
    rng = np.random.default_rng(1)
    for size in SIZES:
        change = difference(size, kind, rng)
        expected = (data[:size] ^ change).tobytes()
        for blob in frames(change.tobytes()):
            with (tmp_path / "new").open("wb+") as new:
                assert rebuilt(compiled, blob, size, file, new.fileno()) == zlib.adler32(expected)
                assert (tmp_path / "new").read_bytes() == expected


def test_a_damaged_frame_is_refused_or_gives_another_checksum(
    compiled: ctypes.CDLL, old: tuple[int, Bytes]
) -> None:
    """Whatever bytes it reads: they come from a bucket."""
    file, data = old
    rng, dice = np.random.default_rng(2), random.Random(2)
    refused = 0
    for number in range(400):
        change = difference(dice.choice((50, 3000, 140_000)), KINDS[number % len(KINDS)], rng)
        level = dice.choice((1, 3, 19))
        blob = bytearray(zstandard.ZstdCompressor(level=level).compress(change.tobytes()))
        for _ in range(dice.choice((1, 2, 8))):
            blob[dice.randrange(len(blob))] = dice.randrange(256)
        cut = blob[: dice.randrange(len(blob))] if number % 3 == 0 else blob
        try:
            checksum = rebuilt(compiled, bytes(cut), len(change), file)
        except Refused:
            refused += 1
        else:
            decoded = np.frombuffer(
                zstandard.ZstdDecompressor().decompress(bytes(cut), max_output_size=len(change)), np.uint8
            )
            assert checksum == zlib.adler32((data[: len(change)] ^ decoded).tobytes())
    assert refused > 300


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1000)),
        zstandard.ZstdCompressor().compress(bytes(500)) * 2,
        zstandard.ZstdCompressor().compress(bytes(1000)) + b"\0",
        zstandard.ZstdCompressor().compress(bytes(999)),
        b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + zstandard.ZstdCompressor().compress(bytes(1000)),
    ],
    ids=["empty", "short", "checksum", "two frames", "more behind", "another size", "skippable"],
)
def test_what_is_not_one_plain_frame_of_the_size_is_left_to_libzstd(
    compiled: ctypes.CDLL, old: tuple[int, Bytes], blob: bytes
) -> None:
    with pytest.raises(Refused):
        rebuilt(compiled, blob, 1000, old[0])


@pytest.mark.parametrize("zeros", [0, 2**17, 2**18])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_reaches_back_over_what_was_applied_at_once_is_never_wrong(
    compiled: ctypes.CDLL, old: tuple[int, Bytes], kind: str, zeros: int
) -> None:
    """Frames of our own window are applied without decoding; another encoder's may need what came before."""
    file, data = old
    rng = np.random.default_rng(5)
    parts = [np.zeros(zeros, np.uint8), difference(150_000, "sparse", rng), difference(200_000, kind, rng)]
    change = np.concatenate([*parts, parts[1], parts[2]])
    parameters = zstandard.ZstdCompressionParameters.from_level(9, window_log=17)
    blob = zstandard.ZstdCompressor(compression_params=parameters).compress(change.tobytes())
    expected = zlib.adler32((data[: len(change)] ^ change).tobytes())
    own, _, _ = encoded(compiled, file, data[: len(change)] ^ change)
    assert rebuilt(compiled, own, len(change), file) == expected
    try:
        checksum = rebuilt(compiled, blob, len(change), file)
    except Refused:
        return  # libzstd does it
    assert checksum == expected


def encoded(compiled: ctypes.CDLL, old: int, new: Bytes) -> tuple[bytes, int, bool]:
    with Encode(compiled, len(new)) as work:
        for position in range(0, len(new), STEP_BYTES):
            piece = new.data[position : position + STEP_BYTES]
            work.step(old, position, piece, position + len(piece) == len(new))
        return work.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_encoded_is_a_frame_for_libzstd_and_for_us(
    compiled: ctypes.CDLL, old: tuple[int, Bytes], kind: str
) -> None:
    file, data = old
    rng = np.random.default_rng(3)
    for size in SIZES:
        change = difference(size, kind, rng)
        new = data[:size] ^ change
        blob, checksum, changed = encoded(compiled, file, new)
        assert checksum == zlib.adler32(new.tobytes())
        assert changed == bool(change.any())
        assert zstandard.ZstdDecompressor().decompress(blob) == change.tobytes()
        assert rebuilt(compiled, blob, size, file) == checksum


def test_a_tensor_longer_than_a_step(compiled: ctypes.CDLL, tmp_path: Path) -> None:
    size = 2 * STEP_BYTES + 12_345
    change = difference(size, "sparse", np.random.default_rng(4))
    np.zeros(size, np.uint8).tofile(tmp_path / "old")
    with (tmp_path / "old").open("rb") as file:
        blob, checksum, _ = encoded(compiled, file.fileno(), change)
        assert zstandard.ZstdDecompressor().decompress(blob) == change.tobytes()
        assert rebuilt(compiled, blob, size, file.fileno()) == checksum == zlib.adler32(change.tobytes())


def test_files_that_end_early_or_refuse_are_errors(
    compiled: ctypes.CDLL, old: tuple[int, Bytes], tmp_path: Path
) -> None:
    blob = zstandard.ZstdCompressor().compress(bytes(1000))
    (tmp_path / "short").write_bytes(bytes(500))
    with (tmp_path / "short").open("rb") as file, pytest.raises(SnapshotCorrupt, match="became shorter"):
        rebuilt(compiled, blob, 1000, file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        rebuilt(compiled, blob, 1000, old[0], old[0])  # opened for reading
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Is a directory"):
            encoded(compiled, folder, np.zeros(1000, np.uint8))
    finally:
        os.close(folder)


def test_the_sources_are_in_the_package() -> None:
    folder = Path(native.__file__).parent
    assert {p.name for p in folder.glob("*.[hc]*")} >= {
        "delta.cpp",
        "adler.h",
        "zstd_decode.h",
        "zstd_encode.h",
    }
