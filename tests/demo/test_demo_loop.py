"""The order of a run: first rollouts before any publication, rollouts in flight at every swap, one publication at a time."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from midstream.client import Published, PublishError, ReplicaStatus, Status
from midstream.demo.loop import Loop, LoopOptions, NoRollouts
from midstream.demo.records import Rollout, Turn
from midstream.demo.replay import Mismatch

pytestmark = pytest.mark.fast


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
        self.ended: dict[int, int] = {}
        # Groups of the next step that end before a publication does.
        self.while_loading = 0
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
        with self.moved:
            self.events.append(f"end {step}/{group}")
            self.ended[step] = self.ended.get(step, 0) + 1
            self.moved.notify_all()
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
        # Training takes long enough for rollouts that were started to begin.
        with self.moved:
            assert step == self.last_step or self.moved.wait_for(
                lambda: self.started.get(step + 1, 0) >= 2, 10
            )
        self.events.append(f"train {len(batch)} of {step}")
        return 0.25

    def remember(self, snapshot):
        self.snapshot = snapshot

    # Publisher
    def begin(self, identity, *, model, on_status, **_):
        assert model is self.model
        self.events.append(f"begin {identity}")

        def wait():
            if identity == self.refused:
                raise PublishError("no room")
            on_status(Status((ReplicaStatus("base", True, "downloading", identity),)))
            # It goes on until enough rollouts were in flight beside it.
            with self.moved:
                self.moved.wait_for(lambda: self.sampled_beside(identity) >= self.while_loading, 10)
                self.events.append(f"near {identity}")
            on_status(Status((ReplicaStatus("base", True, "staging", identity),)))
            # What is left starts before it serves.
            with self.moved:
                self.moved.wait_for(lambda: self.started.get(self.step_beside(identity), 6) == 6, 10)
            self.serving = identity
            self.events.append(f"ready {identity}")
            swap = {"snapshot": identity, "pause_ms": 2.5}
            stale = {"snapshot": "base", "pause_ms": 99.0}
            rows = [ReplicaStatus(identity, True, "done", identity, last_swap=s) for s in (swap, stale)]
            return Published(
                identity, "delta", "before", "", 30, 100, 0.5, 0.25, 0.5, 1.0, Status(tuple(rows))
            )

        return SimpleNamespace(wait=wait)

    def step_beside(self, identity):
        step = int(identity.removeprefix("step-"))
        return step if self.while_loading and step <= self.last_step else None

    def sampled_beside(self, identity):
        """Groups that ended of the step whose rollouts are sampled while `identity` is published; after the last, enough."""
        step = int(identity.removeprefix("step-"))
        return self.ended.get(step, 0) if step <= self.last_step else self.while_loading


def run(world: World, steps: int = 3) -> Loop:
    seen = []
    world.last_step = steps - 1
    loop = Loop(
        LoopOptions(seed=0, steps=steps, groups=6, samples=2),
        world, world, world, SimpleNamespace(), lambda row: seen.append((row.step, row.served)),
    )  # fmt: skip
    asyncio.run(loop.run())
    assert [s for s, served in seen if not served] == list(range(steps))
    assert [s for s, served in seen if served] == list(range(steps))
    return loop


def test_all_first_rollouts_are_sampled_before_anything_is_published():
    world = World()
    loop = run(world)
    assert set(world.events[:12]) == {f"{what} 0/{g}" for what in ("start", "end") for g in range(6)}
    assert len(loop.first_rollouts) == 12
    assert {label for r in loop.first_rollouts for t in r.turns for label in t.snapshots} == {"base"}


def test_a_third_of_the_next_groups_start_with_training_and_the_rest_once_publication_began():
    world = World()
    run(world)
    for step in (0, 1):
        starts = [world.events.index(f"start {step + 1}/{g}") for g in range(6)]
        trained, began = (world.events.index(e) for e in (f"train 12 of {step}", f"begin step-{step + 1}"))
        assert max(starts[:2]) < trained < began < min(starts[2:])


def test_groups_follow_one_another_until_a_replica_is_about_to_switch_and_then_the_rest_starts_at_once():
    world = World()
    # The two early ones and two of the others.
    world.while_loading = 4
    run(world)
    for step in (0, 1):
        began, near, ready = (world.events.index(f"{w} step-{step + 1}") for w in ("begin", "near", "ready"))
        running = [0]
        # The early ones run beside them.
        late = {f"{step + 1}/{g}" for g in (2, 3, 4, 5)}
        for what, _, group in (event.partition(" ") for event in world.events[began:near]):
            running.append(running[-1] + ((what == "start") - (what == "end") if group in late else 0))
        assert max(running) == 1
        starts = [e for e in world.events[began:ready] if e.startswith("start") and e.split()[1] in late]
        assert starts == [f"start {step + 1}/{g}" for g in (2, 3, 4, 5)], "all of them before it serves"


def test_every_step_trains_on_its_own_rollouts_and_publishes_in_order():
    world = World()
    loop = run(world, steps=4)
    assert [e for e in world.events if e.startswith("train")] == [f"train 12 of {s}" for s in range(4)]
    published = [e for e in world.events if e.startswith(("begin", "ready"))]
    assert published == [f"{what} step-{s}" for s in range(1, 5) for what in ("begin", "ready")]
    assert [row.snapshot for row in loop.rows] == ["step-1", "step-2", "step-3", "step-4"]
    assert not any(e.startswith("start 4/") for e in world.events)


def test_a_row_has_the_numbers_of_its_batch_and_only_pauses_of_its_own_swap():
    row = run(World(), steps=1).rows[0]
    assert row.rewards == (0.5,) * 12
    assert (row.prompt_tokens, row.cached_prompt_tokens, row.tokens, row.streams) == (24, 12, 24, 12)
    assert row.older_snapshot_share == 0.0
    assert row.pause_ms == (2.5,)
    assert (row.kl_own_routes, row.kl_replayed_routes) == (4e-3, 4e-4)
    assert row.loss == 0.25
    assert row.one_replica == 12
    assert (row.kind, row.bytes_sent, row.bytes_whole, row.publish_s) == ("delta", 30, 100, 1.75)


def test_tokens_sampled_before_the_last_update_count_as_older():
    rows = run(World(), steps=3).rows
    assert rows[0].older_snapshot_share == 0.0
    # A third started under the snapshot before.
    assert 1 / 3 <= rows[1].older_snapshot_share <= 1.0


def test_a_step_whose_rollouts_all_failed_ends_the_run_with_the_reason():
    with pytest.raises(ExceptionGroup) as caught:
        run(World(failing_steps=frozenset({1})))
    assert caught.group_contains(NoRollouts, match="every rollout of step 1 failed, first: boom")


def test_a_refused_snapshot_ends_the_run_with_the_reason():
    with pytest.raises(ExceptionGroup) as caught:
        run(World(refused="step-2"))
    assert caught.group_contains(PublishError, match="no room")
