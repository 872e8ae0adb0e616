"""What replicas tell of sessions: which they hold, what those were like, and what the turns of all of them were like.

Always holds: `Distribution.counts` has one bucket more than the bounds of its measure in TURN_MEASURES.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from midstream.core.types import Session


class SessionsReport(msgspec.Struct, frozen=True, kw_only=True, tag="sessions", tag_field="kind"):
    """A line of a replica's event stream: sessions it holds and the stamp of each, and sessions that it closed.

    When a stream begins, all of them are told before the first report; afterwards what changes.
    stamp: of the placing that brought the session there; of two replicas that hold it, the one with the greater has it.
    boot: on the first line of a stream, whose sessions are told: those of another boot are gone.
    """

    boot: str | None = None
    held: tuple[tuple[Session, int], ...] = ()
    closed: tuple[Session, ...] = ()


class Distribution(msgspec.Struct):
    """How many values fell into each bucket (the last one has no upper bound), and their sum."""

    counts: list[int]
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

#: What replicas measure of every turn, with the upper bounds of its buckets; turns_per_session of every session that closes.
TURN_MEASURES: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": BUCKETS_S,
    "inter_token_seconds": (0.0005, *BUCKETS_S[:11]),
    "generation_seconds": BUCKETS_S,
    "cached_prompt_share": (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0),
    "turns_per_session": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0),
}


class Trajectories(msgspec.Struct, frozen=True, kw_only=True, tag="trajectories", tag_field="kind"):
    """A line of a replica's event stream: what its turns were like since the process began, by measure (TURN_MEASURES)."""

    measures: dict[str, Distribution]


class SessionStats(msgspec.Struct, kw_only=True):
    """What one replica knows of a session. Times are seconds; `_at` since the epoch.

    turns: requests begun. open_turns: of these, not ended.
    first_tokens: turns that came to a first token, which took time_to_first_token_s in all.
    generation_s: from first to last token, all turns together.
    token_gaps: how many times a token followed another in that time (along the longest choice of a request).
    """

    tenant: str
    key: str
    stamp: int
    opened_at: float
    used_at: float
    turns: int = 0
    open_turns: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    time_to_first_token_s: float = 0.0
    last_time_to_first_token_s: float | None = None
    generation_s: float = 0.0
    token_gaps: int = 0


class SessionsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway asks a replica: a tenant's sessions in the order of their keys, those behind the key `after`; or one."""

    tenant: str = ""
    key: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class SessionsHeld(msgspec.Struct, frozen=True):
    """The answer."""

    sessions: tuple[SessionStats, ...]
