"""What engines over a server have in common: the requests inside it, and its switches.

Always holds:
- Every token is labelled with the weights that sampled it (labels.py).
- Requests see nothing of weights before these passed their check (proving.py).
- A choice without a token that may find KV that is too old after a switch is sent again.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from midstream.core.kv import KvStats
from midstream.core.server_settings import ServerSettings
from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, SwapTiming, TokenRecord
from midstream.engine.base import AtOnce, EngineDied, StagingFailed
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.life import ServerLife
from midstream.engine.servers.process import NAME, ServerProcess
from midstream.engine.servers.proving import WeightsStanding
from midstream.engine.servers.requests import ChoiceStream, ServedWeights, ServerRequest, finished
from midstream.engine.servers.scoring import PromptScorer, WrongWeights
from midstream.engine.servers.switching import NotExact, StagedFiles, Unchanged, score
from midstream.http.call import CallFailed, open_stream

CONNECT_S_MAX = 30.0

S = TypeVar("S", bound=StagedFiles)
#: What the files of a commit are, and which names have other weights by it (Slot.announce).
Announced = tuple[str, tuple[tuple[str, str], ...]]


class ServedEngine(ServerLife, Generic[S]):
    """S: what it stages."""

    #: Where the server takes choices.
    PATH = ""

    # How large its KV cache is, if it says so.
    _kv_cache = KvStats()
    # Of the next commit.
    _announced: Announced = ("", ())

    def __init__(
        self, model_dir: Path, settings: ServerSettings, server: ServerProcess, *, attached: bool
    ) -> None:
        super().__init__(model_dir, settings, server, attached=attached)
        self._counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}

    @abc.abstractmethod
    async def _begin(self, run: ServerRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        """Send one choice to the server, unless it was ended meanwhile."""

    @abc.abstractmethod
    def _scorer_of(self, weights: ServedWeights) -> PromptScorer:
        """Of requests' prompts, and of checks."""

    @abc.abstractmethod
    def _staged(self) -> S | None: ...

    @abc.abstractmethod
    async def _switch(self, staged: S, announced: Announced) -> int:
        """Switch to what was staged, and return how many choices crossed the switch. Raises StagingFailed, EngineDied."""

    @abc.abstractmethod
    async def _renew(self) -> None:
        """Restart the server, as its weights failed their check. Raises EngineDied if that ends the boot."""

    @property
    def _own(self) -> ServedWeights:
        return ServedWeights(NAME, self._epochs)

    def _salt(self, run: ServerRequest) -> tuple[str, bool]:
        """The request's salt for the server, and whether all KV cached under it is of the weights that it runs under."""
        request = run.request
        # A resumed request may be limited to younger KV than other requests of its namespace.
        resumed = bool(request.emitted)
        return self._salts.of(request.salt, run.weights.epochs.now, request.kv_age_max, passing=resumed)

    @contextmanager
    def _weights_of(self, request: GenerateRequest) -> Iterator[ServedWeights | str]:
        """What a request runs under while it is inside, or why it cannot."""
        yield self._own

    def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        if at_once is None:
            return self._generate(request, None)

        def counted(event: GenerationEvent) -> bool:
            taken = at_once(event)
            if taken:
                self._counts["generated_tokens"] += len(event.tokens)
            return taken

        return self._generate(request, counted)

    async def _generate(
        self, request: GenerateRequest, at_once: AtOnce | None
    ) -> AsyncIterator[GenerationEvent]:
        self._boot.check()
        if (problem := self.refuses(request)) is not None:
            yield GenerationEvent(error=problem)
            return
        with self._weights_of(request) as weights:
            if isinstance(weights, str):
                yield GenerationEvent(error=weights)
                return
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

    async def _score(self, run: ServerRequest) -> tuple[TokenRecord, ...] | str:
        """The records of the prompt, or the reason why there are none."""
        run.scoring = len(run.request.prompt)
        try:
            async with self._checking() if run.request.urgent else nullcontext():
                scoring = self._scorer_of(run.weights).score(run.request, self._salt(run)[0])
                return await self._boot.while_alive(scoring)
        except (CallFailed, WrongWeights) as error:
            reason = f"{self._server.WHO} did not score the prompt: {error}"
            await self._check_alive(reason)
            return reason
        finally:
            run.scoring = 0

    @asynccontextmanager
    async def _checking(self) -> AsyncIterator[None]:
        """What is urgent is computed in it."""
        await self.until_computing()
        yield

    async def _begin_all(self, run: ServerRequest) -> None:
        request = run.request
        prompt: tuple[TokenRecord, ...] | None = None
        if request.prompt_records:
            scored = await self._score(run)
            if isinstance(scored, str):
                run.put(GenerationEvent(error=scored))
                return
            prompt = scored
        for index in request.choices:
            if request.sampling.max_tokens == 0:
                run.put(GenerationEvent(index=index, prompt=prompt, cached_tokens=0, finish="length"))
            elif (finish := finished(request, index)) is not None:
                run.put(GenerationEvent(index=index, prompt=prompt, finish=finish))
            else:
                await self._begin(run, index, prompt)

    async def _send(self, run: ServerRequest, index: int, choice: ChoiceStream, data: bytes) -> None:
        """Have the server compute a choice. data: the body that asks for it."""
        choice.on_tokens = self._watch.token
        choice.on_error = lambda: self._ended(run, choice, None)
        run.choices[index] = choice
        server = self._server

        async def connect() -> None:
            choice.response = await open_stream(
                server.url, "POST", self.PATH, data, choice.on_body, CONNECT_S_MAX, server.headers
            )
            if choice.over:
                # It was ended or begun again meanwhile.
                choice.response.abort()
            choice.response.ended.add_done_callback(lambda ended: self._ended(run, choice, ended.result()))

        try:
            await self._boot.while_alive(connect())
        except CallFailed as error:
            await self._check_alive(str(error))
            choice.fail(f"{server.WHO} did not take the request: {error}")

    def _ended(self, run: ServerRequest, choice: ChoiceStream, reason: str | None) -> None:
        if choice.over:
            return
        doubt = reason or choice.server_error
        if doubt is None or not self._boot.running:
            choice.ended(reason)
            return
        self._start_task(run, f"whether {self._server.WHO} died", self._lost, choice, doubt)

    async def _lost(self, choice: ChoiceStream, reason: str) -> None:
        """End the boot if the server is dead; else end this choice alone. reason: a lost connection, or an error event."""
        await self._check_alive(reason)
        if choice.not_finite and self._proving.standing is WeightsStanding.PROVED:
            await self._check_finite(reason)
        choice.ended(reason)

    async def _check_finite(self, reason: str) -> None:
        """Raises EngineDied when the server computes no finite numbers for a prompt of ours either.

        Its KV cache holds others then: a server does not clear blocks that it uses again. Else the request alone is to blame.
        """
        try:
            async with self._checking():
                await self._boot.while_alive(score(self._scorer_of(self._own), *self._sizes))
        except NotExact as error:
            self._give_up_spoilt(f"{error}; {reason}")
            raise EngineDied(str(error)) from error
        except (CallFailed, WrongWeights) as error:
            await self._check_alive(str(error))

    def _give_up_spoilt(self, reason: str) -> None:
        """End the boot, as the KV cache may hold numbers that are not finite."""
        self._give_up(reason)

    def _start_task(
        self, run: ServerRequest, name: str, work: Callable[..., Awaitable[None]], *args: object
    ) -> None:
        """Begin `work` for `run`, which gets the EngineDied that `work` raises."""

        async def working() -> None:
            try:
                await work(*args)
            except EngineDied as error:
                run.fail(error)

        self._boot.in_background(working(), name)

    def _count(self, request: GenerateRequest, event: GenerationEvent) -> None:
        self._counts["generated_tokens"] += len(event.tokens)
        if event.finish is not None and event.index == request.choices[0]:
            self._counts["prompt_tokens"] += len(request.prompt)
            self._counts["cached_prompt_tokens"] += event.cached_tokens or 0

    def end_choice(self, request_id: str, index: int) -> None:
        if (run := self._requests.get(request_id)) is not None:
            run.end_choice(index)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if (run := self._requests.get(request_id)) is not None:
            run.abort(index)

    def _cross_all(self, runs: Sequence[ServerRequest]) -> int:
        """How many of their choices continue in the epoch that has begun.

        A choice without a token that may find KV that is too old now is sent again.
        """
        crossed = 0
        for run in runs:
            for index, choice in tuple(run.choices.items()):
                if choice.over:
                    continue
                crossed += 1
                bounded = run.request.kv_age_max is not None and choice.labels.count == 0
                if bounded and self._salt(run)[0] != choice.salt:
                    choice.close()
                    self._start_task(run, "a choice begun again", self._begin, run, index, choice.prompt)
                else:
                    choice.switched()
        return crossed

    def announce(self, files: str, overwritten: Sequence[tuple[str, str]]) -> None:
        self._announced = files, tuple(overwritten)

    async def commit(self, snapshot: str) -> SwapTiming:
        announced, self._announced = self._announced, ("", ())
        async with self._control_lock:
            self._boot.check()
            staged = self._staged()
            if staged is None or staged.snapshot != snapshot:
                raise StagingFailed(f"snapshot {snapshot!r} is not staged")
            if self._proving.spoilt:
                await self._renew()
            started = time.perf_counter()
            try:
                crossed = await self._switch(staged, announced)
            finally:
                self.drop_staged()
            self._serving_dir = staged.directory
            pause_ms = (time.perf_counter() - started) * 1e3
            return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    def settle(self, snapshot: str, *, sound: bool) -> None:
        self._proving.settle(snapshot, sound=sound)

    def _begin_epoch(self, snapshot: str, announced: Announced) -> int:
        """Begin the epoch of `snapshot`, and return how many choices continue in it."""
        self._epochs.begin(snapshot, *announced)
        self._rebased([name for name, _ in announced[1]])
        self._proving.switched(snapshot)
        return self._cross_all(list(self._requests.values()))

    def _rebased(self, overwritten: Collection[str]) -> None:
        """The own weights have begun an epoch. overwritten: names that mean other weights by it."""

    async def _carry_out(self, switching: Coroutine[Any, Any, None], what: str) -> None:
        """Raises StagingFailed if what served serves on, EngineDied."""
        try:
            await self._boot.while_alive(switching)
            self._switched()
        except Unchanged as error:
            self._switched()
            raise StagingFailed(str(error)) from error
        except (CallFailed, ServerRefused, asyncio.CancelledError) as error:
            reason = f"the switch to {what} left {self._server.WHO} in doubt: {str(error) or 'cancelled'}"
            self._give_up(reason)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineDied(reason) from error
        finally:
            self._coming_version = None

    def _switched(self) -> None:
        """A switch is over, and what serves is known."""

    def stats(self) -> EngineStats:
        choices = [c for run in self._requests.values() for c in run.choices.values() if not c.over]
        running = sum(choice.labels.count > 0 for choice in choices)
        contexts = (
            len(run.request.prompt) + choice.labels.count
            for run in self._requests.values()
            for choice in run.choices.values()
            if not choice.over and choice.labels.count
        )
        return msgspec.structs.replace(
            EngineStats(running=running, waiting=len(choices) - running, kv=self._kv_stats(contexts)),
            **self._counts,
        )

    def _kv_stats(self, contexts: Iterable[int]) -> KvStats:
        """contexts: tokens of each request that is computed now."""
        return used_by(self._kv_cache, contexts)


def used_by(kv: KvStats, contexts: Iterable[int]) -> KvStats:
    """With requests of so many tokens each running."""
    if not kv.total:
        return kv
    blocks = sum(-(-tokens // kv.block_tokens) for tokens in contexts)
    return msgspec.structs.replace(kv, used=min(blocks, kv.total))
