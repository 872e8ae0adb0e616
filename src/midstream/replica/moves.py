"""Which of a replica's turns another replica is to take, and what its turns are like. Pure: times are parameters.

Owns: what was measured of the last turns, the offer that a gateway made last, and which sessions moved here.
Always holds:
- A turn is handed over before anything was done for it, and only by core/price.py. One that runs is never.
- All that one offer takes fits into the room that it names.
- Turns of one session that wait go together, or none of them goes.
- While the replica is asked to leave, every turn is handed over that may be. Its gateway sends back what nobody takes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

import msgspec

from midstream.core.price import (
    GAIN_S_MIN,
    MOVE_EVERY_S,
    NUMBER_MAX,
    OFFER_S,
    SLOW_GAIN_S_MIN,
    Handed,
    Moved,
    MoveReason,
    RoomOffer,
    TurnPace,
    pays,
    slow_s,
)
from midstream.core.types import EngineStats, Session

#: What is measured is of so many turns, the latest; waits are of the last seconds, too.
MEASURED_FROM, WAITS_OF_S = 32, 60.0
#: Shorter prompts say little of a rate.
PREFILL_FROM = 32
MOVED_MAX = 100_000
_NO_OFFER = RoomOffer()


class EndedTurn(Protocol):
    """As sessions.TurnStats."""

    prompt_tokens: int
    cached_tokens: int
    longest: int
    admitted_s: float
    first_token_s: float | None
    generation_s: float
    queued_s: float | None


class Movable(NamedTuple):
    """A turn that may go. begun: its session has begun here. waited_s: so far. needs: what its session will claim, with what
    this turn has `beside` its context. opened: as in Handed."""

    session: Session | None
    tokens: int
    needs: int
    begun: bool
    waited_s: float
    beside: int = 0
    opened: int = 0


class Came(NamedTuple):
    """A session that moved here. age_s: how old it was then. begun: it has a history. computed: of it, tokens again."""

    at: float
    age_s: float
    begun: bool
    computed: int = 0


@dataclass(eq=False, slots=True)
class Pace:
    """What the last turns were like. waits, queued: with when they ended, in seconds."""

    waits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEASURED_FROM))
    queued: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEASURED_FROM))
    prefills: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEASURED_FROM))
    gaps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEASURED_FROM))

    def count(self, turn: EndedTurn, waited_s: float, begun: bool, now: float) -> None:
        """A turn has ended, which waited for so long before the engine had it. begun: its session had begun then."""
        if waited_s and begun:
            self.waits.append((now, waited_s))
        if turn.first_token_s is None:
            return
        queued_s = turn.queued_s or 0.0
        self.queued.append((now, queued_s))
        # For room in the KV cache, and at a gate.
        before_s = max(waited_s, turn.admitted_s) + queued_s
        computed, took_s = turn.prompt_tokens - turn.cached_tokens, turn.first_token_s - before_s
        if computed >= PREFILL_FROM and took_s > 0:
            self.prefills.append((computed, took_s))
        if turn.longest > 1:
            self.gaps.append((turn.longest - 1, turn.generation_s))

    @property
    def prefill_tokens_s(self) -> float:
        tokens, seconds = _sums(self.prefills)
        return tokens / seconds if seconds else 0.0

    @property
    def token_s(self) -> float:
        tokens, seconds = _sums(self.gaps)
        return seconds / tokens if tokens else 0.0

    @property
    def answer_tokens(self) -> float:
        return _sums(self.gaps)[0] / len(self.gaps) + 1 if self.gaps else 0.0


def _sums(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return sum(count for count, _ in values), sum(seconds for _, seconds in values)


def _mean_of_late(values: Sequence[tuple[float, float]], now: float) -> float:
    late = [s for _, s in takewhile(lambda one: now - one[0] < WAITS_OF_S, reversed(values))]
    return sum(late) / len(late) if late else 0.0


class Moves:
    """engine: its numbers now. opened_s: how long ago a session began here; None: it has not."""

    def __init__(
        self,
        engine: Callable[[], EngineStats] = EngineStats,
        opened_s: Callable[[Session], float | None] = lambda session: None,
    ) -> None:
        self.pace = Pace()
        self._engine = engine
        self._opened_s = opened_s
        self._offer, self._until = _NO_OFFER, float("-inf")
        #: Of the offer, what is left.
        self._room = 0
        self._came: OrderedDict[Session, Came] = OrderedDict()
        self.moved = self.moved_tokens = 0

    def __repr__(self) -> str:
        return f"Moves({self._offer!r}, {len(self._came)} came)"

    # -- what a gateway says

    def take(self, offer: RoomOffer, now: float) -> None:
        self._offer, self._until, self._room = offer, now + OFFER_S, offer.room_tokens

    def may_take(self, now: float) -> bool:
        """Whether an offer counts."""
        return now < self._until

    def came(self, session: Session, moved: Moved, now: float) -> None:
        """A turn of a session comes that lived elsewhere before."""
        self._came[session] = Came(now, moved.age_s, moved.begun)
        self._came.move_to_end(session)
        if len(self._came) > MOVED_MAX:
            self._came.popitem(last=False)

    def over(self, session: Session) -> None:
        """The session is over: one of its name begins again."""
        self._came.pop(session, None)

    def ended(
        self,
        turn: EndedTurn,
        waited_s: float,
        now: float,
        *,
        begun: bool = True,
        moved: Session | None = None,
    ) -> None:
        """moved: its session, if the turn brought it and its history here."""
        self.pace.count(turn, waited_s, begun, now)
        if moved is not None:
            computed = max(0, turn.prompt_tokens - turn.cached_tokens)
            self.moved += 1
            self.moved_tokens += computed
            if (found := self._came.get(moved)) is not None:
                self._came[moved] = found._replace(computed=computed)

    # -- what it reports to gateways

    def report(self, now: float, waiting: int = 0, begun: Sequence[float] = ()) -> TurnPace:
        """waiting: turns that wait for room in the KV cache. begun: how long those of sessions that have begun have waited."""
        in_engine = self._engine().waiting
        wait_s = max(max(begun), _mean_of_late(self.pace.waits, now)) if begun else 0.0
        if in_engine:
            wait_s += _mean_of_late(self.pace.queued, now)
        pace = self.pace
        return TurnPace(
            waiting=waiting + in_engine,
            # Rounded, so that a report that says the same is the same.
            wait_s=_rounded(wait_s),
            prefill_tokens_s=_rounded(pace.prefill_tokens_s),
            token_s=_rounded(pace.token_s),
            answer_tokens=_rounded(pace.answer_tokens),
            moved=self.moved,
            moved_tokens=self.moved_tokens,
        )

    # -- which turns go

    def on_arrival(self, turn: Movable, now: float) -> Handed | None:
        """Whether a turn goes that has just come, and may have to share a busy engine."""
        if not self.may_take(now):
            return None
        offer = self._offer
        if offer.leaving:
            return self._handed(turn, "leaving", 0.0, now)
        if turn.session is None or not self._has_begun(turn) or not offer.idle or turn.needs > self._room:
            return None
        engine, home = self._engine(), self.report(now)
        saved_s = home.wait_s + slow_s(home, engine.running, offer)
        if not self._pays(turn.session, turn.tokens, saved_s, now, SLOW_GAIN_S_MIN):
            return None
        # One is enough for it to be idle no more.
        self._offer = msgspec.structs.replace(offer, idle=False)
        self._room -= turn.needs
        return self._handed(turn, "slow", saved_s, now)

    def of_waiting(self, waiting: Sequence[Movable], now: float) -> dict[int, Handed]:
        """Which of the turns that wait go, by their places. Those of new sessions go in their order. waiting: of a session, all
        that wait."""
        if not self.may_take(now):
            return {}
        sessions, usual_s = _by_session(waiting), _mean_of_late(self.pace.waits, now)
        found: dict[int, Handed] = {}
        if self._offer.leaving:
            for one, places in sessions:
                found |= dict.fromkeys(places, self._handed(one, "leaving", 0.0, now))
            return found
        gains: list[tuple[float, int, list[int]]] = []
        for number, (one, places) in enumerate(sessions):
            # What it has waited for is the least that it will wait.
            saved_s = max(one.waited_s, usual_s)
            begun = self._has_begun(one)
            if begun and one.session is not None and self._pays(one.session, one.tokens, saved_s, now):
                gains.append((saved_s, number, places))
        for saved_s, number, places in sorted(gains, reverse=True):
            one = sessions[number][0]
            if one.needs <= self._room:
                self._room -= one.needs
                found |= dict.fromkeys(places, self._handed(one, "wait", saved_s, now))
        for one, places in sessions:
            new = not self._has_begun(one)
            if not new or (one.session is not None and self._came_since(one.session, now) < OFFER_S):
                continue
            if one.needs > self._room:
                # A smaller one behind it would take the room that it waits for.
                break
            self._room -= one.needs
            found |= dict.fromkeys(places, self._handed(one, "wait", one.waited_s, now))
        return found

    # -- inside

    def _pays(
        self, session: Session, tokens: int, saved_s: float, now: float, least_s: float = GAIN_S_MIN
    ) -> bool:
        if self._came_since(session, now) < MOVE_EVERY_S:
            return False
        paid = self._came[session].computed if session in self._came else 0
        rate = self._offer.prefill_tokens_s or self.pace.prefill_tokens_s
        return pays(saved_s, tokens, rate, paid, least_s)

    def _came_since(self, session: Session, now: float) -> float:
        found = self._came.get(session)
        return float("inf") if found is None else now - found.at

    def _has_begun(self, turn: Movable) -> bool:
        """One that moved here has its history, before its first turn here, too."""
        came = None if turn.session is None else self._came.get(turn.session)
        return turn.begun or (came is not None and came.begun)

    def _handed(self, turn: Movable, reason: MoveReason, saved_s: float, now: float) -> Handed:
        age_s = turn.waited_s
        if turn.session is not None:
            came = self._came.get(turn.session, Came(now, 0.0, False))
            here_s = self._opened_s(turn.session) or 0.0
            age_s = max(age_s, here_s, now - came.at + came.age_s)
        return Handed(
            reason=reason,
            tokens=turn.tokens,
            needs=turn.needs,
            saved_s=saved_s,
            age_s=max(0.0, age_s),
            begun=self._has_begun(turn),
            prefill_tokens_s=_rounded(self.pace.prefill_tokens_s),
            opened=turn.opened,
        )


def _by_session(waiting: Sequence[Movable]) -> list[tuple[Movable, list[int]]]:
    """Each session's turns as one, and their places. All their prompts are computed, at most; the session claims once, as its
    new home counts it; and the longest wait is what is saved."""
    found: dict[Session | int, tuple[Movable, list[int]]] = {}
    for at, one in enumerate(waiting):
        # One without a session stands by itself.
        key = at if one.session is None else one.session
        before, places = found.get(key, (None, []))
        if before is not None:
            beside = before.beside + one.beside
            one = Movable(
                one.session,
                before.tokens + one.tokens,
                max(before.needs - before.beside, one.needs - one.beside) + beside,
                before.begun or one.begun,
                max(before.waited_s, one.waited_s),
                beside,
                one.opened,
            )
        found[key] = one, [*places, at]
    return list(found.values())


def _rounded(value: float) -> float:
    """As it may be in a report: of a prompt that took hardly any time, the rate has no bound."""
    return float(f"{min(value, NUMBER_MAX):.2g}")
