"""vLLM's token ids in, token ids out, `POST /inference/v1/generate`, and the requests that its render paths make of a chat.

Always holds: `logprobs.content` and `sampling_mask` have one entry per token of `token_ids`; where `output_mode` is tokens, an
entry names its token `token_id:N`. Every chunk names the snapshot of its tokens in `midstream`, and the last one of a choice
has `weight_versions` of all of them. A stream that tells the routes of a whole sequence at its end cannot go on elsewhere.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.sse import sse_event
from midstream.replica.request.checked import Checked, Prompt, check
from midstream.replica.request.schema import (
    ChatBody,
    CompletionBody,
    NotNegative,
    check_supported,
    convert,
    decode,
    parse_chat,
    parse_completion,
    unsupported,
)
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead
from midstream.replica.response.records import RecordEncoder
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import (
    GenerateAnswer,
    GenerateChoice,
    GenerateRecords,
    RawRoutes,
    RenderedRequest,
)
from midstream.replica.wire.base import Read, TextCall, Texts, Wire
from midstream.replica.wire.bodies import OwnFields, VllmGenerateBody
from midstream.replica.wire.dialects import END_NAMES, openai_usage
from midstream.replica.wire.reading import same_fields
from midstream.replica.wire.tokenwires import (
    SAME_NAMES,
    SAMPLING,
    TO_THE_CONTEXT,
    MaskLists,
    check_bounded,
    completion,
    npy,
    read_sampling,
    rename,
    route_array,
    routes_from,
    weight_versions,
    wire_names,
)

_encode = msgspec.json.Encoder().encode

#: Of `sampling_params`: the names of vLLM's SamplingParams, and the fields of a completion that they are.
_NAMES = {name: name for name in SAME_NAMES} | {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "logprobs": "top_logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "detokenize": "detokenize",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "structured_outputs": "structured_outputs",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
}
#: Those that are not supported, with what asks for nothing.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "logprob_token_ids": ([],),
    "flat_logprobs": (False,),
    "output_kind": (0, 1, 2),
    "extra_args": ({},),
    "thinking_token_budget": (),
    "skip_reading_prefix_cache": (False,),
    "repetition_detection": (),
}
_MASKS = f"{SAMPLING}.return_sampling_mask"
_WIRE_NAMES = wire_names(_NAMES, prompt="token_ids", return_sampling_mask=_MASKS)
#: Fields beside `sampling_params` that are those of a completion.
_AS_THEY_ARE = (
    *OwnFields.__struct_fields__,
    "model",
    "request_id",
    "stream",
    "stream_options",
    "cache_salt",
    "priority",
    "session_id",
    "user",
    "context_length_exceeded_behavior",
)


class Columns(msgspec.Struct, frozen=True):
    """What `sampling_params` says of routes and masks: the clients of this path can add fields nowhere else."""

    #: Those of the whole sequence, at its end: as a .npy file (true), or as prime-rl's object ("raw").
    return_routed_experts: bool | Literal["raw"] = False
    #: The first position of these.
    routed_experts_prompt_start: NotNegative = 0
    #: That of each token, beside its log-probability.
    include_routing_matrix: bool = False
    #: Of vLLM it is an option of the server.
    return_sampling_mask: bool = False


class GenerateDetails(msgspec.Struct, frozen=True):
    """What the responses of a request tell. stops: end tokens that it names itself."""

    text: bool
    logprobs: bool
    prompt_ids: bool
    columns: Columns
    stops: frozenset[int]


_body = msgspec.json.Decoder(VllmGenerateBody)


def read(data: bytes) -> Read:
    body = decode(data, _body)
    check_supported(body)
    own = {
        name: body.sampling_params[name] for name in Columns.__struct_fields__ if name in body.sampling_params
    }
    given = {name: value for name, value in body.sampling_params.items() if name not in own}
    columns = _columns({name: value for name, value in own.items() if value is not None}, len(body.token_ids))
    fields = read_sampling(given, _NAMES, _NEUTRAL_SAMPLING)
    logprobs, text = "top_logprobs" in fields, body.output_mode == "text"
    if text and fields.get("detokenize") is False:
        raise InvalidRequest("output_mode: text needs sampling_params.detokenize: true", param="output_mode")
    if not text and not any(fields.get(name) for name in ("stop", "structured_outputs")):
        # The answer shows no text.
        fields["detokenize"] = False
    per_token = columns.include_routing_matrix
    fields = {"max_tokens": TO_THE_CONTEXT} | fields | same_fields(body, _AS_THEY_ARE)
    fields["return_tokens_as_token_ids"] = not text
    fields["logprobs"] = True
    fields["include_routing_matrix"] = per_token or bool(columns.return_routed_experts)
    fields["return_sampling_mask"] = columns.return_sampling_mask
    made = completion(body.token_ids, fields, _WIRE_NAMES)
    if columns.return_sampling_mask:
        check_bounded(made, _MASKS)
    stops = frozenset(made.stop_token_ids or ())
    details = GenerateDetails(text, logprobs or per_token, bool(body.return_token_ids), columns, stops)
    if not columns.return_routed_experts:
        return Read(made, details)
    start = columns.routed_experts_prompt_start
    return Read(made, details, prompt_from=start + 1, cumulative=True)


def _columns(given: dict[str, Any], prompt_size: int) -> Columns:
    try:
        columns = convert(given, Columns)
        if columns.routed_experts_prompt_start > prompt_size:
            name = "routed_experts_prompt_start"
            raise InvalidRequest(
                f"{name}: must be at most {prompt_size}, the length of the prompt", param=name
            )
    except InvalidRequest as error:
        rename(error, {name: f"{SAMPLING}.{name}" for name in Columns.__struct_fields__})
        raise
    return columns


class GenerateEncoder(RecordEncoder):
    """One prompt's choices."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: GenerateDetails
    ) -> None:
        super().__init__(checked, head, vocabulary)
        self._details = details
        self._routes = details.columns.include_routing_matrix
        # They have a place of their own in a choice.
        self._masks, self._lists = False, MaskLists(head.vocab_size, _MASKS)
        self.keeps = bool(details.columns.return_routed_experts)
        self._mode = "text" if details.text else "tokens"

    def event(self, part: ChoicePart, extras: Extras) -> bytes:
        has_event = part.first or part.ending is not None or self._details.text or part.piece.tokens
        if not has_event:
            return b""
        response = self._answer([self._choice(part, extras)])
        if part.first and self._details.prompt_ids:
            response.prompt_token_ids = part.prompt.token_ids
        return sse_event(response)

    def usage_event(self, snapshot: str, extras: Extras) -> bytes:
        response = self._answer([])
        if extras.counts is not None:
            response.usage = openai_usage(extras.counts)
        return sse_event(response)

    def whole(self, parts: list[ChoicePart], snapshot: str, extras: Extras) -> bytes:
        assert extras.counts is not None
        response = self._answer([self._choice(part, extras) for part in parts])
        response.model, response.created = self.served(snapshot), self._head.created
        response.usage = openai_usage(extras.counts)
        if self._details.prompt_ids:
            response.prompt_token_ids = parts[0].prompt.token_ids
        if self._checked.prompt_logprobs is not None:
            response.prompt_logprobs = self.prompt_logprobs(extras.prompts[0])
        return _encode(response)

    def _answer(self, choices: list[GenerateChoice]) -> GenerateAnswer:
        return GenerateAnswer(self._head.id, choices, self._mode)

    def _choice(self, part: ChoicePart, extras: Extras) -> GenerateChoice:
        piece, midstream = part.piece, GenerateRecords(part.snapshot)
        self.tell_seam(midstream)
        ids = [scored.record.token_id for scored in piece.tokens]
        choice = GenerateChoice(part.index, ids, midstream=midstream)
        if self._details.text:
            choice.text = piece.text
        # The event at the end of a stream has no tokens of its own.
        if self._details.logprobs and (part.ending is None or not self._checked.stream):
            choice.logprobs = self.content(piece.tokens)
        if self._details.columns.return_sampling_mask and (piece.tokens or not self._checked.stream):
            choice.sampling_mask = self._lists.of(piece.tokens)
        if part.ending is not None:
            self._tell_ending(choice, midstream, part.ending, part.prompt, extras)
        return choice

    def _tell_ending(
        self,
        choice: GenerateChoice,
        midstream: GenerateRecords,
        ending: Ending,
        prompt: Prompt,
        extras: Extras,
    ) -> None:
        choice.finish_reason = END_NAMES[ending.reason].openai
        choice.weight_versions = weight_versions(ending)
        choice.stop_reason = ending.stop_text if ending.stop_token is None else None
        if ending.stop_token in self._details.stops:
            choice.stop_reason = ending.stop_token
        self.tell_kv(midstream, ending)
        midstream.perf_metrics = extras.perf_metrics
        carrier = self._details.columns.return_routed_experts
        start = self._details.columns.routed_experts_prompt_start
        if not carrier:
            return
        records, size = extras.prompts.get(0, ()), len(prompt.token_ids)
        rows = routes_from(start, size, records, ending.whole.tokens)
        array = route_array(rows, self._head.route_shape, wide=self._head.wide_routes)
        if carrier == "raw":
            data = b64encode(array.tobytes()).decode()
            choice.routed_experts = RawRoutes(data, array.shape, start, str(array.dtype))
        else:
            choice.routed_experts = npy(array)


# Render paths


async def render_chat(texts: Texts, body: bytes, headers: Mapping[str, str]) -> RenderedRequest:
    parsed = await texts.beside(body, parse_chat, headers)
    (rendered,) = await _render(texts, parsed, len(body), headers)
    return rendered


async def render_completions(texts: Texts, body: bytes, headers: Mapping[str, str]) -> list[RenderedRequest]:
    parsed = await texts.beside(body, parse_completion, headers)
    return await _render(texts, parsed, len(body), headers)


async def _render(
    texts: Texts, body: ChatBody | CompletionBody, size: int, headers: Mapping[str, str]
) -> list[RenderedRequest]:
    texts.names.wanted(texts.names.model if body.model is None else body.model, "")
    checked = check(body, texts.info)
    if checked.tools is not None and checked.tools.constrained:
        message = "tool_choice, tools: an answer that has to match a schema of tools cannot be rendered"
        raise InvalidRequest(message, param="tool_choice")
    if checked.echo != 0:
        raise unsupported("echo")
    sampling = {own: value for own, name in _NAMES.items() if (value := getattr(body, name)) is not None}
    if checked.max_tokens is not None:
        sampling["max_tokens"] = checked.max_tokens
    sampling.pop("logprobs", None)
    if checked.logprobs is not None:
        sampling["logprobs"] = checked.top_logprobs or (body.logprobs if type(body.logprobs) is int else 0)
    if checked.masks:
        sampling["return_sampling_mask"] = True
    if checked.answer.schema is not None:
        sampling["structured_outputs"] = {"json": checked.answer.schema}
    prompts = await texts.prompts(body, size, headers)
    return [
        RenderedRequest(
            prompt.token_ids,
            sampling,
            body.model,
            body.request_id or uuid.uuid4().hex,
            checked.stream,
            body.stream_options,
            body.cache_salt,
            checked.priority,
        )
        for prompt in prompts
    ]


VLLM_GENERATE = Wire(
    "vllm_generate",
    "generate-tokens-",
    lambda body, _: read(body),
    GenerateEncoder,
    lambda error, _: rename(error, _WIRE_NAMES),
)
RENDER_CHAT = TextCall("render_chat", render_chat)
RENDER_COMPLETIONS = TextCall("render_completions", render_completions)
