"""Sampling by the native kernel; rows with penalties, biases or a grammar go the way of sampler.py.

Always holds: which way a row goes depends on its own parameters alone, so its token does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from midstream.engine.embedded.fused import SUFFIX
from midstream.engine.embedded.native.library import kernels
from midstream.engine.embedded.sampler import (
    GREEDY_BELOW,
    SEED_MASK,
    Sampled,
    SampleRow,
    is_unmodified,
    sample,
    score,
)
from midstream.engine.embedded.ties import near_tie

NEAR_TIES = {dtype: near_tie(dtype) for dtype in SUFFIX}


class NativeSampler:
    """Raises NoCompiler."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        for suffix in SUFFIX.values():
            kernels(suffix)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """One token per row. logits: [rows, vocab] unmodified model output on the CPU."""
        if logits.dtype not in SUFFIX:
            return sample(logits, rows)
        plain = [i for i, row in enumerate(rows) if is_unmodified(row)]
        if len(plain) == len(rows):
            return self._plain(logits, rows)
        others = sorted(set(range(len(rows))) - set(plain))
        zeros = [0.0] * len(rows)
        merged = Sampled([0] * len(rows), zeros, [*zeros], [[] for _ in rows], [0] * len(rows))
        parts = [(others, sample(logits[others], [rows[i] for i in others]))]
        if plain:
            parts.append((plain, self._plain(logits[plain], [rows[i] for i in plain])))
        for where, part in parts:
            for to, found in zip(merged.columns, part.columns, strict=True):
                for i, value in zip(where, found, strict=True):
                    to[i] = value
        return merged

    def score(self, logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
        """Raw log-probability of a given next token per row. logits: [rows, vocab]."""
        if logits.dtype not in SUFFIX:
            return score(logits, targets, top_logprobs)
        counters = np.zeros((len(targets), 3), dtype=np.uint64)
        temperatures = np.ones(len(targets), dtype=np.float32)
        filters = np.zeros((len(targets), 3), dtype=np.float32)
        return self._call(logits, temperatures, filters, counters, np.array(targets), top_logprobs)

    def _plain(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        temperatures = np.array([r.params.temperature for r in rows], dtype=np.float32)
        temperatures[temperatures < GREEDY_BELOW] = 0.0
        filters = np.array([(r.params.top_k, r.params.top_p, r.params.min_p) for r in rows], dtype=np.float32)
        counters = np.array([(r.params.seed & SEED_MASK, r.index, r.position) for r in rows], dtype=np.uint64)
        draw = np.full(len(rows), -1)
        return self._call(logits, temperatures, filters, counters, draw, [r.top_logprobs for r in rows])

    def _call(
        self,
        logits: torch.Tensor,
        temperatures: np.ndarray,
        filters: np.ndarray,
        counters: np.ndarray,
        wanted: np.ndarray,
        top_logprobs: Sequence[int],
    ) -> Sampled:
        """filters: [rows, 3] top_k, top_p, min_p; wanted: [rows] int64, the token to score, or -1 to draw one."""
        logits = logits.contiguous()
        count, vocab = logits.shape
        most = min(max(top_logprobs, default=0), vocab)
        tokens, ids = np.empty(count, dtype=np.int32), np.empty((count, most), dtype=np.int32)
        logprobs = np.empty((2, count), dtype=np.float32)  # raw, then of sampling
        logprobs_at = logprobs.ctypes.data
        values = np.empty((count, most), dtype=np.float32)
        ties = np.empty(count, dtype=np.uint8)
        kernels(SUFFIX[logits.dtype]).sample(
            *(logits.data_ptr(), count, vocab, temperatures.ctypes.data, filters.ctypes.data),
            *(
                counters.ctypes.data,
                wanted.ctypes.data,
                NEAR_TIES[logits.dtype],
                tokens.ctypes.data,
                logprobs_at,
                logprobs_at + 4 * count,
                ties.ctypes.data,
            ),
            *(most, ids.ctypes.data, values.ctypes.data, self._threads),
        )
        top: list[list[tuple[int, float]]] = [[] for _ in top_logprobs]
        if most:
            pairs = zip(ids.tolist(), values.tolist(), top_logprobs, strict=True)
            top = [list(zip(i[:n], v[:n], strict=True)) for i, v, n in pairs]
        raw, sampling = logprobs.tolist()
        return Sampled(tokens.tolist(), raw, sampling, top, ties.tolist())
