"""A request after checking: every default filled in, every rule between fields applied. Pure.

Always holds: what stands in `Checked` can be served as it is; what cannot was refused with an error that names the field
and what it expects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from midstream.core.errors import ContextExceeded, InvalidRequest
from midstream.core.references import PARQUET
from midstream.core.types import ModelInfo, SamplingParams
from midstream.replica.request import fields
from midstream.replica.request.fields import AnswerForm, PromptOptions, TextOptions
from midstream.replica.request.schema import MAX_STOPS, ChatBody, CompletionBody, InferenceBody
from midstream.replica.text.reasoning_tags import FIELDS
from midstream.replica.text.tools import ToolPlan, plan_tools

#: OpenAI's default for completions. A chat may go up to the context.
COMPLETION_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_CHOICES_IN_ALL = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
#: The fields of a message beside its content that are looked at.
_TEXTS = frozenset((*FIELDS, "name", "refusal"))

Kind = Literal["completion", "chat"]
LogprobsFormat = Literal["content", "legacy"]
#: A column that may go into a file, by the field that asks for it there.
Column = Literal["routing_matrix_format", "sampling_mask"]
ROUTES: Final = "routing_matrix_format"
MASKS: Final = "sampling_mask"


class TextSize(Protocol):
    """The tokenizer's part in `check_room` (TextModel is one)."""

    def check_size(self, text: str, where: str, param: str, context: int) -> None:
        """Raises InvalidRequest if the text's bytes alone say that it cannot fit the context."""


class Prompt(msgspec.Struct, frozen=True):
    """Token ids, and the text they came from (None when the client sent ids). within: how many of the last tokens were sampled
    as the answer that is continued."""

    token_ids: tuple[int, ...]
    text: str | None = None
    within: int = 0


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What to return and how to sample, but for the prompt: its length sets `max_tokens` (see `sampling_for`)."""

    kind: Kind
    model: str | None
    n: int
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    max_tokens: int | None
    overflow_is_error: bool
    #: Its max_tokens and seed are placeholders.
    sampling: SamplingParams
    seed: int | None
    logprobs: LogprobsFormat | None
    top_logprobs: int
    #: How many of the last prompt tokens to echo; None: all of them.
    echo: int | None
    routes: bool
    #: Each token has, beside its route, the weights of its experts.
    router_weights: bool
    #: Each generated token has its sampling mask.
    masks: bool
    #: The records of generated tokens go into a file, and the response has its reference.
    referenced: bool
    #: These columns alone go into a file, and the response has references in Fireworks' form.
    stored: frozenset[Column] = frozenset()
    token_ids: bool
    raw_output: bool
    perf_metrics: bool
    prompt_cache: bool
    isolation_key: str | None
    prompt_cache_key: str | None
    session_id: str | None
    user: str | None
    answer: AnswerForm
    #: The whole answer must match something, whatever tools say.
    constrained: bool
    #: What the answer must match holds for thinking, too.
    constrain_reasoning: bool
    #: None: no tool may be called.
    tools: ToolPlan | None
    #: The tools as the template gets them, also where none may be called.
    listed_tools: list[dict[str, Any]] | None
    text: TextOptions
    template: PromptOptions
    #: How many alternatives of each prompt token the response has beside the choices; None: it has no prompt tokens there.
    prompt_logprobs: int | None
    #: The first prompt token that has a record in the response, beside the choices; None: none has.
    prompt_from: int | None
    #: The end of a stream repeats the numbers of all its tokens.
    cumulative: bool
    #: The response's id, without the wire's prefix; None: a new one.
    response_id: str | None
    #: The response says the versions at its first and its last token.
    versions: bool = False
    priority: int

    @property
    def scored(self) -> bool:
        """The tokens that are shown have records, in the response or in a file."""
        return self.logprobs is not None or bool(self.stored)

    @property
    def by_file(self) -> bool:
        """The answer ends with a file that is stored."""
        return self.referenced or bool(self.stored)


def check(
    body: CompletionBody | ChatBody,
    info: ModelInfo,
    prompt_from: int | None = None,
    *,
    cumulative: bool = False,
) -> Checked:
    """The rules between fields. prompt_from, cumulative: as in Checked. Raises InvalidRequest."""
    kind: Kind = "chat" if isinstance(body, ChatBody) else "completion"
    echo, max_tokens = _echo(body), _max_tokens(body, kind)
    prompt_from = prompt_from if body.prompt_logprobs is None else 0
    if max_tokens == 0 and echo == 0 and prompt_from is None:
        raise InvalidRequest("max_tokens: must be at least 1 unless the prompt is echoed", param="max_tokens")
    logprobs, top = _logprobs(body, kind)
    answer = fields.answer(body) if fields.FORMS(body) != (None, None) else fields.NO_FORM
    tools = plan_tools(body) if isinstance(body, ChatBody) and fields.TOOLS(body) != (None, None) else None
    constrained = answer.schema is not None or answer.rule is not None
    _check_end_tokens(body, info, constrained or (tools is not None and tools.constrained))
    return Checked(
        kind=kind,
        model=body.model,
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        stops=() if body.stop is None else _stops(body.stop),
        max_tokens=max_tokens,
        overflow_is_error=body.context_length_exceeded_behavior is not None and _overflow_is_error(body),
        sampling=_sampling(body, info, answer, max_tokens),
        seed=body.seed,
        logprobs=logprobs,
        top_logprobs=top,
        echo=echo,
        routes=fields.ROUTES(body) != fields.NO_ROUTES and _routes(body, logprobs, info),
        router_weights=body.return_router_weights is True and _router_weights(body, logprobs),
        masks=fields.MASKS(body) != (None, None) and _masks(body, logprobs),
        referenced=body.return_record_reference is True and _referenced(body, logprobs, top, echo),
        stored=_stored(body),
        token_ids=bool(body.return_token_ids),
        raw_output=bool(body.raw_output),
        perf_metrics=bool(body.perf_metrics_in_response),
        prompt_cache=body.prompt_cache_max_len != 0,
        isolation_key=fields.isolation_key(body) if fields.ISOLATION(body) != (None, None) else None,
        prompt_cache_key=body.prompt_cache_key,
        session_id=body.session_id,
        user=body.user,
        answer=answer,
        constrained=constrained,
        constrain_reasoning=bool(body.constrain_reasoning),
        tools=tools,
        listed_tools=(body.tools or None) if isinstance(body, ChatBody) else None,
        text=fields.PLAIN_TEXT if fields.TEXT[kind](body) in fields.NO_TEXT else fields.text_options(body),
        template=_template(body, kind),
        prompt_logprobs=None if body.prompt_logprobs is None else fields.scored_prompt(body),
        prompt_from=prompt_from,
        cumulative=cumulative,
        response_id=body.request_id,
        priority=body.priority or 0,
        versions=body.weight_version is not None,
    )


def _template(body: InferenceBody, kind: Kind) -> PromptOptions:
    """Most requests give none of the fields."""
    return (
        fields.PLAIN_PROMPT if fields.PROMPT[kind](body) in fields.NO_PROMPT else fields.prompt_options(body)
    )


def _check_end_tokens(body: InferenceBody, info: ModelInfo, constrained: bool) -> None:
    """The model's own end tokens end a constrained answer anyway, where its grammar does. Clients that render always send
    them."""
    if not body.stop_token_ids or not constrained:
        return
    if ends := sorted(set(body.stop_token_ids) - set(info.eos_token_ids)):
        message = f"stop_token_ids: only the model's end tokens can end an answer that must match a schema, got {ends}"
        raise InvalidRequest(message, param="stop_token_ids")


def _echo(body: InferenceBody) -> int | None:
    if body.echo is False:
        return 0
    if body.echo_last is not None:
        return body.echo_last
    return None if body.echo else 0


def _max_tokens(body: InferenceBody, kind: Kind) -> int | None:
    given, other = body.max_completion_tokens, body.max_tokens
    if given is not None and other is not None and given != other:
        message = "max_completion_tokens: must equal max_tokens when both are given"
        raise InvalidRequest(message, param="max_completion_tokens")
    if given is None:
        given = other
    return COMPLETION_MAX_TOKENS if given is None and kind == "completion" else given


def _logprobs(body: InferenceBody, kind: Kind) -> tuple[LogprobsFormat | None, int]:
    asked = body.logprobs
    if kind == "chat" and asked is not None and type(asked) is not bool:
        message = (
            "logprobs: must be true or false on chat completions; alternatives are asked for by top_logprobs"
        )
        raise InvalidRequest(message, param="logprobs")
    if asked is True:
        return "content", body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: requires logprobs: true", param="top_logprobs")
    if asked is None or asked is False:
        return None, 0
    return "legacy", asked


def _routes(body: InferenceBody, logprobs: LogprobsFormat | None, info: ModelInfo) -> bool:
    if not fields.wants_routes(body):
        return False
    param = "include_routing_matrix" if body.routing_matrix_format != PARQUET else "routing_matrix_format"
    if logprobs != "content" and body.routing_matrix_format != PARQUET:
        raise InvalidRequest(f"{param}: requires logprobs: true", param=param)
    if info.moe_layers == 0:
        raise InvalidRequest(
            f"{param}: this model is dense; it has no mixture-of-experts layers and no routes", param=param
        )
    return True


def _router_weights(body: InferenceBody, logprobs: LogprobsFormat | None) -> bool:
    """_routes says what else is wrong with a request for routes."""
    param = "return_router_weights"
    if logprobs != "content" or not fields.wants_routes(body):
        message = f"{param}: requires logprobs: true and include_routing_matrix: true"
        raise InvalidRequest(message, param=param)
    return True


def _masks(body: InferenceBody, logprobs: LogprobsFormat | None) -> bool:
    param = "return_sampling_mask"
    if body.return_sampling_mask and body.sampling_mask is None and logprobs != "content":
        raise InvalidRequest(f"{param}: requires logprobs: true", param=param)
    return bool(body.return_sampling_mask) or body.sampling_mask is not None


def _stored(body: InferenceBody) -> frozenset[Column]:
    """A column that is asked for in a file is not in the response, too."""
    asked: list[Column] = [name for name in (ROUTES, MASKS) if getattr(body, name) == PARQUET]
    return frozenset(asked)


def _referenced(
    body: InferenceBody, logprobs: LogprobsFormat | None, top_logprobs: int, echo: int | None
) -> bool:
    """A file has the columns of generated tokens, and no others."""
    param = "return_record_reference"
    if asked := sorted(_stored(body)):
        raise InvalidRequest(f"{param}: cannot go with {asked[0]}: {PARQUET}", param=param)
    if logprobs != "content":
        raise InvalidRequest(f"{param}: requires logprobs: true", param=param)
    if top_logprobs:
        raise InvalidRequest(
            f"{param}: a record file has no alternatives; leave out top_logprobs", param=param
        )
    if echo != 0:
        raise InvalidRequest(f"{param}: a record file has no prompt tokens; leave out echo", param=param)
    return True


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    if any(not text for text in stops):
        raise InvalidRequest("stop: strings must not be empty", param="stop")
    return stops


def _stop_tokens(body: InferenceBody, info: ModelInfo) -> tuple[int, ...]:
    """The end tokens, unless they are ignored, and those that are asked for."""
    asked, param = body.stop_token_ids or [], "stop_token_ids"
    if len(asked) > MAX_STOPS:
        raise InvalidRequest(f"{param}: at most {MAX_STOPS} tokens, got {len(asked)}", param=param)
    for token in asked:
        if token >= info.vocab_size:
            message = f"{param}: token ids must be 0 to {info.vocab_size - 1}, got {token}"
            raise InvalidRequest(message, param=param)
    ends = () if body.ignore_eos else info.eos_token_ids
    return tuple(dict.fromkeys((*ends, *asked)))


def _overflow_is_error(body: InferenceBody) -> bool:
    behavior = body.context_length_exceeded_behavior
    if behavior not in (None, "truncate", "error"):
        param = "context_length_exceeded_behavior"
        raise InvalidRequest(f"{param}: must be truncate or error, got {behavior!r}", param=param)
    return behavior == "error"


def _sampling(
    body: InferenceBody, info: ModelInfo, answer: AnswerForm, max_tokens: int | None
) -> SamplingParams:
    limits = fields.NO_LIMITS
    if body.min_tokens or body.bad_words or body.allowed_token_ids is not None:
        limits = fields.limits(body, info, answer, max_tokens)
    bias = body.logit_bias or {}
    for token in bias:
        if not 0 <= token < info.vocab_size:
            message = f"logit_bias: token ids must be 0 to {info.vocab_size - 1}, got {token}"
            raise InvalidRequest(message, param="logit_bias")
    return SamplingParams(
        max_tokens=0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_token_ids=_stop_tokens(body, info),
        min_tokens=limits.min_tokens,
        allowed_token_ids=limits.allowed_token_ids,
        bad_words=limits.bad_words,
    )


def sampling_for(checked: Checked, prompt: Prompt, index: int, seed: int, info: ModelInfo) -> SamplingParams:
    """The sampling parameters of prompt number `index`: max_tokens cut to the context, a seed of its own."""
    size, param = len(prompt.token_ids), "messages" if checked.kind == "chat" else "prompt"
    room = info.max_model_len - size
    least = 0 if checked.max_tokens == 0 else 1
    if room < least:
        raise _no_room(size, param, least, info)
    wanted = room if checked.max_tokens is None else checked.max_tokens
    if wanted > room and checked.overflow_is_error:
        why = (
            f"{param} of {size} tokens and max_tokens {wanted} exceed it;"
            " lower max_tokens or set context_length_exceeded_behavior: truncate"
        )
        tokens, context = size + wanted, info.max_model_len
        raise ContextExceeded("max_tokens", tokens, context, param="max_tokens", why=why)
    made = min(wanted, room)
    return msgspec.structs.replace(
        checked.sampling,
        max_tokens=made,
        min_tokens=min(checked.sampling.min_tokens, made),
        seed=seed_of_prompt(seed, index) if index else seed,
    )


def _no_room(size: int, param: str, least: int, info: ModelInfo) -> ContextExceeded:
    why = f"the prompt has {size} tokens" + (", with at least one to generate" if least else "")
    return ContextExceeded(param, size + least, info.max_model_len, param=param, why=why)


def check_room(checked: Checked, body: CompletionBody | ChatBody, info: ModelInfo, text: TextSize) -> int:
    """How many prompts there are. What cannot fit the context is refused here, before anything is done with it: token ids by
    their number, texts by their bytes, messages by their number too (each takes at least one token)."""
    context, least = info.max_model_len, 0 if checked.max_tokens == 0 else 1
    if isinstance(body, ChatBody):
        if len(body.messages) > context:
            count = len(body.messages)
            why = f"{count} messages have at least one token each"
            raise ContextExceeded("messages", count, context, param="messages", why=why)
        for index, message in enumerate(body.messages):
            content = message.get("content")
            # Templates may leave out white space, and what an earlier answer said before its end.
            if isinstance(content, str) and len(content) > context and message.get("role") == "user":
                text.check_size(content.strip(), f"messages[{index}].content", "messages", context)
        return 1
    if isinstance(body.prompt, str):
        text.check_size(body.prompt, "prompt", "prompt", context)
        return 1
    if body.prompt and type(body.prompt[0]) is int:
        if len(body.prompt) > context:
            raise _no_room(len(body.prompt), "prompt", least, info)
        return 1
    if len(body.prompt) <= MAX_PROMPTS:
        for index, prompt in enumerate(body.prompt):
            if isinstance(prompt, str):
                text.check_size(prompt, f"prompt[{index}]", "prompt", context)
            elif isinstance(prompt, list) and len(prompt) > context:
                raise _no_room(len(prompt), "prompt", least, info)
    return len(body.prompt)


def check_choices(prompts: int, n: int) -> int:
    """How many choices the request makes in all."""
    if prompts * n > MAX_CHOICES_IN_ALL:
        message = f"prompt, n: {prompts} prompts with n {n} make {prompts * n} choices, at most {MAX_CHOICES_IN_ALL}"
        raise InvalidRequest(message, param="n")
    return prompts * n


def seed_of_prompt(seed: int, index: int) -> int:
    """The first prompt samples with the seed itself, every further one with its own, so equal prompts differ."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def split_prompts(prompt: str | list[str | int | list[int]], vocab_size: int) -> list[str | tuple[int, ...]]:
    """The prompts of a completions body: each a text or a tuple of valid token ids."""
    if isinstance(prompt, str):
        return [prompt]
    # A generator takes nearly twice as long, for thousands of ids.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [_checked_ids(prompt, vocab_size)]
    if int in kinds:
        raise InvalidRequest("prompt: must not mix token ids with strings or lists", param="prompt")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: expected 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
        )
    return [item if isinstance(item, str) else _checked_ids(item, vocab_size) for item in prompt]  # type: ignore[arg-type]


def _checked_ids(ids: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("prompt: must hold at least one token", param="prompt")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"prompt: token ids must be 0 to {vocab_size - 1}, got {wrong}", param="prompt")
    return tuple(ids)


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: known roles, content parts joined to one text."""
    if not messages:
        raise InvalidRequest("messages: must hold at least one message", param="messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in _ROLES:
        expected = ", ".join(_ROLES)
        raise InvalidRequest(f"{where}.role: must be one of {expected}, got {role!r}", param="messages")
    content = message.get("content")
    if not _TEXTS.isdisjoint(message):
        _check_texts(message, where)
    if isinstance(content, list):
        return {
            **message,
            "content": "".join(_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)),
        }
    if content is None and role == "assistant":
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content: must be a string or a list of text parts", param="messages")
    return message


def _check_texts(message: dict[str, Any], where: str) -> None:
    """The fields beside the content that are texts."""
    given = {name: message[name] for name in (*FIELDS, "name") if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name}: must be a string", param="messages")
    names = {value: name for name, value in given.items() if name != "name"}
    if len(names) > 1:
        one, other = list(names.values())[:2]
        raise InvalidRequest(f"{where}.{other}: must equal {one} when both are given", param="messages")
    if message.get("refusal"):
        raise InvalidRequest(f"{where}.refusal: not supported; send its text as content", param="messages")


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{where}: only text parts are supported, got {kind!r}", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text: must be a string", param="messages")
    return text
