"""What runs on a node of a Ray cluster: an actor that has one child process there.

Owns: the child's process, and what of its settings only the node knows: its address, its caches, whether its files are there.
Always holds: the child's standard input is this actor's, so the child ends when the actor's process does, however that ends;
an actor has one child at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import ray

from midstream.errors import ConfigError
from midstream.launch.child import GatewaySpec, Listening, ReplicaSpec
from midstream.launch.models import BUILT_IN
from midstream.launch.process import Child, StartFailed


class ChildActor:
    """Made by Ray. Methods run on one event loop; those that wait do not hold up the others."""

    def __init__(self, name: str, module: str, python: str | None, directories: tuple[str, ...]) -> None:
        """directories: that must be there on the node. python: interpreter of the child, the actor's if None."""
        self._name = name
        self._module = module
        self._python = python
        self._directories = directories
        self._child: Child | None = None
        self._lines: list[bytes] = []
        self._heard = asyncio.Event()

    async def where(self) -> str:
        """The node's address."""
        return str(ray.util.get_node_ip_address())

    async def start(self, spec: ReplicaSpec | GatewaySpec) -> Listening:
        """Start the child, at the port of the one before if there was one. Returns when it listens, or why it does not."""
        address = await self.where()
        port = 0 if self._child is None else self._child.port
        try:
            here = await asyncio.to_thread(on_node, spec, address, port, self._directories)
            self._child = Child(self._name, self._module, here, python=self._python, on_line=self._hear)
            await self._child.start()
        except (StartFailed, ConfigError, OSError) as error:
            return Listening(error=f"on node {address}: {error}")
        return Listening(port=self._child.port)

    async def ended(self) -> str:
        """How the child ended, when it has."""
        assert self._child is not None
        return await self._child.ended()

    async def lines(self) -> list[bytes]:
        """What the child said since the last call, when it has said something. One call at a time."""
        await self._heard.wait()
        self._heard.clear()
        said, self._lines = self._lines, []
        return said

    async def tell(self, message: msgspec.Struct) -> None:
        if self._child is not None:
            self._child.tell(message)

    async def stop(self, grace_s: float) -> None:
        if self._child is not None:
            await self._child.stop(grace_s)

    async def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _hear(self, line: bytes) -> None:
        self._lines.append(line)
        self._heard.set()


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
    if not model_dir.is_dir() and spec.model.endswith(f"/{BUILT_IN}"):
        from midstream.models.tiny_moe import write_tiny_moe

        write_tiny_moe(model_dir)
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"there is no model in {model_dir}: the nodes need it at the same path as `midstream serve`"
        )
    cache_dir = cache_root(Path(spec.cache_dir).parent, address) / spec.name
    cache_dir.mkdir(parents=True, exist_ok=True)
    return msgspec.structs.replace(spec, host=address, port=port, cache_dir=str(cache_dir))


def cache_root(snapshots: Path, address: str) -> Path:
    """Where a node has its replicas' caches: a directory of its own also if the nodes share the state directory."""
    return snapshots / address
