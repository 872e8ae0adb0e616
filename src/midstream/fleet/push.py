"""The door of a push: a trainer sends weights to the replicas of a deployment in four phases.

Owns: who takes part, in which order the replicas get which orders, and how each phase ends. It carries no bytes of weights.
Always holds:
- The ledger has the group (ledger/transfers.py). A call first moves the group there, then sends orders. So of two calls, or
  two gateways, one does.
- Every phase has a deadline. A group that is past it ends: its replicas leave it, and what they received is dropped.
- A trainer that may be inside a broadcast does not hang: when its update is refused, the group ends.
- No group ends because a gateway hears of no replica: it asks for another call.
- An update becomes a snapshot only if its replicas, at least the quorum, have the same bytes. Nothing of it serves before.
- A name that is refused ends nothing, nor policies in the way: the replicas hold the weights for another finish until the
  deadline.
- Work that has begun ends in its own time, whatever becomes of the trainer's connection. `close` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from midstream.core.config import PushSettings
from midstream.core.errors import (
    Conflict,
    InvalidRequest,
    MidstreamError,
    ReplicaUnavailable,
    SnapshotRefused,
)
from midstream.core.transfer import Begin, Finish, InitInfo, Received, Rendezvous
from midstream.core.types import Content, Desired
from midstream.fleet import push_members, push_parts
from midstream.fleet.push_counts import CHOSEN, Ending, PushCounts
from midstream.fleet.push_members import (
    AGAIN,
    INIT,
    NEXT,
    all_ready,
    and_ended,
    boot_of,
    left_since,
    needed,
)
from midstream.fleet.push_orders import (
    Endings,
    OrderAnswers,
    OrderRefused,
    Orders,
    ReplicaOrders,
    ask,
    read_answer,
    trainer_lives,
)
from midstream.fleet.push_signal import Finished, UpdateSignal, desired_of, finished_before
from midstream.fleet.registry import Deployment
from midstream.ledger import (
    NOTHING_SAID,
    Begun,
    Committing,
    Event,
    GroupMoved,
    Ledger,
    LedgerUnavailable,
    Phase,
    Transfer,
    TransferMember,
)
from midstream.ledger.transfers import MOVES

logger = logging.getLogger(__name__)

#: A gateway ends its own phases by then. Other gateways wait so much longer.
GRACE_S = 10.0
#: After so long a ledger that did not answer is asked again.
RECALL_AGAIN_S = 0.5
#: Of the time to finish: once the quorum has finished, others are waited for until then.
STRAGGLERS_SHARE = 0.5
#: Work that has begun has so long when the gateway closes.
CLOSE_S = 5.0
#: Phases in which replicas may hold bytes of an update.
_UNFINISHED = (Phase.STARTING, Phase.STARTED, Phase.RECEIVING, Phase.FINISHING, Phase.UNNAMED)

T = TypeVar("T")


class PushDoor:
    """Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        settings: PushSettings,
        *,
        orders: Callable[[Deployment], Orders] = ReplicaOrders,
        group_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """group_id: makes names of groups."""
        self._ledger = ledger
        self._settings = settings
        self._orders = orders
        self._group_id = group_id
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endings = Endings()
        self.counts = PushCounts()
        #: Is called when an update was committed, and serves.
        self.on_commit: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<PushDoor with {len(self._tasks)} calls>"

    def orders(self, deployment: Deployment) -> Orders:
        return self._orders(deployment)

    async def run(self, work: Coroutine[Any, Any, T], phase: Phase | None = None) -> T:
        """The result of the work, which ends by itself if its caller goes. phase: the time it takes is counted for it."""
        task = asyncio.create_task(work if phase is None else self._timed(work, phase))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _timed(self, work: Coroutine[Any, Any, T], phase: Phase) -> T:
        began = asyncio.get_running_loop().time()
        done = await work
        self.counts.seconds[phase.value].observe(asyncio.get_running_loop().time() - began)
        return done

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a call of a push ended with: %s", error)

    async def close(self) -> None:
        """Wait for the work that has begun, for CLOSE_S at most. Another gateway ends the groups of what is cut short."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=CLOSE_S)
        left = tuple(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._endings.close()

    # -- the calls

    async def init(self, deployment: Deployment, asked: Rendezvous | InitInfo) -> Transfer:
        """Form a group of the trainer and every replica. Raises MidstreamError."""
        if isinstance(asked, InitInfo):
            push_members.check_crossing(await self._ledger.deployment(deployment.name))
        members, trainer = all_ready(deployment, asked), push_parts.trainer_name(asked)
        await self._make_way(deployment, trainer)
        join_s = self._settings.join_s
        group = await self._ledger.open_transfer(
            deployment.name, self._group_id(), members, trainer, join_s + GRACE_S
        )

        def join(member: TransferMember) -> Any:
            return push_parts.join(group, member, asked, join_s)

        await self._all_do(deployment, group, join, "join the group")
        return await self._advance(deployment, group, Event.JOINED)

    async def start(self, deployment: Deployment, begun: Begun = NOTHING_SAID) -> Transfer:
        """Have every replica make room for an update. begun: what is known of it. Raises MidstreamError."""
        settings = self._settings
        seen = await self._open(deployment, Event.START)
        await self._check_members(deployment, seen)
        group = await self._ledger.move_transfer(
            seen, Event.START, within_s=settings.update_s + GRACE_S, begun=begun
        )
        if seen.phase is Phase.UNNAMED:
            self.counts.updates["dropped"] += 1
            await self._endings.drop(self._orders(deployment), seen)
        live_s = settings.update_s + settings.finish_s + 2 * GRACE_S

        def begin(member: TransferMember) -> Begin:
            within_s = min(settings.join_s, settings.update_s)
            update = group.number
            return Begin(group=group.group, boot=member.boot, within_s=within_s, update=update, live_s=live_s)

        await self._all_do(deployment, group, begin, "make room for the update")
        return await self._advance(deployment, group, Event.STARTED)

    async def update(self, deployment: Deployment, sent: push_parts.Sent) -> Transfer:
        """Have the replicas receive these tensors. Raises MidstreamError; the group has ended unless it is a Conflict."""
        group = await self._ledger.move_transfer(await self._open(deployment, Event.UPDATE), Event.UPDATE)
        try:
            push_parts.check_parts(group, sent)
        except InvalidRequest as error:
            await self._raise_refusal(deployment, group, OrderRefused(error.message, error.param))
        for tensors in sent:
            within_s = min(self._left_s(group), self._settings.join_s)
            check = partial(push_parts.check, group, sent=tensors, within_s=within_s)
            group = await self._some_do(deployment, group, check, "check the tensors")
        for tensors in sent:
            receive = partial(push_parts.receive, group, sent=tensors, within_s=self._left_s(group))
            group = await self._some_do(deployment, group, receive, "receive tensors")
        return await self._advance(deployment, group, Event.RECEIVED)

    async def refuse(self, deployment: Deployment, error: MidstreamError) -> NoReturn:
        """End the group, whose trainer waits in a broadcast of tensors that cannot be taken. Raises the error."""
        group = await self._ledger.transfer(deployment.name)
        if group is not None and group.phase is Phase.STARTED:
            await self.end(deployment, group, "refused", error.message)
            raise InvalidRequest(and_ended(error.message), param=error.param) from error
        raise error

    async def finish(
        self, deployment: Deployment, publishing: UpdateSignal, said: Begun = NOTHING_SAID
    ) -> Finished:
        """Make a snapshot of what the replicas received, and wait until they serve it. Raises MidstreamError.

        said: by the trainer. A call whose answer was lost may be repeated, and changes nothing then. When the name is refused,
        or what is said of policies, the replicas hold the weights, and another call may come until the deadline.
        """
        finish_s = self._settings.finish_s
        there = await self._ledger.transfer(deployment.name)
        before = await finished_before(self._ledger, deployment.name, there, said)
        if before is not None:
            await publishing.served(before.desired, before.replicas, finish_s)
            return before
        seen = await self._check(deployment, there, Event.FINISH)
        push_members.check_reachable(deployment, seen, every=False)
        # The replicas hold the weights for a name as long as they would have had for the first one.
        within_s = None if seen.phase is Phase.UNNAMED else finish_s + GRACE_S
        group = await self._ledger.move_transfer(seen, Event.FINISH, within_s=within_s)
        if (finish_within_s := self._left_s(group)) <= 0:
            await self._fail(deployment, group, {}, "finish the update")
        until = asyncio.get_running_loop().time() + finish_s
        found = await self._ask(
            deployment,
            group,
            lambda member: Finish(
                group=group.group, boot=member.boot, within_s=finish_within_s, update=group.number
            ),
            lambda: left_since(deployment, group),
            # The rest of the time is for those that have the bytes, to serve them.
            finish_within_s * STRAGGLERS_SHARE,
        )
        if found.refused is not None:
            await self._drop(deployment, group)
            raise InvalidRequest(found.refused.message, param=found.refused.param)
        left = left_since(deployment, group)
        group = await self._fence(deployment, group, found, "finish the update", left)
        content = await self._agreed(deployment, group, found, seen)
        out = {member.replica: member.fenced for member in group.members if member.fenced}
        fenced = {name: why for name, why in out.items() if name not in left}
        committing = Committing(
            transfer=group,
            replicas=tuple(member.replica for member in group.active),
            keep=self._settings.keep,
            ends=_words(out),
        )
        desired = await self._sign(deployment, publishing, content, committing)
        self.counts.updates["fenced" if fenced else "committed"] += 1
        if out:
            self.counts.groups_ended["fenced" if fenced else "members"] += 1
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        try:
            await publishing.served(desired, committing.replicas, left_s)
        finally:
            if out:
                await self._endings.release(self._orders(deployment), group, group.active, drop=False)
        # Keeping the files would take the disk and the ledger from the swap.
        self.on_commit()
        return Finished(desired, committing.replicas, fenced)

    async def shutdown(self, deployment: Deployment) -> bool:
        """End the group; whether there was one."""
        while (group := await self._ledger.transfer(deployment.name)) is not None:
            # Another call may move it meanwhile. It is ended where it is then.
            if await self.end(deployment, group, "shutdown", "the trainer shut it down"):
                return True
        return False

    async def end(self, deployment: Deployment, seen: Transfer, ending: Ending, reason: str) -> bool:
        """End the group unless it was moved since; have all replicas leave it. Whether it was ended here.

        ending: the kind of the reason, which is counted.
        """
        try:
            await self._ledger.move_transfer(seen, Event.END, reason=reason)
        except GroupMoved:
            return False
        self.counts.groups_ended[ending] += 1
        if seen.phase in _UNFINISHED:
            self.counts.updates["ended"] += 1
        level = logging.INFO if ending in CHOSEN else logging.WARNING
        logger.log(level, "the trainer's group %s of %s has ended: %s", seen.group, deployment.name, reason)
        await self._endings.release(
            self._orders(deployment), seen, seen.members, drop=seen.phase in _UNFINISHED
        )
        return True

    # -- steps of them

    async def _open(self, deployment: Deployment, event: Event) -> Transfer:
        """The group, in a phase in which the call may come. Raises Conflict."""
        return await self._check(deployment, await self._ledger.transfer(deployment.name), event)

    async def _check(self, deployment: Deployment, group: Transfer | None, event: Event) -> Transfer:
        """The group, if the call may come in its phase. Raises Conflict."""
        if group is None:
            raise Conflict(f"no trainer's group is open for {deployment.name}; {INIT}")
        if group.late(self._ledger.clock()):
            reason = f"it was past its deadline while it was {group.phase}"
            await self.end(deployment, group, "deadline", reason)
            raise Conflict(f"the trainer's group has ended: {reason}; {INIT}")
        if (group.phase, event) not in MOVES:
            raise Conflict(f"the trainer's group is {group.phase}; {NEXT[group.phase]}")
        return group

    async def _make_way(self, deployment: Deployment, trainer: str) -> None:
        """End the group that there is, unless another trainer lives in it. Raises Conflict."""
        old = await self._ledger.transfer(deployment.name)
        if old is None:
            return
        late = old.late(self._ledger.clock())
        there = [member for member in old.active if boot_of(deployment, member.replica) == member.boot]
        if not late and old.trainer != trainer and await trainer_lives(self._orders(deployment), old, there):
            raise Conflict(
                f"another trainer's group, of {old.trainer}, is open for {deployment.name} and {old.phase};"
                " end it with /shutdown_weight_transfer_engine, or with its trainer"
            )
        if not await self.end(deployment, old, "replaced", "another group replaced it"):
            raise Conflict(f"the trainer's group of {deployment.name} was moved meanwhile; {AGAIN}")

    async def _check_members(self, deployment: Deployment, group: Transfer) -> None:
        """Raises ReplicaUnavailable, and Conflict when others, or other boots, are to take part; the group has ended then."""
        if not (changed := push_members.changed_since(deployment, group)):
            push_members.check_reachable(deployment, group, every=True)
            return
        await self.end(deployment, group, "members", ", ".join(changed))
        size = min(member.rank for member in group.members) + push_members.ranks_of(deployment)
        raise Conflict(f"{', '.join(changed)}: the world size is {size} now; {AGAIN}")

    async def _all_do(
        self, deployment: Deployment, group: Transfer, order: Callable[[TransferMember], Any], what: str
    ) -> None:
        """Each member does it, or the group ends. Raises InvalidRequest, ReplicaUnavailable."""
        found = await ask(self._orders(deployment), group.active, order)
        await self._raise_refusal(deployment, group, found.refused)
        if found.failed:
            await self._fail(deployment, group, found.failed, what)

    async def _some_do(
        self, deployment: Deployment, group: Transfer, order: Callable[[TransferMember], Any], what: str
    ) -> Transfer:
        """At least the quorum does it; the others are fenced. Or the group ends. Raises MidstreamError."""
        if self._left_s(group) <= 0:
            await self._fail(deployment, group, {}, what)
        found = await self._ask(deployment, group, order)
        await self._raise_refusal(deployment, group, found.refused)
        return await self._fence(deployment, group, found, what)

    async def _ask(
        self,
        deployment: Deployment,
        group: Transfer,
        order: Callable[[TransferMember], Any],
        left: Callable[[], Collection[str]] = tuple,
        patience_s: float | None = None,
    ) -> OrderAnswers:
        """left: members that do not count. patience_s: for those beyond the quorum."""
        gone = set(left())
        members = [member for member in group.active if member.replica not in gone]
        may_fail = len(members) - needed(group, self._settings.quorum, gone)
        return await ask(self._orders(deployment), members, order, may_fail, left, patience_s)

    async def _raise_refusal(
        self, deployment: Deployment, group: Transfer, refused: OrderRefused | None
    ) -> None:
        if refused is not None:
            await self.end(deployment, group, "refused", refused.message)
            raise InvalidRequest(and_ended(refused.message), param=refused.param)

    async def _fail(
        self, deployment: Deployment, group: Transfer, failed: dict[str, str], what: str
    ) -> NoReturn:
        why = _words(failed) or f"{group.phase} took longer than its deadline allows"
        await self.end(deployment, group, "failed" if failed else "deadline", f"did not {what}: {why}")
        raise ReplicaUnavailable(and_ended(f"not every replica could {what}: {why}"))

    async def _fence(
        self,
        deployment: Deployment,
        group: Transfer,
        found: OrderAnswers,
        what: str,
        left: Mapping[str, str] | None = None,
    ) -> Transfer:
        """The group without members that did not answer, which leave it. Raises ReplicaUnavailable below the quorum.

        left: members that do not count, with the reasons.
        """
        left = left or {}
        lost = [member for member in group.active if member.replica not in found.answers]
        if not lost:
            return group
        # One that left, and came back meanwhile, was not asked.
        unasked = {one.replica: f"{one.replica} gave no answer" for one in lost}
        reasons = {name: left.get(name) or found.failed.get(name) or why for name, why in unasked.items()}
        there = [member for member in group.active if member.replica not in {**reasons, **left}]
        if len(there) < needed(group, self._settings.quorum, left):
            await self._fail(deployment, group, found.failed or reasons, what)
        members = tuple(
            member._replace(fenced=reasons.get(member.replica, member.fenced)) for member in group.members
        )
        await self._endings.release(self._orders(deployment), group, lost, drop=True)
        logger.warning("the push to %s continues without: %s", deployment.name, _words(reasons))
        return await self._advance(deployment, group, Event.FENCED, members)

    async def _agreed(
        self, deployment: Deployment, group: Transfer, found: OrderAnswers, seen: Transfer
    ) -> Content:
        """The content that all have. seen: the group before its finish. Raises ReplicaUnavailable; the group has ended then."""
        received = {name: read_answer(answer, Received) for name, answer in found.answers.items()}
        unread = {name: f"{name} answered something else" for name, one in received.items() if one is None}
        if unread:
            await self._fail(deployment, group, unread, "finish the update")
        contents = {name: one.content for name, one in received.items() if one is not None}
        # With another name they say again what was counted with the first one.
        for name, one in received.items() if seen.phase is not Phase.UNNAMED else ():
            self.counts.received_bytes[name] += one.received_bytes if one is not None else 0
        first, *others = contents
        differing = [name for name in others if contents[name] != contents[first]]
        if differing:
            why = {name: f"{name} has other bytes than {first}" for name in differing}
            await self._fail(deployment, group, why, "agree on the bytes")
        return contents[first]

    async def _sign(
        self, deployment: Deployment, publishing: UpdateSignal, content: Content, committing: Committing
    ) -> Desired:
        group = committing.transfer
        try:
            return (await publishing.sign(content, committing)).desired
        except GroupMoved:
            await self._endings.release(self._orders(deployment), group, group.members, drop=True)
            raise
        except LedgerUnavailable:
            # The answer to the commit may be lost.
            return await self._recall(deployment, group)
        except MidstreamError as error:
            if not isinstance(error, SnapshotRefused) and error.param != "policies":
                await self._drop(deployment, group)
                raise
            await self._ledger.move_transfer(group, Event.NAME_REFUSED)
            why = f"{error.message}. The replicas hold the weights for {max(0.0, self._left_s(group)):.0f} s"
            raise type(error)(f"{why}: {NEXT[Phase.UNNAMED]}", param=error.param) from error

    async def _recall(self, deployment: Deployment, group: Transfer) -> Desired:
        """What a commit whose answer was lost made. Raises LedgerUnavailable if nothing was committed, or none can tell.

        Engines may stand still with the weights until this is known, so the ledger is asked for as long as the phase lasts. The
        files are not dropped before: they are the only ones, if it was committed.
        """
        while True:
            try:
                update = await self._ledger.committed_update(group)
                break
            except LedgerUnavailable:
                if self._left_s(group) <= 0:
                    raise
                await asyncio.sleep(RECALL_AGAIN_S)
        if update is None:
            await self._ledger.move_transfer(group, Event.NAME_REFUSED)
            raise LedgerUnavailable("the ledger did not take the update; call /finish_weight_update again")
        return await desired_of(self._ledger, deployment.name, update)

    async def _drop(self, deployment: Deployment, group: Transfer) -> None:
        """The update is refused, and the group waits for the next one. Raises GroupMoved."""
        await self._ledger.move_transfer(group, Event.DROPPED)
        self.counts.updates["dropped"] += 1
        await self._endings.drop(self._orders(deployment), group)

    async def _advance(
        self,
        deployment: Deployment,
        group: Transfer,
        event: Event,
        members: Sequence[TransferMember] | None = None,
    ) -> Transfer:
        """Move a group on after its replicas did what they were to do. Raises GroupMoved when it was ended meanwhile."""
        try:
            return await self._ledger.move_transfer(group, event, members=members)
        except GroupMoved:
            # Whoever ended it may have died before the replicas left it.
            await self._endings.release(self._orders(deployment), group, group.members, drop=True)
            raise

    def _left_s(self, group: Transfer) -> float:
        """Until this gateway has to end the phase."""
        return (group.deadline or 0.0) - GRACE_S - self._ledger.clock()


def _words(failed: dict[str, str]) -> str:
    return "; ".join(failed.values())
