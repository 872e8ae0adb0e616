"""The life of a vLLM server behind a VllmEngine: what is learned of it at each start, and how it stands still for a trainer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from midstream.core.server_settings import VllmSettings
from midstream.core.types import EngineCard, GenerateRequest, SamplingParams
from midstream.engine.base import StagingFailed
from midstream.engine.servers.chunks import InvalidAnswer
from midstream.engine.servers.life import HEALTH_S_MAX
from midstream.engine.servers.process import ANSWER_S_MAX, FIRST_S_MAX, NAME, ServerFailed
from midstream.engine.servers.switching import proof_prompt, score
from midstream.engine.vllm import protocol
from midstream.engine.vllm.adapters import FOLDER
from midstream.engine.vllm.arguments import (
    EXTENSIONS,
    SCHEDULER,
    UNCROSSED,
    UNFROZEN,
    UNROUTED,
    UNTOLD,
    vllm_card,
)
from midstream.engine.vllm.in_place import VllmInPlace
from midstream.engine.vllm.kv_capacity import kv_of_server
from midstream.engine.vllm.routes_proof import prove_routes
from midstream.engine.vllm.sampling_proof import Proved, prove_numbers
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.server_proofs import LoadsFail, ServerProofs
from midstream.engine.vllm.session_kv import SessionKv
from midstream.engine.vllm.staging import Staging, VllmStager
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

#: For the prompt that is scored in a pause at the start.
FROZEN_S_MAX = 60.0
#: A pause that waits for a switch looks so often whether an update has stopped the server meanwhile.
LOOK_S = 1.0
#: Instead of a version: the server's KV cache holds numbers that are not finite.
SPOILT = "not finite"


class VllmLife(ServerProofs):
    """url: of a running server to attach to, instead of starting one. cache_dir: of the replica."""

    GRAMMARS = True

    # It is of an adapter, so the weights under it stay.
    _crossing = False
    # The KV cache of the attached server holds numbers that are not finite.
    _spoilt = False
    # What a boot learns of its server. vLLM 0.20 gives all alternatives the name of the sampled token.
    _names_alternatives = True
    _ranks = 1
    _numbers = Proved()
    # What it lacks of routes, with the reasons.
    _no_routes: Mapping[str, str] = UNROUTED
    # Why it is unknown which weights computed KV; empty if its scheduler says so.
    _no_provenance = UNTOLD
    # Why nothing is checked in a pause; empty if weights are.
    _no_frozen_check = UNFROZEN

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
        directory, attached = model_dir.resolve(), url is not None
        server = VllmServer(
            directory,
            settings,
            url=url,
            served_name=NAME,
            cores=cores,
            gpus=gpus,
            log=cache_dir / "vllm.log",
        )
        super().__init__(directory, settings, server, attached=attached)
        # An attached server may belong to another user or run on another machine. It reads snapshots from the shared directory.
        self._staging = Staging(cache_dir, share=0.0) if attached else Staging(cache_dir)
        self._kv = SessionKv(lambda: self._control, lambda: bool(self._requests))
        # Also of a server without weight transfer, which never holds it.
        self._fence = self._make_fence()
        self.in_place = self._fence if settings.weight_transfer else None
        self._stager = VllmStager(self._staging, self._boot.while_alive, self._boot.in_background)
        self._adapter_dir = cache_dir / FOLDER

    def _make_fence(self) -> VllmInPlace:
        return VllmInPlace(
            self._settings.weight_transfer,
            lambda: self._control,
            self._boot,
            self._control_lock,
            self._stand_still,
            self._move_on,
            self._give_up,
        )

    async def _launch(self) -> None:
        try:
            await super()._launch()
        except LoadsFail as error:
            # Nothing is loaded in the next one, which serves policies on its own weights.
            self._loads_fail = str(error)
            logger.warning("vLLM is started once more, without snapshots of full weights: %s", error)
            await self._launch()
            return
        self._fence.began()
        self._boot.in_background(self._kv.keep_looking(), "what vLLM's KV cache holds")

    def _make_control(self) -> Control:
        server = self._server
        return Control(
            server.url,
            server.headers,
            self._settings.load_s_max,
            self._watch.held_up,
            versions=server.names_weights,
        )

    async def _reach(self, timeout_s: float) -> None:
        await self._control.reach_workers(timeout_s)

    async def _take_over(self) -> None:
        if self._attached:
            # Its last user may have left it in any state.
            self._server.check_reload(experts=bool(self._shape.moe_layers))
            await self._check_unspoilt()
            await self._control.pause(clear_cache=True)
            if self._server.extension in EXTENSIONS:
                await self._control.reload(self._model_dir)
            await self._reload_and_compare()
        await self._control.set_version(self._epochs.serving_version)
        if self.in_place is not None:
            self._ranks = await self._control.ranks()
        if self._attached:
            await self._control.resume()
        await self._check_seeds()
        await self._hear()
        self._no_policies = self._server.no_adapters
        self._no_crossing = UNCROSSED
        self._adapters = None if self._no_policies else await self._prove_adapters()
        self._no_full = ""
        self._no_short_swap = await self._prove_loads()
        self._numbers = await prove_numbers(self._server, self._control, self._sizes)
        self._no_routes = await prove_routes(self._server, self._control, self._sizes, self._shape)
        self._no_frozen_check = await self._prove_frozen_check()
        self._no_provenance = await self._prove_provenance()
        url, headers = self._server.url, self._server.headers
        capacity = await kv_of_server(url, headers, HEALTH_S_MAX, self._server.max_model_len)
        await self._kv.begin(capacity, self._server, self._sizes)

    async def _prove_frozen_check(self) -> str:
        """Why nothing is checked in a pause; empty if it is."""
        if self._server.scheduler != SCHEDULER:
            return UNFROZEN
        scorer = self._scorer(self._own, in_pause=True)
        await self._control.pause()
        try:
            async with asyncio.timeout(FROZEN_S_MAX):
                await score(scorer, *self._sizes)
        except TimeoutError:
            logger.warning("this vLLM has no frozen_check: it did not score a prompt in a pause")
            return UNFROZEN
        finally:
            await self._control.resume()
        return ""

    async def _check_unspoilt(self) -> None:
        """Raises ServerFailed for an attached server that has to be restarted. Its version remembers it."""
        if self._spoilt:
            await self._control.set_version(SPOILT)
            self._spoilt = False
        if await self._control.version(ANSWER_S_MAX) == SPOILT:
            raise ServerFailed(
                f"the vLLM server at {self._server.url} computed numbers that are not finite, and its KV cache still holds "
                "them: restart it"
            )

    async def _hear(self) -> None:
        """Learn from an answer what this version says. Raises ServerFailed when an attached server does not say how much of
        a prompt was cached."""
        prompt = proof_prompt(*self._sizes)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerateRequest(
            request_id="first", prompt=prompt, sampling=sampling, want_logprobs=True, top_logprobs=2
        )
        salt = secrets.token_hex(16)
        data = protocol.body(request, 0, model=self._server.served_name, salt=salt, stream=False)
        url = self._server.url
        answer = await self._server.ask(protocol.PATH, data, FIRST_S_MAX)
        try:
            chunk = protocol.read_answer(answer, request.top_logprobs)
        except InvalidAnswer as error:
            raise ServerFailed(f"the vLLM server at {url}: {error}") from error
        self._epochs.confirmed = chunk.spans is not None
        self._names_alternatives = all(len({t.token_id for t in c.top}) == len(c.top) for c in chunk.tokens)
        if self._attached and chunk.cached is None:
            raise ServerFailed(
                f"the vLLM server at {url} does not say how much of a prompt was cached: start it with "
                "--enable-prompt-tokens-details"
            )

    def _card(self) -> EngineCard:
        server = self._server
        card = vllm_card(
            server.version,
            no_routes=self._no_routes,
            by_priority=server.by_priority,
            no_policies=self._no_policies,
            no_crossing=self._no_crossing,
            no_full_snapshots=self._no_full,
            no_numbers=self._numbers.lacks,
            no_digest=self._no_digest,
            no_frozen_check=self._no_frozen_check,
            no_provenance=self._no_provenance,
            no_session_kv=self._kv.lacks,
            no_short_swap=self._no_short_swap,
        )
        if self.in_place is None:
            return card
        return msgspec.structs.replace(
            card, weight_transfer=self._settings.weight_transfer, ranks=self._ranks
        )

    async def close(self) -> None:
        await super().close()
        self._staging.close()

    def drop_staged(self) -> None:
        self._stager.drop()

    def _give_up_spoilt(self, reason: str) -> None:
        self._spoilt = self._attached
        super()._give_up_spoilt(reason)

    def _end_boot(self, reason: str) -> None:
        super()._end_boot(reason)
        self._fence.ended(reason)

    async def _set_paused(self, paused: bool) -> None:
        while not await self._locks():
            if self._fence.keeps_still:
                # Whatever ends that heeds it.
                self._paused = paused
                return
        try:
            await self._call_paused(paused)
        finally:
            self._control_lock.release()

    async def _locks(self) -> bool:
        """Whether the control lock was taken. Not while tensors come: a trainer may be slow. Raises EngineDied."""
        self._boot.check()
        if self._fence.keeps_still:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._control_lock.acquire()
        except TimeoutError:
            return False

    async def _call_paused(self, paused: bool) -> None:
        """With the control lock."""
        self._boot.check()
        if self._fence.has_written:
            # The switch to it resumes the server, unless it is paused then.
            self._paused = paused
            return
        await super()._call_paused(paused)

    async def _stand_still(self) -> None:
        try:
            await self._stager.rest()
        except StagingFailed as error:
            raise CallFailed(str(error)) from error
        self._computing.clear()
        if not (self._paused and self._no_frozen_check):
            await self._fence.until_unchecked()
        if not self._paused:
            await self._control.stop()

    async def _move_on(self) -> None:
        if not self._paused:
            await self._control.resume()
            self._computing.set()
