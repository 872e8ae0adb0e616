"""SHA-256 of several ranges at a time: the digests of the standard library, only where nothing has to be compiled."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.core.errors import SnapshotCorrupt
from midstream.snapshots import content
from midstream_kernels import build, digests, prebuilt, range_digests
from midstream_kernels.build import SOURCE
from midstream_kernels.digests import RangeDigest

#: About the ends of blocks, of the padding, and of what is read at a time.
SIZES = [0, 1, 55, 56, 63, 64, 65, 119, 120, 121, 128, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16, 200_003]
BYTES = random.Random(1).randbytes(2**18)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(BYTES)
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def compiled() -> None:
    """As behind the start of an engine."""
    build.load(SOURCE)
    if prebuilt.features() and "sha_ni" not in prebuilt.features():
        pytest.skip("the processor has no instructions for SHA-256")


def plain(ranges: list[tuple[int, int]]) -> list[bytes]:
    return [hashlib.sha256(BYTES[begin:end]).digest() for begin, end in ranges]


def words(begin: int, end: int) -> dict[int, int]:
    """The largest word of each size, without its highest bit."""
    return {
        bits: max(
            (
                int.from_bytes(BYTES[at : at + bits // 8], "little") & (1 << bits - 1) - 1
                for at in range(begin, end - bits // 8 + 1, bits // 8)
            ),
            default=0,
        )
        for bits in (16, 32)
    }


def expected(ranges: list[tuple[int, int]]) -> list[RangeDigest]:
    return [RangeDigest(digest, words(*each)) for digest, each in zip(plain(ranges), ranges, strict=True)]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(40))
def test_ranges_have_the_digests_of_the_standard_library(file: int, seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.choices(SIZES, k=rng.randint(0, 2 * digests.LANES + 1))
    ranges = [(begin := rng.randint(0, len(BYTES) - size), begin + size) for size in sizes]
    assert range_digests(file, ranges) == expected(ranges)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", SIZES)
def test_ranges_of_one_size_have_the_digests_of_the_standard_library(file: int, size: int) -> None:
    ranges = [(begin, begin + size) for begin in (0, 7, 64)]
    assert range_digests(file, ranges) == expected(ranges)


@pytest.mark.usefixtures("compiled")
def test_a_file_that_is_shorter_has_no_digests(file: int) -> None:
    ranges = [(0, 10), (len(BYTES) - 5, len(BYTES) + 1)]
    with pytest.raises(EOFError):
        range_digests(file, ranges)
    with pytest.raises(SnapshotCorrupt, match="a file became shorter"):
        content.part_digests(file, ranges)
    with pytest.raises(OSError, match="Bad file descriptor"):
        range_digests(-1, ranges)


def test_nothing_is_compiled_for_digests(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_loaded", None)
    build._place.cache_clear()
    ranges = [(0, 100), (50, 200_000)]
    if not (SOURCE.parent.parent / build.LIBRARIES).exists():
        assert range_digests(file, ranges) is None
        assert not (tmp_path / "cache").exists()
    assert content.part_digests(file, ranges) == plain(ranges)
    build._place.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_a_library_that_others_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._place.cache_clear()
    place = build._place(SOURCE)
    if isinstance(place, Path):
        place.parent.mkdir()
        place.write_bytes(b"anything")
        place.parent.chmod(0o777)
        assert build.found(SOURCE) is None
    build._place.cache_clear()
