"""The Engine port over an engine process. Imports no torch.

Owns: the child process, the calls under way and one event queue per running request.
Always holds: when the child dies, every running request and every call ends with EngineDied, once; an iterator that is
closed early has sent its abort; events of a request are delivered in the order the engine produced them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from midstream.config import EngineSettings
from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.engine.embedded import messages as m
from midstream.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0


class _Stream:
    """The events of one request on their way to its iterator; an int in the queue: that choice was ended here."""

    def __init__(self, choices: int) -> None:
        self.queue: asyncio.Queue[GenerationEvent | int | None] = asyncio.Queue()
        self.open = set(range(choices))


class EmbeddedEngine(Engine):
    def __init__(self, model_dir: Path, settings: EngineSettings) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[m.Done]] = {}
        self._numbers = itertools.count(1)
        self._streams: dict[str, _Stream] = {}
        self._heard_at = 0.0
        self._stats = EngineStats()
        self._death: Callable[[str], Awaitable[None]] | None = None
        self._closing = False

    def __repr__(self) -> str:
        return f"EmbeddedEngine(streams={len(self._streams)}, calls={len(self._calls)}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        self._closing = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - fork and exec only; waiting is done in a thread
                [sys.executable, "-m", "midstream.engine.embedded.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # this process's own standard output may be somebody's protocol
            )
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(m.Start(str(self._model_dir), self._settings))
        try:
            reply = await _receive(reader)
        except (EOFError, OSError) as error:
            raise EngineDied("the engine process ended while loading the model") from error
        if isinstance(reply, m.Failed):
            await self._stop()
            raise EngineDied(reply.error)
        assert isinstance(reply, m.Ready)
        self._heard_at = asyncio.get_running_loop().time()
        self._reader_task = asyncio.create_task(self._read(reader))
        self._watchdog = asyncio.create_task(self._watch(self._process))
        return reply.info

    async def close(self) -> None:
        await self._stop()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        if self._writer is None or self._writer.is_closing():
            raise EngineDied("the engine is not running")
        stream = self._streams[request.request_id] = _Stream(request.n)
        self._send(m.Generate(request))
        try:
            while stream.open:
                event = await stream.queue.get()
                if event is None:
                    raise EngineDied("the engine process died")
                if isinstance(event, int):
                    stream.open.discard(event)
                    continue
                if event.error is not None:
                    stream.open.clear()
                elif event.index not in stream.open:
                    continue  # was on its way when the choice was ended
                elif event.finish is not None:
                    stream.open.discard(event.index)
                yield event
        finally:
            self._streams.pop(request.request_id, None)
            if stream.open:
                self._send(m.Abort(request.request_id))

    def end_choice(self, request_id: str, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and index in stream.open:
            stream.queue.put_nowait(index)
            self._send(m.Abort(request_id, index))

    async def stage(self, snapshot: str, directory: Path) -> None:
        await self._call(lambda call: m.StageSnapshot(call, snapshot, str(directory)))

    async def commit(self, snapshot: str) -> SwapTiming:
        done = await self._call(lambda call: m.Commit(call, snapshot))
        assert done.timing is not None
        return done.timing

    async def pause(self) -> None:
        await self._call(m.Pause)

    async def resume(self) -> None:
        await self._call(m.Resume)

    def stats(self) -> EngineStats:
        return self._stats

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _call(self, build: Callable[[int], m.Command]) -> m.Done:
        if self._writer is None or self._writer.is_closing():
            raise EngineDied("the engine is not running")
        call = next(self._numbers)
        future: asyncio.Future[m.Done] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._send(build(call))
        try:
            done = await future
        finally:
            self._calls.pop(call, None)
        if done.error is not None:
            raise StagingFailed(done.error)
        return done

    def _send(self, command: m.Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(m.frame(command))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._dispatch(await _receive(reader))
        except (EOFError, OSError):
            await self._died()
        except Exception:  # what cannot be understood cannot be trusted: replace the process
            logger.exception("the engine process said something unexpected; killing it")
            if self._process is not None:
                self._process.kill()
            await self._died()

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill an engine that has not been heard of for too long; the reader then sees it end."""
        loop = asyncio.get_running_loop()
        while (left_s := self._heard_at + self._settings.silence_s_max - loop.time()) > 0:  # noqa: ASYNC110 - there is no event for silence
            await asyncio.sleep(left_s)
        logger.error(
            "engine process %s was silent for %.0f s; killing it", process.pid, self._settings.silence_s_max
        )
        process.kill()

    def _dispatch(self, reply: m.Reply) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        match reply:
            case m.Events(events, stats):
                self._stats = stats
                for request_id, event in events:
                    stream = self._streams.get(request_id)
                    if stream is not None:  # None: aborted while this event was on its way
                        stream.queue.put_nowait(event)
            case m.Done(call):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(reply)

    async def _died(self) -> None:
        self._end_everything()
        if self._closing:
            return
        assert self._process is not None
        code = await asyncio.to_thread(self._process.wait)
        logger.error("engine process %s ended with code %s", self._process.pid, code)
        if self._death is not None:
            await self._death(f"the engine process ended with code {code}")

    def _end_everything(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._writer is not None:
            self._writer.close()
        for stream in self._streams.values():
            stream.queue.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied("the engine process died"))
        self._stats = EngineStats()

    async def _stop(self) -> None:
        """End the child: closing the socket asks it to leave, a kill follows if it does not."""
        self._closing = True
        self._end_everything()
        tasks, self._reader_task, self._watchdog = (self._reader_task, self._watchdog), None, None
        for task in tasks:
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.warning("engine process %s did not end in %s s; killing it", process.pid, STOP_GRACE_S)
            process.kill()
            await asyncio.to_thread(process.wait)


async def _receive(reader: asyncio.StreamReader) -> m.Reply:
    try:
        (length,) = m.HEADER.unpack(await reader.readexactly(m.HEADER.size))
        return m.reply_decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise EOFError from error
