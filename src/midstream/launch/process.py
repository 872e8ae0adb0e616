"""One supervised child process: its start, its restarts, its end, and what is said between it and the supervisor.

Always holds: a child that dies after it was ready is started again, on the same port if that can be, with a growing pause;
neither a child nor what it started outlives stop(), nor does what one that died had started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from midstream.launch.child import LINE_BYTES_MAX, Listening

logger = logging.getLogger(__name__)

RESTART_PAUSE_S_MIN = 0.1
RESTART_PAUSE_S_MAX = 10.0


class StartFailed(Exception):
    """A child could not start; the message is its own."""


class Child:
    """One supervised process."""

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        *,
        on_line: Callable[[bytes], None] | None = None,
        greeting: Callable[[], msgspec.Struct] | None = None,
        renew: Callable[[], msgspec.Struct] | None = None,
    ) -> None:
        """on_line: gets what the child says after it has answered. greeting: what it is told whenever it has started.

        renew: other settings, after it could not be started again with those it had: its port may be somebody else's by now.
        """
        self.name = name
        self._module = module
        self._spec = spec
        self._on_line = on_line
        self._greeting = greeting
        self._renew = renew
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._answered = False  # the process that runs now has said where it listens
        self.port = 0

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self._process.pid if self._process else None}, port={self.port})"

    @property
    def running(self) -> bool:
        """There is a process, which may be starting or ending."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns when the child listens. Raises StartFailed."""
        self._answered = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                self.name,  # for whoever reads the process list
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
                limit=LINE_BYTES_MAX,
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
            await self._end(self._process)
            raise
        self._answered = True
        if self._on_line is not None:
            self._listening = asyncio.create_task(self._listen(self._process.stdout, self._on_line))
        if self._greeting is not None:
            self.tell(self._greeting())

    def tell(self, message: msgspec.Struct) -> None:
        """Say something to the child, if it is there; one that has ended is told again when it starts."""
        process = self._process
        if process is not None and process.returncode is None and self._answered:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(message) + b"\n")

    def kill(self) -> None:
        """End it, and whatever it started, at once."""
        if self._process is not None and self._process.returncode is None:
            _kill_all_of(self._process)

    async def _listen(self, stdout: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
        while line := await stdout.readline():
            on_line(line)

    async def supervise(self, on_restart: Callable[[str | None], None] = lambda why: None) -> None:
        """Start it again whenever it ends; runs until cancelled.

        on_restart: called after each attempt, with why it failed, None when it did not.
        """
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S_MIN
        while True:
            assert self._process is not None
            started_at = loop.time()
            code = await self._process.wait()
            _kill_all_of(self._process)
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
                except StartFailed as error:
                    logger.error("%s; trying again in %.1f s", error, pause_s)
                    on_restart(str(error))
                    if self._renew is not None:
                        self._spec = self._renew()
                else:
                    on_restart(None)
                    break

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
        await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        _kill_all_of(process)
        await process.wait()


def _kill_all_of(process: asyncio.subprocess.Process) -> None:
    """It and whatever it started: a child is the leader of a process group of its own, which outlives it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
