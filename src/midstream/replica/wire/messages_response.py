"""Responses of Anthropic's Messages API: the events and the content that blocks are there.

Always holds: a block has the delta of its kind, and a tool's id looks as Anthropic's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead
from midstream.replica.response.choice import Scored, ToolCall
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import (
    Block,
    MessagesAnswer,
    MessagesUsage,
    Records,
    TextBlock,
    ThinkingBlock,
    ToolUse,
)
from midstream.replica.wire.blocks import BlockEncoder, BlockKind, OpenBlock
from midstream.replica.wire.dialects import END_NAMES, messages_usage

_encode = msgspec.json.Encoder().encode
_OPENAI_ID = "call_"
#: The delta of a block, and the field that it shows its text in.
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesEncoder(BlockEncoder):
    """One message."""

    silent_event = "midstream_tokens"
    ping_event = "ping"

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: object = None
    ) -> None:
        super().__init__(checked, head, vocabulary)
        self._content: list[Block] = []

    def end(self) -> bytes:
        return self._emit("message_stop")

    def _start(self, snapshot: str, prompt: Prompt) -> bytes:
        cached = self.cached.get(0)
        usage = MessagesUsage(len(prompt.token_ids) - (cached or 0), 0, cached)
        message = MessagesAnswer(self._head.id, self.served(snapshot), [], usage)
        records = Records(snapshot)
        if self._checked.token_ids:
            records.prompt_token_ids = prompt.token_ids
        # This event stands for the first token, and the first piece of a stream has one.
        self._unshown = -1
        return self._emit("message_start", message=message, midstream=records)

    def _begin(self, block: OpenBlock) -> bytes:
        return self._emit("content_block_start", index=self._closed, content_block=_content(block, "", "{}"))

    def _delta(
        self,
        block: OpenBlock,
        text: str,
        snapshot: str,
        tokens: tuple[Scored, ...],
        made_of: Sequence[Scored] = (),
    ) -> bytes:
        name = "content_block_delta"
        if self._quiet:
            return self._emit(name)
        kind, field = _DELTAS[block.kind]
        records = self._records_of(snapshot, tokens)
        return self._emit(name, index=self._closed, delta={"type": kind, field: text}, midstream=records)

    def _end(self, block: OpenBlock, ending: Ending | None) -> bytes:
        text = "".join(block.texts)
        self._content.append(_content(block, text, text))
        return self._emit("content_block_stop", index=self._closed)

    def _finish(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        data = self._close(ending)
        reason, sequence = _stopped(ending)
        assert extras.counts is not None
        return data + self._emit(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=messages_usage(extras.counts),
            midstream=self._records_at_end(part, ending, extras),
        )

    def _whole(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        self._close(ending)
        assert extras.counts is not None
        usage = messages_usage(extras.counts)
        records = self._records_of_whole(part, ending, extras)
        model = self.served(part.snapshot)
        return _encode(
            MessagesAnswer(self._head.id, model, self._content, usage, *_stopped(ending), midstream=records)
        )


def _stopped(ending: Ending) -> tuple[str, str | None]:
    """The stop reason and the stop sequence."""
    return END_NAMES[ending.reason].messages, ending.stop_text


def _content(block: OpenBlock, text: str, arguments: str) -> Block:
    if block.call is not None:
        return ToolUse(_tool_id(block.call), block.call.name, msgspec.Raw(arguments.encode()))
    return ThinkingBlock(text) if block.kind == "thinking" else TextBlock(text)


def _tool_id(call: ToolCall) -> str:
    """As Anthropic's look, but where the model or its template has a form of its own."""
    made_here = call.id.startswith(_OPENAI_ID) and len(call.id) == len(_OPENAI_ID) + 24
    return "toolu_" + call.id.removeprefix(_OPENAI_ID) if made_here else call.id
