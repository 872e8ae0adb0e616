"""Adapters that replicas serve side by side, each as a policy of the deployment: which are loaded, and who uses them.

Owns: the policies whose names begin with `tinker-`. Policies of other names are let alone.
Always holds:
- At most `most` are loaded, being loaded or being ended. The one that was used least recently makes way for another.
- One that a sample uses is not ended. When all are in use, the one loaded first takes no further sample and makes way once
  those it has have ended. So nobody waits for ever.
- One that failed to load is ended again, and its error is its own users' alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from midstream.tinker.policies import Policies
from midstream.tinker.weights import is_own_policy, policy_of
from midstream.trainer.types import Failed

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """made, used: counters; what was later is greater. loading: None of one that another process loaded, or began to."""

    policy: str
    made: int
    used: int
    users: int = 0
    loading: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def movable(self) -> bool:
        return self.ending is None and (self.loading is None or self.loading.done())


def next_to_go(held: Iterable[Held]) -> Held | None:
    """Of those that can be ended: an idle one, the least recently used; else the one that was loaded first. Pure."""
    movable = [one for one in held if one.movable]
    return min(movable, key=lambda one: (one.users > 0, one.made if one.users else one.used), default=None)


class Adapters:
    """most: how many at once. For use in one event loop."""

    def __init__(self, policies: Policies, most: int) -> None:
        self._policies = policies
        self._most = most
        self._several: bool | None = None
        self._listed = False
        self._listing = asyncio.Lock()
        self._held: dict[str, Held] = {}
        self._count = itertools.count()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Adapters({len(self._held)} of {self._most} held)"

    async def possible(self) -> bool:
        """Whether adapters can be served side by side here. Raises Failed."""
        if self._most and self._several is None:
            self._several = await self._policies.several()
        return bool(self._most and self._several)

    @contextlib.asynccontextmanager
    async def use(self, snapshot: str) -> AsyncIterator[None]:
        """Within: replicas serve the adapter as `policy_of(snapshot)`. Raises Failed."""
        held = await self._enter(policy_of(snapshot), snapshot)
        try:
            yield
        finally:
            self._leave(held)

    async def load_again(self, snapshot: str) -> None:
        """Within `use`, when the policy turns out to be gone: somebody else ended it. Raises Failed."""
        await self._policies.load(policy_of(snapshot), snapshot)

    async def forget(self, snapshot: str) -> bool:
        """End its policy, if nobody uses it. Whether there is none any more. Raises Failed."""
        held = self._held.get(policy_of(snapshot))
        if held is None:
            return True
        if held.users or not held.movable:
            return False
        await self._ended(held)
        return True

    async def close(self) -> None:
        tasks = [t for held in self._held.values() for t in (held.loading, held.ending) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, policy: str, snapshot: str) -> Held:
        await self._list()
        while True:
            held = self._held.get(policy)
            if held is None and len(self._held) >= self._most:
                await self._make_room()
                continue
            if held is None:
                held = self._held[policy] = self._new(policy)
            elif held.ending is not None:
                await self._change()
                continue
            held.users += 1
            held.idle.clear()
            if held.loading is None:
                held.loading = asyncio.create_task(self._load(held, snapshot), name=f"load {snapshot}")
            try:
                # It goes on for the others when one of its users is gone.
                await asyncio.shield(held.loading)
            except BaseException:
                self._leave(held)
                raise
            return held

    async def _load(self, held: Held, snapshot: str) -> None:
        try:
            await self._policies.load(held.policy, snapshot)
        except BaseException:
            # Who asks later begins anew, with an entry of its own.
            held.ending = asyncio.create_task(self._drop(held), name=f"drop {held.policy}")
            raise

    async def _drop(self, held: Held) -> None:
        try:
            await self._policies.end(held.policy)
        except Failed as error:
            logger.warning("%s, which could not be loaded, stays for now: %s", held.policy, error)
        finally:
            self._remove(held)

    async def _make_room(self) -> None:
        """One place has become free, or something else has changed. Raises Failed."""
        leaver = next_to_go(self._held.values())
        if leaver is None:
            await self._change()
        else:
            await self._ended(leaver)

    async def _ended(self, held: Held) -> None:
        held.ending = asyncio.create_task(self._end(held), name=f"end {held.policy}")
        await asyncio.shield(held.ending)

    async def _end(self, held: Held) -> None:
        try:
            if held.users:
                await held.idle.wait()
            await self._policies.end(held.policy)
        except BaseException:
            # It may be there still, or not: the next user loads it, which does nothing if it is.
            held.ending = held.loading = None
            self._note_change()
            raise
        self._remove(held)

    async def _list(self) -> None:
        """What is loaded since before this process began."""
        async with self._listing:
            if self._listed:
                return
            for policy in await self._policies.known():
                if is_own_policy(policy) and policy not in self._held:
                    self._held[policy] = self._new(policy)
            self._listed = True

    def _new(self, policy: str) -> Held:
        number = next(self._count)
        return Held(policy, number, number)

    def _leave(self, held: Held) -> None:
        held.users -= 1
        held.used = next(self._count)
        if not held.users:
            held.idle.set()
            self._note_change()

    def _remove(self, held: Held) -> None:
        if self._held.get(held.policy) is held:
            del self._held[held.policy]
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
