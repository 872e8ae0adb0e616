"""What sessions need of one KV cache: each session's context, and what it will grow to. Pure: times are parameters.

Owns: one record per session that has begun, and what was learned from those that ended. All numbers are tokens.
Always holds:
- Each token of a context has one owner. What a session found in the cache at its first turn belongs to the session that
  computed it. When that one ends or is silent for too long, it belongs to another that shares it.
- `of_sessions` is the sum of what the sessions need that are neither over nor silent for too long. `live` is the sum of what
  they have now. `claimed` is between them: what they have at once at most, if all grow alike and each ends at its need. It has
  requests without a session, too: at most half the cache, as they may wait in the engine, and hold up no session for ever.
- A session needs at least what it has, and at most the whole cache, whatever was said or learned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from midstream.core.types import Session
from midstream.replica.kv_lengths import ENDS_AT, LEARNED_FROM, Forecast, Lengths, Recent, most_at_once

#: So many are enough for a group to be judged by its own.
GROUP_KNOWN_FROM = 4
GROUPS_MAX = 1024
#: Of so many sessions that went on elsewhere it is known when they began.
MOVED_MAX = 4096
#: Of sessions that came to more tokens than this one has, the share that its need covers; and of answers, likewise.
COVERED = 0.6
#: A session that has more than any came to that is known will grow as much again as it grew, as is expected, and in all by so
#: many turns at least.
TURNS_EXPECTED = 12
#: How long a session may be silent before it loses its claim: twice what covers this share of the times between two turns.
RETURNED = 0.95
SILENT_S_MIN, SILENT_S_MAX = 5.0, 300.0
#: Where a smaller share of turns had a next one, of so many at least, a turn is the last one: nothing is kept for another, and
#: a session claims what it has.
COMES_BACK, JUDGED_FROM = 0.1, 4


class Beginning(NamedTuple):
    """What sessions may have in common, as hashes. family: the first tokens of the first prompt. group: all of it. size: its
    tokens, of a session that begins here with more; 0: not known. None: it begins with its first prompt."""

    family: int
    group: int
    size: int | None = None

    def of(self, tokens: int) -> int:
        """Tokens of the first prompt, of so many."""
        return tokens if self.size is None else min(self.size, tokens)


@dataclass(eq=False, slots=True)
class SessionNeed:
    """One session that has begun. Tokens.

    first: of its first prompt. opened, asked: tokens of its first prompt, and of its last one. held: its context, after its
    last turn or of the turn that runs. shared: the first of these, which belong to another session. said: what its client says
    that it comes to. turns: that run. beside: what these have beside the context, in other choices and prompts. number: grows
    in the order in which sessions began. counted, live: in the account's `of_sessions` and `live` so much. learned: what it
    came to is known to the next ones.
    """

    first: Beginning
    opened: int
    asked: int = 0
    held: int = 0
    shared: int = 0
    said: int | None = None
    turns: int = 0
    beside: int = 0
    used_at: float = 0.0
    number: int = 0
    counted: int = 0
    live: int = 0
    ends: tuple[int, ...] = ()
    begun: bool = False
    learned: bool = False

    @property
    def forecast(self) -> Forecast:
        return Forecast(self.live, max(0, self.counted - self.live), self.ends)


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
        # The number and `opened` of sessions that were to go on elsewhere. Nobody may have taken them.
        self._moved: OrderedDict[Session, tuple[int, int]] = OrderedDict()
        self._groups: OrderedDict[int, Lengths] = OrderedDict()
        # Those of each family that claim, for what they share; and how many each group has.
        self._members: dict[int, dict[Session, SessionNeed]] = {}
        self._mates: dict[int, int] = {}
        # By family, while it has members: tokens that its groups share.
        self._shared: dict[int, int] = {}
        self._lengths, self._gaps, self._answers = Lengths(), Recent(), Recent()
        # From the prompt of a turn to that of the next one.
        self._growth = Recent()
        # Whether a turn had a next one: 1 or 0.
        self._returned = Recent()
        self._by_tenant: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"KvAccount({len(self._sessions)} sessions, {self.claimed} of {self.capacity} tokens claimed)"

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    @property
    def claimed(self) -> int:
        most = most_at_once(one.forecast for one in self._claiming())
        return min(most, max(self.of_sessions, self.live)) + self._of_none

    @property
    def needed(self) -> int:
        """What all come to, one after the other."""
        return self.of_sessions + self._of_none

    @property
    def _of_none(self) -> int:
        """Of requests without a session."""
        return min(self._without_session, self.capacity // 2)

    def _claiming(self) -> Iterator[SessionNeed]:
        return (one for members in self._members.values() for one in members.values())

    @property
    def between(self) -> int:
        """The contexts of sessions between two turns."""
        return sum(one.held - one.shared for one in self._sessions.values() if not one.turns)

    @property
    def turns(self) -> int:
        """That run. Simulated histories look at it."""
        return sum(one.turns for one in self._sessions.values())

    def opened(self, session: Session) -> int:
        """Tokens of its first prompt; 0: not known."""
        one = self._sessions.get(session)
        return self._moved.get(session, (0, 0))[1] if one is None else one.opened

    def runs(self, session: Session) -> bool:
        one = self._sessions.get(session)
        return one is not None and one.turns > 0

    def of_tenant(self, tenant: str) -> int:
        """What its sessions claim."""
        return self._by_tenant.get(tenant, 0)

    # -- what is expected

    def asks(self, first: Beginning, tokens: int, said: int | None = None, beside: int = 0) -> int:
        """What a new session would claim. Its prompt is there already if others of its group are."""
        live, growth, _ = self._new(first, tokens, said, beside)
        return live + growth

    def admits(self, first: Beginning, tokens: int, said: int | None = None, beside: int = 0) -> bool:
        """Whether a new session fits beside all that have begun, to the end."""
        one, room = self._new(first, tokens, said, beside), self.capacity - self._of_none
        if self.of_sessions + one.live + one.growth <= room:
            return True
        begun = (each.forecast for each in self._claiming())
        return self.live + one.live <= room and most_at_once([one, *begun]) <= room

    def _new(self, first: Beginning, tokens: int, said: int | None, beside: int) -> Forecast:
        opened = first.of(tokens)
        own = tokens - opened if first.group in self._mates else tokens
        return self._forecast_of(own + beside, first, tokens, said, tokens - (opened or tokens))

    def _forecast_of(
        self, live: int, first: Beginning, tokens: int, said: int | None, grown: int = 0
    ) -> Forecast:
        """Of a session that claims `live` of the `tokens` that it has."""
        claimed, *ends = self._comes_to(first, tokens, said, grown, (COVERED, *ENDS_AT))
        now = self._within(tokens)
        return Forecast(live, claimed - now, tuple(end - now for end in ends))

    def beside(self, prompts: int, choices: int, most: int) -> int:
        """What a turn has beside its context: tokens of its other prompts, and of its other choices what is likely, of `most`
        that each may come to."""
        answer = self._answers.quantile(COVERED)
        return prompts + (choices - 1) * (most if answer is None else min(most, int(answer)))

    def _comes_to(
        self, first: Beginning, tokens: int, said: int | None, grown: int, shares: Sequence[float]
    ) -> list[int]:
        """What these shares come to at most of sessions that have so many tokens now; one number if nothing tells them apart.
        grown: of the tokens, since its first prompt."""
        if said is not None:
            return [self._within(max(said, tokens))]
        if not self._comes_back():
            # The engine itself divides the cache among turns that run.
            return [self._within(tokens)]
        of_group = self._groups.get(first.group)
        lengths = self._lengths if of_group is None or len(of_group) < GROUP_KNOWN_FROM else of_group
        of_few = TURNS_EXPECTED * (self._growth.quantile(0.5) or 0) - grown
        far = max(lengths.longest, tokens + max(grown, of_few))
        known = (lengths.likely(share, tokens) for share in shares)
        return [self._within(int(far if final is None else final)) for final in known]

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

    def carries(self, session: Session, tokens: int, beside: int = 0) -> bool:
        """Whether a next turn with a prompt of so many tokens fits beside what those sessions come to that began earlier. The
        one that began first always fits. One that claims nothing any more counts as the youngest."""
        one = self._sessions.get(session)
        if not self.capacity or (one is not None and one.turns):
            return True
        if one is None:
            own = Forecast(tokens + beside, 0)
        else:
            live, grown = max(0, tokens - one.shared) + beside, max(0, tokens - one.opened)
            own = self._forecast_of(live, one.first, tokens, one.said, grown)
        others = self.of_sessions - (0 if one is None else one.counted)
        if others + own.live + own.growth <= self.capacity:
            # Nearly always. Each session that claims is looked at only where not all fit.
            return True
        number = self.number(session)
        before = [other.forecast for other in self._claiming() if other.number < number]
        return not any(claim.live for claim in before) or most_at_once([own, *before]) <= self.capacity

    def number(self, session: Session) -> int:
        """In the order in which sessions began. The last one is one that is over, and has a turn all the same."""
        one = self._sessions.get(session)
        return self._moved.get(session, (self._number + 1, 0))[0] if one is None else one.number

    def begin(
        self,
        session: Session,
        first: Beginning,
        tokens: int,
        now: float,
        said: int | None = None,
        beside: int = 0,
        came_at: float | None = None,
    ) -> None:
        """A turn with a prompt of so many tokens begins. A session that was silent for too long has its claim again.

        came_at: when it was asked for, if it had to wait."""
        one = self._sessions.get(session)
        if one is None:
            self._number += 1
            number, _ = self._moved.pop(session, (self._number, 0))
            opened = first.of(tokens)
            one = self._sessions[session] = SessionNeed(first, opened or tokens, number=number)
            one.shared = opened if first.group in self._mates else 0
        elif not one.turns and one.begun:
            # What it waited here is no silence.
            self._gaps.add(max(0.0, (now if came_at is None else came_at) - one.used_at))
            self._returned.add(1)
            one.learned = False
            self._growth.add(max(0, tokens - one.asked))
        self._enrol(session, one)
        one.said = said if said is not None else one.said
        one.asked = tokens
        one.turns += 1
        one.beside += beside
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
        members, came_with = self._members.get(one.first.family, {}), one.first.size
        if session in members:
            if came_with is not None and cached >= came_with:
                # Behind its first prompt, what is there is its own. Alone, it may have all of it from its home before.
                alone = self._mates[one.first.group] == 1
                cached = min(came_with, self._shared.get(one.first.family, 0)) if alone else came_with
            elif self._mates[one.first.group] == 1:
                # Ended sessions of its group left a part of the prompt in the cache. No other session claims it.
                cached = self._common(one.first.family, cached)
            one.shared = 0 if len(members) == 1 else min(max(cached, one.shared), one.held)
            self._count(session, one)

    def _common(self, family: int, cached: int) -> int:
        """What groups of the family share: the least that the first session of one found."""
        if cached:
            self._shared[family] = min(cached, self._shared.get(family, cached))
        return min(cached, self._shared.get(family, cached))

    def end_turn(self, session: Session, tokens: int, now: float, beside: int = 0) -> None:
        """tokens: of the whole context now; 0: nothing was computed. beside: as the turn began with."""
        one = self._sessions.get(session)
        if one is None:
            return
        # A turn of a session that was closed and began again may end first.
        self._enrol(session, one)
        one.turns = max(0, one.turns - 1)
        one.beside = max(0, one.beside - beside) if one.turns else 0
        if tokens > one.held:
            self._answers.add(tokens - one.held)
        one.used_at, one.begun = now, one.begun or tokens > 0
        one.held = max(one.held, tokens)
        if not one.turns:
            self._idle[session] = None
        self._count(session, one)

    def end(self, session: Session, *, elsewhere: bool = False) -> bool:
        """The session is over, and its claim is free at once. Returns whether it was known. elsewhere: its next turn is on
        another replica, so this one does not learn how long it becomes."""
        one = self._sessions.pop(session, None)
        if not elsewhere:
            self._moved.pop(session, None)
        if one is None:
            return False
        if elsewhere:
            self._moved[session] = one.number, one.opened
            if len(self._moved) > MOVED_MAX:
                self._moved.popitem(last=False)
        if session in self._idle:
            del self._idle[session]
            self._returned.add(int(elsewhere))
        one.learned = one.learned or elsewhere
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
        self._moved.clear()
        self._members.clear()
        self._mates.clear()
        self._shared.clear()

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
        for one in self._sessions.values():
            assert one.live in (0, one.held - one.shared + one.beside)
            assert one.beside == 0 or one.turns, "what no turn has is claimed"
        most = most_at_once(one.forecast for one in self._claiming())
        assert self.live <= most
        assert self.claimed - self._of_none <= max(self.of_sessions, self.live)

    # -- inside

    def _count(self, session: Session, one: SessionNeed) -> None:
        live = one.held - one.shared + one.beside
        self.live += live - one.live
        one.live = live
        own = self._forecast_of(live, one.first, one.held, one.said, max(0, one.held - one.opened))
        one.ends = own.ends
        need = self._within(one.held) + own.growth
        self._set(session, one, max(0, need - one.shared) + one.beside)

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
        group = self._groups.pop(one.first.group, None) or Lengths()
        for lengths, of_group in ((self._lengths, None), (group, one.first.group)):
            if lengths.add(one.held):
                others = (each for each in islice(self._claiming(), LEARNED_FROM) if each is not one)
                lengths.judge(each.held for each in others if of_group in (None, each.first.group))
        self._groups[one.first.group] = group
        if len(self._groups) > GROUPS_MAX:
            self._groups.popitem(last=False)

    def _enrol(self, session: Session, one: SessionNeed) -> None:
        """It claims from now on."""
        first = one.first
        if session in self._members.get(first.family, ()):
            return
        if first.family not in self._members:
            # No session has the prefix that it shared.
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
            self._shared.pop(first.family, None)
            return
        # Of its own group, the one that shares most. Of others, the one that shares least: that is this one's.
        mates = [each for each, other in members.items() if other.first.group == first.group]
        sharing = [each for each, other in members.items() if other.shared] or list(members)
        heir = (max if mates else min)(mates or sharing, key=lambda each: members[each].shared)
        other = members[heir]
        alike = one.held if mates else min(one.held, self._shared.get(first.family, one.held))
        passed = min(other.shared, alike) - one.shared
        if passed > 0:
            other.shared -= passed
            one.shared += passed
            self._count(heir, other)
