"""The proof, at every start, that a vLLM server says which experts computed each token.

The worker extension has vLLM note what its routers choose (worker_extension/midstream_vllm_routes.py). Here two prompts are
answered beside each other. Then each of them is computed once more with its answer behind it. A pass over a token must have
chosen the same experts both times, in nearly all layers.

Always holds: a server that fails is used without the feature, and the reason is on its card.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from msgspec.structs import replace

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import Chunk, InvalidAnswer
from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import ALIKE, InvalidRoutes, alike
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import proof_prompt
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import EXTENSIONS, NO_EXTENSION, NO_SCHEDULER, SCHEDULER
from midstream.engine.vllm.routes import routes_with
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control

logger = logging.getLogger(__name__)

#: Of the worker extension: why a worker does not say it.
METHOD = "midstream_no_routes"
TOKENS = 8


class NoRoutes(Exception):
    """The message says why."""


async def why_no_routes(server: VllmServer, control: Control, sizes: tuple[int, int], shape: Shape) -> str:
    """Why tokens have no routes; empty if they have. sizes: of the vocabulary and of a context. Raises CallFailed."""
    if server.returns_routes:
        return ""
    try:
        await _check_workers(server, control, shape)
        vocab_size, context = sizes
        prompt = proof_prompt(vocab_size, max(2, context - TOKENS))
        drawn = max(1, min(TOKENS, context - len(prompt) - 1))
        proof = _Proof(server, shape, drawn)
        await asyncio.gather(proof.prove(prompt), proof.prove(prompt[::-1]))
    except NoRoutes as error:
        if shape.moe_layers:
            logger.warning("this vLLM has no routes: %s", error)
        return str(error)
    return ""


async def _check_workers(server: VllmServer, control: Control, shape: Shape) -> None:
    """Raises NoRoutes."""
    if not shape.moe_layers:
        raise NoRoutes("the model has no experts")
    if server.extension not in EXTENSIONS:
        raise NoRoutes(NO_EXTENSION)
    if server.scheduler != SCHEDULER:
        raise NoRoutes(NO_SCHEDULER)
    try:
        answers = await control.ask_workers(METHOD, {}, STEP_S_MAX)
    except ServerRefused as error:
        raise NoRoutes(f"its workers do not say whether they note routes: {error}") from error
    for why in filter(None, answers):
        raise NoRoutes(why)


class _Proof:
    """drawn: tokens of an answer."""

    def __init__(self, server: VllmServer, shape: Shape, drawn: int) -> None:
        self._server = server
        self._shape = shape
        self._drawn = drawn

    async def prove(self, prompt: tuple[int, ...]) -> None:
        """Raises NoRoutes, CallFailed."""
        sampling = SamplingParams(max_tokens=self._drawn, temperature=0.0)
        asked = GenerateRequest(request_id="routed", prompt=prompt, sampling=sampling, reproducible=False)
        answer = await self._ask(asked, len(prompt) - 1)
        found = self._read(answer, len(prompt) - 1, len(answer.tokens))
        whole = (*prompt, *(token.token_id for token in answer.tokens[:-1]))
        again = replace(asked, prompt=whole, sampling=replace(sampling, max_tokens=1))
        every = self._read(await self._ask(again, 0), 0, len(whole))
        if alike(every[len(prompt) - 1 :], found, self._shape) < ALIKE:
            raise NoRoutes("vLLM gives an answer other routes than the same tokens of a prompt")

    async def _ask(self, request: GenerateRequest, first: int) -> Chunk:
        name, salt = self._server.served_name, secrets.token_hex(16)
        data = protocol.body(request, 0, model=name, salt=salt, stream=False, passes_from=first)
        answer = await self._server.ask(protocol.PATH, data, ANSWER_S_MAX, NoRoutes)
        try:
            return protocol.read_answer(answer)
        except InvalidAnswer as error:
            raise NoRoutes(f"vLLM's answer cannot be read: {error}") from error

    def _read(self, chunk: Chunk, first: int, count: int) -> list[bytes]:
        """The routes of so many passes."""
        if chunk.error is not None:
            raise NoRoutes(chunk.error)
        try:
            return routes_with(chunk.passes, self._shape, first=first, count=count)
        except InvalidRoutes as error:
            raise NoRoutes(f"vLLM returned routes that cannot be used: {error}") from error
