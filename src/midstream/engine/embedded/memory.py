"""Memory of models: taken in huge pages, given back without stopping anything.

Always holds: what is given back is not read any more; giving back holds the interpreter's lock for no longer than a system
call, however large the memory is, where unmapping a tensor's pages would hold it until the last page is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np
import torch

SLICE_BYTES = 1 << 25  # given back at a time: the kernel's lock on the address space is free in between
PAGE = mmap.PAGESIZE


def big(words: int) -> torch.Tensor:
    """int32 zeros in huge pages: reading all over 4 KiB pages costs more in address translation than in transfer."""
    memory = mmap.mmap(-1, max(words, 1) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32, count=words)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in `big` memory; on this thread alone."""
    tensor = tensor.contiguous()
    target = big(-(-tensor.nbytes // 4)).view(torch.uint8)[: tensor.nbytes]
    np.copyto(target.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
    return target.view(tensor.dtype).view(tensor.shape)


def give_back(address: int, size: int) -> None:
    """The pages of a private mapping go; what is read there later is not what was written. address: of its beginning."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for at in range(0, size, SLICE_BYTES):
        madvise(address + at, min(SLICE_BYTES, size - at), mmap.MADV_DONTNEED)
