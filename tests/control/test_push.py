"""The door of a push against every fault in every phase: it ends in time, nowhere half, and the old weights serve."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from push_world import DEPLOYMENT, MODEL, SETTINGS, Gateway, World, content, in_world

from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    ReplicaUnavailable,
    SnapshotRefused,
)
from midstream.core.transfer import (
    Alive,
    Begin,
    Check,
    Drop,
    Finish,
    InitInfo,
    Join,
    Keep,
    LeaveGroup,
    Receive,
    TrainerState,
)
from midstream.core.types import Stage, Transition
from midstream.fleet import push, push_orders
from midstream.fleet.push_upkeep import KEEP_ROUNDS, LEASE_S, MEMBERS_LOOK_S, PushUpkeep
from midstream.fleet.registry import Deployments
from midstream.ledger import LedgerUnavailable, Phase, Signal

TWO_OF_THREE = msgspec.structs.replace(SETTINGS, quorum=0.6)


async def test_an_update_becomes_a_snapshot_that_replicas_have_and_one_of_them_keeps(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        group = await gateway.init()
        assert [(member.replica, member.rank) for member in group.members] == [
            ("replica-0", 1), ("replica-1", 2), ("replica-2", 3)
        ]  # fmt: skip
        assert [one.rank for one in world.replicas.values()] == [1, 2, 3]
        done = await gateway.push()
        assert (done.desired.snapshot, done.desired.content) == ("v1", content("a"))
        assert (done.fenced, gateway.waited_for) == ({}, ["replica-0", "replica-1", "replica-2"])
        # No replica serves it yet, so none is asked to keep it.
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
        assert not any(one.bucket for one in world.replicas.values())
        world.hear("v1", done.desired.generation)
        for _ in range(3):
            await gateway.upkeep.look_once()
            await gateway.upkeep.kept()
        assert [one.bucket for one in world.replicas.values()] == [["v1"], [], []]
        # The group stays for the next update.
        world.version = "v2"
        for one in world.replicas.values():
            one.bytes = "b"
        assert (await gateway.push()).desired.generation == done.desired.generation + 1
        assert await world.signalled() == ["v1", "v2"]
        numbers = [order.update for order in world.replicas["replica-1"].orders if isinstance(order, Finish)]
        assert numbers == [1, 2]


FAULTS = [
    (kind, fault)
    for kind in (Join, Begin, Check, Receive, Finish)
    for fault in ("stall", "die", "restart", "refuse")
]


@pytest.mark.parametrize(
    ("kind", "fault"), FAULTS, ids=[f"{kind.__name__}-{fault}" for kind, fault in FAULTS]
)
async def test_a_fault_in_any_phase_ends_the_group_everywhere_and_signals_nothing(
    tmp_path: Path, kind: type, fault: str
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        lost = world.replicas["replica-1"]
        lost.faults[kind] = fault
        began = world.clock.time
        with pytest.raises(MidstreamError) as caught:
            await gateway.whole()
        error = caught.value
        assert world.clock.time - began <= SETTINGS.join_s + SETTINGS.update_s + SETTINGS.finish_s
        assert await world.signalled() == []
        if fault == "refuse":
            assert isinstance(error, InvalidRequest)
            assert error.param == "update_info.names"
        else:
            assert isinstance(error, ReplicaUnavailable)
            assert "replica-1" in error.message
            assert "init again: call /init_weight_transfer_engine" in error.message
        if (kind, fault) == (Finish, "refuse"):
            # No trainer waits in a broadcast.
            group = await world.group()
            assert group.phase is Phase.JOINED
        else:
            assert await world.group() is None
            assert world.groups == set()
        assert not any(one.received for one in world.replicas.values() if not one.dead)
        if kind is Check:
            assert not [o for one in world.replicas.values() for o in one.orders if isinstance(o, Receive)]
        # Whatever it was, the next group works.
        lost.dead = False
        world.hear()
        await gateway.init()
        assert (await gateway.push()).desired.snapshot == "v1"


@pytest.mark.parametrize("kind", [Check, Receive, Finish])
@pytest.mark.parametrize("fault", ["stall", "die", "restart"])
async def test_the_quorum_commits_without_a_member_that_is_fenced(
    tmp_path: Path, kind: type, fault: str
) -> None:
    async with in_world(tmp_path, TWO_OF_THREE) as world:
        [gateway] = world.gateways
        world.replicas["replica-1"].faults[kind] = fault
        await gateway.init()
        done = await gateway.push()
        assert list(done.fenced) == ["replica-1"]
        assert gateway.waited_for == ["replica-0", "replica-2"]
        assert await world.group() is None, "a group without a member receives nothing more"
        assert world.groups == set()
        with pytest.raises(Conflict, match="no trainer's group is open"):
            await gateway.start()
        [(_, [update])] = await gateway.ledger.newest_transfers(DEPLOYMENT, 1)
        assert update.replicas == ("replica-0", "replica-2")


async def test_a_member_that_stalls_in_the_finish_leaves_the_quorum_time_to_serve(tmp_path: Path) -> None:
    async with in_world(tmp_path, msgspec.structs.replace(TWO_OF_THREE, finish_s=1.0)) as world:
        [gateway] = world.gateways
        await gateway.init()
        world.replicas["replica-1"].faults[Finish] = "hang"
        # It would answer when the call has no time left.
        done = await asyncio.wait_for(gateway.push(), 60.0)
        assert done.fenced == {"replica-1": "replica-1 gave no answer"}
        assert gateway.waited_for == ["replica-0", "replica-2"]
        assert await world.group() is None


async def test_fewer_than_the_quorum_commit_nothing(tmp_path: Path) -> None:
    async with in_world(tmp_path, TWO_OF_THREE) as world:
        [gateway] = world.gateways
        world.replicas["replica-1"].faults[Receive] = "die"
        world.replicas["replica-2"].faults[Finish] = "stall"
        await gateway.init()
        with pytest.raises(ReplicaUnavailable, match="replica-2"):
            await gateway.push()
        assert (await world.signalled(), await world.group(), world.groups) == ([], None, set())


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_member_that_is_not_wanted_any_more_does_not_count_at_the_finish(
    tmp_path: Path, when: str
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        await gateway.update()
        last = world.replicas["replica-2"]
        if when == "before":
            gateway.scale(2)
            done = await gateway.finish()
        else:
            last.faults[Finish] = "hang"
            call = asyncio.create_task(gateway.finish())
            await last.hangs.wait()
            gateway.scale(2)
            last.dead = True
            last.goes_on.set()
            done = await call
        assert (done.desired.snapshot, done.replicas, done.fenced) == ("v1", ("replica-0", "replica-1"), {})
        assert gateway.waited_for == ["replica-0", "replica-1"]
        assert (gateway.door.counts.updates, gateway.door.counts.groups_ended) == (
            {"committed": 1}, {"members": 1}
        )  # fmt: skip
        # The next group has those that stay.
        await gateway.init(world_size=3)
        world.version = "v2"
        assert len((await gateway.push()).replicas) == 2


async def test_a_member_that_is_wanted_again_amid_the_finish_has_not_answered(tmp_path: Path) -> None:
    async with in_world(tmp_path, TWO_OF_THREE) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        await gateway.update()
        gateway.scale(2)
        first = world.replicas["replica-0"]
        first.faults[Finish] = "hang"
        call = asyncio.create_task(gateway.finish())
        await first.hangs.wait()
        gateway.scale(3)
        first.goes_on.set()
        done = await call
        assert done.replicas == ("replica-0", "replica-1")
        assert done.fenced == {"replica-2": "replica-2 gave no answer"}


async def test_a_failure_counts_also_where_another_member_is_not_wanted_any_more(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        await gateway.update()
        gateway.scale(2)
        world.replicas["replica-1"].faults[Finish] = "die"
        with pytest.raises(ReplicaUnavailable, match="replica-1"):
            await gateway.finish()
        assert (await world.signalled(), await world.group()) == ([], None)


async def test_replicas_that_received_other_bytes_are_never_signalled(tmp_path: Path) -> None:
    async with in_world(tmp_path, TWO_OF_THREE) as world:
        [gateway] = world.gateways
        world.replicas["replica-2"].bytes = "b"
        await gateway.init()
        with pytest.raises(ReplicaUnavailable, match="replica-2 has other bytes than replica-0"):
            await gateway.push()
        assert (await world.signalled(), await world.group(), world.groups) == ([], None, set())
        assert all(any(isinstance(o, Drop) for o in one.orders) for one in world.replicas.values())


async def test_a_member_that_hangs_holds_up_nobody_once_another_refused(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        world.replicas["replica-0"].faults[Check] = "hang"
        world.replicas["replica-1"].faults[Check] = "refuse"
        await gateway.init()
        await gateway.start()
        with pytest.raises(InvalidRequest):
            await gateway.update()
        assert world.groups == set()


async def test_a_replica_that_restarted_is_said_at_the_next_start_with_the_world_size(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.push()
        world.replicas["replica-2"].restart()
        world.hear()
        with pytest.raises(Conflict) as caught:
            await gateway.start()
        assert "replica replica-2 restarted: the world size is 4 now" in caught.value.message
        assert "init again: call /init_weight_transfer_engine" in caught.value.message
        assert (await world.group(), world.groups) == (None, set())


async def test_a_replica_that_is_not_heard_for_a_while_ends_no_group_and_its_next_boot_does(
    tmp_path: Path,
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        lost = world.replicas["replica-2"]
        lost.dead = True
        world.hear()
        with pytest.raises(ReplicaUnavailable, match="replica-2 is not reachable"):
            await gateway.start()
        lost.dead = False
        world.hear()
        await gateway.push()
        lost.restart()
        world.hear()
        with pytest.raises(Conflict, match="replica replica-2 restarted"):
            await gateway.start()
        assert await world.group() is None


async def test_replicas_that_are_not_ready_are_named_and_another_world_size_is_said(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        world.replicas["replica-1"].dead = True
        world.hear()
        with pytest.raises(ReplicaUnavailable, match="not every replica is ready: replica-1") as busy:
            await gateway.init()
        assert busy.value.retry_after_s
        world.replicas["replica-1"].dead = False
        world.hear()
        with pytest.raises(Conflict, match="make it 4, got 2") as size:
            await gateway.init(world_size=2)
        assert size.value.param == "init_info.world_size"
        gateway.deployment.wanted = 4
        with pytest.raises(ReplicaUnavailable, match="replica-3"):
            await gateway.init()
        assert await world.group() is None


async def test_calls_in_the_wrong_phase_say_the_phase_and_what_is_next(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        for call in (gateway.start, gateway.update, gateway.finish):
            with pytest.raises(Conflict, match="call /init_weight_transfer_engine"):
                await call()
        await gateway.init()
        for call in (gateway.update, gateway.finish):
            with pytest.raises(Conflict, match="is joined; call /start_weight_update"):
                await call()
        await gateway.start()
        # A trainer that lost its place begins again.
        await gateway.push()
        assert await gateway.door.shutdown(gateway.deployment)
        assert not await gateway.door.shutdown(gateway.deployment)
        assert (await world.group(), world.groups) == (None, set())


async def test_a_second_trainer_waits_for_a_living_one_and_replaces_a_dead_one(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        first = await gateway.init()
        with pytest.raises(Conflict, match=r"another trainer's group, of 127\.0\.0\.1:29500, is open"):
            await gateway.init(port=29501)
        # The trainer itself begins again at its own store.
        again = await gateway.init()
        assert again.group != first.group
        # Something silent holds its port, or it stands still. Its members soon find out.
        for one in world.replicas.values():
            one.trainer = TrainerState.UNKNOWN
        with pytest.raises(Conflict, match="another trainer's group"):
            await gateway.init(port=29501)
        for one in world.replicas.values():
            one.trainer = TrainerState.GONE
        third = await gateway.init(port=29501)
        assert world.groups == {third.group}
        # A group whose members are gone is nobody's.
        for one in world.replicas.values():
            one.restart()
        world.hear()
        assert (await gateway.init(port=29502)).group == (await world.group()).group


async def test_calls_may_come_to_any_gateway_and_of_two_that_come_at_once_one_works(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        await other.start()
        last = world.replicas["replica-2"]
        last.faults[Check] = "hang"
        both = {asyncio.create_task(gateway.update()) for gateway in (one, other)}
        # The one that works does not end before the other one was refused.
        [refused], [works] = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(refused.exception(), Conflict)
        last.goes_on.set()
        await works
        assert all(replica.received == ["a", "b"] for replica in world.replicas.values())
        assert (await other.finish()).desired.snapshot == "v1"
        inits = await asyncio.gather(one.init(port=1), other.init(port=2), return_exceptions=True)
        assert all(isinstance(result, Conflict) for result in inits), "the first trainer lives"


@pytest.mark.parametrize("kind", [Join, Begin, Receive, Finish])
async def test_the_group_of_a_gateway_that_died_is_ended_by_another_one(tmp_path: Path, kind: type) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        world.replicas["replica-2"].faults[kind] = "hang"
        trainer = asyncio.create_task(one.whole())
        await world.replicas["replica-2"].hangs.wait()
        # It dies in the middle of its work.
        for task in tuple(one.door._tasks):
            task.cancel()
        await asyncio.gather(trainer, return_exceptions=True)
        await other.upkeep.look_once()
        assert await world.group() is not None, "its deadline is not over"
        world.clock.time += SETTINGS.update_s + SETTINGS.finish_s
        await other.upkeep.look_once()
        assert (await world.group(), world.groups, await world.signalled()) == (None, set(), [])
        await other.init()
        assert (await other.push()).desired.snapshot == "v1"


async def test_a_group_that_is_past_its_deadline_takes_no_call(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        world.clock.time += SETTINGS.update_s + 100
        with pytest.raises(Conflict, match="past its deadline while it was started"):
            await gateway.update()
        assert world.groups == set()
        assert not [o for one in world.replicas.values() for o in one.orders if isinstance(o, Receive)]


async def test_a_group_that_waits_ends_once_its_last_replica_has_left_it(tmp_path: Path) -> None:
    async def look(gateway: Gateway) -> bool:
        """Whether the group is still open."""
        gateway.world.clock.time += MEMBERS_LOOK_S
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
        return await gateway.world.group() is not None

    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        for gateway in world.gateways:
            await gateway.upkeep.look_once()
            assert await look(gateway), "all replicas are in it"
        replicas = [*world.replicas.values()]
        for replica in replicas[:2]:
            # They found that its trainer is gone.
            replica.group = ""
            assert await look(other), "a replica is in it"
        replicas[2].faults[Alive] = "stall"
        assert await look(other), "a replica does not answer"
        replicas[2].restart()
        assert await look(other), "the gateway has not heard of its restart"
        world.hear()
        # One that the deployment is to have no more counts for nothing.
        other.scale(1)
        assert not await look(other)
        assert other.door.counts.groups_ended == {"left": 1}
        assert (await one.init()).group == (await world.group()).group


@pytest.mark.parametrize("sees", ["no replica", "none that reports"])
async def test_a_gateway_that_sees_no_replica_ends_no_group_and_says_so(tmp_path: Path, sees: str) -> None:
    """It was partitioned, or has just started. Another gateway sees all of them."""

    async with in_world(tmp_path, gateways=2) as world:
        one, blind = world.gateways
        await one.init()
        group = await world.group()
        if sees == "no replica":
            blind.replicas.facts.set_members([])
            blind.deployment.wanted = 0
        else:
            for view in blind.replicas.views:
                view.replica.hear(None)
        for _ in range(2):
            await blind.upkeep.look_once()
            await blind.upkeep.kept()
            world.clock.time += MEMBERS_LOOK_S
        with pytest.raises(ReplicaUnavailable, match="replica-0, replica-1, replica-2") as unseen:
            await blind.start()
        assert unseen.value.retry_after_s
        assert (await world.group()).group == group.group
        assert world.groups == {group.group}
        # No trainer waits for a broadcast now: the call may come again.
        await one.start()
        await one.update()
        with pytest.raises(ReplicaUnavailable, match="not reachable"):
            await blind.finish()
        assert (await world.group()).phase is Phase.STARTED
        assert (await one.finish()).desired.snapshot == "v1"
        assert (await world.group()).group == group.group
        assert blind.door.counts.groups_ended == {}


async def test_a_group_in_a_call_is_left_to_its_deadline(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        for replica in world.replicas.values():
            replica.group = ""
        await gateway.upkeep.look_once()
        world.clock.time += MEMBERS_LOOK_S
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
        assert (await world.group()).phase is Phase.STARTED


async def test_a_group_that_waits_for_its_next_update_is_never_late(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        world.clock.time += 1e6
        await gateway.upkeep.look_once()
        assert (await gateway.push()).desired.snapshot == "v1"


async def test_a_trainer_that_hangs_up_ends_no_work(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.start()
        last = world.replicas["replica-2"]
        last.faults[Receive] = "hang"
        call = asyncio.create_task(gateway.update())
        await last.hangs.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        last.goes_on.set()
        await gateway.door.close()
        assert (await world.group()).phase is Phase.STARTED
        assert all(one.received == ["a", "b"] for one in world.replicas.values())
        assert (await gateway.finish()).desired.snapshot == "v1"


async def test_a_name_that_is_refused_leaves_the_update_to_another_name_at_any_gateway(
    tmp_path: Path,
) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        one.fails_sign = SnapshotRefused("weight_version: v1 means other files", param="weight_version")
        with pytest.raises(
            SnapshotRefused, match="hold the weights for 200 s: call /finish_weight_update"
        ) as no:
            await one.push()
        assert no.value.param == "weight_version"
        assert all(replica.received for replica in world.replicas.values())
        assert (await world.group()).phase is Phase.UNNAMED
        with pytest.raises(
            Conflict, match="is unnamed; call /finish_weight_update with another weight_version"
        ):
            await one.update()
        world.version = "v2"
        world.clock.time += SETTINGS.finish_s - 1.0
        assert (await other.finish()).desired.snapshot == "v2"
        assert not [o for each in world.replicas.values() for o in each.orders if isinstance(o, Drop)]
        # The next update is an update as any other.
        world.version, one.fails_sign = "v3", None
        assert (await one.push()).desired.snapshot == "v3"


async def test_weights_without_a_name_are_held_until_the_deadline_of_the_first_finish(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        gateway.fails_sign = SnapshotRefused("identity: v1 means other files", param="identity")
        for call in (gateway.push, gateway.finish):
            with pytest.raises(SnapshotRefused):
                await call()
            await gateway.upkeep.look_once()
            assert (await world.group()).phase is Phase.UNNAMED
            world.clock.time += (SETTINGS.finish_s + push.GRACE_S) / 2 + 1.0
        await gateway.upkeep.look_once()
        assert (await world.group(), world.groups, await world.signalled()) == (None, set(), [])
        assert not any(one.received for one in world.replicas.values())


async def test_an_update_that_begins_instead_of_another_name_drops_the_weights_first(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        gateway.fails_sign = SnapshotRefused("identity: v1 means other files", param="identity")
        with pytest.raises(SnapshotRefused):
            await gateway.push()
        gateway.fails_sign = None
        assert (await gateway.push()).desired.snapshot == "v1"
        for one in world.replicas.values():
            kinds = [type(order) for order in one.orders]
            assert kinds[kinds.index(Drop) + 1] is Begin


@pytest.mark.parametrize("commits", [True, False])
async def test_a_commit_whose_answer_was_lost_is_looked_up(
    tmp_path: Path, commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "RECALL_AGAIN_S", 0.0)

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        real = gateway.sign

        async def sign(content: object, committing: object) -> object:
            if commits:
                await real(content, committing)  # type: ignore[arg-type]
            raise LedgerUnavailable("the answer was lost")

        silent = [True, True]
        look = gateway.ledger.committed_update

        async def looked(of: Any) -> Any:
            if of.phase is Phase.FINISHING and silent and silent.pop():
                raise LedgerUnavailable("it is silent")
            return await look(of)

        gateway.sign = sign  # type: ignore[method-assign,assignment]
        gateway.ledger.committed_update = looked  # type: ignore[method-assign]
        await gateway.init()
        if commits:
            assert (await gateway.push()).desired.snapshot == "v1"
            assert not [o for one in world.replicas.values() for o in one.orders if isinstance(o, Drop)]
        else:
            with pytest.raises(LedgerUnavailable):
                await gateway.push()
            assert (await world.signalled(), (await world.group()).phase) == ([], Phase.UNNAMED)
            assert all(isinstance(one.orders[-1], Finish) for one in world.replicas.values())
            gateway.sign = real  # type: ignore[method-assign]
            assert (await gateway.finish()).desired.snapshot == "v1"
        assert silent == []


async def test_a_snapshot_that_did_not_serve_is_said_and_its_group_goes_on(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        gateway.fails_served = SnapshotRefused("replica-1 could not load 'v1': NaN in a")
        await gateway.init()
        with pytest.raises(SnapshotRefused, match="NaN"):
            await gateway.push()
        assert (await world.group()).phase is Phase.JOINED


async def test_files_are_kept_by_another_replica_or_gateway_when_one_fails(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        done = await one.push()
        world.hear("v1", done.desired.generation)
        world.replicas["replica-0"].faults[Keep] = "die"
        world.replicas["replica-1"].faults[Keep] = "refuse"
        # Both look, and one of them works.
        await asyncio.gather(one.upkeep.look_once(), other.upkeep.look_once())
        await asyncio.gather(one.upkeep.kept(), other.upkeep.kept())
        assert [replica.bucket for replica in world.replicas.values()] == [[], [], ["v1"]]
        assert await one.ledger.unkept_updates() == []


async def kept_nowhere(world: World, rounds: int) -> int:
    """Have every try fail, at most so often. How many rounds there were."""
    [gateway] = world.gateways
    for tried in range(rounds):
        world.clock.time += 60.0
        if not await gateway.ledger.unkept_updates():
            return tried
        for one in world.replicas.values():
            one.faults[Keep] = "refuse"
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
    for one in world.replicas.values():
        one.faults.clear()
    return rounds


async def test_desired_files_are_never_given_up(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        done = await gateway.push()
        world.hear("v1", done.desired.generation)
        assert await kept_nowhere(world, 2 * KEEP_ROUNDS) == 2 * KEEP_ROUNDS
        # The bucket is back.
        world.clock.time += 60.0
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
        assert [one.bucket for one in world.replicas.values()] == [["v1"], [], []]


async def test_the_tries_to_keep_files_that_are_not_desired_come_to_an_end(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        first = await gateway.push()
        served = [
            Transition(seq=seq, at=1.0, snapshot="v1", generation=first.desired.generation, stage=stage)
            for seq, stage in enumerate((Stage.CHECKING, Stage.IDLE))
        ]
        await gateway.ledger.record(DEPLOYMENT, "replica-0", "boot-replica-0", served)
        world.version = "v2"
        for one in world.replicas.values():
            one.bytes = "b"
        await gateway.push()
        world.hear("v1", first.desired.generation)
        assert await kept_nowhere(world, 2 * KEEP_ROUNDS) == 2 * KEEP_ROUNDS, "v2 is desired"
        [(_, [second, before])] = await gateway.ledger.newest_transfers(DEPLOYMENT, 2)
        assert (second.kept, before.kept) == ("wanted", "given up")
        assert gateway.door.counts.keeps == {"given_up": 1}


async def test_files_that_no_replica_could_serve_are_not_kept_once_others_are_desired(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.push()
        world.version = "v2"
        for one in world.replicas.values():
            one.bytes = "b"
        await gateway.push()
        await gateway.upkeep.look_once()
        await gateway.upkeep.kept()
        assert not any(one.bucket for one in world.replicas.values())
        [(_, [_, before])] = await gateway.ledger.newest_transfers(DEPLOYMENT, 2)
        assert before.kept == "given up"


async def test_a_claim_is_renewed_while_a_replica_writes(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        passed, renewed = asyncio.Semaphore(0), asyncio.Event()

        async def sleep(seconds: float) -> None:
            renewed.set()
            await passed.acquire()

        one.upkeep = PushUpkeep(one.ledger, Deployments(one.deployment), one.door, sleep=sleep)
        await one.init()
        done = await one.push()
        world.hear("v1", done.desired.generation)
        writes = world.replicas["replica-0"]
        writes.faults[Keep] = "hang"
        await one.upkeep.look_once()
        await writes.hangs.wait()
        for _ in range(6):
            world.clock.time += LEASE_S / 2
            renewed.clear()
            passed.release()
            await renewed.wait()
            assert await other.ledger.unkept_updates() == []
        # It dies. Another one begins soon.
        for task in one.upkeep._keeping.values():
            task.cancel()
        await one.upkeep.kept()
        world.clock.time += LEASE_S + 1
        await other.upkeep.look_once()
        await other.upkeep.kept()
        assert [replica.bucket for replica in world.replicas.values()] == [["v1"], [], []]


async def test_the_gateway_that_keeps_files_may_die(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        done = await one.push()
        world.hear("v1", done.desired.generation)
        world.replicas["replica-0"].faults[Keep] = "hang"
        await one.upkeep.look_once()
        await other.upkeep.look_once()
        await other.upkeep.kept()
        assert not any(replica.bucket for replica in world.replicas.values()), "one at a time"
        world.clock.time += LEASE_S + 1
        await other.upkeep.look_once()
        await other.upkeep.kept()
        assert [replica.bucket for replica in world.replicas.values()] == [["v1"], [], []]
        for task in one.upkeep._keeping.values():
            task.cancel()


async def test_a_leave_goes_to_every_member_of_a_group_that_ends(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.door.shutdown(gateway.deployment)
        left = [[o for o in one.orders if isinstance(o, LeaveGroup)] for one in world.replicas.values()]
        assert [len(orders) for orders in left] == [1, 1, 1]


@pytest.mark.parametrize("kind", [Drop, LeaveGroup])
async def test_a_replica_that_stands_still_does_not_hold_up_the_call_that_ends_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """In the simulation a call took 20 s more than its deadline: two orders waited for a replica that was stopped."""
    monkeypatch.setattr(push_orders, "SAY_S", 0.2)

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        still = world.replicas["replica-1"]
        still.faults = {Receive: "stall", kind: "hang"}
        await gateway.init()
        await gateway.start()
        with pytest.raises(ReplicaUnavailable, match="replica-1: no answer"):
            await gateway.update()
        assert still.hangs.is_set()
        assert await world.group() is None
        assert world.groups == {"group-1"}, "it alone has not left"
        still.goes_on.set()
        while world.groups:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_synchronous_deployment_takes_no_weights_in_place(tmp_path: Path) -> None:
    """In the simulation its streams stood still for the update, and its switch waited for them."""

    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "SYNC", 3)
        asked = InitInfo(backend="nccl", fields={"world_size": 4})
        with pytest.raises(Conflict, match="is synchronous"):
            await gateway.door.init(gateway.deployment, asked)
        assert await world.group() is None


async def test_a_group_that_its_trainer_ends_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(world: World) -> None:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.init()
        await gateway.door.shutdown(gateway.deployment)
        ended = [record for record in caplog.records if "has ended" in record.message]
        assert [record.levelname for record in ended] == ["INFO", "INFO"]
        await gateway.init()
        world.replicas["replica-0"].faults[Begin] = "die"
        with pytest.raises(ReplicaUnavailable):
            await gateway.start()
        assert caplog.records[-1].levelname == "WARNING"

    with caplog.at_level(logging.INFO, "midstream.fleet"):
        async with in_world(tmp_path) as world:
            await work(world)


async def test_a_shutdown_ends_a_group_that_another_call_moves_meanwhile(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        read, moved = one.ledger.transfer, False

        async def transfer(name: str) -> object:
            nonlocal moved
            found = await read(name)
            if not moved:
                moved = True
                await other.start()
            return found

        one.ledger.transfer = transfer  # type: ignore[method-assign,assignment]
        assert await one.door.shutdown(one.deployment)
        assert (await world.group(), world.groups) == (None, set())


async def test_a_finish_whose_answer_was_lost_may_be_repeated(tmp_path: Path) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        done = await one.push()
        for version in (None, "v1"):
            assert await other.finish(version) == done
            assert other.waited_for == sorted(done.replicas)
        with pytest.raises(Conflict, match="call /start_weight_update"):
            await other.finish("v2")
        finishes = [o for o in world.replicas["replica-0"].orders if isinstance(o, Finish)]
        assert len(finishes) == 1
        newer = Signal(identity="newer", url="file:///bucket/newer", fingerprint="x")
        await one.ledger.signal(DEPLOYMENT, newer)
        with pytest.raises(Conflict, match="'v1' was superseded"):
            await other.finish("v1")
        await one.start()
        await one.update()
        world.version = "v3"
        assert (await other.finish("v3")).desired.snapshot == "v3"
