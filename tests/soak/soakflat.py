"""Whether a number that was measured again and again has come to rest, or still grows.

Owns: the rule, and how much each kind of number may waver. Pure.
Always holds: only what was measured after the warm-up counts, and it is cut into four quarters of equal time. A number grows
when the median of the last quarter is above that of the second by more than is allowed, and is still on its way up: the last
quarter is also above the third by a quarter of what is allowed. So one step up is no growth, and neither is a single peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Fewer samples than so many after the warm-up, or less time, say nothing: the load itself wavers as much.
SAMPLES_MIN = 12
SECONDS_MIN = 120.0


@dataclass(frozen=True)
class Allowed:
    """absolute: in the number's own unit. share: of the second quarter's median; the greater of the two counts."""

    absolute: float
    share: float


#: An allocator gives and takes memory in arenas of megabytes, and a swap holds two models for a moment.
RSS_MB = Allowed(absolute=8.0, share=0.08)
#: The streams of a replica that is lost, a third of 200, go to the others.
FDS = Allowed(absolute=80.0, share=0.25)
#: The pool that a replica reads snapshots with grows one by one to its bound of 12, and more come with a fetch and go.
THREADS = Allowed(absolute=12.0, share=0.0)
#: Of a whole server.
SESSIONS = Allowed(absolute=60.0, share=0.25)
PROCESSES = Allowed(absolute=1.0, share=0.0)
#: Two snapshots of each replica, on their way.
CACHE_MB = Allowed(absolute=8.0, share=0.25)


@dataclass(frozen=True)
class Verdict:
    """of: what was measured. quarters: the median of each; empty where there are too few samples. grows: see above."""

    of: str
    kind: str
    seconds: float
    quarters: tuple[float, ...]
    allowed: float
    grows: bool

    def __str__(self) -> str:
        if not self.quarters:
            return f"{self.of:28} {self.kind:9} {self.seconds:6.0f} s  too short to judge"
        shown = "  ".join(f"{value:8.1f}" for value in self.quarters)
        per_hour = (self.quarters[3] - self.quarters[1]) / (self.seconds / 2) * 3600 if self.seconds else 0.0
        word = "GROWS" if self.grows else "flat"
        return (
            f"{self.of:28} {self.kind:9} {self.seconds:6.0f} s  {shown}  {per_hour:+9.1f}/h"
            f"  (allowed {self.allowed:.1f})  {word}"
        )


def judged(
    of: str, kind: str, samples: Sequence[tuple[float, float]], warm_up_s: float, allowed: Allowed
) -> Verdict:
    """samples: (seconds, value), in order of time."""
    kept = [one for one in samples if one[0] - samples[0][0] >= warm_up_s]
    seconds = kept[-1][0] - kept[0][0] if kept else 0.0
    if len(kept) < SAMPLES_MIN or seconds < SECONDS_MIN:
        return Verdict(of, kind, seconds, (), allowed.absolute, grows=False)
    first = kept[0][0]
    parts: list[list[float]] = [[], [], [], []]
    for at, value in kept:
        parts[min(3, int(4 * (at - first) / seconds))].append(value)
    if not all(parts):
        return Verdict(of, kind, seconds, (), allowed.absolute, grows=False)
    quarters = tuple(statistics.median(part) for part in parts)
    most = max(allowed.absolute, allowed.share * quarters[1])
    grows = quarters[3] - quarters[1] > most and quarters[3] - quarters[2] > most / 4
    return Verdict(of, kind, seconds, quarters, most, grows)
