"""A child process in an actor on some node of a Ray cluster.

Owns: the child's placement group and actor, and what is said through the actor.
Always holds: a child that ends on a living actor is started again there; when its actor or its node is lost, or it cannot be
started where it is, group and actor are given up and made anew, wherever there is room; neither outlives stop().
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from midstream.launch.process import StartFailed, Supervised, ignore
from midstream.launch.ray_actor import ChildActor
from midstream.launch.ray_demand import Demand, waiting_for

logger = logging.getLogger(__name__)

PLACED_WITHIN_S = 5.0  # a child that has no room by then says so
LOOK_AGAIN_S = 2.0
UNREACHABLE_S = 5.0  # an actor that cannot be reached for so long is given up
REACH_AGAIN_S = 0.5
#: What Ray's calls raise when the cluster, or a part of it, is not well.
UNWELL = (RayError, OSError, RuntimeError)
ANSWER_S = 5.0  # for an actor to say that its child was stopped, beside the time that may take


class RayChild(Supervised):
    """One supervised process, somewhere on the cluster. Use from one event loop."""

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        demand: Demand,
        *,
        python: str | None = None,
        directories: tuple[str, ...] = (),
        host: str | None = None,
        on_line: Callable[[bytes], None] | None = None,
        greeting: Callable[[], msgspec.Struct] | None = None,
    ) -> None:
        """spec: what differs by node is filled in there. host: where it listens, if that is not the node's own address.

        The others: as those of Child and ChildActor.
        """
        self.name = name
        self.host = host or ""
        self._module = module
        self._spec = spec
        self._demand = demand
        self._python = python
        self._directories = directories
        self._fixed_host = host
        self._on_line = on_line
        self._greeting = greeting
        self._group: Any = None
        self._actor: Any = None
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._message: msgspec.Struct | None = None
        self._to_tell = asyncio.Event()

    def __repr__(self) -> str:
        return f"RayChild({self.name}, {self.place}, port={self.port})"

    @property
    def running(self) -> bool:
        return self._actor is not None

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        try:
            if self._actor is None or self.place is None:
                self._leave()
                await self._take_place(on_waiting)
            answer = await _result(self._actor.start.remote(self._spec))
        except (*UNWELL, ValueError) as error:
            self._leave()
            raise StartFailed(f"{self.name}: {_said(error)}") from error
        if answer.error is not None:
            self._leave()
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
            except ActorUnavailableError as error:  # perhaps for a moment only: Ray has not given it up yet
                now = loop.time()
                if unreachable_since is None or now - asked_at > UNREACHABLE_S:  # it was there in between
                    unreachable_since = now
                if now - unreachable_since > UNREACHABLE_S:
                    return self._lost(error)
                await asyncio.sleep(REACH_AGAIN_S)
            except RayError as error:
                return self._lost(error)

    def tell(self, message: msgspec.Struct) -> None:
        self._message = message
        self._to_tell.set()
        if self._actor is not None and self._telling is None:
            self._telling = asyncio.create_task(self._pass_on(self._actor))

    async def stop(self, grace_s: float) -> None:
        if self._actor is not None and self.place is not None:
            try:
                async with asyncio.timeout(grace_s + ANSWER_S):
                    await _result(self._actor.stop.remote(grace_s))
            except (RayError, TimeoutError) as error:
                logger.warning("%s on %s did not say that it ended: %s", self.name, self.place, _said(error))
        self._leave()

    def kill(self) -> None:
        if self._actor is not None and self.place is not None:
            self._actor.kill.remote()

    def renew(self) -> None:
        """Nothing to do: what could not be started has left its place."""

    # -- inside

    async def _take_place(self, on_waiting: Callable[[str], None]) -> None:
        """A group and an actor in it, when there is room. Raises RayError."""
        demand = self._demand
        self._group = placement_group(demand.bundles(), strategy=demand.strategy, name=self.name)
        resources = dict(demand.bundle)
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
        where = _result(self._actor.where.remote())
        timeout_s = PLACED_WITHIN_S
        while not (await asyncio.wait((where,), timeout=timeout_s))[0]:
            timeout_s = LOOK_AGAIN_S
            if (why := await asyncio.to_thread(self._unplaced)) is not None:
                logger.warning("%s", why)
                on_waiting(why)
        address = where.result()
        self.place = f"node {address}"
        self.host = self._fixed_host or address

    def _unplaced(self) -> str | None:
        """What there is no room for; None when there is."""
        if placement_group_table(self._group).get("state") == "CREATED":
            return None
        nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        return waiting_for(self.name, self._demand, nodes, ray.available_resources())

    def _lost(self, error: RayError) -> str:
        how = f"is lost with its actor on {self.place}: {_said(error)}"
        self._leave()
        return how

    def _leave(self) -> None:
        """Give up actor and group, if there are any. What ran there ends with the actor."""
        actor, group = self._actor, self._group
        self._actor = self._group = self.place = None
        for task in (self._listening, self._telling):
            if task is not None:
                task.cancel()
        self._listening = self._telling = None
        try:
            if actor is not None:
                ray.kill(actor, no_restart=True)
            if group is not None:
                remove_placement_group(group)
        except UNWELL as error:  # they go with this process's job then
            logger.warning("%s: its actor or its group may still be there: %s", self.name, _said(error))

    async def _listen(self, actor: Any, on_line: Callable[[bytes], None]) -> None:
        with contextlib.suppress(RayError):  # ended() tells of it
            while True:
                for line in await _result(actor.lines.remote()):
                    on_line(line)

    async def _pass_on(self, actor: Any) -> None:
        """The newest message, one after another: an older one never comes later."""
        with contextlib.suppress(RayError):  # ended() tells of it
            while True:
                await self._to_tell.wait()
                self._to_tell.clear()
                await _result(actor.tell.remote(self._message))


def _result(reference: Any) -> asyncio.Future[Any]:
    """What a call of an actor gives. Raises RayError."""
    return asyncio.wrap_future(reference.future())


def _said(error: BaseException) -> str:
    """In one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines) or type(error).__name__
