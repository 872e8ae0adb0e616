"""SGLang's `POST /generate`: texts or token ids in, text and token ids out, with `meta_info`.

Always holds: `output_token_logprobs` has one `[logprob, id, text]` per id of `output_ids`, and `midstream.sampling_logprobs`
one number per entry. An event of a stream tells all of its choice so far, as SGLang does by default, or what is new where
`incremental_streaming_output` asks for it; its end tells all once. A stream that tells numbers again cannot go on elsewhere.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from math import isnan
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.errors import InvalidRequest
from midstream.core.sse import DONE, sse_event
from midstream.core.types import ALLOWED, TokenRecord
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.request.schema import decode
from midstream.replica.response.choice import Choice, Piece, Scored
from midstream.replica.response.kept import Kept
from midstream.replica.response.records import RecordEncoder, finite, tell_kv
from midstream.replica.response.shapes import ChoiceTail, Extras, RawOutput, SnapshotSpan
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import Scores, SglangAnswer, SglangMetaInfo, Told
from midstream.replica.wire.base import Read, ResponseHead, Wire
from midstream.replica.wire.bodies import SglangGenerateBody
from midstream.replica.wire.tokenwires import (
    SAME_NAMES,
    SAMPLING,
    TO_THE_CONTEXT,
    completion,
    ended_by,
    read_sampling,
    refuse_unless_neutral,
    rename,
    route_array,
    routes_from,
    spans,
    wire_names,
)

_encode = msgspec.json.Encoder().encode

MAX_NEW_TOKENS = 128
_NAMES = {name: name for name in SAME_NAMES} | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "json",
    "regex": "regex",
}
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": ("", []),
    "custom_params": ({},),
    "beam_width": (1,),
}
_GRAMMARS = ("json", "regex")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "session_params": (None,),
    "token_ids_logprob": (None, []),
    "return_sampling_mask": (None, False),
    "return_hidden_states": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_indexer_topk": (False,),
    "return_entropy": (False,),
    "custom_logit_processor": (None,),
    "require_reasoning": (False,),
    "max_thinking_tokens": (None,),
}


class Details(msgspec.Struct, frozen=True):
    """rids: by choice; empty: the response's own id. logprobs_from: the first prompt token whose log-probability is told; None:
    of no one. routes_from: the first position whose route is told; None: no routes. prompt: the field that it came in."""

    prompt: str
    single: bool
    rids: tuple[str, ...]
    logprobs: bool
    logprobs_from: int | None
    texts: bool
    prompt_ids: bool
    routes_from: int | None
    incremental: bool


class _Made(msgspec.Struct):
    """What a choice has come to, and of that what its next event tells."""

    prompt: Prompt
    text: list[str] = []
    ids: list[int] = []
    logprobs: list[Scores] = []
    tops: list[list[Scores]] = []
    sampling: list[float | None] = []
    routes: list[bytes] = []
    generated: int = 0
    last: int | None = None
    constrained: bool = False


_body = msgspec.json.Decoder(SglangGenerateBody)
_WIRE_NAMES = wire_names(
    _NAMES,
    structured_outputs=f"{SAMPLING}.json_schema",
    top_logprobs="top_logprobs_num",
    prompt_logprobs="logprob_start_len",
    include_routing_matrix="return_routed_experts",
    cache_salt="cache_salt",
    user="routing_key",
    request_id="rid",
)


def read(data: bytes) -> Read:
    body = decode(data, _body)
    refuse_unless_neutral(body, _NEUTRAL)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("input_ids: give either text or input_ids", param="input_ids")
    prompt: Any = body.input_ids if body.text is None else body.text
    name = "input_ids" if body.text is None else "text"
    batch = isinstance(prompt, list) and not (prompt and type(prompt[0]) is int)
    count = len(prompt) if batch else 1
    given = dict(_shared(body.sampling_params, SAMPLING) or {})
    given.pop("stream_interval", None)
    fields = read_sampling(given, _NAMES, _NEUTRAL_SAMPLING)
    if "max_new_tokens" not in given:
        fields["max_tokens"] = MAX_NEW_TOKENS
    fields.setdefault("max_tokens", TO_THE_CONTEXT)
    answer = {kind: fields.pop(kind) for kind in _GRAMMARS if kind in fields}
    logprobs = bool(_shared(body.return_logprob, "return_logprob"))
    start = _shared(body.logprob_start_len, "logprob_start_len")
    logprobs_from = start if logprobs and start is not None and start >= 0 else None
    routes_start = body.routed_experts_start_len if body.return_routed_experts else None
    _check_starts(body, prompt if batch else [prompt], logprobs_from, routes_start)
    rids = _rids(body.rid, count)
    fields |= {
        "model": _model(body),
        "request_id": rids[0] if rids else None,
        "stream": body.stream,
        "cache_salt": _salt(body),
        "priority": body.priority,
        "structured_outputs": answer or None,
        "logprobs": True,
        "top_logprobs": _shared(body.top_logprobs_num, "top_logprobs_num") if logprobs else None,
        "include_routing_matrix": body.return_routed_experts,
        "midstream": body.midstream,
        "constrain_reasoning": body.constrain_reasoning,
        "prompt_cache_key": body.prompt_cache_key,
        "session_id": body.session_id,
        "user": body.routing_key,
        "perf_metrics_in_response": body.perf_metrics_in_response,
    }
    made = completion(prompt, fields, _WIRE_NAMES)
    details = Details(
        prompt=name,
        single=not batch and (made.n or 1) == 1,
        rids=rids,
        logprobs=logprobs,
        logprobs_from=logprobs_from,
        texts=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
        routes_from=routes_start,
        incremental=body.incremental_streaming_output,
    )
    starts = [] if logprobs_from is None else [logprobs_from]
    starts += [] if routes_start is None else [routes_start + 1]
    again = bool(starts) or (logprobs and not details.incremental)
    return Read(made, details, prompt_from=min(starts, default=None), cumulative=again)


def _shared(given: Any, field: str) -> Any:
    """The one value of a field that may have one for each prompt."""
    if not isinstance(given, list):
        return given
    if any(value != given[0] for value in given):
        raise InvalidRequest(f"{field}: must be the same for all prompts of a request", param=field)
    return given[0] if given else None


def _model(body: SglangGenerateBody) -> str | None:
    adapter = _shared(body.lora_path, "lora_path") or None
    if adapter is not None and body.model not in (None, adapter):
        raise InvalidRequest("lora_path: names another model than model does", param="lora_path")
    return adapter or body.model


def _rids(given: str | list[str] | None, count: int) -> tuple[str, ...]:
    """By prompt."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,) if count == 1 else tuple(f"{given}_{i}" for i in range(count))
    if len(given) != count or len(set(given)) != count:
        raise InvalidRequest(f"rid: expected {count} different ids, one for each prompt", param="rid")
    return tuple(given)


def _salt(body: SglangGenerateBody) -> str | None:
    salt, extra = _shared(body.cache_salt, "cache_salt"), _shared(body.extra_key, "extra_key")
    return json.dumps([extra, salt]) if extra else salt or None


def _check_starts(
    body: SglangGenerateBody, prompts: list[Any], logprobs: int | None, routes: int | None
) -> None:
    """What is told of a prompt begins in it, where its length is known."""
    if body.text is not None:
        return
    for field, start in (("logprob_start_len", logprobs), ("routed_experts_start_len", routes)):
        shortest = min((len(ids) for ids in prompts if isinstance(ids, list)), default=0)
        if start is not None and start > shortest:
            raise InvalidRequest(
                f"{field}: must be at most {shortest}, the length of the prompt", param=field
            )


class SGLangEncoder(RecordEncoder):
    """A wire.base.Encoder of the choices of all prompts."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: Details
    ) -> None:
        super().__init__(checked, vocabulary, wide_routes=head.wide_routes)
        self._head = head
        self._details = details
        self.seam: dict[str, Any] | UnsetType = UNSET
        self._made: dict[int, _Made] = {}

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        made = self._take(index, piece.text, piece.tokens, first)
        output = self._output(index, made, piece.snapshot)
        if first is not None and self._details.prompt_ids:
            output.prompt_token_ids = first.token_ids
        return self._event(made, output)

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        made = self._take(choice.index, "", (), first)
        return self._event(made, self._ended(choice, made, snapshot, extras))

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        """Every event has it."""
        return b""

    def end(self) -> bytes:
        return DONE

    def replayed(self, choice: Choice, pieces: list[Piece], first: Prompt | None) -> None:
        if first is not None:
            self._take(choice.index, "", (), first)
        for piece in pieces:
            made = self._take(choice.index, piece.text, piece.tokens, None)
            if self._details.incremental:
                self._forget(made)

    def _event(self, made: _Made, output: SglangAnswer) -> bytes:
        data = sse_event(output)
        if self._details.incremental:
            self._forget(made)
        return data

    @staticmethod
    def _forget(made: _Made) -> None:
        """The client has it."""
        made.text, made.ids, made.logprobs, made.tops, made.sampling = [], [], [], [], []

    # Both

    def _take(self, index: int, text: str, tokens: Iterable[Scored], first: Prompt | None) -> _Made:
        if first is not None:
            self._made[index] = _Made(first)
        made = self._made[index]
        if text:
            made.text.append(text)
        for scored in tokens:
            record = scored.record
            made.ids.append(record.token_id)
            made.generated, made.last = made.generated + 1, record.token_id
            if self._details.logprobs:
                made.constrained = made.constrained or record.constrained
                made.logprobs.append(self._scored(record.logprob, record.token_id))
                sampling = record.sampling_logprob
                made.sampling.append(None if sampling is None or isnan(sampling) else finite(sampling))
                if self._checked.top_logprobs:
                    made.tops.append(self._tops(record))
            if self._details.routes_from is not None and record.route is not None:
                made.routes.append(record.route)
        return made

    def _output(self, index: int, made: _Made, snapshot: str) -> SglangAnswer:
        details, prompt = self._details, index // self._checked.n
        meta = SglangMetaInfo(
            id=self._id(index),
            prompt_tokens=len(made.prompt.token_ids),
            completion_tokens=made.generated,
            cached_tokens=self.cached.get(prompt, 0),
            weight_version=snapshot,
        )
        told = Told(snapshot)
        if details.logprobs:
            meta.output_token_logprobs, told.sampling_logprobs = made.logprobs, made.sampling
            told.logprob_of = ALLOWED if made.constrained else UNSET
            if self._checked.top_logprobs:
                meta.output_top_logprobs = made.tops
        if self.seam is not UNSET:
            told.resumed, told.branch = self.seam.get("resumed", UNSET), self.seam.get("branch", UNSET)
            told.branches = self.seam.get("branches", UNSET)
            self.seam = UNSET
        output = SglangAnswer(text="".join(made.text), output_ids=made.ids, meta_info=meta, midstream=told)
        if not details.single:
            output.index = index
        return output

    def _ended(self, choice: Choice, made: _Made, snapshot: str, extras: Extras) -> SglangAnswer:
        output = self._output(choice.index, made, snapshot)
        meta, told, details = output.meta_info, output.midstream, self._details
        meta.finish_reason = self._reason(choice, made.last)
        meta.weight_versions = spans(choice)
        told.snapshots = [SnapshotSpan(*span) for span in choice.spans]
        meta.e2e_latency = round(extras.took_s, 6)
        records = extras.prompts.get(choice.index // self._checked.n, ())
        if details.logprobs:
            self._tell_prompt(meta, made.prompt, records)
        if details.routes_from is not None:
            rows = routes_from(details.routes_from, len(made.prompt.token_ids), records, made.routes)
            array = route_array(rows, self._head.route_shape, wide=self._head.wide_routes)
            meta.routed_experts = b64encode(array.astype("<i4").tobytes()).decode()
            meta.routed_experts_start_len = details.routes_from
        if self._checked.perf_metrics:
            kv = ChoiceTail()
            tell_kv(kv, choice)
            told.kv_snapshots, told.earlier_kv_snapshots = kv.kv_snapshots, kv.earlier_kv_snapshots
            told.perf_metrics = extras.perf_metrics
        return output

    def _tell_prompt(self, meta: SglangMetaInfo, prompt: Prompt, records: Sequence[TokenRecord]) -> None:
        start = self._details.logprobs_from
        shown = () if start is None else records[max(start - (len(prompt.token_ids) - len(records)), 0) :]
        meta.input_token_logprobs = [
            self._scored(record.logprob if at else None, record.token_id) for at, record in enumerate(shown)
        ]
        if self._checked.top_logprobs:
            meta.input_top_logprobs = [self._tops(record) if at else None for at, record in enumerate(shown)]

    def _reason(self, choice: Choice, last: int | None) -> dict[str, Any]:
        if choice.finish == "length":
            return {"type": "length", "length": choice.generated}
        if choice.finish == "abort":
            return {"type": "abort", "message": "a trainer ended this request"}
        if choice.finish == "dead_end":
            return {"type": "dead_end", "message": "no token may follow, by what the answer must match"}
        return {"type": "stop", "matched": ended_by(choice, last, self._checked, self._vocabulary)}

    def _id(self, index: int) -> str:
        """As SGLang, which makes a request of each choice."""
        rids, n = self._details.rids, self._checked.n
        if self._details.single:
            return self._head.id
        name = rids[index // n] if rids else f"{self._head.id}_{index // n}"
        return name if n == 1 else f"{name}_{index % n}"

    def _scored(self, logprob: float | None, token: int) -> Scores:
        text = self._vocabulary.raw_text([token]) if self._details.texts else None
        return (None if logprob is None else finite(logprob), token, text)

    def _tops(self, record: TokenRecord) -> list[Scores]:
        best = record.top_logprobs[: self._checked.top_logprobs]
        return [self._scored(top.logprob, top.token_id) for top in best]

    # Plain responses

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        outputs = []
        for choice in choices:
            prompt, had = prompts[choice.index // self._checked.n], kept[choice.index]
            made = self._take(choice.index, "".join(had.text), had.generated, prompt)
            output = self._ended(choice, made, choice.snapshot or snapshot, extras)
            if self._details.prompt_ids:
                output.prompt_token_ids = prompt.token_ids
            outputs.append(output)
        return _encode(outputs[0] if self._details.single else outputs)


def _rename(error: InvalidRequest, details: Details) -> None:
    rename(error, {**_WIRE_NAMES, "prompt": details.prompt})


def _choice_names(details: Details, response_id: str | None, n: int, choice: int) -> Collection[str]:
    """That of its prompt, and its own as the response has it."""
    if details.rids:
        name = details.rids[choice // n]
    elif response_id is None or details.single:
        return ()
    else:
        name = f"{response_id}_{choice // n}"
    return (name, f"{name}_{choice % n}") if n > 1 else (name,)


SGLANG_GENERATE = Wire(
    "sglang_generate", "", lambda body, _: read(body), SGLangEncoder, _rename, _choice_names
)
