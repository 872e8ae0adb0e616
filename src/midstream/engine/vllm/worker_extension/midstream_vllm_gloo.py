"""A backend of vLLM's weight transfer over `torch.distributed` with gloo, for workers on CPUs. It runs inside vLLM's workers.

The trainer's end is that of midstream's push, whose form of the bytes is in midstream/core/transfer.py. Rank 0 broadcasts, and
each worker is a rank. Nothing is unpickled. What hangs is ended from outside.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

PREFIX = "midstream"
PIECE_BYTES = 64 * 2**20
#: The replica ends a worker that waits too long. It waits for less.
TIMEOUT_S = 24 * 3600.0

_distributed: Any = torch.distributed


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    key: str = field(default="", repr=False)
    packed: bool = True
    packed_buffer_size_bytes: int = PIECE_BYTES
    packed_num_buffers: int = 2


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Whole tensors of a checkpoint, by the model's own `load_weights`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    #: Each tensor has memory of its own, to which nothing else is written.
    own_memory = True

    _group: Any = None
    _info: GlooInitInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=TIMEOUT_S)
        store = _distributed.TCPStore(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
        options = _distributed.ProcessGroupGloo._Options()
        options._timeout = timeout
        # Other members reach this machine as it reaches the store.
        host = _own_address(init_info.master_address, init_info.master_port)
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        named = _distributed.PrefixStore(f"{PREFIX}/{init_info.key}", store)
        rank = init_info.rank_offset + own
        self._group = _distributed.ProcessGroupGloo(named, rank, init_info.world_size, options)
        self._info = init_info

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator then, and there may be none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("the worker is in no group")
        self.model.load_weights(self._tensors(update_info))

    def shutdown(self) -> None:
        self._group = None

    def _tensors(self, info: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """In new memory each, since vLLM keeps some until their layer is whole."""
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(info.shapes, dtypes, strict=True)]
        pieces = _Pieces(self._broadcast, sum(sizes), self._info.packed_buffer_size_bytes)
        for name, dtype, shape, size in zip(info.names, dtypes, info.shapes, sizes, strict=True):
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
            if self._info.packed:
                pieces.fill(data)
            elif size:
                self._broadcast(data)
            yield name, data.view(dtype).reshape(shape)

    def _broadcast(self, target: torch.Tensor) -> None:
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([target], options).wait()


class _Pieces:
    """The bytes of all tensors of a call, which come in pieces of one size, but for the last."""

    def __init__(self, broadcast: Any, total: int, piece_bytes: int) -> None:
        self._broadcast = broadcast
        self._left = total
        self._memory = torch.empty(min(piece_bytes, total), dtype=torch.uint8, device="cpu")
        # Of the last piece: what no tensor has taken yet.
        self._rest = self._memory[:0]

    def fill(self, target: torch.Tensor) -> None:
        while target.numel():
            if not self._rest.numel():
                self._rest = self._memory[: min(self._left, self._memory.numel())]
                self._broadcast(self._rest)
                self._left -= self._rest.numel()
            count = min(target.numel(), self._rest.numel())
            target[:count] = self._rest[:count]
            target, self._rest = target[count:], self._rest[count:]


def _own_address(address: str, port: int) -> str:
    """The address of this machine that a connection to there has."""
    with socket.create_connection((address, port), timeout=10) as probe:
        host: str = probe.getsockname()[0]
    return host
