"""The snapshot that a request asks for, the requests that are pinned to one, and the snapshots that stay loaded for them.

Owns: which snapshots besides the serving one the engine keeps (`Slot.retain`). A replica with the `Residency` ONE keeps none:
its pinned requests are those of the serving snapshot, and a swap lets them end first.

Always holds:
- While a swap waits for pinned requests, no other request is pinned. It waits for `drain_s` at most, and not at all where the
  engine computes nothing until the swap. A pinned request that is not done by then ends with an error.
- When a swap commits, every pinned request is of the target, or of a snapshot that stays loaded as long as it runs.
- A snapshot that did not pass its check, or that had to be loaded again as replicas disagreed, is offered to no request.
- A request for a snapshot that stays besides the serving one shares cached KV only with requests for the same load of it. So
  whatever the cache policies and ages of later swaps say, all KV that it reads is of its own snapshot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from midstream.core.served_names import served_model_name
from midstream.core.types import Desired
from midstream.core.versions import Admitted, ConstraintNotMet, Refusal, VersionConstraint
from midstream.replica.swap.table import SwapMachine, same_files

PIN_DRAIN_S = 60.0


@dataclass(frozen=True)
class Residency:
    """snapshots: how many stay loaded, the serving one included, besides those that requests are pinned to. most: how many
    there may be in all; None: no bound."""

    snapshots: int = 1
    most: int | None = None

    @property
    def several(self) -> bool:
        return min(self.snapshots, self.most or self.snapshots) > 1


ONE = Residency()


class Asked:
    """The snapshot that one request asks for. constraint: from its body and its model's name. admitted: its gateway's decision.

    judged: another replica let the request in, so only its pin counts.
    """

    def __init__(
        self, model: str, constraint: VersionConstraint, admitted: Admitted | None, *, judged: bool = False
    ) -> None:
        self._model = model
        self._constraint = constraint
        given = (constraint.snapshot, None if admitted is None else admitted.snapshot)
        self._expected = {snapshot for snapshot in given if snapshot is not None}
        self._judged = judged or not constraint.relative or (admitted is not None and admitted.body)
        self.pinned = constraint.snapshot is not None or (admitted is not None and admitted.pinned)

    def __repr__(self) -> str:
        return f"Asked({self._constraint}, expects {sorted(self._expected)}, pinned={self.pinned})"

    def check(self, serving: str, pins: Pins) -> str:
        """The snapshot that the request begins with. Raises ConstraintNotMet unless it may begin."""
        begins, *more = self._expected or {serving}
        if more or not (self.pinned and pins.offers(begins)):
            begins = serving
        others = self._expected - {begins}
        if not self._judged:
            why = "min_snapshot and max_staleness are the gateway's to judge: ask it"
        elif others:
            here = f"{served_model_name(self._model, serving)} is"
            if pins.resident(serving):
                here += f", and {', '.join(map(repr, pins.resident(serving)))} may be asked for"
            why = f"snapshot {others.pop()!r} is not serving; {here}"
        elif self.pinned and pins.coming is not None:
            why = (
                f"snapshot {begins!r} takes no pinned requests any more: {pins.coming!r} waits to replace it"
            )
        else:
            return begins
        raise self.refused(why, serving, pins)

    def refused(self, why: str, serving: str, pins: Pins, *, pinnable: bool = True) -> ConstraintNotMet:
        pinnable = pinnable and pins.coming is None
        here = pinnable and pins.offers(self._constraint.snapshot)
        return ConstraintNotMet(why, Refusal(serving, pinnable, self._constraint, here))


@dataclass(frozen=True)
class _Stay:
    """loaded: None: the base weights of the start. sound: it may be offered."""

    loaded: Desired | None
    sound: bool

    @property
    def generation(self) -> int:
        return 0 if self.loaded is None else self.loaded.generation


def _retain_nothing(snapshots: Collection[str]) -> None:
    """Of an engine that keeps what serves, alone."""


class Pins:
    """The pinned requests. drain_s: how long a swap waits for them, in seconds.

    retain: has the engine keep these of the snapshots that have served, besides the serving one.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        drain_s: float = PIN_DRAIN_S,
        residency: Residency = ONE,
        retain: Callable[[Collection[str]], None] = _retain_nothing,
    ) -> None:
        self._on_change = on_change
        self._drain_s = drain_s
        self._residency = residency
        self._retain = retain
        self._ended_for, self._ended_after_s = "", drain_s
        # Of each pinned request, its snapshot.
        self._held: dict[asyncio.Timeout, str] = {}
        self._moved = asyncio.Event()
        # The snapshots that stay, the least recently used one first. The serving one may be among them.
        self._stays: OrderedDict[str, _Stay] = OrderedDict()
        self.coming: str | None = None
        #: Pinned requests continue under their snapshot while the next one serves others.
        self.several = False

    def __repr__(self) -> str:
        return f"Pins({len(self._held)} held, coming={self.coming}, stay={list(self._stays)})"

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, *, able: bool) -> None:
        """A boot begins, with what it starts on alone. able: its engine can keep several snapshots."""
        self._stays.clear()
        self.several = able and self._residency.several

    def resident(self, serving: str) -> tuple[str, ...]:
        """What may be asked for besides the serving snapshot, the least recently used one first."""
        return tuple(name for name, stay in self._stays.items() if stay.sound and name != serving)

    def offers(self, snapshot: str | None) -> bool:
        """Whether it stays, and may be asked for."""
        stay = None if snapshot is None else self._stays.get(snapshot)
        return stay is not None and stay.sound

    def salt_of(self, snapshot: str | None) -> str:
        """What separates the KV of a resident snapshot from all other KV, also of the same name. None: the serving snapshot."""
        return "" if snapshot is None else f"@{snapshot}#{self._stays[snapshot].generation}"

    @asynccontextmanager
    async def hold(self, asked: Asked, snapshot: str) -> AsyncIterator[None]:
        """The request inside is pinned to `snapshot`, which serves or stays. Ends with ConstraintNotMet if a swap waited."""
        limit = asyncio.timeout(None)
        self._held[limit] = snapshot
        self._used(snapshot)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = (
                f"snapshot {snapshot!r}, to which this request is pinned, is replaced by {self._ended_for!r}: it had"
                f" {self._ended_after_s:g} s to end"
            )
            raise asked.refused(message, snapshot, self, pinnable=False) from None
        finally:
            self._held.pop(limit, None)
            self._used(snapshot)
            self._trim()
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

    def in_the_way(self, desired: Desired) -> int:
        """How many pinned requests have to end before the target may serve: while one snapshot serves at a time, all; else
        those of other files of its name, and those of the least recently used snapshots that there is no room for."""
        return len(self._in_the_way(desired))

    def _in_the_way(self, desired: Desired) -> list[asyncio.Timeout]:
        if not self.several:
            return list(self._held)
        target, most = desired.snapshot, self._residency.most
        pinned = set(self._held.values()) - {target}
        old = [name for name in self._stays if name in pinned]
        old += [name for name in pinned if name not in old]
        gone = set(old[: max(0, len(old) + 1 - most)]) if most is not None else set()
        stay = self._stays.get(target)
        if stay is None or (stay.loaded is not None and not same_files(desired, stay.loaded)):
            gone.add(target)
        return [limit for limit, snapshot in self._held.items() if snapshot in gone]

    async def end(self, desired: Desired, *, at_once: bool = False) -> int:
        """Waits until no pinned request is in the way. Ends those that exceed the time limit, and returns how many it ended.

        If one is, or may come to be, no request is pinned from now until `reopen`. at_once: none can end by itself."""
        found = self._in_the_way(desired)
        if found or not self.several:
            self.coming = desired.snapshot
        if not found:
            return 0
        self._on_change()
        drain_s = 0.0 if at_once else self._drain_s
        try:
            async with asyncio.timeout(drain_s):
                await self._gone(desired)
        except TimeoutError:
            found = self._in_the_way(desired)
            self._ended_for, self._ended_after_s = desired.snapshot, drain_s
            for limit in found:
                if limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time())
            await self._gone(desired)
            return len(found)
        return 0

    async def _gone(self, desired: Desired) -> None:
        while self._in_the_way(desired):
            await self._moved.wait()

    def reopen(self) -> None:
        if self.coming is not None:
            self.coming = None
            self._on_change()

    def switching(self, machine: SwapMachine, desired: Desired) -> None:
        """The target is about to replace what serves, which stays from now on. A policy has no base weights."""
        if not self.several:
            return
        self._stays.pop(desired.snapshot, None)
        if machine.serving != desired.snapshot and (machine.loaded is not None or not desired.policy):
            doubted = machine.loaded is not None and machine.loaded.reload > 0
            sound = machine.sound and machine.checked and not doubted
            self._stays[machine.serving] = _Stay(machine.loaded, sound)
            self._used(machine.serving)
        self._trim(engine_knows=False)

    def _used(self, snapshot: str) -> None:
        if snapshot in self._stays:
            self._stays.move_to_end(snapshot)

    def _trim(self, *, engine_knows: bool = True) -> None:
        """Release the least recently used snapshots without pinned requests, until the others have room.
        engine_knows: the engine has the list of all that stay."""
        residency, pinned = self._residency, set(self._held.values())
        kept = {name for name in self._stays if name in pinned}
        newest = [name for name, stay in reversed(self._stays.items()) if stay.sound]
        for name in newest[: residency.snapshots - 1]:
            if residency.most is None or len(kept) < residency.most - 1:
                kept.add(name)
        gone = [name for name in self._stays if name not in kept]
        for name in gone:
            del self._stays[name]
        if gone or not engine_knows:
            self._retain(tuple(self._stays))
            self._on_change()
