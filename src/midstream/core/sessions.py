"""What replicas report of sessions: which ones they hold, and what each was like.

Always holds: of two replicas that report a session, the one with the greater stamp has it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from midstream.core.kv import KvWait
from midstream.core.types import Session, Whole


class SessionsReport(msgspec.Struct, frozen=True, kw_only=True, tag="sessions", tag_field="kind"):
    """A line of a replica's event stream: sessions it holds and the stamp of each, and sessions that it closed.

    A stream begins with all of them, before the first report; afterwards it has the changes.
    stamp: of the placing that brought the session there; of two replicas that hold it, the one with the greater has it.
    boot: on the first line of a stream, the boot that has these sessions: those of another boot are gone.
    """

    boot: str | None = None
    held: tuple[tuple[Session, Whole], ...] = ()
    closed: tuple[Session, ...] = ()


class SessionStats(msgspec.Struct, kw_only=True):
    """What one replica knows of a session. Times are seconds; `_at` since the epoch.

    turns: requests begun. open_turns: of these, not ended.
    first_tokens: turns that came to a first token, which took time_to_first_token_s in all.
    generation_s: from first to last token, all turns together.
    token_gaps: how many times a token followed another in that time (along the longest choice of a request).
    last_reward: the one given last, to the session or one of its turns, at rewarded_at. wait: why its next turn waits; None: it
    does not.
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
    wait: KvWait | None = None


class SessionsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway asks a replica: a tenant's sessions in the order of their keys, those behind the key `after`; or one."""

    tenant: str = ""
    key: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class SessionTaken(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's new home says to the one before. stamp: of the placing that brought it to the new one."""

    tenant: str
    key: str
    stamp: Whole


class SessionsHeld(msgspec.Struct, frozen=True):
    """The answer."""

    sessions: tuple[SessionStats, ...]
