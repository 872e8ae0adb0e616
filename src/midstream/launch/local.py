"""The supervisor of gateways, replicas and the Tinker front, and the places where they run when all is one machine.

Owns: the front's process, the gateways, the crew of replicas and their end; on one machine, their ports and caches.
Always holds: a gateway says which replicas should run and is told which do, whole lists both; a process that dies after it
was ready is started again; the gateway, the front, or a replica of the default deployment, that cannot start at all ends the
whole before it was ready, with its reason; when this process ends, however it ends, no child is left (a child stops when its
standard input closes).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import IO, Any, Protocol

import httpx
import msgspec

from midstream.config import (
    EngineSettings,
    Settings,
    deployment_resource,
    model_resource,
    parse_size,
)
from midstream.errors import ConfigError
from midstream.gateway.appserver import socket_directory
from midstream.gateway.roster import Running, Wanted, WantedReplica
from midstream.launch.caches import remove_all, remove_caches, set_strange_caches_aside
from midstream.launch.child import STOP_GRACE_S, GatewaySpec, ReplicaSpec, TinkerSpec
from midstream.launch.crew import Crew
from midstream.launch.engines import engine_fields, number_of
from midstream.launch.gateways import Gateways
from midstream.launch.models import model_directory
from midstream.launch.process import (
    LOOPBACK,
    Child,
    StartFailed,
    Supervised,
)
from midstream.launch.restart import LOCK, Restarts
from midstream.ledger import sqlite_url
from midstream.private import private_directory, private_file
from midstream.snapshots.bucket import check_settings
from midstream.snapshots.identity import parse_bucket
from midstream.types import HEADER_TOKEN

logger = logging.getLogger(__name__)

SECOND_SIGNAL_AFTER_S = 1.0  # sooner, it is the same request to stop, delivered twice
READY_POLL_S = 0.05
NOT_READY_S = 10.0  # a server that is not ready by then says what it waits for
KILL_AFTER_S = 5.0
REPLICA_STOP_S = (
    7.0  # without a gateway there is nobody to finish anything for: time for its engine to end, no more
)
FRONT_STOP_S = 10.0  # its trainer may take half of it to end
FRONT_SOCKET = "tinker.sock"
REPLICA_HOST = LOOPBACK  # replicas are nobody's business but the gateway's


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when nobody could listen there."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise ConfigError(f"--port {port}: cannot listen on {host}:{port}: {reason}") from error


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory: two servers on one ledger would fight. Raises ConfigError."""
    try:
        private_directory(state_dir)
        file: IO[str] = private_file(state_dir / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--state-dir {state_dir}: another midstream server uses it") from error
        file.truncate(0)
        yield


def bucket_url(settings: Settings) -> str:
    """The bucket's URL; a local one's directory is made. Raises ConfigError."""
    bucket = settings.bucket or (Path(settings.state_dir).absolute() / "bucket").as_uri()
    check_settings(bucket)
    place = parse_bucket(bucket)
    try:
        if place.kind == "file":
            Path(place.path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--bucket {bucket}: {error.strerror or error}") from error
    return bucket


def gateway_url(settings: Settings, host: str, port: int) -> str:
    scheme = "http" if settings.gateway.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def own_address(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


class Places(Protocol):
    """Where the gateway and the replicas run."""

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        """Not started. spec: without port, cores and GPUs, which the place knows. replicas: how many are wanted by now.

        Raises ConfigError.
        """

    def gateway(
        self, name: str, spec: GatewaySpec, on_line: Callable[[bytes], None], greeting: Callable[[], Running]
    ) -> Supervised:
        """Not started."""

    def clean(self, replica: str, others: Set[str]) -> None:
        """Remove the caches of a replica whose deployment is gone, and of its deployment's other numbers, but of none of
        `others`, nor any that a process uses. In a thread; whoever stops waits for it, so it takes seconds at most."""

    def forget_strange(self, wanted: Set[str]) -> Callable[[], None]:
        """Have the caches removed of deployments none of whose replicas is wanted, but none that a process uses: by what is
        returned, which is for a thread, as clean() is. One wanted only later may lose a cache that it does not use yet."""


class ThisMachine:
    """All of it on this machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._caches = Path(settings.state_dir).absolute() / "snapshots"

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        settings = self._settings
        here = msgspec.structs.replace(
            spec,
            engine=engine_settings(settings, replicas),
            **engine_fields(settings, number_of(spec.name), replicas),
        )
        return Child(spec.name, "midstream.launch.replica", here, host=REPLICA_HOST, movable=True)

    def gateway(
        self, name: str, spec: GatewaySpec, on_line: Callable[[bytes], None], greeting: Callable[[], Running]
    ) -> Supervised:
        return Child(
            name, "midstream.launch.gateway", spec, host=spec.host, on_line=on_line, greeting=greeting
        )

    def clean(self, replica: str, others: Set[str]) -> None:
        remove_caches(self._caches / replica, others)

    def forget_strange(self, wanted: Set[str]) -> Callable[[], None]:
        gone = set_strange_caches_aside(self._caches, wanted)
        return lambda: remove_all(gone)


class Supervisor:
    """The gateways' processes and the replicas', for one `midstream serve`. Made in the event loop it runs in."""

    def __init__(self, settings: Settings, name: str, models: Mapping[str, Path], places: Places) -> None:
        """`name`: of the default deployment's model; `models`: the directories of all known ones."""
        self._settings = settings
        self._models = models
        self._places = places
        self._state = Path(settings.state_dir).absolute()
        self._token = settings.replica_token or secrets.token_hex(16)
        self._cleaning: list[
            asyncio.Task[None]
        ] = []  # of what deployments left that went while no server ran; once
        self.model, self.deployment = model_resource(settings, name), deployment_resource(settings)
        self.crew = Crew(self._replica, self._clean, self._tell, stop_s=STOP_GRACE_S + KILL_AFTER_S)
        self._sockets = socket_directory(FRONT_SOCKET) if settings.tinker.enabled else None
        spec = self._gateway_spec()
        count = settings.ray.gateways if settings.launcher == "ray" else 1
        self.gateways = Gateways(
            lambda name, on_line, greeting: places.gateway(name, spec, on_line, greeting),
            count,
            self._wanted,
            self.crew.running,
        )
        self.front: Child | None = None

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """Until cancelled. Raises StartFailed."""
        self.crew.want(self._first())
        await self.gateways.start()
        if self._sockets is not None:
            spec = self._tinker_spec(str(self._sockets / FRONT_SOCKET))
            self.front = Child("tinker", "midstream.launch.tinker", spec)
            await self.front.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.gateways.supervise())
            if self.front is not None:
                group.create_task(self.front.supervise())
            count = await self._all_usable()
            on_ready(self._ready(count))

    async def close(self) -> None:
        """Within FRONT_STOP_S for the front, STOP_GRACE_S for streams, KILL_AFTER_S for the gateways and REPLICA_STOP_S for the
        replicas."""
        if self.front is not None:  # a client of the gateway's, which ends the polls on it
            await self.front.stop(FRONT_STOP_S)
        await self.gateways.stop(STOP_GRACE_S + KILL_AFTER_S)  # first: streams end before their replicas do
        await self.crew.close(REPLICA_STOP_S)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def restart_gateways(self) -> None:
        """Each is replaced by a new process without a request lost, one after another. Raises StartFailed."""
        await self.gateways.replace(self._settings.gateway.restart_drain_s)

    def kill(self) -> None:
        """Everything, at once."""
        if self.front is not None:
            self.front.kill()
        self.gateways.kill()
        self.crew.kill()

    # -- inside

    def _ready(self, replicas: int) -> str:
        urls = ", ".join(self._urls())
        places = sorted((self.crew.places() | self.gateways.places()).items())
        said = f"midstream ready on {urls} ({replicas} replicas, model {self.model}, deployment {self.deployment})"
        return said + "".join(f", {name} on {place}" for name, place in places)

    def _first(self) -> Wanted:
        """What is most likely wanted, before the gateway is there to say."""
        names = (f"replica-{number}" for number in range(self._settings.replicas))
        return Wanted(
            tuple(WantedReplica(name=name, deployment=self.deployment, model=self.model) for name in names)
        )

    def _wanted(self, wanted: Wanted) -> None:
        self.crew.want(wanted)
        if not self._cleaning:
            remove = self._places.forget_strange({replica.name for replica in wanted.replicas})
            self._cleaning.append(asyncio.create_task(asyncio.to_thread(remove), name="old caches"))

    def _tell(self) -> None:
        self.gateways.tell(self.crew.running())

    async def _replica(self, wanted: WantedReplica) -> Supervised:
        settings = self._settings
        name = wanted.model.rpartition("/")[2]
        directory = await asyncio.to_thread(model_directory, self._models, name, self._state)
        size = settings.snapshot_cache
        spec = ReplicaSpec(
            name=wanted.name,
            host=REPLICA_HOST,
            port=0,
            model_dir=str(directory),
            model=wanted.model,
            deployment=wanted.deployment,
            cache_dir=str(self._state / "snapshots" / wanted.name),
            token=self._token,
            engine=settings.embedded,
            log_level=settings.log_level,
            session_idle_s=settings.gateway.session_idle_s,
            pin_drain_s=settings.pin_drain_s,
            cache_bytes=None if size is None else parse_size("snapshot_cache", size),
        )
        return await self._places.replica(spec, len(self.crew))

    def _clean(self, wanted: WantedReplica, others: Set[str]) -> None:
        self._places.clean(wanted.name, others)

    def _urls(self) -> list[str]:
        """Of the gateways, as they listened last."""
        return [gateway_url(self._settings, gateway.host, gateway.port) for gateway in self.gateways]

    def _gateway_spec(self) -> GatewaySpec:
        settings = self._settings
        return GatewaySpec(
            host=settings.host,
            port=settings.port,
            model=self.model,
            deployment=self.deployment,
            replicas=settings.replicas,
            models=tuple(self._models),
            bucket=bucket_url(settings),
            transition=settings.transition,
            swap_order=settings.swap_order,
            ledger=settings.database or sqlite_url(self._state / "ledger.db"),
            token=self._token,
            settings=settings.gateway,
            log_level=settings.log_level,
            tinker_path=None if self._sockets is None else str(self._sockets / FRONT_SOCKET),
        )

    def _tinker_spec(self, path: str) -> TinkerSpec:
        settings = self._settings
        directory = str(self._models[self.model.rpartition("/")[2]])
        [gateway] = self.gateways
        names = (self.model.rpartition("/")[2], self.model, self.deployment, settings.model, directory)
        return TinkerSpec(
            path=path,
            gateway_url=gateway_url(settings, own_address(gateway.host), gateway.port),
            names=tuple(dict.fromkeys((*names, *settings.tinker.base_models))),
            model_dir=directory,
            deployment=self.deployment,
            bucket=bucket_url(settings),
            state_dir=str(self._state),
            api_keys=settings.gateway.api_keys,
            threads=settings.tinker.trainer_threads or engine_settings(settings, settings.replicas).threads,
            settings=settings.tinker,
            log_level=settings.log_level,
        )

    async def _all_usable(self) -> int:
        """Until every deployment has what it should have, as every gateway process sees it; snapshots in the ledger are loaded
        first.

        The number of replicas of the default deployment. Raises StartFailed when one of those cannot be started; one that waits
        for room is waited for. Another deployment's trouble is that deployment's alone.
        """
        own = False  # its own gateway's certificate need not be for this address
        loop = asyncio.get_running_loop()
        since, said = loop.time(), ""
        async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=own) as client:
            while True:
                if (why := self.crew.failure(self.deployment)) is not None:
                    raise StartFailed(why)
                wanted = [await self._usable(client, url) for url in self._urls()]
                lacks = next((found for found in wanted if isinstance(found, str)), None)
                if lacks is None:
                    return int(wanted[0])
                if lacks != said and loop.time() - since >= NOT_READY_S:
                    logger.warning("not ready yet: %s", lacks)
                    said = lacks
                await asyncio.sleep(READY_POLL_S)

    async def _usable(self, client: httpx.AsyncClient, url: str) -> int | str:
        """How many replicas the default deployment should have, by a gateway that has what it should; else what it lacks."""
        try:
            health = (await client.get(f"{url}/health", headers={HEADER_TOKEN: self._token})).json()
        except (httpx.TransportError, ValueError) as error:
            return f"the gateway does not answer at {url}: {error or repr(error)}"
        waiting = self.crew.waiting(self.deployment)
        if lacks := lacking(health, self._settings.gateway.workers, waiting):
            return lacks
        return int(health["deployments"][0]["wanted"])


def lacking(health: Mapping[str, Any], workers: int, waiting: Set[str]) -> str:
    """What a server lacks to be ready, by the gateway's `/health`; empty: nothing. workers: processes of the gateway.

    waiting: replicas that wait for something, and are not to be counted as those that failed.
    """
    if (error := health.get("error")) is not None:
        return f"the gateway cannot say: {error}"
    if (ready := health["gateway_workers_ready"]) < workers:
        return f"{ready} of {workers} gateway processes are ready"
    for deployment in health["deployments"]:
        usable, wanted = deployment["usable"] - deployment["elsewhere"], deployment["wanted"]
        if usable + len(set(deployment["failed"]) - waiting) < wanted:
            return f"{deployment['name']}: {usable} of {wanted} replicas are usable"
    return ""


async def run(
    settings: Settings,
    name: str,
    models: Mapping[str, Path],
    on_ready: Callable[[str], None],
    places: Places | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartFailed; children are gone when this returns or raises.

    places: this machine, if None.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(settings, name, models, places or ThisMachine(settings))
    restarts = Restarts(Path(settings.state_dir) / LOCK, supervisor.restart_gateways)
    loop.add_signal_handler(signal.SIGHUP, restarts.ask)
    serving = asyncio.create_task(supervisor.serve(on_ready))
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            _raise_alone(serving)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _hurry(loop, supervisor))
        restarts.close()
        serving.cancel()
        asked.cancel()
        await asyncio.wait((serving, asked))
        await supervisor.close()


def _raise_alone(task: asyncio.Task[None]) -> None:
    """What the task raised; not in a group when it is alone in one."""
    try:
        task.result()
    except BaseExceptionGroup as group:
        raise (group.exceptions[0] if len(group.exceptions) == 1 else group) from None


def _hurry(loop: asyncio.AbstractEventLoop, supervisor: Supervisor) -> Callable[[], None]:
    """What a second request to stop does: not wait for streams."""
    asked_at = loop.time()

    def hurry() -> None:
        if loop.time() - asked_at > SECOND_SIGNAL_AFTER_S:
            supervisor.kill()

    return hurry


def engine_settings(settings: Settings, replicas: int) -> EngineSettings:
    """The engine's settings with its share of this machine's cores; those that run keep what they were given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.embedded.threads or max(1, cores // max(1, replicas))
    return msgspec.structs.replace(settings.embedded, threads=threads)
