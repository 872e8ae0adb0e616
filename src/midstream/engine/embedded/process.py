"""The Engine port over an engine process. Imports no torch.

Owns: the child process, the calls under way and one event queue per running request.
Always holds: when the child dies, every running request and every call ends with EngineDied, once; an iterator that is
closed early has sent its abort; events of a request are delivered in the order the engine produced them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from midstream import ipc
from midstream.config import EngineSettings
from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.engine.embedded import messages as m
from midstream.engine.silence import LOOK_S, Silence
from midstream.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming

logger = logging.getLogger(__name__)


class _Stream:
    """The events of one request on their way to its iterator; None is the end of the engine."""

    def __init__(self, choices: Iterable[int]) -> None:
        self.arrived: deque[GenerationEvent | None] = deque()
        self.open = set(choices)
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: GenerationEvent | None) -> None:
        self.arrived.append(item)
        self._wake()

    def end(self, index: int) -> None:
        """No event of this choice is wanted any more, not even one that has arrived."""
        self.open.discard(index)
        self._wake()

    async def wait(self) -> bool:
        """Whether something has arrived, once it has; False: no choice is open any more."""
        while self.open and not self.arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return bool(self.open)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _EngineLink(ipc.Link[m.Reply]):
    """Our end of the socket: replies but the first are handed on. first: the first reply; None: there was none."""

    def __init__(self, on_reply: Callable[[m.Reply], None]) -> None:
        super().__init__(m.reply_decoder)
        self.first: asyncio.Future[m.Reply | None] = asyncio.get_running_loop().create_future()
        self._on_reply = on_reply

    def received(self, message: m.Reply) -> None:
        if self.first.done():
            self._on_reply(message)
        else:
            self.first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.first.done():
            self.first.set_result(None)


class EmbeddedEngine(Engine):
    def __init__(self, model_dir: Path, settings: EngineSettings) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _EngineLink | None = None  # None or closing: the engine is not running
        self._watchers: list[asyncio.Task[None]] = []  # for its death and its silence
        self._calls: dict[int, asyncio.Future[m.Done]] = {}
        self._numbers = itertools.count(1)
        self._streams: dict[str, _Stream] = {}
        self._silence = Silence(0.0)
        self._stats = EngineStats()
        self._death: Callable[[str], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedEngine(streams={len(self._streams)}, calls={len(self._calls)}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        self._process, self._link = process, link = await ipc.spawn(
            "midstream.engine.embedded.worker", lambda: _EngineLink(self._dispatch)
        )
        link.send(m.Start(str(self._model_dir), self._settings))
        info = await self._loaded(link, process)
        self._silence = Silence(asyncio.get_running_loop().time())
        watches = (self._watch_end(link, process), self._watch_silence(process))
        self._watchers = [asyncio.create_task(watch) for watch in watches]
        return info

    async def _loaded(self, link: _EngineLink, process: subprocess.Popen[bytes]) -> ModelInfo:
        reason = "the engine process ended while loading the model"
        try:
            async with asyncio.timeout(self._settings.load_s_max):
                reply = await link.first
        except TimeoutError:
            reason = f"the model was not loaded within {self._settings.load_s_max:g} s (load_s_max)"
            process.kill()
        else:
            if isinstance(reply, m.Ready):
                return reply.info
            if isinstance(reply, m.Failed):
                reason = reply.error
        await self._stop()
        raise EngineDied(reason)

    async def close(self) -> None:
        await self._stop()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        link = self._running_link()
        stream = self._streams[request.request_id] = _Stream(request.choices)
        link.send(m.Generate(request))
        try:
            while await stream.wait():
                event = stream.arrived.popleft()
                if event is None:
                    raise EngineDied("the engine process died")
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
            stream.end(index)
            self._send(m.Abort(request_id, index))

    async def stage(self, snapshot: str, directory: Path) -> None:
        await self._call(lambda call: m.StageSnapshot(call, snapshot, str(directory)))

    def drop_staged(self) -> None:
        self._send(m.DropStaged())

    async def commit(self, snapshot: str) -> SwapTiming:
        done = await self._call(lambda call: m.Commit(call, snapshot))
        assert done.timing is not None
        return done.timing

    async def weights_digest(self) -> str | None:
        return (await self._call(m.DigestWeights)).digest

    async def pause(self) -> None:
        await self._call(m.Pause)

    async def resume(self) -> None:
        await self._call(m.Resume)

    def stats(self) -> EngineStats:
        return self._stats

    def silent_s(self) -> float:
        return self._silence.lasts_s

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _call(self, build: Callable[[int], m.Command]) -> m.Done:
        link = self._running_link()
        call = next(self._numbers)
        future: asyncio.Future[m.Done] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        link.send(build(call))
        try:
            done = await future
        finally:
            self._calls.pop(call, None)
        if done.error is not None:
            raise StagingFailed(done.error)
        return done

    def _running_link(self) -> _EngineLink:
        if self._link is None or self._link.transport.is_closing():
            raise EngineDied("the engine is not running")
        return self._link

    def _send(self, command: m.Command) -> None:
        if self._link is not None and not self._link.transport.is_closing():
            self._link.send(command)

    async def _watch_end(self, link: _EngineLink, process: subprocess.Popen[bytes]) -> None:
        """Tell everybody when the engine ends by itself."""
        await link.lost.wait()
        process.kill()  # if it lives, it said what cannot be understood
        self._end_everything()
        code = await asyncio.to_thread(process.wait)
        logger.error("engine process %s ended with code %s", process.pid, code)
        if self._death is not None:
            await self._death(f"the engine process ended with code {code}")

    async def _watch_silence(self, process: subprocess.Popen[bytes]) -> None:
        """Kill an engine that has not been heard of for too long; its end is then noticed."""
        loop, silence, longest_s = asyncio.get_running_loop(), self._silence, self._settings.silence_s_max
        told = False
        while (lasts_s := silence.look(loop.time())) < longest_s:
            if lasts_s >= longest_s / 2 and not told:
                logger.warning("engine process %s has been silent for %.0f s", process.pid, lasts_s)
            told = lasts_s >= longest_s / 2
            await asyncio.sleep(min(LOOK_S, longest_s - lasts_s))
        logger.error(
            "engine process %s was silent for %.0f s; killing it", process.pid, self._settings.silence_s_max
        )
        process.kill()

    def _dispatch(self, reply: m.Reply) -> None:
        self._silence.heard()
        match reply:
            case m.Events(events, stats):
                self._stats = stats
                for request_id, event in events:
                    stream = self._streams.get(request_id)
                    if stream is not None:  # None: aborted while this event was on its way
                        stream.put(event)
            case m.Done(call):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(reply)

    def _end_everything(self) -> None:
        if self._link is not None:
            self._link.transport.close()
        for stream in self._streams.values():
            stream.put(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied("the engine process died"))
        self._stats = EngineStats()

    async def _stop(self) -> None:
        """End the child: closing the socket asks it to leave, a kill follows if it does not."""
        watchers, self._watchers = self._watchers, []
        for task in watchers:
            if task is not asyncio.current_task():
                task.cancel()
        self._end_everything()
        process, self._process = self._process, None
        if process is not None:
            await ipc.ended(process, "engine")
