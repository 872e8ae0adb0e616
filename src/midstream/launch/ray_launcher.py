"""Replicas, and gateways if the settings say so, on a Ray cluster that others run.

Owns: the connection to the cluster.
Always holds: actors belong to this process's job, so they are gone when this process is, however it ends.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, TypeVar

import msgspec

# Each line of each replica is logged. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from midstream.core.config import Settings
from midstream.core.errors import ConfigError
from midstream.launch.caches import remove_all, remove_caches, set_strange_caches_aside
from midstream.launch.engines import engine_fields, number_of, records_root
from midstream.launch.local import LocalLauncher
from midstream.launch.process import ChildMessages, Supervised
from midstream.launch.ray_actor import node_root
from midstream.launch.ray_child import UNWELL, RayChild
from midstream.launch.ray_demand import gateway_demand, replica_demand
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.launch.stranded import upload_stranded
from midstream.snapshots.identity import parse_bucket

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long the end waits for nodes to remove caches and upload records. They may continue after that.
CLEAN_S = 5.0
CONNECT_S = 5.0
WILDCARDS = ("0.0.0.0", "::", "")


class RayLauncher:
    """Makes the processes of one `midstream serve`. Made before its event loop; close() is for after it."""

    def __init__(self, settings: Settings, bucket: str) -> None:
        """Connects. Raises ConfigError when there is no cluster, or the settings do not fit it."""
        self._settings = settings
        self._here = LocalLauncher(settings)
        self._snapshots = Path(settings.state_dir).absolute() / "snapshots"
        place = parse_bucket(bucket)
        self._shared = (place.path,) if place.kind == "file" else ()
        _connect(settings)
        if settings.ray.gateway and is_loopback(settings.gateway.host):
            _all_on_this_machine(
                f"--host {settings.gateway.host}: a gateway that Ray places must listen on an address that other nodes "
                "({}) reach: give --host 0.0.0.0"
            )
        if settings.ray.gateways > 1 and (settings.ledger.database or "sqlite:").startswith("sqlite:"):
            _all_on_this_machine(
                "ray.gateways above 1 needs one database for all of them: a file of SQLite is another one on each node ({}); "
                "give --database postgresql://..."
            )

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        settings = self._settings
        threads = settings.embedded.threads or max(1, int(settings.ray.cpus))
        fields = engine_fields(settings, number_of(spec.name), replicas, alone=True)
        placed = msgspec.structs.replace(
            spec,
            engine=msgspec.structs.replace(settings.embedded, threads=threads),
            # Cores and GPUs are those that Ray gives the actor.
            **{**fields, "cores": (), "gpus": ()},
        )
        return RayChild(
            spec.name,
            "midstream.launch.replica",
            placed,
            replica_demand(settings.ray),
            python=settings.ray.python,
            directories=self._shared,
        )

    def gateway(self, name: str, spec: GatewaySpec, conversation: ChildMessages) -> Supervised:
        if not self._settings.ray.gateway:
            return self._here.gateway(name, spec, conversation)
        return RayChild(
            name,
            "midstream.launch.gateway",
            spec,
            gateway_demand(self._settings.ray),
            conversation,
            python=self._settings.ray.python,
            host=None if spec.host in WILDCARDS else spec.host,
        )

    async def keep_spare(self) -> None:
        """There is none: nobody knows on which node the next replica begins."""

    def remove_caches(self, replica: str, others: Set[str]) -> None:
        _on_every_node(remove_caches_on, str(self._snapshots), replica, frozenset(others))

    def set_strange_caches_aside(self, wanted: Set[str]) -> Callable[[], None]:
        names = frozenset(wanted)

        def remove() -> None:
            _on_every_node(remove_strange_on, str(self._snapshots), names)

        return remove

    def upload_stranded(self) -> bool:
        assert self._settings.records.bucket is not None
        root, url = str(records_root(self._settings)), self._settings.records.bucket
        whole = _on_every_node(
            upload_stranded_on, root, url, failure="records of replicas that are gone wait on nodes"
        )
        return whole is not None and all(whole)

    def close(self) -> None:
        """Leave the cluster. All actors of this process end."""
        ray.shutdown()


def remove_caches_on(snapshots: str, replica: str, others: Set[str]) -> None:
    """On a node."""
    remove_caches(node_root(Path(snapshots), ray.util.get_node_ip_address()) / replica, others)


def remove_strange_on(snapshots: str, wanted: Set[str]) -> None:
    """On a node."""
    remove_all(set_strange_caches_aside(node_root(Path(snapshots), ray.util.get_node_ip_address()), wanted))


def upload_stranded_on(root: str, url: str) -> bool:
    """On a node: what replicas left that ran there."""
    return upload_stranded(node_root(Path(root), ray.util.get_node_ip_address()), url)


def _connect(settings: Settings) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = settings.ray.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.rpartition(":")
        # Ray would try for ever.
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"--launcher ray: no Ray cluster at {address} that this machine is a node of: {''.join(first)}"
        ) from error


def is_loopback(host: str) -> bool:
    """True if only its own machine reaches that address. An unknown name does not count: listening there fails and says why."""
    if host in WILDCARDS:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _all_on_this_machine(else_: str) -> None:
    """Raises ConfigError with `else_` and an example, when a node of the cluster is on another machine."""
    addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    elsewhere = [address for address in addresses if not is_loopback(address)]
    if elsewhere:
        raise ConfigError(else_.format(f"e.g. {elsewhere[0]}"))


def _on_every_node(
    function: Callable[..., T], *arguments: Any, failure: str = "caches of nodes were not removed"
) -> list[T] | None:
    """Run it on each node; what it returned on each. None: not on all of them. `failure` is logged with the reason then."""
    try:
        running = [_on_node(node["NodeID"], function, *arguments) for node in ray.nodes() if node["Alive"]]
        done, late = ray.wait(running, num_returns=len(running), timeout=CLEAN_S) if running else ([], [])
    except UNWELL as error:
        logger.warning("%s: %s", failure, error)
        return None
    results: list[T] = []
    for reference in done:
        try:
            results.append(ray.get(reference))
        except UNWELL as error:
            logger.warning("%s: %s", failure, str(error).splitlines()[-1:])
    if late:
        logger.warning(
            "%s: %d nodes have not done it within %s s; they may still do so", failure, len(late), CLEAN_S
        )
    return results if len(results) == len(running) else None


def _on_node(node_id: str, function: Callable[..., object], *arguments: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote = ray.remote(function).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    return remote.remote(*arguments)
