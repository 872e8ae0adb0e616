"""A pause that the ledger has reaches every replica, boots that come later too, and ends at last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_reconciler import DEPLOYMENT, World

from midstream.core.types import Pause, PauseMode
from midstream.fleet.pauses import PAUSE_S_MAX


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def pause(world: World, mode: PauseMode | None) -> Pause:
    assert world.ledger is not None
    asked: Pause = world.run(world.ledger.pause(DEPLOYMENT, mode))
    world.reconciler.signalled()
    return asked


def pauses(world: World) -> list[Pause]:
    return [replica.pause for replica in world.replicas]


def test_a_pause_reaches_every_replica_although_messages_are_lost_and_the_gateway_restarts(
    world: World,
) -> None:
    world.calm(2)
    asked = pause(world, "keep")
    assert asked == Pause(1, "keep")
    world.set.drop["replica-1"] = 1
    world.reconcile()
    assert pauses(world) == [asked, Pause(), asked]
    world.restart_gateway()
    world.calm(5)
    assert pauses(world) == [asked] * 3
    resumed = pause(world, None)
    world.calm(5)
    assert pauses(world) == [resumed] * 3
    assert pause(world, None) == resumed, "what goes on is not resumed"


def test_a_replica_that_left_and_came_back_is_sent_the_pause_at_once(world: World) -> None:
    world.calm(2)
    asked = pause(world, "keep")
    world.set.drop["replica-1"] = 1
    world.reconcile()
    world.reconcile()
    assert pauses(world) == [asked, Pause(), asked], "a message that was lost is repeated after a while"
    everyone = world.set.views
    world.set.views = (everyone[0], everyone[2])
    world.reconcile()
    world.set.views = everyone
    world.reconcile()
    assert pauses(world) == [asked] * 3


def test_a_replica_that_leaves_is_paused_and_resumed_with_the_others(world: World) -> None:
    """Requests that stood still there would do so for as long as it is drained."""
    world.calm(2)
    members = [(view.name, view.url) for view in world.set.views]

    def pass_by() -> None:
        for view in (*world.set.views, *world.set.leaving):
            view.replica.hear(world.replicas[view.replica.index].report())
        world.reconcile()

    pause(world, "keep")
    world.calm(3)
    world.set.facts.set_members(members, leaving=["replica-2"])
    for mode in (None, "abort"):
        asked = pause(world, mode)
        world.set.drop["replica-2"] = 1
        pass_by()
        pass_by()
        assert pauses(world)[2] != asked, "a message that was lost is repeated after a while"
        for _ in range(4):
            pass_by()
        assert pauses(world) == [asked] * 3


def test_a_boot_that_begins_in_a_pause_joins_only_once_it_is_paused(world: World) -> None:
    world.signal("a")
    world.calm()
    asked = pause(world, "wait")
    world.calm(3)
    world.replicas[0].reboot()
    world.set.drop["replica-0"] = 10_000
    for _ in range(40):
        world.replicas[0].step()
        world.set.hear(0)
        # Its snapshot comes another way.
        world.replicas[0].machine.accept(world.state().desired)
        world.reconcile()
    assert world.serving()[0] == ("a", False)
    world.calm()
    assert world.replicas[0].pause == asked
    assert world.serving()[0] == ("a", True)


@pytest.mark.parametrize("mode", ["abort", None])
def test_a_replica_that_outlived_an_older_ledger_follows_this_one(
    world: World, mode: PauseMode | None
) -> None:
    """It takes no older message, so the ledger's word comes again under a greater serial."""
    if mode is not None:
        pause(world, mode)
    world.calm(3)
    world.replicas[2].pause = Pause(7, "keep")
    world.calm(5)
    assert pauses(world) == [Pause(8, mode)] * 3


def test_a_pause_that_nobody_ends_is_ended(world: World) -> None:
    pause(world, "keep")
    world.calm(3)
    world.time += PAUSE_S_MAX - 10
    world.calm(3)
    assert world.state().pause.mode == "keep"
    # Another one begins anew.
    pause(world, "keep")
    world.time += 20
    world.calm(3)
    assert world.state().pause.mode == "keep"
    world.time += PAUSE_S_MAX
    world.calm(6)
    assert pauses(world) == [Pause(3, None)] * 3
