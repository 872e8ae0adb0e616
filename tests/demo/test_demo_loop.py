"""The order of a run: first rollouts before any publication, rollouts in flight at every swap, one publication at a time."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grpo import Mismatch
from rl_loop import Loop, misses, options_of, summary_of
from two_turns import Rollout, Turn

from midstream.client import PublishError
from midstream.client.decode import SamplingMasks
from midstream.client.publication import Published
from midstream.client.status import ReplicaStatus, Status

pytestmark = pytest.mark.fast


#: Token 3 was alone, and token 4 was one of two.
MASKS = SamplingMasks(np.array([3, 4, 5], np.int32), np.array([0, 1, 3]))


class World:
    """A server, a sampler and a trainer that only write down what is asked of them."""

    def __init__(self, failing_step: int | None = None, refused: str | None = None) -> None:
        self.events: list[str] = []
        self.errors: list[str] = []
        self.failing_step, self.refused = failing_step, refused
        self.serving, self.model, self.directory = "base", object(), Path("model")
        self.moved = threading.Condition()

    def note(self, event: str) -> None:
        with self.moved:
            self.events.append(event)
            self.moved.notify_all()

    def happened(self, event: str, times: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: self.events.count(event) >= times, 60)

    # Sampler
    def rollout(self, step, group, sample):
        snapshot = self.serving
        self.note(f"start {step}/{group}")
        if step == self.failing_step:
            self.errors.append("boom")
            return None
        if step and group >= 2:
            # It runs until a replica is about to switch.
            self.happened(f"near step-{step}", 1)
        turns = [
            Turn(
                [1, 2],
                [3, 4],
                [-1.0, -1.0],
                [snapshot] * 2,
                np.zeros((3, 1, 1)),
                MASKS,
                "replica-0",
                1,
                reward,
            )
            for reward in (0.25, 0.75)
        ]
        return Rollout(f"{step}-{group}-{sample}", group, tuple(turns))

    # Trainer
    def mismatch(self, batch):
        tokens = 4 * len(batch)
        kls = (torch.full((tokens,), kl) for kl in (6e-3, 5e-3, 4e-3, 4e-4))
        return Mismatch(*kls, torch.zeros(tokens, dtype=bool))

    def update(self, batch):
        self.note(f"train {len(batch)}")

    def remember(self, snapshot):
        self.note(f"remember {snapshot}")

    # Publisher
    def begin(self, identity, *, model, on_status, **_):
        assert model is self.model
        self.note(f"begin {identity}")
        step, last = int(identity.removeprefix("step-")), self.last_step

        def wait():
            if identity == self.refused:
                self.note(f"near {identity}")
                raise PublishError("no room")
            on_status(Status((ReplicaStatus("base", True, "downloading", identity),)))
            if step <= last and step != self.failing_step:
                self.happened(f"start {step}/2", 2)
                assert not any(f"start {step}/{g}" in self.events for g in (3, 4, 5))
            self.note(f"near {identity}")
            on_status(Status((ReplicaStatus("base", True, "staging", identity),)))
            if step <= last:
                for group in (2, 3, 4, 5):
                    self.happened(f"start {step}/{group}", 2)
            self.serving = identity
            self.note(f"ready {identity}")
            swaps = [{"snapshot": identity, "pause_ms": 2.5}, {"snapshot": "base", "pause_ms": 99.0}]
            rows = tuple(ReplicaStatus(identity, True, "done", identity, last_swap=s) for s in swaps)
            return Published(identity, "delta", "before", "", 30, 100, 0.5, 0.25, 0.5, 1.0, Status(rows))

        return SimpleNamespace(wait=wait)


def run(world: World, steps: int = 3) -> Loop:
    world.last_step = steps - 1
    options = options_of(["--steps", str(steps), "--samples", "2"])
    loop = Loop(options, world, world, world)
    loop.run()
    return loop


def test_all_first_rollouts_are_sampled_before_anything_is_published():
    world = World()
    loop = run(world)
    assert sorted(world.events[:12]) == sorted(f"start 0/{g}" for g in range(6) for _ in range(2))
    assert {label for r in loop.batches[0] for t in r.turns for label in t.snapshots} == {"base"}


def test_rollouts_are_running_when_a_replica_switches_and_the_rest_start_as_it_does():
    """World.begin checks that one group has started before, and that all have before the snapshot serves."""
    world = World()
    run(world)
    for step in (1, 2):
        starts = [world.events.index(f"start {step}/{g}") for g in range(6)]
        began, near, ready = (world.events.index(f"{w} step-{step}") for w in ("begin", "near", "ready"))
        assert began < starts[2] < near < min(starts[3:]) < max(starts[3:]) < ready


def test_every_step_trains_on_all_rollouts_and_publishes_in_order():
    world = World()
    loop = run(world, steps=4)
    assert [e for e in world.events if e.startswith("train")] == ["train 12"] * 4
    published = [e for e in world.events if e.startswith(("begin", "remember", "ready"))]
    assert [e for e in published if not e.startswith("ready")] == [
        f"{what} step-{step}" for step in range(1, 5) for what in ("begin", "remember")
    ]
    for step in range(1, 4):
        assert published.index(f"ready step-{step}") < published.index(f"begin step-{step + 1}")
    assert [done.identity for done in loop.published] == [f"step-{step}" for step in range(1, 5)]
    assert not any(e.startswith("start 4/") for e in world.events)


def test_a_step_whose_rollouts_all_failed_ends_the_run_with_the_reason():
    with pytest.raises(SystemExit, match="every rollout of step 2 failed: boom"):
        run(World(failing_step=1))


def test_a_refused_snapshot_ends_the_run_with_the_reason():
    with pytest.raises(PublishError, match="no room"):
        run(World(refused="step-2"))


def test_the_summary_has_the_numbers_of_the_run_and_only_pauses_of_its_own_swaps():
    found = summary_of(run(World()))
    assert (found["reward_first"], found["reward_last"], found["reward_stderr"]) == (0.5, 0.5, 0.0)
    assert (found["swaps"], found["pause_ms_p50"], found["pause_ms_max"]) == (3, 2.5, 2.5)
    assert found["snapshots"] == {
        "full": {"count": 0},
        "delta": {"count": 3, "bytes": 30, "publish_s": 1.75},
    }
    assert (found["answers"], found["answers_crossed_swap"], found["failed_requests"]) == (72, 0, 0)
    assert (found["affinity_share"], found["cached_prompt_share"]) == (1.0, 0.5)
    kls = ("kl_neither", "kl_routes", "kl_masks", "kl_routes_and_masks")
    assert [found[name] for name in kls] == pytest.approx([6e-3, 5e-3, 4e-3, 4e-4])
    assert (found["mask_tokens_mean"], found["mask_singleton_share"]) == (1.5, 0.5)


GOOD = {
    "steps": 20,
    "swaps": 20,
    "reward_first": 0.1,
    "reward_last": 0.4,
    "reward_stderr": 0.1,
    "failed_requests": 0,
    "answers_crossed_swap": 1,
    "affinity_share": 1.0,
    "kl_routes": 1e-3,
    "kl_masks": 1e-3,
    "kl_routes_and_masks": 1e-4,
}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"steps": 1, "swaps": 1, "answers_crossed_swap": 0}, None),
        ({"reward_last": 0.39}, "the reward rose"),
        ({"reward_last": 0.1, "reward_stderr": 0.0}, "the reward rose"),
        ({"swaps": 19}, "not every step's"),
        ({"failed_requests": 1}, "requests failed"),
        ({"answers_crossed_swap": 0}, "no answer crossed"),
        ({"affinity_share": 0.99}, "a session changed"),
        ({"kl_masks": 1e-4}, "routes are no closer"),
        ({"kl_routes": 1e-4}, "masks are no closer"),
    ],
)
def test_each_check_that_does_not_hold_is_a_miss_of_its_own(changes, missed):
    found = misses(GOOD | changes)
    assert len(found) == (missed is not None)
    assert all(missed in miss for miss in found)
