"""What replicas measure and count: of turns, of swaps and of their process. The buckets, and the report.

Always holds: `Distribution.counts` has one bucket more than the bounds of its measure in MEASURES.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import get_args

import msgspec

from midstream.core.types import FinishReason, Whole


class Distribution(msgspec.Struct):
    """How many values fell into each bucket (the last one has no upper bound), and their sum."""

    counts: list[Whole]
    sum: float = 0.0


#: Upper bounds in seconds: 1-2.5-5 steps for what is short, coarser ones up to long rollouts.
BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
)


class Histogram(Distribution):
    """How many durations fell into each bucket of BUCKETS_S, and their sum in seconds."""

    counts: list[Whole] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum += seconds


_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_PAUSE_S = (0.0001, 0.00025, 0.0005, *BUCKETS_S[:12])

#: What replicas measure of every turn, with the upper bounds of its buckets; turns_per_session of every session that closes.
TURN_MEASURES: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": BUCKETS_S,
    "inter_token_seconds": (0.0005, *BUCKETS_S[:11]),
    "generation_seconds": BUCKETS_S,
    "request_seconds": BUCKETS_S,
    "queue_seconds": BUCKETS_S,
    "prompt_tokens": _TOKENS,
    "generated_tokens": _TOKENS,
    "cached_prompt_share": (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0),
    "turns_per_session": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0),
}
#: The stages of a swap, each with a measure of its own: swap_fetch_seconds and so on. hold: staged, until it may switch.
SWAP_STAGES = ("fetch", "rebuild", "verify", "stage", "hold", "commit", "check")
#: What replicas measure of every swap. swap_pause_seconds: no step ran, while sequences did. swap_seconds: of a whole swap.
SWAP_MEASURES: dict[str, tuple[float, ...]] = {
    "swap_pause_seconds": _PAUSE_S,
    "swap_seconds": BUCKETS_S,
    "swap_streams_crossed": (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0),
    **{f"swap_{stage}_seconds": BUCKETS_S for stage in SWAP_STAGES},
}
#: What the replica's process did to its event loop.
PROCESS_MEASURES: dict[str, tuple[float, ...]] = {"event_loop_stall_seconds": BUCKETS_S}
MEASURES = TURN_MEASURES | SWAP_MEASURES | PROCESS_MEASURES
#: The counts of replicas, with all values of their label. finishes: choices, by why they ended; a choice also counts as abort
#: if its client left or its engine failed. swaps: unchanged, ready with the very
#: weights of the snapshot before; superseded by a newer target; stopped, as the engine died or the policy was ended meanwhile.
COUNTS: dict[str, tuple[str, ...]] = {
    "finishes": get_args(FinishReason),
    "swaps": ("ready", "unchanged", "failed", "superseded", "stopped"),
}


class Rewarded(msgspec.Struct, kw_only=True):
    """The rewards of one name that were given to turns which one snapshot ended.

    policy: "" for the deployment's own weights. first_at: seconds since the epoch. sum: of `count` rewards.
    """

    policy: str
    snapshot: str
    name: str
    first_at: float
    count: Whole = 0
    sum: float = 0.0


class Trajectories(msgspec.Struct, frozen=True, kw_only=True, tag="trajectories", tag_field="kind"):
    """A line of a replica's event stream: what its turns and swaps were like since the process began, by measure (MEASURES),
    and how they ended (COUNTS). rewards: of the newest snapshots that were rewarded, in the order of their first rewards.

    Counts only grow while the process lives, over all boots of its engine. An observation adds to plain integers.
    """

    measures: dict[str, Distribution]
    counts: dict[str, dict[str, Whole]] = {}
    rewards: list[Rewarded] = []

    def __post_init__(self) -> None:
        """Raises ValueError: no message is read that breaks what always holds. Measures of other versions may be there."""
        for name, found in self.measures.items():
            if name in MEASURES and len(found.counts) != len(MEASURES[name]) + 1:
                raise ValueError(f"{name}: {len(found.counts)} counts, expected {len(MEASURES[name]) + 1}")

    @classmethod
    def none(cls) -> Trajectories:
        """Nothing was measured yet."""
        return cls(
            measures={name: Distribution([0] * (len(bounds) + 1)) for name, bounds in MEASURES.items()},
            counts={name: dict.fromkeys(values, 0) for name, values in COUNTS.items()},
        )

    def observe(self, measure: str, value: float) -> None:
        """measure: of MEASURES."""
        found = self.measures[measure]
        found.counts[bisect_left(MEASURES[measure], value)] += 1
        found.sum += value

    def count(self, what: str, value: str) -> None:
        """what, value: of COUNTS."""
        self.counts[what][value] += 1
