"""Token records as JSON: log-probabilities in OpenAI's two shapes, routes, sampling masks, labels, KV provenance.

Owns: the form of a record, on any wire. Every token goes through `RecordEncoder.content`: this is the hot path.
Always holds: every log-probability is a finite number. A route and a mask are passed on as the engine's bytes in base64, and a
route's width is stated when it is not uint8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import isnan
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from midstream.core.errors import EngineFailed
from midstream.core.served_names import served_model_name
from midstream.core.sse import DONE
from midstream.core.traces import Span
from midstream.core.types import ALLOWED, NEAR_TIES, TokenRecord, TopLogprob
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead, TokenEncoder
from midstream.replica.response.choice import Piece, Scored
from midstream.replica.response.shapes import (
    ContentLogprobs,
    Entry,
    KvProvenance,
    LegacyLogprobs,
    Logprobs,
    OwnObject,
    PromptLogprobs,
    PromptScore,
    RawOutput,
    TopEntry,
    earlier_spans,
    spans,
)
from midstream.replica.text.vocabulary import Vocabulary

#: By the bits of a record: the names of its near ties.
NEAR_TIE_NAMES = [
    tuple(name for i, name in enumerate(NEAR_TIES) if bits >> i & 1) for bits in range(1 << len(NEAR_TIES))
]
#: Likewise, as the last fields of an Entry in JSON.
NEAR_TIE_JSON = [b',"near_tie":%b' % msgspec.json.encode(names) if names else b"" for names in NEAR_TIE_NAMES]
#: Stands for minus infinity, which JSON does not have.
LOGPROB_MIN = -9999.0


class RecordEncoder(ABC):
    """The responses of one request, on any wire.

    Always holds: it does no I/O. A stream is `event` for each part, of which the last one of a choice has its ending,
    `usage_event` where it was asked for, and `end`.
    """

    #: The next event has it: the seam of a resumed stream, or why the request continues no turn.
    seam: dict[str, Any] | UnsetType = UNSET
    #: Prompt tokens with reused KV, by prompt, for prompts that the engine has reported.
    cached: Mapping[int, int] = MappingProxyType({})
    #: Whether the end of a choice repeats what it said.
    keeps = False

    def __init__(self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary) -> None:
        self._checked = checked
        self._head = head
        self._vocabulary = vocabulary
        self._label = vocabulary.id_label if checked.text.ids else vocabulary.label
        #: Labels that need not be made.
        self._labels: Mapping[int, tuple[str, Raw]] = {} if checked.text.ids else vocabulary.labels
        self._top = checked.top_logprobs
        #: Whether each token's route stands beside its log-probability.
        self._routes = checked.routes
        #: Likewise the weights of the route's experts.
        self._router_weights = checked.router_weights
        #: Likewise its sampling mask.
        self._masks = checked.masks
        self._route_dtype: str | UnsetType = "uint16" if head.wide_routes else UNSET
        self._served_names: dict[str, str] = {}

    def by_token(self) -> TokenEncoder | None:
        """What makes the events of single tokens. None: the wire has no short way, or the request asks for more than it has."""
        return None

    @abstractmethod
    def event(self, part: ChoicePart, extras: Extras) -> bytes:
        """The events of a part of a choice. extras: empty but at its end. Counts and metrics come with the last choice."""

    def usage_event(self, snapshot: str, extras: Extras) -> bytes:
        """The event behind all choices of a request that asked for its usage. None where other events have it."""
        return b""

    def reference_event(self, snapshot: str, extras: Extras) -> bytes:
        """Likewise, of a request that asked for records by reference. None where no request can."""
        return b""

    def end(self) -> bytes:
        """The last bytes of a stream; never none."""
        return DONE

    def replayed(self, part: ChoicePart) -> None:
        """The client has this part from the replica that the stream was on. Of most wires, no event depends on one before."""
        return

    @abstractmethod
    def whole(self, parts: list[ChoicePart], snapshot: str, extras: Extras) -> bytes:
        """The whole body of a response that is not streamed."""

    def served(self, snapshot: str) -> str:
        """The model as clients name it, with the snapshot behind its @."""
        name = self._served_names.get(snapshot)
        if name is None:
            name = self._served_names[snapshot] = served_model_name(self._head.model, snapshot)
        return name

    def raw_output(self, whole: Piece, prompt: Prompt) -> RawOutput:
        """What the model saw and made; under echo the completion begins with the echoed prompt suffix."""
        tokens = whole.echoed + whole.tokens
        ids = [scored.record.token_id for scored in tokens]
        return RawOutput(
            completion=self._vocabulary.raw_text(ids),
            prompt_fragments=[prompt.text] if prompt.text is not None else list(prompt.token_ids),
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=ids,
            completion_logprobs=self.content(tokens) if self._checked.logprobs else None,
        )

    def tell_seam(self, fields: OwnObject) -> None:
        """Tells it, once."""
        if self.seam is not UNSET:
            fields.resumed, fields.branch = self.seam.get("resumed", UNSET), self.seam.get("branch", UNSET)
            self.seam = UNSET

    def tell_kv(self, fields: KvProvenance, ending: Ending) -> None:
        """Tells it where the request asked for it."""
        if not self._checked.perf_metrics:
            return
        if ending.kv:
            fields.kv_snapshots = spans(ending.kv)
        if ending.earlier_kv:
            fields.earlier_kv_snapshots = earlier_spans(ending.earlier_kv)

    def logprobs(self, tokens: Sequence[Scored]) -> Logprobs | None:
        if self._checked.logprobs == "content":
            return self.content(tokens)
        if self._checked.logprobs == "legacy":
            return self._legacy(tokens)
        return None

    def content(self, tokens: Iterable[Scored]) -> ContentLogprobs:
        labels, entries = self._labels, list[Entry]()
        for scored in tokens:
            record = scored.record
            token_id, logprob, sampling = record.token_id, record.logprob, record.sampling_logprob
            token, token_bytes = labels.get(token_id) or self._label(token_id)
            entry = Entry(
                token,
                token_bytes,
                logprob if logprob >= LOGPROB_MIN else finite(logprob),
                sampling if sampling is None or sampling >= LOGPROB_MIN else _sampling(sampling),
                scored.text_offset,
                token_id,
                self._alternatives(record) if self._top else [],
            )
            if self._routes and record.route is not None:
                entry.routing_matrix = b64encode(record.route).decode("ascii")
                entry.routing_matrix_dtype = self._route_dtype
            if self._router_weights and record.router_weights is not None:
                entry.router_weights = b64encode(record.router_weights).decode("ascii")
            if self._masks and record.mask is not None:
                entry.sampling_mask = b64encode(record.mask).decode("ascii")
            if record.near_tie:
                entry.near_tie = NEAR_TIE_NAMES[record.near_tie]
            if record.constrained:
                entry.logprob_of = ALLOWED
            entries.append(entry)
        return ContentLogprobs(entries)

    def _alternatives(self, record: TokenRecord) -> list[TopEntry]:
        # The first prompt token has none: nothing was before it. Some clients drop all alternatives when one list is empty.
        top = record.top_logprobs[: self._top] or (TopLogprob(record.token_id, record.logprob),)
        return [self._top_entry(best.token_id, best.logprob) for best in top]

    def prompt_logprobs(self, records: Sequence[TokenRecord]) -> PromptLogprobs:
        """As vLLM lists them: each prompt token itself, then its alternatives, by id; null for the first one. AReaL reads the
        first entry as the token's own."""
        return [self._scores(record) if at else None for at, record in enumerate(records)]

    def _scores(self, record: TokenRecord) -> dict[int, PromptScore]:
        best = record.top_logprobs[: self._checked.prompt_logprobs or 0]
        token = record.token_id
        # Holds the first place; it is replaced where the token is an alternative.
        scores = {token: PromptScore(finite(record.logprob), record.rank or None, self._label(token)[0])}
        for rank, top in enumerate(best, 1):
            scores[top.token_id] = PromptScore(finite(top.logprob), rank, self._label(top.token_id)[0])
        return scores

    def _top_entry(self, token_id: int, logprob: float) -> TopEntry:
        token, token_bytes = self._label(token_id)
        return TopEntry(token, finite(logprob), token_id, token_bytes)

    def _legacy(self, tokens: Sequence[Scored]) -> LegacyLogprobs:
        label = _id_name if self._checked.text.ids else self._vocabulary.legacy_label
        records = [scored.record for scored in tokens]
        own = [(label(record.token_id), finite(record.logprob)) for record in records]
        top = self._checked.top_logprobs
        return LegacyLogprobs(
            tokens=[token for token, _ in own],
            token_logprobs=[logprob for _, logprob in own],
            token_ids=[record.token_id for record in records],
            text_offset=[scored.text_offset for scored in tokens],
            top_logprobs=[
                {label(t.token_id): finite(t.logprob) for t in record.top_logprobs[:top]}
                # The token itself is always among them.
                | {token: logprob}
                for record, (token, logprob) in zip(records, own, strict=True)
            ],
            logprob_of=ALLOWED if any(record.constrained for record in records) else UNSET,
        )


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _sampling(logprob: float) -> float | UnsetType:
    """Of one that is no number, the engine does not know it."""
    return UNSET if isnan(logprob) else finite(logprob)


def snapshot_spans(tokens: Sequence[Scored]) -> list[Span]:
    found: list[Span] = []
    for at, (snapshot, run) in enumerate(groupby(tokens, lambda scored: scored.record.snapshot)):
        start = found[-1].end if at else 0
        found.append(Span(snapshot, start, start + sum(1 for _ in run)))
    return found


def finite(logprob: float) -> float:
    if logprob >= LOGPROB_MIN:
        return logprob
    if logprob != logprob:
        raise EngineFailed("the model produced NaN; the serving snapshot's weights are not usable")
    return LOGPROB_MIN
