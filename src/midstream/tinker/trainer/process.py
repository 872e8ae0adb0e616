"""The front's side of the trainer process. Imports no torch.

Owns: the child process and the calls under way.
Always holds: every call ends: with its reply, with Failed, or with TrainerDied when the process ends first. Replies come in the
order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import cast, overload

from midstream.tinker.errors import Failed
from midstream.tinker.trainer import messages as m

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
NOT_RUNNING = "the trainer process is not running"


class TrainerDied(Exception):
    """The trainer process ended, and with it every model it held; the message says why."""


class _Wire(asyncio.Protocol):
    """Our end of the socket to one process, and the calls that it has not answered."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.lost = asyncio.Event()
        self.calls: deque[asyncio.Future[m.Reply]] = deque()
        self._frames = m.Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                reply = m.reply_decoder.decode(body)
                future = self.calls.popleft()
                if not future.done():  # done: cancelled
                    future.set_result(reply)
        except Exception:  # what cannot be understood cannot be trusted: the process is ended
            logger.exception("the trainer process said something unexpected")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    async def send(self, command: m.Command) -> m.Reply:
        try:
            frame = m.frame(command)
        except ValueError as error:
            raise Failed(str(error)) from error
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        self.transport.write(frame)
        return await future

    def fail(self, reason: str) -> None:
        while self.calls:
            future = self.calls.popleft()
            if not future.done():
                future.set_exception(TrainerDied(reason))


class Trainer:
    """One trainer process at a time; after its end, `start` makes another, which holds no models."""

    def __init__(self, start: m.Start) -> None:
        self._start = start
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: _Wire | None = None
        self._info: m.TrainerInfo | None = None  # None: it has not said that it is ready
        self._watch: asyncio.Task[None] | None = None
        self._reason = NOT_RUNNING

    def __repr__(self) -> str:
        return f"Trainer(pid={self.pid}, calls={0 if self._wire is None else len(self._wire.calls)})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._wire is not None and not self._wire.lost.is_set() and self._info is not None

    async def start(self) -> m.TrainerInfo:
        """What the base model is. A process that runs is kept. Raises Failed when the model cannot be trained, TrainerDied."""
        async with self._starting:
            if self._info is not None and self.running:
                return self._info
            await self._end(NOT_RUNNING)
            try:
                wire = await self._spawn()
                reply = await wire.send(self._start)
            except BaseException:
                await self._end(NOT_RUNNING)
                raise
            if isinstance(reply, m.Ready):
                self._info = reply.info
                return reply.info
            await self._end(NOT_RUNNING)
            why = reply.message if isinstance(reply, m.Refused) else f"it answered {reply!r}"
            raise Failed(f"the model cannot be trained: {why}", "server")

    @overload
    async def call(self, command: m.CreateModel | m.LoadState) -> m.ModelState: ...
    @overload
    async def call(self, command: m.RunForwardBackward) -> m.Losses: ...
    @overload
    async def call(self, command: m.OptimStep) -> m.Metrics: ...
    @overload
    async def call(self, command: m.SaveState | m.ExportWeights) -> m.Written: ...
    @overload
    async def call(self, command: m.DropModel) -> m.Done: ...
    async def call(self, command: m.Command) -> m.Reply:
        """Raises Failed for what the command ran into, TrainerDied when the process does not run or ends first.

        A call that is cancelled is carried out all the same.
        """
        await self._settled()
        if self._wire is None or not self.running:
            raise TrainerDied(self._reason)
        reply = await self._wire.send(command)
        if isinstance(reply, m.Refused):
            raise Failed(reply.message, reply.category)
        return reply

    async def close(self) -> None:
        """Calls under way end with TrainerDied."""
        await self._end("the trainer was closed")

    async def _spawn(self) -> _Wire:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - fork and exec only; waiting is done in a thread
                [sys.executable, "-m", "midstream.tinker.trainer.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # this process's own standard output may be somebody's protocol
            )
        ours.setblocking(False)
        _, wire = await asyncio.get_running_loop().create_connection(_Wire, sock=ours)
        self._wire = wire
        self._watch = asyncio.create_task(self._watch_end(wire, self._process))
        return wire

    async def _watch_end(self, wire: _Wire, process: subprocess.Popen[bytes]) -> None:
        """Tell everybody when the trainer ends by itself."""
        await wire.lost.wait()
        code = await _ended(process)
        self._reason = f"the trainer process {ending(code)}"
        logger.error("%s (pid %s)", self._reason, process.pid)
        wire.fail(self._reason)

    async def _settled(self) -> None:
        """Returns at once, or, when the process has ended by itself, once it is known why."""
        if self._watch is not None and self._wire is not None and self._wire.lost.is_set():
            await asyncio.wait([self._watch])

    async def _end(self, reason: str) -> None:
        """Closing the socket asks the process to leave, a kill follows if it does not."""
        watch, self._watch = self._watch, None
        process, self._process = self._process, None
        wire, self._wire = self._wire, None
        self._info, self._reason = None, reason
        if watch is not None:
            watch.cancel()
        if wire is not None:
            wire.transport.close()
            wire.fail(reason)
        if process is None:
            return
        try:
            await _ended(process)
        except asyncio.CancelledError:
            process.kill()
            raise


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process whose socket is closed, which is to leave by itself."""
    try:
        return await asyncio.to_thread(process.wait, STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        logger.warning("trainer process %s did not end in %s s; killing it", process.pid, STOP_GRACE_S)
        process.kill()
        return await asyncio.to_thread(process.wait)


def ending(code: int) -> str:
    """What an exit code says, as the end of a sentence."""
    if code == -signal.SIGKILL:
        return "was killed, perhaps because the machine had no memory left"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
