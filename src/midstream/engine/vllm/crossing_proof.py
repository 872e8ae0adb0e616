"""The proof that a request that runs continues with another adapter, from a pause on, and that vLLM says where.

Two adapters are loaded under two names. While a request runs under the first name, vLLM stands still, and gets the files of the
second one under the first. The tokens before must be those of the first adapter, and the next one must not be. vLLM must name
the same token as the first of the new version. After that the first name must give the numbers of the second adapter.

Always holds: vLLM computes again when the proof ends, unless that fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import InvalidAnswer, Token, error_of
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.requests import ServedWeights
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import TOLERANCE, largest_difference, proof_prompt
from midstream.engine.vllm import protocol
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed, open_stream

#: How many tokens the request generates: more where all of them came before vLLM stood still.
CROSSING = (48, 192, 768)


@dataclass(frozen=True)
class CrossingProof:
    """name, other: of both adapters at the server. policy: of both. files: of both. own: the base weights.

    greedy: so many tokens under a name, after a prompt of a length. score: the log-probabilities of a prompt under a name.
    """

    server: VllmServer
    control: Control
    own: ServedWeights
    policy: str
    name: str
    other: str
    files: tuple[Path, Path]
    greedy: Callable[[str, int], Awaitable[list[Token]]]
    score: Callable[[ServedWeights], Awaitable[list[float]]]

    async def why_not(self, request: GenerateRequest) -> str | None:
        """Why not; "" if it does. None: the request was done too early. Raises ServerRefused, CallFailed."""
        alone = await self.greedy(self.name, request.sampling.max_tokens)
        stream = _Stream()
        data = protocol.body(request, 0, model=self.name, salt=secrets.token_hex(16), stream=True)
        response = await open_stream(
            self.server.url, "POST", protocol.PATH, data, stream.on_body, ANSWER_S_MAX, self.server.headers
        )
        response.ended.add_done_callback(lambda _: stream.begun.set())
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await stream.begun.wait()
                if response.status >= 400:
                    await response.ended
                    raise ServerRefused(error_of(self.server.WHO, response.status, stream.answer))
                before, after = await self._exchanged(stream)
                await response.ended
        except TimeoutError as error:
            raise CallFailed(f"a short request took longer than {ANSWER_S_MAX:g} s") from error
        finally:
            response.abort()
        if stream.problem or not stream.done:
            raise CallFailed(stream.problem or "vLLM's answer was cut short")
        if stream.at >= len(stream.tokens):
            return None
        return self._judge(stream, alone, before, after) or await self._compare()

    async def _exchanged(self, stream: _Stream) -> tuple[str, str]:
        """The versions before and after."""
        epochs = self.own.epochs
        before = epochs.serving_version
        await self.control.pause()
        try:
            stream.at = len(stream.tokens)
            await self.control.load_adapter(self.name, self.files[1], in_place=True)
            await self.control.set_version(epochs.next_of(self.policy))
            epochs.switched(self.policy)
        finally:
            await self.control.resume()
        return before, epochs.serving_version

    def _judge(self, stream: _Stream, alone: list[Token], before: str, after: str) -> str:
        at, tokens = stream.at, stream.tokens
        if self.own.epochs.confirmed:
            expected = ((before, 0, at), (after, at, len(tokens)))
            if stream.spans != expected:
                return f"vLLM says that weights sampled {stream.spans}, not {expected}"
        if not _alike(tokens[:at], alone[:at]):
            return "a request computed with another adapter before the pause in which vLLM got it"
        if _alike(tokens[at : at + 1], alone[at : at + 1]):
            return "a running request keeps the adapter that it began with"
        return ""

    async def _compare(self) -> str:
        mine = await self.score(ServedWeights(self.name, self.own.epochs))
        theirs = await self.score(ServedWeights(self.other, self.own.epochs))
        off = largest_difference(mine, theirs)
        return "" if off <= TOLERANCE else f"an adapter that takes a place is off by {off:.3g} there"


def asked(vocab_size: int, context: int, count: int, name: str) -> GenerateRequest:
    """`count` tokens, greedily."""
    prompt = proof_prompt(vocab_size, max(2, context - count))
    sampling = SamplingParams(max_tokens=max(1, min(count, context - len(prompt))), temperature=0.0)
    return GenerateRequest(request_id=name, prompt=prompt, sampling=sampling, want_logprobs=True)


class _Stream:
    """at: how many tokens had come when vLLM stood still. answer: what it said before the first one."""

    def __init__(self) -> None:
        self.answer = b""
        self.tokens: list[Token] = []
        self.spans: tuple[tuple[str, int, int], ...] | None = None
        self.begun = asyncio.Event()
        self.at = 0
        self.done, self.problem = False, ""
        self._reader = protocol.ChunkReader()

    def on_body(self, data: bytes) -> None:
        if self.problem:
            return
        if not self.tokens:
            self.answer += data
        try:
            chunks = self._reader.feed(data)
        except InvalidAnswer as error:
            chunks, self.problem = [], str(error)
        for chunk in chunks:
            self.tokens += chunk.tokens
            self.spans = chunk.spans or self.spans
            self.problem = chunk.error or self.problem
            self.done |= chunk.done
        if self.tokens or self.problem:
            self.begun.set()


def _alike(one: list[Token], other: list[Token]) -> bool:
    """The same tokens with the same numbers, up to the first that differs: a near tie, where its number is the same."""
    for mine, theirs in zip(one, other, strict=True):
        if not abs(mine.logprob - theirs.logprob) <= TOLERANCE:
            return False
        if mine.token_id != theirs.token_id:
            break
    return True
