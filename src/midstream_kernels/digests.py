"""SHA-256 of ranges of a file, several at a time (kernels/sha256.h), where the library is there already. Imports no torch.

The same pass looks for the largest number, which shows whether floating-point numbers are finite.

Always holds: the digests are those of any SHA-256. Nothing is compiled for them: without an engine no compiler is needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from midstream_kernels.build import SOURCE, KernelsUnavailable, found

#: Ranges that one thread digests at a time.
LANES = 3
_DIGEST_BYTES = 32
#: What the kernel returns, besides 0 and a negative errno.
_SHORTER, _NOT_HERE = 1, 2

_loaded: Callable[..., int] | None = None


class RangeDigest(NamedTuple):
    """largest: of the range's whole words of 16 and of 32 bits, little-endian and without their highest bit, by these bits."""

    digest: bytes
    largest: Mapping[int, int]


def range_digests(file: int, ranges: Sequence[tuple[int, int]]) -> list[RangeDigest] | None:
    """What the bytes of each range of an open file are, from its first to behind its last. None: not on this machine, or not
    yet. Raises EOFError when the file is shorter, OSError."""
    digest = _function()
    if digest is None:
        return None
    begins, ends = zip(*ranges, strict=True) if ranges else ((), ())
    numbers = ctypes.c_int64 * len(ranges)
    digests = ctypes.create_string_buffer(_DIGEST_BYTES * len(ranges))
    largest = (ctypes.c_uint32 * (2 * len(ranges)))()
    outcome = digest(file, numbers(*begins), numbers(*ends), len(ranges), digests, largest)
    if outcome == _NOT_HERE:
        return None
    if outcome == _SHORTER:
        raise EOFError("the file is shorter")
    if outcome < 0:
        raise OSError(-outcome, os.strerror(-outcome))
    return [
        RangeDigest(
            digests.raw[_DIGEST_BYTES * i : _DIGEST_BYTES * (i + 1)],
            {16: largest[2 * i], 32: largest[2 * i + 1]},
        )
        for i in range(len(ranges))
    ]


def _function() -> Callable[..., int] | None:
    global _loaded
    if _loaded is None:
        try:
            library = found(SOURCE)
        except KernelsUnavailable:
            return None
        if library is not None:
            function: Any = library.digest_ranges
            pointer = ctypes.POINTER(ctypes.c_int64)
            function.argtypes = [ctypes.c_int, pointer, pointer, ctypes.c_int64, ctypes.c_char_p]
            function.argtypes += [ctypes.POINTER(ctypes.c_uint32)]
            function.restype = ctypes.c_int64
            _loaded = function
    return _loaded
