"""The request bodies of the rollout API as they stand on the wire: OpenAI's fields and Fireworks' on top.

Owns: which fields exist, their types and ranges, and which ones are refused because honouring them is not possible yet.
Always holds: an unknown field is refused in Fireworks' wording; a known field that would change the result and is not
supported is refused by name, never silently dropped; a harmless one is accepted and ignored.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from midstream.core.decoding import NOT_JSON, decoded, fault
from midstream.core.errors import InvalidRequest, UnknownField

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64

#: A longer body, in bytes, is looked at before it is decoded, and both beside the event loop.
LONG_BODY = 2**18
#: Numbers, strings and objects in a body. One call decodes them all, and holds the interpreter's lock for as long: as many
#: token ids take 20 ms.
VALUES_MAX = 2**20
#: Objects and lists in a body, and members of objects. As many take a tenth of a second.
PARTS_MAX = 2**18
#: So many bytes are searched in one step.
_STEP = 2**20

Ints64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NotNegative = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class Unsupported:
    """Annotates a field that is not supported. neutral: the values that ask for nothing, which are accepted. instead: the field
    that does what is asked."""

    def __init__(self, *neutral: Any, instead: str | None = None) -> None:
        self.neutral = neutral
        self.instead = instead


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An unknown member is an unknown field."""

    include_usage: bool | None = None
    #: Accepted and ignored: it changes no token.
    include_obfuscation: Any = None
    continuous_usage_stats: bool | None = None

    def __post_init__(self) -> None:
        if self.continuous_usage_stats:
            raise ValueError("continuous_usage_stats is not supported by this server; leave it out")


class InferenceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. None is "not given" everywhere."""

    #: None: the one that serves.
    model: str | None = None
    max_tokens: NotNegative | None = None
    max_completion_tokens: NotNegative | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    context_length_exceeded_behavior: str | None = None

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=2.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = None
    seed: Ints64 | None = None

    logprobs: bool | Annotated[int, Meta(ge=0, le=5)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    echo_last: NotNegative | None = None
    include_routing_matrix: bool | None = None
    return_record_reference: bool | None = None
    # As Fireworks' client asks for columns in files, see shared_rows.py.
    routing_matrix_format: Literal["base64_inline", "parquet_v1"] | None = None
    sampling_mask: Literal["parquet_v1"] | None = None
    return_token_ids: bool | None = None
    raw_output: bool | None = None
    perf_metrics_in_response: bool | None = None

    prompt_cache_key: str | None = None
    prompt_cache_isolation_key: str | None = None
    prompt_cache_max_len: NotNegative | None = None
    session_id: str | None = None
    user: str | None = None

    # As vLLM has them, see fields.py.
    cache_salt: str | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    #: A request may lower its priority. It cannot raise it above others, which may be other tenants' requests.
    priority: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    min_tokens: NotNegative | None = None
    allowed_token_ids: list[NotNegative] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_routed_experts: bool | None = None
    return_sampling_mask: bool | None = None
    return_router_weights: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None

    # Accepted and ignored: none of these changes a token.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prediction: Any = None
    speculation: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    response_format: dict[str, Any] | None = None
    # midstream's own: what the answer must match begins with its first token, and not behind the model's thinking.
    constrain_reasoning: bool | None = None
    midstream: dict[str, Any] | None = None
    #: As trainers of external rollout services demand a version.
    weight_version: dict[str, Any] | None = None

    best_of: Annotated[Any, Unsupported(None, 1)] = None
    use_beam_search: Annotated[Any, Unsupported(None, False)] = None
    typical_p: Annotated[Any, Unsupported(None, 1)] = None
    mirostat_lr: Annotated[Any, Unsupported(None)] = None
    mirostat_target: Annotated[Any, Unsupported(None)] = None
    reasoning_effort: Annotated[Any, Unsupported(None, "none", False)] = None
    reasoning_history: Annotated[Any, Unsupported(None, "disabled")] = None
    thinking: Annotated[Any, Unsupported(None, {"type": "disabled"})] = None

    # Fields of older vLLM.
    guided_json: Annotated[Any, Unsupported(None, instead="structured_outputs.json")] = None
    guided_regex: Annotated[Any, Unsupported(None, instead="structured_outputs.regex")] = None
    guided_choice: Annotated[Any, Unsupported(None, instead="structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, Unsupported(None, instead="structured_outputs.json")] = None
    guided_decoding_backend: Annotated[Any, Unsupported(None)] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported(None)] = None


class CompletionBody(InferenceBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    suffix: Annotated[Any, Unsupported(None, "")] = None
    images: Annotated[Any, Unsupported(None, [])] = None


class ChatBody(InferenceBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    #: The chat template decides.
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None

    functions: Annotated[Any, Unsupported(None, [])] = None
    function_call: Annotated[Any, Unsupported(None, "none", "auto")] = None
    modalities: Annotated[Any, Unsupported(None, ["text"])] = None
    audio: Annotated[Any, Unsupported(None)] = None
    verbosity: Annotated[Any, Unsupported(None, "medium")] = None
    web_search_options: Annotated[Any, Unsupported(None)] = None
    prompt_truncate_len: Annotated[Any, Unsupported(None)] = None
    safe_tokenization: Annotated[Any, Unsupported(None, False)] = None


#: The name may hold anything, backticks too: what looks like a place may be the end of a name.
_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL
)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_Body = TypeVar("_Body", bound=InferenceBody)
_Decoded = TypeVar("_Decoded")


def parse_completion(body: bytes) -> CompletionBody:
    return _parse(body, _completion)


def parse_chat(body: bytes) -> ChatBody:
    return _parse(body, _chat)


def _check_values(body: bytes) -> None:
    """A value follows a comma or an opening bracket, so these bound how many there are. Those in texts count too."""
    brackets = _count(body, b"[") + _count(body, b"{")
    found = {
        "commas and opening brackets": (_count(body, b",") + brackets, VALUES_MAX),
        "opening brackets": (brackets, PARTS_MAX),
        "members of objects": (_count(body, b'":'), PARTS_MAX),
    }
    for what, (count, most) in found.items():
        if count > most:
            raise InvalidRequest(f"the body holds {count} {what}, at most {most}; make it several requests")


def _count(body: bytes, sign: bytes) -> int:
    return sum(body.count(sign, at, at + _STEP) for at in range(0, len(body), _STEP))


def decode(body: bytes, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
    """A body of any wire. Raises InvalidRequest, which names the field, and UnknownField."""
    if len(body) > LONG_BODY:
        _check_values(body)
    try:
        return decoded(decoder.decode, body)
    except msgspec.ValidationError as error:
        _refuse(error, getattr(decoder.type, "__struct_encode_fields__", ()), body)
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def members(body: bytes) -> dict[str, msgspec.Raw]:
    """A body's own members, each as it was sent. Raises InvalidRequest where the body is not a JSON object."""
    try:
        return _members.decode(body)
    except (msgspec.ValidationError, *NOT_JSON) as error:
        raise InvalidRequest(f"the body is not a valid JSON object: {error}") from error


def convert(value: Any, kind: type[_Decoded]) -> _Decoded:
    """A part of a body that is decoded already. Raises InvalidRequest, which names the field, and UnknownField."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        _refuse(error)


def _parse(body: bytes, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    parsed = decode(body, decoder)
    check_supported(parsed)
    return parsed


def _refuse(
    error: msgspec.ValidationError, known: tuple[str, ...] = (), body: bytes | None = None
) -> NoReturn:
    """What the decoder refused, as an error that names the field first.

    known: the fields of what was decoded. body: its bytes, where they are at hand.
    """
    message = str(error)
    if found := _UNKNOWN.fullmatch(message):
        where = found["where"]
        if where:
            whole = message[message.index("`") + 1 : -1]
            if body is not None and whole in members(body):
                raise UnknownField(whole, known)
            raise UnknownField(f"{where}.{found['name']}")
        raise UnknownField(found["name"], known)
    wrong = fault(error)
    if wrong.place:
        raise InvalidRequest(str(wrong), param=_root(wrong.field))
    raise InvalidRequest(f"the body must be a JSON object: {message}")


def _root(place: str) -> str:
    """The body's own field that a place is in."""
    return re.split(r"[.\[]", place)[0]


def check_supported(body: msgspec.Struct) -> None:
    """Raises InvalidRequest for a known field that would change the result and is not supported."""
    for field, mark in _unsupported_fields(type(body)):
        value = getattr(body, field)
        if value in mark.neutral or (field == "best_of" and value == getattr(body, "n", None)):
            continue
        raise unsupported(field, mark.instead)


@cache
def _unsupported_fields(kind: type[msgspec.Struct]) -> list[tuple[str, Unsupported]]:
    return [
        (field.name, mark)
        for field in msgspec.structs.fields(kind)
        for mark in getattr(field.type, "__metadata__", ())
        if isinstance(mark, Unsupported)
    ]


def unsupported(field: str, instead: str | None = None) -> InvalidRequest:
    hint = "leave it out" if instead is None else f"use {instead}"
    return InvalidRequest(f"{field}: not supported by this server; {hint}", param=field)
