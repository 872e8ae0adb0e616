"""Deployments as the ledger wants them against the replicas that run: which should run, which leave, which are gone.

Owns: the run-time deployments (made from ledger rows, ended when their row is removed) and the messages to the supervisor.
The supervisor owns the processes: it receives the list of replicas to run, and answers with those that it runs.
Always holds:
- Level-triggered: each pass reads what changed in the ledger since the last one, looks at the whole list of running replicas,
  and says the whole of what is wanted. A lost message, or a restart of either side, only delays.
- A pass reads the ledger with one query, however many deployments and policies there are. It wakes the reconcilers of changed
  parts: none of them reads the ledger by itself.
- A replica that is to go takes no new request from then on. It is wanted until the requests on it have ended, for at most the
  deployment's drain time.
- A deployment's row is removed only when none of its replicas runs any more.
- Until the ledger was read and the supervisor was heard, what is not known here may exist: a request for it gets a 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from midstream.core.errors import NotFound, ReplicaUnavailable
from midstream.core.served_names import split_name
from midstream.core.types import BASE_SNAPSHOT
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.membership import Resolver, entries_of_row, merged
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replicas import Member
from midstream.fleet.tally import GatewayReport, Siblings
from midstream.fleet.view import ReplicaEntry
from midstream.ledger import Changes, DeploymentRow, Ledger, LedgerUnavailable

logger = logging.getLogger(__name__)

# Field of a row that is being deleted without waiting for requests, at any gateway.
HARD = "_hard"


class WantedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that the supervisor should run. name: unique in the gateway. model: resource name."""

    name: str
    deployment: str
    model: str


class RunningReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as the supervisor has it: at `url` from when it listened first, `error` while it cannot be started.

    Both when it ended and cannot be started again; neither while it starts or ends: it is listed until its process is gone.
    """

    name: str
    deployment: str
    url: str | None = None
    error: str | None = None


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that should run, as one gateway says it. report: of that gateway. No other message may be read as an empty list."""

    replicas: tuple[WantedReplica, ...] = ()
    report: GatewayReport | None = None


class Running(msgspec.Struct, frozen=True):
    """All that the supervisor runs, or tries to. siblings: the gateways beside the receiver."""

    replicas: tuple[RunningReplica, ...] = ()
    siblings: Siblings = Siblings()


class DesiredState:
    """All deployments of a gateway. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        make: Callable[[DeploymentRow], Deployment],
        tell: Callable[[Wanted], None],
        *,
        settings: Mapping[str, ReplicaEntry] = MappingProxyType({}),
        poll_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """make: the run-time side of a deployment in the ledger. tell: gives the supervisor the list of what should run.
        settings: what those say of single replicas; the URLs among them are the default deployment's.
        """
        self._ledger = ledger
        self._deployments = deployments
        self._make = make
        # The run-time side of a policy, from its row, its deployment and its name.
        self.make_policy: Callable[[DeploymentRow, Deployment, str], Deployment] | None = None
        self._tell = tell
        self._settings = settings
        self.resolver: Resolver | None = None
        self._poll_s = poll_s
        self._monotonic = monotonic
        #: None: not heard of the supervisor yet.
        self._running: tuple[RunningReplica, ...] | None = None
        self.siblings = Siblings()
        self.changes = 0
        #: What this gateway says of itself, with whatever it says.
        self.report: Callable[[], GatewayReport | None] = lambda: None
        self._announced: Wanted | None = None
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()
        # The serial of the ledger's changes up to which it was read.
        self._seen: int | None = None
        deployments.catching_up = True
        # The deployments' rows. And those of policies that have something left to be done; None: its row is gone.
        self._rows: dict[str, DeploymentRow] = {}
        self._open: dict[str, DeploymentRow | None] = {}
        # Deployment to the time when its row was made. A row of the same name made later is another deployment.
        self._created: dict[str, float] = {}
        # Policy to the replicas that its end was last said to wait for.
        self._awaited: dict[str, str] = {}
        # Replica to the time when it was first seen to have to go.
        self._leaving_since: dict[str, float] = {}
        self._tasks: asyncio.TaskGroup | None = None
        # Deployment to the task that keeps its replicas.
        self._run_tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<DesiredState {self._deployments!r} running={self._running}>"

    def running(self, running: Running) -> None:
        """The supervisor's list."""
        changed = running.siblings.changes != self.siblings.changes or running.replicas != self._running
        self._running, self.siblings = running.replicas, running.siblings
        if changed:
            self.wake()

    @property
    def heard(self) -> bool:
        """True once the supervisor has sent a list."""
        return self._running is not None

    @property
    def caught_up(self) -> bool:
        """True if the ledger was read, and every replica that should run can be used, as far as the supervisor has reported."""
        return not self._deployments.catching_up and all(
            len(deployment.replicas.views) >= deployment.wanted
            and all(view.usable for view in deployment.replicas.views)
            for deployment in self._deployments
        )

    def wake(self) -> None:
        """Something changed: look again at once."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Ends with an exception when something that serves a deployment does: a bug."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self.resolver is not None:
                tasks.create_task(self.resolver.run(), name="DNS name of replicas")
            for deployment in (*self._deployments, *self._deployments.policies()):
                self._start(deployment)
            while True:
                await self.look_once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._wake.wait()
                self._wake.clear()

    async def changed(self) -> None:
        """The ledger was changed here: take that up, and have the gateways beside this one look, too."""
        self.changes += 1
        await self.look_once()

    async def look_once(self) -> None:
        """Like look(). While the ledger cannot be read, the deployments that are known stay."""
        try:
            await self.look()
        except LedgerUnavailable as error:
            logger.warning("the deployments stay as they are known: %s", error)

    async def look(self) -> None:
        """One pass over all deployments; a change of the ledger before it is taken up when it returns.

        Raises LedgerUnavailable.
        """
        async with self._looking:
            self._take_in(await self._ledger.changes(self._seen))
            await self._arrange_all()

    async def _arrange_all(self) -> None:
        rows = self._rows
        await self._end_policies()
        for row in rows.values():
            known = self._deployments.known(row.name)
            if known not in (None, self._deployments.default) and self._created[row.name] != row.created_at:
                # Another gateway deleted it, and a new one was made.
                await self._end(known, None)
            self._take_up(row)
        wanted: list[WantedReplica] = []
        for deployment in self._deployments:
            kept = self._arrange(deployment)
            wanted += (
                WantedReplica(name=name, deployment=deployment.name, model=deployment.model) for name in kept
            )
            gone = not kept and not self._of(deployment) and self._running is not None
            if deployment is not self._deployments.default and (
                deployment.name not in rows or (deployment.deleting and gone)
            ):
                await self._end(deployment, rows.get(deployment.name))
                if self._deployments.known(deployment.name) is None:
                    rows.pop(deployment.name, None)
        self._take_up_policies()
        self._deployments.catching_up = not self.heard
        self._say(tuple(wanted))

    def _take_in(self, found: Changes) -> None:
        """Note what changed, and have the reconcilers that it concerns read the ledger."""
        known = {policy.name for policy in self._deployments.policies()} if found.whole else set()
        rows = {**dict.fromkeys(known), **found.rows}
        if found.whole:
            self._rows.clear()
        for name, row in rows.items():
            if not name.startswith(f"{self._deployments.default.names.account}/"):
                continue
            if split_name(name)[1]:
                self._open[name] = row
            elif row is None:
                self._rows.pop(name, None)
            else:
                self._rows[name] = row
            if row is not None and (changed := self._deployments.known(name)) is not None:
                changed.reconciler.signalled()
        self._seen = found.serial

    async def _end_policies(self) -> None:
        """End those that are gone or have to go, before their deployments do."""
        for name, row in tuple(self._open.items()):
            policy = self._deployments.known(name)
            if policy is None:
                continue
            if row is None or self._created[name] != row.created_at:
                # Another gateway ended it. What this one said last may have come after that.
                await self._end_on_replicas(policy, None)
                await self._end(policy, None)
            elif row.deleting and policy.deleting:
                await self._end_on_replicas(policy, row)
                if self._deployments.known(name) is None:
                    del self._open[name]

    async def _end_on_replicas(self, policy: Deployment, row: DeploymentRow | None) -> None:
        """The row goes once no replica has the policy: one of the same name is not taken for it."""
        policy.replicas.ending = True
        unheard = policy.replicas.facts.unheard(policy.host.wanted)
        if self._running is None or unheard:
            names = ", ".join(unheard)
            if names and self._awaited.get(policy.name) != names:
                self._awaited[policy.name] = names
                logger.warning(
                    "the end of %s waits for %s: no report came, so it may be there", policy.name, names
                )
            return
        # What is on its way arrives before the end does.
        await policy.reconciler.settle()
        try:
            await policy.replicas.send_end(everywhere=row is None)
        except ReplicaUnavailable as error:
            logger.info("%s is ended later: %s", policy.name, error)
            return
        if row is not None and not policy.replicas.is_held:
            await self._end(policy, row)

    def _take_up_policies(self) -> None:
        for name, row in tuple(self._open.items()):
            # One that is being ended stays open until it is gone.
            if row is None or (self._take_up_policy(row) and not row.deleting):
                del self._open[name]

    def _take_up_policy(self, row: DeploymentRow) -> bool:
        """Whether it could be: its deployment is known."""
        name, own = split_name(row.name)
        of, policy = self._deployments.known(name), self._deployments.known(row.name)
        if of is None or of.policy:
            return False
        if policy is None:
            if self.make_policy is None:
                return False
            policy = self.make_policy(row, of, own)
            self._deployments.add(policy)
            self._created[row.name] = row.created_at
            self._start(policy)
            logger.info("policy %s of %s", own, name)
        policy.published = row.desired_snapshot != BASE_SNAPSHOT
        policy.deleting = row.deleting
        return True

    def report_now(self) -> None:
        """Tell the supervisor what this gateway says of itself, without another look at the ledger."""
        if self._announced is not None:
            self._say(self._announced.replicas)

    def _say(self, replicas: tuple[WantedReplica, ...]) -> None:
        message = Wanted(replicas, self.report())
        if message != self._announced:
            self._announced = message
            self._tell(message)

    def _take_up(self, row: DeploymentRow) -> None:
        deployment = self._deployments.known(row.name)
        if deployment is None:
            deployment = self._make(row)
            self._deployments.add(deployment)
            self._created[row.name] = row.created_at
            self._start(deployment)
            logger.info("deployment %s: %d replicas of %s", row.name, replica_count(row), row.model)
        deployment.wanted = replica_count(row)
        deployment.entries = self._entries(deployment, row)
        unknown = row.fields.get("unknownFields")
        deployment.ignores_fields = None if unknown is None else unknown == "IGNORE"
        if row.deleting and row.fields.get(HARD):
            deployment.drain_s = 0.0
        deployment.deleting = row.deleting

    def _entries(self, deployment: Deployment, row: DeploymentRow) -> dict[str, ReplicaEntry]:
        if row.deleting:
            return {}
        entries = entries_of_row(row)
        if deployment is self._deployments.default:
            resolved = {} if self.resolver is None else self.resolver.entries
            return merged(resolved, self._settings, entries)
        weights = {name: entry for name, entry in self._settings.items() if entry.url is None}
        return merged(weights, entries)

    def _start(self, deployment: Deployment) -> None:
        if self._tasks is not None and deployment.name not in self._run_tasks:
            task = self._tasks.create_task(deployment.run(), name=f"replicas of {deployment.name}")
            self._run_tasks[deployment.name] = task

    async def _end(self, deployment: Deployment, row: DeploymentRow | None) -> None:
        if (task := self._run_tasks.pop(deployment.name, None)) is not None:
            # The task reads the row: it ends before the row goes.
            task.cancel()
            await asyncio.wait((task,))
        try:
            if row is not None:
                await self._ledger.delete_deployment(row.name)
        except LedgerUnavailable as error:
            logger.warning("deployment %s is removed later: %s", row and row.name, error)
            return
        except NotFound:
            # Another gateway was faster.
            pass
        if deployment.policy:
            deployment.replicas.close()
        else:
            deployment.replicas.facts.set_members(())
        self._deployments.remove(deployment)
        self._created.pop(deployment.name, None)
        self._awaited.pop(deployment.name, None)
        logger.info("deployment %s is deleted", deployment.name)

    def _of(self, deployment: Deployment) -> list[RunningReplica]:
        return [replica for replica in self._running or () if replica.deployment == deployment.name]

    def _arrange(self, deployment: Deployment) -> list[str]:
        """Set the members of one deployment; the names of the replicas that should run."""
        names = deployment.replica_names
        if self._running is None:
            return names
        running = self._of(deployment)
        deployment.problems = {r.name: r.error for r in running if r.error is not None and r.name in names}
        up = sorted((r.name, r.url) for r in running if r.url is not None)
        order = {name: place for place, name in enumerate(names)}
        up.sort(key=lambda one: order.get(one[0], len(order)))
        entries = deployment.entries
        weights = {name: entry.weight for name, entry in entries.items() if entry.weight is not None}
        members = [Member(name, url, weights.get(name, 1.0)) for name, url in up if url is not None]
        leaving = {member.name for member in members if member.name not in order}
        leaving |= {name for name, entry in entries.items() if entry.drain}
        elsewhere = {name: entry.url for name, entry in entries.items() if entry.url is not None}
        members += [
            Member(name, url, weights.get(name, 1.0), own=False) for name, url in sorted(elsewhere.items())
        ]
        for replica in self._finishing(deployment, elsewhere):
            members.append(Member(replica.name, replica.url, replica.weight, False, replica.leaves_at))
            leaving.add(replica.name)
        ends = {name: entry.leaves_at for name, entry in entries.items() if entry.leaves_at is not None}
        members = [one._replace(leaves_at=ends.get(one.name, one.leaves_at)) for one in members]
        deployment.replicas.facts.set_members(members, leaving)
        draining = [one for one in self._draining(deployment) if one.own]
        return [*names, *(replica.name for replica in draining if replica.name not in order)]

    def _finishing(self, deployment: Deployment, elsewhere: Mapping[str, str]) -> list[KnownReplica]:
        """Replicas of others that are gone from the list and have requests left, and time for them."""
        facts = deployment.replicas.facts
        gone = [replica for replica in facts.known if not replica.own and replica.name not in elsewhere]
        kept = [replica for replica in gone if self._has_time(replica, deployment)]
        for replica in gone:
            if replica not in kept:
                del self._leaving_since[replica.name]
        return kept

    def _draining(self, deployment: Deployment) -> list[KnownReplica]:
        """Those that leave and have requests left, and time for them."""
        facts = deployment.replicas.facts
        for replica in facts.members:
            self._leaving_since.pop(replica.name, None)
        return [replica for replica in facts.leaving if self._has_time(replica, deployment)]

    def _has_time(self, replica: KnownReplica, deployment: Deployment) -> bool:
        """True if the replica, which leaves, has requests left and may still finish them."""
        now = self._monotonic()
        since = self._leaving_since.setdefault(replica.name, now)
        return replica.in_flight > 0 and now - since < deployment.drain_s


def replica_count(row: DeploymentRow) -> int:
    """How many replicas a deployment should have.

    It never scales by itself, so one that may have any has at least one: 0 only where at most 0 are asked for.
    """
    if row.deleting:
        return 0
    return max(row.replicas_min, min(1, row.replicas_max))
