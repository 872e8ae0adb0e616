"""The swap machine: where a replica stands with the snapshot it should serve. Pure; replica/swap/driver.py does the I/O.

Always holds: every move is one entry of `MOVES`, any other raises. A machine lives for one boot and begins with the base
snapshot serving. Only COMMITTED changes what serves, so a target that fails before it never serves. Every move gets a
sequence number and a time; the last `TRANSITIONS_KEPT` are kept.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from midstream.core.table import IllegalMove, Table
from midstream.core.types import BASE_SNAPSHOT, Desired, ResetPromptCache, Stage, Transition

TRANSITIONS_KEPT = 64
DETAIL_MAX = 2000


class SwapEvent(enum.StrEnum):
    #: Start on a new target. The one in preparation is dropped.
    DESIRED = "desired"
    ALREADY_SERVING = "already serving"
    FETCHED = "fetched"
    #: Files that have to be applied to a parent's.
    FETCHED_DELTA = "fetched delta"
    REBUILT = "rebuilt"
    VERIFIED = "verified"
    STAGED = "staged"
    #: The point of no return: the target will serve.
    COMMIT = "commit"
    COMMITTED = "committed"
    #: The weights that serve are what they should be.
    CHECKED = "checked"
    FAILED = "failed"


BEFORE_COMMIT = (Stage.FETCHING, Stage.REBUILDING, Stage.VERIFYING, Stage.STAGING, Stage.STAGED)

_NEXT: dict[tuple[Stage, SwapEvent], Stage] = {
    **{
        (stage, SwapEvent.DESIRED): Stage.FETCHING
        for stage in (Stage.IDLE, Stage.ERROR, *BEFORE_COMMIT, Stage.CHECKING)
    },
    **{(stage, SwapEvent.ALREADY_SERVING): Stage.IDLE for stage in (Stage.IDLE, Stage.ERROR, *BEFORE_COMMIT)},
    (Stage.FETCHING, SwapEvent.FETCHED): Stage.VERIFYING,
    (Stage.FETCHING, SwapEvent.FETCHED_DELTA): Stage.REBUILDING,
    (Stage.REBUILDING, SwapEvent.REBUILT): Stage.VERIFYING,
    (Stage.VERIFYING, SwapEvent.VERIFIED): Stage.STAGING,
    (Stage.STAGING, SwapEvent.STAGED): Stage.STAGED,
    (Stage.STAGED, SwapEvent.COMMIT): Stage.COMMITTING,
    (Stage.COMMITTING, SwapEvent.COMMITTED): Stage.CHECKING,
    (Stage.CHECKING, SwapEvent.CHECKED): Stage.IDLE,
    **{
        (stage, SwapEvent.FAILED): Stage.ERROR for stage in (*BEFORE_COMMIT, Stage.COMMITTING, Stage.CHECKING)
    },
}
#: The legal moves, all of them.
MOVES: Table[Stage, SwapEvent, None] = Table(Stage.IDLE, {at: (to, None) for at, to in _NEXT.items()})


class SwapMachine:
    """The state of one boot. accepted: the newest Desired. target: the one last taken into work; it may be loading, have
    failed, or serve. sound: False from a failed check to the next one that passes. checked: the serving weights passed their
    check. distrusted: the target replaces weights that may be wrong."""

    def __init__(self, clock: Callable[[], float], seq: int = 0) -> None:
        """seq: the sequence number of the first move."""
        self._clock = clock
        self.seq = seq
        self.stage = Stage.IDLE
        self.serving = BASE_SNAPSHOT
        #: The serving target. None: the base weights of the start.
        self.loaded: Desired | None = None
        self.sound = True
        self.checked = True
        self.distrusted = False
        self.accepted: Desired | None = None
        self.target: Desired | None = None
        self.error: str | None = None
        #: Generation of the last target that was at fault itself. 0: of none.
        self.refused = 0
        self.transitions: deque[Transition] = deque(maxlen=TRANSITIONS_KEPT)

    def __repr__(self) -> str:
        target = self.target.snapshot if self.target else None
        return (
            f"SwapMachine({self.stage.value}, serving={self.serving!r}, target={target!r}, moves={self.seq})"
        )

    def accept(self, desired: Desired) -> bool:
        """Accepts a target. False when it is accepted already, came late, or asks to hold a target that was let go.

        A lower generation counts, too, from a sender that has seen the higher one: it has the truth.
        """
        if self._came_late(desired):
            return False
        held = self.target if self.stage is Stage.STAGED and self.held else None
        let_go = held is not None and held.generation == desired.let_go
        if held is not None and let_go:
            self.target = msgspec.structs.replace(held, hold=False)
        return self._remember(desired) or let_go

    def _came_late(self, desired: Desired) -> bool:
        """Whether another gateway's newer target has overtaken it on the way."""
        known = 0 if self.accepted is None else self.accepted.generation
        return desired.generation < known and desired.seen is not None and desired.seen < known

    def _remember(self, desired: Desired) -> bool:
        if (
            self.accepted
            and _key(self.accepted) == _key(desired)
            and (desired.hold or not self.accepted.hold)
        ):
            return False
        self.accepted = desired
        # From the commit on, what is applied is what is reported.
        if self.target and _key(self.target) == _key(desired) and self.stage in BEFORE_COMMIT:
            self.target = desired
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
        """Takes the accepted target into work. None: it serves already."""
        desired = self.accepted
        assert desired is not None
        serves = self._same(desired) and self.sound and self.checked
        self.distrusted = not serves and (self.same_files(desired) or not self.sound)
        self._move(SwapEvent.ALREADY_SERVING if serves else SwapEvent.DESIRED, desired)
        return None if serves else desired

    def same_files(self, desired: Desired) -> bool:
        """Whether the target is the serving snapshot. Other files make another snapshot; a reload does not."""
        return desired.snapshot == self.serving and (self.loaded is None or same_files(desired, self.loaded))

    def _same(self, desired: Desired) -> bool:
        """Whether the target is what was committed last, and not asked for once more."""
        return self.same_files(desired) and desired.reload <= (self.loaded.reload if self.loaded else 0)

    @property
    def signalled(self) -> int:
        """The generation of the signal that asked for what serves. 0: the base weights of the start."""
        return self.loaded.signalled if self.loaded else 0

    @property
    def answers(self) -> int:
        """The generation of the newest signal that asked for what serves, also if it served already."""
        serves = self.stage is Stage.IDLE and self.target is not None
        return self.target.signalled if serves and self.target is not None else self.signalled

    def reset_of(self, desired: Desired) -> ResetPromptCache:
        """The policy of a switch to it."""
        return (
            "all" if self.distrusted or self.signalled < desired.reset_since else desired.reset_prompt_cache
        )

    @property
    def supersedable(self) -> bool:
        """Whether the target in work may be given up for the accepted one. A check may, unless both are the same snapshot."""
        if self.stage is Stage.CHECKING:
            return self.accepted is not None and not self._same(self.accepted)
        return self.stage in BEFORE_COMMIT

    def advance(self, event: SwapEvent) -> None:
        """Moves the target in work on. `begin` and `fail` make the other moves."""
        target = self.target
        assert target is not None
        self._move(event, target)
        if event is SwapEvent.COMMITTED:
            self.serving = target.snapshot
            self.loaded = target
            self.checked = False
        elif event is SwapEvent.CHECKED:
            self.sound = self.checked = True

    def fail(self, message: str, *, refused: bool = False) -> None:
        """refused: the files or the weights are at fault, and would be on any replica."""
        assert self.target is not None
        if refused:
            self.refused = self.target.generation
        checking = self.stage is Stage.CHECKING
        self._move(SwapEvent.FAILED, self.target, printable(message))
        if checking:
            self.sound = False

    def _move(self, event: SwapEvent, desired: Desired, detail: str = "") -> None:
        try:
            self.stage, _ = MOVES.move(self.stage, event)
        except IllegalMove as error:
            error.add_note(repr(self))
            raise
        self.target = desired
        self.error = detail if self.stage is Stage.ERROR else None
        self.transitions.append(
            Transition(
                seq=self.seq,
                at=self._clock(),
                snapshot=desired.snapshot,
                generation=desired.generation,
                stage=self.stage,
                detail=detail,
            )
        )
        self.seq += 1


def _key(desired: Desired) -> tuple[str, int, int]:
    return desired.snapshot, desired.generation, desired.reload


def same_files(one: Desired, other: Desired) -> bool:
    """Every file that they are made of tells two snapshots of one name apart; bytes do where both are known."""
    if len(one.files) != len(other.files):
        return False
    return all(
        (mine.snapshot, mine.fingerprint) == (theirs.snapshot, theirs.fingerprint)
        and (None in (mine.content, theirs.content) or mine.content == theirs.content)
        for mine, theirs in zip(one.files, other.files, strict=True)
    )


def printable(message: str) -> str:
    """At most DETAIL_MAX characters that any encoder takes: a report that cannot be sent would hide the replica."""
    return message[:DETAIL_MAX].encode("utf-8", "backslashreplace").decode()
