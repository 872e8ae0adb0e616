"""The sessions a replica holds: which, since when, what their turns were like, and the feeds by which gateways learn of them.

Owns: one bounded table, (tenant, key) -> SessionStats, and a feed of its changes for every event stream.
Always holds:
- A session is in the table from the moment its first request is admitted until it is closed: by a request to close it,
  after `idle_s` without a turn, or, least recently used first, when there are more than `sessions_max`.
- A feed has every session that was in the table when it began, and every later change. Of several changes of one session it has
  only the last one.
- A stamp never goes back: of two placings of a session the later one counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from urllib.parse import unquote

import msgspec

from midstream.core.headers import HEADER_PLACED, HEADER_SESSION, HEADER_TENANT
from midstream.core.measures import Trajectories
from midstream.core.session_keys import named_in_body, named_in_headers, session_key
from midstream.core.sessions import SessionsReport, SessionStats
from midstream.core.types import Session

SESSIONS_MAX = 100_000
SESSION_IDLE_S = 3600.0
REPORTED_AT_ONCE_MAX = 1000
#: A reader that is further behind starts again.
UNREPORTED_MAX = 200_000


@dataclass(slots=True)
class TurnStats:
    """One admitted request, filled in as it goes. Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Of all choices.
    generated_tokens: int = 0
    #: Tokens of the longest choice.
    longest: int = 0
    #: From the request's arrival until the gate let it in.
    admitted_s: float = 0.0
    #: From the request's arrival.
    first_token_s: float | None = None
    #: From the first token to the end.
    generation_s: float = 0.0
    #: From the request's arrival to its end.
    request_s: float = 0.0
    #: In the engine, before the first step.
    queued_s: float | None = None
    #: Why each choice ended, of core.sessions.COUNTS.
    finishes: tuple[str, ...] = ()


class Feed:
    """The changes that one reader has not got yet."""

    def __init__(self, held: list[Session], begun: Callable[[], None]) -> None:
        self._unreported: dict[Session, None] = dict.fromkeys(held)
        self.begun = begun

    @property
    def behind(self) -> bool:
        """True when so much is unreported that the reader should start again."""
        return len(self._unreported) > UNREPORTED_MAX

    def note(self, session: Session) -> None:
        self._unreported.pop(session, None)
        self._unreported[session] = None

    def take(self) -> list[Session]:
        """The next ones to report, the longest unreported first."""
        if len(self._unreported) <= REPORTED_AT_ONCE_MAX:
            taken, self._unreported = list(self._unreported), {}
            return taken
        sessions = iter(self._unreported)
        taken = [next(sessions) for _ in range(REPORTED_AT_ONCE_MAX)]
        for session in taken:
            del self._unreported[session]
        return taken


class Sessions:
    """clock: seconds since the epoch; monotonic: seconds, only differences count. on_change: called when there is something
    to report. on_close: called for a session that is over. After a loss of all KV sessions are not over, but start again."""

    def __init__(
        self,
        sessions_max: int = SESSIONS_MAX,
        idle_s: float = SESSION_IDLE_S,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        on_close: Callable[[Session], None] = lambda _: None,
    ) -> None:
        self._sessions_max = sessions_max
        self._idle_s = idle_s
        self._clock = clock
        self._monotonic = monotonic
        self._on_change = on_change
        self._on_close = on_close
        # With when each was last used; the least recently used first.
        self._held: OrderedDict[Session, tuple[SessionStats, float]] = OrderedDict()
        self._feeds: dict[Feed, None] = {}
        self.measures = Trajectories.none()

    def __repr__(self) -> str:
        return f"Sessions({len(self._held)} held, {len(self._feeds)} feeds)"

    def __len__(self) -> int:
        return len(self._held)

    # -- turns

    @contextmanager
    def turn(self, session: Session | None, stamp: int | None) -> Iterator[TurnStats]:
        """An admitted request of a session, or of none. stamp: of the placing that brought it here, if it is one."""
        stats = None if session is None else self._begin(session, stamp)
        turn = TurnStats()
        try:
            yield turn
        finally:
            self._count(turn)
            if stats is not None:
                self._end(stats, turn)

    def _begin(self, session: Session, stamp: int | None) -> SessionStats:
        now = self._clock()
        self.sweep()
        found = self._held.get(session)
        if found is None:
            stamp = round(now * 1000) if stamp is None else stamp
            stats = SessionStats(tenant=session[0], key=session[1], stamp=stamp, opened_at=now, used_at=now)
            self._tell(session, begun=True)
        else:
            stats = found[0]
            if stamp is not None and stamp > stats.stamp:
                stats.stamp = stamp
                self._tell(session, begun=True)
        stats.turns += 1
        stats.open_turns += 1
        self._use(session, stats)
        while len(self._held) > self._sessions_max:
            self._close(next(iter(self._held)))
        return stats

    def _use(self, session: Session, stats: SessionStats) -> None:
        stats.used_at = self._clock()
        self._held[session] = (stats, self._monotonic())
        self._held.move_to_end(session)

    def _end(self, stats: SessionStats, turn: TurnStats) -> None:
        stats.open_turns -= 1
        stats.prompt_tokens += turn.prompt_tokens
        stats.cached_prompt_tokens += turn.cached_tokens
        stats.generated_tokens += turn.generated_tokens
        if turn.first_token_s is not None:
            stats.first_tokens += 1
            stats.time_to_first_token_s += turn.first_token_s
            stats.last_time_to_first_token_s = turn.first_token_s
            stats.generation_s += turn.generation_s
            stats.token_gaps += max(0, turn.longest - 1)
        session = (stats.tenant, stats.key)
        found = self._held.get(session)
        if found is not None and found[0] is stats:
            self._use(session, stats)

    def _count(self, turn: TurnStats) -> None:
        measures = self.measures
        for finish in turn.finishes:
            measures.count("finishes", finish)
        if turn.first_token_s is None:
            return
        measures.observe("time_to_first_token_seconds", turn.first_token_s)
        measures.observe("generation_seconds", turn.generation_s)
        measures.observe("request_seconds", turn.request_s)
        measures.observe("generated_tokens", turn.generated_tokens)
        if turn.queued_s is not None:
            measures.observe("queue_seconds", turn.queued_s)
        if turn.longest > 1:
            measures.observe("inter_token_seconds", turn.generation_s / (turn.longest - 1))
        if turn.prompt_tokens:
            measures.observe("prompt_tokens", turn.prompt_tokens)
            measures.observe("cached_prompt_share", turn.cached_tokens / turn.prompt_tokens)

    def rewarded(self, session: Session, reward: float) -> None:
        """It was given to the session or to one of its turns."""
        if (stats := self.one(session)) is not None:
            stats.last_reward, stats.rewarded_at = reward, self._clock()

    # -- closing

    def close(self, session: Session) -> bool:
        """Close the session. True if it was here. Its running requests continue."""
        found = session in self._held
        if found:
            self._close(session)
            self._on_change()
        return found

    def close_all(self) -> None:
        """Closes every session, because their KV is lost."""
        for session in list(self._held):
            self._leave(session)
        self._on_change()

    def sweep(self) -> None:
        """Close the sessions that were idle for too long."""
        oldest = self._monotonic() - self._idle_s
        closed = False
        while self._held:
            session, (stats, used) = next(iter(self._held.items()))
            if used >= oldest:
                break
            if stats.open_turns:
                self._use(session, stats)
            else:
                self._close(session)
                closed = True
        if closed:
            self._on_change()

    def _close(self, session: Session) -> None:
        self._leave(session)
        self._on_close(session)

    def _leave(self, session: Session) -> None:
        stats, _ = self._held.pop(session)
        self.measures.observe("turns_per_session", stats.turns)
        self._tell(session)

    # -- reports

    @contextmanager
    def feed(self, begun: Callable[[], None] = lambda: None) -> Iterator[Feed]:
        """A feed of everything held now and all later changes. begun: called when a request has brought a session here. A
        reader that reports it at once does so before the request is answered, and so before another gateway has the session's
        next turn."""
        feed = Feed(list(self._held), begun)
        self._feeds[feed] = None
        try:
            yield feed
        finally:
            self._feeds.pop(feed, None)

    def reports(self, feed: Feed) -> Iterator[bytes]:
        """Lines of JSON until the feed has nothing unreported."""
        while sessions := feed.take():
            held, closed = [], []
            for session in sessions:
                if (found := self._held.get(session)) is not None:
                    held.append((session, found[0].stamp))
                else:
                    closed.append(session)
            yield msgspec.json.encode(SessionsReport(held=tuple(held), closed=tuple(closed))) + b"\n"

    def trajectories(self) -> Trajectories:
        return self.measures

    def one(self, session: Session) -> SessionStats | None:
        found = self._held.get(session)
        return None if found is None else found[0]

    def placed_since(self, session: Session, stamp: int) -> bool:
        """Whether a placing brought it here that is no earlier than that of the stamp."""
        found = self.one(session)
        return found is not None and found.stamp >= stamp

    def holds(self, session: Session) -> bool:
        return session in self._held

    def of(self, tenant: str, after: str | None, limit: int) -> list[SessionStats]:
        """Those of a tenant in the order of their keys, behind the key `after`."""
        found = (key for owner, key in self._held if owner == tenant and (after is None or key > after))
        return [self._held[tenant, key][0] for key in nsmallest(limit, found)]

    def _tell(self, session: Session, *, begun: bool = False) -> None:
        for feed in self._feeds:
            feed.note(session)
            if begun:
                feed.begun()


def stamp_of(headers: Mapping[str, str]) -> int | None:
    """The stamp of the placement that begins the request's session here, as its gateway says."""
    value = headers.get(HEADER_PLACED, "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else None


def session_of(
    named: tuple[str | None, str | None, str | None], headers: Mapping[str, str]
) -> Session | None:
    """The session that the gateway names, or would name if the request had come through one. named: values of its body."""
    given = headers.get(HEADER_SESSION)
    if given:
        key: str | None = unquote(given)
    else:
        key = session_key(chain(named_in_headers(headers), named_in_body(*named)))
    return None if key is None else (headers.get(HEADER_TENANT, ""), key)
