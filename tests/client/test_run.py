"""The snapshots of a training run: their names and order, and which of them rollouts may come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from publish_world import World, weights

from midstream.client import NotReadyInTime, SnapshotFailed, TrainingRun
from midstream.client.errors import SignalRefused, Unanswered


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.open.set()


def test_the_runs_own_weights_are_served_before_the_first_rollout(world: World) -> None:
    with world.publisher() as publisher:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        with pytest.raises(ValueError, match="publish the run's own weights"):
            _ = run.at_least
        run.publish(weights(0))
        assert world.desired == "r/0"
        assert (run.at_least, run.signalled) == ("r/0", ["r/0"])


def test_rollouts_come_from_the_snapshot_before_until_the_newest_is_served(world: World) -> None:
    with world.publisher() as publisher, TrainingRun(publisher, "r", config_dir=world.config) as run:
        run.publish(weights(0))
        world.open.clear()
        run.publish(weights(1))
        assert run.at_least == "r/0"
        world.open.set()
        run.wait()
        assert run.at_least == "r/1"
        run.publish(weights(2))
    # Leaving the run waits for its last snapshot.
    assert world.desired == "r/2"
    assert run.at_least == "r/2"


def test_without_delay_every_snapshot_is_served_when_publish_returns(world: World) -> None:
    with world.publisher() as publisher:
        run = TrainingRun(publisher, "r", behind=0, config_dir=world.config)
        for step in range(3):
            assert run.publish(weights(step)).done()
            assert run.at_least == world.desired == f"r/{step}"
        with pytest.raises(ValueError, match="behind must be 0 or 1, got 2"):
            TrainingRun(publisher, behind=2)


def test_a_snapshot_that_one_replica_could_not_load_is_told_once_and_counts(world: World) -> None:
    """Another replica may serve it."""
    with world.publisher() as publisher:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        run.publish(weights(0))
        world.fail = "r/1"
        run.publish(weights(1))
        with pytest.raises(SnapshotFailed, match="r/1"):
            run.publish(weights(2))
        assert (run.at_least, run.signalled) == ("r/0", ["r/0", "r/1"])
        run.publish(weights(2)).wait()
        assert (run.at_least, run.signalled) == ("r/2", ["r/0", "r/1", "r/2"])


def test_a_snapshot_that_was_never_signalled_does_not_count(world: World) -> None:
    with world.publisher() as publisher:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        run.publish(weights(0))
        world.api_key = "of another"
        run.publish(weights(1))
        with pytest.raises(SignalRefused):
            run.wait()
        assert (run.at_least, run.signalled) == ("r/0", ["r/0"])


def test_any_thread_that_asks_for_rollouts_hears_of_a_failure_and_the_trainer_still_does(
    world: World,
) -> None:
    """A worker's look at `at_least` takes nothing from the thread that publishes."""
    with world.publisher() as publisher, ThreadPoolExecutor(4) as workers:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        run.publish(weights(0))
        world.fail = "r/1"
        failing = run.publish(weights(1))
        with pytest.raises(SnapshotFailed):
            failing.wait()
        for looked in [workers.submit(lambda: run.at_least) for _ in range(8)]:
            with pytest.raises(SnapshotFailed, match="r/1"):
                looked.result()
        with pytest.raises(SnapshotFailed, match="r/1"):
            run.publish(weights(2))
        assert workers.submit(lambda: run.at_least).result() == "r/0"


def test_what_a_thread_asks_rollouts_for_never_goes_back(world: World) -> None:
    ended = threading.Event()

    def look(run: TrainingRun) -> list[str]:
        seen = [run.at_least]
        while not ended.is_set():
            seen.append(run.at_least)
        return seen

    with world.publisher() as publisher, ThreadPoolExecutor(2) as workers:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        run.publish(weights(0))
        looking = [workers.submit(look, run) for _ in range(2)]
        for step in range(1, 6):
            run.publish(weights(step))
        run.wait()
        ended.set()
        for seen in looking:
            assert seen.result() == sorted(seen.result())
        assert run.at_least == "r/5"


def test_a_snapshot_that_was_slow_counts_as_it_may_serve_yet(world: World) -> None:
    with world.publisher() as publisher:
        run = TrainingRun(publisher, "r", config_dir=world.config)
        run.publish(weights(0))
        world.away = True
        slow = run.publish(weights(1), timeout_s=0.0)
        with pytest.raises((NotReadyInTime, Unanswered)):
            slow.wait()
        world.away = False
        with pytest.raises((NotReadyInTime, Unanswered)):
            run.wait()
        assert (run.at_least, run.signalled) == ("r/0", ["r/0", "r/1"])
        run.publish(weights(2)).wait()
        assert (run.at_least, run.signalled) == ("r/2", ["r/0", "r/1", "r/2"])
