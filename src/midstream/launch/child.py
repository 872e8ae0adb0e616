"""What a supervised child process agrees on with its supervisor.

Always holds: the child's settings arrive as one JSON line on its standard input, never in argv or the environment, where
others could read a key; the supervisor keeps that pipe open, and its end means the supervisor is gone, so the child stops
too; the child answers on standard output with one JSON line when it listens. The gateway and the supervisor go on over the same
pipes, a JSON line each: gateway.roster.Wanted one way, Running the other. Logs go to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from midstream.config import (
    EngineKind,
    EngineSettings,
    GatewaySettings,
    KeySettings,
    SwapOrder,
    TinkerSettings,
    VllmSettings,
)

LINE_BYTES_MAX = 16 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
CATCH_UP_S = 10.0  # how long a gateway process that others stand in for waits until it can use all replicas
STOP_GRACE_S = 10.0  # how long streams may go on after a request to stop


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""  # as answers and logs say it; "": HOST:PORT
    host: str
    port: int  # 0: any free one
    model_dir: str
    model: str  # accounts/A/models/M
    deployment: str  # accounts/A/deployments/D
    cache_dir: str
    token: str
    engine: EngineSettings
    log_level: str
    session_idle_s: float = 3600.0
    pin_drain_s: float = 60.0
    cache_bytes: int | None = None  # bound of cache_dir; None: what is in use and one snapshot more
    kind: EngineKind = "embedded"
    vllm: VllmSettings = VllmSettings()
    vllm_url: str | None = None  # of a running server to attach to
    cores: tuple[int, ...] = ()  # that vLLM computes on, on a CPU; (): as it likes
    gpus: tuple[int, ...] = ()  # that vLLM sees; (): all


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    model: str  # of the default deployment
    deployment: str
    replicas: int  # of the default deployment, as the settings say
    models: tuple[str, ...]  # bare names of those that can be deployed
    bucket: str
    transition: str
    swap_order: SwapOrder = "together"
    ledger: str  # database URL
    token: str
    settings: GatewaySettings
    log_level: str
    tinker_path: str | None = None  # the Tinker front's socket; None: there is none
    takes_over: str | None = None  # where the process that it replaces offers its listening sockets


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process beside the first one. control_path: the first one's private socket."""

    host: str
    port: int
    model: str  # of the default deployment
    deployment: str
    models: tuple[str, ...]
    control_path: str
    token: str
    settings: GatewaySettings
    log_level: str
    tinker_path: str | None = None
    takes_over: str | None = None


class TinkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The Tinker front. path: of its socket. names: what clients may call the model, its own first."""

    path: str
    gateway_url: str
    names: tuple[str, ...]
    model_dir: str
    deployment: str  # accounts/A/deployments/D
    bucket: str
    state_dir: str
    api_keys: tuple[str | KeySettings, ...]
    threads: int  # of the trainer
    settings: TinkerSettings
    log_level: str


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer. port: 0 where it is no port that it listens on. error: why it could not start; it then ends.

    offer: where it offers its listening sockets to a successor. One that takes over answers as soon as it can be told things,
    and says Accepting later.
    """

    port: int = 0
    error: str | None = None
    offer: str | None = None


class Accepting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A child that takes over accepts connections from now on."""

    accepting: Literal[True] = True


T = TypeVar("T")


def read_spec(kind: type[T]) -> T:
    """The settings, from the first line of standard input."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


class Announcer:
    """The child's way to answer. From its making on, what anybody prints goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, message: msgspec.Struct) -> None:
        """Say something: first where the child listens, or why it does not. Nobody may be there any more to hear it."""
        line = msgspec.json.encode(message) + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._fd, line) :]


def configure_logging(process: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def raise_file_limit() -> None:
    """Every stream takes two descriptors in the gateway: use all the system allows this user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_memory() -> None:
    """What a large body took goes back to the system when it is freed: the C library's bounds for that stay where they are put,
    instead of growing with the largest block that was freed. Elsewhere than with glibc nothing is done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**20)  # larger blocks are the system's own
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)  # more than that is not kept at the heap's end


async def stop_requested(on_line: Callable[[bytes], None] = lambda line: None) -> None:
    """Returns on SIGTERM, SIGINT, or when the supervisor's end of standard input closes; `on_line` gets what it says."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), _unbuffered(sys.stdin)
    )
    orphaned = asyncio.create_task(_read_lines(reader, on_line))
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((orphaned, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        orphaned.cancel()
        asked.cancel()
        transport.close()


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    while line := await reader.readline():
        on_line(line)


def _unbuffered(stream: Any) -> Any:
    return stream.buffer.raw
