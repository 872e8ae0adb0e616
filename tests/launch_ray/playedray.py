"""A Ray that is played: the calls of launch.ray_child, actors whose child is played too, and what of them fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from midstream.core.supervision import Listening
from midstream.launch import ray_child
from midstream.launch.ray_actor import ChildActor

DEADLINE_S = 120.0
UNAVAILABLE = ActorUnavailableError("the connection broke", None)


class Recorded:
    """In place of the child's process."""

    def __init__(self) -> None:
        self.told: list[msgspec.Struct] = []
        self.port = 7

    def tell(self, message: msgspec.Struct) -> None:
        self.told.append(message)


class Actor(ChildActor):
    """Its child is played."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.child = Recorded()
        self.over = asyncio.Event()
        self.answer = Listening(port=7)

    async def where(self) -> str:
        return "10.0.0.7"

    async def start(self, spec: Any) -> Listening:
        self._child = self.child  # type: ignore[assignment]
        return self.answer

    async def ended(self) -> str:
        await self.over.wait()
        return "ended with code 1"

    async def stop(self, grace_s: float) -> None:
        self.over.set()

    def says(self, line: bytes) -> None:
        self._hear(line)


class Reference:
    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def future(self) -> concurrent.futures.Future[Any]:
        return self._future


class Handle:
    """An actor's handle. lost: what each call fails with from now on. failing: what the next call of a method fails with."""

    def __init__(self, actor: Actor, loop: asyncio.AbstractEventLoop, gate: asyncio.Event) -> None:
        self.actor = actor
        self.lost: Exception | None = None
        self.failing: dict[str, Exception] = {}
        # The actor's methods run when it is set.
        self._gate = gate
        self._loop = loop
        self._calls: list[tuple[str, concurrent.futures.Future[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Reference:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        error = self.lost or self.failing.pop(name, None)
        if error is not None:
            answer.set_exception(error)
        else:
            self._calls.append((name, answer))
            asyncio.run_coroutine_threadsafe(self._run(name, arguments, answer), self._loop)
        return Reference(answer)

    def under_way(self) -> set[str]:
        return {name for name, answer in self._calls if not answer.done()}

    def blip(self) -> None:
        """All calls fail at the caller's; those that run on the actor go on there, and nobody gets what they give."""
        for _, answer in self._calls:
            if not answer.done():
                answer.set_exception(UNAVAILABLE)

    async def _run(
        self, name: str, arguments: tuple[Any, ...], answer: concurrent.futures.Future[Any]
    ) -> None:
        await self._gate.wait()
        value = await getattr(self.actor, name)(*arguments)
        if not answer.done():
            answer.set_result(value)


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def remote(self, *arguments: Any) -> Reference:
        return self.handle.call(self.name, arguments)


class Group:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def wait(self, seconds: int) -> bool:
        assert isinstance(seconds, int), "Ray takes nothing else"
        self.cluster.note(f"wait {self.name}")
        return True


class Cluster:
    """What ray_child calls of Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.threads: set[threading.Thread] = set()
        # That are there.
        self.groups: dict[str, Group] = {}
        # Of all that ever were.
        self.names: list[str] = []
        self.handles: list[Handle] = []
        # What the next call of a function fails with.
        self.failing: dict[str, Exception] = {}
        self.state = "PENDING"
        # The actors are up.
        self.placed = asyncio.Event()
        self.placed.set()
        self.creating: Callable[[], None] = lambda: None
        self.start_fails: Exception | None = None
        self.where_fails: Exception | None = None
        self.answer = Listening(port=7)
        for name in ("placement_group", "remove_placement_group", "placement_group_table"):
            monkeypatch.setattr(ray_child, name, getattr(self, name))
        for name in ("kill", "remote", "nodes", "available_resources"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        monkeypatch.setattr(ray_child, "PlacementGroupSchedulingStrategy", lambda group, **_: group)
        monkeypatch.setattr(ray_child, "_given_up", [])
        monkeypatch.setattr(ray_child, "REACH_AGAIN_S", 0.01)
        self.loop: asyncio.AbstractEventLoop | None = None

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread())
        if (error := self.failing.pop(call.split()[0], None)) is not None:
            raise error

    def placement_group(self, bundles: list[dict[str, float]], strategy: str, name: str) -> Group:
        self.note(f"create {name}")
        self.creating()
        assert name not in self.groups, "Ray wants unique names"
        self.names.append(name)
        self.groups[name] = Group(self, name)
        return self.groups[name]

    def remove_placement_group(self, group: Group) -> None:
        self.note(f"remove {group.name}")
        del self.groups[group.name]

    def placement_group_table(self, group: Group) -> dict[str, Any]:
        self.note("table")
        return {"state": self.state, "bundles_to_node_id": {0: "n1"}}

    def kill(self, handle: Handle, no_restart: bool = True) -> None:
        self.note("kill")
        handle.lost = ActorDiedError()
        for _, answer in handle._calls:
            if not answer.done():
                answer.set_exception(handle.lost)

    def remote(self, kind: type) -> Cluster:
        assert kind is ChildActor
        return self

    def options(self, **options: Any) -> Any:
        made = Made()
        made.remote = self._make
        return made

    def _make(self, *arguments: Any) -> Handle:
        self.note("actor")
        assert self.loop is not None
        handle = Handle(Actor(*arguments), self.loop, self.placed)
        handle.actor.answer = self.answer
        for name, error in (("start", self.start_fails), ("where", self.where_fails)):
            if error is not None:
                handle.failing[name] = error
        self.handles.append(handle)
        return handle

    def nodes(self) -> list[dict[str, Any]]:
        self.note("nodes")
        return [
            {"Alive": True, "NodeID": "n1", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 4.0}},
            {"Alive": False, "NodeID": "n2", "NodeManagerAddress": "10.0.0.8", "Resources": {"CPU": 4.0}},
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        async def within_the_deadline() -> None:
            self.loop = asyncio.get_running_loop()
            async with asyncio.timeout(DEADLINE_S):
                await main

        asyncio.run(within_the_deadline())


class Made:
    remote: Callable[..., Handle]


async def until(holds: Callable[[], Any]) -> None:
    while not holds():  # noqa: ASYNC110  # threads make it true too
        await asyncio.sleep(0.005)
