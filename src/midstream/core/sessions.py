"""What replicas tell of sessions: which they hold, what those were like, and what the turns of all of them were like.

Always holds: `Distribution.counts` has one bucket more than the bounds of its measure in MEASURES.

Which session a request belongs to. Pure; used by the gateway (placement) and by a replica that is asked directly.

Order: the path (core/wires.py) > `x-multi-turn-session-id` > `x-session-affinity` > `X-Session-ID` > `X-SMG-Routing-Key` > body
`prompt_cache_key` > body `session_id` > body `user` > none. An empty one is passed over if another names a session.
Always holds: the key is compared whole, never by prefix. Equal keys of two tenants are different sessions: a table of keys
pairs each with its tenant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, get_args

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.types import FinishReason, Session, Whole

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity", "x-session-id", "x-smg-routing-key")
SESSION_BODY_FIELDS = ("prompt_cache_key", "session_id", "user")
MAX_KEY_BYTES = 512
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def session_key(named: Iterable[tuple[str, str | None]]) -> str | None:
    """The key of a request, from the fields that may name it in their order, each with its value or None; None without any.

    An empty value is passed over when a later field names a session. Reads no field behind the one that does. Raises
    InvalidRequest on a value that cannot be a key, and when all that are given are empty.
    """
    empty = None
    for name, value in named:
        if value:
            return check_key(value, name)
        if value is not None and empty is None:
            empty = name
    return None if empty is None else check_key("", empty)


def named_in_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """For `session_key`. `headers` have lower-case names."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        yield name, None if value is None else value.strip(" \t")


def named_in_body(
    prompt_cache_key: str | None, session_id: str | None, user: str | None
) -> Iterator[tuple[str, str | None]]:
    """For `session_key`."""
    return zip(SESSION_BODY_FIELDS, (prompt_cache_key, session_id, user), strict=True)


def check_key(value: str, param: str) -> str:
    """`value`, or InvalidRequest when it is empty, over 512 bytes of UTF-8, or holds control characters."""
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_KEY_BYTES:
        raise InvalidRequest(f"{param} must be at most {MAX_KEY_BYTES} bytes, got {size}", param=param)
    if _CONTROL_CHARACTERS.search(value):
        raise InvalidRequest(f"{param} must not contain control characters", param=param)
    return value


class SessionsReport(msgspec.Struct, frozen=True, kw_only=True, tag="sessions", tag_field="kind"):
    """A line of a replica's event stream: sessions it holds and the stamp of each, and sessions that it closed.

    When a stream begins, all of them are told before the first report; afterwards what changes.
    stamp: of the placing that brought the session there; of two replicas that hold it, the one with the greater has it.
    boot: on the first line of a stream, whose sessions are told: those of another boot are gone.
    """

    boot: str | None = None
    held: tuple[tuple[Session, Whole], ...] = ()
    closed: tuple[Session, ...] = ()


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
#: What replicas count, with all values that it is counted by. finishes: choices, by why they ended; abort stands also for
#: one whose client left or whose engine failed. swaps: superseded by a newer target; stopped, as the
#: engine died or the policy was ended meanwhile.
COUNTS: dict[str, tuple[str, ...]] = {
    "finishes": get_args(FinishReason),
    "swaps": ("ready", "failed", "superseded", "stopped"),
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
    and how they ended (COUNTS). rewards: of the newest snapshots that were rewarded, in the order of their first rewards."""

    measures: dict[str, Distribution]
    counts: dict[str, dict[str, Whole]] = {}
    rewards: list[Rewarded] = []

    def __post_init__(self) -> None:
        """Raises ValueError: no message is read that breaks what always holds. Measures of other versions may be there."""
        for name, found in self.measures.items():
            if name in MEASURES and len(found.counts) != len(MEASURES[name]) + 1:
                raise ValueError(f"{name}: {len(found.counts)} counts, expected {len(MEASURES[name]) + 1}")


class SessionStats(msgspec.Struct, kw_only=True):
    """What one replica knows of a session. Times are seconds; `_at` since the epoch.

    turns: requests begun. open_turns: of these, not ended.
    first_tokens: turns that came to a first token, which took time_to_first_token_s in all.
    generation_s: from first to last token, all turns together.
    token_gaps: how many times a token followed another in that time (along the longest choice of a request).
    last_reward: the one given last, to the session or one of its turns, at rewarded_at.
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
    last_reward: float | None = None
    rewarded_at: float = 0.0


class SessionsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway asks a replica: a tenant's sessions in the order of their keys, those behind the key `after`; or one."""

    tenant: str = ""
    key: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class SessionsHeld(msgspec.Struct, frozen=True):
    """The answer."""

    sessions: tuple[SessionStats, ...]
