"""A digest of the weights that serve, off the step path.

Always holds: every request gets exactly one result; it is read by a background job, and what is replaced meanwhile is
disposed of by a later one, so nothing that is being read is freed.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import queue
from collections.abc import Callable, Sequence

import numpy as np
import torch

from midstream import __version__
from midstream.engine.embedded import messages as m
from midstream.engine.embedded.background import Job
from midstream.engine.embedded.device import loading

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18  # summed at a time, without the interpreter's lock and within a core's cache
#: Copied from a device at a time: each copy is a round trip, so small ones would take long.
PIECE_BYTES = 64 * CHUNK_BYTES
#: Odd, so that no change of a single word goes unseen; all different, so that words that change places are seen.
FACTORS = np.arange(CHUNK_BYTES // 4, dtype=np.uint32) * np.uint32(2 * 2654435761 % 2**32) | np.uint32(1)

Weights = Sequence[tuple[str, torch.Tensor]]


class Digester:
    """Use from the engine's loop; only `_run` is on a thread. submit: begins a job on that thread, some time."""

    def __init__(self, submit: Callable[[Job], None]) -> None:
        self._submit = submit
        self._finished: queue.SimpleQueue[m.Done] = queue.SimpleQueue()
        self.pending = 0

    def __repr__(self) -> str:
        return f"Digester(pending={self.pending})"

    def submit(self, call: int, weights: Weights) -> None:
        self.pending += 1
        self._submit(lambda: self._run(call, weights))

    def take(self) -> list[m.Done]:
        """What has finished since the last call."""
        done = []
        while not self._finished.empty():
            done.append(self._finished.get())
        self.pending -= len(done)
        return done

    def _run(self, call: int, weights: Weights) -> None:
        try:
            with loading(weights[0][1].device if weights else "cpu"):
                found = f"{kind(weights)}:{digest(weights)}"
            self._finished.put(m.Done(call, digest=found))
        except Exception as error:  # whatever it is, the request must get its answer
            logger.warning("the weights could not be read", exc_info=True)
            self._finished.put(m.Done(call, error=f"{type(error).__name__}: {error}"))


def kind(weights: Weights) -> str:
    """Of what decides how weights lie in memory beside their files: engines of one kind make one digest of the same files."""
    whole = hashlib.blake2b(digest_size=8)
    for part in (__version__, torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()):
        whole.update(f"{part}\n".encode())
    for name, tensor in weights:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}\n".encode())
    return f"embedded-{whole.hexdigest()}"


def digest(weights: Weights) -> str:
    """Hexadecimal; of every tensor's name, dtype, shape and bytes. Finds accidents, not forgeries."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in weights:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().reshape(-1).view(torch.uint8)
        for first in range(0, len(data), PIECE_BYTES):
            piece = data[first : first + PIECE_BYTES].cpu().numpy()
            for at in range(0, len(piece), CHUNK_BYTES):
                whole.update(_checksum(piece[at : at + CHUNK_BYTES]).to_bytes(4, "little"))
    return whole.hexdigest()


def _checksum(data: np.ndarray) -> int:
    """Sum of 32-bit words, each times its place's factor, modulo 2**32. data: uint8, at most CHUNK_BYTES."""
    words = len(data) // 4
    tail = int.from_bytes(data[4 * words :].tobytes(), "little")
    products = data[: 4 * words].view(np.uint32) * FACTORS[:words]
    return (int(products.sum(dtype=np.uint32)) + tail) % 2**32
