"""Which turn may begin now: those that wait for room in the KV cache, in their order.

Owns: the queue of turns. Pure: times are parameters, and what follows is a call.
Always holds:
- A turn of a session that has begun goes before all new ones. It waits only while the sessions that began before it are
  expected to leave it no room. So the session that began first never waits, and one after the other ends.
- Nothing waits while nothing is known of the cache.
- Of equal priority and tenant, the one that came first goes first, also if a later one would fit. So no large one starves.
- Between tenants the one that claims least goes first. Nobody is overtaken by more than OVERTAKEN of what was before it.
- If no session claims anything, the first one begins, however large it is.
- At most `waiting_max` new ones wait, and as many turns of sessions that have begun. A further one gets 429.
- A turn whose gate is closed for a swap stays, and holds up nobody.
"""

from __future__ import annotations

from bisect import insort_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from midstream.core.errors import Overloaded
from midstream.core.price import Handed
from midstream.core.types import Session
from midstream.replica.kv_account import Beginning, KvAccount

#: A client that had no turn, as its own time limit was over or a swap took too long, has its place again if it comes back
#: within so long.
PLACE_KEPT_S = 60.0
PLACES_MAX = 4096
#: By this share of the tokens that were before it when it came, others may go before it.
OVERTAKEN = 0.2
RETRY_S_MAX = 60


@dataclass(eq=False, slots=True)
class Waiting:
    """One turn. shut: its gate would refuse it now, and not for long. over: nothing holds it any more. begun: its session has
    begun. beside: what it has beside its context. asked: what it would claim more, when it came. ahead: tokens that were
    claimed or waited for before it. overtaken: by those that came later. movable: another replica may take it. handed: it is
    to. age_s: of a session that moved here, when it came. Its place is that of one that came so much earlier."""

    session: Session
    first: Beginning
    tokens: int
    said: int | None
    priority: int
    came_at: float
    go: Callable[[], None] = lambda: None
    over: Callable[[], bool] = lambda: False
    shut: Callable[[], bool] = lambda: False
    begun: bool = False
    beside: int = 0
    asked: int = 0
    ahead: int = 0
    overtaken: int = 0
    movable: bool = False
    handed: Handed | None = None
    age_s: float = 0.0


class KvQueue:
    def __init__(self, account: KvAccount, waiting_max: int) -> None:
        self.account = account
        self._waiting_max = waiting_max
        # In the order in which they came.
        self._waiting: list[Waiting] = []
        # Of these: those whose session has begun, and what all asked for.
        self._begun = 0
        self._asked = 0
        # Those that left without a turn: when they came, how old they were then, and when they left.
        self._left: OrderedDict[Session, tuple[float, float, float]] = OrderedDict()
        self.refused = 0
        # Of the last admissions, for how long to wait before a retry.
        self._last_wait_s = 0.0

    def __repr__(self) -> str:
        return f"KvQueue({len(self._waiting)} waiting, {self.account!r})"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def new(self) -> int:
        """How many wait whose sessions have not begun."""
        return len(self._waiting) - self._begun

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """In the order in which they came."""
        return tuple(self._waiting)

    def hand_over(self, one: Waiting, handed: Handed, now: float) -> None:
        """Another replica is to take the turn. It has its place again if it comes back."""
        self.leave(one, now)
        one.handed = handed
        one.go()

    def fits(self, one: Waiting) -> bool:
        account = self.account
        if one.begun:
            return account.carries(one.session, one.tokens, one.beside)
        if not account.capacity or not account.of_sessions:
            return True
        return account.admits(one.first, one.tokens, one.said, one.beside)

    def _asks(self, one: Waiting) -> int:
        """What it would claim more."""
        if one.begun:
            return 0
        return self.account.asks(one.first, one.tokens, one.said, one.beside)

    def join(self, one: Waiting) -> bool:
        """Whether it has to wait. Raises Overloaded. One that need not wait is to `begin` in the account at once."""
        if (one.begun or not self._waiting) and self.fits(one):
            return False
        alike = self._begun if one.begun else self.new
        if alike >= self._waiting_max:
            self.refused += 1
            what = "turns of sessions" if one.begun else "new sessions"
            raise Overloaded(
                f"{alike} {what} wait for room in the KV cache, and more may not; retry it later",
                retry_after_s=min(RETRY_S_MAX, max(1, round(self._last_wait_s))),
            )
        one.asked, one.ahead = self._asks(one), self.account.needed + self._asked
        self._begun += one.begun
        self._asked += one.asked
        came_at, age_s, left_at = self._left.pop(one.session, (one.came_at, one.age_s, one.came_at))
        if one.came_at - left_at <= PLACE_KEPT_S:
            one.came_at, one.age_s = came_at, max(age_s, one.age_s)
        insort_right(self._waiting, one, key=lambda each: each.came_at - each.age_s)
        return True

    def leave(self, one: Waiting, now: float) -> None:
        """Its client left."""
        if one in self._waiting:
            self._drop(one)
            self.keep_place(one.session, one.came_at, now, one.age_s)

    def keep_place(self, session: Session, came_at: float, now: float, age_s: float = 0.0) -> None:
        """It has had no turn, and its client may ask again."""
        self._left[session] = came_at, age_s, now
        if len(self._left) > PLACES_MAX:
            self._left.popitem(last=False)

    def ended(self, session: Session) -> None:
        """What waits of the session begins a new one."""
        for one in self._waiting:
            if one.session == session and one.begun:
                one.begun = False
                self._begun -= 1
                one.asked = self._asks(one)
                self._asked += one.asked

    def position(self, session: Session) -> int | None:
        """From 1; None: it does not wait."""
        found = self.find(session)
        if found is None:
            return None
        own = not found.begun, found.priority
        before = sum((not one.begun, one.priority) < own for one in self._waiting)
        alike = (one for one in self._waiting if (not one.begun, one.priority) == own)
        return before + 1 + next(at for at, one in enumerate(alike) if one is found)

    def of(self, session: Session) -> list[Waiting]:
        """All that waits of the session."""
        return [each for each in self._waiting if each.session == session]

    def find(self, session: Session) -> Waiting | None:
        """What of the session waits, if anything does."""
        return next((one for one in self._waiting if one.session == session), None)

    def admit(self, now: float, *, everybody: bool = False) -> float | None:
        """Let in all that may begin now, or everybody. When the next claim may lapse by silence; None: none does."""
        due = self.account.demote(now)
        if everybody:
            self.wake(now, everybody=True)
        while (one := self.following()) is not None:
            if not self.fits(one):
                return due
            asked = self._asks(one)
            for before in () if one.begun else self._waiting[: self._waiting.index(one)]:
                before.overtaken += asked
            self._last_wait_s = now - one.came_at
            # What waits of the same session is not new any more. All claims stand before the next one is judged.
            for turn in self.of(one.session):
                self._begin(turn, now)
        return due

    def wake(self, now: float, *, everybody: bool = False) -> None:
        """Let in whatever nothing holds any more, or everybody."""
        for one in [each for each in self._waiting if everybody or each.over()]:
            self._begin(one, now)

    def _drop(self, one: Waiting) -> None:
        self._waiting.remove(one)
        self._begun -= one.begun
        self._asked -= one.asked

    def _begin(self, one: Waiting, now: float) -> None:
        self._drop(one)
        self.account.begin(one.session, one.first, one.tokens, now, one.said, one.beside, one.came_at)
        one.go()

    def following(self) -> Waiting | None:
        """The one that begins next, as soon as it fits."""
        able = [one for one in self._waiting if not one.shut()]
        begun = [one for one in able if one.begun] if self._begun else []
        if begun:
            return min(begun, key=lambda one: self.account.number(one.session))
        priority = min((one.priority for one in able), default=0)
        equals = [one for one in able if one.priority == priority]
        if not equals:
            return None
        firsts: dict[str, Waiting] = {}
        for one in equals:
            firsts.setdefault(one.session[0], one)
        found = min(firsts.values(), key=lambda one: self.account.of_tenant(one.session[0]))
        while True:
            asked = self._asks(found)
            before = equals[: equals.index(found)]
            most = next((one for one in before if one.overtaken + asked > OVERTAKEN * one.ahead), None)
            if most is None:
                return found
            # It came before, and may not go before those that came before it either.
            found = firsts[most.session[0]]
