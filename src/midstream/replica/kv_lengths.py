"""The latest values of what was measured, how far sessions come, and what those that grow have at one time. Pure.

Always holds: at most LEARNED_FROM values are kept, the latest. A session that is under way says of the lengths that it has
passed that it did not end there. So the first ones that end, which are the short ones, are not taken for all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

LEARNED_FROM = 256
ROUNDING = 1e-9
#: Lengths are judged again when one of so many is new.
JUDGED_AGAIN = 16
#: A session is expected to end at one of these shares of what others came to, each as likely. The shortest fifth is left out,
#: as a margin.
ENDS_AT = (0.4, 0.6, 0.8, 0.99)


@dataclass(eq=False, slots=True)
class Recent:
    """The latest values, and quantiles of them."""

    _values: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == LEARNED_FROM:
            del self.ordered[bisect_right(self.ordered, self._values.popleft()) - 1]
        self._values.append(value)
        insort(self.ordered, value)

    def quantile(self, share: float) -> float | None:
        """None if there is none."""
        count = len(self.ordered)
        return self.ordered[min(count - 1, int(share * count))] if count else None


@dataclass(eq=False, slots=True)
class Lengths:
    """What sessions came to, in tokens."""

    _ended: Recent = field(default_factory=Recent)
    #: Since they were judged last.
    _new: int = 0
    #: Those that were judged, in order, and of all sessions the share that comes further than each, as minus its logarithm. By
    #: Kaplan and Meier.
    _judged: list[float] = field(default_factory=list)
    _further: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def longest(self) -> float:
        return self._judged[-1] if self._judged else 0.0

    def add(self, length: int) -> bool:
        """A session has ended. Whether so many have that `judge` has to follow: many may end at once."""
        self._ended.add(length)
        self._new += 1
        return self._new * JUDGED_AGAIN >= len(self._ended)

    def judge(self, under_way: Iterable[int]) -> None:
        """under_way: what sessions have now that have not ended."""
        ordered, others, further = self._ended.ordered, sorted(under_way), 0.0
        self._new, self._judged, self._further = 0, list(ordered), []
        for at, ended in enumerate(ordered):
            came_so_far = len(ordered) - at + len(others) - bisect_left(others, ended)
            further += -math.log1p(-1 / came_so_far) if came_so_far > 1 else math.inf
            self._further.append(further)

    def likely(self, share: float, above: int) -> float | None:
        """What this share of sessions that have more than `above` comes to at most. None: fewer are known to have ended."""
        first = bisect_right(self._judged, above)
        before = self._further[first - 1] if first else 0.0
        at = bisect_left(self._further, before - math.log1p(-share) - ROUNDING, first)
        return self._judged[at] if at < len(self._judged) else None


class Forecast(NamedTuple):
    """What a session has; what it claims more; and what it may grow by, each as likely: one number or four. None: what it
    claims."""

    live: int
    growth: int
    ends: tuple[int, ...] = ()


def most_at_once(claims: Iterable[Forecast]) -> int:
    """Of sessions that grow alike, and of which each ends once it has grown: the most that they are expected to have at one
    time."""
    # In quarters of a token and of a session.
    whole = len(ENDS_AT)
    parts = [
        (end, one.live * whole // len(ends), whole // len(ends))
        for one in claims
        for ends in [one.ends or (one.growth,)]
        for end in ends
    ]
    most = held = count = 0
    for end, live, part in sorted(parts, key=itemgetter(0), reverse=True):
        held += live
        count += part
        most = max(most, held + count * end)
    return -(-most // whole)
