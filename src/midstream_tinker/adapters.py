"""Adapters that replicas serve side by side, each as a policy of the deployment: which are loaded, and who uses them.

Owns: the policies with names of weights.policy_of. It leaves other policies alone.
Always holds:
- At most `most` have a place: they are loaded, being loaded or being ended. The one that was used least recently makes way for
  another. Those that want a place get one in the order in which they came.
- One that a sample uses is not ended. When all are in use, the one that was loaded first takes no further sample, and is
  unloaded once its samples are done. So no sample waits for ever.
- One that failed to load is ended again, and its error is its own users' alone.
- One that could not be ended counts again once the policies are listed again, before the next adapter gets a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from midstream_tinker.policies import PolicyPort
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.weights import is_own_policy, policy_of

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """made, used: counters; what was later is greater. loading: None of one that another process loaded, or began to."""

    policy: str
    made: int
    used: int
    placed: bool = False
    users: int = 0
    loading: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def movable(self) -> bool:
        return self.placed and self.ending is None and (self.loading is None or self.loading.done())


def next_to_go(held: Iterable[Held]) -> Held | None:
    """Of those that can be ended: an idle one, the least recently used; else the one that was loaded first. Pure."""
    movable = [one for one in held if one.movable]
    return min(movable, key=lambda one: (one.users > 0, one.made if one.users else one.used), default=None)


class SamplerAdapters:
    """most: how many at once. For use in one event loop."""

    def __init__(self, policies: PolicyPort, most: int) -> None:
        self._policies = policies
        self._most = most
        self._several: bool | None = None
        self._listed = False
        self._listing = asyncio.Lock()
        self._held: dict[str, Held] = {}
        # Those that want a place.
        self._queue: deque[tuple[Held, asyncio.Event]] = deque()
        self._count = itertools.count()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"SamplerAdapters({len(self._held)} of {self._most} held)"

    async def possible(self) -> bool:
        """Whether adapters can be served side by side here. Raises WorkFailed."""
        if self._most and self._several is None:
            self._several = await self._policies.several()
        return bool(self._most and self._several)

    @contextlib.asynccontextmanager
    async def use(self, snapshot: str) -> AsyncIterator[None]:
        """Within: replicas serve the adapter as `policy_of(snapshot)`. Raises WorkFailed."""
        if not await self.possible():
            raise WorkFailed(
                f"{snapshot!r} is an adapter, and this server does not serve adapters side by side:"
                " the engine lacks the feature policies, or [tinker] adapters_max is 0"
            )
        held = await self._enter(policy_of(snapshot), snapshot)
        try:
            yield
        finally:
            self._leave(held)

    async def load_again(self, snapshot: str) -> None:
        """Within `use`, when the policy turns out to be gone: somebody else ended it. Raises WorkFailed."""
        await self._policies.load(policy_of(snapshot), snapshot)

    async def forget(self, snapshot: str) -> bool:
        """End the policy of a snapshot if no sample uses it. True if there is none any more."""
        held = self._held.get(policy_of(snapshot))
        if held is None:
            return True
        if held.users or not (held.movable or held.ending):
            return False
        if held.ending is None:
            self._begin_end(held)
        assert held.ending is not None
        await asyncio.shield(held.ending)
        return True

    async def close(self) -> None:
        """Cancels what is being loaded and ended. No task of this object runs afterwards; no call may follow."""
        self._queue.clear()
        # A task that is cancelled may begin to end another policy.
        while tasks := self._running():
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list[asyncio.Task[None]]:
        begun = [task for held in self._held.values() for task in (held.loading, held.ending)]
        return [task for task in begun if task is not None and not task.done()]

    async def _enter(self, policy: str, snapshot: str) -> Held:
        await self._list()
        while (held := self._held.get(policy)) is not None and held.ending is not None:
            await self._changed.wait()
        if held is None:
            held = self._held[policy] = self._new(policy)
        if held.loading is None:
            held.loading = asyncio.create_task(self._load(held, snapshot), name=f"load {snapshot}")
            held.loading.add_done_callback(self._loaded)
        held.users += 1
        held.idle.clear()
        try:
            # The load continues for the others when one of its users is gone.
            await asyncio.shield(held.loading)
        except BaseException:
            self._leave(held)
            raise
        return held

    async def _load(self, held: Held, snapshot: str) -> None:
        if not held.placed:
            has_place = asyncio.Event()
            self._queue.append((held, has_place))
            self._balance()
            await has_place.wait()
        try:
            await self._policies.load(held.policy, snapshot)
        except BaseException:
            # A later user starts again, with a new entry.
            self._begin_end(held)
            raise

    def _loaded(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Its users have raised it, unless all of them are gone.
            task.exception()
        self._balance()

    def _begin_end(self, held: Held) -> None:
        """It takes no further user."""
        held.ending = asyncio.create_task(self._end(held), name=f"end {held.policy}")

    async def _end(self, held: Held) -> None:
        """End a policy once no sample uses it."""
        try:
            while held.users:
                await held.idle.wait()
            await self._policies.end(held.policy)
        except WorkFailed as error:
            self._listed = False
            logger.warning("the policy %s may stay loaded: %s", held.policy, error.message)
        finally:
            del self._held[held.policy]
            self._balance()
            self._changed.set()
            self._changed = asyncio.Event()

    def _balance(self) -> None:
        """Give free places to those that wait, and begin to free as many as the others need."""
        placed = [held for held in self._held.values() if held.placed]
        free = self._most - len(placed)
        while self._queue and free > 0:
            held, has_place = self._queue.popleft()
            held.placed = True
            has_place.set()
            free -= 1
        ending = sum(held.ending is not None for held in placed)
        for _ in range(len(self._queue) - min(0, free) - ending):
            leaver = next_to_go(self._held.values())
            if leaver is None:
                # One of those that are being loaded makes way then.
                return
            self._begin_end(leaver)

    async def _list(self) -> None:
        """What is loaded since before this process began, or could not be ended."""
        async with self._listing:
            if self._listed:
                return
            for policy in await self._policies.known():
                if is_own_policy(policy) and policy not in self._held:
                    self._held[policy] = self._new(policy, placed=True)
            self._listed = True

    def _new(self, policy: str, placed: bool = False) -> Held:
        number = next(self._count)
        return Held(policy, number, number, placed)

    def _leave(self, held: Held) -> None:
        held.users -= 1
        held.used = next(self._count)
        if not held.users:
            held.idle.set()
