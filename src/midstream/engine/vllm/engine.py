"""The Engine port over an unmodified vLLM server.

Owns: the server's process (or the URL of one to attach to), the requests inside it, the epochs of its weights. A boot is the
time from a successful `start` to the end of the server.
Always holds:
- A boot begins with the base weights and a prefix cache in which no request finds anything.
- Every token is labelled with the weights that sampled it (labels.py). Of a policy, these are its adapter's (adapters.py).
- An event that leaves the serving weights in doubt ends the boot, so that the replica starts over.
- When a boot ends, every request and call under way ends with EngineDied, and nothing more is sent to its server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from midstream.core.config import VllmSettings
from midstream.core.types import (
    BASE_SNAPSHOT,
    EngineStats,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
)
from midstream.engine.base import Engine, EngineDied, Slot, StagingFailed
from midstream.engine.vllm import protocol
from midstream.engine.vllm.adapters import FOLDER, Adapters, AdapterSlot
from midstream.engine.vllm.arguments import NO_LORA, ON_BASE, vllm_card
from midstream.engine.vllm.boot import Boot
from midstream.engine.vllm.labels import Epochs, Salts
from midstream.engine.vllm.model import Shape, read_shape
from midstream.engine.vllm.proof import NoAdapters, Proof
from midstream.engine.vllm.requests import ChoiceStream, Scorer, VllmRequest, Weights, WrongWeights, finished
from midstream.engine.vllm.server import ServerFailed, VllmServer
from midstream.engine.vllm.staging import Stager, Staging
from midstream.engine.vllm.swap import Control, NotExact, Refused, Unchanged, prove_reload, switch
from midstream.engine.vllm.watch import POLL_S, Watch, Work
from midstream.http.call import CallFailed, open_stream

logger = logging.getLogger(__name__)

#: The name of the model at the server.
NAME = "midstream"
CONNECT_S_MAX = 30.0
#: For an answer to /health after a connection was lost.
HEALTH_S_MAX = 5.0
#: For an answer of the server's API process alone.
ANSWER_S_MAX = 10.0
#: The most prompt tokens of one step, unless a prompt may be longer.
STEP_TOKENS = 8192
#: A server that raises one of these while it starts cannot serve.
START_ERRORS = (ServerFailed, CallFailed, Refused, NotExact, WrongWeights)


class VllmEngine(Engine):
    """url: of a running server to attach to, instead of starting one. cache_dir: of the replica."""

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
        # An attached server may belong to another user or run on another machine. It reads snapshots from the shared directory.
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
        self._boot = Boot()
        self._watch = Watch(settings.silence_s_max, lambda s: self._control.reach_workers(s), self._work)
        self._watcher: asyncio.Task[None] | None = None
        # pause, resume and commit run one at a time.
        self._control_lock = asyncio.Lock()
        self._paused = False
        # The weight version that a running commit brings.
        self._coming_version: str | None = None
        self._control: Control
        self._shape: Shape
        self._epochs = Epochs(BASE_SNAPSHOT)
        self._salts = Salts(b"")
        self._requests: dict[str, VllmRequest] = {}
        self._stager = Stager(self._staging, self._boot.while_alive)
        # Of a boot that serves policies.
        self._adapters: Adapters | None = None
        # Why not; empty if it does.
        self._no_policies = NO_LORA
        self._adapter_dir = cache_dir / FOLDER
        self._serving_dir = self._model_dir
        self._counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}
        self._death: Callable[[str], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        return f"VllmEngine({self._server!r}, {self._epochs!r}, {len(self._requests)} requests)"

    @property
    def pid(self) -> int | None:
        return self._server.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        self._shape = await asyncio.to_thread(read_shape, self._model_dir)
        try:
            await self._server.start()
            url, headers = self._server.url, self._server.headers
            self._control = Control(url, headers, self._settings.load_s_max, self._watch.held_up)
            self._epochs, self._serving_dir = Epochs(BASE_SNAPSHOT), self._model_dir
            # An attached server may have a cache from before.
            self._salts = Salts(secrets.token_bytes(16))
            await self._take_over()
        except BaseException as error:
            await self._server.close()
            if isinstance(error, START_ERRORS):
                raise EngineDied(str(error)) from error
            raise
        self._paused = False
        self._boot.begin()
        self._watcher = asyncio.create_task(self._until_ended(), name="vLLM's end")
        self._boot.in_background(self._until_hung(), "a hung vLLM")
        if self._attached:
            self._boot.in_background(self._until_restarted(), "a restarted vLLM")
        return self._info()

    async def _take_over(self) -> None:
        """Bring the server to the beginning of a boot: base weights, nothing in the cache that we could find, not paused."""
        if self._attached:
            # Its last user may have left it in any state.
            self._server.check_reload(experts=bool(self._shape.moe_layers))
            await self._control.pause(clear_cache=True)
            await self._control.reload(self._model_dir)
        await self._control.set_version(self._epochs.serving_version)
        if self._attached:
            await self._control.resume()
        self._no_policies = self._server.no_adapters
        self._adapters = None if self._no_policies else await self._prove_adapters()
        if not self._attached and self._adapters is None:
            reload = partial(self._control.reload, self._model_dir)
            await prove_reload(
                self._scorer(self._own), self._shape.vocab_size, self._server.max_model_len, reload
            )

    async def _prove_adapters(self) -> Adapters | None:
        """None: the server serves, but no adapters."""
        self._server.check_adapters(experts=bool(self._shape.moe_layers))
        sizes = (self._shape.vocab_size, self._server.max_model_len)
        proof = Proof(self._server, self._control, self._scorer, sizes, self._adapter_dir)
        try:
            proven = await proof.run(self._model_dir, self._own)
        except NoAdapters as error:
            self._no_policies = str(error)
            logger.warning("vLLM serves no policies: %s", error)
            return None
        own = (self._epochs.serving_version, self._check_alive, self._boot.in_background)
        return Adapters(self._control, proven, self._adapter_dir, *own)

    @property
    def _own(self) -> Weights:
        return Weights(self._server.served_name, self._epochs)

    def _info(self) -> ModelInfo:
        shape, server = self._shape, self._server
        card = vllm_card(server.version, routes=server.returns_routes, no_policies=self._no_policies)
        return ModelInfo(
            max_model_len=server.max_model_len,
            vocab_size=shape.vocab_size,
            moe_layers=len(shape.moe_layers),
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            eos_token_ids=shape.eos_token_ids,
            grammars=True,
            card=card,
        )

    async def close(self) -> None:
        await self._stop()
        self._staging.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        self._boot.check()
        if (problem := self.refuses(request)) is not None:
            yield GenerationEvent(error=problem)
            return
        adapters = self._adapters
        version = adapters.begin(request.policy) if adapters is not None and request.policy else None
        if version is None and request.policy:
            yield GenerationEvent(error=f"the policy {request.policy} serves nothing yet")
            return
        weights = self._own if version is None else version.weights
        run = self._requests[request.request_id] = VllmRequest(request, weights)
        try:
            prompt: tuple[TokenRecord, ...] | None = None
            if request.prompt_records:
                scored = await self._score(run)
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
                if (finish := finished(request, index)) is not None:
                    run.put(GenerationEvent(index=index, prompt=prompt, finish=finish))
                else:
                    await self._begin(run, index, prompt)
            while (event := await run.next()) is not None:
                choice = run.choices.get(event.index)
                if event.error is not None and choice is not None and choice.labels_wrong:
                    await self._check_alive(event.error)
                self._count(request, event)
                yield event
        finally:
            self._requests.pop(request.request_id, None)
            run.close()
            if version is not None and adapters is not None:
                adapters.end(version)

    def refuses(self, request: GenerateRequest) -> str | None:
        return protocol.problem(request)

    def _scorer(self, weights: Weights) -> Scorer:
        return Scorer(self._server.url, self._server.headers, weights.epochs, self._shape, weights.name)

    async def _score(self, run: VllmRequest) -> tuple[TokenRecord, ...] | str:
        """The records of the prompt, or the reason why there are none."""
        scorer = self._scorer(run.weights)
        try:
            return await self._boot.while_alive(scorer.score(run.request, self._salt(run)[0]))
        except (CallFailed, WrongWeights) as error:
            reason = f"vLLM did not score the prompt: {error}"
            await self._check_alive(reason)
            return reason

    async def _begin(self, run: VllmRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        """Send one choice to the server, unless it was ended meanwhile."""
        if index not in run.open:
            return
        request = run.request
        salt, clean = self._salt(run)
        epochs = run.weights.epochs
        choice = ChoiceStream(request, index, epochs, self._shape, run.put, clean=clean, prompt=prompt)
        choice.salt = salt
        choice.on_tokens = self._watch.token
        choice.on_error = lambda: self._ended(run, choice, None)
        run.choices[index] = choice
        size = len(request.prompt) + len(request.emitted_of(index))
        data = protocol.body(
            request,
            index,
            model=run.weights.name,
            salt=salt,
            stream=True,
            routes_start=size - request.want_routes if self._server.returns_routes else None,
        )

        async def connect() -> None:
            url, headers = self._server.url, self._server.headers
            choice.response = await open_stream(
                url, "POST", protocol.PATH, data, choice.on_body, CONNECT_S_MAX, headers
            )
            if choice.over:
                # It was ended or begun again meanwhile.
                choice.response.abort()
            choice.response.ended.add_done_callback(lambda ended: self._ended(run, choice, ended.result()))

        try:
            await self._boot.while_alive(connect())
        except CallFailed as error:
            await self._check_alive(str(error))
            choice.fail(f"vLLM did not take the request: {error}")

    def _ended(self, run: VllmRequest, choice: ChoiceStream, reason: str | None) -> None:
        if choice.over:
            return
        doubt = reason or choice.server_error
        if doubt is None or not self._boot.running:
            choice.ended(reason)
            return
        self._start_task(run, "whether vLLM died", self._lost, choice, doubt)

    async def _lost(self, choice: ChoiceStream, reason: str) -> None:
        """End the boot if the server is dead; else end this choice alone. reason: a lost connection, or an error event."""
        await self._check_alive(reason)
        choice.ended(reason)

    async def _check_alive(self, reason: str) -> None:
        """Raises EngineDied if the server is gone, or is no longer the one that was given its weights.

        Otherwise `reason` concerns one request alone.
        """
        self._boot.check()
        problem = await self._problem()
        self._boot.check()
        if problem is not None:
            self._end_boot(f"{problem}: {reason}")
            raise EngineDied(f"{problem}: {reason}")

    async def _problem(self) -> str | None:
        """What is wrong with the server, if anything is."""
        status = await self._server.health(HEALTH_S_MAX)
        if status != 200:
            return f"vLLM is gone (/health answers {status})" if status > 0 else "vLLM is gone"
        return await self._other_weights()

    async def _other_weights(self) -> str | None:
        """Whether the server has weights of others: it was restarted, for example."""
        if self._coming_version is not None:
            # The switch itself finds out whether it left the server in doubt.
            return None
        ours = self._epochs.serving_version
        try:
            version = await self._control.version(ANSWER_S_MAX)
        except (CallFailed, Refused):
            # The server is healthy, but busy with a long step or with a switch.
            return None
        switched = self._epochs.serving_version != ours
        if version == ours or switched or self._coming_version is not None:
            return None
        return f"vLLM was restarted, or given weights by others: it has {version!r}, not {ours!r}"

    def _start_task(
        self, run: VllmRequest, name: str, work: Callable[..., Awaitable[None]], *args: object
    ) -> None:
        """Begin `work` for `run`, which gets the EngineDied that `work` raises."""

        async def working() -> None:
            try:
                await work(*args)
            except EngineDied as error:
                run.put(error)

        self._boot.in_background(working(), name)

    def _count(self, request: GenerateRequest, event: GenerationEvent) -> None:
        self._counts["generated_tokens"] += len(event.tokens)
        if event.finish is not None and event.index == request.choices[0]:
            self._counts["prompt_tokens"] += len(request.prompt)
            self._counts["cached_prompt_tokens"] += event.cached_tokens or 0

    def _salt(self, run: VllmRequest) -> tuple[str, bool]:
        """The request's salt for vLLM, and whether all KV cached under it is of the weights that it runs under."""
        request = run.request
        # A resumed request may be limited to younger KV than other requests of its namespace.
        resumed = bool(request.emitted)
        return self._salts.of(request.salt, run.weights.epochs.now, request.kv_age_max, passing=resumed)

    def end_choice(self, request_id: str, index: int) -> None:
        if (run := self._requests.get(request_id)) is not None:
            run.end_choice(index)

    def abort(self, request_id: str) -> None:
        if (run := self._requests.get(request_id)) is not None:
            run.abort()

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._boot.check()
        if self._adapters is not None:
            raise StagingFailed(f"vLLM takes no full weights here: {ON_BASE}")
        await self._stager.stage(snapshot, directory)

    def drop_staged(self) -> None:
        self._stager.drop()

    def slot(self, policy: str) -> Slot:
        return AdapterSlot(policy, self._running_adapters, self._boot.while_alive)

    def _running_adapters(self) -> Adapters:
        self._boot.check()
        if self._adapters is None:
            raise StagingFailed(f"vLLM serves no policies: {self._no_policies}")
        return self._adapters

    def end_policy(self, policy: str) -> None:
        if self._adapters is not None:
            self._adapters.end_policy(policy)

    async def commit(self, snapshot: str) -> SwapTiming:
        async with self._control_lock:
            self._boot.check()
            staged = self._stager.staged
            if staged is None or staged.snapshot != snapshot:
                raise StagingFailed(f"snapshot {snapshot!r} is not staged")
            started = time.perf_counter()
            try:
                crossed = await self._switch(snapshot, staged.fast)
            finally:
                self.drop_staged()
            self._serving_dir = staged.directory
            pause_ms = (time.perf_counter() - started) * 1e3
            return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    async def _switch(self, snapshot: str, files: Path) -> int:
        """Switch, and return how many choices crossed the switch. Raises StagingFailed, EngineDied."""
        crossed = 0
        version = self._coming_version = self._epochs.version(self._epochs.now + 1, snapshot)

        def on_switch() -> None:
            nonlocal crossed
            crossed = self._begin_epoch(snapshot)

        try:
            await self._boot.while_alive(
                switch(self._control, files, self._serving_dir, version, on_switch, resume=not self._paused)
            )
        except Unchanged as error:
            raise StagingFailed(str(error)) from error
        except (CallFailed, Refused, asyncio.CancelledError) as error:
            reason = f"the switch to {snapshot} left vLLM in doubt: {str(error) or 'cancelled'}"
            self._give_up(reason)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineDied(reason) from error
        finally:
            self._coming_version = None
        return crossed

    def _begin_epoch(self, snapshot: str) -> int:
        """Begin the epoch of `snapshot`, and return how many choices go on in it.

        A choice without a token that may find KV that is too old now is sent again.
        """
        self._epochs.begin(snapshot)
        crossed = 0
        for run in self._requests.values():
            for index, choice in tuple(run.choices.items()):
                if choice.over:
                    continue
                crossed += 1
                bounded = run.request.kv_age_max is not None and choice.labels.count == 0
                if bounded and self._salt(run)[0] != choice.salt:
                    choice.close()
                    self._start_task(run, "a choice begun anew", self._begin, run, index, choice.prompt)
                else:
                    choice.switched()
        return crossed

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        async with self._control_lock:
            self._boot.check()
            try:
                await self._boot.while_alive(self._control.pause() if paused else self._control.resume())
            except (CallFailed, Refused) as error:
                self._end_boot(str(error))
                raise EngineDied(str(error)) from error
            self._paused = paused

    def stats(self) -> EngineStats:
        choices = [c for run in self._requests.values() for c in run.choices.values() if not c.over]
        running = sum(choice.labels.count > 0 for choice in choices)
        return msgspec.structs.replace(
            EngineStats(running=running, waiting=len(choices) - running), **self._counts
        )

    def silent_s(self) -> float:
        return self._watch.silent_s

    def _work(self) -> Work:
        choices = [c for run in self._requests.values() for c in run.choices.values() if not c.over]
        prompts = sum(choice.prompt_size for choice in choices if not choice.labels.count)
        due = not self._paused and any(choice.labels.count for choice in choices)
        return Work(due, min(prompts, max(self._server.max_model_len, STEP_TOKENS)))

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _until_hung(self) -> None:
        """End the boot when the server hangs."""
        self._give_up(await self._watch.run(on_cpu=self._server.on_cpu))

    async def _until_restarted(self) -> None:
        """End the boot when the server has been restarted by others."""
        problem = None
        while problem is None:
            await asyncio.sleep(POLL_S)
            problem = await self._other_weights()
        self._give_up(problem)

    def _give_up(self, reason: str) -> None:
        """End the boot. The server is killed, unless it belongs to others."""
        self._server.kill()
        self._end_boot(reason)

    async def _until_ended(self) -> None:
        """Wait for the end of the boot: the end of the server, or an event that made it useless."""
        try:
            reason = await self._boot.while_alive(self._server.wait_ended())
        except EngineDied as error:
            reason = str(error)
        logger.error("vLLM ended: %s", reason)
        self._end_boot(reason)
        await self._server.close()
        if self._death is not None:
            await self._death(reason)

    def _end_boot(self, reason: str) -> None:
        """End the boot: every request and every call ends with EngineDied."""
        for run in self._requests.values():
            run.put(EngineDied(reason))
        self._boot.end(reason)

    async def _stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        self._end_boot("vLLM was stopped")
        self.drop_staged()
        self._boot.cancel_tasks()
        await self._server.close()
