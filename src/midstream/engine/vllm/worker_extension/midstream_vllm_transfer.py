"""A worker extension of vLLM, on any device, for servers into which trainers write weights (--weight-transfer-config).

It registers the backend `gloo` in vLLM's factory, and shows what any backend brings: the first rank writes each tensor that
passes `load_weights` into a file, too, at a place that the replica chose, sees if its numbers are finite, and digests the parts
of the file as they become whole. Where there are several ranks, each says the digests of the tensors that it was given, so that
the replica compares them. Other threads do this, beside what the ranks load. It loads the extension of all servers, too
(midstream_vllm_worker.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

EXTENSION: Any = importlib.import_module("midstream_vllm_worker")
GLOO = ("gloo", "midstream_vllm_gloo", "GlooWeightTransferEngine")
#: Per rank; more than memory gives bytes for are of no use.
THREADS_MAX = 8
#: Of tensors that wait for other threads, per rank; a larger one waits alone. Fused experts have a gigabyte each.
WAITING_BYTES_MAX = 2**31
_READ_BYTES = 2**20
#: Looked at twice, so that the second look finds it in the cache of a core.
_LOOK_BYTES = 2**18
#: By dtype: the bits of the least number without a sign that is not finite.
_NOT_FINITE = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80 << 16,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}

T = TypeVar("T")


class _Threads:
    """They work on tensors, in any order. WAITING_BYTES_MAX of what they were given are in memory at most."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "tee")
        self._waiting, self._moved = 0, threading.Condition()

    def submit(self, size: int, work: Callable[..., T], *args: Any) -> Future[T]:
        """size: of the memory that `args` keep, in bytes. With 0 this never waits."""
        with self._moved:
            self._moved.wait_for(
                lambda: not (size and self._waiting) or self._waiting + size <= WAITING_BYTES_MAX
            )
            self._waiting += size
        future = self._threads.submit(work, *args)
        future.add_done_callback(lambda _: self._over(size))
        return future

    def _over(self, size: int) -> None:
        with self._moved:
            self._waiting -= size
            self._moved.notify()

    def close(self) -> None:
        """What was not begun is left out."""
        self._threads.shutdown(cancel_futures=True)


class _TeeFile:
    """The file beside the weights. Parts of it are digested once they are whole, as long as tensors come without gaps."""

    def __init__(self, path: str, part_bytes: int, threads: _Threads) -> None:
        self._file, self._part_bytes, self._threads = os.open(path, os.O_RDWR), part_bytes, threads
        self._lock = threading.Lock()
        # Where what was written without a gap ends, and what was written behind that: from where to where.
        self._end: int | None = None
        self._behind: dict[int, int] = {}
        # Where the first part begins that is not digested.
        self._part = 0
        self._digests: dict[int, Future[str]] = {}

    def begin(self, begin: int) -> None:
        """The next tensor begins there."""
        if self._end is None:
            size = self._part_bytes
            self._end, self._part = begin, -(-begin // size) * size

    def write(self, data: memoryview, begin: int) -> None:
        """From any thread, after `begin`. Raises OSError."""
        at = begin
        while data:
            count = os.pwrite(self._file, data, at)
            data, at = data[count:], at + count
        with self._lock:
            if at > begin:
                self._behind[begin] = at
            while self._end in self._behind:
                self._end = self._behind.pop(self._end)
            assert self._end is not None
            while self._part + self._part_bytes <= self._end:
                asked = self._file, self._part, self._part_bytes
                self._digests[self._part] = self._threads.submit(0, _part_digest, *asked)
                self._part += self._part_bytes

    def digests(self) -> dict[str, str]:
        """Of parts, by where they begin. All is written."""
        return {str(begin): digest.result() for begin, digest in self._digests.items()}

    def close(self) -> None:
        """No thread uses it any more."""
        os.close(self._file)


def _part_digest(file: int, begin: int, size: int) -> str:
    """As part_digest of snapshots/content.py. It stands here, too, since neither midstream nor midstream_kernels is installed
    where vLLM is: this file imports the standard library, torch and vLLM alone."""
    whole, end = hashlib.sha256(), begin + size
    while begin < end:
        data = os.pread(file, min(_READ_BYTES, end - begin), begin)
        if not data:
            raise OSError(f"the file became shorter than {end} bytes while it was read")
        whole.update(data)
        begin += len(data)
    return whole.hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN, as all_finite of snapshots/finite.py says it. False for an unknown dtype, too.

    tensor: on the CPU, with one dimension.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if (first := _NOT_FINITE.get(tensor.dtype)) is None:
        return False
    numbers, bits = tensor.view(torch.uint8).numpy(), 8 * tensor.itemsize
    for at in range(0, len(numbers), _LOOK_BYTES):
        piece = numbers[at : at + _LOOK_BYTES]
        # Read with a sign, numbers that have their sign bit set are negative: each largest value is of one half.
        signed, unsigned = piece.view(f"<i{bits // 8}").max(), piece.view(f"<u{bits // 8}").max()
        if signed >= first or unsigned >= first | 1 << (bits - 1):
            return False
    return True


class _Taken(NamedTuple):
    """What other threads found of one tensor. digest: empty if none was asked for."""

    finite: bool
    digest: str


class _Tee:
    """Stands before the `load_weights` of a model. While it is open, it looks at what passes.

    Always holds: a tensor is announced, and has the size that was announced.
    """

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        # None: it is closed.
        self._threads: _Threads | None = None
        # Of the first rank.
        self._file: _TeeFile | None = None
        # Of those that are to come.
        self._places: dict[str, list[int]] = {}
        self._taken: dict[str, Future[_Taken]] = {}
        self._digests = self._own_memory = False

    def open(
        self,
        places: dict[str, list[int]],
        *,
        path: str | None,
        digests: bool,
        part_bytes: int,
        threads: int,
        own_memory: bool = False,
    ) -> None:
        """path: of the file to write to. digests: of each tensor are computed. part_bytes: of the parts of the file.
        own_memory: a tensor in the host's memory stays as it is when it is loaded."""
        self._close()
        self._places, self._threads = dict(places), _Threads(threads)
        self._file = None if path is None else _TeeFile(path, part_bytes, self._threads)
        self._digests, self._own_memory = digests, own_memory

    def close(self) -> dict[str, Any]:
        """The tensors that did not come, the digests of those that came, those of the file's whole parts, and whether all
        numbers that the file was given are finite. Raises OSError."""
        try:
            taken = {name: one.result() for name, one in self._taken.items()}
            return {
                "missing": list(self._places),
                "digests": {name: one.digest for name, one in taken.items() if self._digests},
                "parts": {} if self._file is None else self._file.digests(),
                "finite": self._file is not None and all(one.finite for one in taken.values()),
            }
        finally:
            self._close()

    def _close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._places, self._taken = {}, {}

    def __call__(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        if self._threads is None:
            return self._load(weights, *args, **kwargs)
        seen = self._look_at_all(weights)
        result = self._load(seen, *args, **kwargs)
        # A rank may have no use for the last ones.
        for _ in seen:
            pass
        return result

    def _look_at_all(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        threads = self._threads
        assert threads is not None
        for name, tensor in weights:
            begin, end = self._places.pop(name)
            flat = tensor.detach().reshape(-1).contiguous().cpu()
            if flat.nbytes != end - begin:
                raise ValueError(f"{name} has {flat.nbytes} bytes, and {end - begin} were announced")
            if self._file is not None:
                self._file.begin(begin)
            if self._file is not None or self._digests:
                self._taken[name] = taken = threads.submit(flat.nbytes, self._take, flat, begin)
                if not (self._own_memory or tensor.device.type != "cpu"):
                    # A backend may use memory of the host again as soon as the tensor is loaded.
                    taken.result()
            yield name, tensor

    def _take(self, flat: torch.Tensor, begin: int) -> _Taken:
        """flat: one dimension, on the CPU."""
        data = flat.view(torch.uint8).numpy().data
        if self._file is None:
            return _Taken(False, hashlib.sha256(data).hexdigest())
        finite = _is_finite(flat)
        self._file.write(data, begin)
        return _Taken(finite, hashlib.sha256(data).hexdigest() if self._digests else "")


class TransferWorker(EXTENSION.Worker):  # type: ignore[misc]
    """Methods that the replica calls by /collective_rpc, which every rank answers, with those of all servers."""

    def midstream_open_tee(self: Any, path: str, places: dict[str, list[int]], part_bytes: int) -> None:
        model, parallel = self.weight_transfer_engine.model, self.parallel_config
        if not isinstance(model.load_weights, _Tee):
            model.load_weights = _Tee(model.load_weights)
        ranks = parallel.world_size * parallel.data_parallel_size
        model.load_weights.open(
            places,
            path=path if _is_first(self) else None,
            digests=ranks > 1,
            part_bytes=part_bytes,
            threads=min(THREADS_MAX, max(1, (os.cpu_count() or 1) // ranks)),
            own_memory=getattr(self.weight_transfer_engine, "own_memory", False),
        )

    def midstream_close_tee(self: Any) -> dict[str, Any]:
        seen: dict[str, Any] = self.weight_transfer_engine.model.load_weights.close()
        return {"first": _is_first(self), **seen}


def _is_first(worker: Any) -> bool:
    return bool(worker.rank == 0 and worker.parallel_config.data_parallel_index == 0)


def _register() -> None:
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    # vLLM refuses a name that it has.
    with contextlib.suppress(ValueError):
        factory.WeightTransferEngineFactory.register_engine(*GLOO)


_register()
