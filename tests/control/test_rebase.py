"""Long chains of incremental snapshots: one replica writes the newest as full files, and the ledger's chains begin there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from push_world import DEPLOYMENT, World, content, in_world

from midstream.core.errors import RebasePending, SnapshotRefused
from midstream.core.transfer import Digest, Keep
from midstream.core.types import Desired, Stage, Transition
from midstream.fleet.push_upkeep import LEASE_S
from midstream.ledger import FleetReports, Signal

CHAIN_MAX, AFTER = 8, 4


async def step(world: World, number: int, **fields: Any) -> Desired:
    """Signal the delta `number` on the one before, 0 in full. Every replica serves it."""
    given = {"identity": str(number), "url": f"file:///bucket/{number}", "fingerprint": f"print{number}"}
    delta = {"previous": str(number - 1), "compression": "arc_v2"} if number else {}
    [gateway, *_] = world.gateways
    result = await gateway.ledger.signal(
        DEPLOYMENT,
        Signal(**{**given, **delta, **fields}),
        FleetReports(),
        chain_max=CHAIN_MAX,
        rebase_after=AFTER,
    )
    world.hear(str(number), result.desired.generation)
    return result.desired


async def looked(world: World, seconds: float = 61.0) -> None:
    world.clock.time += seconds
    for gateway in world.gateways:
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()


def links(desired: Desired) -> list[str]:
    return [link.url.rpartition("/")[2] for link in desired.files]


def written(world: World) -> list[list[str]]:
    return [one.bucket for one in world.replicas.values()]


async def test_a_long_run_never_reaches_the_bound(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        for number in range(60):
            desired = await step(world, number)
            assert desired.snapshot == str(number)
            assert len(desired.parents) <= AFTER
            await looked(world, 1.0)
        [gateway] = world.gateways
        whole = [row for row in await gateway.ledger.snapshots(DEPLOYMENT) if row.full_url is not None]
        assert [row.identity for row in whole] == [str(number) for number in range(4, 60, 4)]
        assert {(row.kind, row.full_url) for row in whole} == {
            ("delta", f"file:///bucket/{number}.full") for number in range(4, 60, 4)
        }
        # Nothing falls back to the others, as none was ready.
        assert [row.identity for row in whole if row.full_needed] == ["56"]
        assert [name for names in written(world) for name in names] == [
            f"{number}.full" for number in range(4, 60, 4)
        ]
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        # A replica that joins fetches the newest whole files, and what came after them.
        assert links(state.desired) == ["56.full", "57", "58", "59"]
        assert state.desired.files[0].content == content("a")
        assert state.rebase_problem == ""


async def test_whole_files_are_needed_as_long_as_a_replica_may_fall_back_to_what_begins_there(
    tmp_path: Path,
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways

        async def needed() -> list[str]:
            found = await gateway.ledger.snapshots(DEPLOYMENT)
            return [row.identity for row in found if row.full_needed]

        for number in range(14):
            desired = await step(world, number)
            await looked(world, 1.0)
            if number == 5:
                ready = Transition(
                    seq=0, at=5.0, snapshot="5", generation=desired.generation, stage=Stage.IDLE
                )
                await gateway.ledger.record(DEPLOYMENT, "replica-0", "boot", [ready])
        # 5 was ready and stands on 4. 13 is desired and stands on 12. Nothing that stands on 8 was ready.
        assert await needed() == ["4", "12"]
        await step(world, 14, previous=None, compression=None)
        assert await needed() == ["4"]
        await gateway.ledger.reset_ledger(DEPLOYMENT)
        assert await needed() == []


async def test_the_identity_stays_what_it_is_and_loads_from_its_whole_files(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            desired = await step(world, number)
        assert links(desired) == ["0", "1", "2", "3", "4"]
        await looked(world)
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert (state.desired.snapshot, state.desired.generation) == ("4", desired.generation)
        assert links(state.desired) == ["4.full"]
        # Signalled again, it is the same, and asked for once.
        again = await step(world, 4)
        assert (again.generation, links(again)) == (desired.generation, ["4.full"])
        # A rollback to a snapshot before it stands on what that stood on.
        back = await step(world, 2)
        assert links(back) == ["0", "1", "2"]


async def test_signals_that_come_meanwhile_lose_nothing(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        writes = world.replicas["replica-0"]
        writes.faults[Keep] = "hang"
        world.clock.time += 1.0
        await gateway.upkeep.look_once()
        await writes.hangs.wait()
        desired = await step(world, 5)
        assert links(desired) == ["0", "1", "2", "3", "4", "5"]
        writes.goes_on.set()
        await gateway.upkeep.kept()
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert links(state.desired) == ["4.full", "5"]
        assert links(await step(world, 6)) == ["4.full", "5", "6"]


@pytest.mark.parametrize("order", [Digest, Keep])
async def test_a_replica_that_dies_amid_the_rebase_is_followed_by_another(
    tmp_path: Path, order: type
) -> None:
    async with in_world(tmp_path) as world:
        for number in range(5):
            await step(world, number)
        world.replicas["replica-0"].faults[order] = "die"
        await looked(world)
        assert written(world) == [[], ["4.full"], []]


async def test_a_gateway_that_dies_amid_the_rebase_is_followed_by_another(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        for number in range(5):
            await step(world, number)
        world.replicas["replica-0"].faults[Keep] = "hang"
        world.clock.time += 1.0
        await one.upkeep.look_once()
        await world.replicas["replica-0"].hangs.wait()
        await other.upkeep.look_once()
        await other.upkeep.kept()
        assert not any(written(world)), "one at a time"
        for task in one.upkeep._keeping.values():
            task.cancel()
        await one.upkeep.kept()
        world.clock.time += LEASE_S + 1
        await other.upkeep.look_once()
        await other.upkeep.kept()
        assert written(world) == [["4.full"], [], []]


async def test_a_bucket_that_refuses_is_said_once_and_the_bound_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def refuse(world: World) -> None:
        for one in world.replicas.values():
            one.faults[Keep] = "refuse"
        await looked(world)

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(CHAIN_MAX + 1):
            await step(world, number)
            await refuse(world)
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.rebase_problem.endswith("update_info.names: 'x' is none of the model's")
        said = [record.getMessage() for record in caplog.records]
        assert len([one for one in said if "is not in the bucket yet" in one]) == 1, said
        with pytest.raises(RebasePending, match=r"at most 8 are allowed.*is none of the model's"):
            await step(world, CHAIN_MAX + 1)
        # The bucket takes files again: the next delta is taken, and there is nothing to say.
        for one in world.replicas.values():
            one.faults.clear()
        for _ in range(3):
            await looked(world)
        assert len(links(await step(world, CHAIN_MAX + 1))) <= CHAIN_MAX + 1
        assert (await gateway.ledger.state(DEPLOYMENT)).rebase_problem == ""


async def test_a_run_that_reached_the_bound_while_one_was_given_up_goes_on(tmp_path: Path) -> None:
    """No signal is taken any more, so those that are refused have full files wanted."""

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(CHAIN_MAX + 1):
            await step(world, number)
        # The files of 4, which was wanted, have left the caches of all replicas.
        for one in world.replicas.values():
            one.faults[Digest] = "refuse"
        await looked(world, 1.0)
        for one in world.replicas.values():
            one.faults.clear()
        await looked(world)
        assert not any(written(world))
        with pytest.raises(RebasePending, match="at most 8 are allowed"):
            await step(world, CHAIN_MAX + 1)
        await looked(world, 1.0)
        assert [name for names in written(world) for name in names] == ["8.full"]
        assert links(await step(world, CHAIN_MAX + 1)) == ["8.full", "9"]
        assert (await gateway.ledger.state(DEPLOYMENT)).rebase_problem == ""


async def test_the_bound_refuses_for_good_where_no_whole_files_can_come(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(CHAIN_MAX + 1):
            await step(world, number)

        async def beyond(rebase_after: int, **serving: Any) -> None:
            delta = Signal(
                identity="9", url="file:///bucket/9", fingerprint="9", previous="8", compression="arc_v2"
            )
            await gateway.ledger.signal(
                DEPLOYMENT,
                delta,
                FleetReports(**serving),
                chain_max=CHAIN_MAX,
                rebase_after=rebase_after,
            )

        # Whole files of 4 are wanted, with which 9 begins.
        with pytest.raises(RebasePending):
            await beyond(AFTER)
        for one in world.replicas.values():
            one.faults[Digest] = "refuse"
        await looked(world, 1.0)
        # They are given up, as 4 is not desired. Those of 8 are, unless there are no rebases.
        with pytest.raises(SnapshotRefused, match="at most 8 are allowed; publish a full snapshot"):
            await beyond(0)
        with pytest.raises(RebasePending):
            await beyond(AFTER)
        # What is desired now stands on nothing. So nobody makes whole files of the chain that still serves.
        await gateway.ledger.reset_ledger(DEPLOYMENT)
        for number in range(CHAIN_MAX + 1):
            await step(world, number, url=f"file:///bucket/again-{number}")
        full = await gateway.ledger.signal(
            DEPLOYMENT, Signal(identity="x", url="file:///bucket/x", fingerprint="x")
        )
        for one in world.replicas.values():
            one.faults[Digest] = "refuse"
        await looked(world, 1.0)
        generation = full.desired.generation
        with pytest.raises(SnapshotRefused, match="at most 8 are allowed; publish a full snapshot"):
            await beyond(AFTER, failed_generation=generation, serving=(("8", generation),))


async def test_replicas_with_different_files_prevent_it(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        world.replicas["replica-1"].bytes = "b"
        await looked(world)
        assert not any(written(world))
        problem = (await gateway.ledger.state(DEPLOYMENT)).rebase_problem
        assert "replica-0 and replica-1 have different whole files of 4: model.safetensors" in problem
        # The files that one has alone are used no more, so they stop no later try.
        assert [one.distrusted for one in world.replicas.values()] == [False, True, False]
        await looked(world)
        assert written(world) == [["4.full"], [], []]
        assert (await gateway.ledger.state(DEPLOYMENT)).rebase_problem == ""


async def test_where_no_files_are_those_of_most_replicas_none_are_trusted(tmp_path: Path) -> None:
    async with in_world(tmp_path, replicas=2) as world:
        for number in range(5):
            await step(world, number)
        world.replicas["replica-1"].bytes = "b"
        await looked(world)
        assert [one.distrusted for one in world.replicas.values()] == [True, True]
        await looked(world)
        assert not any(written(world))
        # Each fetches what it needs for the next snapshot.
        for one in world.replicas.values():
            one.distrusted, one.bytes = False, "c"
        for number in (5, 6):
            await step(world, number)
            await looked(world)
        assert written(world) == [["6.full"], []]


async def test_an_identity_that_came_to_mean_others_is_not_rebased(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        await looked(world)
        # The same name, other files: what was written stands for the old ones alone.
        await step(world, 3)
        await step(world, 4, fingerprint="another", overwrite=True)
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert links(state.desired) == ["0", "1", "2", "3", "4"]


async def test_a_reset_forgets_whole_files_too(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        await gateway.ledger.reset_ledger(DEPLOYMENT)
        await looked(world)
        assert not any(written(world))
        assert links(await step(world, 0)) == ["0"]


async def test_one_failure_does_not_keep_a_fast_run_from_whole_files(tmp_path: Path) -> None:
    """The next snapshot is tried as it comes: a minute later no replica has its files any more."""

    async with in_world(tmp_path) as world:
        for number in range(5):
            await step(world, number)
        for one in world.replicas.values():
            one.faults[Keep] = "refuse"
        await looked(world, 1.0)
        await step(world, 5)
        await looked(world, 10.0)
        for one in world.replicas.values():
            one.faults.clear()
        # One second for each step, and the bound of chains is near.
        for number in range(6, 16):
            assert links(await step(world, number))[-1] == str(number)
            await looked(world, 1.0)
        assert [names[0] for names in written(world) if names] == ["6.full"]


async def test_whole_files_of_before_a_reset_are_those_of_no_later_snapshot(tmp_path: Path) -> None:
    """The row of a rebase gets the key of one that the reset removed, and its snapshot has the same name."""

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        writes = world.replicas["replica-0"]
        writes.faults[Keep] = "hang"
        world.clock.time += 1.0
        await gateway.upkeep.look_once()
        await writes.hangs.wait()
        await gateway.ledger.reset_ledger(DEPLOYMENT)
        for number in range(5):
            await step(world, number, fingerprint=f"another{number}")
        writes.goes_on.set()
        await gateway.upkeep.kept()
        assert writes.bucket == ["4.full"]
        state = await gateway.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert links(state.desired) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("order", [Digest, Keep])
async def test_a_deployment_that_goes_meanwhile_ends_its_rebase_alone(tmp_path: Path, order: type) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for number in range(5):
            await step(world, number)
        writes = world.replicas["replica-0"]
        writes.faults[order] = "hang"
        world.clock.time += 1.0
        await gateway.upkeep.look_once()
        await writes.hangs.wait()
        [task] = gateway.upkeep._keeping.values()
        await gateway.ledger.delete_deployment(DEPLOYMENT)
        writes.goes_on.set()
        await task
        await gateway.upkeep.look_once()
