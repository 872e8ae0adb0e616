"""Threads that share one job: copying the weights of a model.

Always holds: when the `with` block is left, no thread of it runs any more, however it is left. At most PIECES_AHEAD pieces for
each thread are begun or wait, so that what they read and write stays bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

PIECES_AHEAD = 4


class Gang:
    """threads: how many copy at a time. They have the priority of the thread that enters the block. 1: the caller copies."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "packing") if threads > 1 else None
        self._pieces: deque[Future[None]] = deque()

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            while self._pieces:
                self._pieces.popleft().result()

    def split(self, work: Callable[[int, int], None], count: int, piece: int) -> None:
        """Have `work(first, last)` called for all of 0..count, `piece` at a time, in any order. It raises later, if it does."""
        for first in range(0, count, piece):
            last = min(first + piece, count)
            if self._pool is None:
                work(first, last)
                continue
            while len(self._pieces) >= self._threads * PIECES_AHEAD:
                self._pieces.popleft().result()
            self._pieces.append(self._pool.submit(work, first, last))
