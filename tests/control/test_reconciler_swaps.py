"""The reconciler with replicas that switch one by one, whose weights differ, or that fell behind the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reconciler import DEPLOYMENT, World

from midstream.core.types import BASE_SNAPSHOT, Stage


def rounds(world: World, count: int) -> None:
    world.calm(count)


def test_one_by_one_the_next_switches_when_the_one_before_is_proved(tmp_path: Path) -> None:
    world = World(tmp_path, swap_order="one-by-one")
    rounds(world, 2)
    world.signal("a")
    seen: list[list[str]] = []
    for _ in range(40):
        rounds(world, 1)
        stages = [replica.machine.stage for replica in world.replicas]
        serving = [replica.machine.serving for replica in world.replicas]
        assert sum(stage in (Stage.COMMITTING, Stage.CHECKING) for stage in stages) <= 1
        if not seen or seen[-1] != serving:
            seen.append(serving)
            if serving != [BASE_SNAPSHOT] * 3:
                prepared = {replica.machine.transitions[-1].snapshot for replica in world.replicas}
                assert prepared == {"a"}, "the others are staged, or further"
    assert seen == [["base"] * 3, ["a", "base", "base"], ["a", "a", "base"], ["a"] * 3]
    assert world.serving() == [("a", True)] * 3
    world.close()


def test_one_by_one_goes_on_without_the_one_that_failed_or_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path, swap_order="one-by-one")
    rounds(world, 2)
    world.signal("a")
    rounds(world, 5)
    assert [replica.machine.stage for replica in world.replicas] == [Stage.STAGED] * 3
    assert [replica.machine.held for replica in world.replicas] == [False, True, True]
    world.replicas[0].machine.fail("out of memory")
    for _ in range(8):
        world.set.hear(0)
        world.replicas[1].step()
        world.set.hear(1)
        world.reconcile()
    assert [replica.machine.serving for replica in world.replicas] == ["base", "a", "base"]
    world.set.lose(1)
    for _ in range(8):
        world.replicas[2].step()
        world.set.hear(2)
        world.reconcile()
    assert world.replicas[2].machine.serving == "a"
    world.close()


def test_one_by_one_survives_a_restart_of_the_gateway_at_any_point(tmp_path: Path) -> None:
    for point in range(1, 12, 2):
        (tmp_path / str(point)).mkdir()
        world = World(tmp_path / str(point), swap_order="one-by-one")
        rounds(world, 2)
        world.signal("a")
        rounds(world, point)
        world.restart_gateway()
        for i in range(3):
            world.set.hear(i)
        rounds(world, 30)
        assert world.serving() == [("a", True)] * 3
        world.close()


def test_a_replica_with_other_weights_loads_them_again_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    rounds(world, 2)
    world.replicas[2].spoilt = 1
    world.signal("a")
    rounds(world, 30)
    assert world.serving() == [("a", True)] * 3
    assert world.replicas[2].check is not None
    assert world.replicas[2].check.weights == world.bucket.fingerprint("a")
    stages = [t.stage for t in world.replicas[2].history]
    assert (stages.count(Stage.CHECKING), len(world.replicas[1].history)) == (2, 7)
    (found,) = world.state().disagreements
    assert (found.replica, found.identity, found.verdict) == ("replica-2", "a", "agreed")
    assert "replica-2 (reload): a is not what replica-0 serves under that name" in caplog.text
    sent = len(world.set.sent)
    rounds(world, 10)
    assert len(world.set.sent) == sent
    world.close()


def test_a_replica_whose_weights_differ_again_is_out_until_a_later_snapshot(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds(world, 2)
    world.replicas[0].spoilt = 2
    world.signal("a")
    rounds(world, 40)
    assert world.serving() == [("a", False), ("a", True), ("a", True)]
    (found,) = world.state().disagreements
    assert (found.replica, found.verdict) == ("replica-0", "out")
    assert len(world.set.sent) == 4
    world.restart_gateway()
    for i in range(3):
        world.set.hear(i)
    rounds(world, 10)
    assert world.serving() == [("a", False), ("a", True), ("a", True)], "a restart forgets nothing"
    world.signal("b")
    rounds(world, 5)
    assert [view.admitted for view in world.set.views] == [False, True, True], "not before it is checked"
    rounds(world, 20)
    assert world.serving() == [("b", True)] * 3
    world.close()


def on_a_fallback_with_other_weights(path: Path, spoilt: int) -> World:
    """Everybody stays with `a`, since `b` is broken; replica-2 starts over and does not get what the others have."""
    world = World(path)
    world.signal("a")
    rounds(world, 15)
    world.broken.add("b")
    world.signal("b")
    rounds(world, 15)
    world.replicas[2].spoilt = spoilt
    world.replicas[2].reboot()
    rounds(world, 40)
    return world


def test_replicas_on_a_fallback_must_agree_too(tmp_path: Path) -> None:
    world = on_a_fallback_with_other_weights(tmp_path, spoilt=1)
    assert world.serving() == [("a", True)] * 3
    assert world.replicas[2].check is not None
    assert world.replicas[2].check.weights == world.bucket.fingerprint("a")
    (found,) = world.state().disagreements
    assert (found.replica, found.identity, found.verdict) == ("replica-2", "a", "agreed")
    sent = len(world.set.sent)
    rounds(world, 10)
    assert len(world.set.sent) == sent
    world.close()


@pytest.mark.parametrize("mended", ["b", "c"])
def test_a_replica_that_differs_again_on_a_fallback_is_out_until_a_later_snapshot(
    tmp_path: Path, mended: str
) -> None:
    world = on_a_fallback_with_other_weights(tmp_path, spoilt=2)
    assert world.serving() == [("a", True), ("a", True), ("a", False)]
    (found,) = world.state().disagreements
    assert (found.replica, found.identity, found.verdict) == ("replica-2", "a", "out")
    world.broken.clear()
    world.signal(mended)
    rounds(world, 30)
    assert world.serving() == [(mended, True)] * 3
    world.close()


def test_a_new_boot_of_a_replica_that_was_out_starts_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds(world, 2)
    world.replicas[0].spoilt = 2
    world.signal("a")
    rounds(world, 40)
    world.replicas[0].reboot()
    rounds(world, 30)
    assert world.serving() == [("a", True)] * 3
    world.close()


def test_a_replica_on_a_fallback_is_asked_again_for_what_the_others_serve(tmp_path: Path) -> None:
    world = World(tmp_path)
    for identity in ("a", "b"):
        world.signal(identity)
        rounds(world, 15)
    world.replicas[0].reboot()
    world.broken.add("b")
    rounds(world, 20)
    assert world.serving() == [("a", True), ("b", True), ("b", True)]
    attempts = sum(t.stage is Stage.ERROR for t in world.replicas[0].history)
    world.time += 61
    rounds(world, 10)
    assert sum(t.stage is Stage.ERROR for t in world.replicas[0].history) > attempts
    world.broken.clear()
    world.time += 61
    rounds(world, 25)
    assert world.serving() == [("b", True)] * 3
    world.close()


def test_nobody_is_asked_again_for_what_has_never_worked(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.signal("a")
    rounds(world, 15)
    world.broken.add("b")
    world.signal("b")
    rounds(world, 15)
    sent = len(world.set.sent)
    world.time += 200
    rounds(world, 20)
    assert world.serving() == [("a", True)] * 3
    assert len(world.set.sent) == sent
    world.close()


def test_after_the_ledger_is_reset_everybody_goes_back_to_the_base_weights(tmp_path: Path) -> None:
    world = World(tmp_path)
    rounds(world, 2)
    world.signal("a", "none")
    rounds(world, 15)
    assert world.ledger is not None
    assert world.run(world.ledger.reset_ledger(DEPLOYMENT, 1)) == 2
    world.reconciler.signalled()
    rounds(world, 15)
    assert world.serving() == [("base", True)] * 3
    assert {swap[2:] for replica in world.replicas for swap in replica.swaps} == {(1, "none"), (2, "all")}
    world.replicas[1].reboot()
    rounds(world, 5)
    assert world.serving() == [("base", True)] * 3
    world.signal("c", "none")
    rounds(world, 15)
    assert world.serving() == [("c", True)] * 3
    policies = [replica.swaps[-1][2:] for replica in world.replicas]
    assert policies == [(3, "none"), (3, "all"), (3, "none")], "a later boot has not had the reset"
    world.close()
