"""The life of one attempt to serve a target, as a table. Pure; replica/swap/driver.py does the I/O.

Always holds: every move is one entry of `ATTEMPTS`, any other raises; an attempt in APPLYING is never given up; one that was
given up takes no further step; a target that failed is not tried again until it is asked for again; after `GIVEN_UP_MAX`
attempts in a row that were given up, the next one is finished. Otherwise a trainer that signals faster than a load takes would
keep its replicas on old weights for ever.
"""

from __future__ import annotations

import enum

from midstream.core.errors import (
    SnapshotCorrupt,
    SnapshotIncompatible,
    SnapshotMissing,
    SnapshotNotFinite,
)
from midstream.core.table import Table
from midstream.core.types import Desired
from midstream.engine.base import EngineDied, StagingFailed, WeightsRefused
from midstream.replica.swap import table
from midstream.replica.swap.checker import ScoresNotFinite
from midstream.replica.swap.table import SwapMachine
from midstream.snapshots.content import by_content

#: Attempts in a row that may be given up for newer targets. Those given up while HELD are counted by themselves.
GIVEN_UP_MAX = 2
#: Failures for which the weights are at fault, whatever replica loads them.
REFUSALS = (SnapshotIncompatible, SnapshotNotFinite, WeightsRefused, ScoresNotFinite)


class AttemptPhase(enum.StrEnum):
    #: No attempt is in work, or its task has nothing left to do.
    RESTING = "resting"
    #: Files are fetched, rebuilt and verified, and the engine stages them.
    PREPARING = "preparing"
    #: Staged; other replicas switch first.
    HELD = "held"
    #: Staged; requests that may not see the switch have to end.
    WAITING = "waiting"
    #: The engine switches.
    APPLYING = "applying"
    CHECKING = "checking"
    #: Given up for a newer target; its task cleans up.
    SUPERSEDED = "superseded"
    #: It was superseded and has cleaned up; the newest target is to be taken up, also one that was loaded before.
    NEXT = "next"
    #: Given up because the driver ends; its task cleans up.
    STOPPED = "stopped"
    #: The engine may have switched or not, so the boot is over.
    IN_DOUBT = "in_doubt"


class AttemptEvent(enum.StrEnum):
    BEGUN = "begun"
    #: The target serves already.
    SERVES = "serves"
    #: A step before STAGED is done.
    STEP = "step"
    #: Staged, before its turn.
    EARLY = "early"
    #: Staged, and it may switch.
    READY = "ready"
    LET_GO = "let go"
    #: No request is left that may not see the switch.
    DRAINED = "drained"
    APPLIED = "applied"
    CHECKED = "checked"
    #: A newer target is worth giving this one up.
    NEWER = "newer"
    STOP = "stop"
    FAILED = "failed"
    #: A switch failed in a way that leaves open what the engine serves.
    LOST_TRACK = "lost track"
    #: The attempt's task is over.
    ENDED = "ended"


class AttemptAction(enum.StrEnum):
    """What the driver does in a move."""

    NOTHING = "nothing"
    LOAD = "load"
    REPORT = "report"
    REPORT_ERROR = "report error"
    #: Wake the attempt, which waits for its turn.
    GO_ON = "go on"
    CANCEL = "cancel"
    #: End the attempt's task where it stands.
    ABANDON = "abandon"
    #: Let the source delete files that nobody needs.
    RELEASE = "release"
    #: Show the error, and end the driver with it.
    END_BOOT = "end boot"


_BETWEEN = (AttemptPhase.RESTING, AttemptPhase.NEXT)
_STAGES = (AttemptPhase.PREPARING, AttemptPhase.HELD, AttemptPhase.WAITING)
_GIVEN_UP = (AttemptPhase.SUPERSEDED, AttemptPhase.STOPPED)
_PROGRESS = (
    AttemptEvent.STEP,
    AttemptEvent.EARLY,
    AttemptEvent.READY,
    AttemptEvent.DRAINED,
    AttemptEvent.CHECKED,
)

#: The legal moves, all of them.
ATTEMPTS: Table[AttemptPhase, AttemptEvent, AttemptAction] = Table(
    AttemptPhase.RESTING,
    {
        **{(phase, AttemptEvent.BEGUN): (AttemptPhase.PREPARING, AttemptAction.LOAD) for phase in _BETWEEN},
        **{(phase, AttemptEvent.SERVES): (AttemptPhase.RESTING, AttemptAction.NOTHING) for phase in _BETWEEN},
        (AttemptPhase.PREPARING, AttemptEvent.STEP): (AttemptPhase.PREPARING, AttemptAction.REPORT),
        (AttemptPhase.PREPARING, AttemptEvent.EARLY): (AttemptPhase.HELD, AttemptAction.REPORT),
        (AttemptPhase.PREPARING, AttemptEvent.READY): (AttemptPhase.WAITING, AttemptAction.REPORT),
        (AttemptPhase.HELD, AttemptEvent.LET_GO): (AttemptPhase.WAITING, AttemptAction.GO_ON),
        (AttemptPhase.WAITING, AttemptEvent.DRAINED): (AttemptPhase.APPLYING, AttemptAction.REPORT),
        (AttemptPhase.APPLYING, AttemptEvent.APPLIED): (AttemptPhase.CHECKING, AttemptAction.REPORT),
        (AttemptPhase.CHECKING, AttemptEvent.CHECKED): (AttemptPhase.RESTING, AttemptAction.REPORT),
        (AttemptPhase.APPLYING, AttemptEvent.LOST_TRACK): (AttemptPhase.IN_DOUBT, AttemptAction.END_BOOT),
        **{
            (phase, AttemptEvent.FAILED): (AttemptPhase.RESTING, AttemptAction.REPORT_ERROR)
            for phase in (*_STAGES, AttemptPhase.APPLYING, AttemptPhase.CHECKING)
        },
        **{
            (phase, AttemptEvent.NEWER): (AttemptPhase.SUPERSEDED, AttemptAction.CANCEL)
            for phase in (*_STAGES, AttemptPhase.CHECKING)
        },
        **{(phase, AttemptEvent.STOP): (AttemptPhase.STOPPED, AttemptAction.CANCEL) for phase in _STAGES},
        **{(phase, event): (phase, AttemptAction.ABANDON) for phase in _GIVEN_UP for event in _PROGRESS},
        **{(phase, AttemptEvent.FAILED): (phase, AttemptAction.NOTHING) for phase in _GIVEN_UP},
        (AttemptPhase.SUPERSEDED, AttemptEvent.ENDED): (AttemptPhase.NEXT, AttemptAction.RELEASE),
        (AttemptPhase.RESTING, AttemptEvent.ENDED): (AttemptPhase.RESTING, AttemptAction.RELEASE),
    },
)

#: What a move of the replica's swap is for the attempt. Others are a STEP; for STAGED the target decides.
_AS_EVENT = {
    table.SwapEvent.COMMIT: AttemptEvent.DRAINED,
    table.SwapEvent.COMMITTED: AttemptEvent.APPLIED,
    table.SwapEvent.CHECKED: AttemptEvent.CHECKED,
}


class Attempts:
    """The attempts of one boot, one after the other. phase: where the one in work stands. machine: what it moves forward.

    proved: whether what is switched to was proved before. If not, its check is not given up for a newer target.
    """

    def __init__(self, machine: SwapMachine, *, proved: bool = True) -> None:
        self._machine = machine
        self._proved = proved
        self._superseded_in_a_row = 0
        self._held_in_vain = 0
        self.phase = AttemptPhase.RESTING

    def __repr__(self) -> str:
        return f"Attempts({self.phase}, {self._superseded_in_a_row} superseded in a row)"

    @property
    def due(self) -> bool:
        """True when an attempt is to begin. Only asked between attempts."""
        return self._machine.behind or self.phase is AttemptPhase.NEXT

    def begin(self) -> Desired | None:
        """Takes the accepted target into work. None: it serves already."""
        desired = self._machine.begin()
        self.move(AttemptEvent.SERVES if desired is None else AttemptEvent.BEGUN)
        return desired

    def progress(self, made: table.SwapEvent) -> AttemptAction:
        """A step of the attempt is done: REPORT or ABANDON."""
        if made is table.SwapEvent.STAGED:
            event = AttemptEvent.EARLY if self._machine.held else AttemptEvent.READY
        else:
            event = _AS_EVENT.get(made, AttemptEvent.STEP)
        action = self.move(event)
        if action is AttemptAction.REPORT:
            self._machine.advance(made)
        return action

    def signalled(self) -> AttemptAction:
        """After a signal, and after EARLY: CANCEL, GO_ON or NOTHING."""
        if self._worth_giving_up:
            return self.move(AttemptEvent.NEWER)
        if self.phase is AttemptPhase.HELD and not self._machine.held:
            return self.move(AttemptEvent.LET_GO)
        return AttemptAction.NOTHING

    def stopped(self) -> AttemptAction:
        """The driver is to end: CANCEL or NOTHING. A switch and its check are finished first."""
        return (
            self.move(AttemptEvent.STOP)
            if (self.phase, AttemptEvent.STOP) in ATTEMPTS
            else AttemptAction.NOTHING
        )

    def failed(self, error: Exception, message: str) -> AttemptAction:
        """The attempt raised `error`: REPORT_ERROR, END_BOOT or NOTHING."""
        event = AttemptEvent.FAILED
        if self.phase is AttemptPhase.APPLYING and not isinstance(error, StagingFailed | EngineDied):
            event = AttemptEvent.LOST_TRACK
        action = self.move(event)
        if action is not AttemptAction.NOTHING:
            target = self._machine.target
            assert target is not None
            self._machine.fail(message, refused=at_fault(error, target))
        return action

    def ended(self) -> AttemptAction:
        """The attempt's task is over. Raises IllegalMove when it was cancelled by someone else."""
        return self.move(AttemptEvent.ENDED)

    def move(self, event: AttemptEvent) -> AttemptAction:
        """What the driver is to do now. Raises IllegalMove."""
        phase, action = ATTEMPTS.move(self.phase, event)
        if event is AttemptEvent.NEWER and self.phase is AttemptPhase.HELD:
            self._held_in_vain += 1
        elif event is AttemptEvent.APPLIED:
            self._held_in_vain = 0
        elif event is AttemptEvent.ENDED:
            superseded = self.phase is AttemptPhase.SUPERSEDED
            self._superseded_in_a_row = self._superseded_in_a_row + 1 if superseded else 0
        self.phase = phase
        return action

    @property
    def _worth_giving_up(self) -> bool:
        machine, newer = self._machine, self._machine.accepted
        if newer is None or not machine.behind or (self.phase, AttemptEvent.NEWER) not in ATTEMPTS:
            return False
        if self.phase is AttemptPhase.CHECKING and not self._proved:
            return False
        if self.phase is AttemptPhase.HELD:
            # Too often in vain, it waits for its turn, which comes before that of a newer one that has to wait, too.
            return self._held_in_vain < GIVEN_UP_MAX or (machine.held and not newer.hold)
        return self._superseded_in_a_row < GIVEN_UP_MAX and machine.supersedable


def at_fault(error: Exception, target: Desired) -> bool:
    """Whether what was published is to blame for the failure of a load, and not this server."""
    if isinstance(error, SnapshotCorrupt):
        # A file or a delta in the bucket is torn. Pushed bytes were digested here, so this server damaged them.
        return not by_content(target.fingerprint)
    if isinstance(error, SnapshotMissing):
        # Pushed files come into the bucket by this server.
        return not any(by_content(one.fingerprint) for one in target.files)
    return isinstance(error, REFUSALS)
