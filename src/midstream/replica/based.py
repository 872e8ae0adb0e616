"""Policies on an engine that has no base for them but the weights that serve (without the feature `policy_base`).

Owns: what a policy's swap waits for, and what becomes of policies when the deployment's own weights are switched.
Always holds:
- A policy's snapshot is loaded once the weights serve that it stands on, or newer ones. Until then its report says why not.
- Before a switch to weights that ended policies, none of their requests runs. They have `drain_s` to end by themselves.
- The other policies cross the switch, except for requests that are pinned: a switch waits for these as the policy's own does.
  Their cached KV is reused as its signal says.
- The time that pinned requests have to end does not run while the base stands still for what a trainer wrote.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from midstream.core.types import Desired, ModelInfo, ResetPromptCache, Stage
from midstream.engine.base import StagingFailed
from midstream.replica.namespaces import Namespaces, event_of
from midstream.replica.pins import Pins
from midstream.replica.swap.table import SwapMachine
from midstream.replica.swap.ties import NO_TIES, Ties

log = logging.getLogger(__name__)


class AnotherPolicy(Protocol):
    """A policy besides the deployment's own, of which requests may be left after its end."""

    name: str
    made: float
    users: int
    namespaces: Namespaces
    pins: Pins

    @property
    def stands_on(self) -> int: ...

    async def left(self) -> None: ...

    def abort(self, ids: tuple[str, ...] | None, *, held: bool) -> int: ...


class OneBase:
    """own: the swap machine of the deployment's own weights. others: those that are held, and ended ones with requests left.

    end: ends a policy, by its name and when it was made. stands_still: nothing is computed until the base is switched.
    drain_s: the seconds in which requests may end by themselves, unless it does.
    """

    def __init__(
        self,
        own: Callable[[], SwapMachine],
        others: Callable[[], Sequence[AnotherPolicy]],
        end: Callable[[str, float], bool],
        stands_still: Callable[[], bool],
        drain_s: float,
    ) -> None:
        self._own, self._others, self._end = own, others, end
        self._stands_still, self._drain_s = stands_still, drain_s
        self._moved = asyncio.Event()
        # What pinned requests of policies are waited for.
        self._coming: str | None = None

    def of_policy(self, info: ModelInfo) -> Ties:
        """info: of the boot's engine."""
        if info.card.has("policy_base"):
            return NO_TIES
        return Ties(self._base_serves, self._pinned_may_end, waits=self._lacking)

    def of_base(self, info: ModelInfo) -> Ties:
        if info.card.has("policy_base"):
            return NO_TIES
        return Ties(self._end_old, self._make_way, self._crossed, self._reopen, moved=self._step)

    def _step(self) -> None:
        """The deployment's own weights have made one."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _base_serves(self, desired: Desired) -> None:
        while (why := self._lacking(desired)) is not None:
            log.info("%s of policy %s: %s", desired.snapshot, desired.policy, why)
            await self._moved.wait()
        # Also before they serve: from then on a switch looks for no further ones.
        newest = self._own().accepted
        if newest is not None and desired.stands_on < newest.ends_before:
            raise StagingFailed(
                f"policies were ended with the weights before {newest.snapshot}, and this is one"
            )

    async def _pinned_may_end(self, desired: Desired) -> None:
        """They cannot while the base stands still. Its switch ends them, or a replica that takes over continues them."""
        while self._stands_still() and any(
            policy.pins.in_the_way(desired) for policy in self._others() if policy.name == desired.policy
        ):
            await self._moved.wait()

    def _lacking(self, desired: Desired) -> str | None:
        """Why a policy's snapshot cannot be loaded yet. Weights that cannot be loaded make it wait for the next ones."""
        own = self._own()
        if own.answers >= desired.stands_on:
            return None
        why = "waits for the full weights that it stands on, or newer ones"
        # Older ones may serve again by now.
        failed = next((moved for moved in reversed(own.transitions) if moved.stage is Stage.ERROR), None)
        if failed is None or failed.generation < desired.stands_on:
            return why
        return f"{why}: {failed.snapshot} could not be loaded: {failed.detail}"

    async def _end_old(self, desired: Desired) -> None:
        """A gateway says so, too. It may not have said it yet."""
        for policy in self._old(desired):
            self._end(policy.name, policy.made)

    async def _make_way(self, desired: Desired) -> None:
        await self._old_are_gone(desired)
        if not self._own().same_files(desired):
            self._coming = desired.snapshot
            at_once = self._stands_still()
            ending = (policy.pins.end(desired, at_once=at_once) for policy in self._others())
            if ended := sum(await asyncio.gather(*ending)):
                log.warning("%d pinned requests of policies were ended for %s", ended, desired.snapshot)

    def _reopen(self) -> None:
        coming, self._coming = self._coming, None
        for policy in self._others():
            if coming is not None and policy.pins.coming == coming:
                policy.pins.reopen()

    async def _old_are_gone(self, desired: Desired) -> None:
        # A late message may have brought one back.
        await self._end_old(desired)
        running = [policy for policy in self._old(desired) if policy.users]
        if not running:
            return
        log.info("the switch to %s waits for requests of %d policies", desired.snapshot, len(running))
        try:
            async with asyncio.timeout(0.0 if self._stands_still() else self._drain_s):
                await asyncio.gather(*(policy.left() for policy in running))
        except TimeoutError:
            ended = sum(policy.abort(None, held=True) for policy in running)
            log.warning("%d requests of policies were ended for the switch to %s", ended, desired.snapshot)
            await asyncio.gather(*(policy.left() for policy in running))

    def _crossed(self, desired: Desired, reset: ResetPromptCache) -> None:
        for policy in self._others():
            ages = (policy.namespaces.kv_age_max, desired.max_cache_age)
            age_max = min((age for age in ages if age is not None), default=None)
            policy.namespaces.commit(reset, age_max, event_of(desired))

    def _old(self, desired: Desired) -> list[AnotherPolicy]:
        return [policy for policy in self._others() if policy.stands_on < desired.ends_before]
