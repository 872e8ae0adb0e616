"""The request bodies of the wires beside OpenAI's completions and chat, whose bodies are in request/schema.py. Pure.

Owns: which fields each of them has, with their types and ranges, and which ones are not supported.
Always holds: BODIES has the body of every wire of core/wires.py, under the wire's name. The module needs no tokenizer, so that
a gateway can tell what it passes on (api/openapi.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from midstream.replica.request.schema import (
    MAX_TOP_LOGPROBS,
    ChatBody,
    CompletionBody,
    Ints64,
    NotNegative,
    StreamOptions,
    Unsupported,
)


class OwnFields(msgspec.Struct, frozen=True, kw_only=True):
    """midstream's own, which every wire has under the names of a completion."""

    midstream: dict[str, Any] | None = None
    constrain_reasoning: bool | None = None
    prompt_cache_key: str | None = None
    perf_metrics_in_response: bool | None = None


class OwnFieldsOfChats(OwnFields, frozen=True, kw_only=True):
    """Those of the wires whose bodies are read as chats."""

    seed: Ints64 | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    include_routing_matrix: bool | None = None
    return_router_weights: bool | None = None
    return_sampling_mask: bool | None = None
    prompt_cache_isolation_key: str | None = None


# -- Anthropic's Messages API

#: Of `context_management`: to keep all thinking. Claude Code says so of models that think.
_NO_EDITS = [
    {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"})
]


class MessagesMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountBody(OwnFieldsOfChats, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None is "not given" everywhere."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    metadata: MessagesMetadata | None = None

    # Accepted and ignored: none of these changes a token.
    service_tier: Any = None
    betas: Any = None
    anthropic_beta: Any = None
    anthropic_version: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    user_profile_id: Any = None

    container: Annotated[Any, Unsupported(None)] = None
    context_management: Annotated[Any, Unsupported(None, {}, {"edits": []}, *_NO_EDITS)] = None
    mcp_servers: Annotated[Any, Unsupported(None, [])] = None
    compaction: Annotated[Any, Unsupported(None)] = None
    fallbacks: Annotated[Any, Unsupported(None, [])] = None
    thread: Annotated[Any, Unsupported(None)] = None

    # midstream's own.
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1)]


# -- OpenAI's Responses API


class TextFormat(msgspec.Struct, frozen=True):
    type: str = "text"
    name: str = "answer"
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """Its other members say how reasoning is shown; it is shown whole."""

    effort: str | None = None


class ResponsesBody(OwnFieldsOfChats, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None is "not given" everywhere."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    user: str | None = None

    # Accepted and ignored: none of these changes a token.
    stream_options: StreamOptions | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    #: Of tools of OpenAI's own, which there are none of.
    max_tool_calls: Any = None
    access_programs: Any = None

    background: Annotated[Any, Unsupported(None, False)] = None
    conversation: Annotated[Any, Unsupported(None)] = None
    prompt: Annotated[Any, Unsupported(None)] = None
    context_management: Annotated[Any, Unsupported(None, [])] = None
    moderation: Annotated[Any, Unsupported(None)] = None
    image: Annotated[Any, Unsupported(None)] = None
    truncation: Annotated[Any, Unsupported(None, "disabled")] = None

    # midstream's own.
    session_id: str | None = None


# -- vLLM's and SGLang's


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]
    # Not vLLM's: each token's own text, as `token` in log-probabilities has it.
    return_token_texts: bool | None = None


class VllmGenerateBody(OwnFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None

    # Accepted and ignored: a render path writes them, and they change no token here.
    token_offsets: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None

    features: Annotated[Any, Unsupported(None)] = None
    content_parts: Annotated[Any, Unsupported(None, [])] = None
    kv_transfer_params: Annotated[Any, Unsupported(None, {})] = None
    ec_transfer_params: Annotated[Any, Unsupported(None, {})] = None

    # midstream's own.
    session_id: str | None = None
    user: str | None = None
    context_length_exceeded_behavior: str | None = None


class SglangGenerateBody(OwnFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of a batch is the same for all of its prompts, but for `rid`."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: NotNegative | list[NotNegative] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: NotNegative = 0
    return_sampling_mask: bool | list[bool] | None = None
    stream: bool = False
    session_id: str | None = None
    routing_key: str | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    priority: int | None = None
    #: The name of a policy, as `model` is.
    lora_path: str | list[str | None] | None = None
    #: Of the weights that are asked for, as in InferenceBody.
    weight_version: dict[str, Any] | None = None

    # Accepted and ignored: none of these changes a token.
    log_metrics: Any = None
    no_logs: Any = None
    custom_labels: Any = None
    conversation_id: Any = None
    background: Any = None
    external_trace_header: Any = None
    received_time: Any = None
    modalities: Any = None

    input_embeds: Annotated[Any, Unsupported(None)] = None
    image_data: Annotated[Any, Unsupported(None, [])] = None
    video_data: Annotated[Any, Unsupported(None, [])] = None
    audio_data: Annotated[Any, Unsupported(None, [])] = None
    session_params: Annotated[Any, Unsupported(None)] = None
    token_ids_logprob: Annotated[Any, Unsupported(None, [])] = None
    return_hidden_states: Annotated[Any, Unsupported(False)] = False
    return_flat_raw_top_logprobs: Annotated[Any, Unsupported(False)] = False
    return_indexer_topk: Annotated[Any, Unsupported(False)] = False
    return_entropy: Annotated[Any, Unsupported(False)] = False
    custom_logit_processor: Annotated[Any, Unsupported(None)] = None
    require_reasoning: Annotated[Any, Unsupported(False)] = False
    max_thinking_tokens: Annotated[Any, Unsupported(None)] = None

    # midstream's own.
    model: str | None = None
    #: SGLang has it as an option of the server.
    incremental_streaming_output: bool = False


#: By the name of its wire.
BODIES: Mapping[str, type[msgspec.Struct]] = {
    "completions": CompletionBody,
    "chat_completions": ChatBody,
    "responses": ResponsesBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "render_completions": CompletionBody,
    "render_chat": ChatBody,
    "vllm_generate": VllmGenerateBody,
    "sglang_generate": SglangGenerateBody,
    "messages": MessagesBody,
    "count_tokens": CountBody,
}
