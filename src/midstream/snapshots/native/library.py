"""The compiled delta code: one tensor's rebuild and one tensor's encode, step by step, without the GIL. No torch.

Owns: the C signatures of delta.cpp and the lifetime of what it allocates.
Always holds: a blob this code does not know, or does not like, is no error here: `Rebuild` says so and the caller asks libzstd.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from ctypes import POINTER, byref, c_int, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from midstream.compiled import NoCompiler, load
from midstream.errors import SnapshotCorrupt

SOURCE = Path(__file__).with_name("delta.cpp")
STEP_BYTES = 4 * 2**20  # between two looks at whether to stop; whole blocks of 128 KiB

_REFUSED, _ENDED_EARLY, _ERRNO = -1, -2, -1000
_SIGNATURES = {
    "delta_rebuild_new": (c_void_p, [c_void_p, c_int64, c_int64]),
    "delta_rebuild_step": (c_int64, [c_void_p, c_int, c_int64, c_int, c_int64, c_int64]),
    "delta_rebuild_complete": (c_int, [c_void_p]),
    "delta_rebuild_sum": (c_uint32, [c_void_p]),
    "delta_rebuild_free": (None, [c_void_p]),
    "delta_encode_new": (c_void_p, [c_int64]),
    "delta_encode_step": (c_int64, [c_void_p, c_int, c_int64, c_void_p, c_int64, c_int]),
    "delta_encode_blob": (c_void_p, [c_void_p, POINTER(c_int64), POINTER(c_uint32), POINTER(c_int)]),
    "delta_encode_free": (None, [c_void_p]),
}

logger = logging.getLogger(__name__)


class Refused(Exception):
    """The blob is no good, or of a kind this code does not know."""


@cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be built, which is said once."""
    if sys.byteorder != "little":
        return None
    try:
        loaded = load(SOURCE)
    except NoCompiler as error:
        logger.warning("deltas are made and applied without compiled code, several times slower: %s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class _Work:
    """What a C function allocated, until the `with` ends."""

    def __init__(self, loaded: ctypes.CDLL, made: int, free: str) -> None:
        self._library, self._work, self._free = loaded, made, free

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        getattr(self._library, self._free)(self._work)


class Rebuild(_Work):
    """One tensor of `size` bytes from its old bytes and its blob (arc_v2), which must stay where it is. Raises Refused."""

    def __init__(self, loaded: ctypes.CDLL, blob: memoryview, size: int) -> None:
        made = loaded.delta_rebuild_new(_address(blob), len(blob), size)
        if not made:
            raise Refused
        super().__init__(loaded, made, "delta_rebuild_free")

    def step(self, old: int, old_at: int, new: int | None, new_at: int) -> int:
        """The bytes rebuilt, 0 at the end. old, new: open files, and where. Raises Refused, SnapshotCorrupt, OSError."""
        target = -1 if new is None else new
        return _counted(self._library.delta_rebuild_step(self._work, old, old_at, target, new_at, STEP_BYTES))

    def checksum(self) -> int:
        """Adler-32 of what was rebuilt. Raises Refused when the blob did not end, or held another size."""
        if not self._library.delta_rebuild_complete(self._work):
            raise Refused
        return int(self._library.delta_rebuild_sum(self._work))


class Encode(_Work):
    """One tensor's blob (arc_v2) and checksum. `size` in bytes, at least one. Raises MemoryError."""

    def __init__(self, loaded: ctypes.CDLL, size: int) -> None:
        made = loaded.delta_encode_new(size)
        if not made:
            raise MemoryError
        super().__init__(loaded, made, "delta_encode_free")

    def step(self, old: int, old_at: int, new: memoryview, last: bool) -> None:
        """The next bytes: STEP_BYTES, fewer only if `last`. old: an open file. Raises SnapshotCorrupt, OSError, MemoryError."""
        _counted(self._library.delta_encode_step(self._work, old, old_at, _address(new), len(new), int(last)))

    def finish(self) -> tuple[bytes, int, bool]:
        """The blob, Adler-32 of the new bytes, whether any byte changed."""
        size, checksum, changed = c_int64(), c_uint32(), c_int()
        at = self._library.delta_encode_blob(self._work, byref(size), byref(checksum), byref(changed))
        return ctypes.string_at(at, size.value), checksum.value, bool(changed.value)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if data else 0


def _counted(result: int) -> int:
    if result >= 0:
        return result
    if result == _REFUSED:
        raise Refused
    if result == _ENDED_EARLY:
        raise SnapshotCorrupt("a file became shorter while it was read")
    number = _ERRNO - result
    raise OSError(number, os.strerror(number))
