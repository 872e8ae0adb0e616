"""The Engine port over an unmodified vLLM server.

Owns: the server's process (or where it is attached), the requests inside it, the epochs of its weights.
Always holds: a boot begins with the base weights and a prefix cache in which nothing is found; every token is labelled with the
weights that sampled it (labels.py); whatever leaves open which weights serve ends the server, so that the replica starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from midstream.config import VllmSettings
from midstream.engine.base import Engine, EngineDied, StagingFailed
from midstream.engine.vllm import wire
from midstream.engine.vllm.card import vllm_card
from midstream.engine.vllm.labels import Epochs
from midstream.engine.vllm.model import Shape, read_shape
from midstream.engine.vllm.requests import ChoiceStream, Run
from midstream.engine.vllm.salts import Salts
from midstream.engine.vllm.scoring import Scorer
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
DEATH_NOTICED_S = 5.0  # a lost connection is the server's death if that shows within so long
ALIVE_S_MAX = 5.0  # for an answer to /health


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
        self._staging = Staging(cache_dir)
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
        self._watcher: asyncio.Task[None] | None = None
        self._control: Control
        self._shape: Shape
        self._epochs = Epochs(BASE_SNAPSHOT)
        self._salts = Salts(b"")
        self._runs: dict[str, Run] = {}
        self._staged: tuple[str, Path, Path] | None = None  # snapshot, its files, where they are read from
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
        except (ServerFailed, CallFailed, Refused) as error:
            await self._server.close()
            raise EngineDied(str(error)) from error
        self._running = True
        self._watcher = asyncio.create_task(self._watch(), name="vLLM's end")
        return self._info()

    async def _take_over(self) -> None:
        """To where a boot begins: base weights, nothing cached that we could find, not paused."""
        if self._attached:  # somebody before us may have left it in any state
            await self._control.pause(clear_cache=True)
            await self._control.reload(self._model_dir)
        await self._control.set_version(self._epochs.version(0, BASE_SNAPSHOT))
        if self._attached:
            await self._control.resume()

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
        if not self._running:
            raise EngineDied("vLLM is not running")
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
                    yield GenerationEvent(index=index, prompt=prompt, cached_tokens=0, finish="length")
                return
            for index in request.choices:
                if (finish := _finished(request, index)) is not None:
                    run.put(GenerationEvent(index=index, prompt=prompt, finish=finish))
                elif index in run.open:
                    await self._begin(run, index, prompt)
            while (event := await run.next()) is not None:
                self._count(request, event)
                yield event
        finally:
            self._runs.pop(request.request_id, None)
            run.close()

    def refuses(self, request: GenerateRequest) -> str | None:
        return wire.problem(request)

    async def _score(self, request: GenerateRequest) -> tuple[TokenRecord, ...] | str:
        """The records of the prompt, or why there are none."""
        scorer = Scorer(
            self._server.url, self._server.headers, self._epochs, self._shape, self._server.served_name
        )
        try:
            return await scorer.score(request, self._salt(request)[0])
        except CallFailed as error:
            await self._died(f"vLLM did not score the prompt: {error}")
            return f"vLLM did not score the prompt: {error}"

    async def _begin(self, run: Run, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        """Send one choice to the server."""
        request = run.request
        salt, clean = self._salt(request)
        choice = ChoiceStream(request, index, self._epochs, self._shape, run.put, clean=clean, prompt=prompt)
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
        try:
            choice.response = await open_stream(
                self._server.url, "POST", PATH, data, choice.on_body, CONNECT_S_MAX, self._server.headers
            )
        except CallFailed as error:
            await self._died(str(error))
            choice.fail(f"vLLM did not take the request: {error}")
            return
        choice.response.ended.add_done_callback(lambda ended: self._ended(run, choice, ended.result()))

    def _ended(self, run: Run, choice: ChoiceStream, reason: str | None) -> None:
        if choice.over:
            return
        if reason is None or not self._running:
            choice.ended(reason)
            return
        # The connection was lost: with the server, or alone.
        task = asyncio.create_task(self._died(reason), name="whether vLLM died")

        def done(_: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(task.exception(), EngineDied):
                run.put(EngineDied(str(task.exception())))
            else:
                choice.ended(reason)

        task.add_done_callback(done)

    async def _died(self, reason: str) -> None:
        """Raises EngineDied if the server is gone; else the reason is that request's alone."""
        if not self._running:
            raise EngineDied("vLLM is not running")
        with contextlib.suppress(CallFailed):
            status, _ = await call(
                self._server.url, "GET", "/health", None, ALIVE_S_MAX, self._server.headers
            )
            if status == 200:
                return
        raise EngineDied(f"vLLM is gone: {reason}")

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
        self.drop_staged()
        try:
            # A server that is attached to may be somebody else's, or elsewhere: it reads what the two of them share.
            fast = directory if self._attached else await self._staging.put(directory)
        except OSError as error:
            raise StagingFailed(f"the snapshot's files cannot be read: {error}") from error
        self._staged = (snapshot, directory, fast)

    def drop_staged(self) -> None:
        if self._staged is not None:
            self._staging.drop(self._staged[2])
            self._staged = None

    async def commit(self, snapshot: str) -> SwapTiming:
        if not self._running:
            raise EngineDied("vLLM is not running")
        if self._staged is None or self._staged[0] != snapshot:
            raise StagingFailed(f"snapshot {snapshot!r} is not staged")
        _, directory, fast = self._staged
        crossed = 0
        version = self._epochs.version(self._epochs.now + 1, snapshot)

        def on_switch() -> None:
            nonlocal crossed
            self._epochs.begin(snapshot)
            for run in self._runs.values():
                for choice in run.choices.values():
                    if not choice.over:
                        choice.switched()
                        crossed += 1

        started = time.perf_counter()
        try:
            await switch(self._control, fast, self._serving, version, on_switch)
        except Unchanged as error:
            raise StagingFailed(str(error)) from error
        except (CallFailed, Refused) as error:
            reason = f"the switch to {snapshot} left vLLM in doubt: {error}"
            self._server.kill()
            raise EngineDied(reason) from error
        finally:
            self.drop_staged()
        self._serving = directory
        pause_ms = (time.perf_counter() - started) * 1e3
        return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    async def pause(self) -> None:
        await self._controlled(self._control.pause())

    async def resume(self) -> None:
        await self._controlled(self._control.resume())

    async def _controlled(self, calling: Awaitable[None]) -> None:
        try:
            await calling
        except (CallFailed, Refused) as error:
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
        reason = await self._server.wait_ended()
        logger.error("vLLM ended: %s", reason)
        self._end_requests(reason)
        await self._server.close()
        if self._death is not None:
            await self._death(reason)

    def _end_requests(self, reason: str) -> None:
        self._running = False
        for run in self._runs.values():
            run.put(EngineDied(reason))

    async def _stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        self._end_requests("vLLM was stopped")
        self.drop_staged()
        await self._server.close()


def _finished(request: GenerateRequest, choice: int) -> FinishReason | None:
    """How a choice ended that another engine had completed already."""
    emitted = request.emitted_of(choice)
    if emitted and emitted[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= request.sampling.max_tokens else None
