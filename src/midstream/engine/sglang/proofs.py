"""What an SGLang server is seen to do at each start, before anything is asked of it.

Always holds: a server that fails one of these is not used. They are: its log-probabilities are the raw model's, of the tokens
that they stand beside. KV is shared under one key, never under two, and is gone after a flush. Weights load in place. A stream
that crosses a switch says of each token which weights sampled it, and loses none. What a server may lack and serve is proved
behind that (features_proof.py).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from midstream.core.types import BASE_SNAPSHOT, GenerateRequest, GenerationEvent, SamplingParams
from midstream.engine.base import spread_ids
from midstream.engine.servers.chunks import Chunk, InvalidAnswer
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.engine import CONNECT_S_MAX
from midstream.engine.servers.labels import ChoiceLabels, Epochs
from midstream.engine.servers.model import Shape
from midstream.engine.servers.process import FIRST_S_MAX
from midstream.engine.servers.switching import TOLERANCE, NotExact, Unchanged, prove_reload, score, switch
from midstream.engine.sglang import protocol
from midstream.engine.sglang.arguments import UNREAD
from midstream.engine.sglang.choice import SglangChoice, SglangScorer
from midstream.engine.sglang.control import SglangControl
from midstream.engine.sglang.features_proof import FeatureProofs
from midstream.engine.sglang.server import SglangServer
from midstream.http.call import open_stream

#: Tokens of a prompt, and of a greedy answer to it.
PROMPT, ANSWER = 24, 4
#: A temperature that a log-probability must not depend on.
HOT = 3.0
#: Tokens of the streams that are to cross a switch. One that has ended by then proves nothing.
CROSSING = (64, 512, 4096)


def new_name() -> str:
    """Of a request at a server. SGLang aborts every request whose name begins with the one given, so all have one length."""
    return secrets.token_hex(16)


@dataclass
class SglangProofs:
    """epochs: of the server, which has begun. One switch is added to them."""

    server: SglangServer
    control: SglangControl
    epochs: Epochs
    shape: Shape
    model_dir: Path

    async def run(self) -> str:
        """Why it gives no digest of its weights; empty if it does. Raises NotExact, CallFailed, ServerRefused, WrongWeights."""
        await self.numbers()
        await self.isolation()
        no_digest = await self.reload()
        await self.labels()
        return no_digest

    async def unproved(self) -> dict[str, str]:
        """The features that a server may lack and serve, and why. Raises CallFailed."""

        async def ask(
            request: GenerateRequest, key: str | None = None, routes_start: int | None = None
        ) -> Chunk:
            return await self._ask(request, key or new_name(), routes_start=routes_start)

        asked = self._asked(PROMPT, 1)
        return await FeatureProofs(ask, self.shape, asked, self.server.returns_routes).unproved()

    async def numbers(self) -> None:
        greedy = self._asked(PROMPT, ANSWER, top_logprobs=2)
        cold = await self._ask(greedy, new_name())
        if len(cold.tokens) != ANSWER:
            raise NotExact(f"SGLang gave {len(cold.tokens)} tokens where {ANSWER} were asked for")
        for token in cold.tokens:
            best = token.top[0] if token.top else None
            if best is None or (best.token_id, best.logprob) != (token.token_id, token.logprob):
                raise NotExact(f"SGLang says that {best} is better than its greedy token {token}")
        hot = await self._ask(self._asked(PROMPT, 1, top_logprobs=2, temperature=HOT), new_name())
        _compare(
            [t.logprob for t in cold.tokens[0].top],
            [t.logprob for t in hot.tokens[0].top],
            "depend on the temperature: set SGLANG_RETURN_ORIGINAL_LOGPROB=1",
        )
        prompt = (*greedy.prompt, *(token.token_id for token in cold.tokens))
        asked = GenerateRequest(
            request_id="proof", prompt=prompt, sampling=SamplingParams(max_tokens=0), prompt_records=ANSWER
        )
        scored = await self._scorer().score(asked, new_name())
        if isinstance(scored, str):
            raise NotExact(f"SGLang did not score a prompt: {scored}")
        _compare(
            [t.logprob for t in cold.tokens],
            [r.logprob for r in scored],
            "are others for a prompt than for an answer",
        )

    async def isolation(self) -> None:
        request = self._asked(max(PROMPT, 2 * self.server.page + 1), 1)
        one, other = new_name(), new_name()
        for key, shares, what in (
            (one, False, "a new extra_key finds cached KV"),
            (one, self.server.caches, "one extra_key does not find its own KV"),
            (other, False, "two of extra_key share KV, so tenants and snapshots would"),
        ):
            if bool((await self._ask(request, key)).cached) != shares:
                raise NotExact(f"SGLang does not keep KV apart by extra_key: {what}")
        await self.control.flush()
        if (await self._ask(request, one)).cached:
            raise NotExact("SGLang keeps cached KV over /flush_cache")

    async def reload(self) -> str:
        """Why there is no digest."""
        scores = partial(score, self._scorer(), self.shape.vocab_size, self.server.max_model_len)
        try:
            before = await self.control.checksum()
        except ServerRefused as error:
            before = str(error)
        await prove_reload(scores, partial(self._load, self.model_dir))
        try:
            return "" if await self.control.checksum() == before else UNREAD
        except ServerRefused as error:
            return f"{UNREAD}: {error}"

    async def _load(self, directory: Path) -> None:
        await self.control.pause()
        await self.control.reload(directory)
        await self.control.resume()

    async def labels(self) -> None:
        for count in CROSSING:
            size = min(count, self.server.max_model_len - PROMPT)
            if await self._crosses(self._asked(min(PROMPT, self.server.max_model_len - size), size)):
                return
        raise NotExact(
            "no stream of SGLang was still running when its weights were switched: labels were not proved"
        )

    async def _crosses(self, request: GenerateRequest) -> bool:
        """Whether a stream crossed a switch. Raises NotExact when its labels are not right."""
        events: asyncio.Queue[GenerationEvent] = asyncio.Queue()
        labels = ChoiceLabels(self.epochs, len(request.prompt), clean=True)
        choice = SglangChoice(request, 0, labels, self.epochs, self.shape, events.put_nowait, name=new_name())
        server = self.server
        data = protocol.body(
            request, 0, name=choice.name, salt=new_name(), stream=True, by_priority=server.by_priority
        )
        choice.response = await open_stream(
            server.url, "POST", protocol.PATH, data, choice.on_body, CONNECT_S_MAX, server.headers
        )
        choice.response.ended.add_done_callback(lambda ended: choice.ended(ended.result()))
        crossed = False

        def on_switch() -> None:
            nonlocal crossed
            crossed = not choice.over
            self.epochs.begin(BASE_SNAPSHOT)
            choice.switched()

        try:
            async with asyncio.timeout(FIRST_S_MAX):
                event = await events.get()
                load = partial(self.control.reload, self.model_dir)
                version = self.epochs.next_version(BASE_SNAPSHOT)
                await switch(self.control, load, load, version, on_switch)
                count = len(event.tokens)
                while event.finish is None and event.error is None:
                    event = await events.get()
                    count += len(event.tokens)
        except (TimeoutError, Unchanged) as error:
            raise NotExact(f"a stream of SGLang did not cross a switch of its weights: {error}") from error
        finally:
            choice.close()
        if event.error is not None:
            raise NotExact(f"a stream of SGLang that crossed a switch: {event.error}")
        if count != request.sampling.max_tokens:
            raise NotExact(f"a stream of SGLang has {count} of {request.sampling.max_tokens} tokens")
        return crossed

    def _scorer(self) -> SglangScorer:
        server = self.server
        return SglangScorer(
            server.url, server.headers, self.epochs, self.shape, new_name, by_priority=server.by_priority
        )

    def _asked(
        self, prompt: int, count: int, *, top_logprobs: int = 0, temperature: float = 0.0
    ) -> GenerateRequest:
        ids = spread_ids(prompt, self.shape.vocab_size)
        sampling = SamplingParams(max_tokens=count, temperature=temperature)
        return GenerateRequest(request_id="proof", prompt=ids, sampling=sampling, top_logprobs=top_logprobs)

    async def _ask(self, request: GenerateRequest, key: str, *, routes_start: int | None = None) -> Chunk:
        data = protocol.body(request, 0, name=new_name(), salt=key, stream=False, routes_start=routes_start)
        answer = await self.server.ask(protocol.PATH, data, FIRST_S_MAX, ServerRefused)
        try:
            chunk = protocol.read_answer(answer, request.top_logprobs)
        except InvalidAnswer as error:
            raise NotExact(f"SGLang's answer cannot be used: {error}") from error
        if chunk.error is not None:
            raise NotExact(chunk.error)
        return chunk


def _compare(one: list[float], other: list[float], what: str) -> None:
    off = max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)
    if len(one) != len(other) or not off <= TOLERANCE:
        raise NotExact(f"SGLang's log-probabilities {what} (they differ by {off:.3g})")
