"""What several gateways want together, when they start, end and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from midstream.core.measures import Distribution
from midstream.core.supervision import Listening
from midstream.fleet.desired_state import Running, RunningReplica, Wanted, WantedReplica
from midstream.fleet.tally import STALLS, GatewayReport, Siblings, Tally, stalled
from midstream.launch.gateways import Gateways, union
from midstream.launch.process import ChildMessages, StartFailed, Supervised, ignore


def replica(name: str, model: str = "m") -> WantedReplica:
    return WantedReplica(name=name, deployment="d", model=model)


def line(*names: str, report: GatewayReport | None = None) -> bytes:
    return msgspec.json.encode(Wanted(tuple(map(replica, names)), report))


def counted(boot: str, requests: int, *, changes: int = 0, ready: bool = True) -> GatewayReport:
    tally = Tally(
        requests=[("completions", 200, requests)],
        counters={"routes": {"new": requests}},
        histograms={"total_s": {"completions": Distribution([requests, 1], 0.5)}},
    )
    return GatewayReport(boot=boot, listening=True, ready=ready, changes=changes, tally=tally)


class Played(Supervised):
    """A gateway whose ends and starts are the test's."""

    def __init__(self, name: str, conversation: ChildMessages) -> None:
        assert conversation.on_line is not None
        assert conversation.greeting is not None
        self.name, self.host, self.port = name, "127.0.0.1", 1
        self._on_line, self._greeting = conversation.on_line, conversation.greeting
        self.told: list[msgspec.Struct] = []
        self.may_start = asyncio.Event()
        self.ends = asyncio.Event()
        self.fails: Exception | None = None
        self.stopped = False

    @property
    def running(self) -> bool:
        return True

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        await self.may_start.wait()
        if self.fails is not None:
            raise self.fails
        self.may_start.clear()
        self.told.append(self._greeting())

    async def ended(self) -> str:
        await self.ends.wait()
        self.ends.clear()
        return "was ended"

    def says(self, *names: str, report: GatewayReport | None = None) -> None:
        self._on_line(line(*names, report=report))

    @property
    def siblings(self) -> Siblings:
        """As it was told last."""
        last = self.told[-1]
        assert isinstance(last, Running)
        return last.siblings

    def says_half(self, *names: str) -> None:
        self.hears(line(*names)[:-5])

    def hears(self, said: bytes) -> None:
        self._on_line(said)

    def tell(self, message: msgspec.Struct) -> None:
        self.told.append(message)

    async def stop(self, grace_s: float) -> None:
        self.stopped = True

    def kill(self) -> None: ...
    def renew(self) -> None: ...


RUNNING = Running((RunningReplica(name="a", deployment="d", url="http://h:1"),))


class Bed:
    def __init__(self, count: int) -> None:
        self.wanted: list[list[str]] = []
        self.members: list[Played] = []
        self.gateways = Gateways(self._make, count, self._want, lambda: RUNNING)

    def _make(self, name: str, conversation: ChildMessages) -> Supervised:
        self.members.append(Played(name, conversation))
        return self.members[-1]

    def _want(self, wanted: Wanted) -> None:
        self.wanted.append([one.name for one in wanted.replicas])

    async def started(self) -> asyncio.Task[None]:
        """What supervises them."""
        for member in self.members:
            member.may_start.set()
        await self.gateways.start()
        return asyncio.create_task(self.gateways.supervise())


@asynccontextmanager
async def played(count: int) -> AsyncIterator[Bed]:
    async with asyncio.timeout(60):
        yield Bed(count)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing tells of it; the scene's timeout bounds it
        await asyncio.sleep(0.005)


async def test_a_replica_is_wanted_while_a_replaced_gateway_has_requests_on_it() -> None:
    async with played(1) as bed:
        supervising = await bed.started()
        [one] = bed.members
        one.says("a", "b")
        one.on_retiring(7, line("a", "b"))
        # Its successor has nothing on b.
        one.says("a")
        assert bed.wanted[-1] == ["a", "b"], "the replaced one has a stream there"
        one.on_retiring(7, line("a"))
        assert bed.wanted[-1] == ["a"]
        one.on_retiring(7, line("a", "b"))
        one.on_retiring(7, None)
        assert bed.wanted[-1] == ["a"], "it has ended"
        supervising.cancel()


async def test_a_replica_is_wanted_while_any_gateway_wants_it() -> None:
    async with played(2) as bed:
        supervising = await bed.started()
        one, two = bed.members
        assert (one.name, two.name) == ("gateway-0", "gateway-1")
        one.says("a", "b")
        two.says("a", "b")
        # It has nothing on b any more.
        one.says("a")
        assert bed.wanted[-1] == ["a", "b"], "the other one may have a stream there"
        two.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        one.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        supervising.cancel()


async def test_a_gateway_that_is_lost_holds_nothing_up_and_comes_back_into_what_there_is() -> None:
    async with played(2) as bed:
        supervising = await bed.started()
        one, two = bed.members
        one.says("a", "b")
        two.says("a", "b")
        two.says("a")
        assert bed.wanted[-1] == ["a", "b"]
        # With its streams.
        one.ends.set()
        await until(lambda: bed.wanted[-1] == ["a"])
        # Said before its end, and heard after it.
        one.says("a", "b")
        assert bed.wanted[-1] == ["a"]
        two.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        # As it is up again, its list may be there before that is known.
        one.says("a", "c", "d")
        assert bed.wanted[-1] == ["a", "c"]
        one.may_start.set()
        await until(lambda: bed.wanted[-1] == ["a", "c", "d"])
        assert one.told == [RUNNING, RUNNING]
        supervising.cancel()


async def test_while_no_gateway_is_up_what_was_wanted_stays_so() -> None:
    async with played(1) as bed:
        [only] = bed.members
        assert only.name == "gateway"
        only.says("early")
        assert bed.wanted == [], "it is not up"
        supervising = await bed.started()
        assert bed.wanted[-1] == ["early"]
        only.says("a", "b")
        before = len(bed.wanted)
        only.ends.set()
        only.may_start.set()
        await until(lambda: len(only.told) == 2)
        assert bed.wanted[before:] == []
        only.says_half("b")
        assert bed.wanted[before:] == []
        only.says("b")
        assert bed.wanted[before:] == [["b"]]
        supervising.cancel()


async def test_one_that_is_up_is_started_again_also_while_another_waits_for_its_node() -> None:
    async with played(2) as bed:
        one, two = bed.members
        starting = asyncio.create_task(bed.gateways.start())
        one.may_start.set()
        await until(lambda: one.told == [RUNNING])
        one.says("a")
        assert bed.wanted == [["a"]]
        one.ends.set()
        one.may_start.set()
        await until(lambda: one.told == [RUNNING] * 2)
        assert not starting.done()
        two.may_start.set()
        await starting
        await bed.gateways.stop(1.0)


async def test_the_error_of_a_gateway_is_no_list_of_replicas() -> None:
    async with played(1) as bed:
        supervising = await bed.started()
        [gateway] = bed.members
        gateway.says("a")
        gateway.hears(msgspec.json.encode(Listening(error="too many open files")))
        assert bed.wanted == [["a"]]
        supervising.cancel()


async def test_a_bug_in_a_start_is_raised_and_not_waited_for() -> None:
    async with played(2) as bed:
        bed.members[0].fails = RuntimeError("a bug")
        bed.members[0].may_start.set()
        with pytest.raises(RuntimeError, match="a bug"):
            await bed.gateways.start()
        await bed.gateways.stop(1.0)


async def test_one_that_cannot_start_is_the_failure_of_all_and_all_are_stopped_and_told() -> None:
    async with played(3) as bed:
        bed.members[1].fails = StartFailed("gateway-1: no such port")
        bed.members[1].may_start.set()
        with pytest.raises(StartFailed, match="no such port"):
            await bed.gateways.start()
        bed.gateways.tell(RUNNING)
        assert [member.told for member in bed.members] == [[RUNNING]] * 3
        await bed.gateways.stop(1.0)
        assert all(member.stopped for member in bed.members)


def test_of_a_replica_that_two_describe_otherwise_the_first_counts() -> None:
    both = union([Wanted((replica("a"), replica("b"))), Wanted((replica("b", "other"), replica("c")))])
    assert both == Wanted((replica("a"), replica("b"), replica("c")))


async def test_each_gateway_is_told_what_the_others_counted_and_how_many_are_ready() -> None:
    async with played(3) as bed:
        supervising = await bed.started()
        one, two, three = bed.members
        one.says("a", report=counted("b1", 5))
        two.says("a", report=counted("b2", 7, ready=False))
        assert one.siblings.tally.requests == [("completions", 200, 7)]
        assert (one.siblings.listening, one.siblings.ready) == (1, 0)
        assert two.siblings.tally.requests == [("completions", 200, 5)]
        three.says("a", report=counted("b3", 1, changes=1))
        assert two.siblings.tally.counters == {"routes": {"new": 6}}
        assert two.siblings.tally.histograms == {"total_s": {"completions": Distribution([6, 2], 1.0)}}
        assert (one.siblings.changes, three.siblings.changes) == (1, 0)
        said = len(one.told)
        three.says("a", report=counted("b3", 1, changes=1))
        assert len(one.told) == said, "nothing changed"
        supervising.cancel()


async def test_what_a_gateway_counted_stays_counted_once_when_it_ends_or_is_replaced() -> None:
    async with played(2) as bed:
        supervising = await bed.started()
        one, two = bed.members
        two.says("a", report=counted("b2", 1))
        one.says("a", report=counted("b1", 5))
        one.ends.set()
        await until(lambda: two.siblings.listening == 0)
        assert two.siblings.tally.requests == [("completions", 200, 5)]
        # Said before its end, and heard after it.
        one.says("a", report=counted("b1", 6))
        one.may_start.set()
        await until(lambda: not one.may_start.is_set())
        assert two.siblings.tally.requests == [("completions", 200, 5)]
        one.says("a", report=counted("b3", 2))
        assert two.siblings.tally.requests == [("completions", 200, 7)]
        assert one.siblings.tally.requests == [("completions", 200, 6)], "its own earlier process's, too"
        one.on_retiring(7, line("a", report=counted("b3", 2)))
        assert one.siblings.tally.requests == [("completions", 200, 8)], (
            "for its successor, which is told as it is"
        )
        one.says("a", report=counted("b4", 1))
        one.on_retiring(7, line("a", report=counted("b3", 3)))
        assert one.siblings.tally.requests == [("completions", 200, 9)]
        assert two.siblings.tally.requests == [("completions", 200, 9)]
        one.on_retiring(7, None)
        assert two.siblings.tally.requests == [("completions", 200, 9)]
        assert two.siblings.listening == 1
        supervising.cancel()


async def test_every_gateway_shows_the_stalls_of_processes_that_are_no_gateways() -> None:
    async with played(2) as bed:
        await bed.started()
        for process, seconds in (("tinker", 0.07), ("supervisor", 0.3), ("tinker", 2.0)):
            bed.gateways.count(stalled(process, seconds))
        for member in bed.members:
            stalls = member.siblings.tally.histograms[STALLS]
            assert {process: (sum(one.counts), one.sum) for process, one in stalls.items()} == {
                "tinker": (2, 2.07),
                "supervisor": (1, 0.3),
            }
