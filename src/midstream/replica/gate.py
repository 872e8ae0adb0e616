"""The gate that every request passes to reach the engine, and that a swap or a pause closes.

Always holds: no request passes the gate while a swap commits, or while what serves has failed its check. A waiting request
passes, or gets 425 at its timeout, or 503 when nothing sound serves. A pause holds requests until it ends, unless they say
themselves how long they wait. The requests inside are counted; the gate is drained when there is none. At most `requests_max`
choices are inside or waiting, except that one larger request may be there alone.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midstream.core.errors import (
    AnotherBoot,
    InvalidRequest,
    Overloaded,
    ReplicaUnavailable,
    SnapshotTransition,
)

HEADER_DRAIN_TIMEOUT = "x-fireworks-hot-load-drain-timeout"
DRAIN_TIMEOUT_S = 90.0
REQUESTS_MAX = 4096
_IN_TRANSITION = "a snapshot is being switched; retry this request"


class Door(enum.Enum):
    OPEN = "open"
    #: Newcomers wait: an async swap commits, or its check has to pass first.
    HELD = "held"
    #: Newcomers get 425: a sync swap drains and commits, or its check has to pass first.
    CLOSED = "closed"
    #: Newcomers get 503: what serves failed its check.
    UNSOUND = "unsound"
    #: Newcomers get 503: nothing serves.
    DOWN = "down"


class Gate:
    def __init__(
        self,
        on_change: Callable[[], None],
        requests_max: int = REQUESTS_MAX,
        unsound: type[ReplicaUnavailable] = AnotherBoot,
    ) -> None:
        """unsound: the refusal while weights that failed their check serve. A policy's says nothing of the whole replica."""
        self._door = Door.DOWN
        self._moved = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._on_change = on_change
        self._requests_max = requests_max
        self._unsound = unsound
        self._paused = False
        #: Is called when the door has moved.
        self.on_move: Callable[[], None] = lambda: None
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
        self.wake()
        self.on_move()
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
        if self._door is Door.UNSOUND:
            raise self._unsound("the weights on this replica failed their check; retry this request")

    def wake(self) -> None:
        """Each request that waits asks again whether it still does."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def enter(
        self, timeout_s: float | None = None, choices: int = 1, over: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until the door is open, and returns in the step of the loop that found it open. Raises MidstreamError.

        over: nothing is left to wait for; it returns without an open door.
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
                while self._holds and not over():
                    if timeout_s is None:
                        self._limit(limit)
                    await self._moved.wait()
        except TimeoutError:
            raise SnapshotTransition(_IN_TRANSITION) from None
        finally:
            self.waiting -= 1
            self.choices -= choices
        if not over():
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
