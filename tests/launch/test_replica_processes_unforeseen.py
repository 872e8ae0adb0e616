"""What replica processes do when a host is not well, and when something happens that nobody thought of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Set
from typing import Any

import msgspec
import pytest

from midstream.fleet.desired_state import Wanted, WantedReplica
from midstream.launch.process import HostUnwell, StartFailed, Supervised, ignore
from midstream.launch.replica_processes import ReplicaProcesses

DEADLINE_S = 60
URL = "http://h:7"


class Fake(Supervised):
    """Its starts and ends are as the test says: each start takes one of `starts`."""

    host = "h"

    def __init__(self, name: str, *starts: BaseException | None) -> None:
        self.name = name
        self.starts = list(starts)
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stop_raises: list[Exception] = []
        self.stops = self.kills = 0

    @property
    def running(self) -> bool:
        return self.port != 0

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        if self.starts and (error := self.starts.pop(0)) is not None:
            raise error
        self.port = 7
        self.end = asyncio.get_running_loop().create_future()

    async def ended(self) -> str:
        return await self.end

    def tell(self, message: msgspec.Struct) -> None: ...

    async def stop(self, grace_s: float) -> None:
        await self.may_stop.wait()
        self.port = 0
        self.stops += 1
        if self.stop_raises:
            raise self.stop_raises.pop()

    def kill(self) -> None:
        self.kills += 1

    def renew(self) -> None: ...


class Scene:
    def __init__(
        self, *children: Fake, clean: Callable[[WantedReplica, Set[str]], None] | None = None
    ) -> None:
        self.children = list(children)
        self.made: list[Fake] = []
        self.changed = asyncio.Event()
        self.processes = ReplicaProcesses(
            self._make, clean or (lambda r, others: None), self.changed.set, stop_s=1000
        )

    async def _make(self, wanted: WantedReplica) -> Supervised:
        self.made.append(self.children.pop(0))
        return self.made[-1]

    def want(self, *names: str, model: str = "m") -> None:
        """Names are DEPLOYMENT-NUMBER."""
        self.processes.want(
            Wanted(tuple(WantedReplica(name=n, deployment=n.partition("-")[0], model=model) for n in names))
        )

    def shown(self) -> dict[str, tuple[str | None, str | None]]:
        return {r.name: (r.url, r.error) for r in self.processes.running().replicas}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_a_host_that_is_not_well_is_waited_for_and_is_no_failure() -> None:
    async def work() -> None:
        child = Fake("a-0", HostUnwell("a-0: node 10.0.0.7 died"))
        here = Scene(child, child)
        here.want("a-0")
        await here.until(lambda: here.shown() == {"a-0": (None, "a-0: node 10.0.0.7 died")})
        assert (here.processes.failure("a"), here.processes.waiting("a")) == (None, {"a-0"})
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        child.starts = [HostUnwell("a-0: node 10.0.0.8 died"), StartFailed("a-0: no memory")]
        # Supervised by now: that is another way.
        child.end.set_result("died")
        await here.until(lambda: here.shown() == {"a-0": (URL, "a-0: node 10.0.0.8 died")})
        assert (here.processes.failure("a"), here.processes.waiting("a")) == (None, {"a-0"})
        await here.until(lambda: here.shown() == {"a-0": (URL, "a-0: no memory")})
        assert (here.processes.failure("a"), here.processes.waiting("a")) == ("a-0: no memory", set())
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        await here.processes.close()

    run(work)


def test_a_replica_that_meets_something_unforeseen_is_ended_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        first, second = Fake("a-0", KeyError("nobody thought of it")), Fake("a-0")
        third = Fake("a-0")
        here = Scene(first, second, third)
        here.want("a-0")
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        assert (here.made, first.stops) == ([first, second], 1)
        second.stop_raises = [RuntimeError("nor of this")]
        second.end.set_exception(RuntimeError("while it ran"))
        await here.until(lambda: here.shown() == {"a-0": (URL, "a-0: RuntimeError('while it ran')")})
        assert here.processes.failure("a") == "a-0: RuntimeError('while it ran')"
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        assert (second.stops, second.kills, here.made[-1]) == (1, 1, third)
        await here.processes.close()
        assert third.stops == 1

    run(work)
    assert [r.message for r in caplog.records if r.exc_info] == [
        "a-0: unforeseen; starting it again in 0.2 s",
        "a-0: unforeseen; starting it again in 0.4 s",
        "a-0: cannot be ended in order; killing it",
    ]


@pytest.mark.parametrize("stop_raises", [[], [OSError("no file descriptor is left")]])
def test_a_deployment_goes_also_when_its_caches_cannot_be_removed(stop_raises: list[Exception]) -> None:
    async def work() -> None:
        def clean(wanted: WantedReplica, others: Set[str]) -> None:
            raise PermissionError("not yours")

        here = Scene(Fake("a-0"), Fake("b-0"), clean=clean)
        here.want("a-0", "b-0")
        await here.until(lambda: here.shown() == {"a-0": (URL, None), "b-0": (URL, None)})
        here.made[0].stop_raises = list(stop_raises)
        here.want("b-0")
        await here.until(lambda: here.shown() == {"b-0": (URL, None)})
        await here.processes.close()

    run(work)


def test_one_that_changes_twice_while_the_first_ends_waits_for_that() -> None:
    async def work() -> None:
        first, last = Fake("a-0"), Fake("a-0")
        here = Scene(first, last)
        here.want("a-0", model="1")
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        first.may_stop.clear()
        here.want("a-0", model="2")
        # It waits for the first.
        await asyncio.sleep(0)
        here.want("a-0", model="3")
        for _ in range(20):
            await asyncio.sleep(0)
        assert here.made == [first], "two at once would share a cache directory"
        first.may_stop.set()
        await here.until(lambda: here.shown() == {"a-0": (URL, None)})
        assert here.made == [first, last]
        await here.processes.close()

    run(work)
