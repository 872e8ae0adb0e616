"""A worker extension of vLLM, on any device, for servers into which trainers write weights (--weight-transfer-config).

It registers the backend `gloo` in vLLM's factory, and shows what any backend brings: the first rank writes each tensor that
passes `load_weights` into a file, too, at a place that the replica chose. What other ranks get is not compared. It loads the
extension of all servers, too (midstream_vllm_worker.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

EXTENSION = "midstream_vllm_worker"
GLOO = ("gloo", "midstream_vllm_gloo", "GlooWeightTransferEngine")


class _Tee:
    """Stands before the `load_weights` of a model. While a file is open, what passes is written there."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._file: int | None = None
        self._places: dict[str, list[int]] = {}

    def open(self, path: str, places: dict[str, list[int]]) -> None:
        self.close()
        self._file, self._places = os.open(path, os.O_WRONLY), dict(places)

    def close(self) -> list[str]:
        """The tensors that did not come."""
        missing, self._places = list(self._places), {}
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        return missing

    def __call__(self, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        if self._file is None:
            return self._load(weights, *args, **kwargs)
        seen = self._write_all(self._file, weights)
        result = self._load(seen, *args, **kwargs)
        # A rank may have no use for the last ones.
        for _ in seen:
            pass
        return result

    def _write_all(self, file: int, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            begin, end = self._places.pop(name)
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data
            if len(data) != end - begin:
                raise ValueError(f"{name} has {len(data)} bytes, and {end - begin} were announced")
            while begin < end:
                begin += os.pwrite(file, data[begin - end :], begin)
            yield name, tensor


class TransferWorker:
    """Methods that the replica calls by /collective_rpc. Those of the tee answer None at other ranks than the first."""

    def midstream_one_number(self: Any) -> str:
        return str(importlib.import_module(EXTENSION).Worker.midstream_one_number(self))

    def midstream_open_tee(self: Any, path: str, places: dict[str, list[int]]) -> None:
        if _is_first(self):
            model = self.weight_transfer_engine.model
            if not isinstance(model.load_weights, _Tee):
                model.load_weights = _Tee(model.load_weights)
            model.load_weights.open(path, places)

    def midstream_close_tee(self: Any) -> list[str] | None:
        return self.weight_transfer_engine.model.load_weights.close() if _is_first(self) else None


def _is_first(worker: Any) -> bool:
    return bool(worker.rank == 0 and worker.parallel_config.data_parallel_index == 0)


def _register() -> None:
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    # vLLM refuses a name that it has.
    with contextlib.suppress(ValueError):
        factory.WeightTransferEngineFactory.register_engine(*GLOO)
    importlib.import_module(EXTENSION)


_register()
