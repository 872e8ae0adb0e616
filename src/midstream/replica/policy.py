"""One policy on a replica: what decides which requests enter, what serves them, and what swaps its snapshots.

Owns: the one assembly of gate, pins, namespaces, checker, swap driver and service. The deployment's own weights are the policy
with the empty name; what another policy has instead is data (`Terms`).
Always holds:
- Driver and service are of one boot. Gate, pins, namespaces and hints live as long as the policy: the deployment's own as long
  as the replica, another one for one boot.
- Between boots the service of the last boot stays, behind a gate that is down.
- A policy besides the deployment's own serves nothing before its first switch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from midstream.core.errors import AnotherBoot, PolicyNotLoaded, ReplicaUnavailable
from midstream.core.reports import PolicyReport
from midstream.core.served_names import ServedNames, names_of
from midstream.core.types import BASE_SNAPSHOT, POLICIES_MAX, ModelInfo, Stage
from midstream.engine.base import Engine, Slot
from midstream.replica.gate import REQUESTS_MAX, Door, Gate
from midstream.replica.namespaces import Namespaces
from midstream.replica.pins import ONE, PIN_DRAIN_S, Pins, Residency
from midstream.replica.service import KeptAcrossBoots, Outside, Service
from midstream.replica.sessions import SESSION_IDLE_S
from midstream.replica.swap.checker import Checker
from midstream.replica.swap.driver import SWAPS_REPORTED, Entrance, SwapCallbacks, SwapDriver
from midstream.replica.swap.hints import Hints
from midstream.replica.swap.history import SwapHistory
from midstream.replica.swap.source import Files
from midstream.replica.swap.table import TRANSITIONS_KEPT, SwapMachine
from midstream.replica.swap.ties import Ties
from midstream.replica.text.chat import TextModel
from midstream.replica.turns.tree import BYTES_MAX

#: Stage changes of a policy that a report has. A report is sent whole, with those of all policies.
TRANSITIONS_REPORTED = 8
#: How long a policy that was loaded is kept for its first request.
UNUSED_S = 2.0
TiesOf = Callable[[ModelInfo], Ties]


@dataclass(frozen=True)
class Bounds:
    """requests_max: choices inside or waiting at a policy's gate; a request that would bring more gets 429. session_idle_s:
    how long a session may be without a turn before it is closed. pin_drain_s: how long an async swap waits for requests that
    are pinned to what serves. residency: of full snapshots; of a policy's only the number counts. policies_max: held at once.
    turns_bytes_max: of the tokens of all sessions' turns. kv_budget: the share of the KV cache that sessions may claim; 0: none
    waits for it. kv_waiting_max: sessions that may wait for it.
    """

    requests_max: int = REQUESTS_MAX
    session_idle_s: float = SESSION_IDLE_S
    pin_drain_s: float = PIN_DRAIN_S
    residency: Residency = ONE
    policies_max: int = POLICIES_MAX
    turns_bytes_max: int = BYTES_MAX
    kv_budget: float = 0.95
    kv_waiting_max: int = 4096


@dataclass(frozen=True)
class PolicyParts:
    """What all policies of a replica share. boot: the one that serves now.

    on_served: takes the model, the snapshot that serves it, and its files.
    died: takes the boot and why its engine is gone. driver_ended: takes the boot, the policy and the task of its driver.
    """

    engine: Engine
    text: TextModel
    names: ServedNames
    files: Files
    kept: Callable[[], KeptAcrossBoots]
    outside: Outside
    bounds: Bounds
    boot: Callable[[], str]
    on_change: Callable[[], None]
    on_settled: Callable[[], None]
    on_swapped: Callable[[SwapHistory], None]
    on_served: Callable[[str, str, Path], None]
    died: Callable[[str, str], None]
    driver_ended: Callable[[str, str, asyncio.Task[None]], None]


@dataclass(frozen=True)
class Terms:
    """What differs between policies. key: what the engine calls it. unsound: the refusal while weights that failed their check
    serve. transitions_reported, swaps_reported: stage changes and timings that a report has. ties: to others, of an engine."""

    names: ServedNames
    key: str
    slot: Slot
    files: Files
    residency: Residency
    unsound: type[ReplicaUnavailable]
    transitions_reported: int
    swaps_reported: int
    ties: TiesOf


def deployments_own(parts: PolicyParts, ties: TiesOf) -> Terms:
    residency = parts.bounds.residency
    reported = TRANSITIONS_KEPT, SWAPS_REPORTED
    return Terms(parts.names, "", parts.engine, parts.files, residency, AnotherBoot, *reported, ties)


def besides(parts: PolicyParts, name: str, number: int, ties: TiesOf) -> Terms:
    """number: never the same twice in a replica's life. One of an old name is another policy for the engine, too."""
    key = f"{name}#{number}"
    names = names_of(parts.names, name)
    source = parts.files.source.of_policy(name)
    files = replace(parts.files, source=source, hints=Hints(source.prefetch))
    residency = Residency(parts.bounds.residency.snapshots)
    # Weights of a policy that failed their check say nothing of the whole replica.
    slot, reported = parts.engine.slot(key), (TRANSITIONS_REPORTED, 1)
    return Terms(names, key, slot, files, residency, PolicyNotLoaded, *reported, ties)


class ServedPolicy:
    """made: as Desired has it."""

    driver: SwapDriver

    def __init__(self, name: str, made: float, parts: PolicyParts, terms: Terms) -> None:
        self.name = name
        self.made = made
        #: Requests that use it, also before they pass the gate.
        self.users = 0
        #: A counter over all policies: the greatest was used last.
        self.used_at = 0
        #: When its last load ended. None once a request has used that, and before there is one.
        self.unused_since: float | None = None
        #: None before the first start.
        self.service: Service | None = None
        self.key, self.hints = terms.key, terms.files.hints
        self._parts, self._terms = parts, terms
        self._driving: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._left.set()
        outside, bounds = parts.outside, parts.bounds
        self.gate = Gate(parts.on_change, bounds.requests_max, terms.unsound)
        self.pins = Pins(parts.on_change, bounds.pin_drain_s, terms.residency, terms.slot.retain)
        self.namespaces = Namespaces(idle_s_max=bounds.session_idle_s, clock=outside.monotonic)
        self._checker = Checker(parts.engine, outside.new_boot, slot=terms.slot, policy=terms.key)

    def __repr__(self) -> str:
        return f"ServedPolicy({self.name!r}, {self.driver.machine!r}, {self.gate!r})"

    @property
    def stands_on(self) -> int:
        accepted = self.driver.machine.accepted
        return 0 if accepted is None else accepted.stands_on

    @property
    def serves(self) -> bool:
        return self.driver.machine.serving != BASE_SNAPSHOT

    def begin(self, seq: int = 0) -> None:
        """A boot begins, and takes note of targets from now on. seq: of its first stage change."""
        parts, boot = self._parts, self._parts.boot()
        self.driver = SwapDriver(
            engine=self._terms.slot,
            files=self._terms.files,
            entrance=Entrance(self.gate, self.pins, self.namespaces),
            machine=SwapMachine(parts.outside.clock, seq),
            checker=self._checker,
            monotonic=parts.outside.monotonic,
            callbacks=SwapCallbacks(
                self._moved,
                parts.on_settled,
                lambda reason: parts.died(boot, reason),
                parts.on_swapped,
                partial(parts.on_served, self._terms.names.model),
            ),
        )

    def start(self, info: ModelInfo) -> None:
        """The boot's engine runs."""
        parts, boot = self._parts, self._parts.boot()
        self.driver.info, self.driver.ties = info, self._terms.ties(info)
        self.pins.begin(able=info.card.has("resident_snapshots"))
        self.service = Service(
            engine=parts.engine,
            info=info,
            text=parts.text,
            names=self._terms.names,
            kept=parts.kept(),
            pins=self.pins,
            namespaces=self.namespaces,
            gate=self.gate,
            clock=parts.outside.clock,
            monotonic=parts.outside.monotonic,
            random_seed=parts.outside.random_seed,
            boot=boot,
            boot_now=parts.boot,
            serving=lambda: self.driver.machine.serving,
            files_of=self.driver.meanings.files,
            on_engine_death=lambda reason: parts.died(boot, reason),
            policy=self.key,
            proved=lambda: self.driver.machine.sound and self.driver.machine.checked,
        )

    async def prove_base(self, info: ModelInfo) -> None:
        """Check the base weights, which serve from the start on. Raises NotSound, EngineDied."""
        self.driver.check = await self._checker.check(info, BASE_SNAPSHOT, 0)

    def drive(self) -> None:
        """Take snapshots until `shut`."""
        called = f"swap driver of {self.name}" if self.name else "swap driver"
        self._driving = asyncio.create_task(self.driver.run(), name=called)
        self._driving.add_done_callback(partial(self._parts.driver_ended, self._parts.boot(), self.name))

    def _moved(self) -> None:
        if self.driver.machine.stage is Stage.CHECKING:
            self.unused_since = self._parts.outside.monotonic()
        self.driver.ties.moved()
        self._parts.on_change()

    @contextmanager
    def in_use(self, uses: Iterator[int]) -> Iterator[Service]:
        """Within: a request uses it. uses: gives the next number of a use."""
        assert self.service is not None
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

    def abort(self, ids: tuple[str, ...] | None, *, held: bool) -> int:
        """As Service.abort."""
        return 0 if self.service is None else self.service.abort(ids, held=held)

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
            error=machine.error or self._waits(),
            refused=machine.refused,
            in_flight=self.gate.inside,
            held=machine.stage is Stage.STAGED and machine.held,
            admitting=self.gate.door is not Door.CLOSED,
            pinnable=self.pins.coming is None,
            check=self.driver.check,
            contents=self.driver.contents,
            swaps=self.driver.swaps[-self._terms.swaps_reported :],
            transitions=tuple(machine.transitions)[-self._terms.transitions_reported :],
            resident=self.pins.resident(machine.serving),
        )

    def _waits(self) -> str | None:
        """Why the target is not loaded yet, where others are the reason."""
        machine = self.driver.machine
        if machine.stage is not Stage.STAGING or machine.target is None:
            return None
        return self.driver.ties.waits(machine.target)

    def reset_cache(self, event: str) -> None:
        """No new request finds what is cached now. event: as Namespaces has it."""
        self.namespaces.reset(event)
        self._terms.slot.abandon_kv()

    def shut(self) -> None:
        """Take no more snapshots. Requests that use the policy continue."""
        # A request that ends later keeps nothing in the engine.
        self.pins.begin(able=False)
        if self._driving is not None:
            self._driving.cancel()

    async def stopped(self) -> None:
        """Returns when its driver has ended."""
        if self._driving is not None:
            await asyncio.wait((self._driving,))

    async def close(self) -> None:
        """Of one that is held for one boot, and has files of its own."""
        self.gate.set(Door.DOWN)
        self.shut()
        await self.hints.close()
        await self.stopped()
        await self._terms.files.source.close()
