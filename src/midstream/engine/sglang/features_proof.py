"""What an SGLang server is seen to do with requests that shape the draw, and with those that ask for routes.

Always holds: a feature whose proof did not pass is not declared, and the card says why. Numbers are the raw model's, whatever a
bias, a penalty or a grammar does to the draw. A penalty counts what was generated, and a grammar holds from the first token to
the end. A route is of the same pass, whether that was of a prompt, of an answer or found in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import Chunk, InvalidAnswer, Token
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import ALIKE, alike
from midstream.engine.servers.switching import TOLERANCE, NotExact
from midstream.engine.sglang.arguments import NO_ROUTES, PLUGIN
from midstream.engine.sglang.choice import decode_routes

#: A bias by which a token wins against all others. Two that both have it compete with each other alone.
LIFT = 50.0
#: Draws under penalties, and penalties by which one of two tokens gives way to the other, which begins so far behind.
DRAWS, PENALTY, AHEAD = 8, 2.0, 5.0
#: Where two scores are so close, either may win: a pass over a prompt is rounded otherwise than one over an answer.
MARGIN = 0.1
#: Tokens of an answer with routes.
ROUTED = 4


class Ask(Protocol):
    async def __call__(
        self, request: GenerateRequest, key: str | None = None, routes_start: int | None = None
    ) -> Chunk:
        """The answer, not streamed. key: of the cache; None: a new one. Raises NotExact, ServerRefused, CallFailed."""


@dataclass
class FeatureProofs:
    """asked: a greedy request, whose prompt the proofs have."""

    ask: Ask
    shape: Shape
    asked: GenerateRequest
    returns_routes: bool

    async def unproved(self) -> dict[str, str]:
        """Features, and why the server was not seen to have them. Raises CallFailed."""
        found: dict[str, str] = {}
        for proof, features in (
            (self.shaping, ("logit_bias", "grammars", "constrained_logprobs")),
            (self.penalties, ("logit_bias",)),
            (self.grammar, ("grammars", "constrained_logprobs")),
            (self.routes, ("routes",)),
        ):
            if set(features) <= found.keys():
                continue
            try:
                await proof()
            except (NotExact, ServerRefused) as error:
                found |= dict.fromkeys(features, str(error))
        return found

    async def shaping(self) -> None:
        """A bias makes the second best token the best, and leaves each number what it is."""
        plain = await self._draw(self.asked.prompt)
        best, second = plain.top[0], plain.top[1]
        shaped = await self._draw(
            self.asked.prompt, {second.token_id: best.logprob - second.logprob + MARGIN}
        )
        if shaped.token_id != second.token_id:
            raise NotExact(f"SGLang gave {best.token_id} where a bias made {second.token_id} the best token")
        _same(shaped.logprob, second.logprob, "a bias")
        for one, other in zip(plain.top, shaped.top, strict=True):
            _same(other.logprob, one.logprob, "a bias")

    async def penalties(self) -> None:
        """Two tokens compete, and each draw is what the penalties make of their numbers. The prompt counts for nothing."""
        pair = [top.token_id for top in (await self._draw(self.asked.prompt)).top]
        prompt = (*self.asked.prompt, *(DRAWS * [pair[1]]))
        raw = await self._numbers(prompt, pair)
        lifts = [LIFT + AHEAD, LIFT + raw[0] - raw[1]]
        penalties = {"presence_penalty": PENALTY, "frequency_penalty": PENALTY}
        shaped = self._with(max_tokens=DRAWS, logit_bias=dict(zip(pair, lifts, strict=True)), **penalties)
        drawn = await self.ask(replace(shaped, prompt=prompt))
        made, turned = [token.token_id for token in drawn.tokens], False
        for at, token in enumerate(drawn.tokens):
            raw = await self._numbers((*prompt, *made[:at]), pair)
            counts = [made[:at].count(one) for one in pair]
            held = [PENALTY * (count + bool(count)) for count in counts]
            free = raw[0] + lifts[0] - raw[1] - lifts[1]
            ahead = free - held[0] + held[1]
            best = pair[ahead < 0]
            if token.token_id not in pair or (abs(ahead) > MARGIN and token.token_id != best):
                raise NotExact(f"SGLang drew {token.token_id} where penalties make {best} the best token")
            _same(token.logprob, raw[pair.index(token.token_id)], "a penalty")
            turned |= abs(free) > MARGIN and free * ahead < 0
        if len(made) != DRAWS or not turned:
            raise NotExact(f"no penalty of SGLang was seen to change one of {len(made)} draws")

    async def grammar(self) -> None:
        """One of two tokens, then a third, then the end."""
        plain = await self._draw(self.asked.prompt)
        ends = self.shape.eos_token_ids
        other = [i for i in range(self.shape.vocab_size) if i not in (plain.token_id, *ends)]
        one, two, last = other[:3]
        drawn = await self.ask(
            replace(
                self._with(max_tokens=3 if ends else 2, stop_token_ids=ends),
                grammar=f"start: (<[{one}]> | <[{two}]>) <[{last}]>",
            )
        )
        made = [token.token_id for token in drawn.tokens]
        if (
            made[0] not in (one, two)
            or made[1:2] != [last]
            or (ends and made[2:3] not in [[i] for i in ends])
        ):
            raise NotExact(f"SGLang does not hold answers to a grammar: {made}")
        raw = await self._numbers(self.asked.prompt, (one, two))
        if abs(raw[0] - raw[1]) > MARGIN and made[0] != (one, two)[raw[1] > raw[0]]:
            raise NotExact(f"SGLang drew {made[0]} where a grammar leaves a better token")
        numbers = [raw[made[0] == two], *await self._numbers((*self.asked.prompt, made[0]), [last])]
        for token, number in zip(drawn.tokens, numbers, strict=False):
            _same(token.logprob, number, "a grammar")

    async def routes(self) -> None:
        """The passes over an answer choose as those over the same tokens in a prompt, and as the cache says."""
        if not self.shape.moe_layers or not self.returns_routes:
            raise NotExact(NO_ROUTES)
        size = len(self.asked.prompt)
        answer = await self.ask(self._with(max_tokens=ROUTED), routes_start=size - 1)
        drawn = self._decoded(answer, size - 1, ROUTED)
        whole = replace(
            self._with(max_tokens=1),
            prompt=(*self.asked.prompt, *(token.token_id for token in answer.tokens[:-1])),
        )
        count = len(whole.prompt)
        found = [self._decoded(await self.ask(whole, "routes", 0), 0, count) for _ in range(2)]
        for other, what in ((drawn, "an answer"), (found[1][size - 1 :], "cached tokens")):
            if alike(found[0][size - 1 :], other, self.shape) < ALIKE:
                raise NotExact(f"SGLang gives {what} other routes than the same tokens of a prompt")
        if alike(found[0], found[1], self.shape) < ALIKE:
            raise NotExact("SGLang gives a prompt other routes when it is cached")

    def _decoded(self, chunk: Chunk, first: int, count: int) -> list[bytes]:
        if chunk.routes is None:
            raise NotExact("SGLang returned no routes (routed_experts)")
        try:
            return decode_routes(chunk.routes, self.shape, first=first, count=count)
        except InvalidAnswer as error:
            raise NotExact(f"SGLang returned routes that cannot be used: {error}") from error

    def _with(self, **sampling: object) -> GenerateRequest:
        given = SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return replace(self.asked, sampling=given, top_logprobs=2)

    async def _draw(self, prompt: Sequence[int], bias: dict[int, float] | None = None) -> Token:
        chunk = await self.ask(replace(self._with(logit_bias=bias or {}), prompt=tuple(prompt)))
        if len(chunk.tokens) != 1 or len(chunk.tokens[0].top) != 2:
            raise NotExact(f"SGLang gave {chunk.tokens} where a token with two alternatives was asked for")
        return chunk.tokens[0]

    async def _numbers(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """The log-probability of each of these tokens behind the prompt."""
        found = [await self._draw(prompt, {token: 2 * LIFT}) for token in tokens]
        if (given := [one.token_id for one in found]) != [*tokens]:
            raise NotExact(f"SGLang gave {given} where a bias made {[*tokens]} the best tokens")
        return [one.logprob for one in found]


def _same(one: float, other: float, what: str) -> None:
    if not abs(one - other) <= TOLERANCE:
        raise NotExact(
            f"SGLang's log-probabilities under {what} are not the raw model's ({one:.3g}, {other:.3g}): {PLUGIN}"
        )
