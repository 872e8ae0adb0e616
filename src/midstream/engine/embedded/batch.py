"""The planned work of a step as a batch of arrays. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from midstream.engine.embedded.blocks import SCRATCH_SLOT
from midstream.engine.embedded.scheduler import Work
from midstream.engine.step import StepBatch


def pack(works: Sequence[Work], block_size: int) -> StepBatch:
    firsts = np.array([w.first for w in works])
    sizes = np.array([w.last for w in works]) - firsts
    blocks = np.fromiter(chain.from_iterable(w.seq.blocks for w in works), dtype=np.int32)
    offsets = _starts(np.array([len(w.seq.blocks) for w in works]))
    rows = _starts(sizes)
    sequence = np.repeat(np.arange(len(works)), sizes)
    positions = np.arange(len(sequence)) + (firsts - rows)[sequence]
    block = blocks[offsets[sequence] + positions // block_size]
    slots = block * np.int64(block_size) + positions % block_size
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
    """One whole sequence, in a cache of its own that it fills from block 0 on."""
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
