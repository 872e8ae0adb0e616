"""Which adapters are loaded: the bound holds, the least recently used goes, nobody waits for ever or for another's fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from training_fakes import FakePolicies

from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.trainer.types import WorkFailed


def name(number: int) -> str:
    """Of an adapter that was saved under a name."""
    return f"tinker-ab-0-{number}-best"


def policy(number: int) -> str:
    return f"tinker-ab-0-{number}"


@asynccontextmanager
async def play(most: int, **loaded: str) -> AsyncIterator[tuple[SamplerAdapters, FakePolicies]]:
    policies = FakePolicies()
    policies.loaded.update(loaded)
    adapters = SamplerAdapters(policies, most)
    try:
        async with asyncio.timeout(120):
            yield adapters, policies
    finally:
        await adapters.close()


async def use(adapters: SamplerAdapters, number: int) -> None:
    async with adapters.use(name(number)):
        pass


async def test_an_adapter_is_loaded_once_and_the_least_recently_used_makes_way() -> None:
    async with play(2) as (adapters, policies):
        for number in (1, 2, 1, 3):
            async with adapters.use(name(number)):
                assert policies.loaded[policy(number)] == name(number)
        assert policies.said == [
            ("load", policy(1)),
            ("load", policy(2)),
            ("end", policy(2)),
            ("load", policy(3)),
        ]
        await use(adapters, 2)
        assert set(policies.loaded) == {policy(2), policy(3)}


async def test_one_in_use_stays_and_the_newcomer_takes_the_idle_ones_place() -> None:
    async with play(2) as (adapters, policies), adapters.use(name(1)):
        await use(adapters, 2)
        await use(adapters, 3)
        assert set(policies.loaded) == {policy(1), policy(3)}


async def test_when_all_are_in_use_a_newcomer_waits_and_later_samples_of_the_leaver_wait_behind_it() -> None:
    async with play(1) as (adapters, policies):
        async with contextlib.AsyncExitStack() as used:
            await used.enter_async_context(adapters.use(name(1)))
            newcomer = asyncio.create_task(use(adapters, 2))
            await asyncio.sleep(0)
            again = asyncio.create_task(use(adapters, 1))
            for _ in range(20):
                await asyncio.sleep(0)
            assert policies.said == [("load", policy(1))]
        await newcomer
        await again
        assert policies.said[1:] == [
            ("end", policy(1)),
            ("load", policy(2)),
            ("end", policy(2)),
            ("load", policy(1)),
        ]


async def test_many_at_once_share_one_load_which_outlives_the_first_of_them() -> None:
    async with play(1) as (adapters, policies):
        gate, begun = asyncio.Event(), asyncio.Event()

        def wait(what: str, of: str) -> Awaitable[object]:
            begun.set()
            return gate.wait()

        policies.before = wait
        users = [asyncio.create_task(use(adapters, 1)) for _ in range(5)]
        await begun.wait()
        users[0].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*users[1:])
        assert users[0].cancelled()
        assert policies.said == [("load", policy(1))]


async def test_nothing_runs_after_the_end_whatever_was_being_loaded_or_waited_for() -> None:
    policies = FakePolicies()
    never, loading = asyncio.Event(), asyncio.Event()

    def wait(what: str, of: str) -> Awaitable[object] | None:
        if of == policy(3):
            loading.set()
            return never.wait()
        return None

    policies.before = wait
    adapters = SamplerAdapters(policies, 2)
    before = asyncio.all_tasks()
    async with adapters.use(name(1)):
        users = [asyncio.create_task(use(adapters, number)) for number in (2, 3, 4, 5)]
        await loading.wait()
        await adapters.close()
        await asyncio.gather(*users, return_exceptions=True)
    assert asyncio.all_tasks() == before


async def test_one_that_cannot_be_loaded_fails_its_users_alone_and_leaves_its_place() -> None:
    async with play(2) as (adapters, policies):

        def refuse(what: str, of: str) -> None:
            if (what, of) == ("load", policy(1)):
                raise WorkFailed("replica-0 could not load it: NaN", "unknown")

        policies.before = refuse
        async with adapters.use(name(2)):
            users = [asyncio.create_task(use(adapters, 1)) for _ in range(3)]
            failures = await asyncio.gather(*users, return_exceptions=True)
            assert [str(failure) for failure in failures] == ["replica-0 could not load it: NaN"] * 3
        assert policies.said.count(("load", policy(1))) == 1
        await use(adapters, 3)
        assert set(policies.loaded) == {policy(2), policy(3)}
        policies.before = None
        await use(adapters, 1)


async def test_one_that_cannot_be_ended_holds_up_nobody() -> None:
    async with play(1) as (adapters, policies):
        await use(adapters, 1)

        def refuse(what: str, of: str) -> None:
            if what == "end":
                raise WorkFailed("the ledger's disk is full", "server")

        policies.before = refuse
        await use(adapters, 2)
        policies.before = None
        await use(adapters, 1)
        assert set(policies.loaded) == {policy(1)}


async def test_one_that_could_not_be_ended_counts_again_and_makes_way_later() -> None:
    async with play(1) as (adapters, policies):
        await use(adapters, 1)

        def refuse(what: str, of: str) -> None:
            if what == "end":
                policies.before = None
                raise WorkFailed("the ledger's disk is full", "server")

        policies.before = refuse
        await use(adapters, 2)
        assert set(policies.loaded) == {policy(1), policy(2)}
        await use(adapters, 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert set(policies.loaded) == {policy(3)}


async def test_those_of_a_process_before_count_and_go_and_others_policies_are_let_alone() -> None:
    before = {"opponent": "step-4", policy(1): name(1), policy(7): name(7), "tinker-ab-0": "mine"}
    async with play(2, **before) as (adapters, policies):
        async with adapters.use(name(1)), adapters.use(name(2)):
            assert policies.loaded == {
                "opponent": "step-4",
                policy(1): name(1),
                policy(2): name(2),
                "tinker-ab-0": "mine",
            }
        # Whether it had come to serve is not known.
        assert ("load", policy(1)) in policies.said


async def test_one_is_forgotten_unless_somebody_uses_it() -> None:
    async with play(2) as (adapters, policies):
        async with adapters.use(name(1)):
            assert not await adapters.forget(name(1))
        assert await adapters.forget(name(1))
        assert policies.loaded == {}
        assert await adapters.forget(name(9))


@given(
    most=st.integers(1, 4),
    uses=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=40),
    pauses=st.lists(st.integers(0, 3), min_size=1, max_size=10),
)
def test_whoever_comes_when_the_bound_holds_and_everybody_has_a_turn(
    most: int, uses: list[tuple[int, int]], pauses: list[int]
) -> None:
    async def scene(adapters: SamplerAdapters, policies: FakePolicies) -> None:
        async def steps(count: int) -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        policies.before = lambda what, of: steps(pauses[len(policies.said) % len(pauses)])

        async def user(number: int, turns: int) -> None:
            await steps(turns)
            async with adapters.use(name(number)):
                for _ in range(turns):
                    assert policies.loaded[policy(number)] == name(number)
                    await asyncio.sleep(0)
                assert policies.loaded[policy(number)] == name(number)

        await asyncio.gather(*(user(number, turns) for number, turns in uses))
        assert policies.most <= most

    async def main() -> None:
        async with play(most) as at:
            await scene(*at)

    asyncio.run(main())
