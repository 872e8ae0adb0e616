"""A digest of the serving weights, computed beside the steps.

Always holds: a background job reads the weights, and a later job disposes of a model that was replaced meanwhile. So no
weights are freed while they are read.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from midstream import __version__
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.device import is_cuda, loading

logger = logging.getLogger(__name__)

#: Summed at a time, without the interpreter lock and within the cache of a core.
CHUNK_BYTES = 1 << 18
#: Copied from a device at a time. Each copy is a round trip, so small copies would take long.
PIECE_BYTES = 16 * CHUNK_BYTES
#: Factors are odd, so that every change of a single word is seen. They differ, so that words that change places are seen.
FACTORS = np.arange(CHUNK_BYTES // 4, dtype=np.uint32) * np.uint32(2 * 2654435761 % 2**32) | np.uint32(1)

Tensors = Sequence[tuple[str, torch.Tensor]]


def reply(call: int, weights: Tensors, threads: int = 1) -> m.CallDone:
    """The reply to a call for the digest. Whatever goes wrong, the call gets one."""
    try:
        device = weights[0][1].device if weights else "cpu"
        with loading(device):
            # Each thread would have a stream of its own on a device.
            found = digest(weights, 1 if is_cuda(device) else threads)
        return m.CallDone(call, digest=f"{kind(weights)}:{found}")
    except Exception as error:
        logger.warning("the weights could not be read", exc_info=True)
        return m.CallDone(call, error=f"{type(error).__name__}: {error}")


def kind(weights: Tensors) -> str:
    """A hash of everything beside the files that decides how weights lie in memory.

    Engines of one kind have the same digest for the same files.
    """
    whole = hashlib.blake2b(digest_size=8)
    for part in (__version__, torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()):
        whole.update(f"{part}\n".encode())
    for name, tensor in weights:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}\n".encode())
    return f"embedded-{whole.hexdigest()}"


def digest(weights: Tensors, threads: int = 1) -> str:
    """A hexadecimal digest of the name, dtype, shape and bytes of every tensor. It finds accidents, not forgeries."""
    whole = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(max(1, threads), "digest") as pool:
        for name, tensor in weights:
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            data = tensor.detach().reshape(-1).view(torch.uint8)
            starts = range(0, len(data), PIECE_BYTES)
            pieces = (data[first : first + PIECE_BYTES] for first in starts)
            for sums in pool.map(_checksums, pieces) if len(starts) > 1 else map(_checksums, pieces):
                whole.update(sums)
    return whole.hexdigest()


def _checksums(piece: torch.Tensor) -> bytes:
    """The checksum of each chunk. Whole chunks in one call, which needs no other memory and no interpreter lock."""
    data = piece.cpu().numpy()
    end = len(data) // CHUNK_BYTES * CHUNK_BYTES
    sums: np.ndarray = np.einsum("ij,j->i", data[:end].view(np.uint32).reshape(-1, len(FACTORS)), FACTORS)
    rest = _checksum(data[end:]).to_bytes(4, "little") if end < len(data) else b""
    whole: bytes = sums.astype("<u4").tobytes()
    return whole + rest


def _checksum(data: np.ndarray) -> int:
    """The sum of all 32-bit words, each times the factor of its place, modulo 2**32. data: uint8, at most CHUNK_BYTES."""
    words = len(data) // 4
    tail = int.from_bytes(data[4 * words :].tobytes(), "little")
    products = data[: 4 * words].view(np.uint32) * FACTORS[:words]
    return (int(products.sum(dtype=np.uint32)) + tail) % 2**32
