"""Where the gateways and the replicas of a supervisor run.

`LocalLauncher` (launch/local.py) runs them on this machine, `RayLauncher` (launch/ray_launcher.py) on a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from midstream.launch.process import Conversation, Supervised
from midstream.launch.specs import GatewaySpec, ReplicaSpec


class Launcher(Protocol):
    """Makes processes. None of them is started."""

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        """spec: without the port, the cores and the GPUs, which the launcher knows. replicas: how many are wanted by now.

        Raises ConfigError.
        """

    def gateway(self, name: str, spec: GatewaySpec, conversation: Conversation) -> Supervised: ...

    def remove_caches(self, replica: str, others: Set[str]) -> None:
        """Remove the cache of a replica whose deployment is gone, and of its deployment's other numbers.

        Keeps those of `others`, and any that a process uses. Called in a thread that a stopping server waits for, so it takes
        seconds at most.
        """

    def set_strange_caches_aside(self, wanted: Set[str]) -> Callable[[], None]:
        """Rename the caches of deployments none of whose replicas is wanted. Returns what removes them, in a thread.

        Keeps any that a process uses. A replica that is wanted only later may lose a cache that it does not use yet.
        """
