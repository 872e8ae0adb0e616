"""The life of an attempt: its table, and the driver over a fake engine in any order of signals, outcomes and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from diagrams import mermaid
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from replica_fakes import FakeEngine
from tiers import examples

from midstream.core.errors import SnapshotCorrupt
from midstream.core.table import IllegalMove
from midstream.core.types import (
    BASE_SNAPSHOT,
    Desired,
    Hint,
    ModelInfo,
    SnapshotCheck,
    Stage,
    SwapTiming,
)
from midstream.core.versions import ConstraintNotMet, VersionConstraint
from midstream.engine.base import EngineDied, StagingFailed
from midstream.replica.gate import Door, Gate
from midstream.replica.namespaces import Namespaces
from midstream.replica.pins import Asked, Pins
from midstream.replica.swap.attempts import (
    ATTEMPTS,
    GIVEN_UP_MAX,
    AttemptAction,
    AttemptEvent,
    AttemptPhase,
    Attempts,
)
from midstream.replica.swap.checker import Checker, NotSound
from midstream.replica.swap.driver import Entrance, SwapCallbacks, SwapDriver
from midstream.replica.swap.hints import Hints
from midstream.replica.swap.source import Files, SnapshotSource
from midstream.replica.swap.table import SwapEvent as TableEvent
from midstream.replica.swap.table import SwapMachine
from midstream.snapshots.arc2.files import Making

IN_WORK = (
    AttemptPhase.PREPARING,
    AttemptPhase.HELD,
    AttemptPhase.WAITING,
    AttemptPhase.APPLYING,
    AttemptPhase.CHECKING,
)
AFTER = (AttemptPhase.APPLYING, AttemptPhase.CHECKING)
GIVEN_UP = (AttemptPhase.SUPERSEDED, AttemptPhase.STOPPED)
BETWEEN = (AttemptPhase.RESTING, AttemptPhase.NEXT)


def wanted(snapshot: str, generation: int, **more: Any) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}", **more)


# -- the table


def test_the_diagram_shows_the_whole_table() -> None:
    lines = mermaid(ATTEMPTS).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> resting"]
    assert "    preparing --> superseded: newer / cancel" in lines
    assert len(lines) == len(ATTEMPTS) + 2


def test_every_phase_is_reached_and_every_attempt_in_work_can_fail() -> None:
    seen, frontier = {AttemptPhase.RESTING}, [AttemptPhase.RESTING]
    while frontier:
        frontier = [to for (at, _), (to, _) in ATTEMPTS.items() if at in frontier and to not in seen]
        seen |= set(frontier)
    assert seen == set(AttemptPhase)
    for phase in IN_WORK:
        assert ATTEMPTS[phase, AttemptEvent.FAILED] == (AttemptPhase.RESTING, AttemptAction.REPORT_ERROR)


def test_a_switch_that_has_begun_is_not_given_up() -> None:
    left = {event: to for (at, event), (to, _) in ATTEMPTS.items() if at is AttemptPhase.APPLYING}
    assert left == {
        AttemptEvent.APPLIED: AttemptPhase.CHECKING,
        AttemptEvent.FAILED: AttemptPhase.RESTING,
        AttemptEvent.LOST_TRACK: AttemptPhase.IN_DOUBT,
    }


def test_an_attempt_that_was_given_up_changes_nothing_more() -> None:
    for (at, event), (to, action) in ATTEMPTS.items():
        if at in GIVEN_UP and event is not AttemptEvent.ENDED:
            assert to is at
            assert action in (AttemptAction.ABANDON, AttemptAction.NOTHING)


def test_a_move_that_the_table_does_not_have_raises_and_changes_nothing() -> None:
    for phase, event in product(AttemptPhase, AttemptEvent):
        attempts = Attempts(SwapMachine(lambda: 0.0))
        attempts.phase = phase
        if (phase, event) not in ATTEMPTS:
            with pytest.raises(IllegalMove, match=f"'{event}' at '{phase}'"):
                attempts.move(event)
            assert attempts.phase is phase


@pytest.mark.parametrize("held", [False, True])
def test_so_many_attempts_in_a_row_are_given_up_and_the_next_is_finished(held: bool) -> None:
    machine = SwapMachine(lambda: 0.0)
    attempts = Attempts(machine)

    def begin(generation: int) -> None:
        machine.accept(wanted(f"v{generation}", generation, hold=held))
        assert attempts.begin() is not None
        if held:
            for event in (TableEvent.FETCHED, TableEvent.VERIFIED, TableEvent.STAGED):
                attempts.progress(event)

    for generation in range(GIVEN_UP_MAX):
        begin(generation)
        machine.accept(wanted(f"v{generation + 1}", generation + 1, hold=held))
        assert attempts.signalled() is AttemptAction.CANCEL
        attempts.ended()
        assert attempts.due
    begin(GIVEN_UP_MAX)
    machine.accept(wanted("newer", GIVEN_UP_MAX + 1, hold=held))
    assert attempts.signalled() is AttemptAction.NOTHING
    assert attempts.phase is (AttemptPhase.HELD if held else AttemptPhase.PREPARING)


# -- the driver


class Steps:
    """What waits for an outcome: at most one fetch, stage, commit or check. stubborn: a cancellation does not end it."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[None]] = {}
        self.stubborn = False

    async def take(self, name: str) -> None:
        assert not self.open, "one step at a time"
        self.open[name] = asyncio.get_running_loop().create_future()
        try:
            await self.open[name]
        except asyncio.CancelledError:
            if not self.stubborn or name == "commit":
                raise
        finally:
            del self.open[name]


class SteppedEngine(FakeEngine):
    def __init__(self, steps: Steps, before_commit: Callable[[str], None]) -> None:
        super().__init__()
        self._steps, self._before_commit = steps, before_commit

    async def stage(self, snapshot: str, directory: Path) -> None:
        await self._steps.take("stage")
        self.staged = snapshot

    async def commit(self, snapshot: str) -> SwapTiming:
        self._before_commit(snapshot)
        await self._steps.take("commit")
        self.serving, self.staged = snapshot, None
        self.switches.append(snapshot)
        return SwapTiming(snapshot=snapshot)


class SteppedSource(SnapshotSource):
    chains: Any = SimpleNamespace(meet=lambda addresses: None)

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def fetch(
        self, desired: Desired, *, refetch: bool = False, making: Making | None = None
    ) -> Path | None:
        await self._steps.take("fetch")
        return Path("/cache") / desired.snapshot

    async def rebuild(self, desired: Desired, making: Making | None = None) -> Path:
        raise AssertionError("only whole snapshots here")

    async def verify(self, path: Path, desired: Desired) -> None: ...

    async def release(self, keep: Sequence[Desired]) -> None:
        await asyncio.sleep(0)

    async def prefetch(self, hint: Hint) -> None: ...


class SteppedChecker:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def check(
        self, info: ModelInfo, snapshot: str, generation: int, *, before: SnapshotCheck | None = None
    ) -> SnapshotCheck:
        await self._steps.take("check")
        return SnapshotCheck(snapshot=snapshot, generation=generation, weights="w", canary=(-1.0,))


#: What a step may raise, as its port says, and a bug.
FAILURES: dict[str, list[type[Exception]]] = {
    "fetch": [SnapshotCorrupt, KeyError],
    "stage": [StagingFailed, EngineDied],
    "commit": [StagingFailed, OSError, EngineDied],
    "check": [NotSound, EngineDied],
}


class Swaps(RuleBasedStateMachine):
    """One driver at a time; a boot follows the one before it. Requests are inside, some of them pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.steps = Steps()
        self.generation = 0
        self.signals: list[Desired] = []
        self.requests: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        self.wrong: list[str] = []
        self.died = False

    def happens(self, action: Callable[[], object] = lambda: None) -> None:
        """In the loop; what is due after it runs, too."""

        async def play() -> None:
            action()
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(play())

    @initialize(proved=st.booleans())
    def start(self, proved: bool) -> None:
        """proved: the engine proves what it stages."""
        self.proved = proved
        self.gate = Gate(lambda: None)
        self.pins = Pins(lambda: None)
        self.happens(self.boot)

    def boot(self) -> None:
        """A new driver, on the base weights."""
        self.died = False
        self.engine = SteppedEngine(self.steps, self.before_commit)
        self.engine.proves_staged = self.proved
        self.gate.set(Door.OPEN)
        self.namespaces = Namespaces()
        source = SteppedSource(self.steps)
        self.driver = SwapDriver(
            engine=self.engine,
            files=Files(source, Hints(source.prefetch), Path("/base")),
            entrance=Entrance(self.gate, self.pins, self.namespaces),
            machine=SwapMachine(lambda: 0.0),
            checker=cast(Checker, SteppedChecker(self.steps)),
            monotonic=lambda: 0.0,
            callbacks=SwapCallbacks(lambda: None, lambda: None, lambda _: setattr(self, "died", True)),
        )
        self.driver.info = self.engine.info
        self.running = self.loop.create_task(self.driver.run())

    def before_commit(self, snapshot: str) -> None:
        machine = self.driver.machine
        if self.phase is not AttemptPhase.APPLYING or machine.stage is not Stage.COMMITTING:
            self.wrong.append(f"a switch to {snapshot} at {self.phase}")
        if self.gate.door is Door.OPEN:
            self.wrong.append("newcomers enter while the engine switches")
        assert machine.target is not None
        if machine.target.transition == "SYNC" and self.gate.inside:
            self.wrong.append("a sync switch under requests")
        elif not machine.same_files(machine.target) and len(self.pins):
            self.wrong.append("a switch under pinned requests")

    @property
    def phase(self) -> AttemptPhase:
        return self.driver._attempts.phase

    @property
    def settled(self) -> Door:
        return Door.OPEN if self.driver.machine.sound else Door.UNSOUND

    def alive(self) -> bool:
        return not self.running.done()

    # Signals

    @rule(
        data=st.data(),
        snapshot=st.sampled_from([BASE_SNAPSHOT, "v1", "v2", "v3"]),
        how=st.sampled_from(["new", "new", "held", "withdrawn", "let go"]),
        sync=st.booleans(),
    )
    def signal(self, data: st.DataObject, snapshot: str, how: str, sync: bool) -> None:
        self.generation += 1
        target = self.driver.machine.target
        asked = wanted(snapshot, self.generation, hold=how == "held", transition="SYNC" if sync else "ASYNC")
        if how == "withdrawn" and self.signals:
            asked = data.draw(st.sampled_from(self.signals[-3:]))
        elif how == "let go" and self.phase is AttemptPhase.HELD and target is not None:
            newer = replace(asked, hold=True, let_go=target.generation)
            asked = data.draw(st.sampled_from([newer, replace(target, hold=False)]))
        self.signals.append(asked)
        self.happens(lambda: self.driver.desire(asked))

    # Outcomes

    def succeed(self, times: int) -> None:
        for _ in range(times):
            for outcome in list(self.steps.open.values()):
                self.happens(lambda outcome=outcome: outcome.done() or outcome.set_result(None))  # type: ignore[misc]

    @precondition(lambda self: self.steps.open)
    @rule(data=st.data(), times=st.integers(0, 4), fails=st.booleans())
    def go_on(self, data: st.DataObject, times: int, fails: bool) -> None:
        """So many steps succeed, and perhaps the one after them fails."""
        self.succeed(times)
        if fails and self.steps.open:
            ((name, outcome),) = self.steps.open.items()
            error = data.draw(st.sampled_from(FAILURES[name]))(f"{name} fails")
            self.happens(lambda: outcome.done() or outcome.set_exception(error))

    # Requests

    @rule(data=st.data(), enters=st.booleans(), pinned=st.booleans())
    def come_or_leave(self, data: st.DataObject, enters: bool, pinned: bool) -> None:
        if self.requests and not enters:
            _, leave = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
            self.happens(leave.set)
        elif self.gate.door is Door.OPEN and not (pinned and self.pins.coming) and len(self.requests) < 4:
            leave = asyncio.Event()
            request = self.pinned_request(leave) if pinned else self.request(leave)
            self.happens(lambda: self.requests.append((self.loop.create_task(request), leave)))

    async def request(self, leave: asyncio.Event) -> None:
        with self.gate.admitted():
            await leave.wait()

    async def pinned_request(self, leave: asyncio.Event) -> None:
        serving = self.driver.machine.serving
        asked = Asked("m", VersionConstraint(serving), None)
        with self.gate.admitted(), contextlib.suppress(ConstraintNotMet):
            async with self.pins.hold(asked, serving):
                await leave.wait()

    @rule(stubborn=st.booleans(), patient=st.booleans())
    def change(self, stubborn: bool, patient: bool) -> None:
        """How steps take a cancellation, and how long pinned requests may take."""
        self.steps.stubborn = stubborn
        self.pins._drain_s = 3600.0 if patient else 0.0

    # Ends

    @rule(reset=st.booleans())
    def end(self, reset: bool) -> None:
        """The driver is cancelled, or the replica starts a new boot: it closes the engine, so that a step ends, and waits
        for the driver."""
        if self.alive():
            self.happens(self.running.cancel)
        if self.alive() and self.phase in (AttemptPhase.PREPARING, AttemptPhase.HELD, AttemptPhase.WAITING):
            self.wrong.append(f"the attempt goes on at {self.phase} though the driver is to end")
        if reset or not self.alive():
            self.reset()

    def reset(self) -> None:
        self.close()
        self.happens(self.boot)

    def close(self) -> None:
        self.happens(self.running.cancel)
        for _ in range(10):
            for outcome in list(self.steps.open.values()):
                self.happens(
                    lambda outcome=outcome: outcome.done() or outcome.set_exception(EngineDied("closed"))
                )  # type: ignore[misc]
        assert self.running.done(), "a driver whose steps end comes to its end"
        if not self.running.cancelled():
            assert isinstance(self.running.exception(), OSError), (
                "only a switch that is in doubt ends a driver"
            )
            assert self.phase is AttemptPhase.IN_DOUBT

    # What holds

    @invariant()
    def nothing_went_wrong(self) -> None:
        assert self.wrong == []

    @invariant()
    def what_is_told_is_what_the_engine_serves(self) -> None:
        if hasattr(self, "driver"):
            assert self.driver.machine.serving == self.engine.serving
            assert self.namespaces.admit(None) == len(self.engine.switches)

    @invariant()
    def one_attempt_at_most_and_nothing_is_left_of_it(self) -> None:
        if not hasattr(self, "driver"):
            return
        attempts = [task for task in asyncio.all_tasks(self.loop) if task.get_name().startswith("swap to")]
        assert len(attempts) <= 1
        if attempts:
            return
        # A newer target gives up the check that a driver which is to end still waits for.
        over = () if self.alive() else (AttemptPhase.SUPERSEDED,)
        assert self.phase in (*BETWEEN, AttemptPhase.STOPPED, AttemptPhase.IN_DOUBT, *over)
        assert (self.engine.staged, self.driver.quiet, self.pins.coming) == (None, False, None)
        assert self.gate.door is self.settled
        if self.alive():
            assert not self.driver._attempts.due

    @invariant()
    def both_tables_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        preparing = (Stage.FETCHING, Stage.REBUILDING, Stage.VERIFYING, Stage.STAGING)
        stages = {
            AttemptPhase.PREPARING: preparing,
            AttemptPhase.HELD: (Stage.STAGED,),
            AttemptPhase.WAITING: (Stage.STAGED,),
            AttemptPhase.APPLYING: (Stage.COMMITTING,),
            AttemptPhase.CHECKING: (Stage.CHECKING,),
            AttemptPhase.RESTING: (Stage.IDLE, Stage.ERROR),
            AttemptPhase.IN_DOUBT: (Stage.ERROR,),
        }
        assert self.driver.machine.stage in stages.get(self.phase, tuple(Stage))
        closed = (
            (AttemptPhase.WAITING, AttemptPhase.APPLYING) if self.proved else (AttemptPhase.WAITING, *AFTER)
        )
        assert self.gate.door is self.settled or self.phase in closed

    @invariant()
    def nobody_enters_under_weights_that_nobody_has_looked_at(self) -> None:
        if hasattr(self, "driver") and self.gate.door is Door.OPEN:
            assert self.driver.machine.sound
            assert self.proved or self.driver.machine.checked

    def teardown(self) -> None:
        """However it went, the next signal is served."""
        if not hasattr(self, "driver"):
            return
        for _, leave in self.requests:
            self.happens(leave.set)
        if self.died or not self.alive() or self.running.cancelling():
            self.reset()
        self.generation += 1
        self.happens(lambda: self.driver.desire(wanted("last", self.generation)))
        machine = self.driver.machine
        self.succeed(20)
        assert (machine.serving, machine.stage, machine.sound) == ("last", Stage.IDLE, True)
        self.close()
        self.loop.close()


TestSwaps = Swaps.TestCase
TestSwaps.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
