"""The supervisor of `midstream serve`: its gateways, its replicas and the Tinker front.

Owns: the front's process, the gateways, the replica processes, and their end.
Always holds:
- A gateway says which replicas should run, and receives the list of those that do. Both lists are complete.
- A process that dies after it was ready is started again.
- Before the server is ready, a gateway, the front, or a replica of the default deployment that cannot start ends the server,
  with its own reason.
- When the supervisor ends, however it ends, no child is left: a child stops when its standard input closes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import signal
import ssl
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.config import GatewaySettings, Settings
from midstream.core.errors import ConfigError
from midstream.core.http_answer import NotThatAnswer
from midstream.core.key_settings import KeySettings
from midstream.core.pulse import Pulse
from midstream.core.scopes import PUBLISH
from midstream.core.served_names import deployment_resource, model_resource
from midstream.core.supervision import Stalled, TinkerSpec
from midstream.fleet.desired_state import Wanted, WantedReplica
from midstream.fleet.subscription import token_header
from midstream.fleet.tally import stalled
from midstream.http.appserver import socket_directory
from midstream.http.call import CallFailed, call
from midstream.http.channel import STOP_GRACE_S
from midstream.http.tls import unverified_tls
from midstream.launch.engines import records_root, replica_fields
from midstream.launch.gateways import Gateways
from midstream.launch.local import (
    Launcher,
    engine_settings,
    gateway_url,
    own_address,
    reserved,
    stop_signals,
    until_stopped,
)
from midstream.launch.models import model_directory
from midstream.launch.process import KILL_AFTER_S, LOOPBACK, Child, ChildMessages, StartFailed, Supervised
from midstream.launch.replica_processes import ReplicaProcesses
from midstream.launch.restart import LOCK, Restarts
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.launch.stranded import StrandedRecords, say_what_waits
from midstream.launch.tracing import check as check_tracing
from midstream.ledger import sqlite_url
from midstream.snapshots.identity import parse_bucket
from midstream.snapshots.store.bucket import check_settings

logger = logging.getLogger(__name__)

#: A second signal that comes sooner is the same request to stop, delivered twice.
SECOND_SIGNAL_AFTER_S = 1.0
READY_POLL_S = 0.05
#: Of one look at a gateway's health.
HEALTH_S = 5.0
#: A server that is not ready after these times says what it waits for: first as news, then as a warning.
WAITING_S = 10.0
NOT_READY_S = 60.0
#: For a replica's engine to end. Without a gateway there are no streams to finish.
REPLICA_STOP_S = 7.0
#: Its trainer may take half of that to end.
FRONT_STOP_S = 10.0
#: For the records of a deployment that is deleted. What is not up by then is uploaded later.
UPLOAD_S = 5.0
FRONT_SOCKET = "tinker.sock"


async def run(
    settings: Settings,
    name: str,
    models: Mapping[str, Path],
    on_ready: Callable[[str], None],
    launcher: Launcher,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartFailed, ConfigError. No child is left when this returns or raises.

    name, models: see Supervisor. on_ready: gets the line that says where the server listens.
    """
    if settings.launcher == "local":
        # Elsewhere other environments count.
        check_tracing(settings.tracing)
    loop, stop = asyncio.get_running_loop(), stop_signals()
    supervisor = Supervisor(settings, name, models, launcher)
    restarts = Restarts(Path(settings.state_dir) / LOCK, supervisor.restart_gateways)
    loop.add_signal_handler(signal.SIGHUP, restarts.ask)

    def stopping() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _hurry(loop, supervisor))
        restarts.close()

    try:
        await until_stopped(supervisor.serve(on_ready), stop, stopping)
    except BaseExceptionGroup as group:
        raise (group.exceptions[0] if len(group.exceptions) == 1 else group) from None
    finally:
        await supervisor.close()


def _hurry(loop: asyncio.AbstractEventLoop, supervisor: Supervisor) -> Callable[[], None]:
    """What a second request to stop does: not wait for streams."""
    asked_at = loop.time()

    def hurry() -> None:
        if loop.time() - asked_at > SECOND_SIGNAL_AFTER_S:
            supervisor.kill()

    return hurry


class Supervisor:
    """All processes of one `midstream serve`. Made in the event loop it runs in."""

    def __init__(self, settings: Settings, name: str, models: Mapping[str, Path], launcher: Launcher) -> None:
        """name: of the default deployment's model. models: the directories of all known models, by name."""
        self._settings = settings
        self._models = models
        self._launcher = launcher
        self._state = Path(settings.state_dir).absolute()
        self._token = settings.replica.token or secrets.token_hex(16)
        #: The key that the Tinker front loads adapters with. Only the front and the gateways know it.
        self._front_key = secrets.token_hex(32) if settings.gateway.api_keys else None
        #: Removes, once, the caches of deployments that went while no server ran.
        self._cleaning: asyncio.Task[None] | None = None
        self.model, self.deployment = model_resource(settings, name), deployment_resource(settings)
        #: Uploads what replicas leave that are gone. None: no records are kept.
        self.records = None if settings.records.bucket is None else StrandedRecords(launcher.upload_stranded)
        self.replicas = ReplicaProcesses(
            self._replica,
            self._clean,
            self._replicas_changed,
            stop_s=STOP_GRACE_S + KILL_AFTER_S,
        )
        self._sockets = socket_directory(FRONT_SOCKET) if settings.tinker.enabled else None
        on_nodes = settings.launcher == "ray" and settings.ray.gateway
        count = settings.ray.gateways if on_nodes else settings.gateway.workers
        # Bound here, a port that several processes share stays this server's while one of them is started again.
        public = settings.gateway
        self._reserved = [] if on_nodes or count == 1 else reserved(public.host, public.port)
        spec = self._gateway_spec()
        self.gateways = Gateways(
            lambda name, conversation: launcher.gateway(name, spec, conversation),
            count,
            self._want,
            self.replicas.running,
        )
        self.front: Child | None = None
        self._pulse = Pulse("supervisor")
        self._pulse.on_stall = lambda seconds: self.gateways.count(stalled("supervisor", seconds))

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """Serve until cancelled. Raises StartFailed."""
        count, engine = self._settings.deployment.replicas, self._settings.engine
        logger.info("starting %d replicas of %s (engine %s)", count, self.model, engine)
        if self.records is not None:
            self.records.start()
        else:
            say_what_waits(records_root(self._settings))
        self.replicas.want(self._first())
        await self.gateways.start()
        logger.info("the gateway listens on %s", ", ".join(self._urls()))
        if self._sockets is not None:
            spec = self._tinker_spec(str(self._sockets / FRONT_SOCKET))
            self.front = Child("tinker", "midstream_tinker.front", spec, ChildMessages(self._hear_front))
            await self.front.begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.gateways.supervise())
            if self.front is not None:
                group.create_task(self.front.supervise())
            count = await self._all_usable()
            self._pulse.start()
            on_ready(self._ready(count))
            group.create_task(self._launcher.keep_spare())

    async def close(self) -> None:
        """Takes FRONT_STOP_S for the front, STOP_GRACE_S for streams, KILL_AFTER_S for the gateways and REPLICA_STOP_S for the
        replicas, at most. Each part ends before those that it needs: the front is a client of the gateways, and streams end
        before their replicas do. What replicas leave of their records now, the next start uploads."""
        if self.records is not None:
            self.records.close()
        self._pulse.stop()
        if self.front is not None:
            await self.front.stop(FRONT_STOP_S)
        await self.gateways.stop(STOP_GRACE_S + KILL_AFTER_S)
        await self.replicas.close(REPLICA_STOP_S)
        for sock in self._reserved:
            sock.close()
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
        self.replicas.kill()

    # -- inside

    def _ready(self, replicas: int) -> str:
        urls = ", ".join(self._urls())
        places = sorted((self.replicas.places() | self.gateways.places()).items())
        line = f"midstream ready on {urls} ({replicas} replicas, model {self.model}, deployment {self.deployment})"
        return line + "".join(f", {name} on {place}" for name, place in places)

    def _first(self) -> Wanted:
        """The replicas that the gateways will most likely ask for."""
        names = (f"replica-{number}" for number in range(self._settings.deployment.replicas))
        return Wanted(
            tuple(WantedReplica(name=name, deployment=self.deployment, model=self.model) for name in names)
        )

    def _want(self, wanted: Wanted) -> None:
        self.replicas.want(wanted)
        if self._cleaning is None:
            remove = self._launcher.set_strange_caches_aside({replica.name for replica in wanted.replicas})
            self._cleaning = asyncio.create_task(asyncio.to_thread(remove), name="old caches")

    def _replicas_changed(self) -> None:
        self.gateways.tell(self.replicas.running())
        if self.records is not None:
            self.records.wake()

    def _clean(self, replica: WantedReplica, others: Set[str]) -> None:
        """Runs in a thread, after the replica ended and its deployment was removed. Uploads records before it removes files."""
        if self.records is not None:
            self.records.settled(UPLOAD_S)
        self._launcher.remove_caches(replica.name, others)

    async def _replica(self, wanted: WantedReplica) -> Supervised:
        settings = self._settings
        name = wanted.model.rpartition("/")[2]
        directory = await asyncio.to_thread(model_directory, self._models, name, self._state)
        spec = ReplicaSpec(
            name=wanted.name,
            host=LOOPBACK,
            port=0,
            model_dir=str(directory),
            model=wanted.model,
            deployment=wanted.deployment,
            token=self._token,
            engine=settings.embedded,
            **replica_fields(settings, wanted.name),
        )
        return await self._launcher.replica(spec, len(self.replicas))

    def _hear_front(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=Stalled)
        except msgspec.DecodeError as error:
            logger.warning("the Tinker front said %r: %s", line[:200], error)
        else:
            self.gateways.count(stalled("tinker", report.stalled_s))

    def _urls(self) -> list[str]:
        """The URLs at which gateways listened last; one for those that share a port."""
        urls = (gateway_url(self._settings, gateway.host, gateway.port) for gateway in self.gateways)
        return list(dict.fromkeys(urls))

    def _gateway_spec(self) -> GatewaySpec:
        settings = self._settings
        return GatewaySpec(
            host=settings.gateway.host,
            port=self._reserved[0].getsockname()[1] if self._reserved else settings.gateway.port,
            shares_port=bool(self._reserved),
            model=self.model,
            deployment=self.deployment,
            replicas=settings.deployment.replicas,
            models=tuple(self._models),
            bucket=bucket_url(settings),
            transition=settings.deployment.transition,
            ledger=settings.ledger.database or sqlite_url(self._state / "ledger.db"),
            token=self._token,
            replica_ca=self._settings.replica.tls_ca,
            settings=self._gateway_settings(),
            push=settings.push,
            log_level=settings.log.level,
            log_format=settings.log.format,
            tinker_path=None if self._sockets is None else str(self._sockets / FRONT_SOCKET),
            tracing=settings.tracing,
        )

    def _gateway_settings(self) -> GatewaySettings:
        settings = self._settings.gateway
        if self._front_key is None or self._sockets is None:
            return settings
        scopes = (f"{PUBLISH}:{self.deployment.rpartition('/')[2]}",)
        own = KeySettings(key=self._front_key, scopes=scopes)
        return msgspec.structs.replace(settings, api_keys=(*settings.api_keys, own))

    def _tinker_spec(self, path: str) -> TinkerSpec:
        settings = self._settings
        name = self.model.rpartition("/")[2]
        directory = str(self._models[name])
        gateway = next(iter(self.gateways))
        given = settings.deployment
        names = (name, self.model, self.deployment, given.model, directory, *settings.tinker.base_models)
        return TinkerSpec(
            path=path,
            gateway_url=gateway_url(settings, own_address(gateway.host), gateway.port),
            names=tuple(dict.fromkeys(names)),
            model_dir=directory,
            deployment=self.deployment,
            bucket=bucket_url(settings),
            state_dir=str(self._state),
            api_keys=settings.gateway.api_keys,
            key=self._front_key,
            threads=settings.tinker.trainer_threads or engine_settings(settings, given.replicas).threads,
            settings=settings.tinker,
            log_level=settings.log.level,
            log_format=settings.log.format,
        )

    async def _all_usable(self) -> int:
        """Waits until every deployment has its replicas, as every gateway sees it, with the snapshots in the ledger loaded.

        Returns the number of replicas of the default deployment. Raises StartFailed when one of those cannot be started; one
        that waits for room is waited for. A replica of another deployment that cannot start does not delay this.
        """
        loop = asyncio.get_running_loop()
        since, logged, shown = loop.time(), ("", 0), -1
        tls = unverified_tls() if self._settings.gateway.tls_cert is not None else None
        while True:
            if (why := self.replicas.failure(self.deployment)) is not None:
                raise StartFailed(why)
            found = [await self._usable(url, tls) for url in self._urls()]
            problem = next((one for one in found if isinstance(one, str)), None)
            if problem is None:
                return int(found[0])
            if (loaded := self._loaded()) != shown and self.replicas:
                logger.info("%d of %d replicas have loaded the model", loaded, len(self.replicas))
                shown = loaded
            waited_s = loop.time() - since
            late = waited_s >= NOT_READY_S
            level = logging.WARNING if late else logging.INFO
            if (problem, level) != logged and (late or waited_s >= WAITING_S):
                logger.log(level, "not ready yet: %s" if late else "waiting: %s", problem)
                logged = (problem, level)
            await asyncio.sleep(READY_POLL_S)

    def _loaded(self) -> int:
        """How many replicas listen, which they do once their engine has the model."""
        return sum(replica.url is not None for replica in self.replicas.running().replicas)

    async def _usable(self, url: str, tls: ssl.SSLContext | None) -> int | str:
        """How many replicas the default deployment should have, by a gateway that has all it should; else what it lacks."""
        try:
            answer = await call(url, "GET", "/health", None, HEALTH_S, token_header(self._token), tls=tls)
            health = answer.read(dict[str, Any])
        except (CallFailed, NotThatAnswer) as error:
            return f"the gateway does not answer at {url}: {error or repr(error)}"
        waiting = self.replicas.waiting(self.deployment)
        return lacking(health, len(self.gateways), waiting) or int(health["deployments"][0]["wanted"])


def lacking(health: Mapping[str, Any], gateways: int, waiting: Set[str]) -> str:
    """What a server lacks to be ready, by a gateway's `/health`; empty when it is ready. gateways: how many there should be.

    waiting: replicas that wait for something; they do not count among those that failed.
    """
    if (error := health.get("error")) is not None:
        return f"the gateway cannot say: {error}"
    if (ready := health["gateway_workers_ready"]) < gateways:
        return (
            "the gateway process is starting"
            if gateways == 1
            else f"{ready} of {gateways} gateway processes are ready"
        )
    for deployment in health["deployments"]:
        usable, wanted = deployment["usable"] - deployment["elsewhere"], deployment["wanted"]
        if usable + len(set(deployment["failed"]) - waiting) < wanted:
            return f"{deployment['name']}: {usable} of {wanted} replicas are usable"
    return ""


def bucket_url(settings: Settings) -> str:
    """The bucket's URL; a local one's directory is made. Raises ConfigError."""
    bucket = settings.deployment.bucket or (Path(settings.state_dir).absolute() / "bucket").as_uri()
    check_settings(bucket)
    place = parse_bucket(bucket)
    try:
        if place.kind == "file":
            Path(place.path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--bucket {bucket}: {error.strerror or error}") from error
    return bucket
