"""What engines over a server have in common: the requests inside it, its doubts and its end.

A boot is the time from a successful `start` to the end of the server.
Always holds:
- An event that leaves the serving weights in doubt ends the boot, so that the replica starts over.
- When a boot ends, every request and call under way ends with EngineDied, and nothing more is sent to its server.
- A choice without a token that may find KV that is too old after a switch is sent again.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from midstream.core.kv import KvStats
from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.base import AtOnce, Engine, EngineDied
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.servers.labels import Epochs
from midstream.engine.servers.process import ServerProcess
from midstream.engine.servers.proving import Proving, WeightsStanding
from midstream.engine.servers.requests import ChoiceStream, ServerRequest, finished
from midstream.engine.servers.switching import ServerRefused, Switched
from midstream.engine.servers.watch import POLL_S, PendingWork, Watch
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

#: For an answer that says that the server lives, after a connection was lost.
HEALTH_S_MAX = 5.0
#: For an answer of the server's API process alone.
ANSWER_S_MAX = 10.0
#: The most prompt tokens of one step, unless a prompt may be longer.
STEP_TOKENS = 8192


class ServerControl(Switched, Protocol):
    async def version(self, timeout_s: float) -> str | None:
        """The version of the weights, as the server reports it."""


class ServedEngine(Engine):
    _attached: bool
    _server: ServerProcess
    _boot: ServerBoot
    _watch: Watch
    _control: ServerControl
    _epochs: Epochs
    _requests: dict[str, ServerRequest]
    _proving: Proving
    # Set while it computes.
    _computing: asyncio.Event
    _counts: dict[str, int]
    # How large its KV cache is, if it says so.
    _kv_cache = KvStats()
    # The weight version that a running commit brings.
    _coming_version: str | None = None
    _death: Callable[[str], Awaitable[None]] | None = None

    @abc.abstractmethod
    def _generate(
        self, request: GenerateRequest, at_once: AtOnce | None
    ) -> AsyncIterator[GenerationEvent]: ...

    @abc.abstractmethod
    async def _begin(self, run: ServerRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        """Send one choice to the server, unless it was ended meanwhile."""

    @abc.abstractmethod
    def _salt(self, run: ServerRequest) -> tuple[str, bool]:
        """The request's salt for the server, and whether all KV cached under it is of the weights that it runs under."""

    @abc.abstractmethod
    async def _check_finite(self, reason: str) -> None:
        """Raises EngineDied when the server computes no finite numbers for a prompt of ours either."""

    @property
    def pid(self) -> int | None:
        return self._server.pid

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

    @abc.abstractmethod
    async def _score(self, run: ServerRequest) -> tuple[TokenRecord, ...] | str:
        """The records of the prompt, or the reason why there are none."""

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
            who = self._server.WHO
            return (
                f"{who} is gone ({self._server.LIVES} answers {status})" if status > 0 else f"{who} is gone"
            )
        return await self._other_weights()

    async def _other_weights(self) -> str | None:
        """Why the server has other weights than ours, if it has: it was restarted, for example."""
        if not self._server.names_weights:
            # It was started here, so nobody else restarts it.
            return None
        if self._coming_version is not None:
            # The switch itself finds out whether it left the server in doubt.
            return None
        ours = self._epochs.serving_version
        try:
            version = await self._control.version(ANSWER_S_MAX)
        except (CallFailed, ServerRefused):
            # The server is healthy, but busy with a long step or with a switch.
            return None
        switched = self._epochs.serving_version != ours
        if version == ours or switched or self._coming_version is not None:
            return None
        return (
            f"{self._server.WHO} was restarted, or given weights by others: it has {version!r}, not {ours!r}"
        )

    def silent_s(self) -> float:
        return self._watch.silent_s

    def _work(self) -> PendingWork:
        choices = [c for run in self._requests.values() for c in run.choices.values() if not c.over]
        prompts = sum(choice.prompt_size for choice in choices if not choice.labels.count)
        prompts += sum(run.scoring for run in self._requests.values())
        due = self._computing.is_set() and any(choice.labels.count for choice in choices)
        waiting = min(prompts, max(self._server.max_model_len, STEP_TOKENS))
        return PendingWork(due, waiting, idle=not self._requests)

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
        logger.error("%s ended: %s", self._server.WHO, reason)
        self._end_boot(reason)
        await self._server.close()
        if self._death is not None:
            await self._death(reason)

    def _end_boot(self, reason: str) -> None:
        """End the boot: every request and every call ends with EngineDied."""
        for run in self._requests.values():
            run.fail(EngineDied(reason))
        self._boot.end(reason)


def used_by(kv: KvStats, contexts: Iterable[int]) -> KvStats:
    """With requests of so many tokens each running."""
    if not kv.total:
        return kv
    blocks = sum(-(-tokens // kv.block_tokens) for tokens in contexts)
    return msgspec.structs.replace(kv, used=min(blocks, kv.total))
