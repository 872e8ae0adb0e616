"""Answers of the Messages API and the Responses API: blocks one after another, of thinking, of text, and of one call each.

Owns: which block is open, and midstream's own object `midstream`, as these APIs have no place for records.
Always holds:
- A whole response has the blocks that its stream would have: it is made of the same steps, without their bytes.
- No record of a token is lost. In a stream it is in the `midstream` of the delta that shows its text or call; where a token
  shows nothing, of an empty delta of the block that is open, and where none is open, of an event of its own.
- After PING_TOKENS tokens without any event, an empty event comes.
- Every such object names the snapshot of its tokens. The next object has the seam, and no other.
- What an event says depends on those before it alone, so a resumed stream has the events of one that was never lost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from midstream.core.sse import sse_event
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead
from midstream.replica.response.choice import Piece, Scored, ToolCall
from midstream.replica.response.records import RecordEncoder
from midstream.replica.response.shapes import spans
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import Records
from midstream.replica.wire.dialects import UNNAMED

#: Tokens that show nothing, as those of a long call, after which a stream has an event all the same.
PING_TOKENS = 16
BlockKind = Literal["thinking", "text", "call"]


class OpenBlock(Struct):
    """The block that is being shown. texts: its text so far. call: of a block of this kind."""

    kind: BlockKind
    call: ToolCall | None
    texts: list[str] = []


class BlockEncoder(RecordEncoder):
    """Of one answer. with_logprobs: `midstream` has them where the request asked for them."""

    #: The events of tokens without a block, and of tokens without records.
    silent_event: str
    ping_event: str

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, *, with_logprobs: bool = True
    ) -> None:
        super().__init__(checked, head, vocabulary)
        self._with_logprobs = with_logprobs and checked.logprobs is not None
        #: Whether each token has records in `midstream`.
        self._has_records = checked.token_ids or self._with_logprobs
        #: Nothing is written: the client has it already, or gets it whole.
        self._quiet = False
        self._events = 0
        self._open: OpenBlock | None = None
        #: How many blocks were begun before the one that is open.
        self._closed = 0
        #: Tokens that have shown nothing yet.
        self._pending: list[Scored] = []
        #: How many tokens came since the last event.
        self._unshown = 0

    # -- what a dialect has of its own

    @abstractmethod
    def _start(self, snapshot: str, prompt: Prompt) -> bytes:
        """The events that begin a stream."""

    @abstractmethod
    def _begin(self, block: OpenBlock) -> bytes:
        """The events that begin a block."""

    @abstractmethod
    def _delta(
        self,
        block: OpenBlock,
        text: str,
        snapshot: str,
        tokens: tuple[Scored, ...],
        made_of: Sequence[Scored] = (),
    ) -> bytes:
        """The event that continues a block. tokens: those whose records it has. made_of: those that its text came of."""

    @abstractmethod
    def _end(self, block: OpenBlock, ending: Ending | None) -> bytes:
        """The events that end a block. ending: of the answer, if it ends with the block."""

    @abstractmethod
    def _finish(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        """The events that end the answer."""

    @abstractmethod
    def _whole(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        """The body of a whole response, whose blocks were made."""

    # -- steps

    def event(self, part: ChoicePart, extras: Extras) -> bytes:
        data = self._start(part.snapshot, part.prompt) if part.first else b""
        for piece in part.pieces:
            data += self._take(piece)
        if part.ending is not None:
            data += self._finish(part, part.ending, extras)
        return data

    def replayed(self, part: ChoicePart) -> None:
        self._quiet = True
        self.event(part, Extras())
        self._quiet = False

    def whole(self, parts: list[ChoicePart], snapshot: str, extras: Extras) -> bytes:
        (part,) = parts
        assert part.ending is not None
        self._quiet = True
        for piece in part.pieces:
            self._take(piece)
        return self._whole(part, part.ending, extras)

    def _take(self, piece: Piece) -> bytes:
        data, tokens, before = b"", piece.tokens, self._events
        self._pending.extend(tokens)
        if piece.reasoning:
            data += self._show("thinking", piece.reasoning, piece.snapshot, tokens)
            tokens = ()
        if piece.text:
            data += self._show("text", piece.text, piece.snapshot, tokens)
            tokens = ()
        for call in piece.calls:
            data += self._show("call", call.arguments, piece.snapshot, tokens, call)
            tokens = ()
        if tokens and self._has_records:
            data += self._silent(piece.snapshot, tokens)
        self._unshown = 0 if self._events > before else self._unshown + len(tokens)
        if self._unshown < PING_TOKENS:
            return data
        self._unshown = 0
        return self._emit(self.ping_event)

    def _show(
        self,
        kind: BlockKind,
        text: str,
        snapshot: str,
        tokens: tuple[Scored, ...],
        call: ToolCall | None = None,
    ) -> bytes:
        """A call comes whole. Its block stays open for the tokens of what is between it and the next one."""
        data = b""
        if self._open is None or self._open.kind != kind or call is not None:
            data = self._close()
            self._open = OpenBlock(kind, call)
            data += self._begin(self._open)
        self._open.texts.append(text)
        made_of, self._pending = self._pending, []
        return data + self._delta(self._open, text, snapshot, tokens, made_of)

    def _silent(self, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        """Tokens that show nothing."""
        if self._open is not None:
            return self._delta(self._open, "", snapshot, tokens)
        return self._emit(self.silent_event, midstream=self._records_of(snapshot, tokens))

    def _close(self, ending: Ending | None = None) -> bytes:
        if self._open is None:
            return b""
        block, self._open = self._open, None
        data = self._end(block, ending)
        self._closed += 1
        return data

    def _emit(self, name: str, /, **fields: Any) -> bytes:
        """A server-sent event whose data repeats its name in `type`."""
        self._events += 1
        if self._quiet:
            return b""
        return b"event: %b\n%b" % (name.encode(), sse_event({"type": name, **fields}))

    # -- records

    def _records_of(self, snapshot: str, tokens: tuple[Scored, ...]) -> Records:
        records = Records(snapshot)
        if self._quiet:
            return records
        if self._checked.token_ids:
            records.token_ids = [scored.record.token_id for scored in tokens]
        if tokens and self._with_logprobs and (logprobs := self.logprobs(tokens)) is not None:
            records.logprobs = logprobs
        self.tell_seam(records)
        return records

    def _records_at_end(self, part: ChoicePart, ending: Ending, extras: Extras) -> Records:
        """Of the event that ends a stream."""
        records = Records(part.snapshot)
        self.tell_seam(records)
        self.tell_kv(records, ending)
        records.perf_metrics = extras.perf_metrics
        if ending.call_in_thinking:
            records.call_in_thinking = True
        if ending.reason in UNNAMED:
            records.finish_reason = ending.reason
        return records

    def _records_of_whole(self, part: ChoicePart, ending: Ending, extras: Extras) -> Records:
        """Of a whole response."""
        records = self._records_at_end(part, ending, extras)
        records.snapshots = spans(ending.spans)
        if self._checked.token_ids:
            records.prompt_token_ids = part.prompt.token_ids
            records.token_ids = [scored.record.token_id for scored in ending.whole.tokens]
        if self._with_logprobs and (logprobs := self.logprobs(ending.whole.tokens)) is not None:
            records.logprobs = logprobs
        return records
