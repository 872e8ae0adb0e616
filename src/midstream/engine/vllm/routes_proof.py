"""The proof, at every start, that a vLLM server says which experts computed each token.

The worker extension has vLLM note what its routers choose (worker_extension/midstream_vllm_routes.py). Here two prompts are
answered beside each other. Then each of them is computed once more with its answer behind it. A pass over a token must have
chosen the same experts both times, in nearly all layers, and given them the same weights.

Always holds: a server that fails is used without the feature, and the reason is on its card.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import Chunk, InvalidAnswer
from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import ALIKE, InvalidRoutes, alike
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import proof_prompt
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import EXTENSIONS, NO_EXTENSION, NO_SCHEDULER, ROUTED, SCHEDULER
from midstream.engine.vllm.routes import passes_of, routes_with
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control

logger = logging.getLogger(__name__)

#: Of the worker extension: why a worker does not say it.
METHOD = "midstream_no_routes"
TOKENS = 8
#: Of a server with --enable-return-routed-experts.
LATE = "vLLM's own routes come without them"


#: How far apart the weights of two passes over a token are, at most. In bfloat16 a batch changes the rounding.
NEAR = 0.1


class NoRoutes(Exception):
    """The message says why."""


class NoWeights(NoRoutes):
    """There are routes, without the weights of routers."""


async def prove_routes(
    server: VllmServer, control: Control, sizes: tuple[int, int], shape: Shape
) -> dict[str, str]:
    """What it lacks of ROUTED, with the reasons. sizes: of the vocabulary and of a context. Raises CallFailed."""
    if server.returns_routes:
        return {"router_weights": LATE}
    try:
        _check(server, shape)
        await _check_workers(control, weights=False)
        await _prove(server, sizes, shape, weights=False)
        await _check_workers(control, weights=True)
        await _prove(server, sizes, shape, weights=True)
    except NoWeights as error:
        return {"router_weights": str(error)}
    except NoRoutes as error:
        if shape.moe_layers:
            logger.warning("this vLLM has no routes: %s", error)
        return dict.fromkeys(ROUTED, str(error))
    return {}


def _check(server: VllmServer, shape: Shape) -> None:
    """Raises NoRoutes."""
    if not shape.moe_layers:
        raise NoRoutes("the model has no experts")
    if server.extension not in EXTENSIONS:
        raise NoRoutes(NO_EXTENSION)
    if server.scheduler != SCHEDULER:
        raise NoRoutes(NO_SCHEDULER)


async def _check_workers(control: Control, *, weights: bool) -> None:
    """Raises NoRoutes for a reason that the workers know."""
    kind = NoWeights if weights else NoRoutes
    try:
        answers = await control.ask_workers(METHOD, {"weights": weights}, STEP_S_MAX)
    except ServerRefused as error:
        raise kind(f"its workers do not say whether they note routes: {error}") from error
    for why in filter(None, answers):
        raise kind(why)


async def _prove(server: VllmServer, sizes: tuple[int, int], shape: Shape, *, weights: bool) -> None:
    """Raises NoRoutes, CallFailed."""
    vocab_size, context = sizes
    prompt = proof_prompt(vocab_size, max(2, context - TOKENS))
    proof = _Proof(server, shape, max(1, min(TOKENS, context - len(prompt) - 1)), weights=weights)
    await asyncio.gather(proof.prove(prompt), proof.prove(prompt[::-1]))


class _Proof:
    """drawn: tokens of an answer. weights: those of routers are looked at, too."""

    def __init__(self, server: VllmServer, shape: Shape, drawn: int, *, weights: bool) -> None:
        self._server = server
        self._shape = shape
        self._drawn = drawn
        self._weights = weights

    async def prove(self, prompt: tuple[int, ...]) -> None:
        """Raises NoRoutes, CallFailed."""
        sampling = SamplingParams(max_tokens=self._drawn, temperature=0.0)
        asked = GenerateRequest(request_id="routed", prompt=prompt, sampling=sampling, reproducible=False)
        size = len(prompt)
        answer = await self._ask(asked, size - 1)
        found = self._read(answer, size - 1, len(answer.tokens))
        whole = (*prompt, *(token.token_id for token in answer.tokens[:-1]))
        again = replace(asked, prompt=whole, sampling=replace(sampling, max_tokens=1))
        every = self._read(await self._ask(again, 0), 0, len(whole))[size - 1 :]
        (ours, weighed), (theirs, others) = (zip(*each, strict=True) for each in (found, every))
        if alike(ours, theirs, self._shape) < ALIKE:
            raise NoRoutes("vLLM gives an answer other routes than the same tokens of a prompt")
        if self._weights:
            _compare(*(self._by_expert(*each) for each in ((ours, weighed), (theirs, others))))

    def _by_expert(self, routes: Sequence[bytes], weights: Sequence[bytes]) -> np.ndarray:
        """[passes and layers, experts]: what each expert counts, 0 for those that were not chosen."""
        kind = "u1" if self._shape.num_experts <= 256 else "<u2"
        chosen = np.frombuffer(b"".join(routes), kind).reshape(-1, self._shape.top_k).astype(np.int64)
        found = np.zeros((len(chosen), self._shape.num_experts), dtype=np.float32)
        np.put_along_axis(found, chosen, np.frombuffer(b"".join(weights), "<f4").reshape(chosen.shape), 1)
        return found

    async def _ask(self, request: GenerateRequest, first: int) -> Chunk:
        name, salt = self._server.served_name, secrets.token_hex(16)
        wanted = (first, self._weights)
        data = protocol.body(request, 0, model=name, salt=salt, stream=False, passes_from=wanted)
        answer = await self._server.ask(protocol.PATH, data, ANSWER_S_MAX, NoRoutes)
        try:
            return protocol.read_answer(answer)
        except InvalidAnswer as error:
            raise NoRoutes(f"vLLM's answer cannot be read: {error}") from error

    def _read(self, chunk: Chunk, first: int, count: int) -> list[tuple[bytes, bytes | None]]:
        """Of so many passes."""
        if chunk.error is not None:
            raise NoRoutes(chunk.error)
        try:
            passes = passes_of(chunk)
            return routes_with(passes, self._shape, first=first, count=count, weights=self._weights)
        except InvalidRoutes as error:
            kind = NoWeights if self._weights else NoRoutes
            raise kind(f"vLLM returned routes that cannot be used: {error}") from error


def _compare(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises NoWeights unless experts that both passes chose count as much in both, in nearly all layers."""
    near = (np.abs(ours - theirs) <= NEAR * np.maximum(np.abs(ours), np.abs(theirs))).all(axis=1)
    if not (ours > 0).any() or near.mean() < ALIKE:
        raise NoWeights("vLLM gives the experts of an answer other weights than the same tokens of a prompt")
