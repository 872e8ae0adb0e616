"""What a replica measures of its turns and swaps, in buckets, and how they ended.

Always holds: counts only grow while the process lives, over all boots of its engine. An observation adds to plain integers.
"""

from __future__ import annotations

from bisect import bisect_left

from midstream.core.measures import COUNTS, MEASURES, Distribution, Trajectories


class Measures:
    def __init__(self) -> None:
        self._measures = {name: Distribution([0] * (len(bounds) + 1)) for name, bounds in MEASURES.items()}
        self._counts = {name: dict.fromkeys(values, 0) for name, values in COUNTS.items()}

    def observe(self, measure: str, value: float) -> None:
        """measure: of MEASURES."""
        found = self._measures[measure]
        found.counts[bisect_left(MEASURES[measure], value)] += 1
        found.sum += value

    def count(self, what: str, value: str) -> None:
        """what, value: of COUNTS."""
        self._counts[what][value] += 1

    def told(self) -> Trajectories:
        """Everything since the process began. It changes with what is measured."""
        return Trajectories(measures=self._measures, counts=self._counts)
