"""What several gateways want together, when they start, end and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from midstream.gateway.roster import Running, RunningReplica, Wanted, WantedReplica
from midstream.launch.gateways import Gateways, union
from midstream.launch.process import StartFailed, Supervised, ignore


def replica(name: str, model: str = "m") -> WantedReplica:
    return WantedReplica(name=name, deployment="d", model=model)


def line(*names: str) -> bytes:
    return msgspec.json.encode(Wanted(tuple(map(replica, names))))


class Played(Supervised):
    """A gateway whose ends and starts are the test's."""

    def __init__(self, name: str, on_line: Callable[[bytes], None], greeting: Callable[[], Running]) -> None:
        self.name, self.host, self.port = name, "127.0.0.1", 1
        self._on_line, self._greeting = on_line, greeting
        self.told: list[msgspec.Struct] = []
        self.may_start = asyncio.Event()
        self.ends = asyncio.Event()
        self.fails: str | None = None
        self.stopped = False

    @property
    def running(self) -> bool:
        return True

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        await self.may_start.wait()
        if self.fails is not None:
            raise StartFailed(self.fails)
        self.may_start.clear()
        self.told.append(self._greeting())

    async def ended(self) -> str:
        await self.ends.wait()
        self.ends.clear()
        return "was ended"

    def says(self, *names: str) -> None:
        self._on_line(line(*names))

    def says_half(self, *names: str) -> None:
        self._on_line(line(*names)[:-5])

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

    def _make(self, *arguments: object) -> Supervised:
        self.members.append(Played(*arguments))  # type: ignore[arg-type]
        return self.members[-1]

    def _want(self, wanted: Wanted) -> None:
        self.wanted.append([one.name for one in wanted.replicas])

    async def started(self) -> asyncio.Task[None]:
        """What supervises them."""
        for member in self.members:
            member.may_start.set()
        await self.gateways.start()
        return asyncio.create_task(self.gateways.supervise())


def played(count: int, scene: Callable[[Bed], Awaitable[None]]) -> Bed:
    async def main() -> Bed:
        bed = Bed(count)
        await asyncio.wait_for(scene(bed), 60)
        return bed

    return asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing tells of it; the scene's timeout bounds it
        await asyncio.sleep(0.005)


def test_a_replica_is_wanted_while_a_replaced_gateway_has_requests_on_it() -> None:
    async def scene(bed: Bed) -> None:
        supervising = await bed.started()
        [one] = bed.members
        one.says("a", "b")
        one.on_retiring(7, line("a", "b"))
        one.says("a")  # its successor has nothing on b
        assert bed.wanted[-1] == ["a", "b"], "the replaced one has a stream there"
        one.on_retiring(7, line("a"))
        assert bed.wanted[-1] == ["a"]
        one.on_retiring(7, line("a", "b"))
        one.on_retiring(7, None)
        assert bed.wanted[-1] == ["a"], "it has ended"
        supervising.cancel()

    played(1, scene)


def test_a_replica_is_wanted_while_any_gateway_wants_it() -> None:
    async def scene(bed: Bed) -> None:
        supervising = await bed.started()
        one, two = bed.members
        assert (one.name, two.name) == ("gateway-0", "gateway-1")
        one.says("a", "b")
        two.says("a", "b")
        one.says("a")  # it has nothing on b any more
        assert bed.wanted[-1] == ["a", "b"], "the other one may have a stream there"
        two.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        one.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        supervising.cancel()

    played(2, scene)


def test_a_gateway_that_is_lost_holds_nothing_up_and_comes_back_into_what_there_is() -> None:
    async def scene(bed: Bed) -> None:
        supervising = await bed.started()
        one, two = bed.members
        one.says("a", "b")
        two.says("a", "b")
        two.says("a")
        assert bed.wanted[-1] == ["a", "b"]
        one.ends.set()  # with its streams
        await until(lambda: bed.wanted[-1] == ["a"])
        one.says("a", "b")  # said before its end, and heard after it
        assert bed.wanted[-1] == ["a"]
        two.says("a", "c")
        assert bed.wanted[-1] == ["a", "c"]
        one.says("a", "c", "d")  # as it is up again, its list may be there before that is known
        assert bed.wanted[-1] == ["a", "c"]
        one.may_start.set()
        await until(lambda: bed.wanted[-1] == ["a", "c", "d"])
        assert one.told == [RUNNING, RUNNING]
        supervising.cancel()

    played(2, scene)


def test_while_no_gateway_is_up_what_was_wanted_stays_so() -> None:
    async def scene(bed: Bed) -> None:
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

    played(1, scene)


def test_one_that_is_up_is_started_again_also_while_another_waits_for_its_node() -> None:
    async def scene(bed: Bed) -> None:
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

    played(2, scene)


def test_one_that_cannot_start_is_the_failure_of_all_and_all_are_stopped_and_told() -> None:
    async def scene(bed: Bed) -> None:
        bed.members[1].fails = "gateway-1: no such port"
        bed.members[1].may_start.set()
        with pytest.raises(StartFailed, match="no such port"):
            await bed.gateways.start()
        bed.gateways.tell(RUNNING)
        assert [member.told for member in bed.members] == [[RUNNING]] * 3
        await bed.gateways.stop(1.0)
        assert all(member.stopped for member in bed.members)

    played(3, scene)


def test_of_a_replica_that_two_describe_otherwise_the_first_counts() -> None:
    both = union([Wanted((replica("a"), replica("b"))), Wanted((replica("b", "other"), replica("c")))])
    assert both == Wanted((replica("a"), replica("b"), replica("c")))
