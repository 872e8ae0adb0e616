"""Lets a replica's turns begin by what its KV cache can carry.

Owns: the account of the sessions' needs, the queue of first turns, and the timer of claims that lapse by silence.
Always holds: a turn that was let in is taken out of the account again, however it ends. A session that is over frees its claim
at once, and whoever waits for that begins in the same step of the loop. Nothing waits on a replica that serves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from midstream.core.errors import HandedOver, InvalidRequest
from midstream.core.headers import (
    EXPECTED_TOKENS_MAX,
    HEADER_BOOT,
    HEADER_EXPECTED_TOKENS,
    HEADER_MOVED,
    HEADER_QUEUE_POSITION,
    HEADER_QUEUE_WAIT,
    HEADER_STAY,
)
from midstream.core.kv import KvStats, KvWait, KvWaits
from midstream.core.price import Handed, Moved, RoomOffer, TurnPace
from midstream.core.types import GenerateRequest, Session
from midstream.core.versions import from_header
from midstream.replica.kv_account import Beginning, KvAccount
from midstream.replica.kv_queue import KvQueue, Waiting
from midstream.replica.moves import Movable, Moves
from midstream.replica.response.measured import Timings
from midstream.replica.sessions import TurnStats

#: Prompts that are equal in so many first tokens may share KV.
FAMILY_TOKENS = 32
LOOK_S = 1.0


class MeasuredTurn(Protocol):
    @property
    def turn(self) -> TurnStats: ...


@dataclass(eq=False, slots=True)
class KvTurn:
    """A request before its turn. session: None: it has none. prompt: its longest one. others: tokens of its other prompts.
    choices: of all prompts, each of `most` tokens at most. said: as its header says."""

    session: Session | None
    prompt: tuple[int, ...]
    #: Prompts share KV only where this is equal.
    apart: str = ""
    said: int | None = None
    priority: int = 0
    others: int = 0
    choices: int = 1
    most: int = 0
    #: It is a stream that another replica began.
    resumed: bool = False
    #: A trainer ended it.
    over: Callable[[], bool] = lambda: False
    #: Its gate would refuse it now, and not for long.
    shut: Callable[[], bool] = lambda: False
    #: Another replica may take it. It comes from another one.
    movable: bool = False
    moved: Moved | None = None
    #: Its session's KV is of use to it, where it may have come from. policy: as its gateway names it.
    takes_kv: bool = False
    policy: str = ""
    #: Its session had begun when it came.
    begun: bool = False
    #: What it claims beside its context, while it runs.
    beside: int = 0
    #: Since when it has its place in the queue, and how old its session was then; what that place was when it came, if it had
    #: to wait; and how long it waited.
    came_at: float = 0.0
    age_s: float = 0.0
    position: int = 0
    waited_s: float = 0.0
    #: What has its measures once it has ended. None: it was not let in.
    measured: MeasuredTurn | None = None

    @classmethod
    def of(cls, session: Session | None, requests: Sequence[GenerateRequest], **more: Any) -> KvTurn:
        """The turn whose prompts these are. more: other fields."""
        longest = max((one.prompt for one in requests), key=len, default=())
        return cls(
            session,
            longest,
            others=sum(len(one.prompt) for one in requests) - len(longest),
            choices=sum(one.n for one in requests),
            most=max((one.sampling.max_tokens for one in requests), default=0),
            **more,
        )

    @property
    def held(self) -> int:
        """Tokens of the context that it leaves."""
        return 0 if self.measured is None else len(self.prompt) + self.measured.turn.longest

    def headers(self) -> dict[str, str]:
        if not self.position:
            return {}
        wait = f"{self.waited_s * 1000:.0f}"
        return {HEADER_QUEUE_POSITION: str(self.position), HEADER_QUEUE_WAIT: wait}


class KvBudget:
    """share: of the cache that may be claimed; 0: nothing waits. stats: the engine's. known: whether a session has begun here.

    ended: is called with a session that is over here, for the engine.
    """

    def __init__(
        self,
        *,
        share: float,
        waiting_max: int,
        stats: Callable[[], KvStats],
        known: Callable[[Session], bool],
        ended: Callable[[Session], None],
        monotonic: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        moves: Moves | None = None,
    ) -> None:
        self.moves = Moves() if moves is None else moves
        self.account = KvAccount()
        self.queue = KvQueue(self.account, waiting_max)
        self._share = share
        self._stats = stats
        self._known = known
        self._ended = ended
        self._monotonic = monotonic
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self._open = True
        self._look_at = 0.0

    def __repr__(self) -> str:
        return f"KvBudget({self.queue!r})"

    def open(self, *, serving: bool) -> None:
        """serving: False: the replica takes no requests. The turns that wait are let in, and the gate refuses them."""
        self._open = serving
        self._settle()

    async def enter(self, turn: KvTurn) -> None:
        """Wait until the turn may begin. `leave` has to follow once it returned. Raises Overloaded, HandedOver."""
        session, now = turn.session, self._monotonic()
        self._look()
        tokens = len(turn.prompt)
        turn.beside = self.account.beside(turn.others, turn.choices, turn.most)
        turn.begun = session is not None and (turn.resumed or session in self.account or self._known(session))
        if session is not None and turn.moved is not None:
            self.moves.came(session, turn.moved, now)
        if turn.movable and not turn.resumed and self.moves.may_take(now):
            self._hand_over_at_once(turn, now)
        if session is None:
            self.account.without_session(tokens + turn.beside)
            return
        first = self._beginning(turn)
        self._lapse()
        one = Waiting(session, first, tokens, turn.said, turn.priority, now, over=turn.over, shut=turn.shut)
        # A session that moved here waits as a new one that is as old.
        one.age_s = 0.0 if turn.moved is None else turn.moved.age_s
        one.beside, one.movable = turn.beside, turn.movable and not turn.resumed
        one.begun = session in self.account or self._known(session)
        # A stream that another replica began does not stand still here.
        goes = not self._open or (turn.resumed and session not in self.account)
        waits = not goes and self.queue.join(one)
        turn.came_at, turn.age_s = one.came_at, one.age_s
        if not waits:
            self.account.begin(session, first, tokens, now, turn.said, turn.beside)
            # It may need less than it was expected to.
            self._settle()
            return
        turn.position = self.queue.position(session) or 1
        going = asyncio.Event()
        one.go = going.set
        if one.begun or self.queue.new == 1:
            # Other new ones are behind one that the offer had no room for.
            self._hand_over(self.queue.of(session))
        self._settle()
        try:
            await going.wait()
        except asyncio.CancelledError:
            self.queue.leave(one, self._monotonic())
            if going.is_set() and one.handed is None:
                self._over(turn, session, 0)
            self._settle()
            raise
        if one.handed is not None:
            raise _handed_over(one.handed)
        turn.waited_s = self._monotonic() - now

    def leave(self, turn: KvTurn, context: int) -> None:
        """The turn is over. context: tokens of the session now; 0: nothing was computed."""
        if turn.session is None:
            self.account.without_session(-len(turn.prompt) - turn.beside)
        else:
            self._over(turn, turn.session, context)
        if turn.measured is not None:
            moved = turn.session if turn.moved is not None and turn.moved.begun else None
            now = self._monotonic()
            self.moves.ended(turn.measured.turn, turn.waited_s, now, begun=turn.begun, moved=moved)
        self._settle()

    # -- turns that another replica takes

    def offered(self, offer: RoomOffer) -> None:
        """A gateway says what another replica has to offer, or that this one is asked to leave."""
        self.moves.take(offer, self._monotonic())
        self._hand_over(self.queue.waiting)
        self._settle()

    def pace(self) -> TurnPace:
        now, waiting = self._monotonic(), self.queue.waiting
        begun = [max(0.0, now - one.came_at) for one in waiting if one.begun]
        return self.moves.report(now, len(waiting), begun)

    def _movable(self, one: Waiting, now: float) -> Movable:
        needs = max(one.tokens, self.account.asks(one.first, one.tokens, one.said, one.beside))
        waited_s, opened = max(0.0, now - one.came_at), self.account.opened(one.session)
        return Movable(one.session, one.tokens, needs, one.begun, waited_s, one.beside, opened)

    def _hand_over_at_once(self, turn: KvTurn, now: float) -> None:
        """Raises HandedOver."""
        session, tokens = turn.session, len(turn.prompt)
        if session is not None and self._stays(session):
            return
        needs = max(tokens, self.account.asks(self._beginning(turn), tokens, turn.said, turn.beside))
        opened = 0 if session is None else self.account.opened(session)
        handed = self.moves.on_arrival(Movable(session, tokens, needs, turn.begun, 0.0, opened=opened), now)
        if handed is not None:
            self._goes(session)
            raise _handed_over(handed)

    def _hand_over(self, waiting: Sequence[Waiting]) -> None:
        """waiting: of a session, all that wait."""
        now = self._monotonic()
        if not self.moves.may_take(now):
            return
        # A session's turns are not parted.
        stay = {one.session for one in waiting if not one.movable or one.over()}
        able = [one for one in waiting if one.session not in stay and not self.account.runs(one.session)]
        for at, handed in self.moves.of_waiting([self._movable(one, now) for one in able], now).items():
            self.queue.hand_over(able[at], handed, now)
            self._goes(able[at].session)

    def _goes(self, session: Session | None) -> None:
        """It is to go on elsewhere, and claims nothing here any more. It may come back, so the engine keeps what it has."""
        if session is not None:
            self.account.end(session, elsewhere=True)

    def _stays(self, session: Session) -> bool:
        """Another turn of it runs here, or waits."""
        return self.account.runs(session) or self.queue.find(session) is not None

    def taken(self, session: Session) -> None:
        """Another replica has let in a turn of the session."""
        if self._stays(session):
            # It has come back meanwhile.
            return
        self._goes(session)
        self._ended(session)
        self._settle()

    def _beginning(self, turn: KvTurn) -> Beginning:
        return beginning(turn, 0 if turn.session is None else self.account.opened(turn.session))

    def _over(self, turn: KvTurn, session: Session, context: int) -> None:
        now = self._monotonic()
        self.account.end_turn(session, context, now, turn.beside)
        if not self._known(session) and not self.account.runs(session):
            # It was refused behind, or was closed meanwhile.
            self.account.end(session)
            self._ended(session)
            if turn.measured is None:
                self.queue.keep_place(session, turn.came_at, now, turn.age_s)

    @contextmanager
    def turn(self, turn: KvTurn, timings: Timings) -> Iterator[None]:
        """A turn that was let in."""
        if turn.session is not None:
            timings.waited = turn.headers()
            timings.on_cached = partial(self.found, turn.session)
        try:
            yield
        finally:
            self.leave(turn, turn.held)

    def found(self, session: Session, cached: int) -> None:
        """The engine has said how much of the session's first prompt was cached."""
        self.account.found(session, cached)
        self._settle()

    def end(self, session: Session) -> None:
        """The session is over. What a turn of it that still runs leaves in the cache goes with the turn."""
        self._ended(session)
        self.queue.ended(session)
        self.moves.over(session)
        if self.account.end(session):
            self._settle()

    def wake(self) -> None:
        """A trainer has ended requests, or a gate has moved."""
        if len(self.queue):
            self.queue.wake(self._monotonic())
            self._settle()

    def reset(self) -> None:
        """The cache is gone."""
        self.account.reset()
        self.account.capacity = 0
        self._settle()

    def returns(self, session: Session | None) -> dict[str, Any]:
        """Fields of an engine's request: the session, and when its next turn is likely."""
        if session is None:
            return {}
        account = self.account
        return {
            "session": session_name(session),
            "returns_s": account.returns_s(),
            "kept_s": account.silent_s(),
        }

    def wait_of(self, session: Session, replica: str) -> KvWait | None:
        """Why a turn of the session waits; None: none does."""
        one = self.queue.find(session)
        if one is None:
            return None
        account = self.account
        return KvWait(
            replica=replica,
            position=self.queue.position(session) or 1,
            waited_s=max(0.0, self._monotonic() - one.came_at),
            begun=one.begun,
            needs_tokens=one.tokens
            if one.begun
            else account.asks(one.first, one.tokens, one.said, one.beside),
            claimed_tokens=account.claimed,
            budget_tokens=account.capacity,
            sessions=len(account),
        )

    def report(self) -> KvWaits:
        # A replica that has just joined has had no request that looked.
        self._look()
        account = self.account
        self._lapse()
        return KvWaits(
            budget_tokens=account.capacity,
            claimed_tokens=account.claimed,
            sessions=len(account),
            waiting=len(self.queue),
            refused=self.queue.refused,
            understated=account.understated,
        )

    def _look(self) -> None:
        """The capacity may be known by now, or another one."""
        now = self._monotonic()
        if now >= self._look_at or not self.account.capacity:
            self._look_at = now + LOOK_S
            self.account.capacity = int(self._share * self._stats().capacity_tokens)

    def _lapse(self) -> None:
        """Claims of sessions that were silent for too long end, and whoever waits for that begins."""
        before = self.account.of_sessions
        self.account.demote(self._monotonic())
        if self.account.of_sessions != before:
            self._settle()

    def _settle(self) -> None:
        """Let in whoever may begin now, and look again when a claim lapses."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not len(self.queue):
            return
        self._look()
        now = self._monotonic()
        due = self.queue.admit(now, everybody=not self._open)
        if len(self.queue) and due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, due - now), self._settle)
        self._on_change()


def may_move(headers: Mapping[str, str]) -> bool:
    """Whether a gateway sent the request, and may send it to another replica."""
    return HEADER_BOOT in headers and HEADER_STAY not in headers


def moved_here(headers: Mapping[str, str]) -> Moved | None:
    """What its gateway says of a session that lived on another replica before."""
    given = headers.get(HEADER_MOVED)
    return None if given is None else from_header(given, Moved)


def _handed_over(handed: Handed) -> HandedOver:
    return HandedOver(msgspec.json.encode(handed).decode())


def session_name(session: Session) -> str:
    """As engines know it."""
    return "\0".join(session)


def beginning(turn: KvTurn, opened: int = 0) -> Beginning:
    """opened: tokens of the session's first prompt, if it was here before. Of one that moved here, its home before says them.
    If that did not, the session has no group here."""
    prompt, moved = turn.prompt, turn.moved
    size: int | None = opened or None
    if size is None and moved is not None and moved.begun and (moved.url or moved.opened):
        size = moved.opened
    if size is not None and size > len(prompt):
        # It was edited.
        size = 0
    first = prompt[:size] if size else prompt
    return Beginning(hash((turn.apart, prompt[:FAMILY_TOKENS])), hash((turn.apart, first)), size)


def expected_tokens(headers: Mapping[str, str], most: int = EXPECTED_TOKENS_MAX) -> int | None:
    """What the client says that its session comes to. most: that a session can come to. Raises InvalidRequest."""
    given = headers.get(HEADER_EXPECTED_TOKENS)
    if given is None:
        return None
    tokens = int(given) if given.isascii() and given.isdecimal() and len(given) < 12 else 0
    if not 0 < tokens <= EXPECTED_TOKENS_MAX:
        message = f"{HEADER_EXPECTED_TOKENS}: expected 1 to {EXPECTED_TOKENS_MAX} tokens, got {given!r}"
        raise InvalidRequest(message, param=HEADER_EXPECTED_TOKENS)
    return min(tokens, most)
