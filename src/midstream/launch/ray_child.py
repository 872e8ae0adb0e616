"""A child process in an actor on a node of a Ray cluster.

Owns: the child's placement group and actor, and the messages that pass through the actor.
Always holds:
- A child that ends on a living actor is started again there.
- When its actor or its node is lost, or it cannot be started where it is, group and actor are given up, and new ones are made
  wherever there is room. The node where it could not be started is used only if there is no other.
- A group that is given up is removed at once, or with the next child placed or stopped after Ray can be reached again.
- The last message in either direction arrives, also if the actor could not be reached for a while.
- The event loop never waits for Ray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from midstream.launch.process import SILENT, ChildMessages, HostUnwell, StartFailed, Supervised, ignore
from midstream.launch.ray_actor import ChildActor
from midstream.launch.ray_demand import Demand, waiting_for

logger = logging.getLogger(__name__)

#: A child that has no place by then says so.
PLACED_WITHIN_S = 5.0
#: For a group to find room beside the one in which its child could not be started. Ray takes whole seconds.
ELSEWHERE_S = 2
LOOK_AGAIN_S = 2.0
#: An actor that cannot be reached for so long is given up.
UNREACHABLE_S = 5.0
REACH_AGAIN_S = 0.5
#: The errors of Ray's calls when the cluster, or a part of it, is not well.
UNWELL = (RayError, OSError, RuntimeError)
#: For an actor to say that its child was stopped, after the child's own time to stop.
ANSWER_S = 5.0
#: Groups that were given up and may still exist. One list for the process, like its connection to the cluster.
_given_up: list[Any] = []


class RayChild(Supervised):
    """One supervised process, somewhere on the cluster. Use from one event loop."""

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        demand: Demand,
        conversation: ChildMessages = SILENT,
        *,
        python: str | None = None,
        directories: tuple[str, ...] = (),
        host: str | None = None,
    ) -> None:
        """spec: settings that differ by node are filled in there. host: where it listens, if that is not the node's own
        address.

        The other arguments are those of Child and ChildActor.
        """
        self.name = name
        self.host = host or ""
        self._module = module
        self._spec = spec
        self._demand = demand
        self._python = python
        self._directories = directories
        self._fixed_host = host
        self._on_line, self._greeting = conversation.on_line, conversation.greeting
        self._group: Any = None
        self._actor: Any = None
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._message: msgspec.Struct | None = None
        self._number = 0
        self._to_tell = asyncio.Event()

    def __repr__(self) -> str:
        return f"RayChild({self.name}, {self.place}, port={self.port})"

    @property
    def running(self) -> bool:
        return self._actor is not None

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        try:
            if self._actor is None:
                await self._take_place(on_waiting)
            answer = await _result(self._actor.start.remote(self._spec))
        except (*UNWELL, ValueError) as error:
            await self._leave(elsewhere=True)
            kind = HostUnwell if _of_the_host(error) else StartFailed
            raise kind(f"{self.name}: {_line(error)}") from error
        if answer.error is not None:
            await self._leave(elsewhere=True)
            raise StartFailed(f"{self.name}: {answer.error}")
        self.port = answer.port
        logger.info("%s is up on %s, at %s:%d", self.name, self.place, self.host, self.port)
        if self._on_line is not None and self._listening is None:
            self._listening = asyncio.create_task(self._listen(self._actor, self._on_line))
        if self._greeting is not None:
            self.tell(self._greeting())

    async def ended(self) -> str:
        loop = asyncio.get_running_loop()
        unreachable_since: float | None = None
        while True:
            asked_at = loop.time()
            try:
                return f"{await _result(self._actor.ended.remote())} on {self.place}"
            except ActorUnavailableError as error:
                # Perhaps for a moment only: Ray has not given it up yet. An answer that took long was under way meanwhile.
                now = loop.time()
                if unreachable_since is None or now - asked_at > UNREACHABLE_S:
                    unreachable_since = now
                if now - unreachable_since > UNREACHABLE_S:
                    return await self._lost(error)
                await asyncio.sleep(REACH_AGAIN_S)
            except UNWELL as error:
                return await self._lost(error)

    def tell(self, message: msgspec.Struct) -> None:
        self._message = message
        self._number += 1
        self._to_tell.set()
        if self._actor is not None and self._telling is None:
            self._telling = asyncio.create_task(self._pass_on(self._actor))

    async def stop(self, grace_s: float) -> None:
        if self._actor is not None and self.place is not None:
            try:
                async with asyncio.timeout(grace_s + ANSWER_S):
                    await _result(self._actor.stop.remote(grace_s))
            except UNWELL as error:
                # Also after the time limit: TimeoutError is an OSError.
                logger.warning("%s on %s did not say that it ended: %s", self.name, self.place, _line(error))
        await self._leave()

    def kill(self) -> None:
        """The child ends with the actor, which need not be reached for that."""
        if self._actor is not None:
            asyncio.get_running_loop().run_in_executor(None, self._end, self._actor)

    def renew(self) -> None:
        """Nothing to do: a child that could not be started has left its place."""

    # -- inside

    async def _take_place(self, on_waiting: Callable[[str], None]) -> None:
        """Make a group, and an actor in it when there is room. Raises UNWELL; ValueError for a demand that Ray refuses."""
        await _all_of(asyncio.to_thread(self._make_group))
        if _given_up:
            # The old groups keep their room until now, else Ray would choose the same node again.
            await asyncio.to_thread(self._group.wait, ELSEWHERE_S)
            await _remove_given_up()
        await _all_of(asyncio.to_thread(self._make_actor))
        where = _result(self._actor.where.remote())
        try:
            waited = await self._wait_for(where, on_waiting)
            address = where.result()
        finally:
            where.cancel()
        self.place = f"node {address}"
        self.host = self._fixed_host or address
        if waited:
            on_waiting(f"{self.name}: starts on {self.place}")

    def _make_group(self) -> None:
        """Runs in a thread. The name is for people who look at the cluster; Ray requires it to be unique."""
        demand, name = self._demand, f"{self.name}-{secrets.token_hex(4)}"
        self._group = placement_group(demand.bundles(), strategy=demand.strategy, name=name)

    def _make_actor(self) -> None:
        """In a thread."""
        resources = dict(self._demand.bundle)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=0
            ),
        }
        made = ray.remote(ChildActor).options(**options)
        self._actor = made.remote(self.name, self._module, self._python, self._directories)

    async def _wait_for(self, where: asyncio.Future[str], on_waiting: Callable[[str], None]) -> bool:
        """Waits until the actor is there. True if a reason for waiting was reported."""
        reason = ""
        timeout_s = PLACED_WITHIN_S
        while not (await asyncio.wait((where,), timeout=timeout_s))[0]:
            timeout_s = LOOK_AGAIN_S
            if (why := await asyncio.to_thread(self._waits_for, self._group)) != reason:
                reason = why
                logger.warning("%s", why)
                on_waiting(why)
        return bool(reason)

    def _waits_for(self, group: Any) -> str:
        """Why it waits, in one line. In a thread."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        table = placement_group_table(group)
        if table.get("state") == "CREATED":
            there = table["bundles_to_node_id"].get(0)
            where = "".join(f" on node {n['NodeManagerAddress']}" for n in nodes if n["NodeID"] == there)
            return f"{self.name}: has room{where}, but its actor is not up: Ray's log files there say why"
        resources = {node["NodeManagerAddress"]: node["Resources"] for node in nodes}
        return waiting_for(self.name, self._demand, resources, ray.available_resources())

    async def _lost(self, error: Exception) -> str:
        how = f"is lost with its actor on {self.place}: {_line(error)}"
        await self._leave()
        return how

    async def _leave(self, *, elsewhere: bool = False) -> None:
        """Give up actor and group, if there are any. The child ends with the actor.

        elsewhere: the group keeps its room until another one has been looked for.
        """
        actor, group = self._actor, self._group
        self._actor = self._group = self.place = None
        for task in (self._listening, self._telling):
            if task is not None:
                task.cancel()
        self._listening = self._telling = None
        if group is not None:
            _given_up.append(group)
        if actor is not None:
            await _all_of(asyncio.to_thread(self._end, actor))
        if not elsewhere:
            await _remove_given_up()

    def _end(self, actor: Any) -> None:
        """In a thread."""
        try:
            ray.kill(actor, no_restart=True)
        except UNWELL as error:
            # It goes with its group.
            logger.warning("%s: its actor may still be there: %s", self.name, _line(error))

    async def _listen(self, actor: Any, on_line: Callable[[bytes], None]) -> None:
        seen = 0
        while self._actor is actor:
            try:
                seen, line = await _result(actor.newest.remote(seen))
            except UNWELL:
                # ended() finds out whether it is lost.
                await asyncio.sleep(REACH_AGAIN_S)
            else:
                on_line(line)

    async def _pass_on(self, actor: Any) -> None:
        """Send the newest message, one call after another, so that no older message arrives later."""
        while self._actor is actor:
            await self._to_tell.wait()
            self._to_tell.clear()
            try:
                await _result(actor.tell.remote(self._number, self._message))
            except UNWELL:
                # As in _listen().
                self._to_tell.set()
                await asyncio.sleep(REACH_AGAIN_S)


async def _remove_given_up() -> None:
    """Remove the groups that were given up. One that cannot be removed now stays in the list."""

    async def remove() -> None:
        for group in _given_up.copy():
            # Another call removes it.
            if group not in _given_up:
                continue
            _given_up.remove(group)
            try:
                await asyncio.to_thread(remove_placement_group, group)
            except UNWELL as error:
                # At the latest it goes with this process's job.
                _given_up.append(group)
                logger.warning("a placement group may still be there: %s", _line(error))

    if _given_up:
        await _all_of(remove())


async def _all_of(work: Coroutine[Any, Any, None]) -> None:
    """Waits for the work, also when this is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def _of_the_host(error: Exception) -> bool:
    """True if another host may help: not for an error of the actor's own code, nor for a demand that Ray refuses."""
    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    return isinstance(error, UNWELL) and not isinstance(error, RayTaskError)


def _result(reference: Any) -> asyncio.Future[Any]:
    """The result of a call of an actor. Raises RayError."""
    return asyncio.wrap_future(reference.future())


def _line(error: BaseException) -> str:
    """The message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines) or type(error).__name__
