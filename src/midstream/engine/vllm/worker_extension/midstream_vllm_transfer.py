"""A worker extension of vLLM, on any device, for servers into which trainers write weights (--weight-transfer-config).

It registers the backend `gloo` in vLLM's factory, and shows what any backend brings: the first rank writes each tensor that
passes `load_weights` into a file, too, at a place that the replica chose, and digests the file's parts as they become whole.
Where there are several ranks, each says the digests of the tensors that it was given, so that the replica compares them. Other
threads compute digests, beside what the ranks load. It loads the extension of all servers, too (midstream_vllm_worker.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

EXTENSION: Any = importlib.import_module("midstream_vllm_worker")
GLOO = ("gloo", "midstream_vllm_gloo", "GlooWeightTransferEngine")
#: Per rank; more than memory gives bytes for are of no use.
THREADS_MAX = 8
#: Of tensors that wait for their digests, per rank; a larger one waits alone. Fused experts have a gigabyte each.
WAITING_BYTES_MAX = 2**31
_READ_BYTES = 2**20


class _Digester:
    """SHA-256 in threads. What it was given is digested in any order; WAITING_BYTES_MAX of it are in memory at most."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "digests")
        self._waiting, self._moved = 0, threading.Condition()

    def submit(self, size: int, digest: Callable[..., str], *args: Any) -> Future[str]:
        """size: in bytes."""
        with self._moved:
            self._moved.wait_for(lambda: not self._waiting or self._waiting + size <= WAITING_BYTES_MAX)
            self._waiting += size
        future = self._threads.submit(digest, *args)
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

    def __init__(self, path: str, part_bytes: int, digester: _Digester) -> None:
        self._file, self._part_bytes, self._digester = os.open(path, os.O_RDWR), part_bytes, digester
        # Written from the first byte that came up to here, and the first part that is not digested.
        self._end: int | None = None
        self._part = 0
        self._digests: dict[int, Future[str]] = {}

    def write(self, data: memoryview, begin: int) -> None:
        size = self._part_bytes
        if self._end is None:
            self._part = -(-begin // size) * size
        whole = self._end in (None, begin)
        while data:
            count = os.pwrite(self._file, data, begin)
            data, begin = data[count:], begin + count
        self._end = begin if whole else -1
        while self._part + size <= self._end:
            self._digests[self._part] = self._digester.submit(
                size, _part_digest, self._file, self._part, size
            )
            self._part += size

    def digests(self) -> dict[str, str]:
        """Of parts, by where they begin."""
        return {str(begin): digest.result() for begin, digest in self._digests.items()}

    def close(self) -> None:
        """No thread reads from it any more."""
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


def _bytes_digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class _Tee:
    """Stands before the `load_weights` of a model. While it is open, it looks at what passes.

    Always holds: a tensor is announced, and has the size that was announced.
    """

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        # None: it is closed.
        self._digester: _Digester | None = None
        # Of the first rank.
        self._file: _TeeFile | None = None
        # Of those that are to come.
        self._places: dict[str, list[int]] = {}
        self._digests: dict[str, Future[str] | str] | None = None

    def open(
        self, places: dict[str, list[int]], *, path: str | None, digests: bool, part_bytes: int, threads: int
    ) -> None:
        """path: of the file to write to. digests: of each tensor are computed. part_bytes: of the parts of the file."""
        self._close()
        self._places, self._digester = dict(places), _Digester(threads)
        self._file = None if path is None else _TeeFile(path, part_bytes, self._digester)
        self._digests = {} if digests else None

    def close(self) -> dict[str, Any]:
        """The tensors that did not come, the digests of those that came, and those of the file's whole parts."""
        try:
            digests = self._digests or {}
            return {
                "missing": list(self._places),
                "digests": {
                    name: one if isinstance(one, str) else one.result() for name, one in digests.items()
                },
                "parts": {} if self._file is None else self._file.digests(),
            }
        finally:
            self._close()

    def _close(self) -> None:
        digester, self._digester = self._digester, None
        if digester is not None:
            digester.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._places, self._digests = {}, None

    def __call__(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        if self._digester is None:
            return self._load(weights, *args, **kwargs)
        seen = self._look_at_all(weights)
        result = self._load(seen, *args, **kwargs)
        # A rank may have no use for the last ones.
        for _ in seen:
            pass
        return result

    def _look_at_all(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        digester = self._digester
        assert digester is not None
        for name, tensor in weights:
            begin, end = self._places.pop(name)
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data
            if len(data) != end - begin:
                raise ValueError(f"{name} has {len(data)} bytes, and {end - begin} were announced")
            if self._digests is not None:
                # A backend may use memory of the host again as soon as the tensor is loaded.
                own = tensor.device.type != "cpu"
                self._digests[name] = (
                    digester.submit(len(data), _bytes_digest, data) if own else _bytes_digest(data)
                )
            if self._file is not None:
                self._file.write(data, begin)
            yield name, tensor


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
