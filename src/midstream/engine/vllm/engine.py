"""The Engine port over an unmodified vLLM server.

Owns: the server's process (or where it is attached), the requests inside it, the epochs of its weights.
Always holds: a boot begins with the base weights and a prefix cache in which nothing is found; every token is labelled with the
weights that sampled it (labels.py); whatever leaves open which weights serve ends the boot, so that the replica starts over;
when a boot ends, every request and call under way ends with EngineDied, and nothing more is sent to its server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from midstream.config import VllmSettings
from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.engine.vllm import wire
from midstream.engine.vllm.card import vllm_card
from midstream.engine.vllm.labels import Epochs
from midstream.engine.vllm.model import Shape, read_shape
from midstream.engine.vllm.proof import NotExact, prove_reload
from midstream.engine.vllm.requests import ChoiceStream, Run
from midstream.engine.vllm.salts import Salts
from midstream.engine.vllm.scoring import Scorer, WrongWeights
from midstream.engine.vllm.server import ServerFailed, VllmServer
from midstream.engine.vllm.staging import Staging
from midstream.engine.vllm.swap import Control, Refused, Unchanged, switch
from midstream.httpcall import CallFailed, call, open_stream
from midstream.types import (
    BASE_SNAPSHOT,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
)

logger = logging.getLogger(__name__)

PATH = "/inference/v1/generate"
NAME = "midstream"  # of the model, between us and the server
CONNECT_S_MAX = 30.0
ALIVE_S_MAX = 5.0  # for an answer to /health, where a connection was lost
ANSWER_S_MAX = 30.0  # for one that comes between two steps

T = TypeVar("T")


class VllmEngine(Engine):
    """url: of a running server to attach to, instead of starting one. cache_dir: the replica's own."""

    def __init__(
        self,
        model_dir: Path,
        settings: VllmSettings,
        cache_dir: Path,
        *,
        url: str | None = None,
        cores: tuple[int, ...] = (),
        gpus: tuple[int, ...] = (),
    ) -> None:
        self._model_dir = model_dir.resolve()
        self._settings = settings
        self._attached = url is not None
        # A server that is attached to may be somebody else's, or elsewhere: it reads what the two of them share.
        self._staging = Staging(cache_dir, share=0.0) if self._attached else Staging(cache_dir)
        self._server = VllmServer(
            self._model_dir,
            settings,
            url=url,
            served_name=NAME,
            cores=cores,
            gpus=gpus,
            log=cache_dir / "vllm.log",
        )
        self._running = False
        self._over: asyncio.Future[str] | None = None  # set when the boot is, to the reason
        self._watcher: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()  # small tasks, which end with the boot
        self._controlling = asyncio.Lock()  # pause, resume and commit: one at a time
        self._held = False  # by pause()
        self._coming: str | None = None  # the version that a commit under way brings
        self._control: Control
        self._shape: Shape
        self._epochs = Epochs(BASE_SNAPSHOT)
        self._salts = Salts(b"")
        self._runs: dict[str, Run] = {}
        self._staged: tuple[str, Path, Path] | None = None  # snapshot, its files, where they are read from
        self._stager: asyncio.Task[Path] | None = None
        self._serving = self._model_dir
        self._counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}
        self._death: Callable[[str], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        return f"VllmEngine({self._server!r}, {self._epochs!r}, {len(self._runs)} requests)"

    @property
    def pid(self) -> int | None:
        return self._server.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        self._shape = await asyncio.to_thread(read_shape, self._model_dir)
        try:
            await self._server.start()
            self._control = Control(self._server.url, self._server.headers, self._settings.load_s_max)
            self._epochs, self._serving = Epochs(BASE_SNAPSHOT), self._model_dir
            self._salts = Salts(secrets.token_bytes(16))  # an attached server may have a cache from before
            await self._take_over()
        except (ServerFailed, CallFailed, Refused, NotExact, WrongWeights) as error:
            await self._server.close()
            raise EngineDied(str(error)) from error
        except BaseException:  # cancelled: nothing is left running
            await self._server.close()
            raise
        self._running, self._held, self._over = True, False, asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(), name="vLLM's end")
        return self._info()

    async def _take_over(self) -> None:
        """To where a boot begins: base weights, nothing cached that we could find, not paused."""
        if self._attached:  # somebody before us may have left it in any state
            self._server.check_reload(experts=bool(self._shape.moe_layers))
            await self._control.pause(clear_cache=True)
            await self._control.reload(self._model_dir)
        await self._control.set_version(self._epochs.version(0, BASE_SNAPSHOT))
        if self._attached:
            await self._control.resume()
        else:
            await self._prove_reload()

    async def _prove_reload(self) -> None:
        size, context = self._shape.vocab_size, self._server.max_model_len
        await prove_reload(self._scorer(), size, context, lambda: self._control.reload(self._model_dir))

    def _info(self) -> ModelInfo:
        shape = self._shape
        return ModelInfo(
            max_model_len=self._server.max_model_len,
            vocab_size=shape.vocab_size,
            moe_layers=len(shape.moe_layers),
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            eos_token_ids=shape.eos_token_ids,
            grammars=True,
            card=vllm_card(self._server.version, routes=self._server.returns_routes),
        )

    async def close(self) -> None:
        await self._stop()
        self._staging.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        self._check_running()
        problem = wire.problem(request)
        if problem is not None:
            yield GenerationEvent(error=problem)
            return
        run = self._runs[request.request_id] = Run(request)
        try:
            prompt: tuple[TokenRecord, ...] | None = None
            if request.prompt_records:
                scored = await self._score(request)
                if isinstance(scored, str):
                    yield GenerationEvent(error=scored)
                    return
                prompt = scored
            if request.sampling.max_tokens == 0:
                for index in request.choices:
                    if index in run.open:
                        yield GenerationEvent(index=index, prompt=prompt, cached_tokens=0, finish="length")
                return
            for index in request.choices:
                if (finish := _finished(request, index)) is not None:
                    run.put(GenerationEvent(index=index, prompt=prompt, finish=finish))
                elif index in run.open:
                    await self._begin(run, index, prompt)
            while (event := await run.next()) is not None:
                if event.error is not None and (choice := run.choices.get(event.index)) and choice.doubted:
                    await self._died(event.error)
                self._count(request, event)
                yield event
        finally:
            self._runs.pop(request.request_id, None)
            run.close()

    def refuses(self, request: GenerateRequest) -> str | None:
        return wire.problem(request)

    def _scorer(self) -> Scorer:
        server = self._server
        return Scorer(server.url, server.headers, self._epochs, self._shape, server.served_name)

    async def _score(self, request: GenerateRequest) -> tuple[TokenRecord, ...] | str:
        """The records of the prompt, or why there are none."""
        try:
            return await self._while_alive(self._scorer().score(request, self._salt(request)[0]))
        except (CallFailed, WrongWeights) as error:
            await self._died(f"vLLM did not score the prompt: {error}")
            return f"vLLM did not score the prompt: {error}"

    async def _begin(self, run: Run, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        """Send one choice to the server."""
        request = run.request
        salt, clean = self._salt(request)
        choice = ChoiceStream(request, index, self._epochs, self._shape, run.put, clean=clean, prompt=prompt)
        choice.salt = salt
        choice.on_complaint = lambda: self._ended(run, choice, None)
        run.choices[index] = choice
        size = len(request.prompt) + len(request.emitted_of(index))
        data = wire.body(
            request,
            index,
            model=self._server.served_name,
            salt=salt,
            stream=True,
            routes_start=size - request.want_routes if self._server.returns_routes else None,
        )

        async def connect() -> None:
            choice.response = await open_stream(
                self._server.url, "POST", PATH, data, choice.on_body, CONNECT_S_MAX, self._server.headers
            )
            if choice.over:  # ended, or begun anew, meanwhile
                choice.response.abort()
            choice.response.ended.add_done_callback(lambda ended: self._ended(run, choice, ended.result()))

        try:
            await self._while_alive(connect())
        except CallFailed as error:
            await self._died(str(error))
            choice.fail(f"vLLM did not take the request: {error}")

    def _ended(self, run: Run, choice: ChoiceStream, reason: str | None) -> None:
        if choice.over:
            return
        doubt = reason or choice.complaint
        if doubt is None or not self._running:
            choice.ended(reason)
            return
        self._do_beside(self._lost(run, choice, doubt), "whether vLLM died")

    async def _lost(self, run: Run, choice: ChoiceStream, reason: str) -> None:
        """A connection, or a request that the server complains of: with the server, or alone."""
        try:
            await self._died(reason)
        except EngineDied as error:
            run.put(error)
        else:
            choice.ended(reason)

    async def _died(self, reason: str) -> None:
        """Raises EngineDied if the server is gone, or another now than the one that was given its weights; else the reason is
        that request's alone."""
        self._check_running()
        problem = await self._problem()
        self._check_running()
        if problem is not None:
            self._lose(f"{problem}: {reason}")
            raise EngineDied(f"{problem}: {reason}")

    async def _problem(self) -> str | None:
        """Of the server, if it has one."""
        try:
            status, _ = await call(
                self._server.url, "GET", "/health", None, ALIVE_S_MAX, self._server.headers
            )
            if status != 200:
                return f"vLLM is gone (/health answers {status})"
        except CallFailed:
            return "vLLM is gone"
        ours = self._epochs.version(self._epochs.now, self._epochs.snapshot)
        try:
            if self._coming is not None:  # what a switch leaves in doubt is its own business
                return None
            version = await self._control.version(ANSWER_S_MAX)
        except (CallFailed, Refused):  # healthy, and busy: with a long step, or with a switch that has begun
            return None
        switched = self._epochs.version(self._epochs.now, self._epochs.snapshot) != ours
        if version == ours or switched or self._coming is not None:
            return None
        return f"vLLM was restarted, or given weights by others: it has {version!r}, not {ours!r}"

    def _check_running(self) -> None:
        if not self._running:
            raise EngineDied("vLLM is not running")

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is given up when the boot ends. Raises EngineDied."""
        over, task = self._over, asyncio.create_task(work)
        assert over is not None
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                raise EngineDied(over.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # nobody else looks at it

    def _do_beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _count(self, request: GenerateRequest, event: GenerationEvent) -> None:
        self._counts["generated_tokens"] += len(event.tokens)
        if event.finish is not None and event.index == request.choices[0]:
            self._counts["prompt_tokens"] += len(request.prompt)
            self._counts["cached_prompt_tokens"] += event.cached_tokens or 0

    def _salt(self, request: GenerateRequest) -> tuple[str, bool]:
        """The request's salt for vLLM, and whether all that is cached under it is of the weights that serve."""
        resumed = bool(request.emitted)  # may take younger KV only than others of its namespace do
        return self._salts.of(request.salt, self._epochs.now, request.kv_age_max, passing=resumed)

    def end_choice(self, request_id: str, index: int) -> None:
        run = self._runs.get(request_id)
        if run is not None:
            run.end_choice(index)

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._check_running()
        self.drop_staged()
        mine = self._stager = asyncio.create_task(self._staging.put(directory), name=f"staging {snapshot}")
        try:
            await asyncio.wait((mine,))
        finally:
            if not mine.done():  # this is cancelled
                mine.cancel()
                await asyncio.wait((mine,))
        if self._stager is not mine:
            if not mine.cancelled() and mine.exception() is None:
                self._staging.drop(mine.result())
            self._check_running()
            raise StagingFailed(f"snapshot {snapshot!r} was given up while it was staged")
        self._stager = None
        try:
            self._staged = (snapshot, directory, mine.result())
        except OSError as error:
            raise StagingFailed(f"the snapshot's files cannot be read: {error}") from error

    def drop_staged(self) -> None:
        if self._stager is not None:
            self._stager.cancel()
            self._stager = None
        if self._staged is not None:
            self._staging.drop(self._staged[2])
            self._staged = None

    async def commit(self, snapshot: str) -> SwapTiming:
        async with self._controlling:
            self._check_running()
            if self._staged is None or self._staged[0] != snapshot:
                raise StagingFailed(f"snapshot {snapshot!r} is not staged")
            started, (_, directory, fast) = time.perf_counter(), self._staged
            try:
                crossed = await self._switch(snapshot, fast)
            finally:
                self.drop_staged()
            self._serving = directory
            pause_ms = (time.perf_counter() - started) * 1e3
            return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    async def _switch(self, snapshot: str, files: Path) -> int:
        """How many choices crossed it. Raises StagingFailed, EngineDied."""
        crossed = 0
        version = self._coming = self._epochs.version(self._epochs.now + 1, snapshot)

        def on_switch() -> None:
            nonlocal crossed
            crossed = self._begin_epoch(snapshot)

        try:
            await self._while_alive(
                switch(self._control, files, self._serving, version, on_switch, resume=not self._held)
            )
        except Unchanged as error:
            raise StagingFailed(str(error)) from error
        except (CallFailed, Refused, asyncio.CancelledError) as error:
            reason = f"the switch to {snapshot} left vLLM in doubt: {str(error) or 'cancelled'}"
            self._server.kill()
            self._lose(reason)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineDied(reason) from error
        finally:
            self._coming = None
        return crossed

    def _begin_epoch(self, snapshot: str) -> int:
        """How many choices go on in it. One that has no token yet, and may find KV that is too old now, begins anew."""
        self._epochs.begin(snapshot)
        crossed = 0
        for run in self._runs.values():
            for index, choice in tuple(run.choices.items()):
                if choice.over:
                    continue
                crossed += 1
                bounded = run.request.kv_age_max is not None and choice.told.count == 0
                if bounded and self._salt(run.request)[0] != choice.salt:
                    choice.close()
                    self._do_beside(self._begin_again(run, index, choice), "a choice begun anew")
                else:
                    choice.switched()
        return crossed

    async def _begin_again(self, run: Run, index: int, choice: ChoiceStream) -> None:
        if index not in run.open:
            return
        try:
            await self._begin(run, index, choice.prompt)
        except EngineDied as error:
            run.put(error)

    async def pause(self) -> None:
        async with self._controlling:
            self._check_running()
            await self._controlled(self._control.pause())
            self._held = True

    async def resume(self) -> None:
        async with self._controlling:
            self._check_running()
            await self._controlled(self._control.resume())
            self._held = False

    async def _controlled(self, calling: Coroutine[Any, Any, None]) -> None:
        try:
            await self._while_alive(calling)
        except (CallFailed, Refused) as error:
            self._lose(str(error))
            raise EngineDied(str(error)) from error

    def stats(self) -> EngineStats:
        choices = [c for run in self._runs.values() for c in run.choices.values() if not c.over]
        running = sum(choice.told.count > 0 for choice in choices)
        return msgspec.structs.replace(
            EngineStats(running=running, waiting=len(choices) - running), **self._counts
        )

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _watch(self) -> None:
        """Waits for the boot's end: the server's, or what made it useless."""
        ended, over = asyncio.create_task(self._server.wait_ended()), self._over
        assert over is not None
        try:
            await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        reason = over.result() if over.done() else ended.result()
        logger.error("vLLM ended: %s", reason)
        self._lose(reason)
        await self._server.close()
        if self._death is not None:
            await self._death(reason)

    def _lose(self, reason: str) -> None:
        """The boot is over: every request and every call ends with EngineDied."""
        self._running = False
        for run in self._runs.values():
            run.put(EngineDied(reason))
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    async def _stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        self._lose("vLLM was stopped")
        self.drop_staged()
        for task in self._beside:
            task.cancel()
        await self._server.close()


def _finished(request: GenerateRequest, choice: int) -> FinishReason | None:
    """How a choice ended that another engine had completed already."""
    emitted = request.emitted_of(choice)
    if emitted and emitted[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= request.sampling.max_tokens else None
