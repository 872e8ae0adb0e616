"""What runs on a node of a Ray cluster: an actor that has one child process there.

Owns: the child's process, and what of its settings only the node knows: its address, its caches, whether its files are there.
Always holds: the child's standard input is this actor's, so the child ends when the actor's process does, however that ends, a
replica, whose GPUs are others' then, at once; an actor has one child at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import ray

from midstream.errors import ConfigError
from midstream.launch.caches import take_over
from midstream.launch.child import GatewaySpec, Listening, ReplicaSpec
from midstream.launch.models import make_built_in
from midstream.launch.process import Child, StartFailed

REPLICA = "midstream.launch.ray_replica"  # the module `replica`, and it ends with the actor


class ChildActor:
    """Made by Ray. Methods run on one event loop; those that wait do not hold up the others."""

    def __init__(self, name: str, module: str, python: str | None, directories: tuple[str, ...]) -> None:
        """directories: that must be there on the node. python: interpreter of the child, the actor's if None."""
        self._name = name
        self._module = module
        self._python = python
        self._directories = directories
        self._child: Child | None = None
        self._line = b""  # what the child said last, and how many lines that makes
        self._number = 0
        self._heard = asyncio.Event()
        self._told = 0  # the number of the message that the child was told last

    async def where(self) -> str:
        """The node's address."""
        return str(ray.util.get_node_ip_address())

    async def start(self, spec: ReplicaSpec | GatewaySpec) -> Listening:
        """Start the child, at the port of the one before if there was one. Returns when it listens, or why it does not."""
        address = await self.where()
        port = 0 if self._child is None else self._child.port
        try:
            here = await asyncio.to_thread(on_node, spec, address, port, self._directories)
            module = REPLICA if isinstance(spec, ReplicaSpec) else self._module
            self._child = Child(self._name, module, here, python=self._python, on_line=self._hear)
            await self._child.start()
        except (StartFailed, ConfigError, OSError) as error:
            return Listening(error=f"on node {address}: {error}")
        return Listening(port=self._child.port)

    async def ended(self) -> str:
        """How the child ended, when it has."""
        assert self._child is not None
        return await self._child.ended()

    async def newest(self, seen: int) -> tuple[int, bytes]:
        """The number and the text of the line that the child said last, when it has said more than `seen` lines.

        Whoever asks hears of it, so an answer that gets lost on its way can be asked for again.
        """
        while self._number <= seen:
            await self._heard.wait()
        return self._number, self._line

    async def tell(self, number: int, message: msgspec.Struct) -> None:
        """number: one sent before has a lower one, and is left out if it comes later."""
        if self._child is not None and number > self._told:
            self._told = number
            self._child.tell(message)

    async def stop(self, grace_s: float) -> None:
        if self._child is not None:
            await self._child.stop(grace_s)

    def _hear(self, line: bytes) -> None:
        self._number += 1
        self._line = line
        self._heard.set()
        self._heard = asyncio.Event()


def on_node(
    spec: ReplicaSpec | GatewaySpec, address: str, port: int, directories: tuple[str, ...]
) -> ReplicaSpec | GatewaySpec:
    """A child's settings on the node of that address. port: what it listens at if nobody says; 0 takes a free one.

    Raises ConfigError, which names what is missing here, and OSError.
    """
    for directory in directories:
        if not Path(directory).is_dir():
            raise ConfigError(f"there is no directory {directory}: it must be one that all nodes share")
    if isinstance(spec, GatewaySpec):
        return msgspec.structs.replace(spec, port=spec.port or port)
    model_dir = Path(spec.model_dir)
    snapshots = Path(spec.cache_dir).parent
    make_built_in(model_dir, snapshots.parent)
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"there is no model in {model_dir}: the nodes need it at the same path as `midstream serve`"
        )
    cache_dir = take_over(cache_root(snapshots, address), spec.name)
    return msgspec.structs.replace(spec, host=address, port=port, cache_dir=str(cache_dir))


def cache_root(snapshots: Path, address: str) -> Path:
    """Where a node has its replicas' caches: a directory of its own also if the nodes share the state directory."""
    return snapshots / address
