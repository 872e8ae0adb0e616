"""What one step computes, as arrays: the same for every way of running the model. No torch.

Always holds: the rows of a sequence are contiguous, in order of position, and are the last of its positions so far; rows
whose KV must not count write to the scratch slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from midstream.engine.embedded.blocks import SCRATCH_SLOT
from midstream.engine.embedded.scheduler import Work


@dataclass(frozen=True)
class StepBatch:
    """Rows of all sequences, packed."""

    ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    slots: np.ndarray  # [tokens] int64, where each row's KV goes
    spans: (
        np.ndarray
    )  # [sequences, 4] int32: first row, rows, position of the first row, its first entry in `blocks`
    blocks: np.ndarray  # int32, the block tables one after the other
    block_size: int

    def table(self, sequence: int) -> np.ndarray:
        """Slots of positions 0 to the sequence's last, int64."""
        _, rows, first, at = self.spans[sequence].tolist()
        end = first + rows
        blocks = self.blocks[at : at + -(-end // self.block_size)].astype(np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[:end]


def pack(works: Sequence[Work], block_size: int) -> StepBatch:
    firsts = np.array([w.first for w in works])
    sizes = np.array([w.last for w in works]) - firsts
    blocks = np.fromiter(chain.from_iterable(w.seq.blocks for w in works), dtype=np.int32)
    offsets = _starts(np.array([len(w.seq.blocks) for w in works]))
    rows = _starts(sizes)
    sequence = np.repeat(np.arange(len(works)), sizes)
    positions = np.arange(len(sequence)) + (firsts - rows)[sequence]
    slots = (
        blocks[offsets[sequence] + positions // block_size] * np.int64(block_size) + positions % block_size
    )
    write_from = np.array([w.write_from for w in works])
    return StepBatch(
        ids=np.fromiter(chain.from_iterable(w.seq.tokens[w.first : w.last] for w in works), dtype=np.int64),
        positions=positions,
        slots=np.where(positions >= write_from[sequence], slots, SCRATCH_SLOT),
        spans=np.stack((rows, sizes, firsts, offsets), axis=1).astype(np.int32),
        blocks=blocks,
        block_size=block_size,
    )


def alone(ids: np.ndarray, block_size: int) -> StepBatch:
    """A whole sequence in a cache of its own, from block 0 on."""
    tokens = len(ids)
    return StepBatch(
        ids=ids,
        positions=np.arange(tokens),
        slots=np.arange(tokens),
        spans=np.array([[0, tokens, 0, 0]], dtype=np.int32),
        blocks=np.arange(-(-tokens // block_size), dtype=np.int32),
        block_size=block_size,
    )


def _starts(sizes: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.cumsum(sizes) - sizes
    return starts
