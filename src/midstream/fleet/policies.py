"""The replicas of a deployment as one of its policies sees them.

A policy has a row of its own in the ledger, so its signals, its order and its reconciler are those of any deployment. Its
replicas are its deployment's: it hears them through the deployment's ReplicaSet, and speaks to them through it.

Always holds:
- A view's report is the replica's report of this policy. It is `ready` only while the replica serves a snapshot of the policy.
- A request counts on the replica itself, so all policies see its load.
"""

from __future__ import annotations

import asyncio

import msgspec

from midstream.core.types import BASE_SNAPSHOT, Desired, Hint, Pause, PolicyEnd, PolicyReport, ReplicaReport
from midstream.core.versions import ServedNames
from midstream.fleet.replicas import ReplicaSet
from midstream.fleet.view import ReplicaView

#: In the name of a policy's row, between its deployment's name and its own.
INFIX = "/policies/"


class PolicyView(ReplicaView):
    """replica: the view of the replica itself."""

    __slots__ = ("boot", "replica")

    def __init__(self, replica: ReplicaView, on_change: object) -> None:
        self.replica: ReplicaView = replica
        self.boot: str | None = None
        assert callable(on_change)
        super().__init__(
            replica.index, replica.name, replica.url, replica.weight, lambda: on_change(), replica.own
        )

    @property
    def load(self) -> int:
        return self.replica.load

    @load.setter
    def load(self, load: int) -> None:
        """The replica's own view counts."""

    @property
    def failures(self) -> int:
        return self.replica.failures

    @failures.setter
    def failures(self, failures: int) -> None:
        self.replica.failures = failures

    def follow(self, policy: str, made: float) -> bool:
        """Take over what is known of the replica. Whether anything changed."""
        replica = self.replica
        report = None if replica.report is None else report_of(replica.report, policy, made)
        boot = None if report is None else report.boot
        before = (self.report, self.standing, self.suspended, self.index, self.weight)
        self.index, self.weight = replica.index, replica.weight
        if boot is not None and boot != self.boot:
            # As for the deployment, another boot has to be admitted anew.
            self.boot, self.admitted = boot, False
        if report != self.report:
            self.report = report
        if replica.standing != self.standing:
            self.standing = replica.standing
        if replica.suspended != self.suspended:
            self.suspended = replica.suspended
        return before != (self.report, self.standing, self.suspended, self.index, self.weight)


class PolicyReplicas(ReplicaSet):
    """made: when the policy was made. What a replica says of another one of this name is not of this policy."""

    def __init__(self, replicas: ReplicaSet, policy: str, made: float = 0.0) -> None:
        self._of = replicas
        self._policy = policy
        self._made = made
        super().__init__()
        #: The policy is being ended: replicas are told of nothing else any more.
        self.ending = False
        self.learning = False
        replicas.followers.append(self.follow)
        self.follow()

    def __repr__(self) -> str:
        return f"PolicyReplicas({self._policy}, {super().__repr__()})"

    def close(self) -> None:
        self._of.followers.remove(self.follow)
        self.views = self.leaving = ()

    def follow(self) -> None:
        """Something is new in the deployment's replicas."""
        known = {view.replica: view for view in (*self.views, *self.leaving)}
        views = tuple(known.get(r) or PolicyView(r, self._use_changed) for r in self._of.views)
        leaving = tuple(known.get(r) or PolicyView(r, self._use_changed) for r in self._of.leaving)
        changed = [
            view.follow(self._policy, self._made)
            for view in (*views, *leaving)
            if isinstance(view, PolicyView)
        ]
        if any(changed) or (views, leaving) != (self.views, self.leaving):
            self.views, self.leaving = views, leaving
            self._named = {view.name: view for view in views}
            self._fleet = None
            self._changed()

    async def run(self) -> None:
        """The deployment's own set hears the replicas."""
        await asyncio.Event().wait()

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        # A replica that has just forgotten the policy would make it again.
        if not self.ending:
            own = msgspec.structs.replace(desired, policy=self._policy, made=self._made)
            await self._of.send_desired(view.replica, own)

    async def send_pause(self, view: ReplicaView, pause: Pause) -> None:
        """A pause is the deployment's, with all its policies."""

    def all_heard(self, wanted: int) -> bool:
        """Whether all replicas that there should be have reported."""
        views = (*self._of.views, *self._of.leaving)
        return len(self._of.views) >= wanted and all(view.report is not None for view in views)

    @property
    def held(self) -> bool:
        """Whether a replica still has the policy."""
        reports = (view.report for view in (*self._of.views, *self._of.leaving))
        return any(self._has(report) for report in reports)

    def _has(self, report: ReplicaReport | None) -> bool:
        return report is not None and _own(report, self._policy, self._made) is not None

    async def send_end(self, everywhere: bool = False) -> None:
        """Tell every replica that still has the policy to forget it. Raises ReplicaUnavailable.

        everywhere: those, too, that have it perhaps since their last report.
        """
        body = msgspec.json.encode(PolicyEnd(policy=self._policy, made=self._made))
        for view in self._of.views:
            if self._has(view.report) or (everywhere and view.report is not None):
                await self._of.post(view, "/replica/policy/end", body, 200)

    async def post(self, view: ReplicaView, path: str, body: bytes, expected: int) -> bytes:
        return await self._of.post(view.replica, path, body, expected)

    async def send_hint(self, view: ReplicaView, hint: Hint) -> bool:
        """Files of a policy are not fetched early."""
        return False

    def refused(self, view: ReplicaView) -> None:
        self._of.refused(view.replica)

    def replaced(self, view: ReplicaView) -> None:
        self._of.replaced(view.replica)

    def failed(self, view: ReplicaView) -> None:
        self._of.failed(view.replica)


def _own(report: ReplicaReport, policy: str, made: float) -> PolicyReport | None:
    return next((p for p in report.policies if (p.policy, p.made) == (policy, made)), None)


def report_of(report: ReplicaReport, policy: str, made: float = 0.0) -> ReplicaReport:
    """What the replica says of one policy, in the form of a whole report."""
    own = _own(report, policy, made) or PolicyReport(policy=policy)
    return ReplicaReport(
        replica=report.replica,
        boot=report.boot,
        ready=report.ready_at_all and own.sound and own.snapshot != BASE_SNAPSHOT,
        snapshot=own.snapshot,
        signalled=own.signalled,
        generation=own.generation,
        stage=own.stage,
        target=own.target,
        error=own.error,
        in_flight=own.in_flight,
        held=own.held,
        admitting=own.admitting,
        pinnable=own.pinnable,
        check=own.check,
        contents=own.contents,
        last_swap=own.last_swap,
        card=report.card,
        max_model_len=report.max_model_len,
        transitions=own.transitions,
        resident=own.resident,
    )


def names_of(deployment: ServedNames, policy: str) -> ServedNames:
    """What a policy is called: as a model, and as a part of its deployment."""
    return ServedNames(f"{deployment.account}/models/{policy}", f"{deployment.deployment}{INFIX}{policy}")


def split_name(name: str) -> tuple[str, str]:
    """(deployment, policy) of a row's name; the policy is "" for a deployment's own row."""
    deployment, _, policy = name.partition(INFIX)
    return deployment, policy
