"""Which rows of a step need logits, what the sampler is told of them, and which sequences' numbers are no good.

Always holds: rows are in one order everywhere: prompt scores, then samples, then ends. Pure but for tensor arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from midstream.engine.embedded.sampler import Sampled, SampleRow
from midstream.engine.embedded.scheduler import Sequence, Work


@dataclass(frozen=True)
class Rows:
    """Which packed tokens need logits: `scores` for prompt records, then `samples`, then `ends`."""

    scores: list[tuple[Work, int, int]]  # work, position whose pass scores position + 1, packed row
    samples: list[tuple[Work, int]]  # work, packed row
    ends: list[tuple[Work, int]]  # the same for prompts not yet complete: only to see that their KV is good

    @property
    def packed(self) -> list[int]:
        return [row for _, _, row in self.scores] + [row for _, row in (*self.samples, *self.ends)]


def rows_needed(works: list[Work]) -> Rows:
    scores: list[tuple[Work, int, int]] = []
    samples: list[tuple[Work, int]] = []
    ends: list[tuple[Work, int]] = []
    row = 0
    for work in works:
        seq, first, last, _ = work
        if first < seq.prompt_len - 1:  # not a decode
            unscored = max(first, seq.first_scored - 1)
            scores.extend((work, p, row + p - first) for p in range(unscored, min(last, seq.prompt_len - 1)))
        row += last - first
        (samples if last == len(seq.tokens) else ends).append((work, row - 1))
    return Rows(scores, samples, ends)


def sample_rows(rows: Rows) -> list[SampleRow]:
    return [
        SampleRow(
            params=work.seq.request.sampling,
            index=work.seq.index,
            position=len(work.seq.tokens),
            history=work.seq.tokens,
            prompt_len=work.seq.prompt_len,
            top_logprobs=work.seq.request.top_logprobs,
            mask=None if work.seq.matcher is None else work.seq.matcher.mask(),
        )
        for work, _ in rows.samples
    ]


def not_finite(rows: Rows, sampled: Sampled | None, ends: torch.Tensor) -> set[Sequence]:
    """The sequences whose sample has no finite log-probability, or whose prompt so far gave logits that are not.

    ends: [rows.ends, vocab]. The last row looks at all KV before it, so it shows what is wrong with any of it.
    """
    broken: set[Sequence] = set()
    if sampled is not None and not all(map(math.isfinite, sampled.logprobs)):
        pairs = zip(rows.samples, sampled.logprobs, strict=True)
        broken |= {work.seq for (work, _), logprob in pairs if not math.isfinite(logprob)}
    if rows.ends and not torch.isfinite(ends).all():
        good = torch.isfinite(ends).all(-1).tolist()
        broken |= {work.seq for (work, _), fine in zip(rows.ends, good, strict=True) if not fine}
    return broken
