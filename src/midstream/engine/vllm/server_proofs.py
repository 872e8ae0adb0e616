"""What a server is seen to do with adapters and with loads of weights, at each start, before anything is asked of it.

Owns: what this boot was seen to do, and the reasons for what it lacks.
Always holds: a server that computes wrongly with what it has is not used. What it lacks beside that is missing on its card.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from functools import partial
from pathlib import Path

from midstream.core.server_settings import VllmSettings
from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.servers.engine import ServedEngine
from midstream.engine.servers.requests import ServedWeights
from midstream.engine.servers.switching import NotExact, Score, prove_reload, score
from midstream.engine.vllm.adapters import Adapters, Crossing
from midstream.engine.vllm.arguments import (
    EXTENSIONS,
    NO_LORA,
    NOT_OURS,
    UNCROSSED,
    UNREAD,
    UNSTAGED,
    unheard,
)
from midstream.engine.vllm.beside import WorkerWeights, prove_staging
from midstream.engine.vllm.digest import prove_digest, read_weights
from midstream.engine.vllm.in_place import VllmInPlace
from midstream.engine.vllm.proof import NoAdapters, Proof
from midstream.engine.vllm.provenance_proof import prove_provenance
from midstream.engine.vllm.scoring import Scorer
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.staging import Staged, VllmStager
from midstream.engine.vllm.swap import Control

logger = logging.getLogger(__name__)


class LoadsFail(Exception):
    """The server computes with adapters, and does not load weights under them as it should."""


class ServerProofs(ServedEngine[Staged]):
    """The server behind a VllmEngine, as its proofs see it."""

    _settings: VllmSettings
    _server: VllmServer
    _control: Control
    _fence: VllmInPlace
    _stager: VllmStager
    _adapter_dir: Path
    # None: it serves no policies, and the reason follows.
    _adapters: Adapters | None = None
    _no_policies = NO_LORA
    # Why its streams keep the adapter that they began with; empty if they cross swaps.
    _no_crossing = UNCROSSED
    # Why no full weights are loaded beside its policies; empty if they are. So of every later boot once a load failed.
    _no_full = ""
    _loads_fail = ""
    # Why there is no digest of the weights; empty if there is one.
    _no_digest = UNREAD
    # Why its workers stage no weights; empty if they do.
    _no_short_swap = UNSTAGED

    @abstractmethod
    async def _cross(self, crossing: Crossing) -> tuple[float, int]:
        """As adapters.Cross has it."""

    @property
    def _own(self) -> ServedWeights:
        return ServedWeights(self._server.served_name, self._epochs)

    def _scorer(self, weights: ServedWeights, *, in_pause: bool = False) -> Scorer:
        server, epochs, name = self._server, weights.epochs, weights.name
        more = {
            "by_priority": server.by_priority,
            "in_pause": in_pause,
            "routed": not server.returns_routes,
        }
        return Scorer(server.url, server.headers, epochs, self._shape, name, **more)

    async def _check_seeds(self) -> None:
        """Each rank draws a step's tokens itself, and computes the next step with what it drew. Raises NotExact, CallFailed."""
        if self._server.extension not in EXTENSIONS:
            return
        seeds = set(await self._control.ask_workers("midstream_seed", {}, STEP_S_MAX))
        if len(seeds) > 1:
            # As texts, as vLLM sends them.
            found = ", ".join(sorted(map(str, seeds)))
            raise NotExact(
                f"vLLM's ranks have seeds {found}, so they draw unlike tokens: start all with one --seed"
            )

    async def _reload_and_compare(self) -> None:
        """Load the base weights once more, and find out whether their digest is the same then."""
        reload = partial(self._control.reload, self._model_dir)
        lacks = unheard(self._server.extension, several=self._server.data_parallel)
        self._no_digest = await prove_digest(self._control, lacks, reload)
        if self._no_digest:
            logger.warning("this vLLM has no weights_digest: %s", self._no_digest)

    async def _prove_loads(self) -> str:
        """Why no weights can be staged in the workers; "" if they can. Raises NotExact, LoadsFail."""
        self._stager.workers = None
        if self._adapters is None:
            if self._attached:
                return NOT_OURS
            return await self._prove_all_loads(partial(score, self._scorer(self._own), *self._sizes))
        self._no_full = NOT_OURS if self._attached else self._loads_fail
        if self._no_full:
            return self._no_full
        try:
            async with self._proof().beside(self._adapters.proven, self._own) as scores:
                return await self._prove_all_loads(scores)
        except (NotExact, ServerRefused) as error:
            raise LoadsFail(str(error)) from error

    async def _prove_all_loads(self, scores: Score) -> str:
        """In place and beside what serves. Raises NotExact, ServerRefused."""
        await prove_reload(scores, self._reload_and_compare)
        if not self._settings.stage_weights:
            return "vllm.stage_weights is false"
        if lacks := unheard(self._server.extension, several=self._server.data_parallel):
            return lacks
        reload = partial(self._control.reload, self._model_dir)
        workers = WorkerWeights(self._control, self._settings.load_s_max)
        why = await prove_staging(workers, scores, self._model_dir, reload, self._base_digest)
        self._stager.workers = None if why else workers
        return why

    async def _base_digest(self) -> str:
        """Before anything runs; "" if there is none."""
        return "" if self._no_digest else await read_weights(self._control, lambda: True)

    async def _prove_adapters(self) -> Adapters | None:
        """None: the server serves, but no adapters."""
        self._server.check_adapters(experts=bool(self._shape.moe_layers))
        try:
            proven = await self._proof().run(self._model_dir, self._own)
            self._no_crossing = await self._proof().why_not_crossed(proven, self._own)
        except NoAdapters as error:
            self._no_policies = str(error)
            logger.warning("vLLM serves no policies: %s", error)
            return None
        own = (self._epochs, self._check_alive, self._boot.in_background, self._fence.until_unheld)
        if self._no_crossing:
            logger.warning("this vLLM has no policy_crossing: %s", self._no_crossing)
        return Adapters(
            self._control, proven, self._adapter_dir, *own, cross=None if self._no_crossing else self._cross
        )

    async def _prove_provenance(self) -> str:
        """Why it is unknown which weights computed KV; "" if its scheduler says so. Raises CallFailed, ServerRefused."""
        proving = partial(prove_provenance, self._server, self._control, self._epochs, self._sizes)
        if self._adapters is None:
            return await proving()
        proof = self._proof()
        async with proof.adapter(self._adapters.proven) as name:
            return await proving((proof.policy, name))

    def _proof(self) -> Proof:
        return Proof(self._server, self._control, self._scorer, self._sizes, self._adapter_dir)
