"""Gateways replaced while they serve: how a running server is asked for it, and how it reports the result.

Owns: the file that a server holds locked in its state directory, with its pid and the result of the last restart.
Always holds: one server at a time has a state directory. A restart that is asked for during another one follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from midstream.core.errors import ConfigError
from midstream.core.private import private_directory, private_file
from midstream.launch.process import StartFailed

logger = logging.getLogger(__name__)

LOCK = "lock"
POLL_S = 0.1


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory: two servers would fight over its ledger. Raises ConfigError."""
    try:
        private_directory(state_dir)
        file = private_file(state_dir / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--state-dir {state_dir}: another midstream server uses it; stop it, or name another directory"
            ) from error
        file.truncate(0)
        yield


class ServerFile(msgspec.Struct, frozen=True, kw_only=True):
    """restarts: how many restarts of the gateways have ended. error: why the last one failed."""

    pid: int
    restarts: int = 0
    error: str | None = None


class Restarts:
    """The server's side. Made in the event loop it runs in."""

    def __init__(self, path: Path, restart: Callable[[], Awaitable[None]]) -> None:
        self._path = path
        self._restart = restart
        self._asked = asyncio.Event()
        self._answer = ServerFile(pid=os.getpid())
        self._running = asyncio.create_task(self._run(), name="gateway restarts")

    def __repr__(self) -> str:
        return f"Restarts({self._answer})"

    def ask(self) -> None:
        self._asked.set()

    def close(self) -> None:
        self._running.cancel()

    async def _run(self) -> None:
        # Not before the loop runs: by then the caller handles the signal, which would otherwise end the process.
        self._say()
        while True:
            await self._asked.wait()
            self._asked.clear()
            error: str | None = None
            try:
                await self._restart()
            except StartFailed as failure:
                error = str(failure)
                logger.error("the gateway was not replaced: %s", error)
            else:
                logger.info("the gateway was replaced; the old process finishes its requests")
            self._answer = ServerFile(pid=os.getpid(), restarts=self._answer.restarts + 1, error=error)
            self._say()

    def _say(self) -> None:
        """The file is written in place, since the lock is on the file. A full disk costs the word alone, and no restart."""
        try:
            with self._path.open("r+b") as file:
                file.write(msgspec.json.encode(self._answer) + b"\n")
                file.truncate()
        except OSError as error:
            logger.warning("%s: cannot be written: %s", self._path, error.strerror or error)


def restart(state_dir: Path, wait_s: float) -> str | None:
    """Have the gateways of the server in `state_dir` replaced. Blocks until they are; returns why they were not, else None.

    Raises ConfigError when no server runs there.
    """
    path = state_dir / LOCK
    before = _running_server(path, wait_s)
    os.kill(before.pid, signal.SIGHUP)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        now = _running_server(path, wait_s)
        if now.restarts > before.restarts:
            return now.error
        time.sleep(POLL_S)
    return f"it is not replaced after {wait_s:g} s; the server's log says more"


def _running_server(path: Path, wait_s: float) -> ServerFile:
    """The file of the server that runs there. wait_s: for a line that is just being written. Raises ConfigError."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(OSError), path.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                # No process holds it: no server runs.
                break
            except BlockingIOError:
                file.seek(0)
                line = file.read()
            try:
                return msgspec.json.decode(line, type=ServerFile)
            except msgspec.DecodeError:
                # Without a line it is another kind of server, such as `midstream replica`.
                if not line or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
    raise ConfigError(f"--state-dir {path.parent}: no `midstream serve` runs there")
