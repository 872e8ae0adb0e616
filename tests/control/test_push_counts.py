"""What gateways count of pushes: each update and each group once, whichever gateway ends it and however."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from push_world import DEPLOYMENT, SETTINGS, World, in_world

from midstream.core.errors import Conflict, InvalidRequest, ReplicaUnavailable, SnapshotRefused
from midstream.core.transfer import Begin, Check, Finish, Keep, Receive
from midstream.fleet.push_counts import PushCounts
from midstream.ledger import Phase


def counts(world: World) -> PushCounts:
    """Of all gateways."""
    found = PushCounts()
    for gateway in world.gateways:
        one = gateway.door.counts
        for name in ("updates", "groups_ended", "keeps", "received_bytes"):
            getattr(found, name).update(getattr(one, name))
    return found


async def test_committed_updates_are_counted_with_their_bytes_and_their_time(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.whole()
        world.version = "v2"
        await gateway.push()
        found = gateway.door.counts
        assert (found.updates, found.groups_ended) == ({"committed": 2}, {})
        assert found.received_bytes == dict.fromkeys(world.replicas, 56)
        timed = {phase: sum(histogram.counts) for phase, histogram in found.seconds.items()}
        assert timed == {"joining": 1, "starting": 2, "receiving": 2, "finishing": 2}


async def test_an_update_that_is_refused_at_its_end_is_dropped_and_its_call_is_not_timed(
    tmp_path: Path,
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        gateway.fails_sign = Conflict("the deployment is being deleted")
        with pytest.raises(Conflict):
            await gateway.whole()
        assert (counts(world).updates, counts(world).groups_ended) == ({"dropped": 1}, {})
        assert "finishing" not in gateway.door.counts.seconds


@pytest.mark.parametrize("named", [True, False], ids=["named later", "started again"])
async def test_an_update_whose_name_was_refused_is_counted_once(tmp_path: Path, named: bool) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        gateway.fails_sign = SnapshotRefused("weight_version: v1 means other files", param="weight_version")
        with pytest.raises(SnapshotRefused):
            await gateway.whole()
        gateway.fails_sign, world.version = None, "v2"
        await (gateway.finish() if named else gateway.push())
        found = gateway.door.counts
        assert found.received_bytes == dict.fromkeys(world.replicas, 28 if named else 56)
        assert found.updates == ({"committed": 1} if named else {"committed": 1, "dropped": 1})


@pytest.mark.parametrize(
    ("order", "fault", "reason"),
    [(Check, "refuse", "refused"), (Receive, "die", "failed"), (Begin, "die", "failed")],
)
async def test_a_group_that_ends_takes_its_update_with_it(
    tmp_path: Path, order: type, fault: str, reason: str
) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        world.replicas["replica-0"].faults[order] = fault
        with pytest.raises((InvalidRequest, ReplicaUnavailable)):
            await gateway.whole()
        assert (counts(world).updates, counts(world).groups_ended) == ({"ended": 1}, {reason: 1})


async def test_a_commit_without_some_replicas_ends_its_group_and_is_no_failure(tmp_path: Path) -> None:
    async with in_world(tmp_path, msgspec.structs.replace(SETTINGS, quorum=0.6)) as world:
        [gateway] = world.gateways
        world.replicas["replica-0"].faults[Finish] = "die"
        await gateway.whole()
        assert (counts(world).updates, counts(world).groups_ended) == ({"fenced": 1}, {"fenced": 1})


async def test_what_a_trainer_ends_and_what_ends_it_are_told_apart(tmp_path: Path) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        await gateway.init()
        await gateway.init()
        await gateway.door.shutdown(gateway.deployment)
        await gateway.init()
        world.replicas["replica-1"].restart()
        world.hear()
        with pytest.raises(Conflict):
            await gateway.start()
        found = counts(world)
        assert found.groups_ended == {"replaced": 1, "shutdown": 1, "members": 1}
        assert found.updates == {}, "none was started"


async def test_a_group_past_its_deadline_is_counted_by_one_gateway_and_every_gateway_sees_open_ones(
    tmp_path: Path,
) -> None:
    async with in_world(tmp_path, gateways=2) as world:
        one, other = world.gateways
        await one.init()
        await one.start()
        for gateway in world.gateways:
            await gateway.upkeep.look_once()
            assert gateway.door.counts.open == {DEPLOYMENT: Phase.STARTED}
        world.clock.time += SETTINGS.update_s + 11.0
        for gateway in (other, one, other):
            await gateway.upkeep.look_once()
        assert (counts(world).updates, counts(world).groups_ended) == ({"ended": 1}, {"deadline": 1})
        assert other.door.counts.open == {}


@pytest.mark.parametrize("fault", ["", "refuse"])
async def test_a_snapshot_waits_until_it_is_in_the_bucket(tmp_path: Path, fault: str) -> None:
    async with in_world(tmp_path) as world:
        [gateway] = world.gateways
        done = await gateway.whole()
        for age_s in (0.0, 10.0):
            await gateway.upkeep.look_once()
            assert gateway.door.counts.waiting_s == {DEPLOYMENT: age_s}
            world.clock.time += 10.0
        world.hear("v1", done.desired.generation)
        for _ in range(3):
            for one in world.replicas.values():
                one.faults[Keep] = fault
            await gateway.upkeep.look_once()
            await gateway.upkeep.kept()
            world.clock.time += 60.0
        await gateway.upkeep.look_once()
        # What is desired is not given up: it waits until the bucket takes it.
        assert gateway.door.counts.waiting_s == ({DEPLOYMENT: 200.0} if fault else {})
        assert gateway.door.counts.keeps == ({} if fault else {"kept": 1})
