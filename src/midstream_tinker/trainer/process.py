"""The front's side of the trainer process. Imports no torch.

Owns: the child process and the calls under way.
Always holds: every call ends: with its reply, with WorkFailed, or with TrainerDied when the process ends first. Replies come
in the order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections import deque
from typing import overload

from midstream.core.beside import beside
from midstream.http import ipc
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.types import WorkFailed

logger = logging.getLogger(__name__)

NOT_RUNNING = "the trainer process is not running"


class TrainerDied(Exception):
    """The trainer process ended, and with it every model it held; the message says why."""


class _TrainerLink(ipc.Link[m.Reply]):
    """Our end of the socket to one process, and the calls that it has not answered."""

    def __init__(self) -> None:
        super().__init__(m.reply_decoder)
        self.calls: deque[asyncio.Future[m.Reply]] = deque()

    def received(self, message: m.Reply) -> None:
        if not self.calls:
            raise ipc.Unexpected(f"{type(message).__name__} answers no command")
        future = self.calls.popleft()
        # A cancelled future is done.
        if not future.done():
            future.set_result(message)

    async def call(self, command: m.Command) -> m.Reply:
        size = command.request.size if isinstance(command, m.RunForwardBackward) else 0
        try:
            framed = await beside.run(size, lambda: ipc.frame(command))
        except ValueError as error:
            raise WorkFailed(str(error)) from error
        if self.lost.is_set():
            raise TrainerDied(NOT_RUNNING)
        self.transport.write(framed)
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        return await future

    def fail(self, reason: str) -> None:
        while self.calls:
            future = self.calls.popleft()
            if not future.done():
                future.set_exception(TrainerDied(reason))


class Trainer:
    """One trainer process at a time; after its end, `start` makes another, which holds no models."""

    def __init__(self, start: m.StartTrainer) -> None:
        self._start = start
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _TrainerLink | None = None
        # None: the process has not said that it is ready.
        self._info: m.TrainerInfo | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reason = NOT_RUNNING

    def __repr__(self) -> str:
        return f"Trainer(pid={self.pid}, calls={0 if self._link is None else len(self._link.calls)})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._link is not None and not self._link.lost.is_set() and self._info is not None

    async def start(self) -> m.TrainerInfo:
        """What the base model is.

        A process that runs is kept. Raises WorkFailed when the model cannot be trained, TrainerDied.
        """
        async with self._starting:
            if self._info is not None and self.running:
                return self._info
            await self._end(NOT_RUNNING)
            try:
                link = await self._spawn()
                reply = await link.call(self._start)
            except BaseException:
                await self._end(NOT_RUNNING)
                raise
            if isinstance(reply, m.TrainerReady):
                self._info = reply.info
                return reply.info
            await self._end(NOT_RUNNING)
            why = reply.message if isinstance(reply, m.Refused) else f"it answered {reply!r}"
            raise WorkFailed(f"the model cannot be trained: {why}", "server")

    @overload
    async def call(self, command: m.CreateModel | m.LoadState) -> m.ModelState: ...
    @overload
    async def call(self, command: m.RunForwardBackward) -> m.LossReply: ...
    @overload
    async def call(self, command: m.OptimStep) -> m.Metrics: ...
    @overload
    async def call(self, command: m.SaveState | m.ExportWeights) -> m.Written: ...
    @overload
    async def call(self, command: m.DropModel) -> m.TrainerDone: ...
    async def call(self, command: m.Command) -> m.Reply:
        """Raises WorkFailed for what the command ran into, TrainerDied when the process does not run or ends first.

        A call that is cancelled is carried out all the same.
        """
        await self._settled()
        if self._link is None or not self.running:
            raise TrainerDied(self._reason)
        reply = await self._link.call(command)
        if isinstance(reply, m.Refused):
            raise WorkFailed(reply.message, reply.category)
        return reply

    async def close(self) -> None:
        """Calls under way end with TrainerDied."""
        await self._end("the trainer was closed")

    async def _spawn(self) -> _TrainerLink:
        self._process, self._link = await ipc.spawn("midstream_tinker.trainer.loop", _TrainerLink)
        self._watch = asyncio.create_task(self._watch_end(self._link, self._process))
        return self._link

    async def _watch_end(self, link: _TrainerLink, process: subprocess.Popen[bytes]) -> None:
        """Tell everybody when the trainer ends by itself."""
        await link.lost.wait()
        code = await ipc.ended(process, "trainer")
        self._reason = f"the trainer process {ending(code)}"
        logger.error("%s (pid %s)", self._reason, process.pid)
        link.fail(self._reason)

    async def _settled(self) -> None:
        """Returns at once, or, when the process has ended by itself, once it is known why."""
        if self._watch is not None and self._link is not None and self._link.lost.is_set():
            await asyncio.wait([self._watch])

    async def _end(self, reason: str) -> None:
        """Closing the socket asks the process to leave, a kill follows if it does not."""
        watch, self._watch = self._watch, None
        process, self._process = self._process, None
        link, self._link = self._link, None
        self._info, self._reason = None, reason
        if watch is not None:
            watch.cancel()
        if link is not None:
            link.transport.close()
            link.fail(reason)
        if process is None:
            return
        try:
            await ipc.ended(process, "trainer")
        except asyncio.CancelledError:
            process.kill()
            raise


def ending(code: int) -> str:
    """What an exit code says, as the end of a sentence."""
    if code == -signal.SIGKILL:
        return "was killed, perhaps because the machine had no memory left"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
