"""Orders to the replicas of a deployment that take part in a push (core/transfer.py), and what they answer.

Owns: the port to one replica, asking several at once, and the orders that end something (`Endings`).
Always holds:
- Each order has a time within which it ends. A replica that does not answer in time has failed.
- A refusal is the request's fault, and names the field. A failure is the replica's.
- No order outlives the call that asked for it, unless it ends something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON, decoded
from midstream.core.errors import ReplicaUnavailable
from midstream.core.transfer import (
    TRANSFER_PATH,
    Alive,
    Drop,
    Keep,
    LeaveGroup,
    TrainerSeen,
    TrainerState,
    TransferOrder,
)
from midstream.fleet.registry import Deployment
from midstream.fleet.replicas import ReplicaRefused
from midstream.ledger import Transfer, TransferMember

#: A replica ends an order in time and says so. Its answer may be late by so much.
ANSWER_S = 5.0
#: A replica that is not heard for so long does not carry out an order any more. Reports come each second, and a replica takes
#: no requests after few seconds of silence, so that a busy machine does not end a push.
SILENT_S = 30.0
#: Between two looks at that.
HEARD_LOOK_S = 1.0
#: Orders that end something take a short time.
LEAVE_S = 5.0
#: A replica says within this time whether the trainer's store answers.
ALIVE_S = 5.0
#: A call waits so long for their answers. With ANSWER_S it is less than a gateway's grace, so the call ends in time.
SAY_S = 2.0

T = TypeVar("T")


class OrderRefused(Exception):
    """The replica refuses what the trainer asks for. param: the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class OrderFailed(Exception):
    """The replica did not do it. The message names the replica."""


class MemberLeft(OrderFailed):
    """The replica is not in the group any more, or the group's phase there is another one."""


class Orders(Protocol):
    """The replicas of one deployment, by name."""

    async def send(self, replica: str, order: TransferOrder) -> bytes:
        """The answer. Returns, or raises OrderRefused or OrderFailed, soon after `order.within_s` at the latest."""


class ReplicaOrders:
    """Orders by HTTP."""

    def __init__(self, deployment: Deployment) -> None:
        self._replicas = deployment.replicas

    async def send(self, replica: str, order: TransferOrder) -> bytes:
        view = self._replicas.named(replica)
        if view is None:
            raise OrderFailed(f"{replica} is gone")
        body, timeout_s = msgspec.json.encode(order), order.within_s + ANSWER_S
        posting = asyncio.create_task(self._replicas.post(view, TRANSFER_PATH, body, 200, timeout_s))
        try:
            await self._heard(replica, posting)
            return posting.result()
        except ReplicaRefused as error:
            if error.answer.status == 400:
                raise OrderRefused(error.answer.message, error.answer.param) from error
            kind = MemberLeft if error.answer.status == 409 else OrderFailed
            raise kind(error.message) from error
        except ReplicaUnavailable as error:
            raise OrderFailed(error.message) from error
        finally:
            posting.cancel()
            await asyncio.wait((posting,))

    async def _heard(self, replica: str, posting: asyncio.Task[bytes]) -> None:
        """Returns when the order is answered. Raises OrderFailed when its replica falls silent."""
        silent_s = 0.0
        while not (await asyncio.wait((posting,), timeout=HEARD_LOOK_S))[0]:
            # Counted in looks: one stall of this loop is no silence.
            silent_s = 0.0 if self._replicas.heard(replica) else silent_s + HEARD_LOOK_S
            if silent_s >= SILENT_S:
                raise OrderFailed(f"{replica} has not been heard for {silent_s:g} s")


@dataclass
class OrderAnswers:
    """What replicas answered, by name. failed: why others did not. left: those of them that raised MemberLeft. refused: the
    first refusal, which ends the wait."""

    answers: dict[str, bytes] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    refused: OrderRefused | None = None


async def ask(
    orders: Orders,
    members: Sequence[TransferMember],
    order: Callable[[TransferMember], TransferOrder],
    may_fail: int = 0,
    left: Callable[[], Collection[str]] = tuple,
    patience_s: float | None = None,
) -> OrderAnswers:
    """Send each member its order, all at once. Ends early on a refusal, or once more than `may_fail` have failed.

    left: members whose failures do not count. patience_s: once all but `may_fail` have answered, the others are waited for
    until the call is so old; None: until they answer.
    """
    found = OrderAnswers()
    now = asyncio.get_running_loop().time
    began = now()
    tasks = {
        asyncio.create_task(orders.send(member.replica, order(member))): member.replica for member in members
    }
    waiting = set(tasks)
    try:
        while waiting and found.refused is None and len(found.failed.keys() - set(left())) <= may_fail:
            lacking = {member.replica for member in members} - found.answers.keys() - set(left())
            within_s = None
            if patience_s is not None and len(lacking) <= may_fail:
                within_s = max(0.0, began + patience_s - now())
            done, waiting = await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            # In the order of the members.
            for task in [task for task in tasks if task in done]:
                _note(found, tasks[task], task)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def _note(found: OrderAnswers, replica: str, task: asyncio.Task[bytes]) -> None:
    try:
        found.answers[replica] = task.result()
    except OrderFailed as error:
        found.failed[replica] = str(error)
        if isinstance(error, MemberLeft):
            found.left.add(replica)
    except OrderRefused as error:
        found.refused = found.refused or error


async def trainer_lives(orders: Orders, group: Transfer, there: Sequence[TransferMember]) -> bool:
    """Whether no member says that the trainer of its group is gone, or one reaches it. If none answers: whether the group
    works on something.

    A trainer that may live is left its group: its members end that soon, unless it answers. there: the members that are still
    in the group.
    """
    found = await _ask_for_trainer(orders, group, there)
    seen = [read_answer(answer, TrainerSeen) for answer in found.answers.values()]
    heard = [answer.state is not TrainerState.GONE for answer in seen if answer is not None]
    return any(heard) if heard else bool(there) and group.deadline is not None


async def may_have_members(orders: Orders, group: Transfer, there: Sequence[TransferMember]) -> bool:
    """Whether a replica is in the group, or does not answer. there: as far as their boots say so."""
    found = await _ask_for_trainer(orders, group, there)
    return len(found.left) < len(there)


async def _ask_for_trainer(orders: Orders, group: Transfer, there: Sequence[TransferMember]) -> OrderAnswers:
    def order(member: TransferMember) -> Alive:
        return Alive(group=group.group, boot=member.boot, within_s=ALIVE_S)

    return await ask(orders, there, order, len(there))


def read_answer(answer: bytes, kind: type[T]) -> T | None:
    """None: it is no such answer."""
    try:
        return decoded(lambda data: msgspec.json.decode(data, type=kind), answer)
    except NOT_JSON:
        return None


class Endings:
    """Orders that end something. Use from one event loop.

    Always holds: a call waits at most SAY_S for their answers. What is under way then continues until `close`.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Endings with {len(self._tasks)} under way>"

    async def release(
        self, orders: Orders, group: Transfer, members: Iterable[TransferMember], *, drop: bool
    ) -> None:
        """Have these members leave the group, as far as they can be reached. drop: they forget what the update received."""
        name, number = group.group, group.number

        async def one(member: TransferMember) -> None:
            if drop and number:
                forget = Drop(group=name, boot=member.boot, within_s=LEAVE_S, update=number)
                await quietly(orders, member.replica, forget)
            leave = LeaveGroup(group=name, boot=member.boot, within_s=LEAVE_S)
            await quietly(orders, member.replica, leave)

        await self._all(one(member) for member in members)

    async def drop(self, orders: Orders, group: Transfer) -> None:
        """Have all members forget what the update received, as far as they can be reached."""

        async def one(member: TransferMember) -> None:
            order = Drop(group=group.group, boot=member.boot, within_s=LEAVE_S, update=group.number)
            await quietly(orders, member.replica, order)

        await self._all(one(member) for member in group.active)

    async def _all(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        tasks = [asyncio.create_task(one) for one in work]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=SAY_S)

    async def close(self) -> None:
        """Cut short what is under way."""
        left = tuple(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def quietly(orders: Orders, replica: str, order: TransferOrder) -> bool:
    """Whether the replica did it."""
    try:
        await orders.send(replica, order)
    except (OrderFailed, OrderRefused):
        return False
    return True


async def keep(orders: Orders, replica: str, order: Keep) -> str | None:
    """Why the replica did not bring the files into the bucket; None if it did."""
    try:
        await orders.send(replica, order)
    except OrderFailed as error:
        return str(error)
    except OrderRefused as error:
        return f"{replica}: {error.message}"
    return None
