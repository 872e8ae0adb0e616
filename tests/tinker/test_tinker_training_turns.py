"""The order of a model's training requests, whatever the order they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from midstream_tinker.answers import StepDone
from midstream_tinker.futures import Future, Futures
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.turns import TrainingTurn, Turns

MODEL = "session_ab:train:0"


class World:
    """Turns with somebody who takes them. `done`: the seq_ids carried out, in that order."""

    def __init__(self, first: int | None = 1, gap_s: float = 600.0) -> None:
        self.futures = Futures()
        self.turns = Turns(MODEL, first, gap_s=gap_s)
        self.done: list[int] = []
        self.made: dict[int, Future] = {}

    def submit(self, seq_id: int, body: bytes = b"", kind: str = "optim_step") -> str:
        known = self.turns.known(kind, seq_id, body)
        if known is not None:
            return known
        future = self.made[seq_id] = self.futures.new("tenant", kind)
        self.turns.add(TrainingTurn(kind, seq_id, body, future, self._act(seq_id, future)))
        return future.request_id

    def _act(self, seq_id: int, future: Future) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            self.done.append(seq_id)
            future.resolve_json(StepDone(metrics={"seq_id": seq_id}))

        return act

    async def work(self) -> None:
        while (turn := await self.turns.take()) is not None:
            await turn.act()

    def error(self, seq_id: int) -> str:
        outcome = self.made[seq_id].outcome
        assert outcome is not None
        return "" if outcome.facts.error is UNSET else outcome.facts.error


def close_and_drain(world: World) -> None:
    async def drain() -> None:
        world.turns.close()
        await world.work()

    asyncio.run(drain())


@given(st.permutations(range(1, 12)), st.data())
def test_whatever_the_order_of_arrival_each_is_carried_out_once_in_order(
    order: list[int], data: st.DataObject
) -> None:
    async def run() -> World:
        world = World()
        working = asyncio.create_task(world.work())
        for seq_id in order:
            first = world.submit(seq_id, b"%d" % seq_id)
            again = data.draw(st.sampled_from([*world.made]))
            assert world.submit(again, b"%d" % again) == world.made[again].request_id
            assert world.submit(seq_id, b"%d" % seq_id) == first
            for _ in range(data.draw(st.integers(0, 3))):
                await asyncio.sleep(0)
        world.turns.close()
        await working
        return world

    world = asyncio.run(run())
    assert world.done == list(range(1, 12))
    assert all(world.error(seq_id) == "" for seq_id in world.made)


@given(st.sets(st.integers(1, 12)), st.randoms(use_true_random=False))
def test_with_some_missing_nothing_overtakes_and_nothing_hangs(missing: set[int], random: object) -> None:
    async def run() -> World:
        world = World()
        working = asyncio.create_task(world.work())
        order = [seq_id for seq_id in range(1, 13) if seq_id not in missing]
        random.shuffle(order)  # type: ignore[attr-defined]
        for seq_id in order:
            world.submit(seq_id)
            await asyncio.sleep(0)
        world.turns.close()
        await working
        return world

    world = asyncio.run(run())
    gap = min(missing, default=13)
    assert world.done == list(range(1, gap))
    for seq_id, future in world.made.items():
        assert future.done
        assert (world.error(seq_id) == "") == (seq_id < gap)


def test_what_waits_for_a_request_that_never_comes_fails_and_so_does_that_one_later() -> None:
    async def run() -> World:
        world = World(gap_s=0.01)
        working = asyncio.create_task(world.work())
        world.submit(1)
        world.submit(3)
        world.submit(4)
        await world.made[4].wait()
        world.submit(2)
        world.submit(5)
        await world.made[5].wait()
        world.turns.close()
        await working
        return world

    world = asyncio.run(run())
    assert world.done == [1, 5]
    for seq_id in (3, 4):
        assert f"seq_id {seq_id} of {MODEL} follows seq_id 2" in world.error(seq_id)
    assert "seq_id 2" in world.error(2)
    assert "too late" in world.error(2)


def test_a_gap_is_given_up_in_time_also_when_more_and_more_comes_behind_it() -> None:
    async def run() -> World:
        world = World(gap_s=0.05)
        working = asyncio.create_task(world.work())
        world.submit(2)
        # At this pace, many gaps long.
        for seq_id in range(3, 1000):
            if world.made[2].done:
                break
            world.submit(seq_id)
            await asyncio.sleep(0.001)
        assert "follows seq_id 1" in world.error(2)
        world.turns.close()
        await working
        return world

    assert asyncio.run(run()).done[:1] != [2]


def test_a_seq_id_stands_for_one_request() -> None:
    async def run() -> World:
        world = World()
        world.submit(1, b"a")
        with pytest.raises(TinkerRefusal) as other_body:
            world.submit(1, b"b")
        with pytest.raises(TinkerRefusal) as other_kind:
            world.submit(1, b"a", kind="save_weights")
        assert (other_body.value.status, other_body.value.param) == (400, "seq_id")
        assert "another body" in other_body.value.detail
        assert "optim_step" in other_kind.value.detail
        assert "save_weights" in other_kind.value.detail
        return world

    world = asyncio.run(run())
    close_and_drain(world)
    assert world.done == [1]


def test_a_model_that_this_process_did_not_make_goes_on_at_what_comes_first() -> None:
    async def run() -> World:
        world = World(first=None)
        working = asyncio.create_task(world.work())
        world.submit(37)
        world.submit(38)
        world.submit(36)
        world.turns.close()
        await working
        world.submit(39)
        return world

    world = asyncio.run(run())
    assert world.done == [37, 38]
    assert "too late" in world.error(36)
    assert "finished" in world.error(39)
