"""Memory of models: allocated in huge pages, and given back without stopping any other thread.

Always holds: nothing reads memory that was given back. Giving back holds the interpreter lock for one system call at a time,
however large the memory is. Unmapping the pages of a tensor would hold the lock until the last page is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

#: Given back at a time. In between, the operating system's lock on the address space is free.
SLICE_BYTES = 1 << 25
PAGE = mmap.PAGESIZE


def big(words: int) -> torch.Tensor:
    """int32 zeros in huge pages. With pages of 4 KiB, address translation costs more than the transfer."""
    memory = mmap.mmap(-1, max(words, 1) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # An operating system may be built without them.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32, count=words)


def give_back(address: int, size: int) -> None:
    """Free the pages of a private mapping that begins at `address`. The contents are lost; the mapping stays."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for at in range(0, size, SLICE_BYTES):
        madvise(address + at, min(SLICE_BYTES, size - at), mmap.MADV_DONTNEED)
