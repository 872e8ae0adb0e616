"""The Engine port over an engine process. Imports no torch.

Owns: the child process, the calls under way and the events of every running request.
Always holds: when the child dies, every running request and every call ends with EngineDied, once. An iterator that is
closed early has sent its abort. Events of a request are delivered in the order in which the engine produced them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path

from midstream.core.config import EngineSettings
from midstream.core.logs import configured
from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming
from midstream.engine.base import AtOnce, Engine, EngineDied, Slot, StagingFailed, WeightsRefused
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.kv_files import EmbeddedCopies
from midstream.engine.request_events import RequestEvents
from midstream.engine.silence import CHECK_INTERVAL_S, SilenceTimer, StillnessTimer, cpu_ticks
from midstream.http import ipc

logger = logging.getLogger(__name__)


def begin(*, beside: bool = False) -> ipc.StartedChild:
    """An engine process that imports all that it needs, and then waits for its first command. beside: see ipc.begin."""
    return ipc.begin("midstream.engine.embedded.loop", beside=beside)


class _EngineLink(ipc.Link[m.Reply]):
    """Our end of the socket. It hands on every reply after the first.

    first: the first reply behind Imported; None if there was none.
    """

    def __init__(self, on_reply: Callable[[m.Reply], None]) -> None:
        super().__init__(m.reply_decoder)
        self.first: asyncio.Future[m.Reply | None] = asyncio.get_running_loop().create_future()
        self._on_reply = on_reply

    def received(self, message: m.Reply) -> None:
        if isinstance(message, m.Imported):
            return
        if self.first.done():
            self._on_reply(message)
        else:
            self.first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.first.done():
            self.first.set_result(None)


class _ProcessSlot(Slot):
    """_call: sends a command with the number it is given, and returns its Done. Raises StagingFailed, EngineDied."""

    proves_staged = True
    _policy = ""
    _call: Callable[[Callable[[int], m.Command]], Awaitable[m.CallDone]]
    _send: Callable[[m.Command], None]
    _announced: tuple[str, tuple[tuple[str, str], ...]] = ("", ())

    async def stage(self, snapshot: str, directory: Path) -> None:
        await self._call(lambda call: m.StageSnapshot(call, snapshot, str(directory), self._policy))

    def stage_ahead(self, snapshot: str, directory: Path) -> None:
        self._send(m.StageAhead(snapshot, str(directory), self._policy))

    def tensors_made(self, tensors: Sequence[str]) -> None:
        self._send(m.TensorsMade(self._policy, tuple(tensors)))

    def drop_staged(self) -> None:
        self._send(m.DropStaged(self._policy))

    def announce(self, files: str, overwritten: Sequence[tuple[str, str]]) -> None:
        self._announced = (files, tuple(overwritten))

    async def commit(self, snapshot: str) -> SwapTiming:
        announced, self._announced = self._announced, ("", ())
        done = await self._call(lambda call: m.Commit(call, snapshot, self._policy, *announced))
        assert done.timing is not None
        return done.timing

    def retain(self, snapshots: Collection[str]) -> None:
        self._send(m.Retain(self._policy, tuple(snapshots)))

    def abandon_kv(self) -> None:
        self._send(m.AbandonKv(self._policy))

    async def weights_digest(self) -> str | None:
        return (await self._call(lambda call: m.DigestWeights(call, self._policy))).digest


class _PolicySlot(_ProcessSlot):
    """Of another policy than the deployment's own."""

    def __init__(
        self,
        policy: str,
        call: Callable[[Callable[[int], m.Command]], Awaitable[m.CallDone]],
        send: Callable[[m.Command], None],
    ) -> None:
        self._policy, self._call, self._send = policy, call, send


class EmbeddedEngine(_ProcessSlot, Engine):
    """folder: see EngineCore. begun: a process for the first start, by `begin`; None: that start begins one."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        folder: Path | None = None,
        begun: ipc.StartedChild | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._folder = folder
        self._begun = begun
        self._process: subprocess.Popen[bytes] | None = None
        # None or closing when the engine is not running.
        self._link: _EngineLink | None = None
        # They watch for the end and the silence of the process.
        self._watchers: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Future[m.CallDone]] = {}
        self._numbers = itertools.count(1)
        self._requests: dict[str, RequestEvents] = {}
        self._silence, self._stillness = SilenceTimer(0.0), StillnessTimer(0.0)
        self._stats = EngineStats()
        self._death: Callable[[str], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedEngine(requests={len(self._requests)}, calls={len(self._calls)}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        begun, self._begun = self._begun, None
        if begun is None or begun.process.poll() is not None:
            begun = begin()
        self._process = process = begun.process
        self._link = link = await begun.linked(lambda: _EngineLink(self._dispatch))
        folder = None if self._folder is None else str(self._folder)
        link.send(m.Start(str(self._model_dir), self._settings, folder, configured()))
        info = await self._loaded(link, process)
        now = asyncio.get_running_loop().time()
        self._silence, self._stillness = SilenceTimer(now), StillnessTimer(now)
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
                self.kv = EmbeddedCopies(reply.kv, self._call) if m.copies_kv() else None
                return reply.info
            if isinstance(reply, m.Failed):
                reason = reply.error
        await self._stop()
        raise EngineDied(reason)

    async def close(self) -> None:
        await self._stop()

    async def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        link = self._running_link()
        events = self._requests[request.request_id] = RequestEvents(request, at_once)
        link.send(m.Generate(request))
        try:
            while (event := await events.next()) is not None:
                yield event
        finally:
            self._requests.pop(request.request_id, None)
            if events.open:
                self._send(m.Abort(request.request_id))

    def end_choice(self, request_id: str, index: int) -> None:
        events = self._requests.get(request_id)
        if events is not None and index in events.open:
            events.end_choice(index)
            self._send(m.Abort(request_id, index))

    def abort(self, request_id: str, index: int | None = None) -> None:
        events = self._requests.get(request_id)
        if events is not None:
            events.abort(index)
            self._send(m.Abort(request_id, index))

    def slot(self, policy: str) -> Slot:
        return _PolicySlot(policy, self._call, self._send)

    def end_policy(self, policy: str) -> None:
        self._send(m.EndPolicy(policy))

    def end_session(self, session: str) -> None:
        self._send(m.EndSession(session))

    async def pause(self) -> None:
        await self._call(m.PauseSteps)

    async def resume(self) -> None:
        await self._call(m.ResumeSteps)

    def stats(self) -> EngineStats:
        return self._stats

    def silent_s(self) -> float:
        return self._silence.silent_s

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _call(self, build: Callable[[int], m.Command]) -> m.CallDone:
        link = self._running_link()
        call = next(self._numbers)
        future: asyncio.Future[m.CallDone] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        link.send(build(call))
        try:
            done = await future
        finally:
            self._calls.pop(call, None)
        if done.error is not None:
            raise (WeightsRefused if done.refused else StagingFailed)(done.error)
        return done

    def _running_link(self) -> _EngineLink:
        if self._link is None or self._link.transport.is_closing():
            raise EngineDied("the engine is not running")
        return self._link

    def _send(self, command: m.Command) -> None:
        if self._link is not None and not self._link.transport.is_closing():
            self._link.send(command)

    async def _watch_end(self, link: _EngineLink, process: subprocess.Popen[bytes]) -> None:
        """Wait until the engine ends by itself, then end all requests and calls."""
        await link.lost.wait()
        # A process that still lives sent something that cannot be understood.
        process.kill()
        self._end_everything()
        code = await asyncio.to_thread(process.wait)
        logger.error("engine process %s ended with code %s", process.pid, code)
        if self._death is not None:
            await self._death(f"the engine process ended with code {code}")

    async def _watch_silence(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process that hangs or has been silent for too long. `_watch_end` then sees its end."""
        warned = False
        while (problem := self._silence_problem(process.pid)) is None:
            silent_s = self._silence.silent_s
            if silent_s >= self._settings.silence_s_max / 2 and not warned:
                logger.warning("engine process %s has been silent for %.0f s", process.pid, silent_s)
            warned = silent_s >= self._settings.silence_s_max / 2
            await asyncio.sleep(min(CHECK_INTERVAL_S, self._settings.silence_s_max - silent_s))
        logger.error("engine process %s %s; killing it", process.pid, problem)
        process.kill()

    def _silence_problem(self, pid: int) -> str | None:
        now, settings = asyncio.get_running_loop().time(), self._settings
        silent_s, still_s = self._silence.update(now), self._stillness.update(now, cpu_ticks(pid))
        if silent_s >= settings.silence_s_max:
            return f"was silent for {silent_s:.0f} s (embedded.silence_s_max)"
        if still_s >= settings.hang_s_max:
            return f"neither reported nor computed for {still_s:.0f} s (embedded.hang_s_max)"
        return None

    def _dispatch(self, reply: m.Reply) -> None:
        self._silence.heard()
        self._stillness.heard()
        match reply:
            case m.Events(events, stats):
                self._stats = stats
                for request_id, event in events:
                    # The request is missing if it was aborted while this event was on its way.
                    if (request := self._requests.get(request_id)) is not None:
                        request.put(event)
            case m.CallDone(call):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(reply)

    def _end_everything(self) -> None:
        if self._link is not None:
            self._link.transport.close()
        died = "the engine process died"
        for request in self._requests.values():
            request.fail(EngineDied(died))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDied(died))
        self._stats, self.kv = EngineStats(), None

    async def _stop(self) -> None:
        """End the child. A closed socket asks it to leave; it is killed if it does not."""
        watchers, self._watchers = self._watchers, []
        for task in watchers:
            if task is not asyncio.current_task():
                task.cancel()
        self._end_everything()
        process, self._process = self._process, None
        if process is not None:
            await ipc.ended(process, "engine")
