"""A replica's part in the groups through which trainers send weights: its phase as a table, and the port to its receiver.

Owns: the one group at a time that this replica is a member of, and the orders under way.
Always holds: every move is one entry of `PARTS`. An order that began is carried out, whether or not its caller still waits.
A group ends with its receiver: when that fails or misses a deadline, at LeaveGroup, at a newer Join, with the boot, and soon
after its trainer. The files of an update are the receiver's until it is finished, and the snapshot cache's from then on. No
weights are touched here. A receiver that writes into the weights that serve keeps the engine from serving meanwhile.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from midstream.core.errors import (
    AnotherBoot,
    Conflict,
    InvalidRequest,
    MidstreamError,
    ReplicaUnavailable,
    SnapshotError,
)
from midstream.core.table import Table
from midstream.core.transfer import (
    Alive,
    Begin,
    CarriedOut,
    Check,
    CheckInPlace,
    Digest,
    Digested,
    Distrust,
    Drop,
    Finish,
    InitInfo,
    Join,
    JoinInPlace,
    Keep,
    LeaveGroup,
    Receive,
    Received,
    ReceiveInPlace,
    Rendezvous,
    SentTensors,
    TrainerSeen,
    TrainerState,
    TransferOrder,
    UpdateInfo,
)
from midstream.snapshots.store.chain import ChainFetcher

log = logging.getLogger(__name__)

#: Between two looks for the trainer of a group.
LOOK_S = 30.0
#: A trainer is gone that does not answer so many in a row.
UNANSWERED_LOOKS = 3
#: It has so long to answer one.
LOOK_WITHIN_S = 5.0

T = TypeVar("T")
#: What a receiver is invited by, and what announces tensors to it.
Invitation = TypeVar("Invitation", Rendezvous, InitInfo)
Sent = TypeVar("Sent", SentTensors, UpdateInfo)
TransferAnswer = CarriedOut | Received | Digested | TrainerSeen


class PartPhase(enum.StrEnum):
    JOINING = "joining"
    #: A member, with no update open.
    JOINED = "joined"
    OPENING = "opening"
    #: An update takes tensors.
    OPEN = "open"
    RECEIVING = "receiving"
    FINISHING = "finishing"
    #: The receiver has ended, or is killed.
    ENDED = "ended"


class PartEvent(enum.StrEnum):
    IS_MEMBER = "is member"
    BEGIN = "begin"
    OPENED = "opened"
    CHECK = "check"
    RECEIVE = "receive"
    RECEIVED = "received"
    FINISH = "finish"
    FINISHED = "finished"
    #: Also when the update has lived too long.
    DROP = "drop"
    END = "end"


_P, _E = PartPhase, PartEvent
_WORKING = (_P.OPENING, _P.RECEIVING, _P.FINISHING)
_NEXT: dict[tuple[PartPhase, PartEvent], PartPhase] = {
    (_P.JOINING, _E.IS_MEMBER): _P.JOINED,
    (_P.JOINED, _E.BEGIN): _P.OPENING,
    (_P.OPEN, _E.BEGIN): _P.OPENING,
    (_P.OPENING, _E.OPENED): _P.OPEN,
    (_P.OPEN, _E.CHECK): _P.OPEN,
    (_P.OPEN, _E.RECEIVE): _P.RECEIVING,
    (_P.RECEIVING, _E.RECEIVED): _P.OPEN,
    (_P.OPEN, _E.FINISH): _P.FINISHING,
    (_P.FINISHING, _E.FINISHED): _P.JOINED,
    (_P.JOINED, _E.DROP): _P.JOINED,
    (_P.OPEN, _E.DROP): _P.JOINED,
    # Nothing but its end stops a receiver that is inside a broadcast.
    **{(phase, _E.DROP): _P.ENDED for phase in _WORKING},
    **{(phase, _E.END): _P.ENDED for phase in (_P.JOINING, _P.JOINED, _P.OPEN, *_WORKING)},
}
#: The trainer is needed. In the other phases a deadline ends what it has begun.
_NEEDS_TRAINER = (_P.JOINED, _P.OPEN, _P.RECEIVING)
#: The legal moves, all of them.
PARTS: Table[PartPhase, PartEvent, None] = Table(_P.JOINING, {at: (to, None) for at, to in _NEXT.items()})


class Receiver(abc.ABC, Generic[Invitation, Sent]):
    """What takes part in one group: a process, or the engine itself. It is used once: `join` comes first, and `end` is final.

    Where a method raises ReplicaUnavailable, or is cancelled, its state is unknown and the caller ends it. InvalidRequest
    leaves everything as it was. backend: as `EngineCard.weight_transfer`.
    """

    backend = ""

    @abc.abstractmethod
    async def join(self, invitation: Invitation, within_s: float) -> None:
        """Take part from `rank_offset` on. Raises InvalidRequest, ReplicaUnavailable."""

    @abc.abstractmethod
    async def begin(self, within_s: float) -> None:
        """Make room for the files of an update. Raises ReplicaUnavailable."""

    @abc.abstractmethod
    def check(self, sent: Sent) -> None:
        """Raises InvalidRequest unless these tensors may come next."""

    @abc.abstractmethod
    async def receive(self, sent: Sent, within_s: float) -> None:
        """Receive tensors that passed `check`. Raises ReplicaUnavailable."""

    @abc.abstractmethod
    def check_complete(self) -> None:
        """Raises InvalidRequest unless all tensors have come."""

    @abc.abstractmethod
    async def finish(self, within_s: float) -> Received:
        """Close the files of an update that is complete. Raises ReplicaUnavailable."""

    @abc.abstractmethod
    def hand_over(self) -> Path:
        """The directory of the files that `finish` closed. It is the caller's from now on."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Remove the files of the update. Not while another method runs."""

    def retract(self) -> None:
        """What was handed over is to become no snapshot. Returns at once."""

    @abc.abstractmethod
    async def trainer_state(self, within_s: float) -> TrainerState:
        """Whether the trainer's store answers, and is that of the group. May run beside other methods, also `join`, and changes
        nothing."""

    @abc.abstractmethod
    def end(self, reason: str) -> None:
        """Kill the process, and have its files removed. What runs raises ReplicaUnavailable with the reason."""

    @abc.abstractmethod
    async def ended(self) -> str:
        """Returns when the process is gone, by itself or by `end`, and its files are removed: why it ended."""


class _FinishedUpdate(NamedTuple):
    """What was handed over, and what was answered."""

    update: int
    directory: Path
    received: Received


class GroupPart:
    """The part in one group. reason: why it ended. lost: it ended by a failure."""

    def __init__(
        self,
        group: str,
        receiver: Receiver[Any, Any],
        chains: ChainFetcher,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.group = group
        self.phase = PARTS.first
        self.update: int | None = None
        self.reason = ""
        self.lost = False
        self._receiver = receiver
        self._chains = chains
        self._sleep = sleep
        self._finished: _FinishedUpdate | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._looks: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"GroupPart({self.group}, {self.phase.value}, update={self.update})"

    async def join(self, invitation: Rendezvous | InitInfo, within_s: float) -> None:
        if self.phase is PartPhase.ENDED:
            # While the part before it ended.
            raise self._over()
        try:
            await self._receiver.join(invitation, within_s)
        except BaseException as error:
            self._fail(error)
            raise
        self._done(PartEvent.IS_MEMBER)
        self._watch = asyncio.create_task(self._watch_end(), name="end of the receiver")
        self._looks = asyncio.create_task(self._look_for_trainer(), name="looks for a trainer")

    async def begin(self, order: Begin) -> None:
        self._may(PartEvent.BEGIN)
        if self.phase is PartPhase.OPEN:
            self.drop(self.update)
        self._move(PartEvent.BEGIN)
        self.update, self.reason = order.update, ""
        self._expiry = asyncio.create_task(self._expire(order.update, order.live_s), name="end of an update")
        await self._work(self._receiver.begin(order.within_s))
        self._done(PartEvent.OPENED)

    def check(self, update: int, sent: SentTensors | UpdateInfo) -> None:
        self._may(PartEvent.CHECK, update)
        self._receiver.check(sent)

    async def receive(self, update: int, sent: SentTensors | UpdateInfo, within_s: float) -> None:
        self._may(PartEvent.RECEIVE, update)
        self._receiver.check(sent)
        self._move(PartEvent.RECEIVE)
        await self._work(self._receiver.receive(sent, within_s))
        self._done(PartEvent.RECEIVED)

    async def finish(self, order: Finish) -> Received:
        """The same answer again for the update that was finished last: its name may have been refused."""
        if self._finished is not None and self._finished.update == order.update:
            return self._finished.received
        self._may(PartEvent.FINISH, order.update)
        self._receiver.check_complete()
        self._move(PartEvent.FINISH)
        received = await self._work(self._receiver.finish(order.within_s))
        self._done(PartEvent.FINISHED)
        self._close_update()
        directory = self._receiver.hand_over()
        self._finished = _FinishedUpdate(order.update, directory, received)
        self._chains.received(received.content, directory)
        return received

    def drop(self, update: int | None, why: str = "it was dropped") -> None:
        """Forget an update, open or finished. Nothing to do if it is neither."""
        if self._finished is not None and self._finished.update == update:
            # Also when the group has ended since.
            self._chains.forget_received(self._finished.directory)
            self._finished = None
            self._receiver.retract()
        elif self.phase is PartPhase.ENDED:
            raise self._over()
        elif self.update is not None:
            self._may(PartEvent.DROP, update)
            before = self.phase
            self._move(PartEvent.DROP)
            if before is PartPhase.OPEN:
                self.reason = f"update {update}: {why}"
                self._close_update()
                self._receiver.drop()
            else:
                self._ended(f"update {update}: {why}", lost=True)
        else:
            self._may(PartEvent.DROP)

    async def trainer_state(self, within_s: float) -> TrainerState:
        if self.phase is PartPhase.ENDED:
            raise Conflict(f"group {self.group} ended here: {self.reason}")
        return await self._receiver.trainer_state(within_s)

    def end(self, reason: str, *, lost: bool = False) -> None:
        """Idempotent."""
        if self.phase is not PartPhase.ENDED:
            self._move(PartEvent.END)
            self._ended(reason, lost=lost)

    async def gone(self) -> None:
        """Waits until the receiver of a part that ended is gone."""
        await self._receiver.ended()

    async def _work(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.end(str(error) or repr(error), lost=True)

    def _done(self, event: PartEvent) -> None:
        """The end of work, unless the part ended under it."""
        if self.phase is PartPhase.ENDED:
            raise self._over()
        self._move(event)

    def _may(self, event: PartEvent, update: int | None = None) -> None:
        """Raise Conflict unless the table has this move, and `update` is the open one. None: any."""
        if self.phase is PartPhase.ENDED:
            raise self._over()
        why = f" ({self.reason})" if self.reason else ""
        if (self.phase, event) not in PARTS:
            raise Conflict(
                f"group {self.group} is {self.phase.value} here{why}; no {event.value} is possible"
            )
        if update is not None and update != self.update:
            raise Conflict(f"the open update of group {self.group} is {self.update}, not {update}{why}")

    def _over(self) -> MidstreamError:
        kind = ReplicaUnavailable if self.lost else Conflict
        return kind(f"group {self.group} ended here: {self.reason}")

    def _move(self, event: PartEvent) -> None:
        self.phase, _ = PARTS.move(self.phase, event)

    def _close_update(self) -> None:
        self.update = None
        expiry, self._expiry = self._expiry, None
        if expiry is not None and expiry is not asyncio.current_task():
            expiry.cancel()

    def _ended(self, reason: str, *, lost: bool) -> None:
        self.reason, self.lost = reason, lost
        log.log(logging.WARNING if lost else logging.INFO, "group %s ended: %s", self.group, reason)
        self._close_update()
        looks, self._looks = self._looks, None
        if looks is not None and looks is not asyncio.current_task():
            looks.cancel()
        self._receiver.end(reason)

    async def _expire(self, update: int, live_s: float) -> None:
        await self._sleep(live_s)
        if self.update == update:
            self.drop(update, f"it was not finished within {live_s:g} s")

    async def _look_for_trainer(self) -> None:
        """End a part whose trainer is gone. An engine that stands still for it does not wait for the update's deadline."""
        unanswered, seen = 0, TrainerState.ALIVE
        while unanswered < UNANSWERED_LOOKS:
            await self._sleep(LOOK_S)
            if self.phase in _NEEDS_TRAINER:
                seen = await self._receiver.trainer_state(LOOK_WITHIN_S)
            # A part that is finishing by now has all that its trainer sent.
            missed = seen is not TrainerState.ALIVE and self.phase in _NEEDS_TRAINER
            unanswered = unanswered + 1 if missed else 0
        self.end("its trainer is gone" if seen is TrainerState.GONE else "its trainer does not answer")

    async def _watch_end(self) -> None:
        self.end(await self._receiver.ended(), lost=True)


class Transfers:
    """The orders of gateways. boot: of the replica; None while it takes no part in anything."""

    #: Makes a receiver, without starting it. None: this replica takes part in no group.
    receivers: Callable[[], Receiver[Any, Any]] | None = None

    def __init__(
        self,
        chains: ChainFetcher,
        boot: Callable[[], str | None],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._chains = chains
        self._boot = boot
        self._sleep = sleep
        self._part: GroupPart | None = None
        self._tasks: set[asyncio.Task[TransferAnswer]] = set()

    def __repr__(self) -> str:
        return f"Transfers({self._part!r}, {len(self._tasks)} orders under way)"

    async def answer(self, order: TransferOrder) -> TransferAnswer:
        """Carry out an order. It continues if the caller is cancelled. Raises MidstreamError."""
        task = asyncio.create_task(self._carry_out(order), name=f"transfer: {type(order).__name__}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[TransferAnswer]) -> None:
        self._tasks.discard(task)
        # Read here: its caller may be gone.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("%s ended with: %s", task.get_name(), error)

    def end_group(self, reason: str) -> None:
        """End the part in a group, if there is one. Its receiver is gone soon."""
        if self._part is not None:
            self._part.end(reason)

    async def close(self) -> None:
        """End everything that is under way. The caller takes no more orders."""
        self.end_group("the replica ended")
        if self._part is not None:
            await self._part.gone()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _carry_out(self, order: TransferOrder) -> TransferAnswer:
        if order.boot or not isinstance(order, Keep | Digest | Distrust):
            self._check_boot(order.boot)
        match order:
            case Join(rendezvous=invitation) | JoinInPlace(init=invitation):
                await self._join(order.group, invitation, order.within_s)
            case LeaveGroup(group=group):
                if self._part is not None and self._part.group == group:
                    self._part.end("the group was left")
                    await self._part.gone()
            case Keep():
                await self._keep(order)
            case Digest(chain=chain):
                digest = self._chains.digest(chain)
                return Digested(content=await self._within(order, chain[-1].snapshot, digest))
            case Distrust(chain=chain):
                await self._chains.distrust_chain(chain)
            case Begin():
                await self._of(order.group).begin(order)
            case Check(update=update, sent=sent) | CheckInPlace(update=update, info=sent):
                self._of(order.group).check(update, sent)
            case Receive(update=update, sent=sent) | ReceiveInPlace(update=update, info=sent):
                await self._of(order.group).receive(update, sent, order.within_s)
            case Finish():
                return await self._of(order.group).finish(order)
            case Drop():
                self._of(order.group).drop(order.update)
            case Alive():
                return TrainerSeen(await self._of(order.group).trainer_state(order.within_s))
        return CarriedOut()

    def _check_boot(self, meant: str) -> None:
        boot = self._boot()
        if boot is None:
            raise AnotherBoot("the engine is starting; the groups of the boot before have ended")
        if boot != meant:
            raise AnotherBoot("the replica restarted after it was given its place in the group")

    def _of(self, group: str) -> GroupPart:
        if self._part is None:
            raise Conflict(f"group {group}: this replica takes part in no group")
        if self._part.group != group:
            raise Conflict(
                f"group {group}: this replica takes part in group {self._part.group}, which is {self._part.phase.value}"
            )
        return self._part

    async def _join(self, group: str, invitation: Rendezvous | InitInfo, within_s: float) -> None:
        receiver = None if self.receivers is None else self.receivers()
        backend = invitation.backend if isinstance(invitation, InitInfo) else ""
        if receiver is None or receiver.backend != backend:
            has = "takes no weights from trainers" if receiver is None else f"has {_kind(receiver.backend)}"
            raise InvalidRequest(
                f"init_info: for {_kind(backend)}, and this replica {has}", param="init_info"
            )
        older = self._part
        part = self._part = GroupPart(group, receiver, self._chains, self._sleep)
        if older is not None:
            older.end(f"group {group} replaced it")
            await older.gone()
        await part.join(invitation, within_s)

    async def _keep(self, order: Keep) -> None:
        put = self._chains.whole_files.keep(order.snapshot, order.bucket, order.content)
        await self._within(order, order.snapshot, put)

    async def _within(self, order: Keep | Digest, snapshot: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(order.within_s):
                return await work
        except TimeoutError as error:
            doing = "put into its bucket" if isinstance(order, Keep) else "digested"
            raise ReplicaUnavailable(f"{snapshot}: was not {doing} within {order.within_s:g} s") from error
        except SnapshotError as error:
            raise ReplicaUnavailable(str(error)) from error


def _kind(backend: str) -> str:
    return f"vLLM's backend {backend}" if backend else "a receiver of its own"
