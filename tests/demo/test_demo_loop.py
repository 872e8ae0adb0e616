"""The order of a run: first rollouts before any publication, rollouts in flight at every swap, one publication at a time."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from midstream.client import PublishError, ReplicaStatus, Status
from midstream.demo.loop import Loop, LoopOptions, NoRollouts
from midstream.demo.records import Rollout, Turn
from midstream.demo.replay import Mismatch


def a_turn(snapshot: str) -> Turn:
    return Turn(
        prompt=(1, 2),
        tokens=(3, 4),
        logprobs=(-1.0, -1.0),
        sampling_logprobs=(-1.0, -1.0),
        snapshots=(snapshot, snapshot),
        routes=np.zeros((2, 1, 1), dtype=np.int64),
        prompt_routes=np.zeros((1, 1, 1), dtype=np.int64),
        replica="replica-0",
        cached_tokens=1,
        reward=0.5,
    )


class World:
    """A server, a sampler and a trainer that only write down what is asked of them."""

    def __init__(self, failing_steps: frozenset[int] = frozenset(), refused: str | None = None) -> None:
        self.events: list[str] = []
        self.serving = "base"
        self.snapshot = "base"
        self.failing_steps = failing_steps
        self.refused = refused
        self.failed = 0
        self.errors: list[str] = []
        self.model = object()
        self.started: dict[int, int] = {}
        self.moved = threading.Condition()
        self.last_step = 0

    # Sampler
    async def group(self, step, group, problem, samples):
        with self.moved:
            self.events.append(f"start {step}/{group}")
            self.started[step] = self.started.get(step, 0) + 1
            self.moved.notify_all()
        snapshot = self.serving
        await asyncio.sleep(0)
        self.events.append(f"end {step}/{group}")
        if step in self.failing_steps:
            self.failed += samples
            self.errors.append("boom")
            return []
        return [Rollout(f"{step}-{group}-{i}", step, group, i, (a_turn(snapshot),)) for i in range(samples)]

    # Trainer
    def mismatch(self, batch):
        return Mismatch(4e-3, 4e-4, 0.1, 0.05)

    def update(self, batch):
        step = batch[0].step
        with self.moved:  # training takes long enough for rollouts that were started to begin
            assert step == self.last_step or self.moved.wait_for(
                lambda: self.started.get(step + 1, 0) >= 2, 10
            )
        self.events.append(f"train {len(batch)} of {step}")
        return 0.25

    def remember(self, snapshot):
        self.snapshot = snapshot

    # Publisher
    def write_full(self, identity, **_):
        self.events.append(f"write {identity}")

    def signal(self, identity, **_):
        if identity == self.refused:
            raise PublishError("no room")
        self.events.append(f"signal {identity}")

    def wait_until_ready(self, identity, timeout_s):
        self.serving = identity
        self.events.append(f"ready {identity}")
        swap = {"snapshot": identity, "pause_ms": 2.5}
        stale = {"snapshot": "base", "pause_ms": 99.0}
        rows = [ReplicaStatus(identity, True, "done", identity, last_swap=s) for s in (swap, stale)]
        return Status(tuple(rows))


def run(world: World, steps: int = 3) -> Loop:
    seen = []
    world.last_step = steps - 1
    loop = Loop(
        LoopOptions(seed=0, steps=steps, groups=4, samples=2),
        world, world, world, SimpleNamespace(), lambda row: seen.append((row.step, row.served)),
    )  # fmt: skip
    asyncio.run(loop.run())
    assert [s for s, served in seen if not served] == list(range(steps))
    assert [s for s, served in seen if served] == list(range(steps))
    return loop


def test_all_first_rollouts_are_sampled_before_anything_is_published():
    world = World()
    loop = run(world)
    assert set(world.events[:8]) == {f"{what} 0/{g}" for what in ("start", "end") for g in range(4)}
    assert len(loop.first_rollouts) == 8
    assert {label for r in loop.first_rollouts for t in r.turns for label in t.snapshots} == {"base"}


def test_half_of_the_next_groups_start_with_training_and_the_rest_with_the_signal():
    events = (world := World()).events
    run(world)
    for step in (0, 1):
        trained, signalled = events.index(f"train 8 of {step}"), events.index(f"signal step-{step + 1}")
        starts = [events.index(f"start {step + 1}/{g}") for g in range(4)]
        assert max(starts[:2]) < events.index(f"write step-{step + 1}")
        assert min(starts[2:]) > trained
        assert max(starts) < signalled
        assert events.index(f"write step-{step + 1}") < signalled


def test_every_step_trains_on_its_own_rollouts_and_publishes_in_order():
    world = World()
    loop = run(world, steps=4)
    assert [e for e in world.events if e.startswith("train")] == [f"train 8 of {s}" for s in range(4)]
    published = [e for e in world.events if e.startswith(("signal", "ready"))]
    assert published == [f"{what} step-{s}" for s in range(1, 5) for what in ("signal", "ready")]
    assert [row.snapshot for row in loop.rows] == ["step-1", "step-2", "step-3", "step-4"]
    assert not any(e.startswith("start 4/") for e in world.events)


def test_a_row_has_the_numbers_of_its_batch_and_only_pauses_of_its_own_swap():
    row = run(World(), steps=1).rows[0]
    assert row.rewards == (0.5,) * 8
    assert (row.prompt_tokens, row.cached_prompt_tokens, row.tokens, row.streams) == (16, 8, 16, 8)
    assert row.older_snapshot_share == 0.0
    assert row.pause_ms == (2.5,)
    assert (row.kl_own_routes, row.kl_replayed_routes) == (4e-3, 4e-4)
    assert row.loss == 0.25
    assert row.one_replica == 8


def test_tokens_sampled_before_the_last_update_count_as_older():
    rows = run(World(), steps=3).rows
    assert rows[0].older_snapshot_share == 0.0
    assert 0.5 <= rows[1].older_snapshot_share <= 1.0  # its first half started under the snapshot before


def test_a_step_whose_rollouts_all_failed_ends_the_run_with_the_reason():
    with pytest.raises(ExceptionGroup) as caught:
        run(World(failing_steps=frozenset({1})))
    assert caught.group_contains(NoRollouts, match="every rollout of step 1 failed, first: boom")


def test_a_refused_snapshot_ends_the_run_with_the_reason():
    with pytest.raises(ExceptionGroup) as caught:
        run(World(refused="step-2"))
    assert caught.group_contains(PublishError, match="no room")
