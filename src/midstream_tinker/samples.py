"""A Tinker sample as a completion of the OpenAI API, and the completion as a sample. Pure.

Always holds: an option that the completion does not have is refused by the field's name. Log-probabilities are those of the
distribution the tokens were drawn from. The token or the stop string that ended a sequence is part of it. Positions without a
log-probability are None, never a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.traces import Span
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import DrawnSequence, SampleBody, SampleResult, TinkerSamplingParams

# Samples of one request.
MAX_SAMPLES = 128
MAX_TOPK = 20
MAX_STOPS = 64
# The max_tokens of a sample without a limit: it is cut to the context.
UNBOUNDED = 2**31 - 1
_HEADER_REPLICA = "x-midstream-replica"
_HEADER_REASON = "x-midstream-route-reason"


class CheckedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A checked sample. echoed: how many of the last prompt tokens come with log-probabilities; 0: none. full: the prompt is
    scored, fills the context, and its sequences have no tokens."""

    prompt: tuple[int, ...]
    n: int
    params: TinkerSamplingParams
    prompt_logprobs: bool
    topk: int
    echoed: int
    full: bool = False

    def completion(self, model: str) -> bytes:
        """The body of the completions request."""
        params = self.params
        body: dict[str, Any] = {
            "model": model,
            "n": self.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "logprobs": True,
            **_length(0 if self.full else params.max_tokens),
            **_stop(params.stop),
        }
        if params.seed is not None:
            body["seed"] = _signed(params.seed)
        if self.echoed:
            body["echo_last"] = self.echoed
        if self.topk:
            body["top_logprobs"] = self.topk
        # The prompt comes last: the gateway hashes the bytes of a body from its prompt on.
        body["prompt"] = self.prompt
        return msgspec.json.encode(body)


def check(body: SampleBody, max_context: int | None = None) -> CheckedSample:
    """max_context: in tokens, if it is known. Raises TinkerRefusal (400) for what this server does not do."""
    for field in ("topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs"):
        if getattr(body, field) not in (None, 0):
            raise TinkerRefusal(400, f"{field} is not supported here", field)
    if body.record_stability_info:
        raise TinkerRefusal(400, "record_stability_info is not supported here", "record_stability_info")
    prompt = body.prompt.token_ids()
    _between(body.num_samples, 1, MAX_SAMPLES, "num_samples")
    _between(body.topk_prompt_logprobs, 0, MAX_TOPK, "topk_prompt_logprobs")
    _check_params(body.sampling_params)
    echoed = _echoed(body, len(prompt))
    return CheckedSample(
        prompt=prompt,
        n=body.num_samples,
        params=body.sampling_params,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk=body.topk_prompt_logprobs,
        echoed=echoed,
        # The SDK's compute_logprobs asks for one token, which it does not read.
        full=bool(echoed) and len(prompt) == max_context and body.sampling_params.max_tokens == 1,
    )


def _echoed(body: SampleBody, size: int) -> int:
    last = body.prompt_logprobs_last_n
    if last is not None:
        if not body.prompt_logprobs:
            message = "prompt_logprobs_last_n needs prompt_logprobs: true"
            raise TinkerRefusal(400, message, "prompt_logprobs_last_n")
        _between(last, 1, size - 1, "prompt_logprobs_last_n")
        return last
    return size if body.prompt_logprobs or body.topk_prompt_logprobs else 0


def _check_params(params: TinkerSamplingParams) -> None:
    where = "sampling_params"
    if params.max_tokens is not None:
        _between(params.max_tokens, 1, UNBOUNDED, f"{where}.max_tokens")
    if params.seed is not None:
        _between(params.seed, -(2**63), 2**64 - 1, f"{where}.seed")
    stop = () if params.stop is None else (params.stop,) if isinstance(params.stop, str) else params.stop
    if len({type(item) for item in stop}) > 1:
        raise TinkerRefusal(400, "stop is strings or token ids, not both", f"{where}.stop")
    if len(stop) > MAX_STOPS:
        raise TinkerRefusal(
            400, f"stop has at most {MAX_STOPS} sequences, {len(stop)} were given", f"{where}.stop"
        )
    if "" in stop:
        raise TinkerRefusal(400, "a stop string must not be empty", f"{where}.stop")


def _between(value: int, least: int, most: int, field: str) -> None:
    if not least <= value <= most:
        raise TinkerRefusal(400, f"{field} must be {least} to {most}, not {value}", field)


def _length(max_tokens: int | None) -> dict[str, Any]:
    behavior = "context_length_exceeded_behavior"
    if max_tokens is None:
        return {"max_tokens": UNBOUNDED, behavior: "truncate"}
    return {"max_tokens": max_tokens, behavior: "error"}


def _stop(stop: str | tuple[str | int, ...] | None) -> dict[str, Any]:
    """The end token ends a sequence beside the stop sequences; only an empty list switches it off."""
    if stop is None:
        return {}
    if isinstance(stop, str):
        return {"stop": [stop]}
    if not stop:
        return {"ignore_eos": True}
    return {"stop": stop} if isinstance(stop[0], str) else {"stop_token_ids": stop}


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


# -- the completion


class _Top(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Entry(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    sampling_logprob: float | None = None
    top_logprobs: tuple[_Top, ...] = ()


class _Content(msgspec.Struct, frozen=True):
    content: tuple[_Entry, ...]


class _Choice(msgspec.Struct, frozen=True):
    index: int
    finish_reason: str
    logprobs: _Content
    snapshots: tuple[Span, ...]
    prompt_snapshots: tuple[Span, ...] = ()


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details = _Details()


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]
    usage: _Usage = _Usage()


class CompletedSample(NamedTuple):
    """prompt_snapshots: over the prompt tokens with log-probabilities, what scored them; positions of the whole prompt."""

    result: SampleResult
    prompt_snapshots: tuple[Span, ...]

    def labels(self) -> set[str]:
        spans = [span for sequence in self.result.sequences for span in sequence.snapshots]
        return {span.snapshot for span in (*spans, *self.prompt_snapshots)}

    @property
    def last_snapshot(self) -> str | None:
        spans = [sequence.snapshots[-1] for sequence in self.result.sequences if sequence.snapshots]
        return spans[-1].snapshot if spans else None


_decoder = msgspec.json.Decoder(_Completion)


def sampled(
    sample: CheckedSample, body: bytes, headers: Mapping[str, str], key: str | None
) -> CompletedSample:
    """headers: of the response, lower-case names. Raises WorkFailed (server) when it is not an answer to `sample`."""
    try:
        completion = _decoder.decode(body)
    except NOT_JSON as error:
        raise WorkFailed(f"the server's completion cannot be read: {error}", "server") from error
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(sample.n)):
        raise WorkFailed(f"the server made {len(choices)} sequences instead of {sample.n}", "server")
    prompt = choices[0].logprobs.content[: sample.echoed]
    missing = len(sample.prompt) - sample.echoed
    if tuple(entry.token_id for entry in prompt) != sample.prompt[missing:] and sample.echoed:
        raise WorkFailed("the server scored another prompt", "server")
    result = SampleResult(
        sequences=tuple(_sequence(choice, sample) for choice in choices),
        prompt_logprobs=_prompt_logprobs(prompt, missing) if sample.prompt_logprobs else None,
        topk_prompt_logprobs=_topk(prompt, missing, sample.topk) if sample.topk else None,
        cached_tokens=completion.usage.prompt_tokens_details.cached_tokens,
        replica=headers.get(_HEADER_REPLICA),
        route_reason=headers.get(_HEADER_REASON),
        key=key,
    )
    spans = tuple(
        Span(snapshot=span.snapshot, start=span.start + missing, end=span.end + missing)
        for span in choices[0].prompt_snapshots
    )
    return CompletedSample(result, spans)


def _sequence(choice: _Choice, sample: CheckedSample) -> DrawnSequence:
    entries = choice.logprobs.content[sample.echoed :]
    logprobs = [entry.sampling_logprob for entry in entries]
    if not entries and not sample.full:
        raise WorkFailed("the server made a sequence without tokens", "server")
    if None in logprobs:
        raise WorkFailed(
            "the server's engine cannot compute log-probabilities under this temperature and these filters (feature"
            " sampling_logprobs); use temperature 1 or 0 without filters",
            "server",
        )
    return DrawnSequence(
        tokens=tuple(entry.token_id for entry in entries),
        logprobs=tuple(logprob for logprob in logprobs if logprob is not None),
        stopped=choice.finish_reason == "stop",
        snapshots=choice.snapshots,
    )


def _prompt_logprobs(prompt: tuple[_Entry, ...], missing: int) -> tuple[float | None, ...]:
    scored = [entry.logprob for entry in prompt]
    return (*_nothing(missing), *(scored if missing else [None, *scored[1:]]))


def _topk(
    prompt: tuple[_Entry, ...], missing: int, k: int
) -> tuple[tuple[tuple[int, float], ...] | None, ...]:
    rows = [tuple((top.token_id, top.logprob) for top in entry.top_logprobs[:k]) for entry in prompt]
    return (*_nothing(missing), *(rows if missing else [None, *rows[1:]]))


def _nothing(count: int) -> list[None]:
    return [None] * count
