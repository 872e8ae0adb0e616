"""What sessions hold between their turns, and in which order it is given up when blocks run out.

Owns: the claims of sessions on paths of a prefix cache, the embedded engine's or vLLM's. Pure: times are parameters.
It imports the standard library alone, since vLLM's scheduler loads this file by its path (midstream_vllm_kv.py).
Always holds:
- A claim pins nothing. A running sequence gets every block that no other running sequence has.
- A claim is given up from its tail, so what is left of it can be reused.
- Claims are given up one after the other, not all a little: first those that are overdue, the longest overdue first. Then the
  one whose next turn is expected last.
- A turn takes up the claim that it continues. It ends its owner's claims in other namespaces, and no other owner's claims.
- A session has at most BRANCHES_MAX claims, and all sessions CLAIMS_MAX.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, takewhile
from typing import Generic, NamedTuple, Protocol, TypeVar

#: Of one session: its own history, and those of agents beside it under the same key.
BRANCHES_MAX = 4
CLAIMS_MAX = 100_000
#: Entries of claims that are over stay in the lines of claims up to twice the number of claims, and so many more.
SPARE = 64


@dataclass(frozen=True, slots=True)
class Return:
    """When the next turn of a session is likely, from now. kept_s: after that it is overdue."""

    expected_s: float
    kept_s: float


class KeptPlace(Protocol):
    """A cached block behind those before it. Equal ones hold equal tokens. kept: it is in the cache."""

    @property
    def kept(self) -> bool: ...


class SaltParts(NamedTuple):
    """owner: a session may have several, as under isolation keys. namespace: of one owner the last one counts."""

    owner: Hashable
    namespace: Hashable

    @classmethod
    def of(cls, salt: bytes | str, adapter: str = "") -> SaltParts:
        """Of a salt as replica/namespaces.py makes it. adapter: of its owner, what KV is computed with."""
        half = len(salt) // 2
        return cls(salt[:half], (salt[half:], adapter))


P = TypeVar("P", bound=KeptPlace)
P_contra = TypeVar("P_contra", bound=KeptPlace, contravariant=True)


@dataclass(eq=False, slots=True)
class SessionClaim(Generic[P]):
    """path: what is left of it. blocks: how many it had. over: it is no claim any more."""

    session: str
    salt: SaltParts
    path: list[P]
    blocks: int
    expected_at: float
    overdue_at: float
    over: bool = False


class Claimable(Protocol[P_contra]):
    """The pool, as claims see it. gives: it has what is needed now."""

    def claim(self, place: P_contra, /, session: str) -> None: ...
    def unclaim(self, place: P_contra, /, *, ended: bool = False) -> None: ...
    @property
    def gives(self) -> bool: ...


class Claims(Generic[P]):
    """needed_again: blocks that turns had to compute again, because they were evicted while their session lived. missing:
    blocks that claims have lost, and that their sessions would have to compute again now."""

    def __init__(self, pool: Claimable[P]) -> None:
        self._pool = pool
        # The oldest claim of a session first. Sessions in the order of their last change.
        self._of: dict[str, list[SessionClaim[P]]] = {}
        self._victim: SessionClaim[P] | None = None
        # By when they are overdue, and by when they are expected, the last first.
        self._overdue: list[tuple[float, int, SessionClaim[P]]] = []
        self._expected: list[tuple[float, int, SessionClaim[P]]] = []
        self._numbers = count()
        self._alive = 0
        self.needed_again = 0
        self.missing = 0

    def __repr__(self) -> str:
        return f"Claims({len(self._of)} sessions)"

    def __iter__(self) -> Iterator[SessionClaim[P]]:
        return (claim for claims in self._of.values() for claim in claims)

    @property
    def entries(self) -> int:
        """In both lines."""
        return len(self._overdue) + len(self._expected)

    def take_up(self, session: str, salt: SaltParts, matched: Sequence[P], levels: int) -> None:
        """A turn begins. matched: the blocks that it reuses. levels: the full blocks of its prompt."""
        for claim in tuple(self._of.get(session, ())):
            if claim.salt.owner != salt.owner:
                continue
            self._drop_gone(claim)
            left = len(claim.path)
            if left and claim.salt != salt:
                self._end(claim, ended=True)
            elif left <= len(matched) and (not left or matched[left - 1] == claim.path[-1]):
                self.needed_again += max(0, min(claim.blocks, levels) - len(matched))
                self._end(claim)

    def add(self, session: str, salt: SaltParts, path: Sequence[P], returns: Return, now: float) -> None:
        """A turn has ended, and its blocks are about to be released. It replaces the claims that it continues."""
        kept = list(takewhile(lambda place: place.kept, path))
        if not kept:
            return
        claim = SessionClaim(session, salt, kept, len(kept), now + returns.expected_s, now + returns.kept_s)
        for place in kept:
            self._pool.claim(place, session)
        for before in tuple(self._of.get(session, ())):
            self._drop_gone(before)
            length = len(before.path)
            if length <= len(kept) and (not length or kept[length - 1] == before.path[-1]):
                self._end(before)
        claims = self._of.pop(session, [])
        self._of[session] = [*claims, claim]
        self._alive += 1
        self._line_up(claim)
        if len(claims) == BRANCHES_MAX:
            self._end(claims[0])
        if len(self._of) > CLAIMS_MAX:
            self.end(next(iter(self._of)))

    def grow(self, session: str, salt: SaltParts, path: Sequence[P], returns: Return, now: float) -> None:
        """The last place of a path has just come: the claim that ends before it grows. If none does, the path is a claim."""
        before = path[-2:-1]
        for claim in self._of.get(session, ()):
            alike = claim.salt == salt and len(claim.path) == len(path) - 1 and claim.overdue_at > now
            if alike and before and claim.path[-1] == before[0]:
                self._pool.claim(path[-1], session)
                claim.path.append(path[-1])
                claim.blocks += 1
                return
        self.add(session, salt, path, returns, now)

    def end(self, session: str) -> None:
        """The session is over: what it had alone is the first to be evicted."""
        for claim in tuple(self._of.get(session, ())):
            self._end(claim, ended=True)

    def give_up(self, now: float) -> None:
        """Give up claims until the pool has a block to give, if one of them can bring that about."""
        while not self._pool.gives:
            if self._victim is None or self._victim.over or not self._victim.path:
                self._victim = self._next(now)
                if self._victim is None:
                    return
            self._lose_last(self._victim)

    def cut(self) -> None:
        """Places are gone that need not be the last ones of a claim: it ends before them."""
        for claim in tuple(self):
            kept = sum(1 for _ in takewhile(lambda place: place.kept, claim.path))
            while len(claim.path) > kept:
                self._lose_last(claim)

    def _lose_last(self, claim: SessionClaim[P]) -> None:
        place = claim.path.pop()
        self.missing += 1
        if place.kept:
            self._pool.unclaim(place)

    def _end(self, claim: SessionClaim[P], *, ended: bool = False) -> None:
        claim.over = True
        self._alive -= 1
        self.missing -= claim.blocks - len(claim.path)
        # What ended goes to the front of a line, and all else to its end: either way the tail is evicted first.
        for place in claim.path if ended else reversed(claim.path):
            if place.kept:
                self._pool.unclaim(place, ended=ended)
        claims = self._of[claim.session]
        claims.remove(claim)
        if not claims:
            del self._of[claim.session]

    def _line_up(self, claim: SessionClaim[P]) -> None:
        number = next(self._numbers)
        for line, at in ((self._overdue, claim.overdue_at), (self._expected, -claim.expected_at)):
            heappush(line, (at, number, claim))
            if len(line) > 2 * self._alive + SPARE:
                line[:] = [entry for entry in line if not entry[2].over and entry[2].path]
                heapify(line)

    def _next(self, now: float) -> SessionClaim[P] | None:
        for line, at_most in ((self._overdue, now), (self._expected, math.inf)):
            while line and (line[0][2].over or not line[0][2].path):
                heappop(line)
            if line and line[0][0] <= at_most:
                return line[0][2]
        return None

    def _drop_gone(self, claim: SessionClaim[P]) -> None:
        """Places leave the cache with all below them, so those that are gone are the last ones."""
        while claim.path and not claim.path[-1].kept:
            claim.path.pop()
            self.missing += 1
