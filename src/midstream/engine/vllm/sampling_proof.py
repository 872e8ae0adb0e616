"""The proof, at every start, that a vLLM server returns the raw and the sampling log-probability of a token, and what it was
drawn from.

The worker extension makes vLLM's sampler return both (worker_extension/midstream_vllm_sampler.py). Here a short prompt is
sampled with a temperature and with top_k. The raw log-probabilities of the best tokens then say what the sampling one must be.
And the raw numbers of a token that must match a grammar must be those of a token that need not. A bias that makes the two best
tokens equal must give a near tie, and one that sets them apart must give none. The sampling mask under top_k must be the best
tokens, and where only some tokens are allowed, these.

Always holds: a server that fails is used without the feature, and the reason is on its card.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from midstream.core.masks import kept_ids
from midstream.core.types import NEAR_GREEDY, NEAR_TOP_K, GenerateRequest, SamplingParams
from midstream.engine.servers.chunks import Chunk, InvalidAnswer, Token, alternatives
from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import proof_prompt
from midstream.engine.step import near_tie
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import (
    EXTENSIONS,
    NO_EXTENSION,
    NO_SCHEDULER,
    NUMBERS,
    SCHEDULER,
    UNPROVED,
)
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control

logger = logging.getLogger(__name__)

#: Of the worker extension: why a worker returns one number, and the dtype of its weights.
METHOD, DTYPE = "midstream_one_number", "midstream_dtype"
TOKENS, TOP_K, ALTERNATIVES, TEMPERATURE = 8, 4, 20, 0.7
#: One digit. No model has digits alone among its best tokens, unless they are forbidden the others.
GRAMMAR = "start: /[0-9]/"
#: In nats, between numbers that are computed from the same logits, and from those of another pass over the same prompt. In
#: bfloat16 a batch changes the rounding of the latter. Forbidden tokens differ by more, and some by thousands.
SAME, ANEW = 1e-3, 0.25
#: A bias beside which no two of the best tokens are near each other.
APART = 50.0


class OneNumber(Exception):
    """The server reports one log-probability per token. The message says why."""


class NoMasks(OneNumber):
    """The server does not say what was left for a draw."""


@dataclass(frozen=True)
class Proved:
    """lacks: those of NUMBERS that a server lacks, with the reasons. tie: which share of its largest logit a near tie is."""

    lacks: Mapping[str, str] = field(default_factory=lambda: UNPROVED)
    tie: float = 0.0

    @property
    def features(self) -> set[str]:
        return set(NUMBERS) - self.lacks.keys()


async def prove_numbers(server: VllmServer, control: Control, sizes: tuple[int, int]) -> Proved:
    """sizes: of the vocabulary and of the context. Raises CallFailed."""
    lacks: dict[str, str] = {}
    tie = 0.0
    try:
        await _check_workers(server, control)
        free = _asking(sizes)
        tokens = await _sample(server, free)
        check_sampling(tokens)
    except OneNumber as error:
        lacks = dict.fromkeys(NUMBERS, str(error))
    else:
        try:
            once = replace(free.sampling, max_tokens=1)
            check_raw(tokens, await _sample(server, replace(free, sampling=once, grammar=GRAMMAR)))
            await _prove_masks(server, free)
        except NoMasks as error:
            lacks = {"sampling_masks": str(error)}
        except OneNumber as error:
            # A mask comes with both numbers, under a grammar, too.
            lacks = dict.fromkeys(("constrained_logprobs", "sampling_masks"), str(error))
        try:
            tie = await _threshold(control)
            await _prove_ties(server, free, tokens[0], tie)
        except OneNumber as error:
            lacks["near_ties"] = str(error)
    for feature, why in lacks.items():
        logger.warning("this vLLM has no %s: %s", feature, why)
    return Proved(lacks, tie)


async def _check_workers(server: VllmServer, control: Control) -> None:
    """Raises OneNumber for a reason that the workers know."""
    if server.extension not in EXTENSIONS:
        raise OneNumber(NO_EXTENSION)
    try:
        answers = await control.ask_workers(METHOD, {}, STEP_S_MAX)
    except ServerRefused as error:
        raise OneNumber(f"its workers do not say whether they return both: {error}") from error
    for why in filter(None, answers):
        raise OneNumber(f"vLLM returns one log-probability per token: {why}")


async def _threshold(control: Control) -> float:
    """Raises OneNumber."""
    try:
        dtypes = set(await control.ask_workers(DTYPE, {}, STEP_S_MAX))
    except ServerRefused as error:
        raise OneNumber(f"its workers do not say of which dtype the weights are: {error}") from error
    return max(near_tie(dtype) for dtype in dtypes)


async def _prove_ties(server: VllmServer, asking: GenerateRequest, first: Token, tie: float) -> None:
    """first: the first token that `asking` gave. Raises OneNumber, CallFailed."""
    best, second, *_ = sorted(first.top, key=lambda top: top.logprob, reverse=True)
    biases = ({second.token_id: best.logprob - second.logprob}, {best.token_id: APART})
    for near, bias in zip((True, False), biases, strict=True):
        for mark, kind in ((NEAR_GREEDY, {"temperature": 0.0, "top_k": 0}), (NEAR_TOP_K, {"top_k": 1})):
            sampling = replace(asking.sampling, max_tokens=1, logit_bias=bias, **kind)
            (token, *_) = await _sample(server, replace(asking, sampling=sampling), tie)
            expected = mark if near else 0
            if token.near_tie != expected:
                raise OneNumber(
                    f"of two tokens {'alike' if near else 'apart'} vLLM's workers say {token.near_tie}, not {expected}"
                )


def _asking(sizes: tuple[int, int]) -> GenerateRequest:
    vocab_size, context = sizes
    prompt = proof_prompt(vocab_size, max(2, context - TOKENS))
    sampling = SamplingParams(
        max_tokens=max(1, min(TOKENS, context - len(prompt))), temperature=TEMPERATURE, top_k=TOP_K
    )
    best = min(ALTERNATIVES, vocab_size - 1)
    return GenerateRequest(
        request_id="both", prompt=prompt, sampling=sampling, top_logprobs=best, reproducible=False
    )


async def _prove_masks(server: VllmServer, asking: GenerateRequest) -> None:
    """Raises NoMasks, CallFailed."""
    if server.scheduler != SCHEDULER:
        raise NoMasks(NO_SCHEDULER)
    try:
        free = await _answer(server, asking, masks=True)
        few = sorted(top.token_id for top in free.tokens[0].top[1::2])
        limited = replace(asking.sampling, top_k=0, allowed_token_ids=tuple(few))
        chosen = await _answer(server, replace(asking, sampling=limited), masks=True)
    except OneNumber as error:
        raise NoMasks(str(error)) from error
    check_masks(free.tokens, free.masks)
    for token, mask in zip(chosen.tokens, chosen.masks, strict=True):
        _expect_mask(mask, token, few)


def check_masks(tokens: Sequence[Token], masks: Sequence[bytes]) -> None:
    """Raises NoMasks unless the tokens that were left are the best ones."""
    for token, mask in zip(tokens, masks, strict=True):
        best = sorted(token.top, key=lambda top: top.logprob, reverse=True)
        if best[TOP_K - 1].logprob - best[TOP_K].logprob >= SAME:
            _expect_mask(mask, token, sorted(top.token_id for top in best[:TOP_K]))


def _expect_mask(mask: bytes, token: Token, expected: Sequence[int]) -> None:
    try:
        found = kept_ids(mask, token.token_id)
    except ValueError as error:
        raise NoMasks(f"vLLM's workers say what is no mask: {error}") from error
    if found is None or [*found] != expected:
        left = "all tokens" if found is None else [*found]
        raise NoMasks(f"vLLM's workers say that {left} were left for a draw from {expected}")


async def _sample(server: VllmServer, request: GenerateRequest, tie: float = 0.0) -> Sequence[Token]:
    """Raises OneNumber, CallFailed."""
    return (await _answer(server, request, tie)).tokens


async def _answer(
    server: VllmServer, request: GenerateRequest, tie: float = 0.0, *, masks: bool = False
) -> Chunk:
    """Raises OneNumber, CallFailed."""
    salt, name = secrets.token_hex(16), server.served_name
    data = protocol.body(request, 0, model=name, salt=salt, stream=False, tie=tie, both=True, masks=masks)
    answer = await server.ask(protocol.PATH, data, ANSWER_S_MAX, OneNumber)
    try:
        return protocol.read_answer(answer, alternatives(request), both=True, masks=masks)
    except InvalidAnswer as error:
        raise OneNumber(f"vLLM's answer has no two log-probabilities: {error}") from error


def check_sampling(tokens: Sequence[Token]) -> None:
    """Raises OneNumber unless the sampling log-probabilities follow from the raw ones of the best tokens."""
    proved = 0
    for token in tokens:
        raw = sorted((best.logprob for best in token.top), reverse=True)
        own = [best.logprob for best in token.top if best.token_id == token.token_id]
        if len(raw) <= TOP_K or raw[TOP_K - 1] - raw[TOP_K] < SAME:
            # Of equal tokens vLLM may keep any.
            continue
        if token.sampling is None or not own or abs(own[0] - token.logprob) > SAME:
            raise OneNumber(f"vLLM drew token {token.token_id}, which is none of the {TOP_K} best")
        scaled = [value / TEMPERATURE for value in raw[:TOP_K]]
        expected = token.logprob / TEMPERATURE - _log_sum(scaled)
        if not abs(expected - token.sampling) <= SAME:
            raise OneNumber(
                f"the sampling log-probability {token.sampling:.4f} should be {expected:.4f}, as the raw ones say"
            )
        proved += 1
    if not proved:
        raise OneNumber("the model's best tokens are all alike, so nothing can be proved")


def check_raw(free: Sequence[Token], constrained: Sequence[Token]) -> None:
    """Raises OneNumber unless the first tokens have the same alternatives."""
    first, other = (
        [best.logprob for token in tokens[:1] for best in token.top] for tokens in (free, constrained)
    )
    alike = len(first) == len(other) and all(abs(a - b) <= ANEW for a, b in zip(first, other, strict=True))
    if not first or not alike:
        raise OneNumber("under a grammar vLLM's raw log-probabilities are of the tokens that it allows")


def _log_sum(values: Sequence[float]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))
