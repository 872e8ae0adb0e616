"""What sessions need of one KV cache: each session's context, and what it will grow to. Pure: times are parameters.

Owns: one record per session that has begun, and what was learned from those that ended. All numbers are tokens.
Always holds:
- Each token of a context has one owner. What a session found in the cache at its first turn belongs to the session that
  computed it. When that one ends or is silent for too long, it belongs to another that shares it.
- `of_sessions` is the sum of what the sessions need that are neither over nor silent for too long. `claimed` has requests
  without a session, too: at most half the cache, as they may wait in the engine, and hold up no session for ever.
- `live` is the sum of what these sessions have now.
- A session needs at least what it has, and at most the whole cache, whatever was said or learned.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from midstream.core.types import Session

#: What is learned is learned from so many, the latest.
LEARNED_FROM = 256
#: So many are enough for a group to be judged by its own.
GROUP_KNOWN_FROM = 4
GROUPS_MAX = 1024
#: Of sessions that came to more tokens than this one has, the share that its need covers.
COVERED = 0.75
#: How long a session may be silent before it loses its claim: twice what covers this share of the times between two turns.
RETURNED = 0.95
SILENT_S_MIN, SILENT_S_MAX = 5.0, 300.0
#: Where a smaller share of turns had a next one, of so many at least, a turn is the last one: nothing is kept for another, and
#: a session claims what it has.
COMES_BACK, JUDGED_FROM = 0.1, 4


class Beginning(NamedTuple):
    """What sessions may have in common, as hashes. family: the first tokens of the first prompt. group: all of it."""

    family: int
    group: int


@dataclass(eq=False, slots=True)
class Recent:
    """The latest values, and quantiles of them."""

    _values: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == LEARNED_FROM:
            del self._ordered[bisect_right(self._ordered, self._values.popleft()) - 1]
        self._values.append(value)
        insort(self._ordered, value)

    def quantile(self, share: float, above: float = -1.0) -> float | None:
        """Of those above a value; None if there is none."""
        first = bisect_right(self._ordered, above)
        count = len(self._ordered) - first
        return self._ordered[first + min(count - 1, int(share * count))] if count else None


@dataclass(eq=False, slots=True)
class SessionNeed:
    """One session that has begun. Tokens.

    first: of its first prompt. held: its context, after its last turn or of the turn that runs. shared: the first of these,
    which belong to another session. said: what its client says that it comes to. turns: that run. number: grows in the order
    in which sessions began. counted, live: in the account's `claimed` and `live` so much. learned: what it came to is known to
    the next ones.
    """

    first: Beginning
    held: int = 0
    shared: int = 0
    said: int | None = None
    turns: int = 0
    used_at: float = 0.0
    number: int = 0
    counted: int = 0
    live: int = 0
    begun: bool = False
    learned: bool = False


class KvAccount:
    """capacity: 0 where nothing is known of the cache. understated: sessions that came to more than their client said."""

    def __init__(self) -> None:
        self.capacity = 0
        self.of_sessions = 0
        self._without_session = 0
        self.live = 0
        self._number = 0
        self.understated = 0
        self._sessions: dict[Session, SessionNeed] = {}
        # Between two turns and not silent for too long, the longest silent first.
        self._idle: OrderedDict[Session, None] = OrderedDict()
        self._groups: OrderedDict[int, Recent] = OrderedDict()
        # Those of each family that claim, for what they share; and how many each group has.
        self._members: dict[int, dict[Session, SessionNeed]] = {}
        self._mates: dict[int, int] = {}
        self._finals, self._gaps, self._growth = Recent(), Recent(), Recent()
        # Whether a turn had a next one: 1 or 0.
        self._returned = Recent()
        self._by_tenant: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"KvAccount({len(self._sessions)} sessions, {self.claimed} of {self.capacity} tokens claimed)"

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    @property
    def claimed(self) -> int:
        return self.of_sessions + min(self._without_session, self.capacity // 2)

    @property
    def between(self) -> int:
        """The contexts of sessions between two turns."""
        return sum(one.held - one.shared for one in self._sessions.values() if not one.turns)

    @property
    def turns(self) -> int:
        """That run. Simulated histories look at it."""
        return sum(one.turns for one in self._sessions.values())

    @property
    def room(self) -> int:
        return max(0, self.capacity - self.claimed)

    def runs(self, session: Session) -> bool:
        one = self._sessions.get(session)
        return one is not None and one.turns > 0

    def of_tenant(self, tenant: str) -> int:
        """What its sessions claim."""
        return self._by_tenant.get(tenant, 0)

    # -- what is expected

    def asks(self, first: Beginning, tokens: int, said: int | None = None) -> int:
        """What a new session would claim. Its prompt is there already if others of its group are."""
        return self._need(first, tokens, said) - (tokens if first.group in self._mates else 0)

    def _need(self, first: Beginning, tokens: int, said: int | None) -> int:
        """What a session comes to that has so many tokens now."""
        if said is not None:
            return self._within(max(said, tokens))
        if not self._comes_back():
            # The engine itself divides the cache among turns that run.
            return self._within(tokens)
        of_group = self._groups.get(first.group)
        finals = self._finals if of_group is None or len(of_group) < GROUP_KNOWN_FROM else of_group
        final = finals.quantile(COVERED, above=tokens)
        if final is None:
            final = tokens + (self._growth.quantile(COVERED) or 0)
        return self._within(max(int(final), tokens))

    def _within(self, tokens: int) -> int:
        return min(tokens, self.capacity) if self.capacity else tokens

    def returns_s(self) -> float:
        """From the end of a turn to the next one, as is likely."""
        return self._gaps.quantile(0.5) or 0.0

    def silent_s(self) -> float:
        """So long a session may be silent."""
        if not self._comes_back():
            return 0.0
        return min(max(2 * (self._gaps.quantile(RETURNED) or 0.0), SILENT_S_MIN), SILENT_S_MAX)

    def _comes_back(self) -> bool:
        return len(self._returned) < JUDGED_FROM or bool(self._returned.quantile(1 - COMES_BACK))

    # -- turns

    def carries(self, session: Session, tokens: int) -> bool:
        """Whether a next turn with a prompt of so many tokens fits beside what all sessions have now, or else beside what those
        have that began earlier. The one that began first always fits."""
        one = self._sessions.get(session)
        if one is None or one.turns or not self.capacity:
            return True
        own = max(0, tokens - one.shared)
        if self.live - one.live + own <= self.capacity:
            return True
        claiming = (other for members in self._members.values() for other in members.values())
        before = sum(other.live for other in claiming if other.number < one.number)
        return not before or before + own <= self.capacity

    def number(self, session: Session) -> int:
        """In the order in which sessions began; one that was closed meanwhile is no later than any."""
        one = self._sessions.get(session)
        return 0 if one is None else one.number

    def begin(
        self, session: Session, first: Beginning, tokens: int, now: float, said: int | None = None
    ) -> None:
        """A turn with a prompt of so many tokens begins. A session that was silent for too long has its claim again."""
        one = self._sessions.get(session)
        if one is None:
            self._number += 1
            one = self._sessions[session] = SessionNeed(first, number=self._number)
            one.shared = tokens if first.group in self._mates else 0
        elif not one.turns and one.begun:
            self._gaps.add(now - one.used_at)
            self._returned.add(1)
            one.learned = False
            if tokens > one.held:
                self._growth.add(tokens - one.held)
        self._enrol(session, one)
        one.said = said if said is not None else one.said
        one.turns += 1
        one.used_at = now
        one.held = max(one.held, tokens) if one.turns > 1 else tokens
        one.shared = min(one.shared, one.held)
        self._idle.pop(session, None)
        self._count(session, one)

    def found(self, session: Session, cached: int) -> None:
        """The engine says how much of the prompt it had. At its first turn that is others'."""
        one = self._sessions.get(session)
        if one is None or one.begun:
            return
        one.begun = True
        members = self._members.get(one.first.family, {})
        if session in members:
            one.shared = 0 if len(members) == 1 else min(max(cached, one.shared), one.held)
            self._count(session, one)

    def end_turn(self, session: Session, tokens: int, now: float) -> None:
        """tokens: of the whole context now; 0: nothing was computed."""
        one = self._sessions.get(session)
        if one is None:
            return
        # A turn of a session that was closed and began again may end first.
        self._enrol(session, one)
        one.turns = max(0, one.turns - 1)
        one.used_at, one.begun = now, one.begun or tokens > 0
        one.held = max(one.held, tokens)
        if not one.turns:
            self._idle[session] = None
        self._count(session, one)

    def end(self, session: Session) -> bool:
        """The session is over. Its claim is free at once. Whether it was known."""
        one = self._sessions.pop(session, None)
        if one is None:
            return False
        if session in self._idle:
            del self._idle[session]
            self._returned.add(0)
        self._give_up(session, one)
        return True

    def demote(self, now: float) -> float | None:
        """Sessions that were silent for too long lose their claims. When the next one is due; None: none is."""
        silent_s = self.silent_s()
        while self._idle:
            session = next(iter(self._idle))
            one = self._sessions[session]
            if one.used_at + silent_s > now:
                return one.used_at + silent_s
            del self._idle[session]
            self._returned.add(0)
            self._give_up(session, one)
        return None

    def without_session(self, tokens: int) -> None:
        """So many more tokens of requests that have no session; fewer: a negative number."""
        self._without_session += tokens

    def reset(self) -> None:
        """The cache is gone, with all that was in it. What was learned stays."""
        for session in list(self._sessions):
            self._set(session, self._sessions[session], 0)
        self._sessions.clear()
        self._idle.clear()
        self._members.clear()
        self._mates.clear()

    def check(self) -> None:
        """Assert that the books balance."""
        counted = {session: one.counted for session, one in self._sessions.items()}
        tenants: dict[str, int] = {}
        for (tenant, _), tokens in counted.items():
            tenants[tenant] = tenants.get(tenant, 0) + tokens
        assert {k: v for k, v in tenants.items() if v} == {k: v for k, v in self._by_tenant.items() if v}
        for session, one in self._sessions.items():
            assert 0 <= one.shared <= one.held, f"{session} shares more than it has"
            assert one.turns or one.counted == 0 or session in self._idle, f"{session} claims for ever"
            claims = one.turns > 0 or session in self._idle
            assert claims == (session in self._members.get(one.first.family, ())), (
                f"{session} shares what is gone"
            )
        assert sum(map(len, self._members.values())) == sum(self._mates.values())
        assert self.of_sessions == sum(counted.values())
        assert self.live == sum(one.live for one in self._sessions.values())
        assert all(one.live in (0, one.held - one.shared) for one in self._sessions.values())

    # -- inside

    def _count(self, session: Session, one: SessionNeed) -> None:
        self.live += one.held - one.shared - one.live
        one.live = one.held - one.shared
        self._set(session, one, max(0, self._need(one.first, one.held, one.said) - one.shared))

    def _set(self, session: Session, one: SessionNeed, tokens: int) -> None:
        if not tokens:
            self.live -= one.live
            one.live = 0
        more = tokens - one.counted
        one.counted = tokens
        self.of_sessions += more
        left = self._by_tenant.get(session[0], 0) + more
        if left:
            self._by_tenant[session[0]] = left
        else:
            self._by_tenant.pop(session[0], None)

    def _learn(self, one: SessionNeed) -> None:
        if one.learned or not one.begun or not one.held:
            return
        one.learned = True
        self.understated += one.said is not None and one.held > one.said
        self._finals.add(one.held)
        group = self._groups.pop(one.first.group, None) or Recent()
        group.add(one.held)
        self._groups[one.first.group] = group
        if len(self._groups) > GROUPS_MAX:
            self._groups.popitem(last=False)

    def _enrol(self, session: Session, one: SessionNeed) -> None:
        """It claims from now on."""
        first = one.first
        if session in self._members.get(first.family, ()):
            return
        if first.family not in self._members:
            # Nobody has what it shared.
            one.shared = 0
        self._members.setdefault(first.family, {})[session] = one
        self._mates[first.group] = self._mates.get(first.group, 0) + 1

    def _give_up(self, session: Session, one: SessionNeed) -> None:
        """It claims nothing from now on. What it computed and others share belongs to the one that shares most."""
        self._learn(one)
        self._set(session, one, 0)
        first, members = one.first, self._members.get(one.first.family, {})
        if members.pop(session, None) is None:
            return
        self._mates[first.group] -= 1
        if not self._mates[first.group]:
            del self._mates[first.group]
        if not members:
            del self._members[first.family]
            return
        heir = max(members, key=lambda each: members[each].shared)
        other = members[heir]
        passed = min(other.shared, one.held) - one.shared
        if passed > 0:
            other.shared -= passed
            one.shared += passed
            self._count(heir, other)
