"""Token records as JSON: log-probabilities in OpenAI's two shapes, routes, labels, KV provenance.

Owns: how a record is told, on any wire. Every token goes through `RecordEncoder.content`: this is the hot path.
Always holds: every log-probability is a finite number. A route is passed on as the engine's bytes in base64, and its width is
stated when it is not uint8.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import isnan
from types import MappingProxyType

from msgspec import UNSET, UnsetType

from midstream.core.errors import EngineFailed
from midstream.core.types import ALLOWED, NEAR_TIES, TokenRecord
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Scored
from midstream.replica.response.kept import Kept
from midstream.replica.response.shapes import (
    ChoiceTail,
    ContentLogprobs,
    EarlierKv,
    Entry,
    LegacyLogprobs,
    Logprobs,
    PromptLogprobs,
    PromptScore,
    RawOutput,
    SnapshotSpan,
    TopEntry,
)
from midstream.replica.text.vocabulary import Vocabulary

#: By the bits of a record: the names of its near ties.
NEAR_TIE_NAMES = [
    tuple(name for i, name in enumerate(NEAR_TIES) if bits >> i & 1) for bits in range(1 << len(NEAR_TIES))
]
#: Stands for minus infinity, which JSON does not have.
LOGPROB_MIN = -9999.0


class RecordEncoder:
    """Tells records as the request asked for them. wide_routes: a model of more than 256 experts."""

    #: Prompt tokens whose KV was reused, by prompt, of those that the engine has told of.
    cached: Mapping[int, int] = MappingProxyType({})

    def __init__(self, checked: Checked, vocabulary: Vocabulary, *, wide_routes: bool) -> None:
        self._checked = checked
        self._vocabulary = vocabulary
        self._label = vocabulary.id_label if checked.text.ids else vocabulary.label
        #: Whether each token's route stands beside its log-probability.
        self._routes = checked.routes
        self._route_dtype: str | UnsetType = "uint16" if wide_routes else UNSET

    def kept(self) -> Kept:
        return Kept([], [], [])

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

    def prompt_logprobs(self, records: Sequence[TokenRecord]) -> PromptLogprobs:
        """As vLLM tells them: each prompt token itself, then its alternatives, by id; null for the first one. AReaL reads the
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

    def _entry(self, record: TokenRecord, offset: int) -> Entry:
        token, token_bytes = self._label(record.token_id)
        top = [(t.token_id, t.logprob) for t in record.top_logprobs[: self._checked.top_logprobs]]
        if not top and self._checked.top_logprobs:
            # The first prompt token: nothing was before it. Some clients drop all alternatives when one list is empty.
            top = [(record.token_id, record.logprob)]
        sampling = record.sampling_logprob
        entry = Entry(
            token,
            token_bytes,
            finite(record.logprob),
            sampling if sampling is None else UNSET if isnan(sampling) else finite(sampling),
            offset,
            record.token_id,
            [self._top_entry(token_id, logprob) for token_id, logprob in top],
        )
        if self._routes and record.route is not None:
            entry.routing_matrix = b64encode(record.route).decode("ascii")
            entry.routing_matrix_dtype = self._route_dtype
        if record.near_tie:
            entry.near_tie = NEAR_TIE_NAMES[record.near_tie]
        if record.constrained:
            entry.logprob_of = ALLOWED
        return entry

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


def snapshot_spans(tokens: Sequence[Scored]) -> list[SnapshotSpan]:
    spans: list[SnapshotSpan] = []
    for at, (snapshot, run) in enumerate(groupby(tokens, lambda scored: scored.record.snapshot)):
        start = spans[-1].end if at else 0
        spans.append(SnapshotSpan(snapshot, start, start + sum(1 for _ in run)))
    return spans


def tell_kv(encoded: ChoiceTail, choice: Choice) -> None:
    if choice.kv:
        encoded.kv_snapshots = [SnapshotSpan(*span) for span in choice.kv]
    if choice.earlier_kv:
        encoded.earlier_kv_snapshots = [
            EarlierKv(tokens, [SnapshotSpan(*span) for span in kv]) for tokens, kv in choice.earlier_kv
        ]


def finite(logprob: float) -> float:
    if logprob >= LOGPROB_MIN:
        return logprob
    if logprob != logprob:
        raise EngineFailed("the model produced NaN; the serving snapshot's weights are not usable")
    return LOGPROB_MIN
