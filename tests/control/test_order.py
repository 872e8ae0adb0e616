"""Switching one by one: whose turn it is, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import reported
from tiers import examples

from midstream.core.reports import Reported
from midstream.core.types import Desired, Stage
from midstream.fleet.reconcile import decide, waits_staged
from midstream.fleet.switch_turns import SwitchTurn, next_turn
from midstream.ledger import DeploymentState
from midstream.replica.swap.attempts import GIVEN_UP_MAX
from midstream.replica.swap.table import SwapEvent, SwapMachine

NEXT = {
    Stage.FETCHING: SwapEvent.FETCHED, Stage.VERIFYING: SwapEvent.VERIFIED, Stage.STAGING: SwapEvent.STAGED,
    Stage.STAGED: SwapEvent.COMMIT, Stage.COMMITTING: SwapEvent.COMMITTED, Stage.CHECKING: SwapEvent.CHECKED,
}  # fmt: skip


def report(index: int, stage: Stage, **fields: Any) -> Reported:
    return reported(f"r{index}", stage=stage, **fields)


def turn(index: int) -> SwitchTurn:
    return SwitchTurn(f"r{index}", "b")


@pytest.mark.parametrize(
    ("reports", "staged", "last", "overdue", "whose"),
    [
        # Nobody waits for the slow one.
        ([Stage.FETCHING, Stage.STAGED, Stage.STAGED], {1, 2}, None, False, 1),
        # It was let go, and has not moved yet.
        ([Stage.STAGED, Stage.STAGED, Stage.STAGED], {0, 1, 2}, 1, False, 1),
        # It is not reached: another one.
        ([Stage.STAGED, Stage.STAGED, Stage.STAGED], {0, 1, 2}, 1, True, 0),
        # There is no other.
        ([Stage.FETCHING, Stage.STAGED], {1}, 1, True, 1),
        # After a restart it shows who has it.
        ([Stage.STAGED, Stage.COMMITTING], {0}, None, False, 1),
        # Until it is proved.
        ([Stage.STAGED, Stage.CHECKING], {0}, 1, False, 1),
        ([Stage.STAGED, Stage.IDLE], {0}, 1, False, 0),
        ([Stage.STAGED, Stage.ERROR], {0}, 1, False, 0),
        # A newer signal took it back.
        ([Stage.STAGED, Stage.FETCHING], {0}, 1, False, 0),
        # The first is staged for what nobody wants any more.
        ([Stage.STAGED, Stage.STAGED], {1}, None, False, 1),
        ([Stage.FETCHING, Stage.IDLE], set(), None, False, None),
        ([], set(), 1, False, None),
    ],
)  # fmt: skip
def test_whose_turn_it_is(
    reports: list[Stage], staged: set[int], last: int | None, overdue: bool, whose: int | None
) -> None:
    known = [report(i, stage) for i, stage in enumerate(reports)]
    names = {f"r{i}" for i in staged}
    found = next_turn(known, names, None if last is None else turn(last), overdue)
    assert found == (None if whose is None else turn(whose))


def test_a_closed_door_is_a_turn() -> None:
    """A sync switch that was let go waits, staged, for requests to end: a gateway that starts now must see that."""
    reports = [report(0, Stage.STAGED), report(1, Stage.STAGED, admitting=False)]
    assert next_turn(reports, {"r0", "r1"}, None) == turn(1)


def test_a_switch_that_waits_for_pinned_requests_keeps_its_turn() -> None:
    reports = [report(0, Stage.STAGED), report(1, Stage.STAGED, pinnable=False)]
    for last, overdue in ((None, False), (turn(1), False), (turn(1), True)):
        assert next_turn(reports, {"r0", "r1"}, last, overdue) == turn(1)


def test_a_new_boot_does_not_inherit_the_turn() -> None:
    reports = [report(0, Stage.STAGED), report(1, Stage.STAGED)]
    assert next_turn(reports, {"r0", "r1"}, SwitchTurn("r1", "an earlier boot")) == turn(0)


@dataclass
class Replica:
    """The real machine; what the gateway knows of it is `seen`, what was sent to it waits in `inbox`."""

    name: str
    machine: SwapMachine = field(default_factory=lambda: SwapMachine(clock=lambda: 1.0))
    boots: int = 0
    admitted: bool = True
    inbox: list[Desired] = field(default_factory=list)
    seen: Reported | None = None
    failing: bool = False
    # Held attempts in a row that were given up, as the driver counts them.
    in_vain: int = 0

    def step(self) -> None:
        machine = self.machine
        held = machine.stage is Stage.STAGED and machine.held
        keeps = (
            held and self.in_vain >= GIVEN_UP_MAX and machine.accepted is not None and machine.accepted.hold
        )
        free = machine.stage in (Stage.IDLE, Stage.ERROR) or machine.supersedable
        if machine.behind and free and not keeps and not self.let_go:
            self.in_vain += held
            machine.begin()
        elif machine.stage is Stage.VERIFYING and self.failing:
            machine.fail("it is broken")
        elif machine.stage in NEXT and not (machine.stage is Stage.STAGED and machine.held):
            machine.advance(NEXT[machine.stage])
            if machine.stage is Stage.COMMITTING:
                self.in_vain = 0

    @property
    def let_go(self) -> bool:
        """What it has staged switches, though something newer is wanted."""
        machine = self.machine
        return machine.stage is Stage.STAGED and not machine.held and self.in_vain >= GIVEN_UP_MAX

    def report(self) -> Reported:
        machine = self.machine
        return reported(
            replica=self.name,
            boot=f"{self.name}-boot-{self.boots}",
            ready=True,
            snapshot=machine.serving,
            generation=machine.accepted.generation if machine.accepted else 0,
            stage=machine.stage,
            target=machine.target.snapshot if machine.target and machine.stage is not Stage.IDLE else None,
            error=machine.error,
            held=machine.stage is Stage.STAGED and machine.held,
            transitions=tuple(machine.transitions),
        )

    @property
    def switching(self) -> bool:
        staged_and_let_go = self.let_go or (
            self.machine.stage is Stage.STAGED and not self.machine.held and not self.machine.behind
        )
        return self.machine.stage in (Stage.COMMITTING, Stage.CHECKING) or staged_and_let_go


class Fleet:
    """Replicas, messages and reports that take their time, and the decisions of a gateway over them."""

    def __init__(self, count: int) -> None:
        self.replicas = [Replica(f"r{i}") for i in range(count)]
        self.generation = 0
        self.state = DeploymentState(None)
        # The last one signalled is the last.
        self.since: dict[str, int] = {}
        self.turn: SwitchTurn | None = None
        self.first: frozenset[str] = frozenset()

    def signal(self, back: int = 0) -> None:
        """A new snapshot, or the one that was signalled so many signals ago."""
        self.first = self.first or frozenset(replica.report().boot for replica in self.replicas)
        self.generation += 1
        known = [*self.since][-back:][:1] if back else []
        name = known[0] if known else f"s{self.generation}"
        self.since[name] = self.since.pop(name, self.generation)
        desired = Desired(snapshot=name, generation=self.generation, url="file:///b")
        self.state = DeploymentState(desired, since={name: self.since[name]}, first_boots=self.first)

    def decide(self) -> None:
        in_rotation = [r.seen for r in self.replicas if r.admitted and r.seen is not None]
        staged = {seen.replica for seen in in_rotation if waits_staged(self.state, seen)}
        self.turn = next_turn(in_rotation, staged, self.turn)
        for replica in self.replicas:
            queues = replica.admitted
            mine = (self.turn is not None and self.turn.replica == replica.name) if queues else None
            action = decide(self.state, replica.seen, replica.admitted, 0, mine)
            replica.admitted = action.admit
            if action.send is not None:
                replica.inbox = [action.send]

    def do(self, what: str, index: int) -> None:
        replica = self.replicas[index % len(self.replicas)]
        match what:
            case "signal":
                self.signal()
            case "signal back":
                self.signal(back=2 + index)
            case "step":
                replica.step()
            case "hear":
                replica.seen = replica.report()
            case "deliver" if replica.inbox:
                replica.machine.accept(replica.inbox.pop())
            case "lose message":
                replica.inbox.clear()
            case "decide":
                self.decide()
            case "fail":
                replica.failing = not replica.failing
            case "reboot":
                replica.machine = SwapMachine(clock=lambda: 1.0)
                replica.boots, replica.in_vain = replica.boots + 1, 0
                replica.inbox.clear()
                replica.seen, replica.admitted = None, False
            case "restart gateway":
                self.turn = None

    def until_quiet(self) -> None:
        for _ in range(40 * len(self.replicas)):
            for index in range(len(self.replicas)):
                for what in ("deliver", "step", "hear", "decide"):
                    self.do(what, index)


WHAT = [
    "signal",
    "step",
    "step",
    "step",
    "hear",
    "hear",
    "deliver",
    "deliver",
    "decide",
    "decide",
    "lose message",
    "signal back",
]
ORDINARY = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 2)), max_size=120)
ANYTHING = st.lists(
    st.tuples(st.sampled_from([*WHAT, "fail", "reboot", "restart gateway"]), st.integers(0, 2)), max_size=120
)


@settings(max_examples=examples(150), deadline=None)
@given(count=st.integers(1, 3), events=ORDINARY)
def test_no_two_replicas_switch_at_once_however_slow_messages_and_reports_are(
    count: int, events: Any
) -> None:
    fleet = Fleet(count)
    for index in range(count):
        fleet.do("hear", index)
    fleet.signal()
    for what, index in events:
        fleet.do(what, index)
        assert sum(replica.switching for replica in fleet.replicas) <= 1
    for _ in range(40 * count):
        for index in range(count):
            for what in ("deliver", "step", "hear", "decide"):
                fleet.do(what, index)
                assert sum(replica.switching for replica in fleet.replicas) <= 1
    assert {replica.machine.serving for replica in fleet.replicas} == {fleet.state.snapshot}


@settings(max_examples=examples(150), deadline=None)
@given(count=st.integers(1, 3), events=ANYTHING)
def test_whatever_happens_everybody_gets_there_or_fails(count: int, events: Any) -> None:
    fleet = Fleet(count)
    for index in range(count):
        fleet.do("hear", index)
    fleet.signal()
    for what, index in events:
        fleet.do(what, index)
    fleet.until_quiet()
    for replica in fleet.replicas:
        failed = replica.machine.stage is Stage.ERROR
        assert failed or (
            replica.machine.serving == fleet.state.snapshot and replica.machine.stage is Stage.IDLE
        )


def test_replicas_that_are_signalled_faster_than_they_switch_get_on_one_by_one() -> None:
    fleet = Fleet(3)
    for _ in range(40):
        fleet.signal()
        for what in ("hear", "decide", *["deliver", "step", "hear", "decide"] * 6):
            for index in range(3):
                fleet.do(what, index)
                assert sum(replica.switching for replica in fleet.replicas) <= 1
    assert all(replica.machine.loaded is not None for replica in fleet.replicas), "still on the base weights"
    fleet.until_quiet()
    assert {replica.machine.serving for replica in fleet.replicas} == {"s40"}


def test_together_nobody_is_held() -> None:
    state = DeploymentState(Desired(snapshot="a", generation=1, url="file:///b"), since={"a": 1})
    fresh = report(0, Stage.IDLE)
    held, released = decide(state, fresh, True, 0, False).send, decide(state, fresh, True, 0, None).send
    assert held is not None
    assert released is not None
    assert (held.hold, released.hold) == (True, False)


def test_what_a_replica_kept_staged_is_switched_to_in_its_turn_when_it_is_wanted_again() -> None:
    """Not given up and loaded anew without a turn: the signal back may not be known under what is staged."""
    fleet = Fleet(2)
    replica = fleet.replicas[0]
    replica.in_vain = GIVEN_UP_MAX
    fleet.signal()
    for what in ("hear", "decide", "deliver", "step", "step", "step", "step", "hear"):
        fleet.do(what, 0)
    assert (replica.machine.stage, replica.machine.held) == (Stage.STAGED, True)
    fleet.turn = turn(1)
    fleet.signal()
    action = decide(fleet.state, replica.seen, True, 0, False)
    assert action.send is not None
    replica.machine.accept(action.send)
    fleet.do("hear", 0)
    fleet.signal(back=2)
    assert fleet.state.snapshot == "s1"
    action = decide(fleet.state, replica.seen, True, 0, True)
    assert action.send is not None
    replica.machine.accept(action.send)
    replica.step()
    assert (replica.machine.stage, replica.machine.target) == (Stage.COMMITTING, action.send)
