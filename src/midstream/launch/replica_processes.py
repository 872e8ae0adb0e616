"""The replica processes of a supervisor: those that run are made equal to those that are wanted.

Owns: one task per replica that starts its process, keeps it running, and ends it when it is not wanted any more.
Always holds:
- A replica that cannot be started is tried again, with a growing pause, for as long as it is wanted. No other waits for it.
- Two processes of one name never run at once: they would share a cache directory.
- When a deployment is not wanted any more, the files that its replicas left on disk are removed. If that fails, the deployment
  goes nevertheless.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Set
from dataclasses import dataclass
from typing import Any

from midstream.core.errors import ConfigError
from midstream.fleet.desired_state import Running, RunningReplica, Wanted, WantedReplica
from midstream.launch.process import STARTS, HostUnwell, StartFailed, Supervised

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One replica from the moment it is wanted until its process has ended.

    error: why it does not run. failed: the error is that of an attempt, and not what the replica waits for. forget: its
    deployment is gone.
    """

    wanted: WantedReplica
    child: Supervised | None = None
    url: str | None = None
    error: str | None = None
    failed: bool = False
    forget: bool = False
    task: asyncio.Task[None] | None = None


class ReplicaProcesses:
    """All replica processes of a supervisor. Use from one event loop."""

    def __init__(
        self,
        make: Callable[[WantedReplica], Awaitable[Supervised]],
        clean: Callable[[WantedReplica, Set[str]], None],
        on_change: Callable[[], None],
        *,
        stop_s: float,
    ) -> None:
        """make: a replica's process, not started. Raises ConfigError. clean: removes the files of a deployment's replicas, but
        not those of the replicas named. Called in a thread when a deployment is gone; takes seconds at most.

        on_change: called when `running` changes. stop_s: how long one may take to end.
        """
        self._make = make
        self._clean = clean
        self._on_change = on_change
        self._stop_s = stop_s
        #: Those that are wanted, and the last one of each name if its process may still run.
        self._members: dict[str, _Member] = {}
        self._alive: dict[str, _Member] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"ReplicaProcesses({sorted(self._members)} wanted, {len(self._alive)} alive)"

    def __len__(self) -> int:
        """How many are wanted."""
        return len(self._members)

    def want(self, wanted: Wanted) -> None:
        """Run exactly these from now on. `running` shows one that cannot be started."""
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
                member.task.add_done_callback(functools.partial(self._never_begun, member, before))
                changed = True
        if changed:
            self._on_change()

    def running(self) -> Running:
        """Every replica: where it listens, and why it cannot be started. Neither while it starts or ends."""
        replicas = []
        for name, member in self._alive.items():
            wanted = self._members.get(name) is member
            url, error = (member.url, member.error) if wanted else (None, None)
            replicas.append(
                RunningReplica(name=name, deployment=member.wanted.deployment, url=url, error=error)
            )
        return Running(tuple(replicas))

    def failure(self, deployment: str) -> str | None:
        """Why the last attempt to start a replica of the deployment failed; None: no attempt failed."""
        for member in self._members.values():
            if member.failed and member.wanted.deployment == deployment:
                return member.error
        return None

    def waiting(self, deployment: str) -> set[str]:
        """The replicas of the deployment that wait for something, such as room."""
        return {
            name
            for name, member in self._members.items()
            if member.wanted.deployment == deployment and member.error is not None and not member.failed
        }

    def places(self) -> dict[str, str]:
        """The places of replicas that do not run on this machine, by name."""
        children = {name: member.child for name, member in self._members.items()}
        return {name: child.place for name, child in children.items() if child is not None and child.place}

    async def close(self, stop_s: float | None = None) -> None:
        """End all of them. Those that are there after `stop_s` are killed, also those dismissed before. Idempotent."""
        self._closed = True
        for name in list(self._members):
            self._dismiss(name, forget=False)
        tasks = [member.task for member in self._alive.values() if member.task is not None]
        if tasks and (await asyncio.wait(tasks, timeout=stop_s))[1]:
            logger.warning("replicas did not end within %s s; killing them", stop_s)
            self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """End all processes at once, also those that are ending."""
        for member in self._alive.values():
            if member.child is not None:
                member.child.kill()

    def _dismiss(self, name: str, *, forget: bool) -> None:
        member = self._members.pop(name)
        member.forget = forget
        assert member.task is not None
        member.task.cancel()

    async def _live(self, member: _Member, before: _Member | None) -> None:
        name, failures = member.wanted.name, 0
        try:
            await _ended(before)
            while True:
                error = await _failure(self._run(member))
                failures += 1
                pause_s = STARTS.pause_s(failures)
                logger.error("%s: unforeseen; starting it again in %.1f s", name, pause_s, exc_info=error)
                self._set(member, member.url, f"{name}: {error!r}", failed=True)
                await self._end(member)
                await asyncio.sleep(pause_s)
        finally:
            try:
                # The one before is still there if this one was dismissed while it waited.
                await _ended(before)
                await self._end(member)
                if member.forget:
                    await self._forget(member)
            finally:
                if self._alive.get(name) is member:
                    del self._alive[name]
                    self._on_change()

    def _never_begun(self, member: _Member, before: _Member | None, task: asyncio.Task[None]) -> None:
        """After a task was cancelled before its first step: make the replica before it the last of its name again."""
        name = member.wanted.name
        if self._alive.get(name) is not member:
            return
        if before is not None and before.task is not None and not before.task.done():
            before.forget |= member.forget
            self._alive[name] = before
        else:
            del self._alive[name]
        self._on_change()

    async def _run(self, member: _Member) -> None:
        """Run one replica until cancelled."""
        await self._start(member)
        assert member.child is not None
        await member.child.supervise(
            lambda why: self._restarted(member, why),
            lambda why: self._set(member, member.url, why, failed=False),
        )

    async def _end(self, member: _Member) -> None:
        """End its process, if there is one. A failure is logged: the replica must be able to start again, or to go."""
        child, name = member.child, member.wanted.name
        if child is None:
            return
        if (error := await _failure(child.stop(self._stop_s))) is not None:
            logger.error("%s: cannot be ended in order; killing it", name, exc_info=error)
            child.kill()

    async def _forget(self, member: _Member) -> None:
        """Remove its files. A failure is logged: files that stay on a disk must not keep a deployment from going."""
        others = {name for name, other in self._alive.items() if other is not member}
        error = await _failure(asyncio.to_thread(self._clean, member.wanted, others))
        if error is not None:
            logger.error("%s: its files on disk were not removed", member.wanted.name, exc_info=error)

    def _restarted(self, member: _Member, why: str | None) -> None:
        assert member.child is not None
        self._set(member, member.child.url if why is None else member.url, why, failed=why is not None)

    def _set(self, member: _Member, url: str | None, error: str | None, *, failed: bool) -> None:
        changed = (url, error) != (member.url, member.error)
        member.url, member.error, member.failed = url, error, failed
        if changed:
            self._on_change()

    async def _start(self, member: _Member) -> None:
        """Wait until it listens."""
        failures = 0
        while True:
            try:
                member.child = await self._make(member.wanted)
                await member.child.start(lambda why: self._set(member, None, why, failed=False))
            except (StartFailed, ConfigError, OSError) as error:
                self._set(member, None, str(error) or repr(error), failed=not isinstance(error, HostUnwell))
                failures += 1
                pause_s = STARTS.pause_s(failures)
                logger.error("%s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
            else:
                self._set(member, member.child.url, None, failed=False)
                return


async def _failure(work: Coroutine[Any, Any, object]) -> BaseException | None:
    """Runs the work as a task of its own, and returns what ended that task; None when it finished.

    When this is cancelled, the task is cancelled too and has ended.
    """
    result: object
    [result] = await asyncio.gather(work, return_exceptions=True)
    return result if isinstance(result, BaseException) else None


async def _ended(member: _Member | None) -> None:
    """Wait until the process of a dismissed replica has ended."""
    if member is not None and member.task is not None:
        await asyncio.wait((member.task,))
