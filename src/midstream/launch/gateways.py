"""The gateway of a server, or several of them on nodes of their own.

Owns: their processes, and what they want together.
Always holds: each is told of every replica; a replica is wanted while any gateway that is up wants it, or one that was replaced
and is not done yet, so it goes only when no gateway has a request on it any more; none of them is the first, so the end of one
changes nothing for the others.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec

from midstream.gateway.roster import Running, Wanted, WantedReplica
from midstream.launch.process import (
    RESTART_PAUSE_S_MAX,
    RESTART_PAUSE_S_MIN,
    HostUnwell,
    StartFailed,
    Supervised,
)

logger = logging.getLogger(__name__)

#: A gateway by its name, what gets each line that it says, and what it is told when it starts; not started.
Make = Callable[[str, Callable[[bytes], None], Callable[[], Running]], Supervised]


class Gateways:
    """Use from one event loop."""

    def __init__(
        self, make: Make, count: int, want: Callable[[Wanted], None], running: Callable[[], Running]
    ) -> None:
        """want: told what should run, when that may be something else than before. running: all that does."""
        self._want = want
        self._lists: dict[str, Wanted] = {}  # what each said last, since it ended last
        self._replaced: dict[tuple[str, int], Wanted] = {}  # of each process that finishes what it has
        self._up: set[str] = set()
        self._lives: list[asyncio.Task[None]] = []
        names = ["gateway"] if count == 1 else [f"gateway-{number}" for number in range(count)]
        self._members = [make(name, self._ear(name), running) for name in names]
        for member in self._members:
            member.on_retiring = functools.partial(self._hear_replaced, member.name)

    def __repr__(self) -> str:
        return f"Gateways({len(self._up)} of {len(self._members)} are up)"

    def __iter__(self) -> Iterator[Supervised]:
        return iter(self._members)

    async def start(self) -> None:
        """Returns when all are up; each is started again when it ends, from when it was up first. Raises StartFailed.

        A host that is not well is waited for, or another one.
        """
        loop = asyncio.get_running_loop()
        ups = [loop.create_future() for _ in self._members]
        lives = zip(self._members, ups, strict=True)
        self._lives = [asyncio.create_task(self._live(member, up), name=member.name) for member, up in lives]
        await asyncio.gather(*ups)

    async def supervise(self) -> None:
        """Until cancelled; raises what ends one for good: a bug."""
        await asyncio.gather(*self._lives)

    async def replace(self, drain_s: float) -> None:
        """Each by a new process, one after another; the old ones finish what they have, in `drain_s`. Raises StartFailed."""
        for member in self._members:
            await member.replace(drain_s)

    def tell(self, running: Running) -> None:
        for member in self._members:
            member.tell(running)

    def places(self) -> dict[str, str]:
        """Of those that are not on this machine: where each one is."""
        return {member.name: member.place for member in self._members if member.place is not None}

    async def stop(self, grace_s: float) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await asyncio.gather(*(member.stop(grace_s) for member in self._members))

    def kill(self) -> None:
        for member in self._members:
            member.kill()

    # -- inside

    async def _live(self, member: Supervised, up: asyncio.Future[None]) -> None:
        try:
            await self._start(member)
        except StartFailed as error:
            if not up.done():
                up.set_exception(error)
            return
        self._is_up(member.name)
        if not up.done():
            up.set_result(None)

        def restarted(why: str | None) -> None:
            if why is None:
                self._is_up(member.name)

        await member.supervise(restarted, on_ended=lambda: self._has_ended(member.name))

    async def _start(self, member: Supervised) -> None:
        pause_s = RESTART_PAUSE_S_MIN
        while True:
            try:
                return await member.start(lambda why: logger.warning("%s", why))
            except HostUnwell as error:
                pause_s = min(pause_s * 2, RESTART_PAUSE_S_MAX)
                logger.warning("%s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)

    def _ear(self, name: str) -> Callable[[bytes], None]:
        def hear(line: bytes) -> None:
            try:
                self._lists[name] = msgspec.json.decode(line, type=Wanted)
            except msgspec.DecodeError as error:  # cut short by its end; the next one says all again
                logger.warning("%s said %r: %s", name, line[:200], error)
            else:
                self._combine()

        return hear

    def _hear_replaced(self, name: str, pid: int, line: bytes | None) -> None:
        """line: None when that process has ended."""
        try:
            if line is None:
                self._replaced.pop((name, pid), None)
            else:
                self._replaced[name, pid] = msgspec.json.decode(line, type=Wanted)
        except msgspec.DecodeError as error:  # as in _ear
            logger.warning("%s said %r: %s", name, line and line[:200], error)
        else:
            self._combine()

    def _is_up(self, name: str) -> None:
        self._up.add(name)
        self._combine()

    def _has_ended(self, name: str) -> None:
        self._up.discard(name)
        self._lists.pop(name, None)
        self._combine()

    def _combine(self) -> None:
        """What no gateway that is up has said is not known: while that is all, what was wanted stays so."""
        said = [wanted for name, wanted in self._lists.items() if name in self._up]
        if said:
            self._want(union([*said, *self._replaced.values()]))


def union(lists: Iterable[Wanted]) -> Wanted:
    """Every replica of any list, in their order; of one that two describe otherwise, which is so for a moment, the first."""
    found: dict[str, WantedReplica] = {}
    for wanted in lists:
        for replica in wanted.replicas:
            found.setdefault(replica.name, replica)
    return Wanted(tuple(found.values()))
