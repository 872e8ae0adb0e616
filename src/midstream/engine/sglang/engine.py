"""The Engine port over an unmodified SGLang server.

Owns: the server's process (or the URL of one to attach to), the epochs of its weights, the requests inside it, its switches.
Always holds:
- A boot begins with the base weights and a prefix cache in which no request finds anything. The server has passed its proofs
  (proofs.py).
- Every token is labelled with the weights that sampled it (servers/labels.py). Requests see nothing of weights before these
  passed their check (servers/proving.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from midstream.core.kv import KvStats
from midstream.core.server_settings import SglangSettings
from midstream.core.types import (
    BASE_SNAPSHOT,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
)
from midstream.engine.base import AtOnce, EngineDied, StagingFailed
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.servers.engine import ServedEngine
from midstream.engine.servers.labels import ChoiceLabels, Epochs
from midstream.engine.servers.model import Shape, read_shape
from midstream.engine.servers.process import ServerFailed
from midstream.engine.servers.proving import Proving
from midstream.engine.servers.requests import ServedWeights, ServerRequest
from midstream.engine.servers.salts import Salts
from midstream.engine.servers.scoring import WrongWeights
from midstream.engine.servers.switching import NotExact, ServerRefused, Unchanged, check_alone, score, switch
from midstream.engine.servers.watch import Watch
from midstream.engine.sglang import protocol
from midstream.engine.sglang.arguments import UNREAD, sglang_card
from midstream.engine.sglang.choice import SglangChoice, SglangScorer
from midstream.engine.sglang.control import SglangControl
from midstream.engine.sglang.proofs import CONNECT_S_MAX, SglangProofs, new_name
from midstream.engine.sglang.server import NAME, SglangServer
from midstream.http.call import CallFailed, open_stream

logger = logging.getLogger(__name__)

#: A server that raises one of these while it starts cannot serve.
START_ERRORS = (ServerFailed, CallFailed, ServerRefused, NotExact, WrongWeights)
UNTRIED = "SGLang ran with midstream on a CPU alone, never on a GPU: see docs/engines.md"


class SglangEngine(ServedEngine):
    """url: of a running server to attach to, instead of starting one. cache_dir: of the replica."""

    _paused = False
    _control: SglangControl
    _no_digest = UNREAD
    _staged: tuple[str, Path] | None = None
    # Of the next commit (Slot.announce).
    _announced: tuple[str, tuple[tuple[str, str], ...]] = ("", ())
    _watcher: asyncio.Task[None] | None = None

    def __init__(
        self,
        model_dir: Path,
        settings: SglangSettings,
        cache_dir: Path,
        *,
        url: str | None = None,
        gpus: tuple[int, ...] = (),
    ) -> None:
        self._model_dir = self._serving_dir = model_dir.resolve()
        self._settings = settings
        self._attached = url is not None
        self._server: SglangServer = SglangServer(
            self._model_dir, settings, url=url, gpus=gpus, log=cache_dir / "sglang.log"
        )
        self._boot = ServerBoot("SGLang")
        self._watch = Watch(
            settings.silence_s_max, lambda s: self._control.reach_scheduler(s), self._work, "SGLang"
        )
        # pause, resume, commit and digest run one at a time.
        self._control_lock = asyncio.Lock()
        self._shape: Shape
        self._epochs = Epochs(BASE_SNAPSHOT)
        self._salts = Salts(b"")
        self._requests: dict[str, ServerRequest] = {}
        self._proving = Proving(self._requests)
        self._computing = asyncio.Event()
        self._counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}

    def __repr__(self) -> str:
        return f"SglangEngine({self._server!r}, {self._epochs!r}, {len(self._requests)} requests)"

    async def start(self) -> ModelInfo:
        logger.warning("%s", UNTRIED)
        await self._stop()
        self._shape = await asyncio.to_thread(read_shape, self._model_dir)
        server = self._server
        try:
            await server.start()
            limits = self._settings
            self._control = SglangControl(server.url, server.headers, limits.load_s_max, self._watch.held_up)
            self._epochs, self._serving_dir = Epochs(BASE_SNAPSHOT), self._model_dir
            # An attached server may have a cache from before.
            self._salts = Salts(secrets.token_bytes(16))
            await self._take_over()
        except BaseException as error:
            await server.close()
            if isinstance(error, START_ERRORS):
                raise EngineDied(str(error)) from error
            raise
        self._paused = False
        self._computing.set()
        self._proving.started()
        self._boot.begin()
        self._watcher = asyncio.create_task(self._until_ended(), name="SGLang's end")
        self._boot.in_background(self._until_hung(), "a hung SGLang")
        if self._attached:
            self._boot.in_background(self._until_restarted(), "a restarted SGLang")
        return self._info()

    async def _take_over(self) -> None:
        """Bring the server to the beginning of a boot, and prove what it does."""
        control = self._control
        if self._attached:
            # Its last user may have left it in any state.
            await control.pause()
            await control.reload(self._model_dir)
            await control.resume()
        await control.set_version(self._epochs.serving_version)
        proofs = SglangProofs(self._server, control, self._epochs, self._shape.vocab_size, self._model_dir)
        self._no_digest = await proofs.run()
        # Nothing of the proofs is found again.
        await control.flush()
        size = self._server.page
        self._kv_cache = KvStats(block_tokens=size, total=self._server.kv_tokens // size)

    def _info(self) -> ModelInfo:
        shape, server = self._shape, self._server
        return ModelInfo(
            max_model_len=server.max_model_len,
            vocab_size=shape.vocab_size,
            moe_layers=len(shape.moe_layers),
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            eos_token_ids=shape.eos_token_ids,
            card=sglang_card(server.version, by_priority=server.by_priority, no_digest=self._no_digest),
        )

    async def close(self) -> None:
        await self._stop()

    async def _stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        self._end_boot("SGLang was stopped")
        self.drop_staged()
        self._boot.cancel_tasks()
        await self._server.close()

    def refuses(self, request: GenerateRequest) -> str | None:
        return protocol.problem(request, self._shape.eos_token_ids)

    async def _generate(
        self, request: GenerateRequest, at_once: AtOnce | None
    ) -> AsyncIterator[GenerationEvent]:
        self._boot.check()
        if (problem := self.refuses(request)) is not None:
            yield GenerationEvent(error=problem)
            return
        weights = ServedWeights(NAME, self._epochs)
        run = self._requests[request.request_id] = ServerRequest(request, weights, at_once)
        try:
            self._proving.begins(run)
            await self._begin_all(run)
            while (event := await run.next()) is not None:
                choice = run.choices.get(event.index)
                if event.error is not None and choice is not None and choice.labels_wrong:
                    await self._check_alive(event.error)
                self._count(request, event)
                yield event
        finally:
            self._requests.pop(request.request_id, None)
            run.close()

    def _salt(self, run: ServerRequest) -> tuple[str, bool]:
        request = run.request
        # A resumed request may be limited to younger KV than other requests of its namespace.
        resumed = bool(request.emitted)
        return self._salts.of(request.salt, self._epochs.now, request.kv_age_max, passing=resumed)

    async def _begin(self, run: ServerRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        if index not in run.open:
            return
        request = run.request
        salt, clean = self._salt(run)
        size = len(request.prompt) + len(request.emitted_of(index))
        labels = ChoiceLabels(self._epochs, size, clean=clean)
        choice = SglangChoice(request, index, labels, self._epochs, run.put, name=new_name(), prompt=prompt)
        choice.salt = salt
        choice.on_tokens = self._watch.token
        choice.on_error = lambda: self._ended(run, choice, None)
        choice.on_abort = lambda: self._boot.in_background(self._abort(choice.name), "an abort")
        run.choices[index] = choice
        server = self._server
        data = protocol.body(
            request, index, name=choice.name, salt=salt, stream=True, by_priority=server.by_priority
        )

        async def connect() -> None:
            choice.response = await open_stream(
                server.url, "POST", protocol.PATH, data, choice.on_body, CONNECT_S_MAX, server.headers
            )
            if choice.over:
                # It was ended or begun again meanwhile.
                choice.response.abort()
            choice.response.ended.add_done_callback(lambda ended: self._ended(run, choice, ended.result()))

        try:
            await self._boot.while_alive(connect())
        except CallFailed as error:
            await self._check_alive(str(error))
            choice.fail(f"SGLang did not take the request: {error}")

    async def _abort(self, name: str) -> None:
        """At once. SGLang looks for lost connections, too, and takes seconds for that."""
        with suppress(CallFailed, ServerRefused):
            await self._control.abort(name)

    async def _score(self, run: ServerRequest) -> tuple[TokenRecord, ...] | str:
        run.scoring = len(run.request.prompt)
        try:
            if run.request.urgent:
                await self.until_computing()
            return await self._boot.while_alive(self._scorer().score(run.request, self._salt(run)[0]))
        except (CallFailed, WrongWeights) as error:
            reason = f"SGLang did not score the prompt: {error}"
            await self._check_alive(reason)
            return reason
        finally:
            run.scoring = 0

    def _scorer(self) -> SglangScorer:
        server = self._server
        return SglangScorer(
            server.url, server.headers, self._epochs, new_name, by_priority=server.by_priority
        )

    async def _check_finite(self, reason: str) -> None:
        try:
            await self.until_computing()
            await self._boot.while_alive(
                score(self._scorer(), self._shape.vocab_size, self._server.max_model_len)
            )
        except NotExact as error:
            self._give_up(f"{error}; {reason}")
            raise EngineDied(str(error)) from error
        except (CallFailed, WrongWeights) as error:
            await self._check_alive(str(error))

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._boot.check()
        self.drop_staged()
        try:
            await asyncio.to_thread(check_alone, directory)
        except OSError as error:
            raise StagingFailed(str(error)) from error
        self._staged = snapshot, directory

    def drop_staged(self) -> None:
        self._staged = None

    def announce(self, files: str, overwritten: Sequence[tuple[str, str]]) -> None:
        self._announced = files, tuple(overwritten)

    async def commit(self, snapshot: str) -> SwapTiming:
        announced, self._announced = self._announced, ("", ())
        async with self._control_lock:
            self._boot.check()
            if self._staged is None or self._staged[0] != snapshot:
                raise StagingFailed(f"snapshot {snapshot!r} is not staged")
            directory = self._staged[1]
            if self._proving.spoilt:
                # Free KV may hold numbers that are not finite.
                self._give_up("weights failed their check, so SGLang begins again")
                self._boot.check()
            crossed = 0
            started = time.perf_counter()

            def on_switch() -> None:
                nonlocal crossed
                self._epochs.begin(snapshot, *announced)
                self._proving.switched(snapshot)
                crossed = self._cross_all(list(self._requests.values()))

            version = self._coming_version = self._epochs.next_version(snapshot)
            load, back = (partial(self._control.reload, files) for files in (directory, self._serving_dir))
            switching = switch(self._control, load, back, version, on_switch, resume=not self._paused)
            try:
                await self._boot.while_alive(switching)
            except Unchanged as error:
                raise StagingFailed(str(error)) from error
            except (CallFailed, ServerRefused, asyncio.CancelledError) as error:
                reason = f"the switch to {snapshot} left SGLang in doubt: {str(error) or 'cancelled'}"
                self._give_up(reason)
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise EngineDied(reason) from error
            finally:
                self._coming_version = None
                self.drop_staged()
            self._serving_dir = directory
            pause_ms = (time.perf_counter() - started) * 1e3
            return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    def settle(self, snapshot: str, *, sound: bool) -> None:
        self._proving.settle(snapshot, sound=sound)

    async def weights_digest(self) -> str | None:
        """Raises StagingFailed when the server does not say it."""
        if self._no_digest:
            return None
        async with self._control_lock:
            try:
                found = await self._boot.while_alive(self._control.checksum())
            except (CallFailed, ServerRefused) as error:
                raise StagingFailed(str(error)) from error
        return f"{self._server.kind}:{hashlib.sha256(found.encode()).hexdigest()}"

    async def until_computing(self) -> None:
        self._boot.check()
        await self._boot.while_alive(self._computing.wait())

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        async with self._control_lock:
            self._boot.check()
            try:
                await self._boot.while_alive(self._control.pause() if paused else self._control.resume())
            except (CallFailed, ServerRefused) as error:
                self._end_boot(str(error))
                raise EngineDied(str(error)) from error
            self._paused = paused
            if paused:
                self._computing.clear()
            else:
                self._computing.set()
