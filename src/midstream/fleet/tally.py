"""What gateway processes counted, to be added up; and what each reports of itself to the others. Pure.

Always holds: what a process counted stays in the sum when it has ended, so a sum never falls while the server runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from midstream.core.measures import BUCKETS_S, Distribution

#: The histogram of stalled event loops, by process, in the buckets of BUCKETS_S.
STALLS = "stall_s"


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the data path. requests: (path class, status, how many)."""

    requests: list[tuple[str, int, int]] = []
    counters: dict[str, dict[str, int]] = {}
    histograms: dict[str, dict[str, Distribution]] = {}


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway process says of itself. boot: which process it is. ready: it listens, and can use every replica that there
    should be. changes: how often its API changed what the ledger wants.
    """

    boot: str
    listening: bool
    ready: bool
    changes: int
    tally: Tally


class Siblings(msgspec.Struct, frozen=True, kw_only=True):
    """The other gateway processes of the server, as the supervisor heard of them last. tally: also of those that have ended,
    and of the server's processes that are no gateways.
    changes: of all reports, so that another one says that the ledger changed."""

    listening: int = 0
    ready: int = 0
    changes: int = 0
    tally: Tally = Tally()


def merged(tallies: Iterable[Tally]) -> Tally:
    """The sum."""
    requests: Counter[tuple[str, int]] = Counter()
    counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
    histograms: defaultdict[str, dict[str, Distribution]] = defaultdict(dict)
    for tally in tallies:
        for path, status, count in tally.requests:
            requests[path, status] += count
        for name, counts in tally.counters.items():
            counters[name].update(counts)
        for name, paths in tally.histograms.items():
            for path, one in paths.items():
                known = histograms[name].get(path, Distribution([0] * len(one.counts)))
                counts_of = [a + b for a, b in zip(known.counts, one.counts, strict=True)]
                histograms[name][path] = Distribution(counts_of, known.sum + one.sum)
    return Tally(
        requests=[(path, status, count) for (path, status), count in requests.items()],
        counters={name: dict(counts) for name, counts in counters.items()},
        histograms=dict(histograms),
    )


def stalled(process: str, seconds: float) -> Tally:
    """One stall of that process's event loop."""
    counts = [0] * (len(BUCKETS_S) + 1)
    counts[bisect_left(BUCKETS_S, seconds)] = 1
    return Tally(histograms={STALLS: {process: Distribution(counts, seconds)}})


def siblings_of(own: str | None, reports: Iterable[GatewayReport], ended: Tally) -> Siblings:
    """What the process of boot `own` gets of the others."""
    others = [report for report in {report.boot: report for report in reports}.values() if report.boot != own]
    return Siblings(
        listening=sum(report.listening for report in others),
        ready=sum(report.ready for report in others),
        changes=sum(report.changes for report in others),
        tally=merged([ended, *(report.tally for report in others)]),
    )
