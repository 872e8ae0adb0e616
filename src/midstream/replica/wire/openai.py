"""OpenAI's completions and chat completions, with Fireworks' fields: token records to JSON, plain and streamed.

Always holds: `choices` is never null. A chunk names the snapshot of its tokens.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Mapping
from functools import partial
from math import isnan

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from midstream.core.references import PARQUET, InFiles
from midstream.core.sse import json_line, sse_event
from midstream.core.types import ALLOWED, TokenRecord
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.request.schema import parse_chat, parse_completion
from midstream.replica.response.answer import (
    NOTHING,
    ChoicePart,
    Ending,
    Extras,
    ResponseHead,
    TokenEncoder,
    first_and_last_version,
    joined,
)
from midstream.replica.response.choice import Piece, ToolCall
from midstream.replica.response.records import (
    LOGPROB_MIN,
    NEAR_TIE_JSON,
    RecordEncoder,
    snapshot_spans,
)
from midstream.replica.response.shapes import (
    AnyChoice,
    CallEntry,
    ChatMessage,
    Delta,
    DeltaChoice,
    FunctionCall,
    MessageChoice,
    Response,
    TextChoice,
    spans,
)
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.base import Read, Wire
from midstream.replica.wire.dialects import END_NAMES, openai_usage

_encode = msgspec.json.Encoder().encode
_base64 = partial(b2a_base64, newline=False)
#: The event of one token of a stream: an Entry in a DeltaChoice or a TextChoice. First comes what is the same for all tokens of
#: a snapshot (`_opening`).
_TOKEN = (
    b'%b{"logprobs":{"content":[{"token":%b,"bytes":%b,"logprob":%b,%b"text_offset":%d,"token_id":%d,'
    b'"top_logprobs":[]%b}]},"finish_reason":null,'
)
#: Likewise without log-probabilities.
_BARE = b'%b{"logprobs":null,"finish_reason":null,'
_TOKEN_ID, _INDEX = b'"token_ids":[%d],', b'"index":%d,'
_DELTA, _TEXT = b'"delta":{"content":%b}}]}\n\n', b'"text":%b}]}\n\n'
_NO_SAMPLING = b'"sampling_logprob":%b,' % _encode(LOGPROB_MIN)
_CONSTRAINED = b',"logprob_of":%b' % _encode(ALLOWED)


class OpenAIEncoder(RecordEncoder):
    """Chat completions and completions."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: None = None
    ) -> None:
        super().__init__(checked, head, vocabulary)
        self._chat = checked.kind == "chat"
        self._is_whole = not checked.stream
        self._content = checked.logprobs == "content"
        # With tools, a delta without text has no content: a message that is calls only ends up with none.
        self._always_content = checked.tools is None
        self.keeps = checked.raw_output
        self._openings: dict[str, bytes] = {}
        self._route_dtype_json = b',"routing_matrix_dtype":"uint16"' if head.wide_routes else b""
        token_id, text = _TOKEN_ID if checked.token_ids else b"", _DELTA if self._chat else _TEXT
        self._token = (_TOKEN if self._content else _BARE) + token_id + _INDEX + text
        self._lines = vocabulary.known_lines
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and checked.stream else whole

    # -- responses

    def event(self, part: ChoicePart, extras: Extras) -> bytes:
        if part.first and self._chat and self._content:
            # As OpenAI does: the SDKs' helpers count numbers twice that come in the chunk that opens a choice.
            nothing = ChoicePart(part.index, part.prompt, part.snapshot, (), joined((), part.snapshot), True)
            return self._event(nothing, NOTHING) + self._event(replace(part, first=False), extras)
        return self._event(part, extras)

    def _event(self, part: ChoicePart, extras: Extras) -> bytes:
        choice, snapshot = self._choice(part), part.snapshot
        if part.first or part.ending is not None or self.seam is not UNSET:
            prompt_ids = choice.prompt_token_ids if self._chat else UNSET
            return sse_event(self._response(snapshot, [choice], extras, prompt_ids))
        opening = self._openings.get(snapshot) or self._opening(snapshot)
        return b"%b%b]}\n\n" % (opening, json_line(choice))

    def by_token(self) -> TokenEncoder | None:
        asked = self._checked
        more = asked.top_logprobs or asked.text.ids
        is_told = self._content or asked.logprobs is None
        return self if is_told and self._always_content and not (self._is_whole or more) else None

    def token_event(self, index: int, record: TokenRecord, offset: int) -> bytes:
        token, snapshot, sampling = record.token_id, record.snapshot, record.sampling_logprob
        name, data, text = self._lines.get(token) or self._vocabulary.lines(token)
        opening = self._openings.get(snapshot) or self._opening(snapshot)
        where = (token, index) if self._checked.token_ids else (index,)
        if not self._content:
            return self._token % (opening, *where, text)
        if sampling is None or sampling >= LOGPROB_MIN:
            drawn = b'"sampling_logprob":%b,' % _encode(sampling)
        else:
            drawn = b"" if isnan(sampling) else _NO_SAMPLING
        more = NEAR_TIE_JSON[record.near_tie]
        if self._masks and record.mask is not None:
            more = b',"sampling_mask":"%b"%b' % (_base64(record.mask), more)
        if self._router_weights and record.router_weights is not None:
            more = b',"router_weights":"%b"%b' % (_base64(record.router_weights), more)
        if self._routes and record.route is not None:
            more = b',"routing_matrix":"%b"%b%b' % (_base64(record.route), self._route_dtype_json, more)
        if record.constrained:
            more += _CONSTRAINED
        numbers = (_encode(record.logprob), drawn, offset, token)
        return self._token % (opening, name, data, *numbers, more, *where, text)

    def _opening(self, snapshot: str) -> bytes:
        """An event up to its only choice: the same for every token of a snapshot."""
        event = sse_event(self._response(snapshot, [], Extras()))
        opening = self._openings[snapshot] = event.removesuffix(b"]}\n\n")
        return opening

    def usage_event(self, snapshot: str, extras: Extras) -> bytes:
        return sse_event(self._response(snapshot, [], extras))

    def reference_event(self, snapshot: str, extras: Extras) -> bytes:
        choices: list[AnyChoice] = [
            DeltaChoice(index=at, delta=Delta()) if self._chat else TextChoice(index=at, text="")
            for at in range(len(extras.in_files))
        ]
        return sse_event(self._response(snapshot, choices, extras))

    def whole(self, parts: list[ChoicePart], snapshot: str, extras: Extras) -> bytes:
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if self._chat and self._checked.token_ids:
            prompt_ids = parts[0].prompt.token_ids
        response = self._response(snapshot, [self._choice(part) for part in parts], extras, prompt_ids)
        if extras.prompts:
            self._tell_prompts(response, extras.prompts)
        if self._checked.versions:
            response.weight_version_start, response.weight_version_end = first_and_last_version(parts)
        return _encode(response)

    def _response(
        self,
        snapshot: str,
        choices: list[AnyChoice],
        extras: Extras,
        prompt_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> Response:
        response = Response(
            self._head.id, self._object, self._head.created, self.served(snapshot), choices, prompt_ids
        )
        if extras.counts is not None:
            response.usage = openai_usage(extras.counts)
        response.perf_metrics = extras.perf_metrics
        response.record_reference = extras.reference
        for choice, found in zip(choices, extras.in_files, strict=bool(extras.in_files)):
            _tell_files(choice, found)
        response.midstream, self.seam = self.seam, UNSET
        return response

    def _tell_prompts(self, response: Response, prompts: Mapping[int, tuple[TokenRecord, ...]]) -> None:
        logprobs = {prompt: self.prompt_logprobs(records) for prompt, records in prompts.items()}
        if self._chat:
            response.prompt_logprobs = logprobs[0]
        for choice in response.choices:
            if isinstance(choice, TextChoice):
                choice.prompt_logprobs = logprobs[choice.index // self._checked.n]

    # -- choices

    def _choice(self, part: ChoicePart) -> AnyChoice:
        checked, piece = self._checked, part.piece
        choice: AnyChoice
        if not self._chat:
            choice = TextChoice(index=part.index, text=piece.text)
        elif self._is_whole:
            choice = MessageChoice(index=part.index, message=_message(piece))
        elif self._always_content and not (
            part.first or part.ending is not None or piece.calls or piece.reasoning
        ):
            choice = DeltaChoice(index=part.index, delta=Delta(content=piece.text))
        else:
            choice = DeltaChoice(index=part.index, delta=self._delta(part, piece))
        if checked.logprobs is not None:
            tokens = piece.echoed + piece.tokens
            if tokens or self._is_whole:
                choice.logprobs = self.content(tokens) if self._content else self.logprobs(tokens)
        if checked.token_ids:
            choice.token_ids = [scored.record.token_id for scored in piece.tokens]
            if part.first and not (self._chat and self._is_whole):
                choice.prompt_token_ids = part.prompt.token_ids
        if part.ending is not None:
            self._tell_ending(choice, part.ending, part.prompt)
        return choice

    def _delta(self, part: ChoicePart, piece: Piece) -> Delta:
        delta = Delta("assistant" if part.first else UNSET)
        no_content = not self._always_content or piece.reasoning or part.ending is not None
        if piece.text or not no_content:
            delta.content = piece.text
        if piece.calls:
            delta.tool_calls = [
                msgspec.structs.replace(_call(call), index=call.index) for call in piece.calls
            ]
        if piece.reasoning:
            delta.reasoning_content = piece.reasoning
        return delta

    def _tell_ending(self, choice: AnyChoice, ending: Ending, prompt: Prompt) -> None:
        choice.finish_reason = END_NAMES[ending.reason].openai
        if self._checked.raw_output:
            choice.raw_output = self.raw_output(ending.whole, prompt)
        if self._is_whole:
            choice.snapshots = spans(ending.spans)
            if ending.whole.echoed and self._checked.logprobs:
                choice.prompt_snapshots = snapshot_spans(ending.whole.echoed)
        self.tell_kv(choice, ending)
        if ending.call_in_thinking:
            seam = {} if self.seam is UNSET else self.seam
            self.seam = seam | {"call_in_thinking": [*seam.get("call_in_thinking", ()), choice.index]}


def _tell_files(choice: AnyChoice, found: InFiles) -> None:
    choice.r3_store_id = found.store_id
    if found.routes is not None:
        choice.routing_matrix_format, choice.routing_references = PARQUET, found.routes
    if found.masks is not None:
        choice.sampling_mask_format, choice.sampling_mask_references = PARQUET, found.masks


def _message(piece: Piece) -> ChatMessage:
    message = ChatMessage("assistant", piece.text)
    if piece.calls:
        message.content, message.tool_calls = piece.text or None, [_call(call) for call in piece.calls]
    if piece.reasoning:
        message.content, message.reasoning_content = piece.text or None, piece.reasoning
    return message


def _call(call: ToolCall) -> CallEntry:
    return CallEntry(call.id, FunctionCall(call.name, call.arguments))


COMPLETIONS = Wire("completions", "cmpl-", lambda body, _: Read(parse_completion(body)), OpenAIEncoder)
CHAT = Wire("chat_completions", "chatcmpl-", lambda body, _: Read(parse_chat(body)), OpenAIEncoder)
