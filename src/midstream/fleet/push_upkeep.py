"""What is left of pushes when no call works on them: groups past their deadline, and files that are not in the bucket yet.

Whole files of incremental snapshots with long chains (a rebase) come into the bucket in the same way.

Always holds:
- Every gateway looks at the ledger once in LOOK_S. So what a dead gateway left is done by another one.
- A group that waits for its trainer ends soon after its last replica has left it, as replicas leave a trainer that is gone.
- One replica at a time brings the files of an update into the bucket. One that serves them is asked first.
- What is desired is never given up: a bucket may come back after an hour.
- The files of an identity that means others by now, or is not known any more, are kept nowhere. Nor are those that no replica
  ever served, once something else is desired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from midstream.core.errors import MidstreamError, NotFound
from midstream.core.retry import Backoff
from midstream.core.transfer import Keep
from midstream.fleet.push import PushDoor
from midstream.fleet.push_members import boot_of, left_since
from midstream.fleet.push_orders import keep, may_have_members
from midstream.fleet.rebase import KEEP_S, rebased
from midstream.fleet.registry import Deployment, Deployments
from midstream.ledger import Kept, Ledger, LedgerUnavailable, Phase, Transfer, Unkept

logger = logging.getLogger(__name__)

LOOK_S = 1.0
#: Between two looks whether replicas are still in a group that waits for its trainer.
MEMBERS_LOOK_S = 30.0
#: If its gateway is gone, another one begins after so long.
LEASE_S = 30.0
#: All replicas failed. They are asked again after so long, and after twice that the next time.
KEEP_AGAIN = Backoff(first_s=5.0, last_s=60.0)
#: What is not desired any more is given up after so many rounds.
KEEP_ROUNDS = 10


class PushUpkeep:
    """Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        door: PushDoor,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """sleep: between two renewals of a claim."""
        self._ledger = ledger
        self._deployments = deployments
        self._door = door
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._keeping: dict[tuple[str, int], asyncio.Task[None]] = {}
        #: By group, when it was looked at last, by the ledger's clock; and the looks under way.
        self._looked: dict[str, float] = {}
        self._looking: set[asyncio.Task[None]] = set()
        door.on_commit = self._wake.set

    def __repr__(self) -> str:
        return f"<PushUpkeep keeps {len(self._keeping)} updates>"

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self.look_once()
                except MidstreamError as error:
                    # The ledger does not answer, or a deployment went meanwhile.
                    logger.debug("pushes are looked after later: %s", error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            tasks = (*self._keeping.values(), *self._looking)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look_once(self) -> None:
        """End what is past its deadline, and begin to keep what is not kept. Raises LedgerUnavailable."""
        groups = await self._ledger.open_transfers()
        counts = self._door.counts
        counts.open = {group.deployment: group.phase for group in groups}
        counts.waiting_s = await self._ledger.updates_waiting_s()
        now = self._ledger.clock()
        self._looked = {group.group: self._looked.get(group.group, now) for group in groups}
        for group in groups:
            deployment = self._deployments.known(group.deployment)
            if deployment is None:
                continue
            if group.late(now):
                await self._door.end(
                    deployment, group, "deadline", f"it was past its deadline while it was {group.phase}"
                )
            elif group.phase is Phase.JOINED and now - self._looked[group.group] >= MEMBERS_LOOK_S:
                self._looked[group.group] = now
                task = asyncio.create_task(self._end_if_left(deployment, group), name="members of a group")
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)
        for update in await self._ledger.unkept_updates():
            deployment = self._deployments.known(update.deployment)
            if deployment is not None and (update.of, update.key) not in self._keeping:
                await self._begin_to_keep(deployment, update)

    async def kept(self) -> None:
        """Returns when what has begun is over."""
        await asyncio.gather(*self._keeping.values(), *self._looking, return_exceptions=True)

    async def _end_if_left(self, deployment: Deployment, group: Transfer) -> None:
        gone = left_since(deployment, group)
        active = [member for member in group.active if member.replica not in gone]
        boots = {member: boot_of(deployment, member.replica) for member in active}
        there = [member for member, boot in boots.items() if boot == member.boot]
        orders = self._door.orders(deployment)
        if None in boots.values() or await may_have_members(orders, group, there):
            return
        try:
            await self._door.end(
                deployment, group, "left", "no replica is in it any more: its trainer is gone"
            )
        except LedgerUnavailable as error:
            logger.debug("a group that its replicas left ends later: %s", error)

    async def _begin_to_keep(self, deployment: Deployment, update: Unkept) -> None:
        if update.content is None and not update.chain:
            logger.info(
                "the files of %s are not kept: it means others now, or nothing, or was never served",
                update.identity,
            )
            await self._settle(update, "given up", 0.0, update.tries, update.reason)
            return
        if not self.replicas(deployment, update) or not await self._ledger.claim_keeping(update, LEASE_S):
            return
        task = asyncio.create_task(self._keep(deployment, update), name=f"keep {update.identity}")
        self._keeping[update.of, update.key] = task
        task.add_done_callback(lambda _: self._keeping.pop((update.of, update.key), None))

    def replicas(self, deployment: Deployment, update: Unkept) -> list[str]:
        """Those that may have the files: the ones that serve them, or else, when something else is desired, all."""
        heard = [view for view in deployment.replicas.views if view.report is not None]
        serving = [view.name for view in heard if view.report and view.report.own.snapshot == update.identity]
        if update.desired:
            return serving
        return serving or [view.name for view in heard]

    async def _keep(self, deployment: Deployment, update: Unkept) -> None:
        renewing = asyncio.create_task(self._renew(update), name=f"claim on {update.identity}")
        try:
            if update.of == "rebase":
                update, failed = await rebased(
                    self._door.orders(deployment), update, self.replicas(deployment, update)
                )
            else:
                failed = ""
            failed = failed or await self._ask(deployment, update)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        counts = self._door.counts.keeps if update.of == "update" else self._door.counts.rebases
        rounds = update.tries + 1
        if not failed:
            counts["kept"] += 1
            await self._settle(update, "kept", 0.0, rounds)
        elif not update.desired and (rounds >= KEEP_ROUNDS or update.of == "rebase"):
            # The next incremental snapshot is tried instead of one that is not desired any more.
            said = logging.ERROR if update.of == "update" else _level(update)
            logger.log(said, "%s is not in the bucket, and is given up: %s", _named(update), failed)
            counts["given_up"] += 1
            await self._settle(update, "given up", 0.0, rounds, failed)
        else:
            logger.log(_level(update), "%s is not in the bucket yet: %s", _named(update), failed)
            await self._settle(update, "wanted", KEEP_AGAIN.pause_s(rounds), rounds, failed)

    async def _ask(self, deployment: Deployment, update: Unkept) -> str:
        """Ask one replica after the other. Why the last one failed; empty when one has brought the files there."""
        assert update.content is not None
        failed: str | None = "no replica is there"
        for replica in self.replicas(deployment, update):
            order = Keep(
                group=update.group,
                boot="",
                within_s=KEEP_S,
                snapshot=update.name or update.identity,
                bucket=update.bucket,
                content=update.content,
            )
            failed = await keep(self._door.orders(deployment), replica, order)
            if failed is None:
                logger.info("%s wrote %s into the bucket", replica, _named(update))
                return ""
        return failed or ""

    async def _renew(self, update: Unkept) -> None:
        while True:
            await self._sleep(LEASE_S / 3)
            await self._settle(update, "wanted", LEASE_S, update.tries + 1, update.reason)

    async def _settle(self, update: Unkept, kept: Kept, again_s: float, tries: int, reason: str = "") -> None:
        try:
            if update.of == "rebase":
                await self._ledger.settle_rebase(update, kept, again_s, tries, reason)
            else:
                await self._ledger.settle_keeping(update, kept, again_s=again_s, tries=tries)
        except NotFound:
            logger.info("nobody keeps %s any more: its deployment is gone", update.identity)
        except LedgerUnavailable as error:
            logger.warning("the ledger does not know yet what became of %s: %s", update.identity, error)


def _named(update: Unkept) -> str:
    return update.identity if update.of == "update" else f"{update.identity}, whole, as {update.name}"


def _level(update: Unkept) -> int:
    """Why a chain is not shortened is said once, until it is: `midstream status` shows it as long."""
    return logging.DEBUG if update.of == "rebase" and update.reason else logging.WARNING
