"""The replicas: what runs is made equal to what is wanted.

Owns: one task per replica that starts it, keeps it running, and ends it when it is not wanted any more.
Always holds:
- A replica that cannot be started is tried again, with a growing pause, for as long as it is wanted; no other waits for it.
- Two processes of one name never run at once: they would share a cache directory.
- When a deployment is not wanted any more, what its replicas left on disk goes with them; if it cannot, the deployment goes
  nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Set
from dataclasses import dataclass

from midstream.errors import ConfigError
from midstream.gateway.roster import Running, RunningReplica, Wanted, WantedReplica
from midstream.launch.process import (
    RESTART_PAUSE_S_MAX,
    RESTART_PAUSE_S_MIN,
    HostUnwell,
    StartFailed,
    Supervised,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One replica from the moment it is wanted until its process has ended."""

    wanted: WantedReplica
    child: Supervised | None = None
    url: str | None = None
    error: str | None = None
    failed: bool = False  # the error is that of an attempt, and not what it waits for
    forget: bool = False
    task: asyncio.Task[None] | None = None


class Crew:
    """All replicas of a supervisor. Use from one event loop."""

    def __init__(
        self,
        make: Callable[[WantedReplica], Awaitable[Supervised]],
        clean: Callable[[WantedReplica, Set[str]], None],
        on_change: Callable[[], None],
        *,
        stop_s: float,
    ) -> None:
        """make: a replica's process, not started. Raises ConfigError. clean: removes what a replica of a deployment that is not
        wanted any more left on disk, and what earlier ones did, but nothing of those named; in a thread, within seconds.

        on_change: called when `running` is another. stop_s: how long one may take to end.
        """
        self._make = make
        self._clean = clean
        self._on_change = on_change
        self._stop_s = stop_s
        self._members: dict[str, _Member] = {}  # those wanted
        self._alive: dict[str, _Member] = {}  # the last of each name whose process may still be there
        self._closed = False

    def __repr__(self) -> str:
        return f"Crew({sorted(self._members)} wanted, {len(self._alive)} alive)"

    def __len__(self) -> int:
        """How many are wanted."""
        return len(self._members)

    def want(self, wanted: Wanted) -> None:
        """From now on exactly these. What cannot be started shows in `running`."""
        if self._closed:
            return
        now = {replica.name: replica for replica in wanted.replicas}
        deployments = {replica.deployment for replica in wanted.replicas}
        changed = False
        for name, member in list(self._members.items()):
            if now.get(name) != member.wanted:
                self._dismiss(name, forget=member.wanted.deployment not in deployments)
                changed = True
        for name, replica in now.items():
            if name not in self._members:
                member = _Member(replica)
                before = self._alive.get(name)
                self._members[name] = self._alive[name] = member
                member.task = asyncio.create_task(self._live(member, before), name=f"replica {name}")
                changed = True
        if changed:
            self._on_change()

    def running(self) -> Running:
        """Every replica: where it listens, and why it cannot be started; neither while it starts or ends."""
        replicas = []
        for name, member in self._alive.items():
            wanted = self._members.get(name) is member
            url, error = (member.url, member.error) if wanted else (None, None)
            replicas.append(
                RunningReplica(name=name, deployment=member.wanted.deployment, url=url, error=error)
            )
        return Running(tuple(replicas))

    def failure(self, deployment: str) -> str | None:
        """Why a replica of the deployment could not be started when that was tried last; None: there is no such one."""
        for member in self._members.values():
            if member.failed and member.wanted.deployment == deployment:
                return member.error
        return None

    def waiting(self, deployment: str) -> set[str]:
        """Its replicas that wait for something that may still come."""
        return {
            name
            for name, member in self._members.items()
            if member.wanted.deployment == deployment and member.error is not None and not member.failed
        }

    def places(self) -> dict[str, str]:
        """Where replicas run that do not run on this machine, by name."""
        children = {name: member.child for name, member in self._members.items()}
        return {name: child.place for name, child in children.items() if child is not None and child.place}

    async def close(self, stop_s: float | None = None) -> None:
        """End all of them; those that are there after `stop_s`, also on their way out since before, are killed. Idempotent."""
        self._closed = True
        for name in list(self._members):
            self._dismiss(name, forget=False)
        tasks = [member.task for member in self._alive.values() if member.task is not None]
        if tasks and (await asyncio.wait(tasks, timeout=stop_s))[1]:
            logger.warning("replicas did not end within %s s; killing them", stop_s)
            self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """End all processes at once, those on their way out too."""
        for member in self._alive.values():
            if member.child is not None:
                member.child.kill()

    def _dismiss(self, name: str, *, forget: bool) -> None:
        member = self._members.pop(name)
        member.forget = forget
        assert member.task is not None
        member.task.cancel()

    async def _live(self, member: _Member, before: _Member | None) -> None:
        try:
            await _ended(before)
            pause_s = RESTART_PAUSE_S_MIN
            while True:
                try:
                    await self._run(member)
                except Exception as error:  # whatever it is: nobody else looks after the replica
                    name, pause_s = member.wanted.name, min(pause_s * 2, RESTART_PAUSE_S_MAX)
                    logger.exception("%s: unforeseen; starting it again in %.1f s", name, pause_s)
                    self._set(member, member.url, f"{name}: {error!r}", failed=True)
                    await self._end(member)
                    await asyncio.sleep(pause_s)
        finally:
            try:
                await _ended(before)  # it was not, if this one was dismissed while it waited
                await self._end(member)
                if member.forget:
                    await self._forget(member)
            finally:
                if self._alive.get(member.wanted.name) is member:
                    del self._alive[member.wanted.name]
                    self._on_change()

    async def _run(self, member: _Member) -> None:
        """Until cancelled."""
        await self._start(member)
        assert member.child is not None
        await member.child.supervise(
            lambda why: self._restarted(member, why),
            lambda why: self._set(member, member.url, why, failed=False),
        )

    async def _end(self, member: _Member) -> None:
        """Its process, if there is one. Does not raise: the replica could not be started again then, nor go."""
        child, name = member.child, member.wanted.name
        if child is None:
            return
        stopped = False
        with _surviving("%s: cannot be ended in order; killing it", name):
            await child.stop(self._stop_s)
            stopped = True
        if not stopped:
            with _surviving("%s: cannot be killed", name):
                child.kill()

    async def _forget(self, member: _Member) -> None:
        """Remove what is left of it. Does not raise: what stays on a disk must not keep its deployment from going."""
        others = {name for name, other in self._alive.items() if other is not member}
        with _surviving("%s: what it left on disk was not removed", member.wanted.name):
            await asyncio.to_thread(self._clean, member.wanted, others)

    def _restarted(self, member: _Member, why: str | None) -> None:
        assert member.child is not None
        self._set(member, member.child.url if why is None else member.url, why, failed=why is not None)

    def _set(self, member: _Member, url: str | None, error: str | None, *, failed: bool) -> None:
        changed = (url, error) != (member.url, member.error)
        member.url, member.error, member.failed = url, error, failed
        if changed:
            self._on_change()

    async def _start(self, member: _Member) -> None:
        """Until it listens."""
        pause_s = RESTART_PAUSE_S_MIN
        while True:
            try:
                member.child = await self._make(member.wanted)
                await member.child.start(lambda why: self._set(member, None, why, failed=False))
            except (StartFailed, ConfigError, OSError) as error:
                self._set(member, None, str(error) or repr(error), failed=not isinstance(error, HostUnwell))
                pause_s = min(pause_s * 2, RESTART_PAUSE_S_MAX)
                logger.error("%s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
            else:
                self._set(member, member.child.url, None, failed=False)
                return


@contextlib.contextmanager
def _surviving(message: str, name: str) -> Iterator[None]:
    """Logs what fails within, with its cause, and goes on: nobody else ends or removes what is left of a replica."""
    try:
        yield
    except Exception:
        logger.exception(message, name)


async def _ended(member: _Member | None) -> None:
    """Until the process of one that is dismissed has ended."""
    if member is not None and member.task is not None:
        await asyncio.wait((member.task,))
