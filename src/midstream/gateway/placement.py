"""Which replica a request goes to: pure decisions, explained.

A known session stays where its KV cache is. A new session goes to its highest rendezvous-hash candidate that is not
overloaded. A request without a session goes to the replica with the least in flight.

Always holds:
- Same session, same replica, while that replica is usable; when it is not, only its sessions move, and they stay where
  they moved. (Whoever asks remembers homes, and keeps one that failed a single request.)
- A new or moved session, counted in, raises no replica above ceil((1 + bound) x mean in-flight requests), so that no
  replica is buried however the hashes fall.
- Equal inputs give equal decisions: gateways that see equal loads agree without talking to each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

RouteReason = Literal["sticky", "new", "moved", "balanced"]
Session = tuple[str, str]  # (tenant, key): two tenants' equal keys are different sessions


@dataclass(frozen=True, slots=True)
class Candidate:
    """What placement needs to know of one usable replica."""

    name: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class Decision:
    replica: str  # its name
    reason: RouteReason
    explanation: str


def stays(home: str | None, usable: Collection[str]) -> Decision | None:
    """The decision for a session whose replica is known and usable; None when it must be placed."""
    if home is None or home not in usable:
        return None
    return _sticky(home)


def place_session(
    session: Session, candidates: Sequence[Candidate], bound: float, home: str | None = None
) -> Decision | None:
    """Place a session whose home, if it has one, cannot serve this request. None: no candidates."""
    if not candidates:
        return None
    limit = load_limit([candidate.in_flight for candidate in candidates], bound)
    ranked = sorted(candidates, key=lambda candidate: (-rendezvous(session, candidate.name), candidate.name))
    rank, chosen = next((i, c) for i, c in enumerate(ranked) if c.in_flight < limit)
    why = f"rendezvous candidate {rank + 1} of {len(ranked)}, {chosen.in_flight} in flight, limit {limit}"
    if home is None:
        return Decision(chosen.name, "new", f"new session: {why}")
    return Decision(chosen.name, "moved", f"{home} cannot serve it: {why}")


def place_request(candidates: Sequence[Candidate], turn: int) -> Decision | None:
    """Place a request without a session: least in flight; `turn` (grows by one per call) rotates ties."""
    if not candidates:
        return None
    least = min(candidate.in_flight for candidate in candidates)
    tied = [candidate for candidate in candidates if candidate.in_flight == least]
    chosen = tied[turn % len(tied)]
    return Decision(chosen.name, "balanced", f"no session: {least} in flight, the least of {len(candidates)}")


def load_limit(in_flight: Sequence[int], bound: float) -> int:
    """Most requests one replica may hold after the next one is placed; at least one replica is below it."""
    return math.ceil((1 + bound) * (sum(in_flight) + 1) / len(in_flight))


def rendezvous(session: Session, replica: str) -> int:
    """The weight of a replica for a session: the highest wins, so a leaver moves its own sessions only."""
    parts = (part.encode("utf-8", "surrogatepass") for part in (*session, replica))
    data = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@lru_cache(4096)  # the common case allocates nothing
def _sticky(home: str) -> Decision:
    return Decision(home, "sticky", f"session is known on {home}")
