"""The planned work of a step as arrays: its batch, the rows with needed logits, and the sampler's input.

Always holds: rows of logits are in one order everywhere: prompt scores, then samples, then ends. Pure but for tensor
arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from midstream.engine.embedded.blocks import SCRATCH_SLOT
from midstream.engine.embedded.scheduler import Sequence, StepWork
from midstream.engine.step import Sampled, SampleRow, StepBatch


def pack(works: list[StepWork], block_size: int) -> StepBatch:
    tables = [w.seq.blocks for w in works]
    blocks = np.fromiter(chain.from_iterable(tables), dtype=np.int32)
    offsets = [0, *accumulate(map(len, tables))]
    last = works[-1]
    # Decodes come first.
    if last.last - last.first == 1:
        return _decodes(works, blocks, offsets, block_size)
    firsts = np.array([w.first for w in works])
    sizes = np.array([w.last for w in works]) - firsts
    rows = sizes.cumsum() - sizes
    sequence = np.arange(len(works)).repeat(sizes)
    positions = np.arange(len(sequence)) + (firsts - rows)[sequence]
    starts = np.array(offsets[:-1])
    block = blocks[starts[sequence] + positions // block_size]
    slots = block * np.int64(block_size) + positions % block_size
    write_from = np.array([w.write_from for w in works])
    spans = np.empty((len(works), 4), dtype=np.int32)
    spans[:, 0], spans[:, 1], spans[:, 2], spans[:, 3] = rows, sizes, firsts, starts
    return StepBatch(
        ids=np.fromiter(chain.from_iterable([w.seq.tokens[w.first : w.last] for w in works]), dtype=np.int64),
        positions=positions,
        slots=np.where(positions >= write_from[sequence], slots, SCRATCH_SLOT),
        spans=spans,
        blocks=blocks,
        block_size=block_size,
    )


def _decodes(works: list[StepWork], blocks: np.ndarray, offsets: list[int], block_size: int) -> StepBatch:
    """The same of works of one token each. Most steps have no other, and arithmetic of arrays would take most of their time."""
    tokens, spans = [], []
    for row, work in enumerate(works):
        at, seq = work.first, work.seq
        slot = seq.blocks[at // block_size] * block_size + at % block_size
        tokens.append((seq.tokens[at], at, slot if at >= work.write_from else SCRATCH_SLOT))
        spans.append((row, 1, at, offsets[row]))
    ids, positions, slots = np.array(list(zip(*tokens, strict=True)), dtype=np.int64)
    return StepBatch(ids, positions, slots, np.array(spans, dtype=np.int32), blocks, block_size)


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


@dataclass(frozen=True)
class LogitRows:
    """The tokens of the batch that need logits. A row is the index of a token in the batch.

    scores: for prompt records, as (work, position, row): the pass at a position scores the next one. samples: (work, row).
    ends: the same for prompts that are not complete yet. Their logits only show whether the KV is good.
    """

    scores: list[tuple[StepWork, int, int]]
    samples: list[tuple[StepWork, int]]
    ends: list[tuple[StepWork, int]]

    @property
    def packed(self) -> list[int]:
        return [row for _, _, row in self.scores] + [row for _, row in (*self.samples, *self.ends)]


def rows_needed(works: list[StepWork]) -> LogitRows:
    scores: list[tuple[StepWork, int, int]] = []
    samples: list[tuple[StepWork, int]] = []
    ends: list[tuple[StepWork, int]] = []
    row = 0
    for work in works:
        seq, first, last = work.seq, work.first, work.last
        # A decode scores no prompt token.
        if first < seq.prompt_len - 1:
            unscored = max(first, seq.first_scored - 1)
            scores.extend((work, p, row + p - first) for p in range(unscored, min(last, seq.prompt_len - 1)))
        row += last - first
        (samples if last == len(seq.tokens) else ends).append((work, row - 1))
    return LogitRows(scores, samples, ends)


def sample_rows(rows: LogitRows) -> list[SampleRow]:
    return [
        SampleRow(
            params=work.seq.request.sampling,
            index=work.seq.index,
            position=len(work.seq.tokens),
            history=work.seq.tokens,
            prompt_len=work.seq.prompt_len,
            top_logprobs=work.seq.request.top_logprobs,
            mask=None if work.seq.matcher is None else work.seq.matcher.mask(),
            wants_mask=work.seq.request.want_masks,
        )
        for work, _ in rows.samples
    ]


def not_finite(rows: LogitRows, sampled: Sampled | None, ends: torch.Tensor) -> set[Sequence]:
    """The sequences with a sample without a finite log-probability, or with logits of an unfinished prompt that are not finite.

    ends: [rows.ends, vocab]. The last token of a prompt looks at all KV before it, so its logits show any fault in it.
    """
    broken: set[Sequence] = set()
    if sampled is not None and not all(map(math.isfinite, sampled.logprobs)):
        pairs = zip(rows.samples, sampled.logprobs, strict=True)
        broken |= {work.seq for (work, _), logprob in pairs if not math.isfinite(logprob)}
    if rows.ends and not torch.isfinite(ends).all():
        good = torch.isfinite(ends).all(-1).tolist()
        broken |= {work.seq for (work, _), fine in zip(rows.ends, good, strict=True) if not fine}
    return broken
