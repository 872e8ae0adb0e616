"""SGLang's `POST /generate`: texts or token ids in, text and token ids out, with `meta_info`.

Always holds: `output_token_logprobs` has one `[logprob, id, text]` per id of `output_ids`, and `midstream.sampling_logprobs`
one number per entry. An event of a stream tells all of its choice so far, as SGLang does by default, or what is new where
`incremental_streaming_output` asks for it; its end tells all once. A stream that tells numbers again cannot go on elsewhere.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Sequence
from math import isnan
from typing import Any

import msgspec
from msgspec import UNSET

from midstream.core.errors import InvalidRequest
from midstream.core.sse import sse_event
from midstream.core.types import ALLOWED, TokenRecord
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.request.schema import check_supported, decode
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead, first_and_last_version
from midstream.replica.response.records import RecordEncoder, finite
from midstream.replica.response.shapes import spans
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import GenerateRecords, Scores, SglangAnswer, SglangMetaInfo
from midstream.replica.wire.base import Read, Wire
from midstream.replica.wire.bodies import OwnFields, SglangGenerateBody
from midstream.replica.wire.dialects import END_NAMES, SGLANG_MESSAGES
from midstream.replica.wire.reading import same_fields
from midstream.replica.wire.tokenwires import (
    SAME_NAMES,
    SAMPLING,
    TO_THE_CONTEXT,
    MaskLists,
    check_bounded,
    completion,
    read_sampling,
    rename,
    route_array,
    routes_from,
    weight_versions,
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
#: Fields beside `sampling_params` that are those of a completion.
_AS_THEY_ARE = (*OwnFields.__struct_fields__, "stream", "priority", "session_id", "weight_version")


class SglangDetails(msgspec.Struct, frozen=True):
    """rids: by choice; empty: the response's own id. logprobs_from: the first prompt token that gets a log-probability; None:
    none does. routes_from: the first position that gets a route; None: none does. prompt: the field that it came in."""

    prompt: str
    single: bool
    rids: tuple[str, ...]
    logprobs: bool
    logprobs_from: int | None
    texts: bool
    prompt_ids: bool
    routes_from: int | None
    incremental: bool
    masks: bool


class _Made(msgspec.Struct):
    """What a choice has come to, and of that what its next event tells."""

    text: list[str] = []
    ids: list[int] = []
    logprobs: list[Scores] = []
    tops: list[list[Scores]] = []
    sampling: list[float | None] = []
    masks: list[list[int]] = []
    masked: list[float] = []
    generated: int = 0
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
    check_supported(body)
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
    fields |= same_fields(body, _AS_THEY_ARE) | {
        "model": _model(body),
        "request_id": rids[0] if rids else None,
        "cache_salt": _salt(body),
        "structured_outputs": answer or None,
        "logprobs": True,
        "top_logprobs": _shared(body.top_logprobs_num, "top_logprobs_num") if logprobs else None,
        "include_routing_matrix": body.return_routed_experts,
        "return_sampling_mask": _shared(body.return_sampling_mask, "return_sampling_mask"),
        "user": body.routing_key,
    }
    made = completion(prompt, fields, _WIRE_NAMES)
    if made.return_sampling_mask:
        check_bounded(made, "return_sampling_mask")
    details = SglangDetails(
        prompt=name,
        single=not batch and (made.n or 1) == 1,
        rids=rids,
        logprobs=logprobs,
        logprobs_from=logprobs_from,
        texts=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
        routes_from=routes_start,
        incremental=body.incremental_streaming_output,
        masks=bool(made.return_sampling_mask),
    )
    starts = [] if logprobs_from is None else [logprobs_from]
    starts += [] if routes_start is None else [routes_start + 1]
    again = bool(starts) or ((logprobs or details.masks) and not details.incremental)
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
    """What the answer has of a prompt begins in it, where its length is known."""
    if body.text is not None:
        return
    for field, start in (("logprob_start_len", logprobs), ("routed_experts_start_len", routes)):
        shortest = min((len(ids) for ids in prompts if isinstance(ids, list)), default=0)
        if start is not None and start > shortest:
            raise InvalidRequest(
                f"{field}: must be at most {shortest}, the length of the prompt", param=field
            )


class SGLangEncoder(RecordEncoder):
    """The choices of all prompts."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: SglangDetails
    ) -> None:
        super().__init__(checked, head, vocabulary)
        self._details = details
        self.keeps = details.routes_from is not None
        self._made: dict[int, _Made] = {}
        self._lists = MaskLists(head.vocab_size, "return_sampling_mask")

    def event(self, part: ChoicePart, extras: Extras) -> bytes:
        data = sse_event(self._answer(part, extras))
        self._forget(part)
        return data

    def replayed(self, part: ChoicePart) -> None:
        self._take(part, replayed=True)
        self._forget(part)

    def whole(self, parts: list[ChoicePart], snapshot: str, extras: Extras) -> bytes:
        answers = [self._answer(part, extras) for part in parts]
        return _encode(answers[0] if self._details.single else answers)

    def _forget(self, part: ChoicePart) -> None:
        """The client has it."""
        if self._details.incremental:
            made = self._made[part.index]
            self._made[part.index] = _Made(generated=made.generated, constrained=made.constrained)

    def _take(self, part: ChoicePart, *, replayed: bool = False) -> _Made:
        made, piece = self._made.setdefault(part.index, _Made()), part.piece
        made.text.append(piece.text)
        made.generated += len(piece.tokens)
        if self._details.masks and not replayed:
            made.masks += self._lists.of(piece.tokens)
            made.masked += [finite(scored.record.sampling_logprob or 0.0) for scored in piece.tokens]
        for scored in piece.tokens:
            record = scored.record
            made.ids.append(record.token_id)
            if not self._details.logprobs:
                continue
            made.constrained = made.constrained or record.constrained
            made.logprobs.append(self._scored(record.logprob, record.token_id))
            sampling = record.sampling_logprob
            made.sampling.append(None if sampling is None or isnan(sampling) else finite(sampling))
            if self._checked.top_logprobs:
                made.tops.append(self._tops(record))
        return made

    def _answer(self, part: ChoicePart, extras: Extras) -> SglangAnswer:
        made, details = self._take(part), self._details
        meta = SglangMetaInfo(
            id=self._id(part.index),
            prompt_tokens=len(part.prompt.token_ids),
            completion_tokens=made.generated,
            cached_tokens=self.cached.get(part.index // self._checked.n, 0),
            weight_version=part.snapshot,
        )
        midstream = GenerateRecords(part.snapshot)
        if details.logprobs:
            meta.output_token_logprobs, midstream.sampling_logprobs = made.logprobs, made.sampling
            midstream.logprob_of = ALLOWED if made.constrained else UNSET
            if self._checked.top_logprobs:
                meta.output_top_logprobs = made.tops
        if details.masks:
            meta.output_token_sampling_mask = made.masks
            meta.output_token_sampling_logprobs = made.masked
        if self.seam is not UNSET:
            midstream.branches = self.seam.get("branches", UNSET)
            self.tell_seam(midstream)
        answer = SglangAnswer(
            text="".join(made.text), output_ids=made.ids, meta_info=meta, midstream=midstream
        )
        if not details.single:
            answer.index = part.index
        if details.prompt_ids and (part.first or part.ending is not None):
            answer.prompt_token_ids = part.prompt.token_ids
        if part.ending is not None:
            self._tell_ending(answer, part, part.ending, extras)
        return answer

    def _tell_ending(self, answer: SglangAnswer, part: ChoicePart, ending: Ending, extras: Extras) -> None:
        meta, midstream, details = answer.meta_info, answer.midstream, self._details
        meta.finish_reason = _finish_reason(ending)
        meta.weight_versions = weight_versions(ending)
        if self._checked.versions:
            meta.weight_version_start, meta.weight_version_end = first_and_last_version([part])
        meta.e2e_latency = round(extras.took_s, 6)
        midstream.snapshots = spans(ending.spans)
        midstream.perf_metrics = extras.perf_metrics
        self.tell_kv(midstream, ending)
        records = extras.prompts.get(part.index // self._checked.n, ())
        if details.logprobs:
            self._tell_prompt(meta, part.prompt, records)
        if details.routes_from is not None:
            size = len(part.prompt.token_ids)
            rows = routes_from(details.routes_from, size, records, ending.whole.tokens)
            array = route_array(rows, self._head.route_shape, wide=self._head.wide_routes)
            meta.routed_experts = b64encode(array.astype("<i4").tobytes()).decode()
            meta.routed_experts_start_len = details.routes_from

    def _tell_prompt(self, meta: SglangMetaInfo, prompt: Prompt, records: Sequence[TokenRecord]) -> None:
        start = self._details.logprobs_from
        shown = () if start is None else records[max(start - (len(prompt.token_ids) - len(records)), 0) :]
        meta.input_token_logprobs = [
            self._scored(record.logprob if at else None, record.token_id) for at, record in enumerate(shown)
        ]
        if self._checked.top_logprobs:
            meta.input_top_logprobs = [self._tops(record) if at else None for at, record in enumerate(shown)]

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


def _finish_reason(ending: Ending) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": END_NAMES[ending.reason].sglang}
    if reason["type"] == "length":
        return reason | {"length": ending.generated}
    if reason["type"] == "stop":
        return reason | {"matched": ending.stop_text if ending.stop_token is None else ending.stop_token}
    return reason | {"message": SGLANG_MESSAGES[ending.reason]}


def _rename(error: InvalidRequest, details: SglangDetails) -> None:
    rename(error, {**_WIRE_NAMES, "prompt": details.prompt})


def _choice_names(details: SglangDetails, response_id: str | None, n: int, choice: int) -> Collection[str]:
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
