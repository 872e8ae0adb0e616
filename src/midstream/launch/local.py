"""Where the gateways and the replicas of a supervisor run: the port, and this machine with its ports, cores and signals.

`LocalLauncher` runs them on this machine, `RayLauncher` (launch/ray_launcher.py) on a Ray cluster.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Set
from pathlib import Path
from typing import Any, Protocol

import msgspec

from midstream.core.config import EngineSettings, Settings
from midstream.core.errors import ConfigError
from midstream.http.listening import PASSIVE, bound_sockets
from midstream.launch.caches import remove_all, remove_caches, set_strange_caches_aside
from midstream.launch.engines import engine_fields, number_of, records_root, usable_cores
from midstream.launch.process import Child, ChildMessages, StartFailed, Supervised, new_process
from midstream.launch.spare import SpareReplica
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.launch.stranded import upload_stranded


class Launcher(Protocol):
    """Makes processes. None of them is started."""

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        """spec: without the port, the cores and the GPUs, which the launcher knows. replicas: how many are wanted by now.

        Raises ConfigError.
        """

    def gateway(self, name: str, spec: GatewaySpec, conversation: ChildMessages) -> Supervised: ...

    async def keep_spare(self) -> None:
        """Have a process ready for the next replica that begins, where that is done. Cancelled when the server stops."""

    def remove_caches(self, replica: str, others: Set[str]) -> None:
        """Remove the caches of a deployment that is gone: of this replica, and of its other numbers.

        Keeps those of `others`, and any that a process uses. Called in a thread that a stopping server waits for, so it takes
        seconds at most.
        """

    def set_strange_caches_aside(self, wanted: Set[str]) -> Callable[[], None]:
        """Rename the caches of deployments without any wanted replica. Returns what removes them, in a thread.

        Keeps any that a process uses. A replica that is wanted only later may lose a cache that it does not use yet.
        """

    def upload_stranded(self) -> bool:
        """Upload the records that replicas left where they ran. Returns whether none is left, as far as one can know.

        Only for settings with `records`. Called in a thread of its own; takes as long as the bucket does.
        """


class LocalLauncher:
    """All processes on this machine. Replicas listen where only this machine reaches them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._caches = Path(settings.state_dir).absolute() / "snapshots"
        # What other engines import, their own processes do.
        after_s = settings.embedded.spare_after_s if settings.engine == "embedded" else 0
        self._spare = SpareReplica(lambda: new_process("spare", "midstream.launch.spare_replica"), after_s)

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        settings = self._settings
        here = msgspec.structs.replace(
            spec,
            engine=engine_settings(settings, replicas),
            **engine_fields(settings, number_of(spec.name), replicas),
        )
        return Child(
            spec.name, "midstream.launch.replica", here, host=spec.host, movable=True, spare=self._spare.take
        )

    async def keep_spare(self) -> None:
        await self._spare.keep()

    def gateway(self, name: str, spec: GatewaySpec, conversation: ChildMessages) -> Supervised:
        return Child(name, "midstream.launch.gateway", spec, conversation, host=spec.host)

    def remove_caches(self, replica: str, others: Set[str]) -> None:
        remove_caches(self._caches / replica, others)

    def set_strange_caches_aside(self, wanted: Set[str]) -> Callable[[], None]:
        aside = set_strange_caches_aside(self._caches, wanted)
        return lambda: remove_all(aside)

    def upload_stranded(self) -> bool:
        assert self._settings.records.bucket is not None
        return upload_stranded(records_root(self._settings), self._settings.records.bucket)


def engine_settings(settings: Settings, replicas: int) -> EngineSettings:
    """The engine's settings with its share of this machine's cores. Engines that run keep theirs."""
    threads = settings.embedded.threads or max(1, len(usable_cores()) // max(1, replicas))
    return msgspec.structs.replace(settings.embedded, threads=threads)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if no process could listen there."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        advice = "; name another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"--port {port}: cannot listen on {host}:{port}: {reason}{advice}") from error


def reserved(host: str, port: int) -> list[socket.socket]:
    """Sockets bound where several gateways are to listen, one for each address of `host`. None of them listens.

    port: 0 for any free one. Raises StartFailed.
    """
    try:
        return bound_sockets(socket.getaddrinfo(host, port, **PASSIVE), port, shared=True)
    except OSError as error:
        raise StartFailed(f"gateway: {error}") from error


def gateway_url(settings: Settings, host: str, port: int) -> str:
    scheme = "http" if settings.gateway.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def own_address(host: str) -> str:
    """The address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def stop_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM, from now on."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def until_stopped(
    serving: Coroutine[Any, Any, None], stop: asyncio.Event, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Serve until `stop` is set, or until that ends; raises what it raises. on_stop: called before it is cancelled."""
    task = asyncio.create_task(serving)
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        on_stop()
        task.cancel()
        asked.cancel()
        await asyncio.wait((task, asked))
