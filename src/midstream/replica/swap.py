"""The swap machine: where a replica stands with the snapshot it should serve. Pure; replica/runner.py does the I/O.

Always holds: every move is one entry of `MOVES`, any other raises; a machine lives for one boot and begins with `serving`
at the base snapshot; only COMMITTED changes it, so a target that failed before COMMITTED never serves, and one that failed
after it does; every move gets a sequence number and a time, and the last `TRANSITIONS_KEPT` of them are kept.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from midstream.types import BASE_SNAPSHOT, Desired, Stage, Transition

TRANSITIONS_KEPT = 64
DETAIL_MAX = 2000


class Event(enum.StrEnum):
    DESIRED = "desired"  # start on a new target; whatever was being prepared is dropped
    ALREADY_SERVING = "already serving"  # the new target is what serves
    FETCHED = "fetched"  # whole files
    FETCHED_DELTA = "fetched delta"  # files that have to be applied to a parent's
    REBUILT = "rebuilt"
    VERIFIED = "verified"
    STAGED = "staged"
    COMMIT = "commit"  # the point of no return: it will serve, whatever is wanted by then
    COMMITTED = "committed"  # it serves
    CHECKED = "checked"  # and is what it should be
    FAILED = "failed"


BEFORE_COMMIT = (Stage.FETCHING, Stage.REBUILDING, Stage.VERIFYING, Stage.STAGING, Stage.STAGED)

#: The legal moves, all of them.
MOVES: dict[tuple[Stage, Event], Stage] = {
    **{
        (stage, Event.DESIRED): Stage.FETCHING
        for stage in (Stage.IDLE, Stage.ERROR, *BEFORE_COMMIT, Stage.CHECKING)
    },
    **{(stage, Event.ALREADY_SERVING): Stage.IDLE for stage in (Stage.IDLE, Stage.ERROR, *BEFORE_COMMIT)},
    (Stage.FETCHING, Event.FETCHED): Stage.VERIFYING,
    (Stage.FETCHING, Event.FETCHED_DELTA): Stage.REBUILDING,
    (Stage.REBUILDING, Event.REBUILT): Stage.VERIFYING,
    (Stage.VERIFYING, Event.VERIFIED): Stage.STAGING,
    (Stage.STAGING, Event.STAGED): Stage.STAGED,
    (Stage.STAGED, Event.COMMIT): Stage.COMMITTING,
    (Stage.COMMITTING, Event.COMMITTED): Stage.CHECKING,
    (Stage.CHECKING, Event.CHECKED): Stage.IDLE,
    **{(stage, Event.FAILED): Stage.ERROR for stage in (*BEFORE_COMMIT, Stage.COMMITTING, Stage.CHECKING)},
}


class IllegalMove(RuntimeError):
    """A move that the table does not have: a bug, never a user's mistake."""


class SwapMachine:
    """The state of one boot. `accepted` is the Desired that came last; `target` the one last taken into work, whether it
    is still being loaded, failed, or serves. `sound` is False from a check that failed to the next one that passes; `checked`
    is True when the check of what serves has passed; `distrusted` is True when the target replaces weights that may not have
    been what they should be."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seq = 0
        self.stage = Stage.IDLE
        self.serving = BASE_SNAPSHOT
        self.loaded: Desired | None = None  # what serves, None: the base weights of the start
        self.sound = True
        self.checked = True
        self.distrusted = False
        self.accepted: Desired | None = None
        self.target: Desired | None = None
        self.error: str | None = None
        self.transitions: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)

    def __repr__(self) -> str:
        target = self.target.snapshot if self.target else None
        return (
            f"SwapMachine({self.stage.value}, serving={self.serving!r}, target={target!r}, moves={self._seq})"
        )

    def accept(self, desired: Desired) -> bool:
        """Remember what is wanted now; False when it is what was already accepted, or asks to hold what was let go.

        Any other (snapshot, generation) counts, also a lower generation: the one who sends has the truth.
        """
        held = self.target if self.stage is Stage.STAGED and self.held else None
        let_go = held is not None and held.generation == desired.let_go
        if held is not None and let_go:
            self.target = msgspec.structs.replace(held, hold=False)
        return self._remember(desired) or let_go

    def _remember(self, desired: Desired) -> bool:
        if (
            self.accepted
            and _key(self.accepted) == _key(desired)
            and (desired.hold or not self.accepted.hold)
        ):
            return False
        self.accepted = desired
        if self.target and _key(self.target) == _key(desired):
            self.target = desired  # is let go
        return True

    @property
    def behind(self) -> bool:
        """True when the accepted target has not been taken into work."""
        return self.accepted is not None and (self.target is None or _key(self.accepted) != _key(self.target))

    @property
    def held(self) -> bool:
        """True while the target in work has to wait at STAGED."""
        return self.target is not None and self.target.hold

    def begin(self) -> Desired | None:
        """Take the accepted target into work; None when there is nothing to load since it serves already."""
        desired = self.accepted
        assert desired is not None
        serves = self._same(desired) and self.sound and self.checked
        self.distrusted = not serves and (self.same_files(desired) or not self.sound)
        self._move(Event.ALREADY_SERVING if serves else Event.DESIRED, desired)
        return None if serves else desired

    def same_files(self, desired: Desired) -> bool:
        """Whether the target is what serves, also when it is to be loaded once more. Other files make another snapshot."""
        return desired.snapshot == self.serving and (self.loaded is None or _same_files(desired, self.loaded))

    def _same(self, desired: Desired) -> bool:
        """Whether the target is what was committed last, and not asked for once more."""
        return self.same_files(desired) and desired.reload <= (self.loaded.reload if self.loaded else 0)

    @property
    def supersedable(self) -> bool:
        """Whether the target in work may be given up for the accepted one. A check may, but not for what is being checked."""
        if self.stage is Stage.CHECKING:
            return self.accepted is not None and not self._same(self.accepted)
        return self.stage in BEFORE_COMMIT

    def advance(self, event: Event) -> None:
        """Anything but the beginning and the failure of the target in work."""
        target = self.target
        assert target is not None
        self._move(event, target)
        if event is Event.COMMITTED:
            self.serving = target.snapshot
            self.loaded = target
            self.checked = False
        elif event is Event.CHECKED:
            self.sound = self.checked = True

    def fail(self, message: str) -> None:
        assert self.target is not None
        checking = self.stage is Stage.CHECKING
        self._move(Event.FAILED, self.target, printable(message))
        if checking:
            self.sound = False

    def _move(self, event: Event, desired: Desired, detail: str = "") -> None:
        stage = MOVES.get((self.stage, event))
        if stage is None:
            raise IllegalMove(f"{event.value!r} at {self.stage.value!r}: {self!r}")
        self.stage = stage
        self.target = desired
        self.error = detail if stage is Stage.ERROR else None
        self.transitions.append(
            Transition(
                seq=self._seq,
                at=self._clock(),
                snapshot=desired.snapshot,
                generation=desired.generation,
                stage=stage,
                detail=detail,
            )
        )
        self._seq += 1


def _key(desired: Desired) -> tuple[str, int, int]:
    return desired.snapshot, desired.generation, desired.reload


def _same_files(one: Desired, other: Desired) -> bool:
    """Every file that they are made of tells two snapshots of one name apart; bytes do where both are known."""
    if len(one.files) != len(other.files):
        return False
    return all(
        (mine.snapshot, mine.fingerprint) == (theirs.snapshot, theirs.fingerprint)
        and (None in (mine.content, theirs.content) or mine.content == theirs.content)
        for mine, theirs in zip(one.files, other.files, strict=True)
    )


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {Stage.IDLE.value}"]
    lines += [f"    {at.value} --> {to.value}: {event.value}" for (at, event), to in MOVES.items()]
    return "\n".join(lines) + "\n"


def printable(message: str) -> str:
    """At most DETAIL_MAX characters that any encoder takes: a report that cannot be sent would hide the replica."""
    return message[:DETAIL_MAX].encode("utf-8", "backslashreplace").decode()
