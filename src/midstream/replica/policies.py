"""The policies of a replica besides its deployment's own: adapters, and snapshots, that are served side by side.

Owns: of each policy its swap driver, gate, pins, namespaces and names; which policy makes way for another. Sessions, turns and
stored responses are the replica's.
Always holds:
- At most `policies_max` policies are held, with those that were ended and have requests left. For a newcomer the least recently
  used idle policy makes way. When none is idle, the newcomer is refused.
- A policy that a request uses never makes way, from before the request is read to its end. One that loads does not either, and
  one that has just loaded has UNUSED_S for its first request.
- A policy that made way may come again. Its stage changes go on where they were.
- A policy serves nothing before its first switch, and no request reaches it until then.
- What one policy waits for, holds up or fails at changes nothing for another.
- A policy that is ended and made again shares no cached KV with the one before: its salts have another number.
- One that was ended stays so, and of one name the newest made counts. A message of a gateway that has not heard of it changes
  nothing.
- The engine has a policy until the last request that it was ended under is done.
- The files of a policy that was ended go with it, unfinished ones too. Those of one that made way stay while there is room.
- A policy lives for one boot. The gateway says again what it should serve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from midstream.core.errors import Overloaded, PolicyNotLoaded
from midstream.core.served_names import ServedNames
from midstream.core.types import BASE_SNAPSHOT, POLICIES_MAX, Desired, Hint, ModelInfo, PolicyReport, Stage
from midstream.engine.base import Engine
from midstream.replica.gate import REQUESTS_MAX, Door, Gate, Namespaces
from midstream.replica.pins import ONE, PIN_DRAIN_S, Pins, Residency
from midstream.replica.service import Kept, Outside, Service
from midstream.replica.swap.driver import Checker, Entrance, SwapDriver, Told
from midstream.replica.swap.history import SwapHistory
from midstream.replica.swap.source import Files, Hints
from midstream.replica.swap.table import SwapMachine
from midstream.replica.text.chat import TextModel

log = logging.getLogger(__name__)

#: Stage changes of a policy that a report has. A report is sent whole, with those of all policies.
TRANSITIONS_TOLD = 8
#: Policies that were ended and are remembered, so that a late message does not make them again.
ENDED_KNOWN = 4096
#: Policies that made way and whose next sequence number is remembered.
GONE_KNOWN = 65_536
#: How long a policy that was loaded is kept for its first request.
UNUSED_S = 2.0


@dataclass(frozen=True)
class Bounds:
    """As replica.Bounds; of each policy."""

    requests_max: int = REQUESTS_MAX
    session_idle_s: float = 3600.0
    pin_drain_s: float = PIN_DRAIN_S
    residency: Residency = ONE
    policies_max: int = POLICIES_MAX


@dataclass(frozen=True)
class Parts:
    """What all policies of a replica share. died: takes the boot and why its engine is gone."""

    engine: Engine
    text: TextModel
    names: ServedNames
    files: Files
    kept: Callable[[], Kept]
    outside: Outside
    bounds: Bounds
    on_change: Callable[[], None]
    on_settled: Callable[[], None]
    on_swapped: Callable[[SwapHistory], None]
    died: Callable[[str, str], None]


@dataclass(frozen=True)
class Boot:
    """info: of the engine. now: the boot that serves at the moment."""

    id: str
    info: ModelInfo
    now: Callable[[], str]


class Policy:
    """One policy in one boot.

    made: as Desired has it. number: never the same twice in a replica's life. seq: of its first stage change.
    """

    def __init__(self, name: str, made: float, number: int, parts: Parts, boot: Boot, seq: int = 0) -> None:
        self.name = name
        self.made = made
        #: Requests that use it, also before they pass the gate.
        self.users = 0
        #: A counter over all policies: the greatest was used last.
        self.used_at = 0
        #: When its last load ended. None once a request has used that, and before there is one.
        self.unused_since: float | None = None
        self._left = asyncio.Event()
        self._left.set()
        self._monotonic = parts.outside.monotonic
        self._on_change = parts.on_change
        outside, bounds, info = parts.outside, parts.bounds, boot.info
        account = parts.names.account
        self.names = ServedNames(f"{account}/models/{name}", f"{parts.names.deployment}/policies/{name}")
        self.gate = Gate(parts.on_change, bounds.requests_max, PolicyNotLoaded)
        # The engine knows it by a name of its own: one of an old name is another policy there, too.
        self.own_name = f"{name}#{number}"
        slot = parts.engine.slot(self.own_name)
        self.pins = Pins(parts.on_change, bounds.pin_drain_s, bounds.residency, slot.retain)
        self.pins.begin(able=info.card.has("resident_snapshots"))
        self.namespaces = Namespaces(idle_s_max=bounds.session_idle_s, clock=outside.monotonic)
        source = self._source = parts.files.source.of_policy(name)
        self._hints = Hints(source.prefetch)
        self.driver = SwapDriver(
            engine=slot,
            files=replace(parts.files, source=source, hints=self._hints),
            entrance=Entrance(self.gate, self.pins, self.namespaces),
            machine=SwapMachine(outside.clock, seq),
            checker=Checker(parts.engine, outside.new_boot, slot=slot, policy=self.own_name),
            monotonic=outside.monotonic,
            told=Told(
                self._moved,
                parts.on_settled,
                lambda reason: parts.died(boot.id, reason),
                parts.on_swapped,
            ),
        )
        self.driver.info = info
        self.service = Service(
            engine=parts.engine,
            info=info,
            text=parts.text,
            names=self.names,
            kept=replace(parts.kept(), pins=self.pins, namespaces=self.namespaces),
            gate=self.gate,
            clock=outside.clock,
            monotonic=outside.monotonic,
            random_seed=outside.random_seed,
            boot=boot.id,
            boot_now=boot.now,
            serving=lambda: self.driver.machine.serving,
            files_of=lambda snapshot: self.driver.meanings.files(snapshot),
            on_engine_death=lambda reason: parts.died(boot.id, reason),
            policy=self.own_name,
            salted=self.own_name,
        )
        self.driving = asyncio.create_task(self.driver.run(), name=f"swap driver of {name}")

    def __repr__(self) -> str:
        return f"Policy({self.name}, {self.driver.machine!r}, {self.gate!r})"

    @property
    def serves(self) -> bool:
        return self.driver.machine.serving != BASE_SNAPSHOT

    def _moved(self) -> None:
        if self.driver.machine.stage is Stage.CHECKING:
            self.unused_since = self._monotonic()
        self._on_change()

    @contextmanager
    def in_use(self, uses: Iterator[int]) -> Iterator[Service]:
        """Within: a request uses it. uses: gives the next number of a use."""
        self.users += 1
        self._left.clear()
        self.used_at, self.unused_since = next(uses), None
        try:
            yield self.service
        finally:
            self.users -= 1
            self.used_at = next(uses)
            if not self.users:
                self._left.set()

    async def left(self) -> None:
        """Returns when no request uses it."""
        await self._left.wait()

    def may_go(self, now: float) -> bool:
        """Whether it may make way for another policy."""
        waits = self.unused_since is not None and now - self.unused_since < UNUSED_S
        return not (self.users or waits) and self.driver.resting

    def hint(self, hint: Hint) -> None:
        self._hints.add(hint)

    def report(self) -> PolicyReport:
        machine = self.driver.machine
        idle = machine.stage is Stage.IDLE
        return PolicyReport(
            policy=self.name,
            made=self.made,
            sound=machine.sound,
            snapshot=machine.serving,
            signalled=machine.signalled,
            generation=machine.accepted.generation if machine.accepted else 0,
            stage=machine.stage,
            target=None if idle or machine.target is None else machine.target.snapshot,
            error=machine.error,
            in_flight=self.gate.inside,
            held=machine.stage is Stage.STAGED and machine.held,
            admitting=self.gate.door is not Door.CLOSED,
            pinnable=self.pins.coming is None,
            check=self.driver.check,
            contents=self.driver.contents,
            last_swap=self.driver.last_swap,
            transitions=tuple(machine.transitions)[-TRANSITIONS_TOLD:],
            resident=self.pins.resident(machine.serving),
        )

    def shut(self) -> None:
        """It takes no more snapshots. Requests that use it go on."""
        # A request that ends later keeps nothing in the engine.
        self.pins.begin(able=False)
        self.driving.cancel()

    async def close(self) -> None:
        self.gate.set(Door.DOWN)
        self.shut()
        await self._hints.close()
        await asyncio.wait((self.driving,))
        await self._source.close()


def to_make_way(policies: Iterable[Policy], now: float) -> Policy | None:
    """Of those that may, the one that was used least recently."""
    return min((p for p in policies if p.may_go(now)), key=lambda policy: policy.used_at, default=None)


class Policies:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        # By (name, made), the next sequence number of one that made way.
        self._seqs: OrderedDict[tuple[str, float], int] = OrderedDict()
        self._policies: dict[str, Policy] = {}
        # By name, when the newest that was ended was made; the one that was ended last stands last.
        self._ended: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # Ended ones whose requests run on.
        self._going: list[Policy] = []
        self._paused = False

    def __repr__(self) -> str:
        return f"Policies({', '.join(self._policies)})"

    def __iter__(self) -> Iterator[Policy]:
        return iter(tuple(self._policies.values()))

    @property
    def everyone(self) -> list[Policy]:
        """With those that were ended and have requests left."""
        return [*self, *self._going]

    def desire(self, desired: Desired, boot: Boot) -> None:
        name, made = desired.policy, desired.made
        policy = self._policies.get(name)
        if made and made <= self._ended.get(name, 0.0):
            return
        if policy is not None and policy.made != made:
            if made < policy.made:
                return
            self.end(name, policy.made)
            policy = None
        if policy is None:
            self._make_room(name)
            seq = self._seqs.pop((name, made), 0)
            policy = Policy(name, made, next(self._numbers), self._parts, boot, seq)
            self._policies[name] = policy
            policy.gate.pause(self._paused)
            policy.gate.set(Door.OPEN)
            policy.driving.add_done_callback(lambda task: self._driver_ended(policy, boot, task))
        if policy.driver.desire(desired):
            policy.used_at = next(self._uses)

    def _make_room(self, name: str) -> None:
        """Raises Overloaded."""
        most = self._parts.bounds.policies_max
        if len(self._policies) + sum(policy.users > 0 for policy in self._going) < most:
            return
        leaver = to_make_way(self, self._parts.outside.monotonic())
        if leaver is None:
            raise Overloaded(
                f"all {most} policies of this replica are in use; {name!r} may be asked for again"
            )
        log.info("the policy %s makes way for %s", leaver.name, name)
        self._seqs[leaver.name, leaver.made] = leaver.driver.machine.seq
        if len(self._seqs) > GONE_KNOWN:
            self._seqs.popitem(last=False)
        self._go(leaver)

    def hint(self, hint: Hint) -> None:
        """Nothing is fetched for a policy that is not here."""
        policy = self._policies.get(hint.policy)
        if policy is not None:
            policy.hint(hint)

    @contextmanager
    def serves(self, name: str) -> Iterator[Service]:
        """Within, it stays here. Raises PolicyNotLoaded."""
        with self.named(name).in_use(self._uses) as service:
            yield service

    def named(self, name: str) -> Policy:
        """One that serves. Raises PolicyNotLoaded."""
        policy = self._policies.get(name)
        if policy is None or not policy.serves:
            raise PolicyNotLoaded(f"the policy {name!r} is not loaded on this replica; retry this request")
        return policy

    def end(self, name: str, made: float) -> bool:
        """Forget a policy; requests that run go on to their end. Whether it was here."""
        self._note_end(name, made)
        policy = self._policies.get(name)
        if policy is None:
            # It may have made way, and left files.
            self._close(self._remove_files(name), f"end of the files of policy {name}")
        if policy is None or policy.made != made:
            return False
        self._go(policy)
        return True

    def _go(self, policy: Policy) -> None:
        del self._policies[policy.name]
        self._going.append(policy)
        policy.shut()
        self._close(self._end(policy), f"end of policy {policy.name}")
        self._parts.on_change()

    def _close(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=what)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note_end(self, name: str, made: float) -> None:
        newest = max(made, self._ended.pop(name, 0.0))
        if newest:
            self._ended[name] = newest
        if len(self._ended) > ENDED_KNOWN:
            del self._ended[next(iter(self._ended))]

    async def _end(self, policy: Policy) -> None:
        await policy.left()
        await policy.close()
        self._parts.engine.end_policy(policy.own_name)
        self._going.remove(policy)
        if policy.made <= self._ended.get(policy.name, 0.0):
            # It did not only make way.
            await self._remove_files(policy.name)

    async def _remove_files(self, name: str) -> None:
        """Unless another policy of the name has taken them over, or one that goes still has them."""
        if not any(policy.name == name for policy in self.everyone):
            await self._parts.files.source.remove_policy(name)

    def pause(self, paused: bool) -> None:
        self._paused = paused
        for policy in self.everyone:
            policy.gate.pause(paused)

    def reports(self) -> tuple[PolicyReport, ...]:
        return tuple(policy.report() for policy in self)

    async def close(self) -> None:
        """Of a boot that ends."""
        # Requests of ended ones go with the engine, and nobody waits for their clients.
        ended, self._policies, self._going = self.everyone, {}, []
        self._seqs.clear()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(policy.close() for policy in ended))

    def _driver_ended(self, policy: Policy, boot: Boot, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        log.error("the swap driver of policy %s failed", policy.name, exc_info=task.exception())
        self._parts.died(boot.id, f"the swap driver of policy {policy.name} failed: {task.exception()!r}")
