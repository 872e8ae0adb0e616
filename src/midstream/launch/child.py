"""What a supervised child process agrees on with its supervisor.

Always holds: the child's settings arrive as one JSON line on its standard input, never in argv or the environment, where
others could read a key; the supervisor keeps that pipe open, and its end means the supervisor is gone, so the child stops
too; the child answers on standard output with one JSON line when it listens. Logs go to standard error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from typing import Any, TypeVar

import msgspec

from midstream.config import EngineSettings, GatewaySettings

STOP_GRACE_S = 10.0  # how long streams may go on after a request to stop


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    host: str
    port: int
    model_dir: str
    model: str  # accounts/A/models/M
    deployment: str  # accounts/A/deployments/D
    cache_dir: str
    token: str
    engine: EngineSettings
    log_level: str
    cache_bytes: int | None = None  # bound of cache_dir; None: what is in use and one snapshot more


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    replicas: tuple[tuple[str, str], ...]  # (name, base URL)
    model: str
    deployment: str
    bucket: str
    transition: str
    ledger: str  # database URL
    token: str
    settings: GatewaySettings
    log_level: str


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer. error: why it could not start; it then ends."""

    port: int = 0
    error: str | None = None


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

    def __call__(self, message: Listening) -> None:
        """Answer, once."""
        with os.fdopen(self._fd, "wb") as pipe:
            pipe.write(msgspec.json.encode(message) + b"\n")


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


async def stop_requested() -> None:
    """Returns on SIGTERM, SIGINT, or when the supervisor's end of standard input closes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), _unbuffered(sys.stdin)
    )
    orphaned = asyncio.create_task(reader.read())
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((orphaned, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        orphaned.cancel()
        asked.cancel()
        transport.close()


def _unbuffered(stream: Any) -> Any:
    return stream.buffer.raw
