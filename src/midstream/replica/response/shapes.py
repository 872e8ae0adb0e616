"""What responses are made of: the JSON of OpenAI's rollout API, which other wires take parts of. Pure.

Always holds: a field that is UNSET is absent. Field names are those on the wire. The module needs no tokenizer, so that a
gateway can describe what it passes on (api/openapi.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.references import RecordReference, SharedReferences
from midstream.core.traces import Span, TracedEarlierKv
from midstream.core.types import FinishReason

#: The bytes of a token's text, which may be a part of a character.
_Bytes = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "integer"}})
]


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    token_id: int
    bytes: _Bytes


class Entry(msgspec.Struct):
    token: str
    bytes: _Bytes
    logprob: float
    #: Absent: the engine does not know it.
    sampling_logprob: float | UnsetType | None
    text_offset: int
    token_id: int
    top_logprobs: list[TopEntry]
    routing_matrix: str | UnsetType = UNSET
    #: "uint16" (little-endian) above 256 experts. Absent: uint8.
    routing_matrix_dtype: str | UnsetType = UNSET
    #: What each expert's output was multiplied by: base64 of little-endian float32, in the order of the route.
    router_weights: str | UnsetType = UNSET
    #: The tokens that the draw was from: base64 of the form of core/masks.py.
    sampling_mask: str | UnsetType = UNSET
    near_tie: tuple[str, ...] | UnsetType = UNSET
    #: "allowed": `logprob` is of the tokens that the answer's grammar allowed. Absent: it is the raw model's.
    logprob_of: str | UnsetType = UNSET


class ContentLogprobs(msgspec.Struct):
    content: list[Entry]


class LegacyLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    token_ids: list[int]
    text_offset: list[int]
    top_logprobs: list[dict[str, float]]
    #: As in an Entry.
    logprob_of: str | UnsetType = UNSET


Logprobs = ContentLogprobs | LegacyLogprobs


class PromptScore(msgspec.Struct):
    logprob: float
    #: From 1 on, among all tokens. None: the engine does not report it.
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptScore] | None]


class RawOutput(msgspec.Struct):
    completion: str
    prompt_fragments: list[str | int]
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: list[int]
    completion_logprobs: ContentLogprobs | None


class CachedDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    #: Absent: not known (vLLM, after a stop string).
    prompt_tokens_details: CachedDetails | UnsetType


class KvProvenance(msgspec.Struct, kw_only=True):
    """Which snapshots computed the KV of a choice."""

    kv_snapshots: list[Span] | UnsetType = UNSET
    earlier_kv_snapshots: list[TracedEarlierKv] | UnsetType = UNSET


class OwnObject(KvProvenance, kw_only=True):
    """The object `midstream` of other APIs than OpenAI's. resumed: the seam of a resumed stream. branch: why the request
    continues no turn of its session."""

    perf_metrics: dict[str, Any] | UnsetType = UNSET
    resumed: dict[str, Any] | UnsetType = UNSET
    branch: dict[str, Any] | UnsetType = UNSET


class ChoiceTail(KvProvenance, kw_only=True):
    """Fields that follow the text of any choice."""

    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    raw_output: RawOutput | UnsetType = UNSET
    snapshots: list[Span] | UnsetType = UNSET
    prompt_snapshots: list[Span] | UnsetType = UNSET
    #: As Fireworks names columns in files: of all shown positions, and of the sampled tokens.
    r3_store_id: str | UnsetType = UNSET
    routing_matrix_format: str | UnsetType = UNSET
    routing_references: SharedReferences | UnsetType = UNSET
    sampling_mask_format: str | UnsetType = UNSET
    sampling_mask_references: SharedReferences | UnsetType = UNSET


class TextChoice(ChoiceTail, kw_only=True):
    index: int
    text: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class CallEntry(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallEntry] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class DeltaChoice(ChoiceTail, kw_only=True):
    index: int
    delta: Delta


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    tool_calls: list[CallEntry] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class MessageChoice(ChoiceTail, kw_only=True):
    index: int
    message: ChatMessage


AnyChoice = TextChoice | DeltaChoice | MessageChoice


class Response(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[AnyChoice]
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    perf_metrics: dict[str, Any] | UnsetType = UNSET
    #: Where the records are, in a whole response or the chunk behind all choices.
    record_reference: RecordReference | UnsetType = UNSET
    #: The seam, in the first chunk of a resumed stream.
    midstream: dict[str, Any] | UnsetType = UNSET
    #: Of a chat.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    #: At the first and the last token, where the request demanded a version.
    weight_version_start: int | str | UnsetType = UNSET
    weight_version_end: int | str | UnsetType = UNSET


def spans(found: Iterable[tuple[str, int, int]]) -> list[Span]:
    return [Span(*span) for span in found]


def earlier_spans(found: Iterable[tuple[int, Iterable[tuple[str, int, int]]]]) -> list[TracedEarlierKv]:
    return [TracedEarlierKv(tokens, spans(kv)) for tokens, kv in found]
