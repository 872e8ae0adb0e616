"""Weights that vLLM's workers load beside those that serve, so that a switch to them is short.

The worker extension does it (worker_extension/midstream_vllm_staged.py). A server proves at its start that it can: other
weights are staged, and nothing changes. They are switched to by one kind of module after the other, and each changes the
numbers of a prompt. Then its own weights are staged and switched to, and the numbers are those of the beginning.

Always holds: a switch and a drop are for the weights that they name, never for newer ones. A server that fails the proof has
its own weights, loaded in place, or is not used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from midstream.engine.base import StagingFailed
from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.servers.switching import TOLERANCE, NotExact, Score, largest_difference
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

#: Of the worker extension.
METHOD = "midstream_weights"
#: The workers answer between two steps, so they are not asked more often.
LOOK_S = 0.1


class CannotStage(Exception):
    """The workers stage nothing now. vLLM can load the same weights in place."""


class WorkerWeights:
    """The workers of one server. load_s_max: how long they may take for one snapshot."""

    def __init__(self, control: Control, load_s_max: float) -> None:
        self._control = control
        self._numbers = itertools.count(1)
        self.load_s_max = load_s_max
        # How often they were asked to stage, and answered that; and what that was when they were seen to rest.
        self._stagings, self._seen_at_rest = 0, -1

    def next(self) -> StagedWeights:
        """For another snapshot. The workers hold one at a time: the last that was loaded."""
        return StagedWeights(self, next(self._numbers))

    async def rest(self) -> None:
        """Return when no worker loads any weights, as an update in place must not run beside that. Raises StagingFailed."""
        limit, stagings = self.load_s_max, self._stagings
        if self._seen_at_rest == stagings:
            # They load only what they were asked to stage.
            return
        try:
            async with asyncio.timeout(limit):
                busy = await self.ask("busy", 0)
                while any(busy):
                    await asyncio.sleep(LOOK_S)
                    busy = await self.ask("busy", 0)
        except TimeoutError as error:
            raise StagingFailed(
                f"vLLM's workers still load other weights after {limit:g} s (vllm.load_s_max)"
            ) from error
        except (CallFailed, ServerRefused) as error:
            raise StagingFailed(f"vLLM's workers do not say whether they load weights: {error}") from error
        self._seen_at_rest = stagings

    async def ask(self, do: str, number: int, **arguments: Any) -> list[Any]:
        """Raises CallFailed, ServerRefused."""
        asked = {"do": do, "number": number, **arguments}
        stages = do == "stage"
        self._stagings += stages
        try:
            return await self._control.ask_workers(METHOD, asked, STEP_S_MAX, holds_up=do == "switch")
        finally:
            # A look at the workers while this was under way may have come before it.
            self._stagings += stages


class StagedWeights:
    """One snapshot in the workers of a server. number: by which they know it."""

    def __init__(self, workers: WorkerWeights, number: int) -> None:
        self.workers = workers
        self._number = number

    async def load(self, directory: Path, *, moved: bool = False) -> list[str]:
        """Have the files staged, and return the kinds of modules that have weights.

        moved: others of the same shapes are staged. Raises CannotStage, StagingFailed.
        """
        limit = self.workers.load_s_max
        try:
            refusals = await self._ask("stage", path=str(directory), moved=moved)
            async with asyncio.timeout(limit):
                while not any(refusals):
                    looks = await self._ask("look")
                    if all(look["phase"] == "staged" for look in looks):
                        return sorted({kind for look in looks for kind in look["kinds"]})
                    if bad := [look["why"] for look in looks if look["phase"] == "failed"]:
                        raise StagingFailed(f"vLLM could not load the snapshot: {bad[0]}")
                    refusals = [look["why"] for look in looks if look["phase"] == "refused"]
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise CannotStage(f"it took longer than {limit:g} s (vllm.load_s_max)") from error
        except (CallFailed, ServerRefused) as error:
            raise CannotStage(str(error)) from error
        raise CannotStage(next(filter(None, refusals)))

    async def switch(self, kinds: Sequence[str] | None = None) -> None:
        """Serve it, or its modules of these kinds alone. Only in a pause, or before anything runs."""
        await self._ask("switch", kinds=None if kinds is None else list(kinds))

    async def drop(self) -> None:
        """Free what is staged, or what a switch has replaced. Never raises: the server may be gone."""
        try:
            await self._ask("drop")
        except (CallFailed, ServerRefused) as error:
            logger.info("vLLM's workers were not told to free weights: %s", error)

    async def _ask(self, do: str, **arguments: Any) -> list[Any]:
        return await self.workers.ask(do, self._number, **arguments)


async def prove_staging(
    workers: WorkerWeights,
    score: Score,
    own: Path,
    reload: Callable[[], Awaitable[None]],
    digest: Callable[[], Awaitable[str]],
) -> str:
    """Why the server cannot stage weights; "" if it can. Only before anything runs.

    score: the log-probabilities of a fixed prompt. own: the files of what serves. reload: loads these in place. digest: of
    what serves, or the same each time. Raises NotExact, and the errors of score, reload and digest.
    """
    before, loaded = await score(), await digest()
    try:
        await _try_all(workers, score, own, before)
        if await digest() != loaded:
            raise CannotStage("its own weights, staged, have another digest")
        why = ""
    except (CannotStage, StagingFailed, ServerRefused, NotExact) as error:
        why = str(error)
        logger.warning("vLLM loads weights in place, while streams stand still: %s", why)
        try:
            await workers.rest()
        except StagingFailed as busy:
            raise NotExact(f"{busy}. Start vLLM with vllm.stage_weights = false") from busy
        await reload()
    off = largest_difference(before, await score())
    if not off <= TOLERANCE:
        raise NotExact(f"vLLM did not get its own weights back: its log-probabilities differ by {off:.3g}")
    return why


async def _try_all(workers: WorkerWeights, score: Score, own: Path, before: list[float]) -> None:
    """Raises CannotStage, StagingFailed, ServerRefused, NotExact."""
    other = workers.next()
    try:
        kinds = await other.load(own, moved=True)
        now = await score()
        if not largest_difference(before, now) <= TOLERANCE:
            raise CannotStage("while weights are staged, vLLM computes other numbers")
        for kind in kinds:
            await other.switch([kind])
            changed = await score()
            if changed == now:
                raise CannotStage(f"other weights in {kind} change nothing of what vLLM computes")
            now = changed
    finally:
        await other.drop()
    again = workers.next()
    try:
        await again.load(own)
        await again.switch()
    finally:
        await again.drop()
    off = largest_difference(before, await score())
    if not off <= TOLERANCE:
        raise CannotStage(f"its own weights, staged, give log-probabilities that differ by {off:.3g}")
