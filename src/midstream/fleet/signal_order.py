"""The order in which a deployment's snapshots were signalled. Pure.

Always holds: snapshots are ordered by their last signal; the base weights of a start come before all. One that is not among the
newest KEPT signals has no place in that order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from midstream.core.types import BASE_SNAPSHOT
from midstream.ledger.records import Signalled

# Signals that are kept.
KEPT = 1024


class SignalOrder:
    """The order in which a deployment's snapshots were signalled. reset: the generation under which all were forgotten."""

    def __init__(self) -> None:
        self._clear(0)

    def _clear(self, reset: int) -> None:
        self.reset = reset
        self._generations: dict[str, int] = {BASE_SNAPSHOT: 0}
        self._names: dict[int, str] = {0: BASE_SNAPSHOT}
        self._sorted = [0]
        # The highest generation of a ready snapshot.
        self._ready = 0

    def __repr__(self) -> str:
        return f"SignalOrder({len(self._sorted) - 1} signals, the last one {self.desired!r})"

    @property
    def desired(self) -> str:
        """What was signalled last."""
        return self._names[self._sorted[-1]]

    def learn(self, signals: Iterable[Signalled], reset: int = 0) -> None:
        """Signals in any order, known ones too. reset: of the last reset; what was known before a newer one is forgotten."""
        if reset > self.reset:
            self._clear(reset)
        for signal in signals:
            self._learn(*signal)

    def ready(self, snapshot: str, generation: int) -> None:
        """It is on a replica, which got it as its target under `generation`."""
        position = self._generations.get(snapshot, 0)
        if self._ready < position <= generation:
            self._ready = position

    def signals(self) -> tuple[Signalled, ...]:
        """All that is known, for `learn`, in order."""
        known = ((self._names[generation], generation) for generation in self._sorted[1:])
        return tuple(Signalled(name, at, at <= self._ready) for name, at in known)

    def position(self, snapshot: str) -> int | None:
        """Greater for what was signalled later; None: it is not known."""
        return self._generations.get(snapshot)

    def newest(self, served: Iterable[str]) -> int:
        """The position of the newest snapshot that was ready, or is served."""
        newest = max(self._ready, *(self._generations.get(name, 0) for name in (*served, BASE_SNAPSHOT)))
        # A snapshot may have been signalled again after its first signal.
        return self._sorted[bisect_right(self._sorted, newest) - 1]

    def name(self, position: int) -> str:
        return self._names[position]

    def latest(self, count: int) -> list[str]:
        """The snapshots that were signalled last, the newest first; `count` at most."""
        return [self._names[at] for at in reversed(self._sorted[1:][-count:])]

    def between(self, older: int, newer: int) -> int:
        """How many snapshots `older` is behind `newer`, 0 when it is not."""
        return max(0, bisect_left(self._sorted, newer) - bisect_left(self._sorted, older))

    def behind(self, snapshot: str) -> int:
        """How many signals came after it: all that are known, where it is not."""
        return self.between(self._generations.get(snapshot, 0), self._sorted[-1])

    def _learn(self, snapshot: str, generation: int, ready: bool) -> None:
        before = self._generations.get(snapshot)
        if before is not None and before < generation:
            self._forget(before)
        if before is None or before < generation:
            self._generations[snapshot], self._names[generation] = generation, snapshot
            insort(self._sorted, generation)
            if len(self._sorted) > KEPT + 1:
                self._forget(self._sorted[1])
        if ready:
            self.ready(snapshot, generation)

    def _forget(self, generation: int) -> None:
        del self._generations[self._names.pop(generation)]
        del self._sorted[bisect_right(self._sorted, generation) - 1]
