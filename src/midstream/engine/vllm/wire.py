"""What goes over the wire to a vLLM server and comes back: `POST /inference/v1/generate` of vLLM 0.32, token ids only.

Owns: one choice of a request as a body; the chunks of a stream; an answer in one piece; what an error answer says. No I/O.
Always holds:
- A body says every sampling parameter itself, so no default of the server or of the model applies to it.
- What cannot be read as expected raises WireBroken; a log-probability that was asked for is never made up.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from midstream.types import GenerateRequest, TokenRecord, TopLogprob

#: The public type of a temperature goes lower; vLLM takes what is below the first as greedy and raises the rest to the second.
GREEDY_BELOW, TEMPERATURE_MIN = 1e-5, 1e-2
NOT_FINITE = -9999.0  # vLLM's word for a log-probability that is NaN or -inf
LINE_MAX = 1 << 28  # bytes; the routes of a long sequence are some 20 MB
MESSAGE_MAX = 1000  # characters of an error that are shown


class WireBroken(Exception):
    """The server's bytes are not what vLLM sends; the message says how."""


class Token(msgspec.Struct, frozen=True, gc=False):
    """logprob: of the raw model, nats; 0.0 when none was asked for. top: the best tokens that were asked for, best first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Chunk(msgspec.Struct, frozen=True):
    """What one message says of the choice.

    finish: vLLM's word for how it ended. spans: of its tokens by weight version, as (version, start, end), with the last
    chunk. routes: `routed_experts` (routes.py), with the last chunk. cached: prompt tokens whose KV was reused. error: a
    message for the user; nothing of use follows. done: nothing follows.
    """

    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    spans: tuple[tuple[str, int, int], ...] | None = None
    routes: str | None = None
    cached: int | None = None
    error: str | None = None
    done: bool = False


# What vLLM sends. Members that nobody needs are skipped by the decoder.


class Top(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float
    rank: int | None = None


class _TokenWithTop(Token, frozen=True):
    top_logprobs: tuple[Top, ...] = ()


class _Logprobs(msgspec.Struct, frozen=True):
    """Tokens as we want them already: of the alternatives, of which vLLM always sends one, none is looked at."""

    content: tuple[Token, ...] | None = None


class _LogprobsWithTop(_Logprobs, frozen=True):
    content: tuple[_TokenWithTop, ...] | None = None


class _Span(msgspec.Struct, frozen=True, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None
    weight_versions: tuple[_Span, ...] | None = None


class _ChoiceWithTop(_Choice, frozen=True):
    logprobs: _LogprobsWithTop | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Message(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | str | None = None


class _MessageWithTop(_Message, frozen=True):
    choices: tuple[_ChoiceWithTop, ...] = ()


class _Ranked(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None = None


class _PromptScores(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[int, _Ranked] | None] | None = None


_PLAIN = msgspec.json.Decoder(_Message)
_WITH_TOP = msgspec.json.Decoder(_MessageWithTop)
_SCORES = msgspec.json.Decoder(_PromptScores)
_ANYTHING = msgspec.json.Decoder(dict[str, Any])
_DONE = Chunk(done=True)


def alternatives(request: GenerateRequest) -> int | None:
    """How many alternatives the tokens of an answer to this request have; None: they have no log-probabilities either."""
    return request.top_logprobs if request.want_logprobs else None


class Lines:
    """The bytes of one event stream, cut anywhere, to chunks. top: `alternatives` of its request."""

    def __init__(self, top: int | None = 0) -> None:
        self._top = top
        self._parts: list[bytes] = []  # of a line that is not complete
        self._held = 0  # bytes in them

    def __repr__(self) -> str:
        return f"Lines(top={self._top}, {self._held} bytes of a line)"

    def feed(self, data: bytes) -> list[Chunk]:
        """The chunks that are complete with these bytes. Raises WireBroken; nothing is to be fed after that."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts, self._held = [], 0
        if rest:
            self._parts.append(rest)
            self._held += len(rest)
            if self._held > LINE_MAX:
                raise WireBroken(f"a line of more than {LINE_MAX} bytes")
        return [chunk for line in lines if line and (chunk := self._chunk(line)) is not None]

    def _chunk(self, line: bytes) -> Chunk | None:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            return _DONE if data == b"[DONE]" else _read(data, self._top)
        line = line.rstrip(b"\r")
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return None
        raise WireBroken(f"a line of the stream is no event: {_excerpt(line)}")


def read_answer(data: bytes, top: int | None = 0) -> Chunk:
    """An answer that was not streamed: all of its one choice. top: `alternatives` of its request. Raises WireBroken."""
    chunk = _read(data, top)
    if chunk.error is None and chunk.finish is None:
        raise WireBroken("an answer without a choice that ended")
    return msgspec.structs.replace(chunk, done=True)


def _read(data: bytes, top: int | None) -> Chunk:
    try:
        message: _Message = (_WITH_TOP if top else _PLAIN).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireBroken(f"{error}: {_excerpt(data)}") from error
    if message.error is not None:
        said = message.error
        return Chunk(error=f"vLLM: {_tidy(said if isinstance(said, str) else said.message)}")
    cached = None
    if message.usage is not None and message.usage.prompt_tokens_details is not None:
        cached = message.usage.prompt_tokens_details.cached_tokens
    if not message.choices:
        return Chunk(cached=cached)
    if len(message.choices) != 1:
        raise WireBroken(f"{len(message.choices)} choices where one was asked for")
    choice = message.choices[0]
    tokens = _tokens(choice, top)
    lost = None
    for token in tokens:
        if not token.logprob > NOT_FINITE:
            lost = f"the model's log-probability of token {token.token_id} is not finite"
    versions = choice.weight_versions
    spans = None if versions is None else tuple([(v.version, v.start, v.end) for v in versions])
    return Chunk(tokens, choice.finish_reason, spans, choice.routed_experts, cached, lost)


def _tokens(choice: _Choice, top: int | None) -> tuple[Token, ...]:
    ids = choice.token_ids or ()
    if top is None:
        return tuple([Token(i, 0.0) for i in ids])
    content = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    scored = tuple([token.token_id for token in content])
    if scored != ids:
        raise WireBroken(f"log-probabilities of tokens {list(scored)} beside tokens {list(ids)}")
    return tuple([Token(t.token_id, t.logprob, _best(t, top)) for t in content]) if top else content


def _best(token: Token, top: int) -> tuple[TopLogprob, ...]:
    """The `top` best. vLLM puts the sampled token first, whatever its rank, and cuts the list behind that many (`body`)."""
    assert isinstance(token, _TokenWithTop), "alternatives were read without their decoder"
    ranked = sorted([(t.rank, t.token_id, t.logprob) for t in token.top_logprobs if t.rank and t.rank <= top])
    return tuple([TopLogprob(i, logprob) for _, i, logprob in ranked])


def prompt_records(
    data: bytes, prompt: tuple[int, ...], last: int, top: int, snapshot: str
) -> tuple[TokenRecord, ...]:
    """Records of the last `last` prompt tokens (at most all) from an answer to a body with prompt_logprobs = top.

    The first prompt token, which nothing scores, has log-probability 0.0. Raises WireBroken.
    """
    try:
        scores = _SCORES.decode(data).prompt_logprobs
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireBroken(f"{error}: {_excerpt(data)}") from error
    if scores is None or len(scores) != len(prompt):
        found = "no prompt_logprobs" if scores is None else f"prompt_logprobs of {len(scores)} tokens"
        raise WireBroken(f"{found} for a prompt of {len(prompt)}")
    start = max(len(prompt) - last, 0)
    return tuple([_prompt_record(i, prompt[i], scores[i], top, snapshot) for i in range(start, len(prompt))])


def _prompt_record(
    position: int, token: int, scores: dict[int, _Ranked] | None, top: int, snapshot: str
) -> TokenRecord:
    if position == 0:
        return TokenRecord(token, 0.0, None, snapshot)
    own = None if scores is None else scores.get(token)
    if scores is None or own is None:
        raise WireBroken(f"prompt_logprobs at position {position} are not of token {token}")
    if not own.logprob > NOT_FINITE:
        raise WireBroken(f"the log-probability of prompt token {token} at position {position} is not finite")
    ranked = sorted((r.rank, i, r.logprob) for i, r in scores.items() if r.rank and r.rank <= top)
    best = tuple([TopLogprob(i, logprob) for _, i, logprob in ranked])
    return TokenRecord(token, own.logprob, None, snapshot, None, best)


def problem(request: GenerateRequest) -> str | None:
    """What of this request vLLM cannot do, in words for the user."""
    s = request.sampling
    if GREEDY_BELOW <= s.temperature < TEMPERATURE_MIN:
        return f"temperature: vLLM takes what lies between 0 and {TEMPERATURE_MIN} as {TEMPERATURE_MIN}; use 0, or more"
    if request.grammar is not None and request.want_logprobs:
        return (
            "logprobs: vLLM tells log-probabilities of an answer that must match a grammar only after tokens were forbidden, "
            "not the model's own; ask for none"
        )
    if request.grammar is not None and request.grammar.lstrip().startswith("{"):
        return "vLLM takes a grammar in the Lark dialect only, not as JSON"
    if any(request.emitted_of(choice) for choice in request.choices):
        if s.presence_penalty or s.frequency_penalty:
            return "vLLM cannot go on with a stream under presence_penalty or frequency_penalty: it would not count its tokens"
        if request.grammar is not None:
            return (
                "vLLM cannot go on with a stream that must match a grammar: it would begin the grammar again"
            )
    return None


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
) -> bytes:
    """The request for one choice. Only where `problem` is None.

    salt: of the prefix cache; vLLM takes at most 128 characters, none of them @ / \\ or NUL; "": none. prompt_logprobs: score
    the prompt with that many alternatives (not in a stream; vLLM then reads nothing from its prefix cache). max_tokens: instead
    of the request's own, less what is emitted. routes_start: routed_experts_prompt_start (routes.py).
    """
    emitted = request.emitted_of(choice)
    limit = request.sampling.max_tokens - len(emitted) if max_tokens is None else max_tokens
    if limit < 1:
        raise ValueError(f"choice {choice}: {limit} tokens are left to generate; vLLM generates at least 1")
    sampling = _sampling(request, choice)
    sampling["max_tokens"] = limit
    if prompt_logprobs is not None:
        sampling["prompt_logprobs"] = prompt_logprobs
    if routes_start is not None:
        sampling["routed_experts_prompt_start"] = routes_start
    said: dict[str, Any] = {
        "model": model,
        "token_ids": (*request.prompt, *emitted),
        "sampling_params": sampling,
        "stream": stream,
    }
    if stream:
        said["stream_options"] = {"include_usage": True}
    if salt:
        said["cache_salt"] = salt
    if request.grammar is not None:
        said["reasoning_ended"] = (
            True  # the grammar holds from the first token, also where vLLM has a reasoning parser
        )
    return msgspec.json.encode(said)


def _sampling(request: GenerateRequest, choice: int) -> dict[str, Any]:
    s = request.sampling
    greedy = s.temperature < GREEDY_BELOW
    said: dict[str, Any] = {
        "n": 1,
        "temperature": 0.0 if greedy else s.temperature,
        "top_p": min(s.top_p, 1.0),
        "top_k": max(s.top_k, 0),
        "min_p": max(s.min_p, 0.0),
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "stop_token_ids": s.stop_token_ids,
        "ignore_eos": True,  # the request's own stop_token_ids have the end tokens, unless they are to be ignored
        "min_tokens": 0,
        "detokenize": False,  # text, and what stops at it, is the replica's
    }
    if s.logit_bias:
        said["logit_bias"] = s.logit_bias
    if request.want_logprobs:
        # One more than asked for: the list that vLLM sends begins with the sampled token and is cut to this many, so the last
        # of the best would be lost whenever the sampled token is not among them.
        said["logprobs"] = request.top_logprobs + 1 if request.top_logprobs else 0
    if request.reproducible and not greedy:
        said["seed"] = choice_seed(s.seed, choice, len(request.emitted_of(choice)))
    if request.grammar is not None:
        said["structured_outputs"] = {"grammar": request.grammar}
    return said


def choice_seed(seed: int, choice: int, emitted: int) -> int:
    """63 bits; another one for every choice, and behind emitted tokens, so that no stream of numbers is used twice."""
    digest = hashlib.blake2b(f"{seed} {choice} {emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def error_of(status: int, data: bytes) -> str:
    """What an answer with an error status says, for the user."""
    said: Any = None
    try:
        answer = _ANYTHING.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = data.decode("utf-8", "replace")
    else:
        inner = answer.get("error", answer)
        said = inner.get("message", inner.get("detail")) if isinstance(inner, dict) else inner
    words = _tidy(said if isinstance(said, str) else "" if said is None else str(said))
    return f"vLLM answered {status}: {words}" if words else f"vLLM answered {status} without a word"


def _tidy(message: str) -> str:
    """One line, of bounded length, of characters that can be shown."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message[: 4 * MESSAGE_MAX]).split())
    return line if len(line) <= MESSAGE_MAX else line[: MESSAGE_MAX - 1] + "…"


def _excerpt(data: bytes) -> str:
    return ascii(data[:120].decode("utf-8", "replace"))
