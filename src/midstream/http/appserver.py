"""An ASGI app behind a Unix socket that only this user can reach: the control app's, the Tinker front's.

Always holds: signals are left to the process; nothing is listening after stop().
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

# The gateway closes idle connections itself, long before.
KEEP_ALIVE_S = 3600
STOP_S = 2
#: Of the event loop, within which a connection that came is known.
TURNS = 10
BACKLOG = 4096
# Linux takes 107.
SOCKET_PATH_BYTES_MAX = 103


class AppServer:
    def __init__(self, app: Any, path: str) -> None:
        """path: of the socket, in a directory that only this user can enter; what is left there of a process that died goes."""
        self.path = path
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        self._uvicorn = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises OSError, RuntimeError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self.path)
        except OSError:
            sock.close()
            raise
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[sock]), name="app server")
        up = asyncio.create_task(self._uvicorn.up.wait())
        await asyncio.wait({self._task, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            raise RuntimeError("the app did not start") from self._task.exception()

    async def stop(self) -> None:
        """Responses under way have STOP_S."""
        if self._task is not None:
            self._uvicorn.end()
            await asyncio.gather(self._task, return_exceptions=True)


def socket_directory(socket_name: str) -> Path:
    """A new directory of mode 0700 for a socket, in the usual place unless its path would be too long for one."""
    directory = Path(tempfile.mkdtemp(prefix="midstream-"))
    if len(os.fsencode(directory / socket_name)) > SOCKET_PATH_BYTES_MAX:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="midstream-", dir="/tmp"))
    return directory


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, says when it is up, and ends at once where nothing is under way."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._ends = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ends.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.up.set()

    async def main_loop(self) -> None:
        """Every tenth of uvicorn's ticks has something to do: it renews the date of answers."""
        tick = 0
        while not await self.on_tick(tick):
            tick += 10
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve clients that connected before the end: the loop knows a connection a few turns after it came."""
        await _turns()
        for server in self.servers:
            server.close()
        await _turns()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        else:
            await self.lifespan.shutdown()


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
