"""What the gateway knows of the replicas of a deployment, and the event streams it knows it from.

Owns: who belongs to the deployment now, one long-lived `GET /replica/events` per replica, and delivery of a Desired.
Always holds:
- A view is one replica at one address for as long as it is known. One that leaves is heard until it is gone, takes no new
  request, and is not the reconciler's business any more.
- A view's report is the last whole report heard. It becomes None when the replica proves dead: its event stream broke and no
  process listens. It becomes None, too, when the replica is silent for `silence_s`, or sends a line that is no report of it.
  When a broken event stream cannot be opened again, that happens `grace_s` after it broke.
- One broken connection alone moves no session.
- Requests that fail on a replica before it answers, several in a row, suspend it until it answers a probe.
- A new boot of a replica is not admitted until the reconciler (loop.py) admits it.
- While a view is `learning`, after the gateway's start, replicas may still have to say which sessions they hold. A replica
  says so before its first report. Learning ends when every member is usable, and in any case after `learn_s`.
- The token that replicas ask for is sent to replicas only, and shown nowhere.
- Subscribers are called after changes, at most once per turn of the event loop, never from within a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import ReplicaUnavailable
from midstream.core.measures import Trajectories
from midstream.core.reports import ReplicaReport, Reported
from midstream.core.retry import Backoff
from midstream.core.sessions import SessionsReport
from midstream.core.types import Desired, Hint, Pause
from midstream.fleet.holding import Holding
from midstream.fleet.placement import Fleet
from midstream.fleet.subscription import Lines, Subscription, token_header
from midstream.fleet.view import ReplicaView as ReplicaView
from midstream.fleet.view import last_words
from midstream.http.call import CallFailed, call, open_stream

logger = logging.getLogger(__name__)

# Requests in a row that a replica may fail before it answers one.
FAILURES_MAX = 3
# How event lines begin that are no report.
OF_A_KIND = b'{"kind":'
# A silent period is counted in so many parts: one stall of this loop is not silence.
SILENCE_CHECKS = 6
# Before an event stream is opened again.
BACKOFF = Backoff(first_s=0.05, last_s=0.5)


class Member(NamedTuple):
    """A replica there should be. own: started by our supervisor under that name; another one goes by the name it has here,
    whatever it calls itself."""

    name: str
    url: str
    weight: float = 1.0
    own: bool = True


# The name of the replica, and its report.
Listener = Callable[[str, SessionsReport], None]


class Follower(Protocol):
    def follow(self) -> None:
        """Something is new."""


class ReplicaSet(Holding):
    """The replicas of one deployment. Use from one event loop.

    views: the members, in order. leaving: those that finish what they have and then go.
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
    ) -> None:
        """`replicas`: of set_members, which see.

        grace_s: how long a report outlives its event stream while nothing proves the replica dead. learn_s: how long after the
        start of `run` it may be `learning`. token: the secret that replicas ask for, if they do.
        """
        self.views: tuple[ReplicaView, ...] = ()
        self.leaving: tuple[ReplicaView, ...] = ()
        self._silence_s = silence_s
        self._backoff = backoff
        self._call_timeout_s = call_timeout_s
        self._grace_s = grace_s
        self._learn_s = learn_s
        self.learning = learn_s > 0
        # Called with each report of sessions.
        self.on_sessions: Listener = lambda replica, told: None
        # Notified at once of every change, of use or of a report: the owner of the policies.
        self.followers: list[Follower] = []
        self._header = token_header(token)
        self._named: dict[str, ReplicaView] = {}
        self._fleet: Fleet[ReplicaView] | None = None
        self._waiting: dict[Callable[[], None], None] = {}
        self._waiting_for_use: dict[Callable[[], None], None] = {}
        # The callbacks of those who wait are due.
        self._use_is_news = False
        self._waking: asyncio.Handle | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._notice: asyncio.Handle | None = None
        self._subscriptions: dict[ReplicaView, Subscription] = {}
        # Set while it runs.
        self._tasks: asyncio.TaskGroup | None = None
        self.set_members(replicas)

    def __repr__(self) -> str:
        reachable = sum(view.report is not None for view in self.views)
        usable = sum(view.usable for view in self.views)
        return f"ReplicaSet({len(self.views)} replicas, {reachable} reachable, {usable} usable)"

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

    def set_members(
        self, replicas: Sequence[tuple[str, str] | Member], leaving: Collection[str] = ()
    ) -> None:
        """The replicas there are from now on: (name, base URL) of each, e.g. ("replica-0", "http://127.0.0.1:18081").

        leaving: names of those that take no new requests. Whoever is not listed is gone. The same list changes nothing; a
        known name at another address is another replica.
        """
        known = {(view.name, view.url): view for view in self._subscriptions}
        stay: list[ReplicaView] = []
        leave: list[ReplicaView] = []
        for member in (Member(*replica) for replica in replicas):
            view = known.pop((member.name, member.url.rstrip("/")), None) or self._met(member)
            if view.weight != member.weight:
                view.weight = member.weight
                self._fleet = None
            (leave if member.name in leaving else stay).append(view)
        if (tuple(stay), tuple(leave)) == (self.views, self.leaving) and not known:
            return
        for index, view in enumerate(stay):
            # Control did not look after it meanwhile.
            if view.standing != "member":
                view.admitted = False
            view.index, view.standing = index, "member"
        for view in leave:
            view.standing = "leaving"
        self.views, self.leaving = tuple(stay), tuple(leave)
        self._named = {view.name: view for view in stay}
        self._fleet = None
        for view in known.values():
            self._part(view)
        self._changed()

    def _met(self, member: Member) -> ReplicaView:
        view = ReplicaView(
            0, member.name, member.url.rstrip("/"), member.weight, self._use_changed, member.own
        )
        self._subscriptions[view] = Subscription()
        if self._tasks is not None:
            self._listen(self._tasks, view)
        return view

    def _part(self, view: ReplicaView) -> None:
        view.standing = "gone"
        subscription = self._subscriptions.pop(view)
        subscription.calm()
        if subscription.watch is not None:
            subscription.watch.cancel()
        view.hear(None)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of any report or of reachability."""
        self._callbacks.append(callback)

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        """Tell a replica what to serve. Raises ReplicaUnavailable when it did not take it."""
        await self.post(view, "/replica/desired", msgspec.json.encode(desired), 202)

    async def send_pause(self, view: ReplicaView, pause: Pause) -> None:
        """Tell a replica whether to generate. Raises ReplicaUnavailable when it did not take it."""
        await self.post(view, "/replica/pause", msgspec.json.encode(pause), 202)

    async def post(self, view: ReplicaView, path: str, body: bytes, expected: int) -> bytes:
        """A replica's answer. Raises ReplicaUnavailable when its status is another than expected."""
        try:
            answer = await call(view.url, "POST", path, body, self._call_timeout_s, self._header)
        except CallFailed as error:
            raise ReplicaUnavailable(f"{view.name}: {error}") from error
        if answer.status != expected:
            raise ReplicaUnavailable(f"{view.name} answered {answer.status}: {answer.message}")
        return answer.body

    async def send_hint(self, view: ReplicaView, hint: Hint) -> bool:
        """Tell a replica of files that will be asked for; whether it took note."""
        body = msgspec.json.encode(hint)
        try:
            answer = await call(view.url, "POST", "/replica/hint", body, self._call_timeout_s, self._header)
        except CallFailed as error:
            logger.info("%s did not get the hint at files of %s: %s", view.name, hint.snapshot, error)
            return False
        return answer.status == 202

    def refused(self, view: ReplicaView) -> None:
        """The data path was refused a connection: without an event stream either, the replica is dead."""
        subscription = self._subscriptions.get(view)
        if subscription is not None and not subscription.connected:
            self._lost(view)

    def replaced(self, view: ReplicaView, boot: str) -> bool:
        """An answer of the replica said that this boot of it is gone. True if that boot reported last: no request is
        sent there before the replica has reported again."""
        if view.report is None or view.report.boot != boot:
            return False
        logger.info(
            "%s restarts; it takes requests again once it has reported",
            view.name,
            extra={"replica": view.name},
        )
        self._lost(view)
        return True

    def failed(self, view: ReplicaView) -> None:
        """A request failed on it before it answered. After several in a row it is suspended until a probe succeeds, unless no
        other is usable."""
        view.failures += 1
        others = any(other.usable for other in self.views if other is not view)
        if view.failures < FAILURES_MAX or view.suspended or not others or self._tasks is None:
            return
        logger.warning(
            "%s failed %d requests in a row and is suspended",
            view.name,
            view.failures,
            extra={"replica": view.name},
        )
        view.suspended = True
        self._tasks.create_task(self._probe(view), name=f"probe of {view.name}")

    async def _probe(self, view: ReplicaView) -> None:
        """Until it answers."""
        while view.standing != "gone":
            await asyncio.sleep(self._backoff.last_s)
            try:
                answer = await call(view.url, "GET", "/health", None, self._call_timeout_s, self._header)
            except CallFailed:
                continue
            if answer.status == 200:
                break
        view.failures = 0
        view.suspended = False
        logger.info("%s answers again", view.name, extra={"replica": view.name})

    async def run(self) -> None:
        """Watch all event streams, of those that join meanwhile too, until cancelled."""
        learned = asyncio.get_running_loop().call_later(self._learn_s, self._learned)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for view in self._subscriptions:
                    self._listen(tasks, view)
                await asyncio.Event().wait()
        finally:
            self._tasks = None
            learned.cancel()
            # Nobody will say anything any more.
            self._learned()

    def _listen(self, tasks: asyncio.TaskGroup, view: ReplicaView) -> None:
        self._subscriptions[view].watch = tasks.create_task(self._watch(view), name=f"events of {view.name}")

    async def _watch(self, view: ReplicaView) -> None:
        failures = 0
        try:
            while True:
                heard = False
                try:
                    reason, heard = await self._follow(view)
                except CallFailed as error:
                    reason = str(error)
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        self._lost(view)
                self._doubt(view)
                level = logging.WARNING if heard else logging.DEBUG
                logger.log(
                    level, "event stream of %s lost: %s", view.name, reason, extra={"replica": view.name}
                )
                failures = 1 if heard else failures + 1
                await asyncio.sleep(self._backoff.pause_s(failures))
        finally:
            self._lost(view)

    async def _follow(self, view: ReplicaView) -> tuple[str, bool]:
        """Read one event stream to its end. Why it ended, and whether it ever said anything."""
        lines = Lines(lambda line: self._heard(view, line))
        timeout_s = min(self._call_timeout_s, self._silence_s)
        stream = await open_stream(
            view.url, "GET", "/replica/events", None, lines.feed, timeout_s, self._header
        )
        self._subscriptions[view].stream = stream
        try:
            seen, quiet_checks = 0, 0
            while quiet_checks < SILENCE_CHECKS:
                await asyncio.wait({stream.ended}, timeout=self._silence_s / SILENCE_CHECKS)
                if stream.ended.done():
                    reason = stream.ended.result() or f"ended with status {stream.status}"
                    return reason, lines.count > 0
                quiet_checks = 0 if lines.count > seen else quiet_checks + 1
                seen = lines.count
            words = "" if view.heard is None else last_words(view.heard)
            self._lost(view)
            view.last_words = words
            return f"silent for {self._silence_s:g} s; {words}", lines.count > 0
        finally:
            stream.abort()

    def _heard(self, view: ReplicaView, line: bytes) -> None:
        try:
            if line.startswith(OF_A_KIND):
                self._told(view, msgspec.json.decode(line, type=SessionsReport | Trajectories))
                return
            subscription = self._subscriptions[view]
            if line == subscription.line and view.report is not None:
                # A report repeated to show that the replica lives may be long.
                subscription.calm()
                return
            report = msgspec.json.decode(line, type=ReplicaReport)
            if not view.own:
                report = msgspec.structs.replace(report, replica=view.name)
            if report.replica != view.name:
                raise ValueError(f"{view.url} is {report.replica}, expected {view.name}")
        except (*NOT_JSON, ValueError):
            # Another process answers there now: the replica that was heard before is lost.
            self._lost(view)
            raise
        subscription.calm()
        subscription.line = line
        if report.boot != subscription.boot:
            subscription.boot = report.boot
            view.admitted = False
        if report != view.heard:
            before = _serving(view.report)
            view.hear(report)
            self._changed(use=_serving(view.report) != before)

    def _told(self, view: ReplicaView, told: SessionsReport | Trajectories) -> None:
        if isinstance(told, SessionsReport):
            self.on_sessions(view.name, told)
        else:
            view.trajectories = told

    def _doubt(self, view: ReplicaView) -> None:
        """The event stream is gone: the report goes too, unless another one comes in time."""
        subscription = self._subscriptions[view]
        if view.report is not None and subscription.doubt is None:
            subscription.doubt = asyncio.get_running_loop().call_later(self._grace_s, self._lost, view)

    def _lost(self, view: ReplicaView) -> None:
        if (subscription := self._subscriptions.get(view)) is not None:
            subscription.calm()
        if view.report is not None:
            view.hear(None)
            self._changed()

    def _use_changed(self) -> None:
        """Who is usable is another than before."""
        self._fleet = None
        if self.learning and self.views and all(view.usable for view in self.views):
            self.learning = False
        self._tell_followers()
        self._wake()

    def _tell_followers(self) -> None:
        for follower in self.followers:
            follower.follow()

    def _learned(self) -> None:
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
        self._tell_followers()
        self._wake(use=use)
        if self._notice is None and self._callbacks:
            self._notice = asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notice = None
        for callback in self._callbacks:
            callback()


def _serving(report: Reported | None) -> tuple[object, ...]:
    """What it is of use for, now and soon."""
    if report is None:
        return ()
    own = report.own
    return own.snapshot, own.resident, own.pinnable, own.stage, own.target
