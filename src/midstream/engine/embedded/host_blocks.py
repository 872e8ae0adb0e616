"""What the second tier of the KV cache holds: the keys and values of blocks, in host memory or in a file.

Owns: that memory, and copying blocks between it and the cache of the model.
Always holds: a block is moved with everything that is kept for it: keys and values of all layers, commits, scores. A file has
no name. So nobody else opens it, and it is gone with the process. Its bytes are reserved at the start.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from midstream.core.config import EngineSettings, parse_size
from midstream.core.errors import ConfigError
from midstream.engine.embedded.blocks import BlockPool
from midstream.engine.embedded.model_runner import ModelRunner
from midstream.engine.embedded.offload import CopyPrice, Offload
from midstream.engine.embedded.provenance import Provenance
from midstream.engine.embedded.token_scores import ScoreStore

SETTING = "embedded.kv_offload_memory"


class HostBlocks:
    """planes: of each tensor of the cache, a row of bytes for each block. memory: as many bytes as the blocks have; None: there
    is no second tier. row_bytes: of a block."""

    def __init__(self, planes: Sequence[torch.Tensor], memory: torch.Tensor | None, block_size: int) -> None:
        self._planes = planes
        # Where the bytes of each plane stand in a block here.
        self._places = list(pairwise((0, *accumulate(plane.shape[1] for plane in planes))))
        self.row_bytes = self._places[-1][1]
        self._first = len(planes[0])
        self._block_size = block_size
        memory = torch.empty(0, dtype=torch.uint8) if memory is None else memory
        self._blocks = memory.view(len(memory) // self.row_bytes, self.row_bytes)
        self.total = len(self._blocks)
        self.price = CopyPrice()

    @staticmethod
    def opened(runner: ModelRunner, blocks: int, settings: EngineSettings, folder: Path | None) -> HostBlocks:
        """blocks: of the cache. It has none of its own where the settings want no second tier. Raises ConfigError."""
        planes: list[torch.Tensor] = runner.cache.planes(blocks)
        if settings.kv_offload_memory is None:
            return HostBlocks(planes, None, settings.block_size)
        size = sum(plane.shape[1] for plane in planes)
        total = parse_size(SETTING, settings.kv_offload_memory) // size
        if not total:
            raise ConfigError(
                f"{SETTING} {settings.kv_offload_memory}: a block of the KV cache has {size} bytes"
            )
        on_disk = settings.kv_offload_to == "disk"
        memory = _memory(total * size, (folder or Path(tempfile.gettempdir())) if on_disk else None)
        return HostBlocks(planes, torch.frombuffer(memory, dtype=torch.uint8), settings.block_size)

    def offload(self, scores: ScoreStore, provenance: Provenance) -> Offload | None:
        """The books of this memory, if there is any. scores, provenance: of all blocks, these included."""
        if not self.total:
            return None

        def move(source: int, target: int) -> None:
            scores.move(source, target)
            provenance.move(source, target)
            self.copy(source, target)

        def merge(source: int, target: int) -> None:
            scores.merge(source, target)

        return Offload(self._first, self.total, move=move, merge=merge, price=self.price)

    def copy(self, source: int, target: int) -> None:
        """One of the two blocks is here, and the other in the cache of the model."""
        began = time.perf_counter()
        back = source >= self._first
        here, there = (source, target) if back else (target, source)
        row = self._blocks[here - self._first]
        if back:
            self.write(there, row)
            self.price.copied(self._block_size, time.perf_counter() - began)
        else:
            self.read(there, row)

    def read(self, block: int, row: torch.Tensor) -> None:
        """Copy a block of either tier into a row of bytes."""
        if block >= self._first:
            row.copy_(self._blocks[block - self._first])
            return
        for plane, (first, last) in zip(self._planes, self._places, strict=True):
            row[first:last].copy_(plane[block])

    def write(self, block: int, row: torch.Tensor) -> None:
        """Copy a row of bytes into a block of the cache."""
        for plane, (first, last) in zip(self._planes, self._places, strict=True):
            plane[block].copy_(row[first:last])


def kv_books(
    runner: ModelRunner, blocks: int, settings: EngineSettings, folder: Path | None
) -> tuple[BlockPool, ScoreStore, Provenance, HostBlocks]:
    """The books of a cache of so many blocks, and of its second tier if the settings want one, as a file in `folder` or in
    memory. Raises ConfigError."""
    host, size = HostBlocks.opened(runner, blocks, settings, folder), settings.block_size
    total = blocks + host.total
    scores = ScoreStore(total, size, runner.route_bytes)
    provenance = Provenance(total, size, runner.weights)
    return BlockPool(blocks, size, host.offload(scores, provenance)), scores, provenance, host


def _memory(size: int, folder: Path | None) -> mmap.mmap:
    """In a file there; None: in memory. Raises ConfigError where there is no room for it."""
    try:
        return mmap.mmap(-1, size) if folder is None else _file(size, folder)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{SETTING}: {size} bytes in {folder or 'memory'}: {reason}") from error


def _file(size: int, folder: Path) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # A page without room would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)
