"""One machine: the supervisor of a gateway and N replicas.

Owns: the child processes, their ports, their restarts and their end.
Always holds: a child that dies after it was ready is started again on the same port, with a growing pause; one that cannot
start at all ends the whole, with its reason; when this process ends, however it ends, no child is left (a child stops when
its standard input closes).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import msgspec

from midstream.config import (
    EngineSettings,
    Settings,
    check_name,
    deployment_resource,
    model_resource,
    parse_size,
)
from midstream.errors import ConfigError
from midstream.launch.child import STOP_GRACE_S, GatewaySpec, Listening, ReplicaSpec
from midstream.ledger import sqlite_url
from midstream.snapshots.bucket import check_settings
from midstream.snapshots.identity import parse_bucket

logger = logging.getLogger(__name__)

RESTART_PAUSE_S_MIN = 0.1
RESTART_PAUSE_S_MAX = 10.0
SECOND_SIGNAL_AFTER_S = 1.0  # sooner, it is the same request to stop, delivered twice
READY_POLL_S = 0.05
KILL_AFTER_S = 5.0


class StartFailed(Exception):
    """A child could not start; the message is its own."""


class Child:
    """One supervised process."""

    def __init__(self, name: str, module: str, spec: msgspec.Struct) -> None:
        self.name = name
        self._module = module
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self._process.pid if self._process else None}, port={self.port})"

    async def start(self) -> None:
        """Returns when the child listens. Raises StartFailed."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                self.name,  # for whoever reads the process list
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )
        except OSError as error:
            raise StartFailed(f"{self.name} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        line = await self._process.stdout.readline()
        try:
            self.port = _port(self.name, line)
        except StartFailed:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            raise

    async def supervise(self) -> None:
        """Start it again whenever it ends; runs until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S_MIN
        while True:
            assert self._process is not None
            started_at = loop.time()
            code = await self._process.wait()
            if loop.time() - started_at > RESTART_PAUSE_S_MAX:
                pause_s = RESTART_PAUSE_S_MIN  # it was well for a while
            logger.error(
                "%s (pid %s) ended with code %s; starting it again", self.name, self._process.pid, code
            )
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RESTART_PAUSE_S_MAX)
                try:
                    await self.start()
                    break
                except StartFailed as error:
                    logger.error("%s; trying again in %.1f s", error, pause_s)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, kill it when it does not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %.0f s; killing it", self.name, grace_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _port(name: str, line: bytes) -> int:
    """The port in a child's answer. Raises StartFailed when it gives another answer, or none."""
    if not line:
        raise StartFailed(f"{name} ended while starting; its log says why")
    try:
        answer = msgspec.json.decode(line, type=Listening)
    except msgspec.DecodeError as error:
        raise StartFailed(f"{name} said {line[:200]!r} instead of where it listens") from error
    if answer.error is not None:
        raise StartFailed(f"{name}: {answer.error}")
    return answer.port


def resolve_model(settings: Settings) -> tuple[str, Path]:
    """(name, directory) of the model to serve; makes a built-in one on first use. Raises ConfigError."""
    if settings.model == "tiny-moe":
        directory = Path(settings.state_dir) / "models" / "tiny-moe"
        if not directory.is_dir():
            from midstream.models.tiny_moe import write_tiny_moe

            write_tiny_moe(directory)
        return "tiny-moe", directory
    directory = Path(settings.model)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--model {settings.model}: neither a built-in model (tiny-moe) nor a directory with a config.json"
        )
    name = directory.resolve().name
    check_name("--model: the directory's name becomes the model's;", name)
    return name, directory


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
        state_dir.mkdir(parents=True, exist_ok=True)
        file: IO[str] = (state_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--state-dir {state_dir}: another midstream server uses it") from error
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


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def plan(settings: Settings, name: str, model_dir: Path) -> tuple[list[Child], Callable[[], Child]]:
    """The replicas, and how to make the gateway once they listen."""
    host = "127.0.0.1"  # replicas are nobody's business but the gateway's
    model, deployment = model_resource(settings, name), deployment_resource(settings)
    state = Path(settings.state_dir).absolute()
    token = settings.replica_token or secrets.token_hex(16)
    specs = [
        ReplicaSpec(
            name=f"replica-{i}",
            host=host,
            port=free_port(host),
            model_dir=str(model_dir.absolute()),
            model=model,
            deployment=deployment,
            cache_dir=str(state / "snapshots" / f"replica-{i}"),
            token=token,
            engine=_engine_settings(settings),
            log_level=settings.log_level,
            cache_bytes=None
            if settings.snapshot_cache is None
            else parse_size("snapshot_cache", settings.snapshot_cache),
        )
        for i in range(settings.replicas)
    ]
    replicas = [Child(spec.name, "midstream.launch.replica", spec) for spec in specs]

    def gateway() -> Child:
        spec = GatewaySpec(
            host=settings.host,
            port=settings.port or free_port(settings.host),
            replicas=tuple((s.name, f"http://{host}:{s.port}") for s in specs),
            model=model,
            deployment=deployment,
            bucket=bucket_url(settings),
            transition=settings.transition,
            ledger=sqlite_url(state / "ledger.db"),
            token=token,
            settings=settings.gateway,
            log_level=settings.log_level,
        )
        return Child("gateway", "midstream.launch.gateway", spec)

    return replicas, gateway


async def run(settings: Settings, name: str, model_dir: Path, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartFailed; children are gone when this returns or raises."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    replicas, make_gateway = plan(settings, name, model_dir)
    gateway = make_gateway()
    serving = asyncio.create_task(_serve(settings, name, replicas, gateway, on_ready))
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _hurry(loop, [gateway, *replicas]))
        serving.cancel()
        asked.cancel()
        await asyncio.wait((serving, asked))
        await gateway.stop(STOP_GRACE_S + KILL_AFTER_S)  # first: streams end before their replicas do
        await asyncio.gather(*(child.stop(STOP_GRACE_S + KILL_AFTER_S) for child in replicas))


async def _serve(
    settings: Settings, name: str, replicas: list[Child], gateway: Child, on_ready: Callable[[str], None]
) -> None:
    await asyncio.gather(*(child.start() for child in replicas))
    await gateway.start()
    url = f"http://{settings.host}:{gateway.port}"
    async with asyncio.TaskGroup() as group:
        for child in (*replicas, gateway):
            group.create_task(child.supervise())
        await _all_usable(url, len(replicas))
        on_ready(
            f"midstream ready on {url} ({len(replicas)} replicas, model {model_resource(settings, name)}, "
            f"deployment {deployment_resource(settings)})"
        )


async def _all_usable(url: str, count: int) -> None:
    """Until the gateway sees every replica; a snapshot in the ledger is loaded first."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                health = (await client.get(f"{url}/health")).json()
                if health.get("usable_replicas") == count:
                    return
            await asyncio.sleep(READY_POLL_S)


def _hurry(loop: asyncio.AbstractEventLoop, children: list[Child]) -> Callable[[], None]:
    """What a second request to stop does: not wait for streams."""
    asked_at = loop.time()

    def hurry() -> None:
        if loop.time() - asked_at > SECOND_SIGNAL_AFTER_S:
            _kill_all(children)

    return hurry


def _kill_all(children: list[Child]) -> None:
    for child in children:
        process = child._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _engine_settings(settings: Settings) -> EngineSettings:
    """The engine's settings with its share of this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.embedded.threads or max(1, cores // settings.replicas)
    return msgspec.structs.replace(settings.embedded, threads=threads)
