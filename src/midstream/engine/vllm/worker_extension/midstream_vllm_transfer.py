"""A worker extension of vLLM, on any device, for servers into which trainers write weights (--weight-transfer-config).

It registers the backend `gloo` in vLLM's factory, and shows what any backend brings: the first rank writes each tensor that
passes `load_weights` into a file, too, at a place that the replica chose. Where there are several ranks, each says the digests
of the tensors that it was given, so that the replica compares them. It loads the extension of all servers, too
(midstream_vllm_worker.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

EXTENSION: Any = importlib.import_module("midstream_vllm_worker")
GLOO = ("gloo", "midstream_vllm_gloo", "GlooWeightTransferEngine")


class _Tee:
    """Stands before the `load_weights` of a model. While it is open, it looks at what passes.

    Always holds: a tensor is announced, and has the size that was announced.
    """

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._open = False
        # Of the first rank.
        self._file: int | None = None
        # Of those that are to come.
        self._places: dict[str, list[int]] = {}
        self._digests: dict[str, str] | None = None

    def open(self, places: dict[str, list[int]], *, path: str | None, digests: bool) -> None:
        """path: of the file to write to. digests: of each tensor are computed."""
        self.close()
        self._open, self._places = True, dict(places)
        self._file = None if path is None else os.open(path, os.O_WRONLY)
        self._digests = {} if digests else None

    def close(self) -> dict[str, Any]:
        """The tensors that did not come, and the digests of those that came."""
        seen = {"missing": list(self._places), "digests": self._digests or {}}
        file, self._file = self._file, None
        self._open, self._places, self._digests = False, {}, None
        if file is not None:
            os.close(file)
        return seen

    def __call__(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        if not self._open:
            return self._load(weights, *args, **kwargs)
        seen = self._look_at_all(weights)
        result = self._load(seen, *args, **kwargs)
        # A rank may have no use for the last ones.
        for _ in seen:
            pass
        return result

    def _look_at_all(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            begin, end = self._places.pop(name)
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data
            if len(data) != end - begin:
                raise ValueError(f"{name} has {len(data)} bytes, and {end - begin} were announced")
            if self._digests is not None:
                self._digests[name] = hashlib.sha256(data).hexdigest()
            while self._file is not None and begin < end:
                begin += os.pwrite(self._file, data[begin - end :], begin)
            yield name, tensor


class TransferWorker(EXTENSION.Worker):  # type: ignore[misc]
    """Methods that the replica calls by /collective_rpc, which every rank answers, with those of all servers."""

    def midstream_open_tee(self: Any, path: str, places: dict[str, list[int]]) -> None:
        model, parallel = self.weight_transfer_engine.model, self.parallel_config
        if not isinstance(model.load_weights, _Tee):
            model.load_weights = _Tee(model.load_weights)
        several = parallel.world_size * parallel.data_parallel_size > 1
        model.load_weights.open(places, path=path if _is_first(self) else None, digests=several)

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
