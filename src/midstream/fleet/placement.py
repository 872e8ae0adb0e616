"""Which replica a request goes to: pure decisions, explained.

A known session stays where its KV cache is. A new session goes to the highest of its rendezvous-hash candidates that is not
overloaded. If one is half full and the next one has clearly more room in its KV cache, or else clearly fewer sessions, it goes
there. So sessions are balanced as by a table, and gateways agree as by a hash.

Sessions of a group, whose first prompts are equal, go where the last one of it went: their prompt is computed and held there.
What that may cost is an imbalance such as chance makes anyway: two and the root of what the other candidate has, in sessions
and in requests.

A request without a session goes where its prompt's beginning is cached, if that replica is not overloaded. Else it goes to the
replica with the least load. Other requests with that beginning may be running, as in a group of samples of one prompt. Then
following gives the replica no more than its even share of the load.

Always holds:
- Same session, same replica, while that replica is usable. When it is not, only its sessions move, and they stay where
  they moved. (The caller remembers homes, and keeps one that failed a single request.)
- A new or moved session, counted in, raises no replica above ceil((1 + bound) x its share of the load). So no replica is
  buried, however the hashes fall. Shares are in proportion to weights. One that joins its group may exceed that, by what the
  replica that it would go to otherwise allows.
- Equal inputs give equal decisions, in whatever order replicas are listed: gateways that see equal loads agree without
  talking to each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from midstream.core.types import Session
from midstream.fleet.loads import LoadTable
from midstream.fleet.prefixes import Known, SessionGroup

RouteReason = Literal["sticky", "new", "moved", "priced", "prefix", "balanced"]

# From so many candidates on, numpy is quicker.
ARRAYS_FROM = 48
# Place, rank in rendezvous order from 1, load limit.
_Ranked = tuple[int, int, int]
# By how much a number of sessions is clearly smaller: absolute, and as a share.
CLEARLY, CLEARLY_SHARE = 1, 0.02
# By how much of its KV budget a replica is clearly less filled, and from where on that matters.
CLEARLY_FILLED, FILLED_FROM = 0.05, 0.5
# By so many sessions or requests, and the root of another replica's, one may exceed that for the prompt of a group.
GROUP_SLACK = 2
# Requests over the limit, for a prompt that would have to be computed anywhere else.
FOLLOW_SLACK = 2
# So many replicas are looked at one after the other. If more are overloaded, numpy looks at all.
TRIED_MAX = 8
_load, _place = attrgetter("load"), attrgetter("place")
_MASK = 2**64 - 1
# Constants of splitmix64.
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Counted(Protocol):
    """Where the requests on a replica are counted. table: where it is listed, at `place`; None: in none. kv_filled: of its KV
    budget; None: it has none."""

    @property
    def load(self) -> int: ...
    @property
    def table(self) -> LoadTable | None: ...
    @property
    def place(self) -> int: ...
    @property
    def kv_filled(self) -> float | None: ...


class Placeable(Protocol):
    """What placement needs to know of a usable replica. weight: above 0, its part of the work."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def replica(self) -> Counted: ...


M = TypeVar("M", bound=Placeable)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Placeable of numbers only."""

    name: str
    load: int
    weight: float = 1.0
    filled: float | None = None

    @property
    def replica(self) -> Candidate:
        return self

    @property
    def table(self) -> None:
        return None

    @property
    def place(self) -> int:
        return 0

    @property
    def kv_filled(self) -> float | None:
        return self.filled


class Decision(msgspec.Struct, frozen=True):
    # The replica's name.
    replica: str
    reason: RouteReason
    explanation: str


def stays(home: str | None, usable: Collection[str]) -> Decision | None:
    """The decision for a session with a known, usable replica; None if it must be placed."""
    if home is None or home not in usable:
        return None
    return sticky(home)


# The common case allocates nothing.
@lru_cache(65536)
def sticky(home: str) -> Decision:
    return Decision(home, "sticky", f"session is known on {home}")


class Fleet(Generic[M]):
    """Candidates for new work. What does not change with load is computed once; loads are read at each decision.

    Use it from one thread, and only until a member is listed in another table of loads.
    """

    def __init__(self, members: Iterable[M]) -> None:
        self.members: tuple[M, ...] = tuple(sorted(members, key=lambda member: member.name))
        self._replicas = [member.replica for member in self.members]
        self._weights = [member.weight for member in self.members]
        self._all = sum(self._weights)
        self._even = len(set(self._weights)) <= 1
        self._seeds = [_seed(member.name) for member in self.members]
        self._places = {member.name: place for place, member in enumerate(self.members)}
        self._arrays: _Arrays | None = None
        if len(self.members) >= ARRAYS_FROM:
            self._arrays = _Arrays(self._replicas, self._seeds, self._weights, self._even)

    def __repr__(self) -> str:
        return f"Fleet({len(self.members)} members)"

    def __len__(self) -> int:
        return len(self.members)

    def only(self, wanted: Callable[[M], bool]) -> Fleet[M]:
        """Of those that are wanted."""
        return Fleet(member for member in self.members if wanted(member))

    def place_session(
        self,
        session: Session,
        bound: float,
        home: str | None = None,
        sessions: Mapping[str, int] = MappingProxyType({}),
        group: SessionGroup | None = None,
    ) -> tuple[M, Decision] | None:
        """Place a session without a home that can serve this request. None: no members.

        sessions: how many live on each replica, by name. group: of a new session.
        """
        if not self.members:
            return None
        # All gateways have the same candidates for a group that begins.
        hashed = _hash(*(session if group is None or group.home else group.key))
        arrays = self._arrays
        best = self._best(hashed, self._loads(), bound) if arrays is None else arrays.best(hashed, bound)
        place, rank, limit = self._emptier(best, sessions)
        if group is not None and (found := self._joining(group, place, sessions)) is not None:
            return found
        chosen = self.members[place]
        load = self._replicas[place].load
        why = f"rendezvous candidate {rank} of {len(self.members)}, load {load}, limit {limit}"
        if home is None:
            return chosen, Decision(chosen.name, "new", f"new session: {why}")
        return chosen, Decision(chosen.name, "moved", f"{home} cannot serve it: {why}")

    def place_leaving(
        self, session: Session, bound: float, home: str, sessions: Mapping[str, int]
    ) -> tuple[M, Decision] | None:
        """As `place_session`, of a session whose home is to leave: among those with clearly the most room, if they are not
        overloaded."""
        filled = [replica.kv_filled for replica in self._replicas]
        known = [share for share in filled if share is not None]
        if known and len(known) == len(filled) and max(known) > FILLED_FROM:
            most, total = min(known) + CLEARLY_FILLED, sum(self._loads())
            roomy = [
                member
                for member, share in zip(self.members, known, strict=True)
                if share <= most and member.replica.load < load_limit(total, bound, member.weight, self._all)
            ]
            if roomy:
                return Fleet(roomy).place_session(session, bound, home, sessions)
        return self.place_session(session, bound, home, sessions)

    def place_request(self, turn: int) -> tuple[M, Decision] | None:
        """Place a request without a session: least load for its weight; `turn` (grows by one per call) rotates ties."""
        if not self.members:
            return None
        tied: Sequence[int]
        if self._arrays is not None:
            tied = self._arrays.least()
        else:
            filled: Sequence[float] = self._loads()
            if not self._even:
                filled = [(load + 1) / weight for load, weight in zip(filled, self._weights, strict=True)]
            least = min(filled)
            tied = [place for place, full in enumerate(filled) if full == least]
        place = int(tied[turn % len(tied)])
        chosen = self.members[place]
        why = f"no session: load {self._replicas[place].load}, the least of {len(self.members)}"
        return chosen, Decision(chosen.name, "balanced", why)

    def place_prefix(self, known: Known, bound: float) -> tuple[M, Decision] | None:
        """Place a request where its prompt is known; None when that replica is overloaded."""
        replica = known.replica
        place = self._places.get(replica)
        if place is None:
            return None
        total = sum(self._loads()) if self._arrays is None else self._arrays.total()
        load = self._replicas[place].load
        limit = load_limit(total, 0.0 if known.shared else bound, self._weights[place], self._all)
        limit += FOLLOW_SLACK if known.alone and not known.shared else 0
        if load >= limit:
            return None
        why = f"{known.share:.0%} of its prompt is known on {replica}, load {load}, limit {limit}"
        return self.members[place], Decision(replica, "prefix", why)

    def _joining(
        self, group: SessionGroup, other: int, sessions: Mapping[str, int]
    ) -> tuple[M, Decision] | None:
        """Where the group is, if that costs no more than its prompt does. other: the place that it would go to otherwise."""
        at = self._places.get(group.home)
        if at is None:
            return None
        here, there = self._replicas[at], self._replicas[other]
        live, least = sessions.get(group.home, 0), sessions.get(self.members[other].name, 0)
        weight, lighter = self._weights[at], self._weights[other]
        if not (_close(live / weight, least / lighter) and _close(here.load / weight, there.load / lighter)):
            return None
        filled, free = here.kv_filled, there.kv_filled
        if filled is not None and free is not None and free <= 1 < filled:
            # It would wait there, and elsewhere it would not.
            return None
        why = f"its group is there, {live} sessions and load {here.load}, elsewhere {least} and {there.load}"
        return self.members[at], Decision(group.home, "new", f"new session: {why}")

    def _loads(self) -> list[int]:
        return list(map(_load, self._replicas))

    def _emptier(self, best: Sequence[_Ranked], sessions: Mapping[str, int]) -> _Ranked:
        """The second one only if it has clearly more room, or clearly fewer sessions: small differences are what one gateway
        knows before another."""
        if len(best) > 1:
            first, second = (self._replicas[one[0]].kv_filled for one in best)
            if first is None or second is None:
                first = second = 0.0
            if max(first, second) > FILLED_FROM and abs(first - second) > CLEARLY_FILLED:
                return best[first > second]
        filled = [sessions.get(self.members[one[0]].name, 0) / self._weights[one[0]] for one in best]
        if len(best) > 1 and filled[0] > filled[1] * (1 + CLEARLY_SHARE) + CLEARLY:
            return best[1]
        return best[0]

    def _best(self, session: int, loads: Sequence[int], bound: float) -> list[_Ranked]:
        """The first two in rendezvous order that are under their limits, or the only one."""
        total = sum(loads)
        if self._even:
            limits = [load_limit(total, bound, self._weights[0], self._all)] * len(loads)
        else:
            limits = [load_limit(total, bound, weight, self._all) for weight in self._weights]
        scores = [_mix(session ^ seed) for seed in self._seeds]
        if self._even:
            keys: list[float] = [-score for score in scores]
        else:
            keys = [-math.log((s + 0.5) / 2**64) / w for s, w in zip(scores, self._weights, strict=True)]
        free = [place for place, load in enumerate(loads) if load < limits[place]]
        first = sorted(free, key=lambda at: (keys[at], at))[:2]
        return [(place, 1 + sum(key < keys[place] for key in keys), limits[place]) for place in first]


class _Arrays:
    """The same decisions by numpy, for fleets of hundreds.

    Loads are floats here, exact below 2**53. They come from the table that has all of them, if there is one.
    """

    def __init__(
        self, replicas: Sequence[Counted], seeds: Sequence[int], weights: Sequence[float], even: bool
    ) -> None:
        # Only fleets of such a size pay for the import.
        import numpy as np

        self._np: Any = np
        self._replicas = replicas
        self._table: LoadTable | None = None
        table = replicas[0].table
        if table is not None and all(replica.table is table for replica in replicas):
            self._table, self._listed = table, np.frombuffer(table.read(), np.float64)
            self._places = np.fromiter(map(_place, replicas), np.intp, len(replicas))
        self._weights, self._weight_at = np.array(weights, np.float64), weights
        self._all = sum(weights)
        self._even = even
        # Arrays without dimensions: numpy takes them as they are.
        self._session, self._mix_1, self._mix_2, self._by_27, self._by_30, self._by_31 = (
            np.array(number, np.uint64) for number in (0, _MIX_1, _MIX_2, 27, 30, 31)
        )
        # The first step of _mix gives the same for the parts of an exclusive or, so the seeds take it here.
        self._seeds = np.array(seeds, np.uint64)
        self._seeds ^= self._seeds >> self._by_30
        # A score behind all others.
        self._last = np.uint64(0) if even else -math.inf
        # Where scores are computed.
        self._scores, self._shifted = np.empty_like(self._seeds), np.empty_like(self._seeds)

    def total(self) -> float:
        table = self._table
        if table is None or len(table) != len(self._replicas):
            return float(self._np.add.reduce(self._loads()))
        table.read()
        return table.total

    def least(self) -> Sequence[int]:
        """The places of those with the least load for their weight."""
        loads = self._loads()
        filled = loads if self._even else (loads + 1) / self._weights
        places: Sequence[int] = (filled == filled[filled.argmin()]).nonzero()[0]
        return places

    def best(self, session: int, bound: float) -> list[_Ranked]:
        """The first two in rendezvous order that are under their limits, or the only one."""
        np, scores, total = self._np, self._score(session), self.total()
        found: list[_Ranked] = []
        for rank in range(1, TRIED_MAX + 1):
            at = int(scores.argmax())
            limit = load_limit(total, bound, self._weight_at[at], self._all)
            if self._replicas[at].load < limit:
                found.append((at, rank, limit))
                if len(found) == 2:
                    # Nearly all decisions end here.
                    return found
            scores[at] = self._last
        scores = self._score(session)
        every = np.ceil((1 + bound) * (total + 1) * self._weights / self._all)
        free = (self._loads() < every).nonzero()[0]
        left, found = scores[free], []
        for _ in range(min(2, len(free))):
            best = int(left.argmax())
            at, left[best] = int(free[best]), self._last
            found.append((at, 1 + int(np.count_nonzero(scores > scores[at])), int(every[at])))
        return found

    def _loads(self) -> Any:
        if self._table is not None:
            self._table.read()
            return self._listed.take(self._places)
        return self._np.fromiter(map(_load, self._replicas), self._np.float64, len(self._replicas))

    def _score(self, session: int) -> Any:
        """The highest wins. They hold until the next call."""
        np, x, shifted = self._np, self._scores, self._shifted
        # What is left of the steps of _mix.
        self._session[()] = session ^ session >> 30
        np.bitwise_xor(self._seeds, self._session, x)
        np.multiply(x, self._mix_1, x)
        np.right_shift(x, self._by_27, shifted)
        np.bitwise_xor(x, shifted, x)
        np.multiply(x, self._mix_2, x)
        np.right_shift(x, self._by_31, shifted)
        np.bitwise_xor(x, shifted, x)
        return x if self._even else np.log((x.astype(np.float64) + 0.5) / 2**64) / self._weights


def _close(there: float, other: float) -> bool:
    return there <= other + GROUP_SLACK + math.sqrt(other)


def load_limit(total: float, bound: float, weight: float, weights: float) -> int:
    """Most load one replica may have after the next request is placed, when all have `total` before it; its weight, and that
    of all. At least one replica is below its own."""
    return math.ceil((1 + bound) * (total + 1) * weight / weights)


def rank(key: str, name: str) -> int:
    """The rendezvous score of a replica for a key: the highest wins."""
    return _mix(_hash(key) ^ _seed(name))


@lru_cache(65536)
def _seed(name: str) -> int:
    return _hash(name)


def _hash(*parts: str) -> int:
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    data = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _mix(x: int) -> int:
    """The score of a replica for a session: the highest wins, so a leaver moves its own sessions only."""
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)
