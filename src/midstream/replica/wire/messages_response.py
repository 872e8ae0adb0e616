"""Responses of Anthropic's Messages API: content blocks and their events, with midstream's records beside them.

Always holds: no record of a token is lost. In a stream it is in the `midstream` of the event that shows its text or call; where
a token shows nothing, of an empty delta of the block that is open, and where none is open, of an event `midstream_tokens`.
Where nothing is told of PING_TOKENS tokens that show nothing, a `ping` comes.
Every such object names the snapshot of its tokens. What an event says depends on those before it alone, so that a resumed
stream goes on with the events that it would have had.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Piece, Scored, ToolCall
from midstream.replica.response.kept import Kept
from midstream.replica.response.shapes import Extras, RawOutput, Usage
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import (
    Block,
    MessagesAnswer,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUse,
)
from midstream.replica.wire.base import ResponseHead
from midstream.replica.wire.telling import PING_TOKENS, UNNAMED, TellingEncoder, event

_encode = msgspec.json.Encoder().encode
_OPENAI_ID = "call_"


#: The field that a kind of delta shows its text in.
_SHOWN = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class MessagesEncoder(TellingEncoder):
    """A wire.base.Encoder of one message."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: object = None
    ) -> None:
        super().__init__(checked, head, vocabulary)
        #: The delta of the block that is open, and how many blocks were begun.
        self._open: str | None = None
        self._blocks = 0
        #: The token that came last.
        self._last: int | None = None
        #: Tokens since the last event.
        self._unshown = 0

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        data = b"" if first is None else self._start(piece.snapshot, first)
        if piece.tokens:
            self._last = piece.tokens[-1].record.token_id
        tokens = piece.tokens
        if piece.reasoning:
            data += self._thinking(piece.reasoning, piece.snapshot, tokens)
            tokens = ()
        if piece.text:
            data += self._text(piece.text, piece.snapshot, tokens)
            tokens = ()
        for call in piece.calls:
            data += self._call(call, piece.snapshot, tokens)
            tokens = ()
        if tokens and self._records:
            data += self._silent(piece.snapshot, tokens)
        self._unshown = 0 if data else self._unshown + len(tokens)
        if self._unshown < PING_TOKENS:
            return data
        self._unshown = 0
        return event("ping")

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        data = b"" if first is None else self._start(snapshot, first)
        data += self._close()
        reason, sequence = self._ended(choice, self._last)
        assert isinstance(extras.usage, Usage)
        return data + event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(extras.usage),
            midstream=self._tail(choice, snapshot, extras),
        )

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        """It is in the event at the end of the message."""
        return b""

    def end(self) -> bytes:
        return event("message_stop")

    def replayed(self, choice: Choice, pieces: list[Piece], first: Prompt | None) -> None:
        seam, self.seam = self.seam, UNSET
        for piece in pieces:
            self.chunk(choice.index, piece, first)
            first = None
        if choice.finish is not None:
            self._close()
        self.seam = seam

    def _start(self, snapshot: str, prompt: Prompt) -> bytes:
        size = len(prompt.token_ids)
        cached = self.cached.get(0)
        usage = MessagesUsage(size - (cached or 0), 0, cached)
        message = MessagesAnswer(self._id, self._served(snapshot), [], usage)
        return event("message_start", message=message, midstream=self._first(snapshot, prompt))

    def _thinking(self, text: str, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        data = b""
        if self._open != "thinking_delta":
            data = self._close() + self._begin("thinking_delta", ThinkingBlock(""))
        return data + self._delta({"type": "thinking_delta", "thinking": text}, snapshot, tokens)

    def _text(self, text: str, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        data = b""
        if self._open != "text_delta":
            data = self._close() + self._begin("text_delta", TextBlock(""))
        return data + self._delta({"type": "text_delta", "text": text}, snapshot, tokens)

    def _call(self, call: ToolCall, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        """A call comes whole. Its block stays open for the tokens of what is between it and the next one."""
        block = ToolUse(_tool_id(call), call.name, msgspec.Raw(b"{}"))
        data = self._close() + self._begin("input_json_delta", block)
        return data + self._delta(
            {"type": "input_json_delta", "partial_json": call.arguments}, snapshot, tokens
        )

    def _silent(self, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        """Tokens that show nothing."""
        if self._open is None:
            return event("midstream_tokens", midstream=self._told(snapshot, tokens))
        shown = _SHOWN[self._open]
        return self._delta({"type": self._open, shown: ""}, snapshot, tokens)

    def _begin(self, delta: str, block: Block) -> bytes:
        self._open = delta
        self._blocks += 1
        return event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, str], snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        told = self._told(snapshot, tokens)
        return event("content_block_delta", index=self._blocks - 1, delta=delta, midstream=told)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event("content_block_stop", index=self._blocks - 1)

    # Both

    def _ended(self, choice: Choice, last: int | None) -> tuple[str, str | None]:
        """The stop reason and the stop sequence."""
        if choice.finish == "tool_calls":
            return "tool_use", None
        if choice.finish == "length":
            most = self._checked.max_tokens
            cut = most is not None and choice.generated < most
            return "model_context_window_exceeded" if cut else "max_tokens", None
        if choice.finish in UNNAMED:
            # The message was cut.
            return "max_tokens", None
        # The name of a special token, which has no text, ends a message as its token.
        name = None if last is None else self._vocabulary.raw_text([last])
        found = choice.stop_string or (name if name in self._checked.stops else None)
        return ("end_turn", None) if found is None else ("stop_sequence", found)

    # Plain responses

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        (choice,), (had,), (prompt,) = choices, kept, prompts
        told = self._whole(choice, had, prompt, snapshot, extras)
        assert isinstance(extras.usage, Usage)
        last = had.generated[-1].record.token_id if had.generated else None
        reason, sequence = self._ended(choice, last)
        usage = _usage(extras.usage)
        message = MessagesAnswer(
            self._id, self._served(snapshot), _blocks(had), usage, reason, sequence, midstream=told
        )
        return _encode(message)


def _blocks(kept: Kept) -> list[Block]:
    """As the blocks of a stream would be."""
    blocks: list[Block] = [ThinkingBlock("".join(kept.reasoning))] if kept.reasoning else []
    done = 0
    for call, at in [*zip(kept.calls, kept.calls_at, strict=True), (None, len(kept.text))]:
        text = "".join(kept.text[done:at])
        done = at
        if text:
            blocks.append(TextBlock(text))
        if call is not None:
            blocks.append(ToolUse(_tool_id(call), call.name, msgspec.Raw(call.arguments.encode())))
    return blocks


def _tool_id(call: ToolCall) -> str:
    """As Anthropic's look, but where the model or its template has a form of its own."""
    made_here = call.id.startswith(_OPENAI_ID) and len(call.id) == len(_OPENAI_ID) + 24
    return "toolu_" + call.id.removeprefix(_OPENAI_ID) if made_here else call.id


def _usage(usage: Usage) -> MessagesUsage:
    details = usage.prompt_tokens_details
    cached = None if details is UNSET else details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - (cached or 0), usage.completion_tokens, cached)
