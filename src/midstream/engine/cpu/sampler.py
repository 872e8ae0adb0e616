"""Sampling and scoring with the CPU kernel: one token per row of unmodified logits, without writing a probability down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from midstream.engine.cpu.build import kernels
from midstream.engine.cpu.decoder import SUFFIX
from midstream.engine.step import GREEDY_BELOW, SEED_MASK, Sampled, SampleRow, near_tie


class CpuSampler:
    """The kernel draws the same numbers as embedded/sampler.py, but penalises, biases and masks nothing."""

    def __init__(self, threads: int) -> None:
        """Raises KernelsUnavailable."""
        self._threads = threads
        for suffix in SUFFIX.values():
            kernels(suffix)

    @staticmethod
    def takes(logits: torch.Tensor) -> bool:
        return logits.dtype in SUFFIX

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """One token per row, drawn after temperature and filters. logits: [rows, vocab]."""
        temperatures = np.array([r.params.temperature for r in rows], dtype=np.float32)
        temperatures[temperatures < GREEDY_BELOW] = 0.0
        filters = np.array([(r.params.top_k, r.params.top_p, r.params.min_p) for r in rows], dtype=np.float32)
        counters = np.array([(r.params.seed & SEED_MASK, r.index, r.position) for r in rows], dtype=np.uint64)
        draw = np.full(len(rows), -1)
        return self._call(logits, temperatures, filters, counters, draw, [r.top_logprobs for r in rows])

    def score(self, logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
        """The raw log-probability of a given next token per row. logits: [rows, vocab]."""
        count = len(targets)
        counters = np.zeros((count, 3), dtype=np.uint64)
        temperatures, filters = np.ones(count, dtype=np.float32), np.zeros((count, 3), dtype=np.float32)
        return self._call(logits, temperatures, filters, counters, np.array(targets), top_logprobs)

    def _call(
        self,
        logits: torch.Tensor,
        temperatures: np.ndarray,
        filters: np.ndarray,
        counters: np.ndarray,
        wanted: np.ndarray,
        top_logprobs: Sequence[int],
    ) -> Sampled:
        """filters: [rows, 3] top_k, top_p, min_p. wanted: [rows] int64, the token to score, or -1 to draw one."""
        logits = logits.contiguous()
        count, vocab = logits.shape
        most = min(max(top_logprobs, default=0), vocab)
        tokens, ids = np.empty(count, dtype=np.int32), np.empty((count, most), dtype=np.int32)
        raw, sampling = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        values = np.empty((count, most), dtype=np.float32)
        ties = np.empty(count, dtype=np.uint8)
        kernels(SUFFIX[logits.dtype]).sample(
            *(logits.data_ptr(), count, vocab, temperatures.ctypes.data, filters.ctypes.data),
            *(counters.ctypes.data, wanted.ctypes.data, near_tie(logits.dtype), tokens.ctypes.data),
            *(raw.ctypes.data, sampling.ctypes.data, ties.ctypes.data),
            *(most, ids.ctypes.data, values.ctypes.data, self._threads),
        )
        top: list[list[tuple[int, float]]] = [[] for _ in top_logprobs]
        if most:
            pairs = zip(ids.tolist(), values.tolist(), top_logprobs, strict=True)
            top = [list(zip(i[:n], v[:n], strict=True)) for i, v, n in pairs]
        return Sampled(tokens.tolist(), raw.tolist(), sampling.tolist(), top, ties.tolist())
