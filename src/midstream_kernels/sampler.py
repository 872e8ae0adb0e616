"""Sampling and scoring with the CPU kernel: one token per row of unmodified logits, without writing a probability down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from midstream_kernels.build import kernels
from midstream_kernels.decoder import SUFFIX
from midstream_kernels.tables import addresses

#: One entry per row: token, log-probability, sampling log-probability, best alternatives, bits of near ties.
Columns = tuple[list[int], list[float], list[float], list[list[tuple[int, float]]], list[int]]


class RowMasks:
    """Where the kernel writes which tokens it drew each row from, as midstream's core/masks.py has it."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.sizes = np.empty(rows, dtype=np.int32)
        self.data = np.empty((rows, vocab // 8 + 2), dtype=np.uint8)

    def all(self) -> list[bytes]:
        """By row; nothing where nothing was filtered."""
        data, width = self.data.tobytes(), self.data.shape[1]
        return [data[at * width : at * width + size] for at, size in enumerate(self.sizes.tolist())]


class CpuSampler:
    """The kernel draws the same numbers as engine/embedded/sampler.py, but penalises, biases and masks nothing."""

    def __init__(self, threads: int) -> None:
        """Raises KernelsUnavailable."""
        self._threads = threads
        for suffix in SUFFIX.values():
            kernels(suffix)

    @staticmethod
    def takes(logits: torch.Tensor) -> bool:
        return logits.dtype in SUFFIX

    def sample(
        self,
        logits: torch.Tensor,
        temperatures: np.ndarray,
        filters: np.ndarray,
        counters: np.ndarray,
        near_tie: float,
        top_logprobs: Sequence[int],
        masks: RowMasks | None = None,
    ) -> Columns:
        """One token per row, drawn after temperature and filters. logits: [rows, vocab].

        temperatures: [rows] float32, 0 for a greedy choice. filters: [rows, 3] float32: top_k, top_p, min_p.
        counters: [rows, 3] uint64: seed, choice, position. near_tie: logits within this share of the largest one are near ties.
        masks: get the tokens that each row was drawn from.
        """
        draw = np.full(len(temperatures), -1)
        return self._call(logits, temperatures, filters, counters, draw, near_tie, top_logprobs, masks)

    def score(self, logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Columns:
        """The raw log-probability of a given next token per row. logits: [rows, vocab]. No row is a near tie."""
        count = len(targets)
        counters = np.zeros((count, 3), dtype=np.uint64)
        temperatures, filters = np.ones(count, dtype=np.float32), np.zeros((count, 3), dtype=np.float32)
        return self._call(logits, temperatures, filters, counters, np.array(targets), 0.0, top_logprobs)

    def _call(
        self,
        logits: torch.Tensor,
        temperatures: np.ndarray,
        filters: np.ndarray,
        counters: np.ndarray,
        wanted: np.ndarray,
        near_tie: float,
        top_logprobs: Sequence[int],
        masks: RowMasks | None = None,
    ) -> Columns:
        """wanted: [rows] int64, the token to score, or -1 to draw one."""
        logits = logits.contiguous()
        count, vocab = logits.shape
        most = min(max(top_logprobs, default=0), vocab)
        tokens, ids = np.empty(count, dtype=np.int32), np.empty((count, most), dtype=np.int32)
        raw, sampling = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        values = np.empty((count, most), dtype=np.float32)
        ties = np.empty(count, dtype=np.uint8)
        given, taken = (temperatures, filters, counters, wanted), (tokens, raw, sampling, ties, ids, values)
        at = addresses((*given, *taken))
        left = (0, 0) if masks is None else addresses((masks.sizes, masks.data))
        kernels(SUFFIX[logits.dtype]).sample(
            *(logits.data_ptr(), count, vocab, *at[:4], near_tie, *at[4:8]),
            *(most, *at[8:], *left, self._threads),
        )
        top: list[list[tuple[int, float]]] = [[] for _ in top_logprobs]
        if most:
            pairs = zip(ids.tolist(), values.tolist(), top_logprobs, strict=True)
            top = [list(zip(i[:n], v[:n], strict=True)) for i, v, n in pairs]
        return tokens.tolist(), raw.tolist(), sampling.tolist(), top, ties.tolist()
