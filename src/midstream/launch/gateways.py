"""The gateways of a server: one, several on one port of this machine, or several on nodes of their own.

Owns: their processes, the replicas that they want together, and what each knows of the others: their number and their counts.
Always holds:
- Each gateway receives the list of all replicas.
- A replica is wanted while a gateway wants it. Gateways that were replaced and have requests left count too. So a replica goes
  only when no gateway has a request on it any more.
- None of the gateways is special, so the end of one changes nothing for the others.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from midstream.fleet.desired_state import Running, Wanted, WantedReplica
from midstream.fleet.tally import Siblings, Tally, merged, siblings_of
from midstream.launch.process import (
    ChildMessages,
    StartFailed,
    Supervised,
)

logger = logging.getLogger(__name__)

#: Makes the gateway process of that name, not started.
Make = Callable[[str, ChildMessages], Supervised]


class Gateways:
    """Use from one event loop."""

    def __init__(
        self, make: Make, count: int, want: Callable[[Wanted], None], running: Callable[[], Running]
    ) -> None:
        """want: gets the union of all lists, whenever it may have changed. running: all replicas that run."""
        self._want = want
        self._running = running
        #: What the processes that have ended counted, and which they are. And what others of the server counted.
        self._ended, self._ended_boots = Tally(), set[str]()
        #: By name: the last message about the others that each got, and the last one it sent, since it last ended.
        self._sent: dict[str, Siblings] = {}
        self._lists: dict[str, Wanted] = {}
        #: By name and pid, what each process said last that was replaced and finishes its requests.
        self._replaced: dict[tuple[str, int], Wanted] = {}
        self._up: set[str] = set()
        self._lives: list[asyncio.Task[None]] = []
        names = ["gateway"] if count == 1 else [f"gateway-{number}" for number in range(count)]
        self._members = [make(name, self._conversation(name)) for name in names]
        for member in self._members:
            member.on_retiring = functools.partial(self._hear_replaced, member.name)

    def __repr__(self) -> str:
        return f"Gateways({len(self._up)} of {len(self._members)} are up)"

    def __iter__(self) -> Iterator[Supervised]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    async def start(self) -> None:
        """Returns when all are up. From when it was up first, each is started again when it ends. Raises StartFailed.

        A host that is not well is waited for, or another one.
        """
        loop = asyncio.get_running_loop()
        ups = [loop.create_future() for _ in self._members]
        lives = zip(self._members, ups, strict=True)
        self._lives = [asyncio.create_task(self._live(member, up), name=member.name) for member, up in lives]
        up = asyncio.gather(*ups)
        first: list[asyncio.Future[Any]] = [up, *self._lives]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for life in self._lives:
            if life.done():
                # A bug ends it before its gateway is up.
                life.result()
        await up

    async def supervise(self) -> None:
        """Supervise until cancelled. Raises only what a bug raises in the supervision of one."""
        await asyncio.gather(*self._lives)

    async def replace(self, drain_s: float) -> None:
        """Each by a new process, one after another. The old ones finish their requests, in `drain_s`. Raises StartFailed."""
        for member in self._members:
            await member.replace(drain_s)

    def tell(self, running: Running) -> None:
        for member in self._members:
            member.tell(self._message(member.name, running))

    def count(self, tally: Tally) -> None:
        """Add the counts of a process that is no gateway. Every gateway shows them."""
        self._ended = merged((self._ended, tally))
        self._changed()

    def places(self) -> dict[str, str]:
        """The places of gateways that do not run on this machine, by name."""
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
            await member.begin()
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

    def _conversation(self, name: str) -> ChildMessages:
        return ChildMessages(
            functools.partial(self._hear, name), lambda: self._message(name, self._running())
        )

    def _message(self, name: str, running: Running) -> Running:
        """The message for the gateway of that name. It is noted as sent."""
        self._sent[name] = siblings = self._siblings(name)
        return msgspec.structs.replace(running, siblings=siblings)

    def _siblings(self, name: str) -> Siblings:
        """The others, for the gateway of that name."""
        lists = {other: wanted for other, wanted in self._lists.items() if other in self._up}
        own = lists.get(name, Wanted()).report
        every = [wanted.report for wanted in (*lists.values(), *self._replaced.values())]
        reports = [one for one in every if one is not None and one.boot not in self._ended_boots]
        return siblings_of(None if own is None else own.boot, reports, self._ended)

    def _hear(self, name: str, line: bytes) -> None:
        if (wanted := _decoded(name, line)) is not None:
            self._lists[name] = wanted
            self._changed()

    def _hear_replaced(self, name: str, pid: int, line: bytes | None) -> None:
        """line: None when that process has ended."""
        if line is None:
            self._count_ended(self._replaced.pop((name, pid), None))
        elif (wanted := _decoded(name, line)) is not None:
            self._replaced[name, pid] = wanted
            self._drop_stale_report(name, wanted)
        else:
            return
        self._changed()

    def _drop_stale_report(self, name: str, wanted: Wanted) -> None:
        """The report of a replaced process is another process's for the one that has its name now."""
        known = self._lists.get(name)
        if known is not None and None not in (known.report, wanted.report) and known.report == wanted.report:
            self._lists[name] = msgspec.structs.replace(known, report=None)

    def _is_up(self, name: str) -> None:
        self._up.add(name)
        self._changed()

    def _has_ended(self, name: str) -> None:
        self._up.discard(name)
        self._count_ended(self._lists.pop(name, None))
        self._changed()

    def _count_ended(self, wanted: Wanted | None) -> None:
        if wanted is not None and wanted.report is not None:
            self._ended = merged((self._ended, wanted.report.tally))
            self._ended_boots.add(wanted.report.boot)

    def _changed(self) -> None:
        """Ask for the union of the lists. Send each gateway the others if they have changed.

        The list of a gateway that has said nothing yet is unknown. While no list is known, the last union stays.
        """
        lists = [wanted for name, wanted in self._lists.items() if name in self._up]
        if lists:
            self._want(union([*lists, *self._replaced.values()]))
        for member in self._members:
            if self._siblings(member.name) != self._sent.get(member.name):
                member.tell(self._message(member.name, self._running()))


def _decoded(name: str, line: bytes) -> Wanted | None:
    """The list in a line; None if the end of the process cut the line short. The next process sends all again."""
    try:
        return msgspec.json.decode(line, type=Wanted)
    except msgspec.DecodeError as error:
        logger.warning("%s said %r: %s", name, line[:200], error)
        return None


def union(lists: Iterable[Wanted]) -> Wanted:
    """Every replica of any list, in their order. Where two lists differ for a moment, the first one counts."""
    found: dict[str, WantedReplica] = {}
    for wanted in lists:
        for replica in wanted.replicas:
            found.setdefault(replica.name, replica)
    return Wanted(tuple(found.values()))
