"""Memory of models: allocated in huge pages, kept for the next model, and given back without stopping any other thread.

Always holds: nothing reads memory that was given back or kept. What is kept is of one model at most. Giving back holds the
interpreter lock for one system call at a time, however large the memory is. Unmapping the pages of a tensor would hold the
lock until the last page is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Iterable

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


class Spare:
    """The memory of the model that was released last, for the next one. The system would have to clear every new page.

    Several threads may use it.
    """

    def __init__(self) -> None:
        # By number of words.
        self._kept: dict[int, list[torch.Tensor]] = {}
        # How many all were when something was kept last.
        self._words = 0
        self._kept_at = 0.0
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Spare {sum(len(kept) for kept in self._kept.values())} pieces>"

    def take(self, words: int) -> torch.Tensor:
        """As `big`, but with any contents."""
        with self._lock:
            kept = self._kept.get(words)
            found = kept.pop() if kept else None
        return big(words) if found is None else found

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep these, each as `take` gave it, in place of what was kept before."""
        with self._lock:
            self.give_back()
            self._add(tensors)

    def put_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep these besides what is kept: they were taken for a model that came to nothing. If another model was released
        since, they are given back."""
        with self._lock:
            took = sum(map(len, tensors := list(tensors)))
            if self._held and self._held + took > self._words:
                _give_back_all(tensors)
            else:
                self._add(tensors)

    @property
    def _held(self) -> int:
        return sum(words * len(kept) for words, kept in self._kept.items())

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._kept.setdefault(len(tensor), []).append(tensor)
        self._words, self._kept_at = self._held, time.monotonic()

    def give_back(self, older_s: float = 0.0) -> None:
        """Give back what was kept for so long."""
        with self._lock:
            if time.monotonic() - self._kept_at < older_s:
                return
            kept, self._kept = self._kept, {}
        _give_back_all(tensor for of_size in kept.values() for tensor in of_size)


def _give_back_all(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        give_back(tensor.data_ptr(), tensor.nbytes)
