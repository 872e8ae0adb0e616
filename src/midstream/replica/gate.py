"""The gate that every request passes to reach the engine, and that a swap or a pause closes.

Always holds: no request passes the gate while a swap commits. A waiting request passes, or gets 425 at its timeout. The
A pause holds requests until it ends, unless they say themselves how long they wait. The
requests inside are counted; the gate is drained when there is none. At most `requests_max` choices are inside or waiting,
except that one larger request may be there alone.

The snapshot that a request asks for, and the requests that are pinned to the serving one: a swap lets them end first.

Always holds: while a swap waits for pinned requests, no other request is pinned. It waits for `drain_s` at most; a pinned
request that is not done by then ends with an error. No request is pinned when the swap commits.

Prompt-cache namespaces: which cached prefixes a request may reuse. Pure.

A namespace is a number in the salt of a request's cache. The cache policy of a swap changes it:

    all          a new namespace for every request; sessions forget the one they had
    new_session  a new namespace for new sessions; known sessions stay in theirs
    none         nothing changes

A swap also says how many commits old reused KV may be while its snapshot serves (`kv_age_max`).

Always holds: KV is shared only between requests of equal salt. Salts are equal only for equal namespace, tenant, isolation
key and model. A request keeps the salt it was admitted with. The table is bounded: a session that was idle for `idle_s_max`
seconds is forgotten and counts as new; so is the least recently used one when there are too many.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from midstream.core.errors import AnotherBoot, InvalidRequest, Overloaded, SnapshotTransition
from midstream.core.types import ResetPromptCache, served_model_name
from midstream.core.versions import Admitted, Refusal, Refused, VersionConstraint

HEADER_DRAIN_TIMEOUT = "x-fireworks-hot-load-drain-timeout"
DRAIN_TIMEOUT_S = 90.0
REQUESTS_MAX = 4096
_IN_TRANSITION = "a snapshot is being switched; retry this request"


class Door(enum.Enum):
    OPEN = "open"
    #: Newcomers wait: an async swap commits.
    HELD = "held"
    #: Newcomers get 425: a sync swap drains and commits.
    CLOSED = "closed"
    #: Newcomers get 503: nothing serves.
    DOWN = "down"


class Gate:
    def __init__(self, on_change: Callable[[], None], requests_max: int = REQUESTS_MAX) -> None:
        self._door = Door.DOWN
        self._moved = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._on_change = on_change
        self._requests_max = requests_max
        self._paused = False
        self.inside = 0
        self.waiting = 0
        #: The choices of all requests inside or waiting.
        self.choices = 0

    def __repr__(self) -> str:
        return (
            f"Gate({self._door.value}, inside={self.inside}, waiting={self.waiting}, choices={self.choices})"
        )

    @property
    def door(self) -> Door:
        return self._door

    @property
    def _holds(self) -> bool:
        return self._door is Door.HELD or (self._door is Door.OPEN and self._paused)

    def set(self, door: Door) -> None:
        if door is not self._door:
            self._door = door
            self._move()

    def pause(self, paused: bool) -> None:
        """Newcomers wait at the open door while it is paused."""
        if paused is not self._paused:
            self._paused = paused
            self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        self._on_change()

    def check(self, choices: int) -> None:
        """Raises the error that `enter` would raise at once, so that a request is refused before work is put into it.

        choices: 0 for a resumed stream, as another replica counted its choices already."""
        if choices and self.choices and self.choices + choices > self._requests_max:
            raise Overloaded(
                f"{self.choices} choices are being served or waiting and this request asks for {choices} more;"
                f" at most {self._requests_max} fit; retry it later"
            )
        if self._door is Door.CLOSED:
            raise SnapshotTransition(_IN_TRANSITION)
        if self._door is Door.DOWN:
            raise AnotherBoot("the engine is not ready; retry this request")

    async def enter(self, timeout_s: float | None = None, choices: int = 1) -> None:
        """Waits until the door is open, and returns in the step of the loop that found it open. Raises MidstreamError.

        timeout_s: as the request says; None: DRAIN_TIMEOUT_S for a swap, and no limit for a pause.
        """
        self.check(choices)
        if not self._holds and self._door is Door.OPEN:
            return
        self.waiting += 1
        self.choices += choices
        self._on_change()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while self._holds:
                    if timeout_s is None:
                        self._limit(limit)
                    await self._moved.wait()
        except TimeoutError:
            raise SnapshotTransition(_IN_TRANSITION) from None
        finally:
            self.waiting -= 1
            self.choices -= choices
        self.check(choices)

    def _limit(self, limit: asyncio.Timeout) -> None:
        """Only a swap's hold is limited."""
        if self._paused:
            limit.reschedule(None)
        elif limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S)

    @contextmanager
    def admitted(self, choices: int = 1) -> Iterator[None]:
        """Counts a request that has entered."""
        self.inside += 1
        self.choices += choices
        self._empty.clear()
        self._on_change()
        try:
            yield
        finally:
            self.inside -= 1
            self.choices -= choices
            if self.inside == 0:
                self._empty.set()
            self._on_change()

    async def drained(self) -> None:
        await self._empty.wait()


def wait_timeout_s(header: str | None) -> float | None:
    """Seconds a request waits at a held gate, from its drain-timeout header. None: it does not say."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        message = f"{HEADER_DRAIN_TIMEOUT}: expected 0 to 86400 seconds, got {header!r}"
        raise InvalidRequest(message, param=HEADER_DRAIN_TIMEOUT)
    return seconds


PIN_DRAIN_S = 60.0


class Asked:
    """The snapshot that one request asks for. constraint: from its body and its model's name. admitted: its gateway's decision.

    judged: another replica let the request in, so only its pin counts.
    """

    def __init__(
        self, model: str, constraint: VersionConstraint, admitted: Admitted | None, *, judged: bool = False
    ) -> None:
        self._model = model
        self._constraint = constraint
        self._expected = {constraint.snapshot, None if admitted is None else admitted.snapshot} - {None}
        self._judged = judged or not constraint.relative or (admitted is not None and admitted.body)
        self.pinned = constraint.snapshot is not None or (admitted is not None and admitted.pinned)

    def __repr__(self) -> str:
        return f"Asked({self._constraint}, expects {sorted(map(str, self._expected))}, pinned={self.pinned})"

    def check(self, serving: str, coming: str | None) -> None:
        """Raises Refused unless the request may begin. coming: the snapshot whose swap waits for pinned requests."""
        if not self._judged:
            why = "min_snapshot and max_staleness are the gateway's to judge: ask it"
        elif self._expected - {serving}:
            other = (self._expected - {serving}).pop()
            why = f"snapshot {other!r} is not serving; {served_model_name(self._model, serving)} is"
        elif self.pinned and coming is not None:
            why = f"snapshot {serving!r} takes no pinned requests any more: {coming!r} waits to replace it"
        else:
            return
        raise self.refused(why, serving, pinnable=coming is None)

    def refused(self, why: str, serving: str, *, pinnable: bool) -> Refused:
        return Refused(why, Refusal(serving, pinnable, self._constraint))


class Pins:
    """The pinned requests. drain_s: how long a swap waits for them, in seconds."""

    def __init__(self, on_change: Callable[[], None], drain_s: float = PIN_DRAIN_S) -> None:
        self._on_change = on_change
        self._drain_s = drain_s
        self._ended_for = ""
        self._held: dict[asyncio.Timeout, None] = {}
        self._none = asyncio.Event()
        self._none.set()
        self.coming: str | None = None

    def __repr__(self) -> str:
        return f"Pins({len(self._held)} held, coming={self.coming})"

    def __len__(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def hold(self, asked: Asked, snapshot: str) -> AsyncIterator[None]:
        """The request inside is pinned to `snapshot`, which serves. Ends it with Refused when a swap has waited."""
        limit = asyncio.timeout(None)
        self._held[limit] = None
        self._none.clear()
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = (
                f"snapshot {snapshot!r}, to which this request is pinned, is replaced by {self._ended_for!r}: it had"
                f" {self._drain_s:g} s to end"
            )
            raise asked.refused(message, snapshot, pinnable=False) from None
        finally:
            self._held.pop(limit, None)
            if not self._held:
                self._none.set()

    async def end(self, coming: str) -> int:
        """Waits until no pinned request is left. Ends those that exceed the time limit, and returns how many it ended.

        No request is pinned from now until `reopen`."""
        self.coming = coming
        if not self._held:
            return 0
        self._on_change()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._none.wait()
        except TimeoutError:
            ended, self._ended_for = len(self._held), coming
            for limit in self._held:
                if limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time())
            await self._none.wait()
            return ended
        return 0

    def reopen(self) -> None:
        if self.coming is not None:
            self.coming = None
            self._on_change()


SESSIONS_MAX = 100_000
SESSION_IDLE_S_MAX = 3600.0

#: Tenant ("" for the only one) and session key: equal keys of two tenants are two sessions.
Session = tuple[str, str]


class Namespaces:
    """clock: seconds; only differences count."""

    def __init__(
        self,
        sessions_max: int = SESSIONS_MAX,
        idle_s_max: float = SESSION_IDLE_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions_max = sessions_max
        self._idle_s_max = idle_s_max
        self._clock = clock
        self._current = 0
        # Namespace, last seen; oldest first.
        self._pins: OrderedDict[Session, tuple[int, float]] = OrderedDict()
        self.kv_age_max: int | None = None

    def __repr__(self) -> str:
        return f"Namespaces(current={self._current}, sessions={len(self._pins)})"

    def admit(self, session: Session | None) -> int:
        """The namespace of a request being admitted; pins its session. Without a session it is like a new one."""
        now = self._clock()
        self._forget_idle(now)
        if session is None:
            return self._current
        namespace, _ = self._pins.get(session, (self._current, now))
        self._pins[session] = namespace, now
        self._pins.move_to_end(session)
        if len(self._pins) > self._sessions_max:
            self._pins.popitem(last=False)
        return namespace

    def forget(self, session: Session) -> None:
        """From now on it is a new one."""
        self._pins.pop(session, None)

    def reset(self) -> None:
        """Nothing that is cached is found again; the snapshot that serves, and its bound on ages, stay."""
        self._current += 1
        self._pins.clear()

    def commit(self, policy: ResetPromptCache, kv_age_max: int | None = None) -> None:
        """A snapshot was switched to."""
        self.kv_age_max = kv_age_max
        self._forget_idle(self._clock())
        if policy == "none":
            return
        self._current += 1
        if policy == "all":
            self._pins.clear()

    def _forget_idle(self, now: float) -> None:
        while self._pins:
            session, (_, seen) = next(iter(self._pins.items()))
            if now - seen <= self._idle_s_max:
                return
            del self._pins[session]


def cache_salt(namespace: int, tenant: str, isolation_key: str, model: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (str(namespace), tenant, isolation_key, model):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
