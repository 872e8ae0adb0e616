"""What the gateway knows of the replicas of a deployment, and the event streams it knows it from.

Owns: who belongs to the deployment now, one long-lived `GET /replica/events` per replica, and delivery of a Desired.
Always holds:
- A KnownReplica is one replica at one address for as long as it is known. One that leaves is heard until it is gone, takes no
  new request, and is not the reconciler's business any more.
- What is heard of a replica is its last whole report. It becomes None when the replica proves dead: its event stream broke and
  no process listens. It becomes None, too, when the replica is silent for `silence_s`, or sends a line that is no report of
  it. When a broken event stream cannot be opened again, that happens `grace_s` after it broke.
- One broken connection alone moves no session.
- Requests that fail on a replica before it answers, several in a row, suspend it until it answers a probe.
- Replicas say which sessions they hold before their first report. They have `learn_s` for that, from the gateway's start on.
- The token that replicas ask for is sent to replicas only, and shown nowhere.
- A call names the boot that reported last, so that no later process at the address takes it. Calls share connections, but each
  has one for itself while it waits. None outlives the event stream.
- Each policy of the deployment, its own weights among them, has a set of views (replica_set.py). A set learns of every change
  that concerns its policy, at once. A change of one policy's report is passed to that policy and to the own weights alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import ReplicaUnavailable
from midstream.core.http_answer import HttpAnswer
from midstream.core.measures import Trajectories
from midstream.core.reports import ReplicaReport
from midstream.core.retry import Backoff
from midstream.core.sessions import SessionsReport
from midstream.core.transfer import TRANSFER_PATH
from midstream.core.types import POLICIES_MAX, Desired, Hint, Pause
from midstream.fleet.known_replica import OWN, KnownReplica, PolicyKey, last_words
from midstream.fleet.loads import LoadTable
from midstream.fleet.subscription import Lines, Subscription, boot_header, token_header
from midstream.http.call import CallFailed, NotTrusted, call, open_stream, pooled_call
from midstream.http.tls import tls_for
from midstream.http.upstream import pool_to

logger = logging.getLogger(__name__)

# Requests in a row that a replica may fail before it answers one.
FAILURES_MAX = 3
# How event lines begin that are no report.
OF_A_KIND = b'{"kind":'
# A silent period is counted in so many parts: one stall of this loop is not silence.
SILENCE_CHECKS = 6
# Before an event stream is opened again.
BACKOFF = Backoff(first_s=0.05, last_s=0.5)


class ReplicaRefused(ReplicaUnavailable):
    """A replica answered with another status than expected. answer: what it said."""

    def __init__(self, replica: str, answer: HttpAnswer) -> None:
        super().__init__(f"{replica} answered {answer.status}: {answer.message}")
        self.answer = answer


class Member(NamedTuple):
    """A replica there should be. own: started by our supervisor under that name; another one goes by the name it has here,
    whatever it calls itself. leaves_at: when its machine goes."""

    name: str
    url: str
    weight: float = 1.0
    own: bool = True
    leaves_at: float | None = None


# The name of the replica, and its report.
Listener = Callable[[str, SessionsReport], None]


class Views(Protocol):
    """What one policy sees of the replicas (replica_set.py)."""

    def usable_beside(self, replica: KnownReplica) -> bool:
        """Whether another one is usable."""

    def on_members(self) -> None:
        """Other replicas belong to the deployment, or they stand otherwise."""

    def on_report(self, replica: KnownReplica) -> None:
        """Its report of the policy is another one."""

    def on_suspended(self, replica: KnownReplica) -> None:
        """It is suspended, or is not any more."""

    def look_again(self) -> None:
        """Something else changed."""

    def on_room(self) -> None:
        """Whether the replicas have room for all policies is another answer."""

    def on_learned(self) -> None:
        """What replicas may still have to say is not waited for any more."""


class DeploymentReplicas:
    """The replicas of one deployment. Use from one event loop.

    members: in order. leaving: those that finish what they have and then go.
    """

    def __init__(
        self,
        replicas: Sequence[tuple[str, str]] = (),
        *,
        silence_s: float = 3.0,
        backoff: Backoff = BACKOFF,
        call_timeout_s: float = 5.0,
        grace_s: float = 1.0,
        learn_s: float = 0.0,
        token: str | None = None,
        tls_ca: str | None = None,
    ) -> None:
        """`replicas`: of set_members, which see.

        grace_s: how long a report outlives its event stream while nothing proves the replica dead. learn_s: how long after the
        start of `run` replicas may have to say which sessions they hold. token: the secret that replicas ask for, if they do.
        tls_ca: a file of the certificates that may sign those of replicas with an https URL; None: what the system trusts.
        """
        self.members: tuple[KnownReplica, ...] = ()
        self.leaving: tuple[KnownReplica, ...] = ()
        self._silence_s = silence_s
        self._backoff = backoff
        self._call_timeout_s = call_timeout_s
        self._grace_s = grace_s
        self.learn_s = learn_s
        # Called with each report of sessions.
        self.on_sessions: Listener = lambda replica, report: None
        self._header = token_header(token)
        self._tls_ca = tls_ca
        self._views: dict[PolicyKey, Views] = {}
        #: Whether every replica has room for every policy.
        self.room_for_all = True
        self._curious: dict[PolicyKey, None] = {}
        self._subscriptions: dict[KnownReplica, Subscription] = {}
        # Set while it runs.
        self._tasks: asyncio.TaskGroup | None = None
        self.set_members(replicas)

    def __repr__(self) -> str:
        reachable = sum(replica.heard is not None for replica in self.members)
        return f"DeploymentReplicas({len(self.members)} replicas, {reachable} reachable, {len(self._views)} policies)"

    def join(self, policy: PolicyKey, views: Views) -> None:
        """Pass every change on to the views of a policy."""
        self._views[policy] = views
        views.on_members()
        self._spread()

    def leave(self, policy: PolicyKey) -> None:
        self._curious.pop(policy, None)
        del self._views[policy]
        self._spread()

    def tell_next(self, policy: PolicyKey) -> None:
        """The policy's views are to look again after the next change of any replica."""
        self._curious[policy] = None

    def set_members(
        self, replicas: Sequence[tuple[str, str] | Member], leaving: Collection[str] = ()
    ) -> None:
        """The replicas there are from now on: (name, base URL) of each, e.g. ("replica-0", "http://127.0.0.1:18081").

        leaving: names of those that take no new requests. Whoever is not listed is gone. The same list changes nothing; a
        known name at another address is another replica.
        """
        known = {(replica.name, replica.url): replica for replica in self._subscriptions}
        stay: list[KnownReplica] = []
        leave: list[KnownReplica] = []
        same = True
        for member in (Member(*replica) for replica in replicas):
            found = known.pop((member.name, member.url.rstrip("/")), None) or self._met(member)
            same = same and found.weight == member.weight
            found.weight, found.leaves_at = member.weight, member.leaves_at
            (leave if member.name in leaving else stay).append(found)
        if same and (tuple(stay), tuple(leave)) == (self.members, self.leaving) and not known:
            return
        for index, found in enumerate(stay):
            found.index, found.standing = index, "member"
        for found in leave:
            found.standing = "leaving"
        self.members, self.leaving = tuple(stay), tuple(leave)
        table = LoadTable(stay)
        for found in stay:
            found.table = table
        for found in known.values():
            self._part(found)
        for views in tuple(self._views.values()):
            views.on_members()
        self._changed()

    def _met(self, member: Member) -> KnownReplica:
        replica = KnownReplica(
            member.name, member.url.rstrip("/"), member.weight, member.own, self._has_reported
        )
        calls = pool_to(replica.url, self._tls_ca, self._call_timeout_s, decodes=True)
        self._subscriptions[replica] = Subscription(calls)
        if self._tasks is not None:
            self._listen(self._tasks, replica)
        return replica

    def _part(self, replica: KnownReplica) -> None:
        replica.standing = "gone"
        subscription = self._subscriptions.pop(replica)
        subscription.calm()
        subscription.calls.close_idle(for_ever=True)
        if subscription.watch is not None:
            subscription.watch.cancel()
        replica.hear(None)

    def unheard(self, wanted: int) -> list[str]:
        """Replicas that should be there and have not reported. Those that leave may have gone with their machines."""
        names = [replica.name for replica in self.members if replica.heard is None]
        more = wanted - len(self.members)
        return names if more <= 0 else [*names, f"{more} that {'has' if more == 1 else 'have'} not started"]

    @property
    def known(self) -> tuple[KnownReplica, ...]:
        """Those that are there: members, and those that finish what they have."""
        return (*self.members, *self.leaving)

    def hears(self, replica: KnownReplica) -> bool:
        """Whether all that it reports is known now."""
        subscription = self._subscriptions.get(replica)
        return replica.heard is not None and subscription is not None and subscription.doubt is None

    async def send_desired(self, replica: KnownReplica, desired: Desired) -> None:
        """Tell a replica what to serve. Raises ReplicaUnavailable when it did not take it."""
        await self.post(replica, "/replica/desired", msgspec.json.encode(desired), 202)

    async def send_pause(self, replica: KnownReplica, pause: Pause) -> None:
        """Tell a replica whether to generate. Raises ReplicaUnavailable when it did not take it."""
        await self.post(replica, "/replica/pause", msgspec.json.encode(pause), 202)

    async def post(
        self, replica: KnownReplica, path: str, body: bytes, expected: int, timeout_s: float | None = None
    ) -> bytes:
        """A replica's answer. timeout_s: None for that of a short call.

        Raises ReplicaRefused when its status is another than expected, ReplicaUnavailable when there is no answer.
        """
        try:
            answer = await self._call(replica, "POST", path, body, timeout_s)
        except CallFailed as error:
            raise ReplicaUnavailable(f"{replica.name}: {error}") from error
        if answer.status != expected:
            raise ReplicaRefused(replica.name, answer)
        return answer.body

    async def _call(
        self,
        replica: KnownReplica,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """Raises CallFailed."""
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        if path == TRANSFER_PATH:
            # An order takes long, must not come twice, and says itself which boot it is for.
            tls = tls_for(replica.url, self._tls_ca)
            return await call(replica.url, method, path, body, timeout_s, self._header, tls=tls)
        if (subscription := self._subscriptions.get(replica)) is None:
            raise CallFailed("it is gone, and its address may be another's")
        headers = self._header + boot_header(replica.boot)
        return await pooled_call(subscription.calls, replica.url, method, path, body, timeout_s, headers)

    async def send_hint(self, replica: KnownReplica, hint: Hint) -> bool:
        """Tell a replica of files that will be asked for; whether it took note."""
        body = msgspec.json.encode(hint)
        try:
            answer = await self._call(replica, "POST", "/replica/hint", body)
        except CallFailed as error:
            logger.info("%s did not get the hint at files of %s: %s", replica.name, hint.snapshot, error)
            return False
        return answer.status == 202

    def refused(self, replica: KnownReplica) -> None:
        """The data path was refused a connection: without an event stream either, the replica is dead."""
        subscription = self._subscriptions.get(replica)
        if subscription is not None and not subscription.connected:
            self._lost(replica)

    def replaced(self, replica: KnownReplica, boot: str) -> bool:
        """An answer of the replica said that this boot of it is gone. True if that boot reported last: no request is
        sent there before the replica has reported again."""
        if replica.heard is None or replica.heard.boot != boot:
            return False
        logger.info(
            "%s restarts; it takes requests again once it has reported",
            replica.name,
            extra={"replica": replica.name},
        )
        self._lost(replica)
        return True

    def failed(self, replica: KnownReplica) -> None:
        """A request failed on it before it answered. After several in a row it is suspended until a probe succeeds, unless no
        other is usable."""
        replica.failures += 1
        own = self._views.get(OWN)
        others = own is not None and own.usable_beside(replica)
        if replica.failures < FAILURES_MAX or replica.suspended or not others or self._tasks is None:
            return
        logger.warning(
            "%s failed %d requests in a row and is suspended",
            replica.name,
            replica.failures,
            extra={"replica": replica.name},
        )
        self._suspend(replica, True)
        self._tasks.create_task(self._probe(replica), name=f"probe of {replica.name}")

    async def _probe(self, replica: KnownReplica) -> None:
        """Until it answers."""
        while replica.standing != "gone":
            await asyncio.sleep(self._backoff.last_s)
            try:
                answer = await self._call(replica, "GET", "/health", None)
            except CallFailed:
                continue
            if answer.status == 200:
                break
        replica.failures = 0
        self._suspend(replica, False)
        logger.info("%s answers again", replica.name, extra={"replica": replica.name})

    async def run(self) -> None:
        """Watch all event streams, of those that join meanwhile too, until cancelled."""
        learned = asyncio.get_running_loop().call_later(self.learn_s, self._learned)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for replica in self._subscriptions:
                    self._listen(tasks, replica)
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            learned.cancel()
            for subscription in self._subscriptions.values():
                subscription.calls.close_idle(for_ever=True)
            # No replica will say anything any more.
            self._learned()

    def _listen(self, tasks: asyncio.TaskGroup, replica: KnownReplica) -> None:
        self._subscriptions[replica].watch = tasks.create_task(
            self._watch(replica), name=f"events of {replica.name}"
        )

    async def _watch(self, replica: KnownReplica) -> None:
        failures, trusted = 0, True
        try:
            while True:
                heard = warn = False
                try:
                    reason, heard = await self._follow(replica)
                except CallFailed as error:
                    reason = str(error)
                    # Only a person can mend it, so it is said, and once.
                    warn = trusted and isinstance(error, NotTrusted)
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        self._lost(replica)
                self._doubt(replica)
                level = logging.WARNING if heard or warn else logging.DEBUG
                logger.log(
                    level,
                    "event stream of %s lost: %s",
                    replica.name,
                    reason,
                    extra={"replica": replica.name},
                )
                trusted = heard or (trusted and not warn)
                failures = 1 if heard else failures + 1
                await asyncio.sleep(self._backoff.pause_s(failures))
        finally:
            self._lost(replica)

    async def _follow(self, replica: KnownReplica) -> tuple[str, bool]:
        """Read one event stream to its end. Why it ended, and whether it ever said anything."""
        lines = Lines(lambda line: self._heard(replica, line))
        timeout_s = min(self._call_timeout_s, self._silence_s)
        tls = tls_for(replica.url, self._tls_ca)
        stream = await open_stream(
            replica.url, "GET", "/replica/events", None, lines.feed, timeout_s, self._header, tls=tls
        )
        self._subscriptions[replica].stream = stream
        try:
            seen, quiet_checks = 0, 0
            while quiet_checks < SILENCE_CHECKS:
                await asyncio.wait({stream.ended}, timeout=self._silence_s / SILENCE_CHECKS)
                if stream.ended.done():
                    reason = stream.ended.result() or f"ended with status {stream.status}"
                    return reason, lines.count > 0
                quiet_checks = 0 if lines.count > seen else quiet_checks + 1
                seen = lines.count
            words = "" if replica.heard is None else last_words(replica.heard)
            self._lost(replica)
            replica.last_words = words
            return f"silent for {self._silence_s:g} s; {words}", lines.count > 0
        finally:
            stream.abort()

    def _heard(self, replica: KnownReplica, line: bytes) -> None:
        try:
            if line.startswith(OF_A_KIND):
                self._hear_of_kind(replica, msgspec.json.decode(line, type=SessionsReport | Trajectories))
                return
            subscription = self._subscriptions[replica]
            if line == subscription.line and replica.heard is not None:
                # A report repeated to show that the replica lives may be long.
                subscription.calm()
                return
            report = msgspec.json.decode(line, type=ReplicaReport)
            if not replica.own:
                report = msgspec.structs.replace(report, replica=replica.name)
            if report.replica != replica.name:
                raise ValueError(f"{replica.url} is {report.replica}, expected {replica.name}")
        except (*NOT_JSON, ValueError):
            # Another process answers there now: the replica that was heard before is lost.
            self._lost(replica)
            raise
        subscription.calm()
        subscription.line = line
        replica.hear(report)

    def forget(self, replica: KnownReplica, policy: PolicyKey) -> None:
        """It does not hold the policy, whatever it reported last. Its next report counts, even if it is the same."""
        replica.forget(policy)
        if (subscription := self._subscriptions.get(replica)) is not None:
            subscription.line = b""

    def _hear_of_kind(self, replica: KnownReplica, report: SessionsReport | Trajectories) -> None:
        if isinstance(report, SessionsReport):
            self.on_sessions(replica.name, report)
        else:
            replica.trajectories = report

    def _doubt(self, replica: KnownReplica) -> None:
        """The event stream is gone: the report goes too, unless another one comes in time."""
        subscription = self._subscriptions[replica]
        # They may lead to a machine that is lost, which would say nothing.
        subscription.calls.close_idle()
        if replica.heard is not None and subscription.doubt is None:
            subscription.doubt = asyncio.get_running_loop().call_later(self._grace_s, self._lost, replica)

    def _lost(self, replica: KnownReplica) -> None:
        if (subscription := self._subscriptions.get(replica)) is not None:
            subscription.calm()
        if replica.heard is not None:
            replica.hear(None)

    def _has_reported(self, replica: KnownReplica, news: Collection[PolicyKey] | None) -> None:
        """The views of every policy look at it; with `news`, those of these policies and of the own weights."""
        every: Iterable[PolicyKey] = self._views if news is None else (OWN, *news)
        concerned = [self._views[policy] for policy in dict.fromkeys(every) if policy in self._views]
        for views in concerned:
            views.on_report(replica)
        self._changed()

    def _suspend(self, replica: KnownReplica, suspended: bool) -> None:
        replica.suspended = suspended
        for views in tuple(self._views.values()):
            views.on_suspended(replica)
        self._changed()

    def _changed(self) -> None:
        """What depends on all replicas may be another answer."""
        self._spread()
        curious, self._curious = self._curious, {}
        for policy in curious:
            self._views[policy].look_again()

    def _spread(self) -> None:
        most = [replica.policies_max for replica in self.known if replica.policies_max is not None]
        room_for_all = len(self._views) - (OWN in self._views) <= min(most, default=POLICIES_MAX)
        if room_for_all is not self.room_for_all:
            self.room_for_all = room_for_all
            for views in tuple(self._views.values()):
                views.on_room()

    def _learned(self) -> None:
        for views in tuple(self._views.values()):
            views.on_learned()
