"""Work beside the steps: one job after the other, on one thread.

Always holds: jobs run in the order in which they came. So a model is disposed of after every job that reads it. A job that
raises an error does not stop the jobs behind it.

A digest of the serving weights, computed beside the steps.

Always holds: a background job reads the weights, and a later job disposes of a model that was replaced meanwhile. So no
weights are freed while they are read.

Loads snapshots beside the serving model, one at a time.

Always holds: one load runs at a time, in the order in which policies asked. A policy's newer request replaces its waiting one.
The result of a load that was overtaken or dropped is thrown away. Every request gets exactly one result, and every model has
exactly one owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from midstream import __version__
from midstream.core.errors import MidstreamError
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.device import loading
from midstream.engine.embedded.protocol import StageSnapshot
from midstream.engine.embedded.weights import Weights

logger = logging.getLogger(__name__)

#: Beside steps that keep every core busy, a thread with this niceness gets less than half a core.
NICENESS = 1

Job = Callable[[], None]


class Background:
    def __init__(self, name: str = "background", niceness: int = NICENESS) -> None:
        self._name = name
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lower_priority(self._niceness)
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                # A job handles its own errors. One that does not must not stop the jobs behind it.
                logger.exception("a job beside the steps failed")
            # Free what the job holds before waiting for the next one.
            del job


def lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, and of the threads that it starts."""
    # On other systems this would change the priority of the whole process.
    if sys.platform == "linux" and niceness:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, now + niceness)


#: Summed at a time, without the interpreter lock and within the cache of a core.
CHUNK_BYTES = 1 << 18
#: Copied from a device at a time. Each copy is a round trip, so small copies would take long.
PIECE_BYTES = 64 * CHUNK_BYTES
#: Factors are odd, so that every change of a single word is seen. They differ, so that words that change places are seen.
FACTORS = np.arange(CHUNK_BYTES // 4, dtype=np.uint32) * np.uint32(2 * 2654435761 % 2**32) | np.uint32(1)

Tensors = Sequence[tuple[str, torch.Tensor]]


def reply(call: int, weights: Tensors) -> m.Done:
    """The reply to a call for the digest. Whatever goes wrong, the call gets one."""
    try:
        with loading(weights[0][1].device if weights else "cpu"):
            return m.Done(call, digest=f"{kind(weights)}:{digest(weights)}")
    except Exception as error:
        logger.warning("the weights could not be read", exc_info=True)
        return m.Done(call, error=f"{type(error).__name__}: {error}")


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


def digest(weights: Tensors) -> str:
    """A hexadecimal digest of the name, dtype, shape and bytes of every tensor. It finds accidents, not forgeries."""
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
    """The sum of all 32-bit words, each times the factor of its place, modulo 2**32. data: uint8, at most CHUNK_BYTES."""
    words = len(data) // 4
    tail = int.from_bytes(data[4 * words :].tobytes(), "little")
    products = data[: 4 * words].view(np.uint32) * FACTORS[:words]
    return (int(products.sum(dtype=np.uint32)) + tail) % 2**32


SUPERSEDED = "superseded by a newer snapshot"
DROPPED = "nobody waits for it any more"

#: A request and its weights, or the reason why there are none.
Staged = tuple[StageSnapshot, Weights | str]


class Stager:
    """Use it from the engine's loop.

    submit: starts a job on the background thread, at some time. unwanted: takes weights that were loaded in vain.
    """

    def __init__(
        self,
        load: Callable[[Path], Weights],
        submit: Callable[[Job], None],
        unwanted: Callable[[Weights], None],
    ) -> None:
        self._load = load
        self._submit = submit
        self._unwanted = unwanted
        self._running: StageSnapshot | None = None
        # The running load was dropped.
        self._dropped = False
        # By policy.
        self._waiting: dict[str, StageSnapshot] = {}
        self._finished: queue.SimpleQueue[Staged] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        return self._running is not None

    def submit(self, request: StageSnapshot) -> list[Staged]:
        """Load it as soon as no other load runs. Returns the result of the waiting request that this one replaces, if any."""
        before = self._waiting.pop(request.policy, None)
        self._waiting[request.policy] = request
        self._start()
        return [] if before is None else [(before, SUPERSEDED)]

    def drop(self, policy: str) -> list[Staged]:
        """Drop the policy's running and waiting request. Returns the result of the waiting one, if any."""
        waiting = self._waiting.pop(policy, None)
        if self._running is not None and self._running.policy == policy:
            self._dropped = True
        return [] if waiting is None else [(waiting, DROPPED)]

    def take(self) -> list[Staged]:
        """The results that have become ready since the last call."""
        done: list[Staged] = []
        while not self._finished.empty():
            request, result = self._finished.get()
            newer = request.policy in self._waiting
            reason = SUPERSEDED if newer else DROPPED if self._dropped else None
            self._running, self._dropped = None, False
            if reason is not None and not isinstance(result, str):
                self._unwanted(result)
            done.append((request, reason or result))
            self._start()
        return done

    def _start(self) -> None:
        if self._running is None and self._waiting:
            request = self._running = self._waiting.pop(next(iter(self._waiting)))
            self._submit(lambda: self._run(request))

    def _run(self, request: StageSnapshot) -> None:
        try:
            result: Weights | str = self._load(Path(request.directory))
        except BaseException as error:
            # This includes the panic of a native library: the request must get its result.
            # What is wrong with somebody's files is said in one line.
            known = isinstance(error, MidstreamError)
            policy = request.policy.partition("#")[0]
            called = f"{request.snapshot} of policy {policy}" if policy else request.snapshot
            logger.warning("staging %s failed: %s", called, error, exc_info=not known)
            result = f"{type(error).__name__}: {error}"
        self._finished.put((request, result))
