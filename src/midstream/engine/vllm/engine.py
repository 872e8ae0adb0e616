"""The Engine port over an unmodified vLLM server: what it asks of the server for a request, and its switches.

Always holds: every token of a policy is labelled with the weights of its adapter that sampled it (adapters.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from midstream.core.kv import KvStats
from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.base import EngineDied, Slot, StagingFailed
from midstream.engine.servers.chunks import alternatives
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.engine import Announced
from midstream.engine.servers.labels import ChoiceLabels
from midstream.engine.servers.requests import ServedWeights, ServerRequest
from midstream.engine.servers.switching import adopt, switch
from midstream.engine.vllm import protocol
from midstream.engine.vllm.adapters import Adapters, AdapterSlot, Crossing
from midstream.engine.vllm.choice import VllmChoice, WithTokens, wants_both
from midstream.engine.vllm.digest import OtherWeights, read_weights
from midstream.engine.vllm.life import VllmLife
from midstream.engine.vllm.masks import fixed_mask
from midstream.engine.vllm.scoring import Scorer
from midstream.engine.vllm.staging import Staged
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ANY_AGE
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)


class VllmEngine(VllmLife):
    PATH = protocol.PATH

    @contextmanager
    def _weights_of(self, request: GenerateRequest) -> Iterator[ServedWeights | str]:
        adapters = self._adapters
        version = adapters.begin(request.policy) if adapters is not None and request.policy else None
        if version is None and request.policy:
            yield f"the policy {request.policy} serves nothing yet"
            return
        self._kv.moved()
        try:
            yield self._own if version is None else version.weights
        finally:
            self._kv.moved()
            if version is not None and adapters is not None:
                adapters.end(version)

    def refuses(self, request: GenerateRequest) -> str | None:
        if alternatives(request) and not self._names_alternatives:
            return "top_logprobs: this version of vLLM gives no names to alternatives"
        return protocol.problem(request)

    async def _begin(self, run: ServerRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        if index not in run.open:
            return
        request = run.request
        salt, clean = self._salt(run)
        numbers = self._numbers
        masks = request.want_masks and fixed_mask(request, self._shape.vocab_size) is None
        both = masks or wants_both(request, numbers.features)
        kv = self._kv_asked(request)
        size = len(request.prompt) + len(request.emitted_of(index))
        told = kv is not None and bool(kv[0])
        labels = ChoiceLabels(run.weights.epochs, size, clean=clean, told=told)
        late = self._server.returns_routes
        wanted = WithTokens(both, masks, routed=request.want_routes and not late)
        choice = VllmChoice(request, index, labels, self._shape, run.put, wanted, prompt=prompt)
        choice.salt = salt
        data = protocol.body(
            request,
            index,
            model=run.weights.name,
            salt=salt,
            stream=True,
            routes_start=size - request.want_routes if late else None,
            passes_from=(size - 1, request.want_router_weights) if wanted.routed else None,
            by_priority=self._server.by_priority,
            both=both,
            masks=masks,
            tie=numbers.tie if "near_ties" in numbers.features else 0.0,
            kv=kv,
            session=self._kv.asked(request),
        )
        await self._send(run, index, choice, data)

    def _scorer_of(self, weights: ServedWeights) -> Scorer:
        return self._scorer(weights, in_pause=not self._no_frozen_check)

    def _salt(self, run: ServerRequest) -> tuple[str, bool]:
        if self._no_provenance:
            return super()._salt(run)
        # The scheduler uses no KV that is too old, and says which it used.
        return self._salts.lasting(run.request.salt), False

    def _kv_asked(self, request: GenerateRequest) -> tuple[int, int] | None:
        """What the scheduler is asked for, if it says which weights computed KV."""
        if self._no_provenance:
            return None
        age_max = ANY_AGE if request.kv_age_max is None else request.kv_age_max
        return int(request.want_kv_snapshots), age_max

    def end_session(self, session: str) -> None:
        self._kv.end(session)

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._boot.check()
        if self._no_full:
            raise StagingFailed(f"vLLM takes no full weights beside policies here: {self._no_full}")
        if self._fence.holds(directory):
            self._stager.loaded(snapshot, directory)
        else:
            # In an update in place vLLM takes apart what its workers would make a twin of.
            await self._stager.stage(snapshot, directory, in_workers=self._fence.is_free)

    @property
    def awaits_commit(self) -> bool:
        return self._fence.awaits_commit

    def unfit(self, snapshot: str) -> None:
        # It may be what a trainer wrote, so nothing is left to wait for.
        self._fence.give_up_written(f"{snapshot} could not be switched to")

    def slot(self, policy: str) -> Slot:
        return AdapterSlot(policy, self._running_adapters, self._boot.while_alive, self.until_computing)

    def _running_adapters(self) -> Adapters:
        self._boot.check()
        if self._adapters is None:
            raise StagingFailed(f"vLLM serves no policies: {self._no_policies}")
        return self._adapters

    def end_policy(self, policy: str) -> None:
        if self._adapters is not None:
            self._adapters.end_policy(policy)

    def _staged(self) -> Staged | None:
        return self._stager.staged

    async def weights_digest(self) -> str | None:
        """Raises StagingFailed when other weights come meanwhile."""
        if self._no_digest:
            return None
        epoch = self._epochs.now

        def stand() -> bool:
            comes = self._coming_version is not None and not self._crossing
            return not (comes or self._fence.awaits_commit) and self._epochs.now == epoch

        try:
            return await self._boot.while_alive(read_weights(self._control, stand, self._has_steps))
        except (OtherWeights, CallFailed, ServerRefused) as error:
            raise StagingFailed(str(error)) from error

    def _has_steps(self) -> bool:
        """Whether there may be steps to compute. Of an attached server, also those of others."""
        return not self._paused and (self._attached or bool(self._requests))

    async def until_computing(self) -> None:
        self._boot.check()
        while not self._checks_go_on:
            await self._boot.while_alive(self._computing.wait())

    @property
    def _checks_go_on(self) -> bool:
        """Whether vLLM computes what is urgent, and no trainer has hold of its weights."""
        in_pause = self._paused and not self._no_frozen_check
        return not self._fence.has_hold and (in_pause or self._computing.is_set())

    @asynccontextmanager
    async def _checking(self) -> AsyncIterator[None]:
        """No trainer takes the weights apart meanwhile."""
        await self.until_computing()
        with self._fence.checking():
            yield

    async def _renew(self) -> None:
        logger.warning("vLLM is restarted: its KV cache may hold numbers that are not finite")
        # So no timer of what was written ends the server that starts now.
        self._fence.ended("vLLM was restarted, as its weights failed their check")
        if self._attached:
            self._give_up_spoilt("weights failed their check, and this process cannot restart vLLM")
        elif self._adapters is not None:
            # A new boot has them loaded again.
            self._give_up("weights failed their check, and vLLM's policies go with it")
        self._boot.check()
        if self._watcher is not None:
            self._watcher.cancel()
        self._boot.cancel_tasks()
        await self._server.close()
        paused = self._paused
        try:
            await self._launch()
            if paused:
                await self._control.pause()
                self._paused = True
                self._computing.clear()
        except (EngineDied, CallFailed, ServerRefused) as error:
            self._end_boot(str(error))
            raise EngineDied(str(error)) from error

    async def _switch(self, staged: Staged, announced: Announced) -> int:
        # The server may be another one since, and what a trainer wrote may have changed what a switch would leave alone.
        weights = staged.weights if self._fence.is_free else None
        beside = weights is not None and weights.workers is self._stager.workers
        adopts = self._fence.holds(staged.directory)
        if not beside and not adopts:
            await self._boot.while_alive(self._stager.rest())
        crossed = 0
        version = self._coming_version = self._epochs.next_version(staged.snapshot)

        def on_switch() -> None:
            nonlocal crossed
            crossed = self._begin_epoch(staged.snapshot, announced)

        resume = not self._paused
        if adopts:
            switching = adopt(self._control, version, on_switch, resume=resume)
        else:
            load: Callable[[], Awaitable[None]] = partial(self._control.reload, staged.fast)
            if weights is not None and beside:
                load = weights.switch
            back = partial(self._control.reload, self._serving_dir)
            switching = switch(self._control, load, back, version, on_switch, resume=resume)
        await self._carry_out(switching, staged.snapshot)
        return crossed

    async def _cross(self, crossing: Crossing) -> tuple[float, int]:
        """As adapters.Cross has it."""
        async with self._control_lock:
            self._boot.check()
            started = time.perf_counter()
            crossed = 0
            version = self._coming_version = self._epochs.next_of(crossing.policy)
            self._crossing = True

            def on_switch() -> None:
                nonlocal crossed
                self._epochs.switched(crossing.policy)
                crossing.moved()
                crossed = self._cross_all(
                    [r for r in self._requests.values() if r.weights in crossing.weights]
                )

            # Behind what a trainer wrote, nothing is computed before the switch to it.
            resume = not (self._paused or self._fence.has_written)
            switching = switch(self._control, crossing.load, crossing.back, version, on_switch, resume=resume)
            try:
                await self._carry_out(switching, "another adapter")
            finally:
                self._crossing = False
            return (time.perf_counter() - started) * 1e3, crossed

    def _switched(self) -> None:
        """Whatever a trainer wrote is either what serves, or is gone. Another adapter leaves it as it is."""
        if self._crossing:
            return
        self._fence.switched()
        if not self._paused:
            self._computing.set()

    def _rebased(self, overwritten: Collection[str]) -> None:
        if self._adapters is not None:
            self._adapters.rebased(overwritten)

    def _kv_stats(self, contexts: Iterable[int]) -> KvStats:
        return self._kv.stats(contexts)
