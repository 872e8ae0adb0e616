"""What a gateway counts of pushes, and what it saw of them in the ledger last. Pure.

Always holds:
- Labels come from small fixed sets, or are names of replicas.
- What a gateway does, it alone counts. So the counts of several gateways may be added up.
- `open` and `waiting_s` are the ledger's. So every gateway has the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from midstream.core.measures import Histogram
from midstream.ledger import Phase

#: What became of an update. fenced: committed without some replicas. dropped: refused, and its group waits for the next one.
#: ended: its group ended before it was committed.
Outcome = Literal["committed", "fenced", "dropped", "ended"]
#: Why a group ended. replaced: its trainer, or another one, formed a new group. members: other replicas, or other boots, are to
#: take part. failed: too many replicas did not do their part. fenced: its last update was committed without some replicas.
#: left: no replica is in it any more, mostly because its trainer died.
Ending = Literal["shutdown", "replaced", "refused", "members", "failed", "deadline", "fenced", "left"]
OUTCOMES: tuple[Outcome, ...] = ("committed", "fenced", "dropped", "ended")
ENDINGS: tuple[Ending, ...] = (
    "shutdown",
    "replaced",
    "refused",
    "members",
    "failed",
    "deadline",
    "fenced",
    "left",
)
#: Ends that a trainer chose.
CHOSEN: tuple[Ending, ...] = ("shutdown", "replaced")
#: How the work of bringing a snapshot's files into the bucket ended.
KEEPS = ("kept", "given_up")
#: Those whose calls are timed.
TIMED = (Phase.JOINING, Phase.STARTING, Phase.RECEIVING, Phase.FINISHING)


@dataclass
class PushCounts:
    """open: the phase of the open group, by deployment. waiting_s: the age of the oldest update that is not in the bucket yet.

    keeps, rebases: how bringing files into the bucket ended, of updates and of incremental snapshots with long chains.
    updates: by Outcome. groups_ended: by Ending. seconds: of calls that succeeded, by phase. received_bytes: by replica.
    """

    updates: Counter[str] = field(default_factory=Counter)
    groups_ended: Counter[str] = field(default_factory=Counter)
    keeps: Counter[str] = field(default_factory=Counter)
    rebases: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    open: Mapping[str, Phase] = field(default_factory=dict)
    waiting_s: Mapping[str, float] = field(default_factory=dict)
