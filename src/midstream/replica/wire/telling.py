"""midstream's own object `midstream` in the responses and events of other APIs than chat, which have no place for records.

Always holds: every such object names the snapshot of its tokens. A seam is told once, in the next object.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from midstream.core.sse import sse_event
from midstream.core.types import FinishReason, served_model_name
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Scored
from midstream.replica.response.kept import Kept
from midstream.replica.response.records import RecordEncoder, tell_kv
from midstream.replica.response.shapes import ChoiceTail, Extras, SnapshotSpan
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import Records
from midstream.replica.wire.base import ResponseHead

#: How choices end for which these APIs have no name.
UNNAMED: tuple[FinishReason, ...] = ("abort", "dead_end")


class TellingEncoder(RecordEncoder):
    """A RecordEncoder that tells records in such objects. told_logprobs: the request asked for them there."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, *, told_logprobs: bool = True
    ) -> None:
        super().__init__(checked, vocabulary, wide_routes=head.wide_routes)
        self._id = head.id
        self._model = head.model
        #: Told with the next event that has records.
        self.seam: dict[str, Any] | UnsetType = UNSET
        self._told_logprobs = told_logprobs and checked.logprobs is not None
        #: Whether each token is told of.
        self._records = checked.token_ids or self._told_logprobs

    def _served(self, snapshot: str) -> str:
        return served_model_name(self._model, snapshot)

    def _first(self, snapshot: str, prompt: Prompt) -> Records:
        """Of the event that begins a stream."""
        told = Records(snapshot)
        if self._checked.token_ids:
            told.prompt_token_ids = prompt.token_ids
        return told

    def _told(self, snapshot: str, tokens: tuple[Scored, ...]) -> Records:
        told = Records(snapshot)
        if self._checked.token_ids:
            told.token_ids = [scored.record.token_id for scored in tokens]
        if tokens and self._told_logprobs and (logprobs := self.logprobs(tokens)) is not None:
            told.logprobs = logprobs
        if self.seam is not UNSET:
            told.resumed = self.seam.get("resumed", UNSET)
            told.branch = self.seam.get("branch", UNSET)
            self.seam = UNSET
        return told

    def _tail(self, choice: Choice, snapshot: str, extras: Extras) -> Records:
        """Of the event that ends a stream."""
        told, kv = self._told(snapshot, ()), ChoiceTail()
        told.token_ids = UNSET
        if self._checked.perf_metrics:
            tell_kv(kv, choice)
        told.kv_snapshots, told.earlier_kv_snapshots = kv.kv_snapshots, kv.earlier_kv_snapshots
        told.perf_metrics = extras.perf_metrics
        if choice.call_in_thinking:
            told.call_in_thinking = True
        if choice.finish in UNNAMED:
            told.finish_reason = choice.finish
        return told

    def _whole(self, choice: Choice, had: Kept, prompt: Prompt, snapshot: str, extras: Extras) -> Records:
        """Of a plain response."""
        told = self._tail(choice, snapshot, extras)
        told.snapshots = [SnapshotSpan(*span) for span in choice.spans]
        if self._checked.token_ids:
            told.prompt_token_ids = prompt.token_ids
            told.token_ids = [scored.record.token_id for scored in had.generated]
        if self._told_logprobs and (logprobs := self.logprobs(had.generated)) is not None:
            told.logprobs = logprobs
        return told


#: Tokens that show nothing, as those of a long call, after which a stream has an event all the same.
PING_TOKENS = 16


def event(name: str, /, **fields: Any) -> bytes:
    """A server-sent event whose data repeats its name in `type`."""
    return b"event: %b\n%b" % (name.encode(), sse_event({"type": name, **fields}))
