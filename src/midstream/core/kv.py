"""What the KV cache of one engine holds, in blocks of `block_tokens` tokens.

Always holds: used + held + loose + free = total, so each block is owned once. Counts of tokens only grow within a boot.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """used: by running requests. held: by sessions between two turns. loose: by neither, and anybody may reuse it.

    missing: blocks that sessions had, and would have to compute or copy again at their next turn. evicted_tokens: while their
    session lived. again_tokens: of these, those that a later turn computed again. total is 0 where nothing is known of
    the cache. offload_total, offloaded: blocks of the second tier, beside these, and those of them that hold something; a tier
    that is slower than computing has a total of 0. restored_tokens: were copied back from there. dropped_tokens: went from
    there without.
    """

    block_tokens: _Whole = 0
    total: _Whole = 0
    used: _Whole = 0
    held: _Whole = 0
    loose: _Whole = 0
    missing: _Whole = 0
    evicted_tokens: _Whole = 0
    again_tokens: _Whole = 0
    offload_total: _Whole = 0
    offloaded: _Whole = 0
    restored_tokens: _Whole = 0
    dropped_tokens: _Whole = 0
    travelled_tokens: _Whole = 0

    @property
    def free(self) -> int:
        """Of a report that is nonsense, never less than 0."""
        return max(0, self.total - self.used - self.held - self.loose)

    @property
    def capacity_tokens(self) -> int:
        """That sessions may have, running or between two turns."""
        return (self.total + self.offload_total) * self.block_tokens


class KvWaits(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's KV budget is like, in tokens. budget: that sessions may claim; 0: no session waits for it.

    claimed: what the sessions that have begun are expected to have at one time at most, and what requests without a session
    have. sessions: that have begun. waiting: first turns. refused: found the queue full. understated: sessions that came to
    more than their client said.
    """

    budget_tokens: _Whole = 0
    claimed_tokens: _Whole = 0
    sessions: _Whole = 0
    waiting: _Whole = 0
    refused: _Whole = 0
    understated: _Whole = 0

    @property
    def filled(self) -> float | None:
        """The share of the budget that is claimed, and one more for each turn that waits; None: there is no budget."""
        if not self.budget_tokens:
            return None
        return self.claimed_tokens / self.budget_tokens + self.waiting


class KvWait(msgspec.Struct, frozen=True, kw_only=True):
    """Why a turn of a session waits. position: in its replica's queue, from 1. begun: the session has begun, and waits for
    those that began before it; else until what it needs fits beside what all others need. Tokens as in KvWaits."""

    replica: str
    position: _Whole
    waited_s: float
    begun: bool
    needs_tokens: _Whole
    claimed_tokens: _Whole
    budget_tokens: _Whole
    sessions: _Whole
