"""The disk and the database of simulated processes: full, slow to take bytes, or out of order when the weather is bad.

Always holds: a write that fails wrote nothing. One that writes less says so. A transaction that is answered with an error was
rolled back, or, where its answer was lost, is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from midstream.ledger.database import Database, LedgerUnavailable

_PWRITE, _FSYNC = os.pwrite, os.fsync
_BEGIN = Database._begin


@dataclass
class Trouble:
    """Shares: of writes that find the disk full, of writes that take only a part, of transactions that fail, and of those that
    are done though their caller learns of a failure."""

    full: float = 0.0
    short: float = 0.0
    ledger_fails: float = 0.0
    answer_lost: float = 0.0


class Disk:
    """rng: for the database. A write's fate follows from what it writes and when: threads may write in any order."""

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._rng, self._clock = rng, clock
        self.trouble = Trouble()
        #: The transaction that runs is done, and its caller learns of a failure.
        self.lose_answer = False

    def pwrite(self, file: int, data: Any, position: int) -> int:
        view = memoryview(data).cast("B")
        fate = self._fate(position, len(view))
        if len(view) > 1 and fate.random() < self.trouble.short:
            view = view[: fate.randrange(1, len(view))]
        return _PWRITE(file, view, position)

    def fsync(self, file: int) -> None:
        self._fate(os.fstat(file).st_size)
        _FSYNC(file)

    def reserve(self, file: int, size: int) -> None:
        """In place of `fallocate`. Raises OSError where the disk is full."""
        self._fate(size)

    def _fate(self, *of: int) -> random.Random:
        """Raises OSError where the disk is full for this write."""
        fate = random.Random(f"{self._clock()} {of}")
        if fate.random() < self.trouble.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fate

    @contextlib.contextmanager
    def begin(self, database: Database, engine: Any) -> Iterator[Any]:
        """In place of Database._begin."""
        if self._rng.random() < self.trouble.ledger_fails:
            raise LedgerUnavailable("the ledger cannot be used now: the simulated database is out of order")
        with _BEGIN(database, engine) as db:
            yield db
        lost, self.lose_answer = self.lose_answer, False
        if self._rng.random() < self.trouble.answer_lost or lost:
            raise LedgerUnavailable("the ledger cannot be used now: the simulated answer was lost")
