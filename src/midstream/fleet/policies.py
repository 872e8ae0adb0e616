"""The replicas of a deployment as one of its policies sees them, and which of them are to hold it.

While every replica has room for all policies of the deployment, every replica is to hold every one. Else the policies follow
demand (residency.py): a replica is to hold a policy that it holds, or that it was asked to load. The replica decides what makes
way, which is not loaded again without new demand.

A policy has a row of its own in the ledger, so its signals, its order and its reconciler are those of any deployment. Its
replicas are its deployment's: it hears them through the deployment's ReplicaSet, and speaks to them through it.

Always holds:
- A view's report is the replica's report of this policy. It is `ready` only while the replica serves a snapshot of the policy.
- A request counts on the replica itself, so all policies see its load.
- A change of one policy's report wakes that policy alone. A policy that no replica is to hold costs nothing.
- A demand that no replica met lapses after ASK_S, and at once where a replica refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from midstream.core.errors import ReplicaUnavailable
from midstream.core.reports import NOT_HELD, PolicyReport, Reported
from midstream.core.served_names import POLICY_INFIX, ServedNames
from midstream.core.types import POLICIES_MAX, Desired, Hint, PolicyEnd, Stage
from midstream.fleet.replicas import ReplicaSet
from midstream.fleet.residency import PolicyPlace, State, where
from midstream.fleet.view import ReplicaView

#: How long a replica is to load a policy that it was asked for.
ASK_S = 30.0
#: How long a replica is not asked for a policy that it failed with.
FAILED_S = 30.0


class PolicyView(ReplicaView):
    """replica: the view of the replica itself. resident: it holds the policy."""

    __slots__ = ("boot", "replica", "resident")

    def __init__(self, replica: ReplicaView, on_change: object) -> None:
        self.replica: ReplicaView = replica
        self.boot: str | None = None
        self.resident = False
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

    def follow(self, report: Reported | None, resident: bool) -> bool:
        """Take over what is known of the replica. report: what it says of the policy. Whether anything changed."""
        replica = self.replica
        boot = None if report is None else report.boot
        before = (self.report, self.standing, self.suspended, self.index, self.weight)
        self.index, self.weight = replica.index, replica.weight
        self.resident = resident
        if boot is not None and (boot != self.boot or not resident):
            # As for the deployment, another boot has to be admitted again, and so does a policy that returns.
            self.boot, self.admitted = boot, False
        if report is not self.report and report != self.report:
            self.report = report
        if replica.standing != self.standing:
            self.standing = replica.standing
        if replica.suspended != self.suspended:
            self.suspended = replica.suspended
        return before != (self.report, self.standing, self.suspended, self.index, self.weight)


class Residents:
    """What the replicas of one deployment hold of its policies, as they report it; of all its policies."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._of = replicas
        self._sets: dict[tuple[str, float], PolicyReplicas] = {}
        self._members: object = None
        # Of each replica, what concerns every policy, and what it says of each.
        self._common: dict[ReplicaView, tuple[object, ...]] = {}
        self._own: dict[ReplicaView, dict[tuple[str, float], PolicyReport]] = {}
        # Of each replica, how many policies it holds at once, and how many could come without or with another's leave.
        self._most: dict[ReplicaView, int] = {}
        self._room: dict[ReplicaView, tuple[int, int]] = {}
        # What each says of a policy that it does not hold.
        self._bare: dict[ReplicaView, Reported] = {}
        #: Whether every replica is to hold every policy.
        self.everywhere = True
        #: Policies with demand that was not met when it was last looked at.
        self.unmet: dict[PolicyReplicas, None] = {}
        replicas.followers.append(self)
        self.follow()

    def __repr__(self) -> str:
        return f"Residents({len(self._sets)} policies, everywhere={self.everywhere})"

    @staticmethod
    def of(replicas: ReplicaSet) -> Residents:
        known = (follower for follower in replicas.followers if isinstance(follower, Residents))
        return next(known, None) or Residents(replicas)

    def join(self, key: tuple[str, float], policy: PolicyReplicas) -> None:
        self._sets[key] = policy
        policy.follow()
        self._spread()

    def leave(self, key: tuple[str, float]) -> None:
        self.unmet.pop(self._sets.pop(key), None)
        self._spread()

    def report_of(self, view: ReplicaView, key: tuple[str, float]) -> tuple[Reported | None, bool]:
        """What the replica says of the policy, and whether it holds it."""
        own = self._own.get(view, _NOTHING).get(key)
        if view.heard is None or own is None:
            return self.bare(view), False
        return view.heard.about(own), True

    def bare(self, view: ReplicaView) -> Reported | None:
        return None if view.heard is None else self._bare.get(view)

    def forget(self, view: ReplicaView, key: tuple[str, float]) -> None:
        """The replica does not hold it, whatever it reported last."""
        self._own.get(view, {}).pop(key, None)

    def room(self, view: ReplicaView) -> tuple[int, int]:
        return self._room.get(view, (0, 0))

    def follow(self) -> None:
        """Something is new in the deployment's replicas."""
        members = (self._of.views, self._of.leaving)
        views = (*members[0], *members[1])
        all_policies = members != self._members
        self._members = members
        changed: set[tuple[str, float]] = set()
        for view in views:
            common = _common(view)
            if self._common.get(view) != common:
                all_policies, self._common[view] = True, common
                if view.heard is not None:
                    self._bare[view] = view.heard.about(NOT_HELD)
            changed |= self._heard(view)
        for gone in self._common.keys() - set(views):
            for known in (self._common, self._own, self._most, self._room, self._bare):
                known.pop(gone, None)
        for key in tuple(self._sets) if all_policies else changed & self._sets.keys():
            self._sets[key].follow()
        self._spread()
        unmet, self.unmet = self.unmet, {}
        for policy in unmet:
            policy.look_again()

    def _heard(self, view: ReplicaView) -> set[tuple[str, float]]:
        """Take over the replica's report. The policies that are new in it."""
        report = view.heard
        told = () if report is None else report.others
        own = {(policy.policy, policy.made): policy for policy in told}
        before = self._own.get(view, _NOTHING)
        if own == before and report is not None and self._most.get(view) == report.policies_max:
            return set()
        self._own[view] = own
        if report is not None:
            self._most[view] = report.policies_max
        free = max(0, self._most.get(view, POLICIES_MAX) - len(told))
        idle = sum(one.in_flight == 0 and one.stage in (Stage.IDLE, Stage.ERROR) for one in told)
        self._room[view] = (free, idle)
        return {key for key in own.keys() | before.keys() if own.get(key) != before.get(key)}

    def _spread(self) -> None:
        everywhere = len(self._sets) <= min(self._most.values(), default=POLICIES_MAX)
        if everywhere is not self.everywhere:
            self.everywhere = everywhere
            for policy in self._sets.values():
                policy.changed()


_NOTHING: Mapping[tuple[str, float], PolicyReport] = MappingProxyType({})


def _common(view: ReplicaView) -> tuple[object, ...]:
    """What every policy sees of a replica."""
    report, own = view.report, (view.index, view.weight, view.standing, view.suspended)
    if report is None:
        return own
    return (*own, report.boot, report.alive, report.card, report.max_model_len)


class PolicyReplicas(ReplicaSet):
    """made: when the policy was made. What a replica says of another one of this name is not of this policy."""

    def __init__(self, replicas: ReplicaSet, policy: str, made: float = 0.0) -> None:
        self._of = replicas
        self._policy = policy
        self.made = made
        super().__init__()
        #: The policy is being ended: replicas get no other message any more.
        self.ending = False
        self.learning = False
        # Replicas that were asked to load it, and those that failed with it, until when.
        self._asked: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._residents = Residents.of(replicas)
        self._residents.join((policy, made), self)

    def __repr__(self) -> str:
        return f"PolicyReplicas({self._policy}, {super().__repr__()})"

    def close(self) -> None:
        self._residents.leave((self._policy, self.made))
        self.views = self.leaving = ()

    def follow(self) -> None:
        """Something is new in the deployment's replicas that concerns the policy."""
        known = {view.replica: view for view in (*self.views, *self.leaving)}
        views = tuple(known.get(r) or PolicyView(r, self._use_changed) for r in self._of.views)
        leaving = tuple(known.get(r) or PolicyView(r, self._use_changed) for r in self._of.leaving)
        key = (self._policy, self.made)
        changed = [
            view.follow(*self._residents.report_of(view.replica, key))
            for view in (*views, *leaving)
            if isinstance(view, PolicyView)
        ]
        for view in views:
            if _is_resident(view):
                # What makes way from here on is not asked for any more.
                self._asked.pop(view.name, None)
        if any(changed) or (views, leaving) != (self.views, self.leaving):
            self.views, self.leaving = views, leaving
            self._named = {view.name: view for view in views}
            self._fleet = None
            self._changed()

    def changed(self) -> None:
        """Which replicas are to hold it is another question now."""
        self._changed()

    @property
    def at_work(self) -> bool:
        return self._residents.everywhere or bool(self.holders)

    @property
    def by_demand(self) -> bool:
        return not self._residents.everywhere

    @property
    def holders(self) -> Sequence[ReplicaView]:
        if self._residents.everywhere:
            return self.views
        return [view for view in self.views if _is_resident(view) or self.is_asked(view.name)]

    def is_loading(self, name: str) -> bool:
        view = self._named.get(name)
        return self.by_demand and view is not None and _may_serve(view) and self._state(view) == "coming"

    def is_asked(self, name: str) -> bool:
        """Whether the replica was asked to load it, and may yet do so."""
        return self._asked.get(name, 0.0) > _now()

    def ask(self, home: str | None = None, *, retry_failed: bool = False) -> None:
        if retry_failed:
            self._failed.clear()
        if self._residents.everywhere or self.ending:
            return
        places = self._places()
        chosen, until = where(self._policy, places, home), _now() + ASK_S
        known = self._asked.keys()
        self._asked = {name: until for name in known if self.is_asked(name)}
        if chosen is not None and chosen not in self._asked:
            self._asked[chosen] = until
            self._changed()
        if not any(place.state == "serves" for place in places):
            self._residents.unmet[self] = None

    def _places(self) -> list[PolicyPlace]:
        return [
            PolicyPlace(
                view.name, self._state(view), *self._residents.room(view.replica), view.load, view.weight
            )
            for view in self.views
            if _may_serve(view)
        ]

    def _state(self, view: ReplicaView) -> State:
        if view.usable:
            return "serves"
        if self._failed.get(view.name, 0.0) > _now():
            return "failed"
        return "coming" if _is_resident(view) or self.is_asked(view.name) else "absent"

    def judged(self, view: ReplicaView, *, failed: bool) -> None:
        if failed:
            is_news = view.name not in self._failed
            self._failed[view.name] = _now() + FAILED_S
            self._asked.pop(view.name, None)
            if is_news:
                # Another replica may do better.
                self.look_again()
        else:
            self._failed.pop(view.name, None)

    def mark_missing(self, view: ReplicaView) -> None:
        """The replica refused a request because it does not hold the policy. Its next report says what it holds."""
        if isinstance(view, PolicyView) and view.resident:
            self._residents.forget(view.replica, (self._policy, self.made))
            view.follow(self._residents.bare(view.replica), False)
            self._changed()

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        # A replica that has just forgotten the policy would make it again.
        if not self.ending:
            own = msgspec.structs.replace(desired, policy=self._policy, made=self.made)
            try:
                await self._of.send_desired(view.replica, own)
            except ReplicaUnavailable:
                # All its policies may be in use. Another replica may have room by now.
                self._asked.pop(view.name, None)
                self.look_again()
                raise

    def all_heard(self, wanted: int) -> bool:
        """Whether all replicas that there should be have reported."""
        views = (*self._of.views, *self._of.leaving)
        return len(self._of.views) >= wanted and all(view.report is not None for view in views)

    @property
    def held(self) -> bool:
        """Whether a replica still has the policy."""
        return any(self._has(view) for view in (*self._of.views, *self._of.leaving))

    def _has(self, view: ReplicaView) -> bool:
        key = (self._policy, self.made)
        return view.heard is not None and any((one.policy, one.made) == key for one in view.heard.others)

    async def send_end(self, everywhere: bool = False) -> None:
        """Tell every replica that still has the policy to forget it. Raises ReplicaUnavailable.

        everywhere: those, too, that have it perhaps since their last report.
        """
        body = msgspec.json.encode(PolicyEnd(policy=self._policy, made=self.made))
        for view in self._of.views:
            if self._has(view) or (everywhere and view.report is not None):
                await self._of.post(view, "/replica/policy/end", body, 200)

    async def post(self, view: ReplicaView, path: str, body: bytes, expected: int) -> bytes:
        return await self._of.post(view.replica, path, body, expected)

    async def send_hint(self, view: ReplicaView, hint: Hint) -> bool:
        """Only a replica that holds the policy fetches files of it."""
        own = msgspec.structs.replace(hint, policy=self._policy)
        return _is_resident(view) and await self._of.send_hint(view.replica, own)

    def refused(self, view: ReplicaView) -> None:
        self._of.refused(view.replica)

    def replaced(self, view: ReplicaView, boot: str) -> bool:
        return self._of.replaced(view.replica, boot)

    def failed(self, view: ReplicaView) -> None:
        self._of.failed(view.replica)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_resident(view: ReplicaView) -> bool:
    return isinstance(view, PolicyView) and view.resident


def _may_serve(view: ReplicaView) -> bool:
    report, replica = view.report, view.replica.report
    well = replica is not None and replica.alive and not view.suspended and view.standing == "member"
    return well and report is not None and (report.card is None or report.card.has("policies"))


def names_of(deployment: ServedNames, policy: str) -> ServedNames:
    """What a policy is called: as a model, and as a part of its deployment."""
    return ServedNames(
        f"{deployment.account}/models/{policy}", f"{deployment.deployment}{POLICY_INFIX}{policy}"
    )


def split_name(name: str) -> tuple[str, str]:
    """(deployment, policy) of a row's name; the policy is "" for a deployment's own row."""
    deployment, _, policy = name.partition(POLICY_INFIX)
    return deployment, policy
