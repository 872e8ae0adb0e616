"""The replicas of a deployment as one of its policies sees them: which can be used, which are to hold the policy, who waits.

The deployment's own weights are the policy with the empty name. All that differs is that every replica is to hold them.
While every replica has room for all policies of the deployment, every replica is to hold every one. Else the policies follow
demand (residency.py): a replica is to hold a policy that it holds, or that it was asked to load. The replica decides what makes
way, which is not loaded again without new demand.

A policy has a row of its own in the ledger, so its signals, its order and its reconciler are those of any deployment. Its
replicas are its deployment's: what is known of them, and the way to them, is in DeploymentReplicas (replicas.py).

Always holds:
- A policy that no replica is to hold costs nothing.
- A demand that no replica met lapses after ASK_S, and at once where a replica refuses.
- After the gateway's start, the own weights are `learning`: replicas may still have to say which sessions they hold. Learning
  ends when every member is usable, and in any case after `learn_s`.
- Those who wait and subscribers are called after changes, at most once per turn of the event loop, never from within a change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from midstream.core.errors import ReplicaUnavailable
from midstream.core.types import Desired, Hint, Pause, PolicyEnd, Stage
from midstream.fleet.known_replica import KnownReplica, PolicyKey
from midstream.fleet.placement import Fleet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.residency import PolicyPlace, State, where
from midstream.fleet.view import ReplicaView
from midstream.snapshots.content import by_content

#: Other replicas that a message names because they may have what was pushed, at most.
PEERS_MAX = 8
#: How long a replica is to load a policy that it was asked for.
ASK_S = 30.0
#: How long a replica is not asked for a policy that it failed with.
FAILED_S = 30.0


class ReplicaSet:
    """The views of one policy. Use from one event loop.

    facts: what is known of the deployment's replicas. policy: its name; "": the deployment's own weights. made: when the policy
    was made. What a replica says of another one of this name is not of this policy.
    views: of the members, in order. leaving: of those that finish what they have and then go.
    """

    def __init__(self, facts: DeploymentReplicas, policy: str = "", made: float = 0.0) -> None:
        self.facts = facts
        self.policy = policy
        self.made = made
        self._key: PolicyKey = (policy, made)
        self.views: tuple[ReplicaView, ...] = ()
        self.leaving: tuple[ReplicaView, ...] = ()
        # Replicas may still have to say which sessions they hold. A policy's sessions are its deployment's.
        self.learning = facts.learn_s > 0 and not policy
        #: The policy is being ended: replicas get no other message any more.
        self.ending = False
        self._view_of: dict[KnownReplica, ReplicaView] = {}
        self._named: dict[str, ReplicaView] = {}
        # By replica: the others that its last message named.
        self._met: dict[str, frozenset[str]] = {}
        self._fleet: Fleet[ReplicaView] | None = None
        self._waiting: dict[Callable[[], None], None] = {}
        self._waiting_for_use: dict[Callable[[], None], None] = {}
        # The callbacks of those who wait are due.
        self._use_is_news = False
        self._waking: asyncio.Handle | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._notice: asyncio.Handle | None = None
        facts.join(self._key, self)

    def __repr__(self) -> str:
        reachable = sum(view.report is not None for view in self.views)
        usable = sum(view.usable for view in self.views)
        policy = f"policy {self.policy}: " if self.policy else ""
        return f"ReplicaSet({policy}{len(self.views)} replicas, {reachable} reachable, {usable} usable)"

    def close(self) -> None:
        """The policy is gone. Requests may still wait for it."""
        self.ending = True
        self.facts.leave(self._key)
        self.views = self.leaving = ()
        self._view_of, self._named, self._fleet = {}, {}, None

    # -- which replicas there are

    @property
    def fleet(self) -> Fleet[ReplicaView]:
        """Those that take new work now; those that are usable when none does (a synchronous swap on every replica)."""
        if self._fleet is None:
            usable = [view for view in self.views if view.usable]
            self._fleet = Fleet([view for view in usable if view.admitting] or usable)
        return self._fleet

    def named(self, name: str) -> ReplicaView | None:
        """A member by its name."""
        return self._named.get(name)

    def heard(self, name: str) -> ReplicaView | None:
        """A member, or one that leaves, that is heard."""
        of_name = (view for view in (*self.views, *self.leaving) if view.name == name)
        return next((view for view in of_name if view.replica.heard is not None), None)

    def leaves(self, name: str) -> bool:
        return any(view.name == name for view in self.leaving)

    def usable_beside(self, replica: KnownReplica) -> bool:
        """Whether another one is usable."""
        return any(view.usable for view in self.views if view.replica is not replica)

    # -- who waits

    def wait(self, callback: Callable[[], None], *, any_report: bool = True) -> None:
        """Call `callback` once, after the next change of who is usable for what, of any report (there are many), or of
        `learning`."""
        (self._waiting if any_report else self._waiting_for_use)[callback] = None

    def look_again(self) -> None:
        """Something else changed that waiting requests may wait for."""
        self._wake()

    def wait_no_more(self, callback: Callable[[], None]) -> None:
        self._waiting.pop(callback, None)
        self._waiting_for_use.pop(callback, None)

    async def change(self, timeout_s: float, *, any_report: bool = True) -> None:
        """Returns after the next change, as of `wait`, or after `timeout_s`."""
        changed = asyncio.Event()
        self.wait(changed.set, any_report=any_report)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
        finally:
            self.wait_no_more(changed.set)

    async def learned(self) -> None:
        """Returns when it is not `learning`."""
        while self.learning:
            changed = asyncio.Event()
            self.wait(changed.set, any_report=False)
            try:
                await changed.wait()
            finally:
                self.wait_no_more(changed.set)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting) + len(self._waiting_for_use)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of any report or of reachability."""
        self._callbacks.append(callback)

    # -- which replicas are to hold the policy

    @property
    def by_demand(self) -> bool:
        """Whether a replica serves it only where there is demand."""
        return bool(self.policy) and not self.facts.room_for_all

    @property
    def at_work(self) -> bool:
        """Whether a replica is to serve what is desired, or may have to at any time."""
        return not self.by_demand or bool(self.holders)

    @property
    def holders(self) -> Sequence[ReplicaView]:
        """Those that are to serve what is desired."""
        if not self.by_demand:
            return self.views
        return [view for view in self.views if view.held or _is_asked(view)]

    def is_loading(self, name: str) -> bool:
        """Whether this replica does not serve it yet, and was asked to."""
        view = self._named.get(name)
        return self.by_demand and view is not None and _may_serve(view) and _state(view) == "coming"

    def ask(self, home: str | None = None, *, retry_failed: bool = False) -> None:
        """There is demand. home: the replica of a session that wants it. retry_failed: earlier failures do not count."""
        if retry_failed:
            for view in self.views:
                view.failed_until = 0.0
        if not self.by_demand or self.ending:
            return
        until = _now() + ASK_S
        for view in self.views:
            if _is_asked(view):
                view.asked_until = until
        places = [_place(view) for view in self.views if _may_serve(view)]
        name = where(self.policy, places, home)
        chosen = None if name is None else self._named[name]
        if chosen is not None and not _is_asked(chosen):
            chosen.asked_until = until
            self._changed()
        if not any(place.state == "serves" for place in places):
            self.facts.tell_next(self._key)

    def judged(self, view: ReplicaView, *, failed: bool) -> None:
        """Whether the replica failed on what is desired."""
        if not failed or not self.by_demand:
            view.failed_until = 0.0
            return
        is_news = view.failed_until == 0.0
        view.failed_until, view.asked_until = _now() + FAILED_S, 0.0
        if is_news:
            # Another replica may do better.
            self.look_again()

    def mark_missing(self, view: ReplicaView) -> None:
        """The replica refused a request because it does not hold the policy. Its next report says what it holds."""
        # It refuses so, too, where weights failed their check, and its report says that already.
        if self.policy and view.held and view.report is not None and view.report.ready:
            self.facts.forget(view.replica, self._key)
            view.hear()
            self._changed()

    # -- messages to replicas

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        """Tell a replica what to serve. Raises ReplicaUnavailable when it did not take it."""
        if self.ending:
            # A replica that has just forgotten the policy would make it again.
            return
        own = msgspec.structs.replace(
            desired, policy=self.policy, made=self.made, peers=self._peers(view, desired)
        )
        try:
            await self.facts.send_desired(view.replica, own)
            self._met[view.name] = frozenset(own.peers)
        except ReplicaUnavailable:
            if self.by_demand:
                # All its policies may be in use. Another replica may have room by now.
                view.asked_until = 0.0
                self.look_again()
            raise

    def with_new_peers(self, view: ReplicaView, desired: Desired | None) -> Desired | None:
        """What the replica is fetching, if others may have its files and no message has named them to it."""
        report = view.report
        if desired is None or report is None or report.own.stage is not Stage.FETCHING:
            return None
        if report.own.target != desired.snapshot or report.own.snapshot == desired.snapshot:
            return None
        # It has taken this up already. `hold` lets nothing go that waits for its turn.
        again = msgspec.structs.replace(desired, generation=report.own.generation, hold=True)
        new = not self._met.get(view.name, frozenset()).issuperset(self._peers(view, again))
        return again if new else None

    def _peers(self, view: ReplicaView, desired: Desired) -> tuple[str, ...]:
        """Other replicas, which may have its files if they were pushed. Those that serve it come first."""
        if not any(by_content(files.fingerprint) for files in desired.files):
            return ()
        at = view.replica.index
        others = [other for other in self.views if other is not view and other.report is not None]
        others.sort(key=lambda other: (other.replica.index - at) % len(self.views))
        others.sort(key=lambda other: other.report is None or other.report.own.snapshot != desired.snapshot)
        return tuple(other.url for other in others[:PEERS_MAX])

    async def send_pause(self, view: ReplicaView, pause: Pause) -> None:
        await self.facts.send_pause(view.replica, pause)

    async def send_hint(self, view: ReplicaView, hint: Hint) -> bool:
        """Tell a replica of files that will be asked for; whether it took note. Only one that holds the policy fetches them."""
        own = msgspec.structs.replace(hint, policy=self.policy)
        return view.held and await self.facts.send_hint(view.replica, own)

    async def post(
        self, view: ReplicaView, path: str, body: bytes, expected: int, timeout_s: float | None = None
    ) -> bytes:
        return await self.facts.post(view.replica, path, body, expected, timeout_s)

    @property
    def is_held(self) -> bool:
        """Whether a replica still has the policy."""
        return any(replica.reports(self._key) for replica in self.facts.known)

    async def send_end(self, everywhere: bool = False) -> None:
        """Tell every replica that still has the policy to forget it. Raises ReplicaUnavailable once all others are told.

        everywhere: those, too, that have it perhaps since their last report.
        """
        body = msgspec.json.encode(PolicyEnd(policy=self.policy, made=self.made))
        told = await asyncio.gather(
            *(
                self.facts.post(replica, "/replica/policy/end", body, 200)
                for replica in self.facts.known
                if replica.reports(self._key) or (everywhere and replica.heard is not None)
            ),
            return_exceptions=True,
        )
        for error in told:
            if isinstance(error, BaseException):
                raise error

    # -- what requests found

    def refused(self, view: ReplicaView) -> None:
        self.facts.refused(view.replica)

    def replaced(self, view: ReplicaView, boot: str) -> bool:
        return self.facts.replaced(view.replica, boot)

    def failed(self, view: ReplicaView) -> None:
        self.facts.failed(view.replica)

    # -- what the deployment's replicas pass on

    def on_members(self) -> None:
        """Other replicas belong to the deployment, or they stand otherwise."""
        known, back = self._view_of, [view for view in self.leaving if view.replica.standing == "member"]
        self.views, self.leaving = (
            tuple(known.get(replica) or ReplicaView(replica, self._key, self._use_changed) for replica in of)
            for of in (self.facts.members, self.facts.leaving)
        )
        self._view_of = {view.replica: view for view in (*self.views, *self.leaving)}
        self._named = {view.name: view for view in self.views}
        for view in back:
            # No reconciler looked after it meanwhile.
            view.admitted = False
        for view in self._view_of.values():
            view.settle()
        self._use_changed()
        self._changed()

    def on_report(self, replica: KnownReplica) -> None:
        """Its report of the policy is another one."""
        view = self._view_of.get(replica)
        if view is None:
            return
        before = _serving(view)
        view.hear()
        if view.held:
            # What makes way from here on is not asked for any more.
            view.asked_until = 0.0
        self._changed(use=_serving(view) != before)

    def on_suspended(self, replica: KnownReplica) -> None:
        """It is suspended, or is not any more."""
        if (view := self._view_of.get(replica)) is not None:
            view.settle()
            self._changed()

    def on_room(self) -> None:
        """Whether the replicas have room for all policies is another answer."""
        if self.policy:
            self._changed()

    def on_learned(self) -> None:
        """What replicas may still have to say is not waited for any more."""
        self.learning = False
        self._wake()

    def _use_changed(self) -> None:
        """Who is usable is another than before."""
        self._fleet = None
        if self.learning and self.views and all(view.usable for view in self.views):
            self.learning = False
        self._wake()

    def _wake(self, *, use: bool = True) -> None:
        if not (self._waiting or (use and self._waiting_for_use)):
            return
        self._use_is_news = self._use_is_news or use
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_soon(self._call_waiting)

    def _call_waiting(self) -> None:
        self._waking = None
        waiting, self._waiting = self._waiting, {}
        if self._use_is_news:
            self._use_is_news = False
            waiting |= self._waiting_for_use
            self._waiting_for_use = {}
        for callback in waiting:
            callback()

    def _changed(self, *, use: bool = True) -> None:
        self._wake(use=use)
        if self._notice is None and self._callbacks:
            self._notice = asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notice = None
        for callback in self._callbacks:
            callback()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_asked(view: ReplicaView) -> bool:
    """Whether the replica was asked to load it, and may yet do so."""
    return view.asked_until > _now()


def _may_serve(view: ReplicaView) -> bool:
    report, replica = view.report, view.replica
    if report is None or not report.alive or replica.suspended or replica.standing != "member":
        return False
    return report.card is None or report.card.has("policies")


def _state(view: ReplicaView) -> State:
    if view.usable:
        return "serves"
    if view.failed_until > _now():
        return "failed"
    return "coming" if view.held or _is_asked(view) else "absent"


def _place(view: ReplicaView) -> PolicyPlace:
    replica = view.replica
    return PolicyPlace(view.name, _state(view), *replica.room, replica.load, replica.weight)


def _serving(view: ReplicaView) -> tuple[object, ...]:
    """What the replica is of use for, now and soon."""
    if view.report is None:
        return ()
    own = view.report.own
    return view.held, own.snapshot, own.resident, own.pinnable, own.stage, own.target
