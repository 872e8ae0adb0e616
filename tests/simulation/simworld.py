"""One simulated server: the production supervisor, gateways, replicas and ledger, in one process, on one clock, by one seed.

Owns: what is replaced under the production code. That is the loop, sockets, subprocesses, the engine, the bucket, the clock and
randomness. Everything else runs as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simclock
import uvicorn.server
from simbucket import Bucket
from simdisk import Disk
from simengine import SimEngine, weights_of
from simfiles import LOOK_S, LOOKS_EVERY, RECORDS, RecordBucket, SimJournal, look_on
from simloop import PROCESS, SimLoop
from simnet import Network, SimSocket
from simpeers import PeerStore
from simprocess import Process, Processes
from simreceiver import PIECE_BYTES, Receivers

import midstream.launch.gateway as gateway_module
import midstream.launch.replica as replica_module
import midstream.launch.supervisor as supervisor_module
import midstream.ledger.transfers as transfers_module
import midstream.proxy.server as proxy_server
import midstream.replica.record_files as record_files_module
import midstream.snapshots.store.kept as kept_module
import midstream.snapshots.store.listing as listing_module
import midstream.snapshots.store.objects as objects_module
import midstream.snapshots.store.peers as peers_module
import midstream.snapshots.store.received as received_module
import midstream.snapshots.store.upload as upload_module
import midstream.transfer.files as update_files_module
import midstream_tinker.front as tinker_module
from midstream.core.config import (
    DeploymentSettings,
    EngineSettings,
    GatewaySettings,
    ReplicaSettings,
    Settings,
    TinkerSettings,
)
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.pulse import Pulse
from midstream.core.supervision import TinkerSpec
from midstream.core.types import GenerateRequest
from midstream.engine.base import EngineDied
from midstream.http import ipc
from midstream.launch.local import LocalLauncher
from midstream.launch.process import StartFailed
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.launch.supervisor import Supervisor
from midstream.ledger.database import Database
from midstream.proxy.proxy import Proxy
from midstream.proxy.request_facts import LOST_SENDS_MAX
from midstream.replica.replica import Replica
from midstream.replica.text.chat import TextModel
from midstream.replica.transfer import Transfers

PORT = 8000
BUCKET = "s3://sim/bucket"
#: For so long a fetch waits for what was pushed.
KEPT_WAIT_S = 15.0
#: In memory where the system has such a place.
PLACE = "/dev/shm" if os.path.isdir("/dev/shm") else None

_load_text = functools.lru_cache(TextModel.load)


#: A request: its prompt and its seed.
Asked = tuple[tuple[int, ...], int]


def asked_of(request: GenerateRequest) -> Asked:
    return tuple(request.prompt), request.sampling.seed


class World:
    """Implements simclock.World. model_dir: a checkpoint that replicas serve; snapshots: the bytes of further ones."""

    def __init__(self, seed: int, model_dir: Path) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self._bytes = random.Random(f"{seed} bytes")
        self.loop = SimLoop(random.Random(f"{seed} loop"))
        self.network = self.loop.network = Network(self.loop, random.Random(f"{seed} network"))
        programs = {
            "midstream.launch.gateway": (GatewaySpec, gateway_module.serve),
            "midstream.launch.replica": (ReplicaSpec, self._serve_replica),
            "midstream_tinker.front": (TinkerSpec, tinker_module.serve),
        }
        told = (ConfigError, SnapshotError, OSError, EngineDied)
        self.processes = self.loop.processes = Processes(self.loop, programs, told)
        self.processes.on_death = self._died
        self.receivers = Receivers(self.loop, self.network, random.Random(f"{seed} receivers"))
        self.bucket = Bucket(random.Random(f"{seed} bucket"), lambda: self.loop.now)
        self.disk = Disk(random.Random(f"{seed} disk"), lambda: self.loop.now)
        self.model_dir = model_dir
        self.place = Path(tempfile.mkdtemp(prefix="midstream-sim-", dir=PLACE))
        self._engine_rng = random.Random(f"{seed} engine")
        self.staging_fails = 0.0
        #: Of each engine, in a trainer's group. 0: a receiver takes part beside it.
        self.ranks = 0
        #: Is called when an engine is killed, since its weights are uncertain.
        self.on_fence: Callable[[], None] = lambda: None
        #: Streams that kill each engine that goes on with them, and the engines that each has killed.
        self.poison: dict[Asked, int] = {}
        self.server: Process | None = None
        self.supervisor: Supervisor | None = None
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.records = RecordBucket(random.Random(f"{seed} record files"), self.loop, self.wrong)
        #: All that were ever made, of processes that are gone too.
        self.proxies: list[tuple[Process, Proxy]] = []
        self.replicas: list[tuple[Process, Replica]] = []
        #: When a snapshot last came to serve on a replica, by both names.
        self.committed_at: dict[tuple[str, str], float] = {}
        self._outside: list[Process] = []
        #: Called with the process in which it happens, by what happens and the snapshot: the commit of a push, and its keeping.
        self.on_push: dict[tuple[str, str], Callable[[Process], None]] = {}
        self.wall_offset_s = 0.0
        self._settings: Settings | None = None

    # -- simclock.World

    @property
    def now(self) -> float:
        return self.loop.now

    def wall(self) -> float:
        process = PROCESS.get(None)
        offset = self.wall_offset_s + (0.0 if process is None else process.wall_offset_s)
        return simclock.EPOCH_S + self.loop.now + offset

    def random_bytes(self, count: int) -> bytes:
        return self._bytes.randbytes(count)

    # -- running

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The production code meets this world until the end."""
        random.seed(self.seed)
        simclock.install(self)
        asyncio._set_running_loop(self.loop)
        saved = _replace(self)
        notes = _Failures(self)
        logging.getLogger("midstream").addHandler(notes)
        try:
            yield
        finally:
            logging.getLogger("midstream").removeHandler(notes)
            asyncio._set_running_loop(None)
            simclock.install(None)
            for owner, name, value in saved:
                setattr(owner, name, value)
            shutil.rmtree(self.place, ignore_errors=True)

    def outside(self, name: str, work: Any) -> asyncio.Task[Any]:
        """A process that is not the server's, and what it runs."""
        process = Process(name)
        self._outside.append(process)
        task = self.loop.create_task(work, name=name, context=process.context)
        task.add_done_callback(self._outside_ended, context=process.context)
        return task

    def _outside_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.wrong.append(f"{task.get_name()}: {type(error).__name__}: {error}")

    def serve(self, settings: Settings) -> None:
        """Start `midstream serve`."""
        self._settings = settings
        process = self.server = Process("serve", 1)

        async def main() -> None:
            launcher = LocalLauncher(settings)
            self.supervisor = supervisor = Supervisor(settings, "sim", {"sim": self.model_dir}, launcher)
            await supervisor.serve(lambda line: self.counts.update(["server: ready"]))

        task = self.loop.create_task(main(), name="serve", context=process.context)
        task.add_done_callback(self._server_ended, context=process.context)

    def _server_ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        assert self.server is not None
        if (
            isinstance(error, ExceptionGroup)
            and error.split(StartFailed)[1] is None
            and not self.counts["calm"]
        ):
            # A server ends when a process of it is killed before the server is ready; whoever runs it starts it again.
            self.counts["server: start failed"] += 1
            self.processes.end(self.server, 1)
            self.outside("operator", self._start_again())
        else:
            self.wrong.append("serve ended: " + "".join(traceback.format_exception(error)))

    async def _start_again(self) -> None:
        await asyncio.sleep(1.0)
        assert self._settings is not None
        self.serve(self._settings)

    def happens(self, what: str, snapshot: str) -> None:
        self.on_push.get((what, snapshot), lambda process: None)(PROCESS.get())

    async def _serve_replica(self, spec: ReplicaSpec, channel: Any) -> None:
        """As run_child does around it: one process at a time has the cache."""
        process = PROCESS.get()
        # Many events can end it, so it is polled.
        while any(  # noqa: ASYNC110
            other.alive and other.name == process.name and other.pid < process.pid
            for other in self.processes.alive()
        ):
            await asyncio.sleep(0.05)
        await replica_module.serve(spec, channel)

    def _died(self, process: Process) -> None:
        self.receivers.lost(process)
        if process is self.server:
            for child in self.processes.alive():
                assert child.transport is not None
                self.loop.call_later(0.001, child.transport.channel.end, context=child.context.copy())

    def _kills(self, request: GenerateRequest) -> bool:
        asked = asked_of(request)
        if asked not in self.poison:
            return False
        self.poison[asked] += 1
        self.counts["an engine was killed by the stream that it was to go on with"] += 1
        # It was lost with one replica before.
        if self.poison[asked] >= LOST_SENDS_MAX:
            self.wrong.append(f"a stream cost {self.poison[asked]} engines that went on with it")
        return True

    def engine(self, spec: ReplicaSpec, begun: None = None) -> SimEngine:
        rng = self._engine_rng
        engine = SimEngine(
            Path(spec.model_dir), lambda share: rng.random() < share, lambda most: rng.random() * most
        )
        if self.ranks:
            engine.takes_in_place(self.ranks, self.receivers, PIECE_BYTES, lambda: self.on_fence())
        engine.staging_fails = self.staging_fails
        engine.killed_by = self._kills
        replica = PROCESS.get().name

        def committed(snapshot: str) -> None:
            self.committed_at[replica, snapshot] = self.now

        engine.committed = committed
        PROCESS.get().engine = engine
        return engine

    def open_bucket(self, url: str) -> Any:
        return self.records.open(url) if url.startswith(RECORDS) else self.bucket.open(url)

    @property
    def base_weights(self) -> int:
        return weights_of((file.name, file.read_bytes()) for file in self.model_dir.iterdir())

    def settings(self, **given: Any) -> Settings:
        gateway = given.pop("gateway", {})
        return Settings(
            deployment=DeploymentSettings(model="sim", bucket=BUCKET, **given.pop("deployment", {})),
            state_dir=str(self.place),
            tinker=given.pop("tinker", TinkerSettings(enabled=False)),
            embedded=EngineSettings(threads=1, spare_after_s=0),
            gateway=GatewaySettings(port=PORT, **gateway),
            replica=ReplicaSettings(token="token", **given.pop("replica", {})),
            models={"sim": str(self.model_dir)},
            **given,
        )


class _Failures(logging.Handler):
    """What the production code logs with a traceback is a failure that it did not foresee."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            text = "".join(traceback.format_exception(record.exc_info[1]))
            self._world.wrong.append(f"{PROCESS.get()} logged: {record.getMessage()}\n{text}")


class _Connections(dict[Any, None]):
    """A set in the order of its additions."""

    def add(self, connection: Any) -> None:
        self[connection] = None

    def discard(self, connection: Any) -> None:
        self.pop(connection, None)


class _InOrder(uvicorn.server.ServerState):
    """A server ends its connections in the order in which they came, not in that of their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = _Connections()  # type: ignore[assignment]


def _replace(world: World) -> list[tuple[Any, str, Any]]:
    saved: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    async def listening(host: str, port: int, *, shared: bool = False) -> list[Any]:
        return [SimSocket((host, port or world.network.free_port()))]

    def create_server(address: tuple[str, int], **_: Any) -> SimSocket:
        return SimSocket((address[0], address[1] or world.network.free_port()))

    put(Proxy, "__init__", _noted(Proxy.__init__, world.proxies))
    put(Replica, "__init__", _noted(Replica.__init__, world.replicas))
    put(proxy_server, "listening_sockets", listening)
    put(supervisor_module, "reserved", lambda host, port: [SimSocket((host, port))])
    put(replica_module, "socket", SimpleNamespace(create_server=create_server))
    put(replica_module, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    put(tinker_module, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    # It reads the thread's real CPU time, which differs from run to run.
    put(Pulse, "start", lambda pulse: None)
    put(replica_module, "make_engine", world.engine)
    put(TextModel, "load", staticmethod(_load_text))
    put(listing_module, "open_bucket", world.bucket.open)
    put(upload_module, "open_bucket", world.open_bucket)
    put(objects_module, "open_bucket", world.open_bucket)
    # They use threads.
    put(replica_module, "Journal", functools.partial(SimJournal, world.records))
    put(record_files_module.RecordFiles, "start", look_on)
    put(record_files_module, "SWEEP_S", LOOK_S)
    put(record_files_module, "LOOKS_EVERY", LOOKS_EVERY)
    put(peers_module, "open_peer", PeerStore)
    # Uploads take milliseconds here, and a replica serves nothing while it waits for one.
    put(kept_module, "KEPT_WAIT_S", KEPT_WAIT_S)
    # It would use a thread.
    put(received_module, "behind", lambda call, *given: call(*given))
    put(ipc, "spawn", world.receivers.spawn)
    put(update_files_module, "reserve", world.disk.reserve)
    put(transfers_module, "commit", _noted_commit(world))
    put(Transfers, "_keep", _noted_keep(world))
    put(uvicorn.server, "ServerState", _InOrder)
    # Directories of processes that are killed.
    put(tempfile, "tempdir", str(world.place))
    put(os, "killpg", world.processes.killpg)
    put(os, "pwrite", world.disk.pwrite)
    put(os, "fsync", world.disk.fsync)
    put(Database, "_begin", lambda database, engine: world.disk.begin(database, engine))
    return saved


def _noted_commit(world: World) -> Callable[..., None]:
    commit = transfers_module.commit

    def noted(db: Any, committing: Any, desired: Any, policies: Any, now: float) -> None:
        commit(db, committing, desired, policies, now)
        world.happens("commit", desired.snapshot)

    return noted


def _noted_keep(world: World) -> Callable[..., Any]:
    keep = Transfers._keep

    async def noted(self: Transfers, order: Any) -> None:
        world.happens("keep", order.snapshot)
        await keep(self, order)

    return noted


def _noted(make: Callable[..., None], where: list[Any]) -> Callable[..., None]:
    """A constructor whose objects are kept, each with its process."""

    def made(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        where.append((PROCESS.get(), self))

    return made
