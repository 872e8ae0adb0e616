"""The JSON of an SGLang server's `POST /generate` (SGLang 0.5.23), with token ids only.

Owns: the request body of one choice, the chunks of a stream, an answer in one piece. No I/O.
Always holds:
- A body gives every sampling parameter that it may, so no default of the server or of the model applies.
- An answer that does not look as expected raises InvalidAnswer. So does one whose log-probabilities are not of its tokens,
  and a stream that lost a token: SGLang counts them in each message.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.types import GenerateRequest, TokenRecord, TopLogprob
from midstream.engine.servers.chunks import (
    Chunk,
    EventReader,
    InvalidAnswer,
    Token,
    alternatives,
    excerpt,
    tidy,
)
from midstream.engine.servers.requests import problem_at_servers
from midstream.engine.step import GREEDY_BELOW

PATH = "/generate"
#: The priority of midstream's own checks. Lower numbers go first; others have 0 or more.
URGENT = -1


# The messages of SGLang. The decoder skips members that are not listed. A score is a log-probability, an id and a text.
_Scored = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None


class _Span(msgspec.Struct, frozen=True, gc=False):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    weight_version: str
    completion_tokens: int
    cached_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: tuple[_Scored, ...] = ()
    output_top_logprobs: tuple[tuple[_Scored, ...] | None, ...] = ()
    input_token_logprobs: tuple[_Scored, ...] = ()
    input_top_logprobs: tuple[tuple[_Scored, ...] | None, ...] = ()
    weight_versions: tuple[_Span, ...] | None = None
    routed_experts: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    message: str


class _Message(msgspec.Struct, frozen=True):
    output_ids: tuple[int, ...] = ()
    meta_info: _Meta | None = None
    error: _Failure | str | None = None


_MESSAGE = msgspec.json.Decoder(_Message)


class SglangReader(EventReader):
    """top: `alternatives` of its request."""

    def __init__(self, top: int = 0) -> None:
        super().__init__(self._chunk)
        self._top = top
        self._count = 0

    def _chunk(self, message: bytes) -> Chunk:
        chunk = _chunk(_decode(message), self._top, self._count)
        self._count += len(chunk.tokens)
        return chunk


def read_answer(data: bytes, top: int = 0) -> Chunk:
    """An answer that was not streamed. Raises InvalidAnswer."""
    chunk = _chunk(_decode(data), top, 0)
    if chunk.error is None and chunk.finish is None:
        raise InvalidAnswer("the answer has not ended")
    return msgspec.structs.replace(chunk, done=True)


def _decode(data: bytes) -> _Message:
    try:
        return _MESSAGE.decode(data)
    except NOT_JSON as error:
        raise InvalidAnswer(f"{error}: {excerpt(data)}") from error


def _chunk(message: _Message, top: int, before: int) -> Chunk:
    """before: the tokens of the messages before."""
    if message.error is not None:
        text = message.error if isinstance(message.error, str) else message.error.message
        return Chunk(error=f"SGLang: {tidy(text)}")
    meta = message.meta_info
    if meta is None:
        raise InvalidAnswer("a message without meta_info")
    end = meta.finish_reason
    if end is not None and end.type == "abort" and end.message:
        return Chunk(error=f"SGLang: {tidy(end.message)}")
    ids, scores = message.output_ids, meta.output_token_logprobs
    scored = tuple([score[1] for score in scores])
    if scored != ids:
        raise InvalidAnswer(f"log-probabilities of tokens {list(scored)} beside tokens {list(ids)}")
    if before + len(ids) != meta.completion_tokens:
        raise InvalidAnswer(
            f"{meta.completion_tokens} tokens were generated, and {before + len(ids)} were sent"
        )
    best = meta.output_top_logprobs if top else ((),) * len(ids)
    if len(best) != len(ids):
        raise InvalidAnswer(f"alternatives for {len(best)} tokens beside {len(ids)} tokens")
    lost = [i for number, i, _ in scores if number is None or not isfinite(number)]
    spans = meta.weight_versions
    return Chunk(
        ()
        if lost
        else tuple([Token(s[1], s[0] or 0.0, _best(b, top)) for s, b in zip(scores, best, strict=True)]),
        None if end is None else end.type,
        None if spans is None else tuple([(span.version, span.start, span.end) for span in spans]),
        meta.routed_experts,
        cached=meta.cached_tokens,
        error=f"the model's log-probability of token {lost[0]} is not finite" if lost else None,
        not_finite=bool(lost),
        version=meta.weight_version,
    )


def _best(scored: Collection[_Scored] | None, top: int) -> tuple[TopLogprob, ...]:
    found = [TopLogprob(i, number) for number, i, _ in scored or () if number is not None]
    return tuple(found[:top])


def prompt_records(
    data: bytes, prompt: tuple[int, ...], last: int, top: int, snapshot: str, vocab_size: int
) -> tuple[TokenRecord, ...]:
    """Records of the last `last` prompt tokens (at most all), from the answer to a body that scores the prompt.

    No pass scores the first prompt token; its log-probability is 0.0. Raises InvalidAnswer.
    """
    # SGLang 0.5.23 calls the last id of the vocabulary 0 there, beside that id's own number.
    named = tuple([token if token < vocab_size - 1 else 0 for token in prompt])
    meta = _decode(data).meta_info
    scores = () if meta is None else meta.input_token_logprobs
    if meta is None or tuple([score[1] for score in scores]) != named:
        raise InvalidAnswer(
            f"log-probabilities of {len(scores)} other tokens than the {len(prompt)} of the prompt"
        )
    best = meta.input_top_logprobs if top else ((),) * len(prompt)
    if len(best) != len(prompt):
        raise InvalidAnswer(f"alternatives for {len(best)} tokens of a prompt of {len(prompt)}")
    records = []
    for position in range(max(len(prompt) - last, 0), len(prompt)):
        number, token = scores[position][0], prompt[position]
        if position == 0:
            records.append(TokenRecord(token, 0.0, None, snapshot))
            continue
        if number is None or not isfinite(number):
            raise InvalidAnswer(
                f"the log-probability of prompt token {token} at position {position} is not finite"
            )
        records.append(TokenRecord(token, number, None, snapshot, None, _best(best[position], top)))
    return tuple(records)


def problem(request: GenerateRequest, eos_token_ids: Collection[int]) -> str | None:
    """The reason why SGLang cannot serve this request, for the user; None if it can."""
    s, stops = request.sampling, request.sampling.stop_token_ids
    if stops and not set(eos_token_ids) <= set(stops):
        return "ignore_eos: SGLang ends at the model's own end tokens wherever it heeds stop_token_ids; leave one of them out"
    if s.temperature >= GREEDY_BELOW and s.temperature < 1e-4:
        return "temperature: what lies between 0 and 0.0001 is too little for SGLang; use 0, or more"
    if s.repetition_penalty != 1:
        return "repetition_penalty: SGLang does not count the tokens of the prompt; use presence_penalty or frequency_penalty"
    return problem_at_servers(request, "SGLang")


def body(
    request: GenerateRequest,
    choice: int,
    *,
    name: str,
    salt: str,
    stream: bool,
    score: bool = False,
    routes_start: int | None = None,
    by_priority: bool = False,
) -> bytes:
    """The request body for one choice. The request must have no `problem`.

    name: of the request at the server, by which it is aborted. salt: of the prefix cache. score: the prompt, too, and one token
    behind it. routes_start: the first pass whose experts are asked for. by_priority: the server goes by priority.
    """
    emitted = request.emitted_of(choice)
    limit = 1 if score else request.sampling.max_tokens - len(emitted)
    if limit < 1:
        raise ValueError(f"choice {choice}: {limit} tokens are left to generate")
    fields: dict[str, Any] = {
        "rid": name,
        "input_ids": (*request.prompt, *emitted),
        "sampling_params": _sampling(request, limit),
        # Always, so that a number that is none is seen.
        "return_logprob": True,
        "logprob_start_len": 0 if score else -1,
        "top_logprobs_num": request.top_logprobs if score else alternatives(request),
        "stream": stream,
        "extra_key": salt,
    }
    if routes_start is not None:
        fields |= {"return_routed_experts": True, "routed_experts_start_len": routes_start}
    if by_priority and (priority := URGENT if request.urgent else request.priority):
        fields["priority"] = priority
    return msgspec.json.encode(fields)


def _sampling(request: GenerateRequest, limit: int) -> dict[str, Any]:
    s = request.sampling
    fields: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": limit,
        "temperature": 0.0 if s.temperature < GREEDY_BELOW else s.temperature,
        "top_p": min(s.top_p, 1.0),
        "top_k": s.top_k if s.top_k > 0 else -1,
        "min_p": max(s.min_p, 0.0),
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "stop_token_ids": s.stop_token_ids,
        # It turns the request's own stop_token_ids off, too. A grammar ends with the model's end token: SGLang holds nothing to
        # it behind that.
        "ignore_eos": not s.stop_token_ids and request.grammar is None,
        "skip_special_tokens": False,
    }
    if s.logit_bias:
        fields["logit_bias"] = s.logit_bias
    if request.grammar is not None:
        # With llguidance (arguments.py), SGLang's name for the Lark dialect.
        fields["ebnf"] = request.grammar
    return fields
