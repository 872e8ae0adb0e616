"""The JSON of a vLLM server's `POST /inference/v1/generate` (vLLM 0.20 to 0.32), with token ids only.

Owns: the request body of one choice, the chunks of a stream, and an answer in one piece. No I/O.
Always holds:
- A body gives every sampling parameter, so no default of the server or of the model applies.
- An answer that does not look as expected raises InvalidAnswer. A log-probability is asked for with every token, and is never
  made up.
"""

from __future__ import annotations

import re
import struct
from functools import partial
from itertools import pairwise
from math import isfinite, nan
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.types import NEAR_TIES, GenerateRequest, TokenRecord, TopLogprob
from midstream.engine.servers.chunks import (
    Chunk,
    EventReader,
    InvalidAnswer,
    RoutedPasses,
    Token,
    alternatives,
    choice_seed,
    excerpt,
    tidy,
)
from midstream.engine.servers.labels import KvSpans
from midstream.engine.servers.requests import problem_at_servers
from midstream.engine.step import GREEDY_BELOW, SUM_ROUNDING
from midstream.engine.vllm.masks import is_mask, read_mask
from midstream.engine.vllm.routes import is_rows, read_rows
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import (
    INFINITE,
    ITSELF,
    KV,
    MARK,
    MASK,
    NEAR,
    RANK_BASE,
    ROUTES,
    SESSION,
    TIE_PLACE,
)
from midstream.engine.vllm.worker_extension.midstream_vllm_scheduler import IN_PAUSE

PATH = "/inference/v1/generate"
#: vLLM raises temperatures from GREEDY_BELOW on to at least this one.
TEMPERATURE_MIN = 1e-2
#: vLLM's value for a log-probability that is NaN or -inf.
NOT_FINITE = -9999.0
#: The priority of midstream's own checks, at a server that orders by it. vLLM takes lower numbers first; others have 0 or more.
URGENT = -1
#: Of versions up to 0.28.
NO_RANKS = "this version of vLLM gives tokens no rank, which would carry the number"
# The messages of vLLM. The decoder skips members that are not listed.


class Top(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float
    rank: int | None = None


class _Ranked(Token, frozen=True):
    rank: int | None = None


class _RankedWithTop(_Ranked, frozen=True):
    top_logprobs: tuple[Top, ...] = ()


#: What is read of a token. vLLM always sends more.
T = TypeVar("T", bound=Token)


class _Logprobs(msgspec.Struct, Generic[T], frozen=True):
    content: tuple[T, ...] | None = None


class _Span(msgspec.Struct, frozen=True, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, Generic[T], frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs[T] | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None
    weight_versions: tuple[_Span, ...] | None = None
    # midstream's scheduler puts it there, and other numbers (midstream_vllm_numbers.py).
    sampling_mask: tuple[tuple[int, ...], ...] | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Message(msgspec.Struct, Generic[T], frozen=True):
    choices: tuple[_Choice[T], ...] = ()
    usage: _Usage | None = None
    error: _Error | str | None = None


class _Score(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None = None


class _PromptScores(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[int, _Score] | None] | None = None


_PLAIN: msgspec.json.Decoder[_Message[Any]] = msgspec.json.Decoder(_Message[Token])
_RANKED: msgspec.json.Decoder[_Message[Any]] = msgspec.json.Decoder(_Message[_Ranked])
_WITH_TOP: msgspec.json.Decoder[_Message[Any]] = msgspec.json.Decoder(_Message[_RankedWithTop])
_SCORES = msgspec.json.Decoder(_PromptScores)
_token_id = attrgetter("token_id")
_logprob = attrgetter("logprob")
#: How versions up to 0.28 name a token beside its log-probability.
_NAMED, _NAME = b'"token_id:', re.compile(rb'"token":\s?"token_id:(-?\d+)"')


class ChunkReader(EventReader):
    """top: `alternatives` of its request. both: the request asked for both log-probabilities. kv: and which weights compute KV.
    masks: and for sampling masks."""

    def __init__(self, top: int = 0, *, both: bool = False, kv: bool = False, masks: bool = False) -> None:
        super().__init__(partial(_read, top=top, both=both, kv=kv, masks=masks))


def read_answer(
    data: bytes, top: int = 0, *, both: bool = False, kv: bool = False, masks: bool = False
) -> Chunk:
    """An answer that was not streamed, with one choice. The others: as of a ChunkReader. Raises InvalidAnswer."""
    chunk = _read(data, top, both=both, kv=kv, masks=masks)
    if chunk.error is None and chunk.finish is None:
        raise InvalidAnswer("no choice of the answer has ended")
    return msgspec.structs.replace(chunk, done=True)


def _read(data: bytes, top: int, *, both: bool, kv: bool, masks: bool) -> Chunk:
    if _NAMED in data:
        data = _NAME.sub(rb'"token_id":\1', data)
    try:
        message = (_WITH_TOP if top else _RANKED if both else _PLAIN).decode(data)
    except NOT_JSON as error:
        raise InvalidAnswer(f"{error}: {excerpt(data)}") from error
    if message.error is not None:
        text = message.error if isinstance(message.error, str) else message.error.message
        return Chunk(error=f"vLLM: {tidy(text)}")
    cached = None
    if message.usage is not None and message.usage.prompt_tokens_details is not None:
        cached = message.usage.prompt_tokens_details.cached_tokens
    if not message.choices:
        return Chunk(cached=cached)
    if len(message.choices) != 1:
        raise InvalidAnswer(f"{len(message.choices)} choices where one was asked for")
    choice = message.choices[0]
    tokens = _tokens(choice, top, both=both)
    lost = None
    for token in tokens:
        if not token.logprob > NOT_FINITE or (token.sampling is not None and not isfinite(token.sampling)):
            lost = f"the model's log-probability of token {token.token_id} is not finite"
    versions = choice.weight_versions
    spans = None if versions is None else tuple([(v.version, v.start, v.end) for v in versions])
    ended = (choice.finish_reason, spans, choice.routed_experts, cached)
    said = choice.sampling_mask or ()
    passes = _passes(said) if said and lost is None else ()
    told = tuple([_told(n) for n in said if not (is_rows(n) or (masks and is_mask(n)))]) if kv else ()
    left = _masks(said, tokens) if masks and lost is None else ()
    return Chunk(tokens, *ended, lost, not_finite=lost is not None, kv=told, masks=left, passes=passes)


def _passes(said: tuple[tuple[int, ...], ...]) -> tuple[RoutedPasses, ...]:
    try:
        return tuple([read_rows(numbers) for numbers in said if is_rows(numbers)])
    except (ValueError, OverflowError) as error:
        raise InvalidAnswer(str(error)) from error


def _masks(said: tuple[tuple[int, ...], ...], tokens: tuple[Token, ...]) -> tuple[bytes, ...]:
    try:
        found = tuple([read_mask(numbers) for numbers in said if is_mask(numbers)])
    except (ValueError, OverflowError) as error:
        raise InvalidAnswer(str(error)) from error
    if len(found) != len(tokens):
        raise InvalidAnswer(f"{len(found)} sampling masks of {len(tokens)} tokens")
    return found


def _told(numbers: tuple[int, ...]) -> tuple[int, KvSpans]:
    """What the worker extension wrote: tokens before, then the epoch and the first position of each span."""
    before, *spans = numbers or (-1,)
    starts = spans[1::2]
    rising = all(one < other for one, other in pairwise(starts))
    if before < 0 or not spans or len(spans) % 2 or starts[0] != 0 or not rising:
        raise InvalidAnswer(f"{list(numbers)} do not say which weights computed KV")
    return before, tuple(zip(spans[::2], starts, strict=True))


def _tokens(choice: _Choice[Any], top: int, *, both: bool) -> tuple[Token, ...]:
    ids = choice.token_ids or ()
    content: tuple[Any, ...] = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    scored = tuple(map(_token_id, content))
    if scored != ids:
        raise InvalidAnswer(f"log-probabilities of tokens {list(scored)} beside tokens {list(ids)}")
    if both:
        return tuple([Token(t.token_id, t.logprob, _best(t, top), *_drawn(t)) for t in content])
    return tuple([Token(t.token_id, t.logprob, _best(t, top)) for t in content]) if top else content


def _best(token: Any, top: int) -> tuple[TopLogprob, ...]:
    """The `top` best tokens. vLLM puts the sampled token first, whatever its rank, and cuts the list at that length."""
    if not top:
        return ()
    if not any(t.rank for t in token.top_logprobs):
        # Older versions give no ranks.
        ordered = sorted(token.top_logprobs, key=_logprob, reverse=True)
        return tuple([TopLogprob(t.token_id, t.logprob) for t in ordered[:top]])
    ranked = sorted([(t.rank, t.token_id, t.logprob) for t in token.top_logprobs if t.rank and t.rank <= top])
    return tuple([TopLogprob(token.token_id if i == ITSELF else i, logprob) for _, i, logprob in ranked])


def _drawn(token: _Ranked) -> tuple[float, int]:
    """The sampling log-probability and the near ties, as the worker extension wrote them. NaN: it is not finite."""
    near_tie, bits = divmod((token.rank or 0) - RANK_BASE, TIE_PLACE)
    if not 0 <= near_tie < 1 << len(NEAR_TIES):
        found = NO_RANKS if token.rank is None else f"its rank is {token.rank}"
        raise InvalidAnswer(f"no sampling log-probability of token {token.token_id}: {found}")
    if bits >= INFINITE:
        return nan, near_tie
    # The subtraction makes no negative zero.
    return 0.0 - float(struct.unpack("<f", bits.to_bytes(4, "little"))[0]), near_tie


def prompt_records(
    data: bytes, prompt: tuple[int, ...], last: int, top: int, snapshot: str
) -> tuple[TokenRecord, ...]:
    """Records of the last `last` prompt tokens (at most all), from the answer to a body with prompt_logprobs = top.

    No pass scores the first prompt token; its log-probability is 0.0. Raises InvalidAnswer.
    """
    try:
        scores = _SCORES.decode(data).prompt_logprobs
    except NOT_JSON as error:
        raise InvalidAnswer(f"{error}: {excerpt(data)}") from error
    if scores is None or len(scores) != len(prompt):
        found = "no prompt_logprobs" if scores is None else f"prompt_logprobs of {len(scores)} tokens"
        raise InvalidAnswer(f"{found} for a prompt of {len(prompt)}")
    start = max(len(prompt) - last, 0)
    return tuple([_prompt_record(i, prompt[i], scores[i], top, snapshot) for i in range(start, len(prompt))])


def _prompt_record(
    position: int, token: int, scores: dict[int, _Score] | None, top: int, snapshot: str
) -> TokenRecord:
    if position == 0:
        return TokenRecord(token, 0.0, None, snapshot)
    own = None if scores is None else scores.get(token)
    if scores is None or own is None:
        raise InvalidAnswer(f"prompt_logprobs at position {position} are not of token {token}")
    if not own.logprob > NOT_FINITE:
        raise InvalidAnswer(
            f"the log-probability of prompt token {token} at position {position} is not finite"
        )
    ranked = sorted((r.rank, i, r.logprob) for i, r in scores.items() if r.rank and r.rank <= top)
    best = tuple([TopLogprob(i, logprob) for _, i, logprob in ranked])
    return TokenRecord(token, own.logprob, None, snapshot, None, best, rank=own.rank or 0)


def problem(request: GenerateRequest) -> str | None:
    """The reason why vLLM cannot serve this request, for the user; None if it can."""
    s = request.sampling
    if GREEDY_BELOW <= s.temperature < TEMPERATURE_MIN:
        return f"temperature: vLLM takes what lies between 0 and {TEMPERATURE_MIN} as {TEMPERATURE_MIN}; use 0, or more"
    return problem_at_servers(request, "vLLM")


def body(
    request: GenerateRequest,
    choice: int,
    *,
    model: str,
    salt: str,
    stream: bool,
    prompt_logprobs: int | None = None,
    max_tokens: int | None = None,
    routes_start: int | None = None,
    by_priority: bool = False,
    in_pause: bool = False,
    both: bool = False,
    tie: float = 0.0,
    kv: tuple[int, int] | None = None,
    masks: bool = False,
    session: tuple[str, float, float] | None = None,
    passes_from: tuple[int, bool] | None = None,
) -> bytes:
    """The request body for one choice. The request must have no `problem`.

    salt: of the prefix cache, or "". vLLM takes at most 128 characters, none of them @ / \\ or NUL.
    prompt_logprobs: score the prompt with that many alternatives, not in a stream. vLLM then reads nothing from its cache.
    max_tokens: replaces the request's own limit less the emitted tokens. routes_start: routed_experts_prompt_start.
    by_priority: the server goes by priority; one that does not refuses them. in_pause: compute it in a pause, too, if it is
    urgent. both: ask for both log-probabilities, as the proof has shown that the server gives them. tie: and for near ties,
    within this share of the largest logit. masks: and for sampling masks. kv, session: the values of KV and SESSION, for
    midstream's scheduler. passes_from: have routes come with the tokens, from this pass of the prompt on; whether with weights.
    """
    emitted = request.emitted_of(choice)
    limit = request.sampling.max_tokens - len(emitted) if max_tokens is None else max_tokens
    if limit < 1:
        raise ValueError(f"choice {choice}: {limit} tokens are left to generate; vLLM generates at least 1")
    sampling = _sampling(request, choice)
    sampling["max_tokens"] = limit
    if prompt_logprobs is not None:
        sampling["prompt_logprobs"] = prompt_logprobs
    more = {MASK: masks, KV: kv, SESSION: session, ROUTES: passes_from}
    if extra := _marks(both=both, tie=tie, more=more):
        sampling["extra_args"] = extra
    if routes_start is not None:
        sampling["routed_experts_prompt_start"] = routes_start
    fields: dict[str, Any] = {
        "model": model,
        "token_ids": (*request.prompt, *emitted),
        "sampling_params": sampling,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if salt:
        fields["cache_salt"] = salt
    urgent = IN_PAUSE if in_pause else URGENT
    if by_priority and (priority := urgent if request.urgent else request.priority):
        fields["priority"] = priority
    if request.grammar is not None:
        # The grammar holds from the first token, also where vLLM has a reasoning parser.
        fields["reasoning_ended"] = True
    return msgspec.json.encode(fields)


def _marks(*, both: bool, tie: float, more: dict[str, Any]) -> dict[str, Any]:
    """What is asked for in `extra_args`."""
    marks = {MARK: both, NEAR: both and tie and (tie, SUM_ROUNDING), **more}
    return {name: value for name, value in marks.items() if value}


def _sampling(request: GenerateRequest, choice: int) -> dict[str, Any]:
    s = request.sampling
    greedy = s.temperature < GREEDY_BELOW
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": 0.0 if greedy else s.temperature,
        "top_p": min(s.top_p, 1.0),
        "top_k": max(s.top_k, 0),
        "min_p": max(s.min_p, 0.0),
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "stop_token_ids": s.stop_token_ids,
        # The request's stop_token_ids contain the end tokens, unless the request ignores them.
        "ignore_eos": True,
        "min_tokens": max(s.min_tokens - len(request.emitted_of(choice)), 0),
        # The replica makes the text and finds stop strings in it.
        "detokenize": False,
    }
    if s.logit_bias:
        fields["logit_bias"] = s.logit_bias
    if s.allowed_token_ids:
        fields["allowed_token_ids"] = s.allowed_token_ids
    if s.bad_words:
        # vLLM makes token ids of them itself.
        fields["bad_words"] = s.bad_words
    # Always, so that a NaN is seen: vLLM would continue with token 0. Of alternatives, one more than asked for: vLLM's list
    # begins with the sampled token and is cut to this length. The last of the best would be lost if that token is none of them.
    top = alternatives(request)
    fields["logprobs"] = top + 1 if top else 0
    if request.reproducible and not greedy:
        fields["seed"] = choice_seed(s.seed, choice, len(request.emitted_of(choice)))
    if request.grammar is not None:
        fields["structured_outputs"] = {"grammar": request.grammar}
    return fields
