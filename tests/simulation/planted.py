"""Faults to plant in the production code, which the simulation has to find: each leaves out, or turns round, one thing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from midstream.fleet import loop as fleet_loop
from midstream.fleet.sessions import SessionTable
from midstream.launch.process import Child
from midstream.ledger.database import Database
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.resume import ResumeLog
from midstream.replica.gate import Gate
from midstream.replica.swap.namespaces import Namespaces
from midstream.replica.swap.pins import Pins
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.store import fetch


def _namespace_kept() -> None:
    """A swap that forbids the reuse of KV changes no namespace."""
    before = Namespaces.commit

    def commit(self: Namespaces, policy: Any, kv_age_max: int | None = None) -> None:
        before(self, "none", kv_age_max)

    Namespaces.commit = commit  # type: ignore[method-assign]


def _new_sessions_only() -> None:
    """`all` counts as `new_session`."""
    before = Namespaces.commit

    def commit(self: Namespaces, policy: Any, kv_age_max: int | None = None) -> None:
        before(self, "new_session" if policy == "all" else policy, kv_age_max)

    Namespaces.commit = commit  # type: ignore[method-assign]


def _answered_before_commit() -> None:
    """Some writes of the ledger are answered and then lost."""
    import contextlib

    before, rng = Database.write, random.Random(7)

    @contextlib.contextmanager
    def write(self: Database) -> Any:
        with before(self) as db:
            yield db
            if rng.random() < 0.1:
                db.rollback()
                db.begin()

    Database.write = write  # type: ignore[method-assign, assignment]


def _pins_do_not_hold() -> None:
    """A swap does not wait for requests that are pinned."""

    async def end(self: Pins, coming: str) -> int:
        self.coming = coming
        return 0

    Pins.end = end  # type: ignore[method-assign]


def _gate_is_not_drained() -> None:
    """A synchronous swap does not wait for streams."""

    async def drained(self: Gate) -> None:
        await asyncio.sleep(0)

    Gate.drained = drained  # type: ignore[method-assign]


def _bytes_are_not_compared() -> None:
    """What was fetched is not compared with what it should be."""
    fetch.difference = lambda expected, found: None  # type: ignore[attr-defined]


def _snapshot_is_not_verified() -> None:
    """A torn snapshot is loaded as it is."""

    async def verify(self: CachedSource, path: Any, desired: Any) -> None:
        pass

    CachedSource.verify = verify  # type: ignore[method-assign]
    _bytes_are_not_compared()


def _log_loses_its_last_event() -> None:
    """A resumed stream repeats what the client has."""
    before = ResumeLog.lines

    def lines(self: ResumeLog) -> bytes | None:
        found = before(self)
        return found and b"".join(found.splitlines(keepends=True)[:-1])

    ResumeLog.lines = lines  # type: ignore[method-assign]


def _half_chunks_pass() -> None:
    """The client of a stream that may be resumed gets half chunks."""
    before = ResumeLog.take

    def take(self: ResumeLog, data: bytes) -> bytes:
        before(self, data)
        return data

    ResumeLog.take = take  # type: ignore[method-assign]


def _sessions_are_forgotten() -> None:
    """No session has a home."""
    SessionTable.home = lambda self, session: None  # type: ignore[method-assign]


def _everybody_is_admitted() -> None:
    """A replica joins with whatever it serves."""
    before = fleet_loop.decide

    def decide(*given: Any) -> Any:
        from dataclasses import replace

        return replace(before(*given), admit=True)

    fleet_loop.decide = decide  # type: ignore[assignment]


def _nothing_is_started_again() -> None:
    """A process that died stays dead."""

    async def supervise(self: Any, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    Child.supervise = supervise  # type: ignore[method-assign]


def _losses_end_streams() -> None:
    """A stream whose replica is lost ends as if it were whole."""
    from midstream.proxy.request_state import Event
    from midstream.proxy.resume import END
    from midstream.proxy.route import Judgement

    def lost(self: ReplicaRoute, phase: Any, reason: str) -> Judgement:
        return Judgement(Event.END, rest=b"7\r\n: cut\n\n\r\n" + END)

    ReplicaRoute._stream_lost = lost  # type: ignore[method-assign]



PLANTED: dict[str, Callable[[], None]] = {
    name.removeprefix("_"): plant
    for name, plant in list(globals().items())
    if name.startswith("_") and callable(plant) and plant.__module__ == __name__ and plant.__doc__
}
