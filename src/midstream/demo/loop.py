"""The RL loop: sample, train, publish. Rollouts of the next step run while the weights change.

Owns: the order of steps in one run.

Always holds:
- All rollouts of step 0 are sampled before the first publication.
- A third of a step's groups start when training on the step before starts. The others start while its snapshot is published:
  one at a time until a replica is about to switch, then the rest at once. So streams are running when replicas switch, and no
  rollout starts more than one snapshot behind.
- One snapshot is published at a time. A failed publication ends the run with its reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from midstream.client import Publication, SnapshotPublisher, Status
from midstream.demo.records import Rollout, StepRow, problems
from midstream.demo.rollouts import Sampler
from midstream.demo.trainer import Trainer

PUBLISH_TIMEOUT_S = 60.0
#: The stages of a replica that is about to switch.
ABOUT_TO_SWITCH = frozenset({"verifying", "staging", "staged", "committing", "checking"})


class NoRollouts(Exception):
    """Every rollout of a step failed. The message has the first reason."""


@dataclass(frozen=True)
class LoopOptions:
    seed: int
    steps: int
    groups: int
    samples: int


class Loop:
    """on_row: called with each step's row after training, and again when its snapshot serves."""

    def __init__(
        self,
        options: LoopOptions,
        sampler: Sampler,
        trainer: Trainer,
        publisher: SnapshotPublisher,
        model_directory: Path,
        on_row: Callable[[StepRow], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sampler = sampler
        self._trainer = trainer
        self._publisher = publisher
        self._model_directory = model_directory
        self._on_row = on_row
        self._clock = clock
        self.rows: list[StepRow] = []
        self.first_rollouts: list[Rollout] = []

    async def run(self) -> list[StepRow]:
        with ThreadPoolExecutor(1, "trainer") as training:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks, training)
        return self.rows

    async def _run(self, tasks: asyncio.TaskGroup, training: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        started, failed_before = self._clock(), 0
        batch = await self._sample(0, slice(None))
        self.first_rollouts = batch
        published: asyncio.Task[None] | None = None
        for step in range(self._options.steps):
            if not batch:
                raise NoRollouts(f"every rollout of step {step} failed, first: {self._sampler.errors[0]}")
            failed = self._sampler.failed - failed_before
            failed_before = self._sampler.failed
            third = self._options.groups // 3
            early = tasks.create_task(self._sample(step + 1, slice(third)))
            row = await loop.run_in_executor(training, self._train, step, batch, failed)
            if published is not None:
                await published
            near = asyncio.Event()
            publication = await loop.run_in_executor(training, self._begin, row, loop, near)
            published = tasks.create_task(self._serve(row, publication, near))
            now = self._clock()
            row.seconds, started = now - started, now
            self.rows.append(row)
            self._on_row(row)
            late = await self._sample(step + 1, slice(third, None), near)
            batch = await early + late
        if published is not None:
            await published

    async def _sample(self, step: int, which: slice, near: asyncio.Event | None = None) -> list[Rollout]:
        """Sample the groups `which` of `step`: all at once, or one at a time until `near`. Returns [] after the last step."""
        if step >= self._options.steps:
            return []
        chosen = list(enumerate(problems(self._options.seed, step, self._options.groups)))[which]
        groups: list[asyncio.Task[list[Rollout]]] = []
        async with asyncio.TaskGroup() as tasks:
            for group, problem in chosen:
                if groups and near is not None:
                    await _either(groups[-1], near)
                groups.append(
                    tasks.create_task(self._sampler.group(step, group, problem, self._options.samples))
                )
        return [rollout for task in groups for rollout in task.result()]

    def _train(self, step: int, batch: Sequence[Rollout], failed: int) -> StepRow:
        """Measure the mismatch, and update. Runs in the trainer's thread."""
        held = self._trainer.snapshot
        mismatch = self._trainer.mismatch(batch)
        loss = self._trainer.update(batch)
        snapshot = f"step-{step + 1}"
        self._trainer.remember(snapshot)
        row = batch_row(step, snapshot, held, batch)
        row.failed_requests, row.loss = failed, loss
        row.kl_own_routes, row.kl_replayed_routes = mismatch.kl_own_routes, mismatch.kl_replayed_routes
        row.route_diff_share = mismatch.route_diff_share
        row.route_layer_diff_share = mismatch.route_layer_diff_share
        return row

    def _begin(self, row: StepRow, loop: asyncio.AbstractEventLoop, near: asyncio.Event) -> Publication:
        """Copy the weights and begin the publication. near: set when a replica is about to switch."""

        def look(status: Status) -> None:
            if any(replica.stage in ABOUT_TO_SWITCH for replica in status.replicas):
                loop.call_soon_threadsafe(near.set)

        return self._publisher.begin(
            row.snapshot,
            model=self._trainer.model,
            config_dir=self._model_directory,
            dtype="bfloat16",
            timeout_s=PUBLISH_TIMEOUT_S,
            on_status=look,
        )

    async def _serve(self, row: StepRow, publication: Publication, near: asyncio.Event) -> None:
        done = await asyncio.to_thread(publication.wait)
        near.set()
        row.kind, row.bytes_sent, row.bytes_whole = done.kind, done.bytes_sent, done.bytes_whole
        row.publish_s = done.encode_s + done.upload_s + done.load_s
        swaps = [replica.last_swap or {} for replica in done.replicas]
        row.pause_ms = tuple(swap["pause_ms"] for swap in swaps if swap.get("snapshot") == row.snapshot)
        row.served = True
        self._on_row(row)


async def _either(task: asyncio.Task[list[Rollout]], event: asyncio.Event) -> None:
    """Wait until `task` has ended or `event` is set."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def batch_row(step: int, snapshot: str, held: str, batch: Sequence[Rollout]) -> StepRow:
    """The row of a batch before training. held: the snapshot whose weights the trainer has when it trains on the batch."""
    turns = [turn for rollout in batch for turn in rollout.turns]
    rewards = tuple(rollout.reward for rollout in batch)
    labels = [label for turn in turns for label in turn.snapshots]
    return StepRow(
        step=step,
        snapshot=snapshot,
        reward=sum(rewards) / len(rewards),
        rewards=rewards,
        prompt_tokens=sum(len(turn.prompt) for turn in turns),
        cached_prompt_tokens=sum(turn.cached_tokens for turn in turns),
        older_snapshot_share=sum(label != held for label in labels) / len(labels),
        streams=len(turns),
        streams_crossed_swap=sum(turn.crossed_swap for turn in turns),
        one_replica=sum(rollout.one_replica for rollout in batch),
        tokens=len(labels),
    )
