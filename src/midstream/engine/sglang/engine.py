"""The Engine port over an unmodified SGLang server: what it asks of the server for a request, and its switches.

Always holds: a boot begins when the server has passed its proofs (proofs.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from midstream.core.kv import KvStats
from midstream.core.server_settings import SglangSettings
from midstream.core.types import EngineCard, GenerateRequest, ModelInfo, TokenRecord
from midstream.engine.base import StagingFailed
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.engine import Announced, ServedEngine
from midstream.engine.servers.labels import ChoiceLabels
from midstream.engine.servers.requests import ServedWeights, ServerRequest
from midstream.engine.servers.switching import StagedFiles, check_alone, switch
from midstream.engine.sglang import protocol
from midstream.engine.sglang.arguments import UNPROVED, UNREAD, sglang_card
from midstream.engine.sglang.choice import SglangChoice, SglangScorer
from midstream.engine.sglang.control import SglangControl
from midstream.engine.sglang.proofs import SglangProofs, new_name
from midstream.engine.sglang.server import SglangServer
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

UNTRIED = "SGLang ran with midstream on a CPU alone, never on a GPU: see docs/engines.md"


class SglangEngine(ServedEngine[StagedFiles]):
    """url: of a running server to attach to, instead of starting one. cache_dir: of the replica."""

    PATH = protocol.PATH

    _server: SglangServer
    _control: SglangControl
    _no_digest = UNREAD
    # Features that the server was not seen to have, and why.
    _unproved: Mapping[str, str] = UNPROVED
    _files: StagedFiles | None = None

    def __init__(
        self,
        model_dir: Path,
        settings: SglangSettings,
        cache_dir: Path,
        *,
        url: str | None = None,
        gpus: tuple[int, ...] = (),
    ) -> None:
        directory, log = model_dir.resolve(), cache_dir / "sglang.log"
        server = SglangServer(directory, settings, url=url, gpus=gpus, log=log)
        super().__init__(directory, settings, server, attached=url is not None)

    async def start(self) -> ModelInfo:
        logger.warning("%s", UNTRIED)
        return await super().start()

    def _make_control(self) -> SglangControl:
        server = self._server
        return SglangControl(server.url, server.headers, self._settings.load_s_max, self._watch.held_up)

    async def _reach(self, timeout_s: float) -> None:
        await self._control.reach_scheduler(timeout_s)

    async def _take_over(self) -> None:
        control = self._control
        if self._attached:
            # Its last user may have left it in any state.
            await control.pause()
            await control.reload(self._model_dir)
            await control.resume()
        await control.set_version(self._epochs.serving_version)
        proofs = SglangProofs(self._server, control, self._epochs, self._shape, self._model_dir)
        self._no_digest = await proofs.run()
        self._unproved = await proofs.unproved()
        # Nothing of the proofs is found again.
        await control.flush()
        size = self._server.page
        self._kv_cache = KvStats(block_tokens=size, total=self._server.kv_tokens // size)

    def _card(self) -> EngineCard:
        server = self._server
        return sglang_card(
            server.version,
            by_priority=server.by_priority,
            no_digest=self._no_digest,
            unproved=self._unproved,
        )

    def refuses(self, request: GenerateRequest) -> str | None:
        return protocol.problem(request, self._shape.eos_token_ids)

    async def _begin(self, run: ServerRequest, index: int, prompt: tuple[TokenRecord, ...] | None) -> None:
        if index not in run.open:
            return
        request = run.request
        salt, clean = self._salt(run)
        size = len(request.prompt) + len(request.emitted_of(index))
        labels = ChoiceLabels(self._epochs, size, clean=clean)
        choice = SglangChoice(
            request, index, labels, self._epochs, self._shape, run.put, name=new_name(), prompt=prompt
        )
        choice.salt = salt
        choice.on_abort = lambda: self._boot.in_background(self._abort(choice.name), "an abort")
        by_priority = self._server.by_priority
        data = protocol.body(
            request,
            index,
            name=choice.name,
            salt=salt,
            stream=True,
            routes_start=size - 1 if request.want_routes else None,
            by_priority=by_priority,
        )
        await self._send(run, index, choice, data)

    async def _abort(self, name: str) -> None:
        """At once. SGLang looks for lost connections, too, and takes seconds for that."""
        with suppress(CallFailed, ServerRefused):
            await self._control.abort(name)

    def _scorer_of(self, weights: ServedWeights) -> SglangScorer:
        server = self._server
        return SglangScorer(
            server.url, server.headers, weights.epochs, self._shape, new_name, by_priority=server.by_priority
        )

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._boot.check()
        self.drop_staged()
        try:
            await asyncio.to_thread(check_alone, directory)
        except OSError as error:
            raise StagingFailed(str(error)) from error
        self._files = StagedFiles(snapshot, directory)

    def drop_staged(self) -> None:
        self._files = None

    def _staged(self) -> StagedFiles | None:
        return self._files

    async def _renew(self) -> None:
        self._give_up_spoilt("weights failed their check, so SGLang begins again")
        self._boot.check()

    async def _switch(self, staged: StagedFiles, announced: Announced) -> int:
        crossed = 0

        def on_switch() -> None:
            nonlocal crossed
            crossed = self._begin_epoch(staged.snapshot, announced)

        version = self._coming_version = self._epochs.next_version(staged.snapshot)
        directories = (staged.directory, self._serving_dir)
        load, back = (partial(self._control.reload, files) for files in directories)
        switching = switch(self._control, load, back, version, on_switch, resume=not self._paused)
        await self._carry_out(switching, staged.snapshot)
        return crossed

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
