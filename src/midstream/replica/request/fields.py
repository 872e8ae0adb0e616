"""The fields that clients of vLLM send beyond OpenAI's, and the rules between them. Pure.

Always holds: a field is refused by name if its demand cannot be met. Without these fields a request means what it would
without this module, except that reasoning is separated from the content if the template shows its tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON, decoded
from midstream.core.errors import InvalidRequest
from midstream.core.references import PARQUET
from midstream.core.types import ModelInfo, SamplingParams
from midstream.replica.request.schema import ChatBody, InferenceBody, unsupported
from midstream.replica.text.grammar import response_schema
from midstream.replica.text.schema_bounds import PATTERN_MAX

BAD_WORDS_MAX = 256
#: Characters of all bad words together. They are tokenized on the event loop.
BAD_WORDS_SIZE = 8192
CHOICES_MAX = 4096


class TextOptions(msgspec.Struct, frozen=True):
    """special: special tokens stand in the text by name. stop: so does what ended the text. none: there is no text.
    ids: log-probabilities name tokens `token_id:N`. reasoning: it is separated from the content.
    """

    special: bool = False
    stop: bool = False
    none: bool = False
    ids: bool = False
    reasoning: bool = True


class PromptOptions(msgspec.Struct, frozen=True):
    """variables: of the chat template. generation_prompt: the assistant's turn is begun. continued: the last message is
    continued.
    special_tokens: the tokenizer adds its own; None: as it does by default (completions: yes, chat: no).
    """

    variables: dict[str, Any] = {}
    generation_prompt: bool = True
    continued: bool = False
    special_tokens: bool | None = None


class AnswerForm(msgspec.Struct, frozen=True):
    """What the answer must be. schema: JSON of this. rule: text of this rule of the grammar language. param: the field that
    asked for it."""

    schema: dict[str, Any] | None = None
    rule: str | None = None
    param: str = "response_format"


class TokenLimits(msgspec.Struct, frozen=True):
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


#: What a body asks for that gives none of the fields in question.
PLAIN_TEXT, PLAIN_PROMPT, NO_FORM, NO_LIMITS = TextOptions(), PromptOptions(), AnswerForm(), TokenLimits()
_OF_TEXT = (
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "return_tokens_as_token_ids",
)
#: By the kind of a body: the values of the fields that `text_options` reads; and what they are if none is given.
TEXT = {
    "completion": attrgetter(*_OF_TEXT),
    "chat": attrgetter(*_OF_TEXT, "separate_reasoning", "include_reasoning"),
}
NO_TEXT = ((None,) * 4, (None,) * 6)
#: Likewise, of the fields that `prompt_options` reads.
PROMPT = {
    "completion": attrgetter("add_special_tokens"),
    "chat": attrgetter(
        "add_special_tokens", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"
    ),
}
NO_PROMPT = (None, (None,) * 4)
#: The values of the fields that `answer` reads, `plan_tools`, `wants_routes` and `isolation_key`.
FORMS = attrgetter("response_format", "structured_outputs")
TOOLS = attrgetter("tools", "tool_choice")
ROUTES = attrgetter("include_routing_matrix", "return_routed_experts", "routing_matrix_format")
NO_ROUTES = (None,) * 3
MASKS = attrgetter("return_sampling_mask", "sampling_mask")
ISOLATION = attrgetter("prompt_cache_isolation_key", "cache_salt")


def text_options(body: InferenceBody) -> TextOptions:
    if body.detokenize is False:
        wants = {"stop": body.stop, "response_format": body.response_format, "echo": body.echo}
        wants |= {"structured_outputs": body.structured_outputs, "tools": getattr(body, "tools", None)}
        for param, value in wants.items():
            if value:
                raise InvalidRequest(f"{param}: needs text; leave out detokenize: false", param=param)
    return TextOptions(
        special=body.skip_special_tokens is False,
        stop=bool(body.include_stop_str_in_output),
        none=body.detokenize is False,
        ids=bool(body.return_tokens_as_token_ids),
        reasoning=_agreed(body, "separate_reasoning", "include_reasoning") is not False,
    )


def prompt_options(body: InferenceBody) -> PromptOptions:
    if not isinstance(body, ChatBody):
        return PromptOptions(special_tokens=body.add_special_tokens)
    if body.continue_final_message and body.add_generation_prompt:
        message = "continue_final_message: cannot go with add_generation_prompt: true"
        raise InvalidRequest(message, param="continue_final_message")
    begins = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    variables = dict(body.chat_template_kwargs or {})
    for name in _NOT_VARIABLES & variables.keys():
        message = (
            f"chat_template_kwargs: {name} is not the template's variable; it has a field of its own or none"
        )
        raise InvalidRequest(message, param="chat_template_kwargs")
    return PromptOptions(variables, begins, bool(body.continue_final_message), body.add_special_tokens)


#: What the renderer itself gives a template, or takes besides.
_NOT_VARIABLES = frozenset(
    (
        "messages",
        "tools",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    )
)


def answer(body: InferenceBody) -> AnswerForm:
    """Raises InvalidRequest."""
    schema = response_schema(body.response_format)
    given = body.structured_outputs
    if given is None:
        return AnswerForm(schema)
    if schema is not None:
        raise _unusable("cannot go with response_format")
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(asked) != 1:
        raise _unusable(f"expected one of {', '.join(_READERS)}, got {', '.join(sorted(asked)) or 'none'}")
    ((name, value),) = asked.items()
    if name not in _READERS:
        raise _unusable(f"{name} is not supported by this server; use one of {', '.join(_READERS)}")
    found: AnswerForm = _READERS[name](value)
    if found.rule is not None and getattr(body, "tools", None):
        raise _unusable(f"{name} cannot go with tools")
    return found


def _json(value: Any) -> AnswerForm:
    try:
        schema = decoded(msgspec.json.decode, value.encode()) if isinstance(value, str) else value
    except (UnicodeEncodeError, *NOT_JSON) as error:
        raise _unusable(f"json is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _unusable("json must be a schema, as an object or as its text")
    return AnswerForm(schema, param=_PARAM)


def _json_object(value: Any) -> AnswerForm:
    if value is not True:
        raise _unusable("json_object must be true or false")
    return AnswerForm({"type": "object"}, param=_PARAM)


def _choice(value: Any) -> AnswerForm:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value) or not value:
        raise _unusable("choice must be a list of texts that are not empty")
    if len(value) > CHOICES_MAX:
        raise _unusable(f"choice: at most {CHOICES_MAX} texts, got {len(value)}")
    return AnswerForm(rule=" | ".join(json.dumps(text) for text in value), param=_PARAM)


def _regex(value: Any) -> AnswerForm:
    if not isinstance(value, str) or not value:
        raise _unusable("regex must be a text that is not empty")
    if len(value) > PATTERN_MAX:
        raise _unusable(f"regex: at most {PATTERN_MAX} characters, got {len(value)}")
    # In the grammar language a slash ends a pattern, and a line ends with the line.
    parts = re.findall(r"\\.|/|\n|[^\\/\n]+", value, flags=re.DOTALL)
    if sum(map(len, parts)) != len(value):
        raise _unusable("regex ends in a single backslash")
    return AnswerForm(rule=f"/{''.join(_SPELLED.get(part, part) for part in parts)}/", param=_PARAM)


_PARAM = "structured_outputs"
_SPELLED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_READERS = {"json": _json, "json_object": _json_object, "choice": _choice, "regex": _regex}


def _unusable(why: str) -> InvalidRequest:
    return InvalidRequest(f"{_PARAM}: {why}", param=_PARAM)


def limits(body: InferenceBody, info: ModelInfo, wanted: AnswerForm, max_tokens: int | None) -> TokenLimits:
    least = body.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        message = f"min_tokens: must be at most max_tokens ({max_tokens}), got {least}"
        raise InvalidRequest(message, param="min_tokens")
    if least and (wanted.schema is not None or wanted.rule is not None):
        raise InvalidRequest(
            f"min_tokens: cannot go with {wanted.param}, which decides the end", param="min_tokens"
        )
    words = body.bad_words or []
    if not all(word.strip() for word in words):
        raise InvalidRequest("bad_words: words must not be empty", param="bad_words")
    if len(words) > BAD_WORDS_MAX or sum(map(len, words)) > BAD_WORDS_SIZE:
        message = f"bad_words: at most {BAD_WORDS_MAX} words of {BAD_WORDS_SIZE} characters in all"
        raise InvalidRequest(message, param="bad_words")
    return TokenLimits(least, _allowed(body.allowed_token_ids, info), tuple(words))


def _allowed(given: list[int] | None, info: ModelInfo) -> tuple[int, ...]:
    if given is None:
        return ()
    if not given or max(given) >= info.vocab_size:
        what = (
            f"must be 0 to {info.vocab_size - 1}, got {max(given)}"
            if given
            else "must hold at least one token"
        )
        raise InvalidRequest(f"allowed_token_ids: {what}", param="allowed_token_ids")
    return tuple(dict.fromkeys(given))


def isolation_key(body: InferenceBody) -> str | None:
    return _agreed(body, "prompt_cache_isolation_key", "cache_salt") or None


def wants_routes(body: InferenceBody) -> bool:
    asked = _agreed(body, "include_routing_matrix", "return_routed_experts")
    return bool(asked) or body.routing_matrix_format == PARQUET


def scored_prompt(body: InferenceBody) -> int | None:
    """How many alternatives each prompt token gets; None: the prompt's log-probabilities are not asked for."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs: not supported in a stream", param="prompt_logprobs")
    return body.prompt_logprobs


def _agreed(body: InferenceBody, name: str, other: str) -> Any:
    """The value of two fields that mean the same. Raises InvalidRequest when they say different things."""
    first, second = getattr(body, name, None), getattr(body, other, None)
    if first is not None and second is not None and first != second:
        raise InvalidRequest(f"{other}: must equal {name} when both are given", param=other)
    return second if first is None else first


def template_variables(options: PromptOptions, effort: Any, knows: bool) -> dict[str, Any]:
    """The chat template's variables. effort: `reasoning_effort`. knows: the template has a variable of that name."""
    if effort in (None, "none", False):
        return options.variables
    if not knows:
        raise unsupported("reasoning_effort")
    return options.variables | {"reasoning_effort": effort}


def bad_tokens(words: tuple[str, ...], encode: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words, as vLLM finds them: at the beginning of a text and after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        alone, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        found.append(alone)
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return tuple(found)


def ending_at(
    sampling: SamplingParams, tokens: Collection[int], bad: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    if bad:
        sampling = msgspec.structs.replace(sampling, bad_tokens=bad)
    ends = sampling.stop_token_ids
    more = sorted(set(tokens) - set(ends))
    return msgspec.structs.replace(sampling, stop_token_ids=(*ends, *more)) if more else sampling
