"""The successful answers of the wires, as they are encoded, and what each wire's answers are. Pure.

Owns: the fields of those answers. The log-probabilities, choices and spans in them are in response/shapes.py.
Always holds: ANSWERS has every wire of core/wires.py, under the wire's name. A field that is UNSET is absent. The module needs
no tokenizer, so that a gateway can tell what it passes on (api/openapi.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from midstream.core.traces import Span
from midstream.replica.request.schema import StreamOptions
from midstream.replica.response.shapes import (
    ContentLogprobs,
    DeltaChoice,
    Entry,
    Logprobs,
    MessageChoice,
    OwnObject,
    PromptLogprobs,
    Response,
    TextChoice,
    Usage,
)

# -- OpenAI's completions and chat completions. A Response is encoded; these say which choices it has.


class ChatCompletion(Response, kw_only=True):
    """A chat's answer. created: seconds since the epoch. model: with the snapshot of the last token behind its @."""

    object: Literal["chat.completion"]
    choices: list[MessageChoice]


class ChatCompletionChunk(Response, kw_only=True):
    """One event of a chat's stream. model: with the snapshot of its tokens behind its @."""

    object: Literal["chat.completion.chunk"]
    choices: list[DeltaChoice]


class TextCompletion(Response, kw_only=True):
    """A completion, or one event of its stream. created: seconds since the epoch."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


# -- Anthropic's Messages API


class Records(OwnObject):
    """finish_reason: `abort` of an answer that a trainer's call ended, `dead_end` of one that no token may continue. These APIs
    have no names for both. snapshots: as on a chat choice.
    call_in_thinking: a call was begun in thinking that was never closed, so that it is no call."""

    snapshot: str
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    logprobs: Logprobs | UnsetType = UNSET
    snapshots: list[Span] | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    call_in_thinking: bool | UnsetType = UNSET


class MessagesUsage(msgspec.Struct):
    #: Without those that were read from the cache.
    input_tokens: int
    output_tokens: int
    #: None: not known yet, or never (see shapes.Usage).
    cache_read_input_tokens: int | None
    #: All of a prompt is cached, and nothing is charged for it.
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: always empty. What comes back from a client is not checked by one."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    #: A JSON object, as it was generated.
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


Block = TextBlock | ThinkingBlock | ToolUse


class MessagesAnswer(msgspec.Struct):
    """stop_reason: why it ended. stop_sequence: the one that ended it; null: none did."""

    id: str
    model: str
    content: list[Block]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    midstream: Records | UnsetType = UNSET


# -- OpenAI's Responses API. Its items are dicts (responses_response.py).


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """logprobs: of the tokens, where the request includes them."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[Entry]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["completed", "incomplete"]


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """summary: always empty."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """arguments: JSON, as it was generated. call_id: what the call's output names."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: null where the engine does not say. cache_write_tokens: always 0."""

    cached_tokens: int | None
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponsesAnswer(msgspec.Struct):
    """A response. created_at: seconds since the epoch. model: with the snapshot of the last token behind its @. From
    `background` on, what the request said."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ResponsesUsage
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    midstream: Records


# -- vLLM's and SGLang's


class WeightVersion(msgspec.Struct):
    """A span of the generated tokens under one snapshot, end exclusive: as vLLM and SGLang name it."""

    version: str
    start: int
    end: int


class GenerateRecords(OwnObject):
    """snapshot: of the tokens that it stands with, or of the last one. snapshots: as on a chat choice."""

    snapshot: str
    snapshots: list[Span] | UnsetType = UNSET
    #: By the token, beside SGLang's own log-probabilities. None: the engine cannot tell.
    sampling_logprobs: list[float | None] | UnsetType = UNSET
    #: "allowed": the log-probabilities are of the tokens that the answer's grammar allowed. Absent: they are the raw model's.
    logprob_of: str | UnsetType = UNSET
    #: `branch` of several prompts, one for each; null for those that continue a turn.
    branches: list[dict[str, Any] | None] | UnsetType = UNSET


class RawRoutes(msgspec.Struct):
    """As prime-rl has it. data: base64 of a C-order array of `shape`, from position `start` on. It is the first field: the
    renderers package takes the data out of the bytes before it decodes them."""

    data: str
    shape: tuple[int, ...]
    start: int
    dtype: str


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ContentLogprobs | None = None
    text: str | UnsetType = UNSET
    routed_experts: str | RawRoutes | None = None
    weight_versions: list[WeightVersion] | None = None
    #: The ids that each token was drawn from.
    sampling_mask: list[list[int]] | UnsetType = UNSET
    midstream: GenerateRecords | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
    output_mode: str
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class RenderedRequest(msgspec.Struct):
    """A request that /inference/v1/generate takes as it is."""

    token_ids: tuple[int, ...]
    sampling_params: dict[str, Any]
    model: str | None
    request_id: str
    stream: bool
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: None = None


#: [logprob, token id, text]. The first prompt token in an answer has no log-probability.
Scores = tuple[float | None, int, str | None]


class SglangMetaInfo(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    weight_version_start: int | str | UnsetType = UNSET
    weight_version_end: int | str | UnsetType = UNSET
    input_token_logprobs: list[Scores] | UnsetType = UNSET
    output_token_logprobs: Sequence[Scores] | UnsetType = UNSET
    input_top_logprobs: list[list[Scores] | None] | UnsetType = UNSET
    output_top_logprobs: Sequence[list[Scores]] | UnsetType = UNSET
    #: The ids that each token was drawn from, and its log-probability among them.
    output_token_sampling_mask: Sequence[list[int]] | UnsetType = UNSET
    output_token_sampling_logprobs: Sequence[float] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    routed_experts_start_len: int | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, kw_only=True):
    text: str
    output_ids: Sequence[int]
    meta_info: SglangMetaInfo
    index: int | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    midstream: GenerateRecords


class TokenizeAnswer(msgspec.Struct):
    """max_model_len: tokens of prompt and answer together. token_strs: null where they were not asked for."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(msgspec.Struct):
    """token_texts: each token's own text, where it was asked for."""

    prompt: str
    token_texts: list[str] | UnsetType = UNSET


class CountAnswer(msgspec.Struct):
    input_tokens: int


# -- All


class Answer(NamedTuple):
    """whole: the type of an answer that is no stream; Any: not stated. event: that of the data of one event of a stream, or
    what it is, in words; None: it has no stream."""

    whole: Any
    event: Any = None


#: By the name of its wire.
ANSWERS: Mapping[str, Answer] = {
    "completions": Answer(TextCompletion, TextCompletion),
    "chat_completions": Answer(ChatCompletion, ChatCompletionChunk),
    "responses": Answer(
        ResponsesAnswer, "An event of OpenAI's Responses API. midstream's records are in its `midstream`."
    ),
    "tokenize": Answer(TokenizeAnswer),
    "detokenize": Answer(DetokenizeAnswer),
    "render_completions": Answer(list[RenderedRequest]),
    "render_chat": Answer(RenderedRequest),
    "vllm_generate": Answer(GenerateAnswer, GenerateAnswer),
    "sglang_generate": Answer(SglangAnswer | list[SglangAnswer], SglangAnswer),
    "messages": Answer(
        MessagesAnswer, "An event of Anthropic's Messages API. midstream's records are in its `midstream`."
    ),
    "count_tokens": Answer(CountAnswer),
}
