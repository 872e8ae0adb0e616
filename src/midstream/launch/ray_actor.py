"""An actor on a node of a Ray cluster, with one child process there.

Owns: the child's process, and the settings that only the node knows: its address, its caches, and whether its files exist.
Always holds: an actor has one child at a time. The actor holds the child's standard input, so the child ends when the actor's
process ends, however that happens. A replica then ends at once, since Ray gives its GPUs to others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import ray

from midstream.core.errors import ConfigError
from midstream.core.supervision import Listening
from midstream.launch.caches import take_over
from midstream.launch.models import make_built_in
from midstream.launch.process import Child, ChildMessages, StartFailed
from midstream.launch.specs import GatewaySpec, ReplicaSpec

#: Runs the module `replica`, and ends with the actor.
REPLICA = "midstream.launch.ray_replica"


class ChildActor:
    """Made by Ray. Methods run on one event loop. One that waits does not hold up the others."""

    def __init__(self, name: str, module: str, python: str | None, directories: tuple[str, ...]) -> None:
        """directories: that must exist on the node. python: the child's interpreter, the actor's if None."""
        self._name = name
        self._module = module
        self._python = python
        self._directories = directories
        self._child: Child | None = None
        #: The child's last line, and its number.
        self._line = b""
        self._number = 0
        self._heard = asyncio.Event()
        #: The number of the last message that the child got.
        self._sent = 0

    async def where(self) -> str:
        """The node's address."""
        return str(ray.util.get_node_ip_address())

    async def start(self, spec: ReplicaSpec | GatewaySpec) -> Listening:
        """Start the child, at the port of the one before if there was one. Returns its answer, when it listens or cannot
        start."""
        address = await self.where()
        port = 0 if self._child is None else self._child.port
        try:
            here = await asyncio.to_thread(on_node, spec, address, port, self._directories)
            module = REPLICA if isinstance(spec, ReplicaSpec) else self._module
            conversation = ChildMessages(self._hear)
            self._child = Child(self._name, module, here, conversation, python=self._python)
            await self._child.start()
        except (StartFailed, ConfigError, OSError) as error:
            return Listening(error=f"on node {address}: {error}")
        return Listening(port=self._child.port)

    async def ended(self) -> str:
        """Waits until the child has ended; says how."""
        assert self._child is not None
        return await self._child.ended()

    async def newest(self, seen: int) -> tuple[int, bytes]:
        """Waits until the child has said more than `seen` lines; returns the number and the text of the last one.

        The caller keeps count, so an answer that is lost on its way can be asked for again.
        """
        while self._number <= seen:
            await self._heard.wait()
        return self._number, self._line

    async def tell(self, number: int, message: msgspec.Struct) -> None:
        """number: grows with each message. A message that arrives after a later one is ignored."""
        if self._child is not None and number > self._sent:
            self._sent = number
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
    """A child's settings on the node of that address. port: where it listens if the settings do not say; 0 takes a free one.

    Raises ConfigError, which names the missing directory or model, and OSError.
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
    cache_dir = take_over(node_root(snapshots, address), spec.name)
    records = Path(spec.records_dir)
    return msgspec.structs.replace(
        spec,
        host=address,
        port=port,
        cache_dir=str(cache_dir),
        records_dir=str(node_root(records.parent, address) / records.name) if spec.records_dir else "",
    )


def node_root(root: Path, address: str) -> Path:
    """A node's part of the directory of caches, or of records: its own also where nodes share the state directory."""
    return root / address
