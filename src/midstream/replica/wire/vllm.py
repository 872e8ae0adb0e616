"""vLLM's token ids in, token ids out, `POST /inference/v1/generate`, and the requests that its render paths make of a chat.

Always holds: `logprobs.content` has one entry per token of `token_ids`; where `output_mode` is tokens, each names its token
`token_id:N`. Every chunk names the snapshot of its tokens in `midstream`, and the last one of a choice has `weight_versions`
of all of them. A stream that tells the routes of a whole sequence at its end cannot go on elsewhere.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.errors import InvalidRequest
from midstream.core.sse import DONE, sse_event
from midstream.core.types import served_model_name
from midstream.replica.request.checked import Checked, Prompt, check
from midstream.replica.request.schema import (
    ChatBody,
    CompletionBody,
    NotNegative,
    convert,
    decode,
    parse_chat,
    parse_completion,
    unsupported,
)
from midstream.replica.response.choice import Choice, Piece, Scored
from midstream.replica.response.kept import Kept
from midstream.replica.response.records import RecordEncoder, tell_kv
from midstream.replica.response.shapes import (
    ChoiceTail,
    Extras,
    RawOutput,
    Usage,
)
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import GenerateAnswer, GenerateChoice, RawRoutes, RenderedRequest, Told
from midstream.replica.wire.base import Read, ResponseHead, TextCall, Texts, Wire
from midstream.replica.wire.bodies import VllmGenerateBody
from midstream.replica.wire.tokenwires import (
    SAME_NAMES,
    SAMPLING,
    TO_THE_CONTEXT,
    completion,
    ended_by,
    npy,
    read_sampling,
    refuse_unless_neutral,
    rename,
    route_array,
    routes_from,
    spans,
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
_WIRE_NAMES = wire_names(_NAMES, prompt="token_ids")
#: Fields beside `sampling_params` that are those of a completion.
_AS_THEY_ARE = (
    "model",
    "request_id",
    "stream",
    "stream_options",
    "cache_salt",
    "priority",
    "midstream",
    "constrain_reasoning",
    "prompt_cache_key",
    "session_id",
    "user",
    "perf_metrics_in_response",
    "context_length_exceeded_behavior",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "features": (None,),
    "content_parts": (None, []),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
}


class Routes(msgspec.Struct, frozen=True):
    """What `sampling_params` says of routes: the clients of this path can add fields nowhere else."""

    #: Those of the whole sequence, at its end: as a .npy file (true), or as prime-rl's object ("raw").
    return_routed_experts: bool | Literal["raw"] = False
    #: The first position of these.
    routed_experts_prompt_start: NotNegative = 0
    #: That of each token, beside its log-probability.
    include_routing_matrix: bool = False


class Details(msgspec.Struct, frozen=True):
    """What the responses of a request tell. stops: end tokens that it names itself."""

    text: bool
    logprobs: bool
    prompt_ids: bool
    routes: Routes
    stops: frozenset[int]


_body = msgspec.json.Decoder(VllmGenerateBody)


def read(data: bytes) -> Read:
    body = decode(data, _body)
    refuse_unless_neutral(body, _NEUTRAL)
    own = {
        name: body.sampling_params[name] for name in Routes.__struct_fields__ if name in body.sampling_params
    }
    given = {name: value for name, value in body.sampling_params.items() if name not in own}
    routes = _routes({name: value for name, value in own.items() if value is not None}, len(body.token_ids))
    fields = read_sampling(given, _NAMES, _NEUTRAL_SAMPLING)
    logprobs, text = "top_logprobs" in fields, body.output_mode == "text"
    if text and fields.get("detokenize") is False:
        raise InvalidRequest("output_mode: text needs sampling_params.detokenize: true", param="output_mode")
    if not text and not any(fields.get(name) for name in ("stop", "structured_outputs")):
        # Nobody reads the text.
        fields["detokenize"] = False
    per_token = routes.include_routing_matrix
    fields = {"max_tokens": TO_THE_CONTEXT} | fields | {name: getattr(body, name) for name in _AS_THEY_ARE}
    fields["return_tokens_as_token_ids"] = not text
    fields["logprobs"] = True
    fields["include_routing_matrix"] = per_token or bool(routes.return_routed_experts)
    made = completion(body.token_ids, fields, _WIRE_NAMES)
    stops = frozenset(made.stop_token_ids or ())
    details = Details(text, logprobs or per_token, bool(body.return_token_ids), routes, stops)
    if not routes.return_routed_experts:
        return Read(made, details)
    start = routes.routed_experts_prompt_start
    return Read(made, details, prompt_from=start + 1, cumulative=True)


def _routes(given: dict[str, Any], prompt_size: int) -> Routes:
    try:
        routes = convert(given, Routes)
        if routes.routed_experts_prompt_start > prompt_size:
            name = "routed_experts_prompt_start"
            raise InvalidRequest(
                f"{name}: must be at most {prompt_size}, the length of the prompt", param=name
            )
    except InvalidRequest as error:
        rename(error, {name: f"{SAMPLING}.{name}" for name in Routes.__struct_fields__})
        raise
    return routes


class GenerateEncoder(RecordEncoder):
    """A wire.base.Encoder of one prompt's choices."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: Details
    ) -> None:
        super().__init__(checked, vocabulary, wide_routes=head.wide_routes)
        self._head = head
        self._details = details
        self._routes = details.routes.include_routing_matrix
        self.seam: dict[str, Any] | UnsetType = UNSET
        self._mode = "text" if details.text else "tokens"
        #: Of each choice of a stream: the routes of its tokens, and its last token.
        self._own: list[list[bytes]] = [[] for _ in range(checked.n)]
        self._last: list[int | None] = [None] * checked.n
        self._prompt_size = 0

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        self._take(index, piece, first)
        if not (piece.tokens or self._details.text or first):
            return b""
        ids = [scored.record.token_id for scored in piece.tokens]
        choice = GenerateChoice(index, ids, midstream=self._told(piece.snapshot))
        if self._details.text:
            choice.text = piece.text
        if self._details.logprobs:
            choice.logprobs = self.content(piece.tokens)
        return self._event([choice], first)

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        if first is not None:
            self._prompt_size = len(first.token_ids)
        made = GenerateChoice(choice.index, [])
        if self._details.text:
            made.text = ""
        self._end(made, choice, snapshot, self._last[choice.index], self._own[choice.index], extras)
        return self._event([made], first)

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        return self._event([], None, extras.usage)

    def end(self) -> bytes:
        return DONE

    def replayed(self, choice: Choice, pieces: list[Piece], first: Prompt | None) -> None:
        for piece in pieces:
            self._take(choice.index, piece, first)
            first = None

    def _take(self, index: int, piece: Piece, first: Prompt | None) -> None:
        if first is not None:
            self._prompt_size = len(first.token_ids)
        if piece.tokens:
            self._last[index] = piece.tokens[-1].record.token_id
            if self._details.routes.return_routed_experts:
                self._own[index] += _routes_of(piece.tokens)

    def _event(
        self, choices: list[GenerateChoice], first: Prompt | None, usage: Usage | UnsetType = UNSET
    ) -> bytes:
        response = GenerateAnswer(self._head.id, choices, self._mode, usage=usage)
        if first is not None and self._details.prompt_ids:
            response.prompt_token_ids = first.token_ids
        return sse_event(response)

    # Both

    def _told(self, snapshot: str) -> Told:
        told = Told(snapshot)
        if self.seam is not UNSET:
            told.resumed, told.branch = self.seam.get("resumed", UNSET), self.seam.get("branch", UNSET)
            self.seam = UNSET
        return told

    def _end(
        self,
        made: GenerateChoice,
        choice: Choice,
        snapshot: str,
        last: int | None,
        own: list[bytes],
        extras: Extras,
    ) -> None:
        """What the end of a choice tells."""
        made.finish_reason, made.weight_versions = choice.finish, spans(choice)
        found = ended_by(choice, last, self._checked, self._vocabulary)
        made.stop_reason = found if isinstance(found, str) or found in self._details.stops else None
        made.midstream = told = self._told(snapshot)
        if self._checked.perf_metrics:
            kv = ChoiceTail()
            tell_kv(kv, choice)
            told.kv_snapshots, told.earlier_kv_snapshots = kv.kv_snapshots, kv.earlier_kv_snapshots
            told.perf_metrics = extras.perf_metrics
        carrier, start = (
            self._details.routes.return_routed_experts,
            self._details.routes.routed_experts_prompt_start,
        )
        if not carrier:
            return
        rows = routes_from(start, self._prompt_size, extras.prompts.get(0, ()), own)
        array = route_array(rows, self._head.route_shape, wide=self._head.wide_routes)
        if carrier == "raw":
            data = b64encode(array.tobytes()).decode()
            made.routed_experts = RawRoutes(data, array.shape, start, str(array.dtype))
        else:
            made.routed_experts = npy(array)

    # Plain responses

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        (prompt,) = prompts
        self._prompt_size = len(prompt.token_ids)
        made = [self._whole(choice, kept[choice.index], snapshot, extras) for choice in choices]
        response = GenerateAnswer(
            self._head.id,
            made,
            self._mode,
            served_model_name(self._head.model, snapshot),
            self._head.created,
            extras.usage,
        )
        if self._details.prompt_ids:
            response.prompt_token_ids = prompt.token_ids
        if self._checked.prompt_logprobs is not None:
            response.prompt_logprobs = self.prompt_logprobs(extras.prompts[0])
        return _encode(response)

    def _whole(self, choice: Choice, kept: Kept, snapshot: str, extras: Extras) -> GenerateChoice:
        ids = [scored.record.token_id for scored in kept.generated]
        made = GenerateChoice(choice.index, ids)
        if self._details.text:
            made.text = "".join(kept.text)
        if self._details.logprobs:
            made.logprobs = self.content(kept.generated)
        own = _routes_of(kept.generated)
        self._end(made, choice, choice.snapshot or snapshot, ids[-1] if ids else None, own, extras)
        return made


def _routes_of(tokens: Sequence[Scored]) -> list[bytes]:
    return [scored.record.route for scored in tokens if scored.record.route is not None]


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
    if checked.schema is not None:
        sampling["structured_outputs"] = {"json": checked.schema}
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
