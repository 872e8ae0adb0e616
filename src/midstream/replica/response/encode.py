"""Token records to the JSON of the rollout API, plain and streamed.

Owns: the shapes of responses. Every token goes through `Encoder.chunk` or `Encoder.content`: this is the hot path.
Always holds: `choices` is never null; every log-probability is a finite number; a chunk names the snapshot of its tokens;
a route is passed on as the engine's bytes in base64, and its width is stated when it is not uint8.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import isnan
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.errors import EngineFailed
from midstream.core.text import json_line, sse_event
from midstream.core.types import NEAR_TIES, FinishReason, TokenRecord, served_model_name
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Piece, Scored, ToolCall
from midstream.replica.text.vocabulary import Vocabulary

#: By the bits of a record: the names of its near ties.
NEAR_TIE_NAMES = [
    tuple(name for i, name in enumerate(NEAR_TIES) if bits >> i & 1) for bits in range(1 << len(NEAR_TIES))
]
#: Stands for minus infinity, which JSON does not have.
LOGPROB_MIN = -9999.0

_encode = msgspec.json.Encoder().encode


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    token_id: int
    bytes: msgspec.Raw


class Entry(msgspec.Struct):
    token: str
    bytes: msgspec.Raw
    logprob: float
    #: Absent: the engine cannot tell.
    sampling_logprob: float | UnsetType | None
    text_offset: int
    token_id: int
    top_logprobs: list[TopEntry]
    routing_matrix: str | UnsetType = UNSET
    #: "uint16" (little-endian) above 256 experts. Absent: uint8.
    routing_matrix_dtype: str | UnsetType = UNSET
    near_tie: tuple[str, ...] | UnsetType = UNSET


class ContentLogprobs(msgspec.Struct):
    content: list[Entry]


class LegacyLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    token_ids: list[int]
    text_offset: list[int]
    top_logprobs: list[dict[str, float]]


Logprobs = ContentLogprobs | LegacyLogprobs


class RawOutput(msgspec.Struct):
    completion: str
    prompt_fragments: list[str | int]
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: list[int]
    completion_logprobs: ContentLogprobs | None


class SnapshotSpan(msgspec.Struct):
    snapshot: str
    #: `start` and `end` count the choice's completion tokens, or all positions in `kv_snapshots`; `end` is exclusive.
    start: int
    end: int


class EarlierKv(msgspec.Struct):
    """What the completion tokens before number `tokens` stood on."""

    tokens: int
    kv_snapshots: list[SnapshotSpan]


class CachedDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    #: Absent: nobody knows (vLLM, after a stop string).
    prompt_tokens_details: CachedDetails | UnsetType


class _ChoiceTail(msgspec.Struct, kw_only=True):
    """Fields that follow the text of any choice."""

    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    raw_output: RawOutput | UnsetType = UNSET
    snapshots: list[SnapshotSpan] | UnsetType = UNSET
    prompt_snapshots: list[SnapshotSpan] | UnsetType = UNSET
    kv_snapshots: list[SnapshotSpan] | UnsetType = UNSET
    earlier_kv_snapshots: list[EarlierKv] | UnsetType = UNSET


class TextChoice(_ChoiceTail, kw_only=True):
    index: int
    text: str


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class CallEntry(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallEntry] | UnsetType = UNSET


class DeltaChoice(_ChoiceTail, kw_only=True):
    index: int
    delta: Delta


class Message(msgspec.Struct):
    role: str
    content: str | None
    tool_calls: list[CallEntry] | UnsetType = UNSET


class MessageChoice(_ChoiceTail, kw_only=True):
    index: int
    message: Message


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
    #: The seam, in the first chunk of a resumed stream.
    midstream: dict[str, Any] | UnsetType = UNSET


class Extras(msgspec.Struct):
    """The fields beside the choices of a last chunk or a plain response."""

    usage: Usage | UnsetType = UNSET
    perf_metrics: dict[str, Any] | UnsetType = UNSET


class Kept(msgspec.Struct):
    """What one choice keeps for the end: all of a plain response, or the `raw_output` of a stream."""

    text: list[str]
    echoed: list[Scored]
    generated: list[Scored]
    calls: list[ToolCall] = []

    def keep(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.calls.extend(piece.calls)
        (self.echoed if piece.echoed else self.generated).extend(piece.tokens)


class Encoder:
    """The responses of one HTTP request."""

    def __init__(
        self,
        checked: Checked,
        *,
        response_id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        wide_routes: bool,
    ) -> None:
        self._checked = checked
        self._chat = checked.kind == "chat"
        self._id = response_id
        self._created = created
        self._model = model
        self._model_names: dict[str, str] = {}
        self._openings: dict[str, bytes] = {}
        #: Told with the next event.
        self.seam: dict[str, Any] | UnsetType = UNSET
        self._vocabulary = vocabulary
        self._route_dtype: str | UnsetType = "uint16" if wide_routes else UNSET
        whole = "chat.completion" if self._chat else "text_completion"
        self._object = "chat.completion.chunk" if self._chat and checked.stream else whole

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        """One event for one piece; `first` is given with the first chunk of a choice."""
        checked = self._checked
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if first is not None and checked.token_ids:
            prompt_ids = first.token_ids
        ids: list[int] | UnsetType = UNSET
        if checked.token_ids:
            ids = [] if piece.echoed else [scored.record.token_id for scored in piece.tokens]
        logprobs = self.logprobs(piece.tokens) if piece.tokens else None
        choice: AnyChoice
        if self._chat:
            delta = Delta("assistant" if first is not None else UNSET, piece.text)
            if checked.tools is not None:
                _set_calls(delta, piece)
            choice = DeltaChoice(
                index=index, delta=delta, logprobs=logprobs, prompt_token_ids=prompt_ids, token_ids=ids
            )
        else:
            choice = TextChoice(
                index=index, text=piece.text, logprobs=logprobs, prompt_token_ids=prompt_ids, token_ids=ids
            )
            prompt_ids = UNSET
        if prompt_ids is not UNSET or self.seam is not UNSET:
            return self._event(piece.snapshot, [choice], prompt_ids)
        opening = self._openings.get(piece.snapshot) or self._opening(piece.snapshot)
        return b"%b%b]}\n\n" % (opening, json_line(choice))

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        ids: list[int] | UnsetType = [] if self._checked.token_ids else UNSET
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if first is not None and self._checked.token_ids:
            prompt_ids = first.token_ids
        role = "assistant" if first is not None else UNSET
        chat = DeltaChoice(index=choice.index, delta=Delta(role))
        last: AnyChoice = chat if self._chat else TextChoice(index=choice.index, text="")
        last.finish_reason, last.token_ids, last.raw_output = choice.finish, ids, raw
        last.prompt_token_ids = prompt_ids
        _tell_kv(last, choice)
        return self._event(snapshot, [last], prompt_ids if self._chat else UNSET, extras)

    def _opening(self, snapshot: str) -> bytes:
        """An event up to its only choice: the same for every token of a snapshot."""
        opening = self._openings[snapshot] = self._event(snapshot, []).removesuffix(b"]}\n\n")
        return opening

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        return self._event(snapshot, [], extras=extras)

    def _event(
        self,
        snapshot: str,
        choices: list[AnyChoice],
        prompt_ids: tuple[int, ...] | UnsetType = UNSET,
        extras: Extras | None = None,
    ) -> bytes:
        response = Response(
            self._id, self._object, self._created, self._model_name(snapshot), choices, prompt_ids
        )
        if extras is not None:
            response.usage, response.perf_metrics = extras.usage, extras.perf_metrics
        response.midstream, self.seam = self.seam, UNSET
        return sse_event(response)

    # Plain responses

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        encoded = [
            self._plain_choice(choice, kept[choice.index], prompts[choice.index // self._checked.n])
            for choice in choices
        ]
        response = Response(self._id, self._object, self._created, self._model_name(snapshot), encoded)
        if self._chat and self._checked.token_ids:
            response.prompt_token_ids = prompts[0].token_ids
        response.usage, response.perf_metrics = extras.usage, extras.perf_metrics
        return _encode(response)

    def _plain_choice(self, choice: Choice, kept: Kept, prompt: Prompt) -> AnyChoice:
        text = "".join(kept.text)
        encoded: AnyChoice
        if self._chat:
            message = Message("assistant", text)
            if kept.calls:
                message.content, message.tool_calls = text or None, [_call(call) for call in kept.calls]
            encoded = MessageChoice(index=choice.index, message=message)
        else:
            encoded = TextChoice(index=choice.index, text=text)
            if self._checked.token_ids:
                encoded.prompt_token_ids = prompt.token_ids
        encoded.logprobs = self.logprobs(kept.echoed + kept.generated)
        encoded.finish_reason = choice.finish
        if self._checked.token_ids:
            encoded.token_ids = [scored.record.token_id for scored in kept.generated]
        if self._checked.raw_output:
            encoded.raw_output = self.raw_output(kept, prompt)
        encoded.snapshots = [SnapshotSpan(*span) for span in choice.spans]
        if kept.echoed and self._checked.logprobs:
            encoded.prompt_snapshots = _spans(kept.echoed)
        _tell_kv(encoded, choice)
        return encoded

    # Shared

    def raw_output(self, kept: Kept, prompt: Prompt) -> RawOutput:
        """What the model saw and made; under echo the completion begins with the echoed prompt suffix."""
        tokens = kept.echoed + kept.generated
        ids = [scored.record.token_id for scored in tokens]
        return RawOutput(
            completion=self._vocabulary.raw_text(ids),
            prompt_fragments=[prompt.text] if prompt.text is not None else list(prompt.token_ids),
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=ids,
            completion_logprobs=self.content(tokens) if self._checked.logprobs else None,
        )

    def logprobs(self, tokens: Sequence[Scored]) -> Logprobs | None:
        if self._checked.logprobs == "content":
            return self.content(tokens)
        if self._checked.logprobs == "legacy":
            return self._legacy(tokens)
        return None

    def content(self, tokens: Iterable[Scored]) -> ContentLogprobs:
        return ContentLogprobs([self._entry(scored.record, scored.text_offset) for scored in tokens])

    def _entry(self, record: TokenRecord, offset: int) -> Entry:
        token, token_bytes = self._vocabulary.label(record.token_id)
        top = [(t.token_id, t.logprob) for t in record.top_logprobs[: self._checked.top_logprobs]]
        if not top and self._checked.top_logprobs:
            # The first prompt token: nothing was before it. Some clients drop all alternatives when one list is empty.
            top = [(record.token_id, record.logprob)]
        sampling = record.sampling_logprob
        entry = Entry(
            token,
            token_bytes,
            _finite(record.logprob),
            sampling if sampling is None else UNSET if isnan(sampling) else _finite(sampling),
            offset,
            record.token_id,
            [self._top_entry(token_id, logprob) for token_id, logprob in top],
        )
        if self._checked.routes and record.route is not None:
            entry.routing_matrix = b64encode(record.route).decode("ascii")
            entry.routing_matrix_dtype = self._route_dtype
        if record.near_tie:
            entry.near_tie = NEAR_TIE_NAMES[record.near_tie]
        return entry

    def _top_entry(self, token_id: int, logprob: float) -> TopEntry:
        token, token_bytes = self._vocabulary.label(token_id)
        return TopEntry(token, _finite(logprob), token_id, token_bytes)

    def _legacy(self, tokens: Sequence[Scored]) -> LegacyLogprobs:
        label = self._vocabulary.legacy_label
        records = [scored.record for scored in tokens]
        own = [(label(record.token_id), _finite(record.logprob)) for record in records]
        top = self._checked.top_logprobs
        return LegacyLogprobs(
            tokens=[token for token, _ in own],
            token_logprobs=[logprob for _, logprob in own],
            token_ids=[record.token_id for record in records],
            text_offset=[scored.text_offset for scored in tokens],
            top_logprobs=[
                {label(t.token_id): _finite(t.logprob) for t in record.top_logprobs[:top]}
                # The token itself is always among them.
                | {token: logprob}
                for record, (token, logprob) in zip(records, own, strict=True)
            ],
        )

    def _model_name(self, snapshot: str) -> str:
        name = self._model_names.get(snapshot)
        if name is None:
            name = self._model_names[snapshot] = served_model_name(self._model, snapshot)
        return name


def _set_calls(delta: Delta, piece: Piece) -> None:
    """With tools, a delta without text has no content: a message that is calls only ends up with none."""
    if not piece.text:
        delta.content = UNSET
    if piece.calls:
        delta.tool_calls = [msgspec.structs.replace(_call(call), index=call.index) for call in piece.calls]


def _call(call: ToolCall) -> CallEntry:
    return CallEntry(call.id, FunctionCall(call.name, call.arguments))


def _spans(tokens: Sequence[Scored]) -> list[SnapshotSpan]:
    spans: list[SnapshotSpan] = []
    for at, (snapshot, run) in enumerate(groupby(tokens, lambda scored: scored.record.snapshot)):
        start = spans[-1].end if at else 0
        spans.append(SnapshotSpan(snapshot, start, start + sum(1 for _ in run)))
    return spans


def _tell_kv(encoded: _ChoiceTail, choice: Choice) -> None:
    if choice.kv:
        encoded.kv_snapshots = [SnapshotSpan(*span) for span in choice.kv]
    if choice.earlier_kv:
        encoded.earlier_kv_snapshots = [
            EarlierKv(tokens, [SnapshotSpan(*span) for span in kv]) for tokens, kv in choice.earlier_kv
        ]


def _finite(logprob: float) -> float:
    if logprob >= LOGPROB_MIN:
        return logprob
    if logprob != logprob:
        raise EngineFailed("the model produced NaN; the serving snapshot's weights are not usable")
    return LOGPROB_MIN
