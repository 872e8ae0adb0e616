"""The compiled encoder's frames: libzstd reads back every pattern, in one go and in a window of a block; how long they are."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from midstream.snapshots.arc2 import OWN_PARAMETERS
from midstream.snapshots.native.library import STEP_BYTES, Encode, library

Bytes = NDArray[np.uint8]
Make = Callable[[np.random.Generator, int], Bytes]
BLOCK = 128 * 2**10
LONGEST = 2**21
SIZES = (
    1,
    2,
    3,
    7,
    63,
    64,
    65,
    127,
    300,
    1023,
    1024,
    5000,
    16383,
    40_000,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    3 * BLOCK + 77,
)


@pytest.fixture
def encode(tmp_path: Path) -> Iterator[Callable[[Bytes], bytes]]:
    """The frame of a difference, from an old tensor of zeros."""
    compiled = library()
    if compiled is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "old").write_bytes(bytes(LONGEST))
    with (tmp_path / "old").open("rb") as old:
        yield lambda difference: _frame(compiled, old.fileno(), difference)


def _frame(compiled: ctypes.CDLL, old: int, difference: Bytes) -> bytes:
    with Encode(compiled, len(difference)) as work:
        for at in range(0, len(difference), STEP_BYTES):
            piece = difference.data[at : at + STEP_BYTES]
            work.step(old, at, piece, at + len(piece) == len(difference))
        return work.finish()[0]


def _check(frame: bytes, difference: Bytes) -> None:
    """libzstd gives the same bytes, also when it may keep only a block of them, and the frame says how many they are."""
    expected = difference.tobytes()
    assert zstandard.ZstdDecompressor().decompress(frame) == expected
    narrow = zstandard.ZstdDecompressor(max_window_size=BLOCK).stream_reader(io.BytesIO(frame))
    assert narrow.read(len(expected) + 1) == expected
    assert zstandard.frame_content_size(frame) == len(expected)
    assert len(frame) <= len(expected) + 14 + 3 * -(-len(expected) // BLOCK)  # never longer than raw blocks


def bf16(rng: np.random.Generator, size: int, share: float) -> Bytes:
    """Old XOR new of weights of which this share moved by one unit in the last place."""
    count = size // 2 + 1
    old = ((rng.standard_normal(count, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    step = rng.choice(np.array([1, 2**16 - 1], np.uint16), count) * (rng.random(count) < share)
    return (old ^ (old + step).astype(np.uint16)).view(np.uint8)[:size]


def fp32(rng: np.random.Generator, size: int) -> Bytes:
    """Old XOR new of weights that all moved."""
    old = rng.standard_normal(size // 4 + 1, dtype=np.float32) * 0.02
    new = old + rng.standard_normal(len(old), dtype=np.float32) * 1e-6
    return (old.view(np.uint32) ^ new.view(np.uint32)).view(np.uint8)[:size]


def fp32_units(rng: np.random.Generator, size: int) -> Bytes:
    """One changed byte in four, every time: matches at offset 4."""
    old = rng.integers(2, 2**31, size // 4 + 1, dtype=np.uint32)
    return (old ^ (old + 1)).view(np.uint8)[:size]


def one_byte(rng: np.random.Generator, size: int) -> Bytes:
    result = np.zeros(size, np.uint8)
    result[rng.integers(size)] = rng.integers(1, 256)
    return result


def at_both_ends(rng: np.random.Generator, size: int) -> Bytes:
    result = np.zeros(size, np.uint8)
    result[[0, -1]] = rng.integers(1, 256, 2)
    return result


def half_noise(rng: np.random.Generator, size: int) -> Bytes:
    result = rng.integers(0, 256, size, dtype=np.uint8)
    cut = int(rng.integers(size + 1))
    result[cut:] = 0
    return result if rng.random() < 0.5 else result[::-1].copy()


def deep_tree(rng: np.random.Generator, size: int) -> Bytes:
    """Frequencies whose plain Huffman codes would be longer than zstd allows."""
    share = 1.618 ** -np.arange(40)
    return rng.choice(rng.permutation(256)[:40].astype(np.uint8), size, p=share / share.sum())


def every_run_once(rng: np.random.Generator, size: int) -> Bytes:
    """Runs of zeros of all lengths: every code of match lengths."""
    result = np.zeros(size, np.uint8)
    places = np.cumsum(np.concatenate([rng.permutation(400), 2 ** np.arange(17)]) + 1)
    places = places[places < size]
    result[places] = 1 + np.arange(len(places)) % 255
    return result


def short_runs(rng: np.random.Generator, size: int) -> Bytes:
    """Runs of zeros about as short as the shortest match."""
    lengths = rng.integers(1, 8, size)
    return np.repeat(np.arange(size) % 2 * rng.integers(1, 4, size), lengths)[:size].astype(np.uint8)


def other_each_block(rng: np.random.Generator, size: int) -> Bytes:
    """Blocks that take other offsets and other tables than the ones before them, and some that are raw."""
    kinds: tuple[Make, ...] = (
        fp32_units,
        lambda r, n: bf16(r, n, 1.0),
        lambda r, n: bf16(r, n, 0.02),
        noise,
        lambda r, n: bf16(r, n, 0.02),
        fp32,
        fp32_units,
        lambda r, n: np.zeros(n, np.uint8),
        fp32_units,
    )
    parts = [kinds[i % len(kinds)](rng, BLOCK) for i in range(-(-size // BLOCK))]
    return np.concatenate(parts)[:size]


def noise(rng: np.random.Generator, size: int) -> Bytes:
    return rng.integers(0, 256, size, dtype=np.uint8)


def all_bytes(rng: np.random.Generator, size: int) -> Bytes:
    return np.arange(size).astype(np.uint8)


def alternating(rng: np.random.Generator, size: int) -> Bytes:
    return np.resize(rng.integers(0, 3, int(rng.integers(1, 9)), dtype=np.uint8), size)


def two_symbols(rng: np.random.Generator, size: int) -> Bytes:
    return rng.choice(np.array([3, 200], np.uint8), size)


def one_symbol_between_zeros(rng: np.random.Generator, size: int) -> Bytes:
    return (rng.random(size) < 0.01).astype(np.uint8) * np.uint8(255)


def scattered(rng: np.random.Generator, size: int) -> Bytes:
    share = 10 ** rng.uniform(-4, 0)
    return np.where(rng.random(size) < share, rng.integers(0, 256, size), 0).astype(np.uint8)


def weights(rng: np.random.Generator, size: int) -> Bytes:
    return bf16(rng, size, 10 ** rng.uniform(-4, 0))


PATTERNS: tuple[Make, ...] = (
    fp32, fp32_units, one_byte, at_both_ends, half_noise, deep_tree, every_run_once, short_runs, other_each_block,
    noise, all_bytes, alternating, two_symbols, one_symbol_between_zeros, scattered, weights,
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda make: make.__name__)
def test_libzstd_reads_back_every_pattern_at_every_size(
    encode: Callable[[Bytes], bytes], pattern: Make
) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for size in (*SIZES, *(int(n) for n in rng.integers(1, 20_000, 10))):
            difference = pattern(rng, size)
            _check(encode(difference), difference)


def test_blocks_of_other_kinds_follow_each_other(encode: Callable[[Bytes], bytes]) -> None:
    difference = other_each_block(np.random.default_rng(0), 16 * BLOCK)
    _check(encode(difference), difference)


@pytest.mark.parametrize(
    "between", [one_byte, at_both_ends, fp32_units, noise, two_symbols], ids=lambda make: make.__name__
)
def test_a_table_is_used_again_only_while_a_decoder_still_has_it(
    encode: Callable[[Bytes], bytes], between: Make
) -> None:
    rng = np.random.default_rng(0)
    same = bf16(rng, BLOCK, 0.02)
    difference = np.concatenate([same, same, between(rng, BLOCK), same, same])
    _check(encode(difference), difference)


def test_a_block_like_the_one_before_it_describes_no_table(encode: Callable[[Bytes], bytes]) -> None:
    block = bf16(np.random.default_rng(0), BLOCK, 0.02)
    once, twice = len(encode(block)), len(encode(np.concatenate([block, block])))
    assert twice - once < once - 10 - 60  # 10: the frame's header


def test_unchanged_blocks_take_four_bytes(encode: Callable[[Bytes], bytes]) -> None:
    assert len(encode(np.zeros(5 * BLOCK + 1, np.uint8))) == 10 + 6 * 4


SHARES: dict[str, tuple[Make, float]] = {
    "bf16, 2 % moved": (lambda r, n: bf16(r, n, 0.02), 0.7),
    "bf16, 10 % moved": (lambda r, n: bf16(r, n, 0.1), 0.7),
    "bf16, 50 % moved": (lambda r, n: bf16(r, n, 0.5), 0.9),
    "bf16, all moved": (lambda r, n: bf16(r, n, 1.0), 1.02),
    "fp32, all moved": (fp32, 1.0),
    "fp32, all moved by one unit": (fp32_units, 0.7),
    "unlike a difference": (noise, 1.0),
}


@pytest.mark.parametrize("kind", SHARES)
def test_a_frame_is_at_most_so_long_beside_libzstds(encode: Callable[[Bytes], bytes], kind: str) -> None:
    make, share = SHARES[kind]
    difference = make(np.random.default_rng(0), 2**20)
    theirs = zstandard.ZstdCompressor(compression_params=OWN_PARAMETERS).compress(difference.tobytes())
    assert len(encode(difference)) <= share * len(theirs)
