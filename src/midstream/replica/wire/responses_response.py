"""Responses of OpenAI's Responses API: the items and the events that blocks are there.

Always holds: events are numbered from 0 on, those that the client has from another replica, too. A response that is stored is
stored as it was sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.answer import ChoicePart, Ending, Extras, ResponseHead
from midstream.replica.response.choice import Scored
from midstream.replica.response.shapes import Entry, spans
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import Records, ResponsesUsage
from midstream.replica.wire.blocks import BlockEncoder, BlockKind, OpenBlock
from midstream.replica.wire.dialects import END_NAMES, responses_usage

_encode = msgspec.json.Encoder().encode
#: What shows a block's text, in the names of its events; and how its item's id begins.
_CONTENTS: dict[BlockKind, tuple[str, str]] = {
    "text": ("output_text", "msg_"),
    "thinking": ("reasoning_text", "rs_"),
    "call": ("function_call_arguments", "fc_"),
}


class ResponsesDetails(NamedTuple):
    """echoed: what a response says of its request. places: of each chat message, the field that it came from, and the place in
    it. logprobs: events have them with the text. records: `midstream` has them. keep: stores a response, by its id."""

    echoed: dict[str, Any]
    places: list[tuple[str, str]]
    logprobs: bool
    records: bool
    keep: Callable[[str, bytes], None] | None


class ResponsesEncoder(BlockEncoder):
    """One response."""

    silent_event = "midstream.tokens"
    ping_event = "keepalive"

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: ResponsesDetails
    ) -> None:
        super().__init__(checked, head, vocabulary, with_logprobs=details.records)
        self._details = details
        self._output: list[dict[str, Any]] = []
        #: The item of the block that is open, and log-probabilities of its text.
        self._item: dict[str, Any] = {}
        self._entries: list[Entry] = []
        self._reasoning_tokens = 0

    def end(self) -> bytes:
        """There is no event behind the last one. A stream that was whole when it was resumed needs bytes all the same."""
        return b": end\n\n"

    def _emit(self, name: str, /, **fields: Any) -> bytes:
        return super()._emit(name, sequence_number=self._events, **fields)

    def _start(self, snapshot: str, prompt: Prompt) -> bytes:
        begun = self._response(snapshot, "in_progress", None)
        records = self._records_of(snapshot, ())
        records.token_ids = UNSET
        if self._checked.token_ids:
            records.prompt_token_ids = prompt.token_ids
        data = self._emit("response.created", response=begun | {"midstream": records})
        return data + self._emit("response.in_progress", response=begun)

    def _begin(self, block: OpenBlock) -> bytes:
        index, prefix = self._closed, _CONTENTS[block.kind][1]
        drawn = hashlib.blake2b(f"{self._head.id}/{index}".encode(), digest_size=16).hexdigest()
        item: dict[str, Any] = {"id": prefix + drawn, "status": "in_progress"}
        if block.call is not None:
            name = block.call.name
            item |= {"type": "function_call", "call_id": block.call.id, "name": name, "arguments": ""}
        elif block.kind == "thinking":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._item, self._entries = item, []
        data = self._emit("response.output_item.added", output_index=index, item=item)
        if block.call is None:
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            data += self._emit("response.content_part.added", **place, part=self._part(block, ""))
        return data

    def _delta(
        self,
        block: OpenBlock,
        text: str,
        snapshot: str,
        tokens: tuple[Scored, ...],
        made_of: Sequence[Scored] = (),
    ) -> bytes:
        entries: list[Entry] = []
        if block.kind == "text" and self._details.logprobs:
            entries = self.content(made_of).content
            self._entries += entries
        elif block.kind == "thinking":
            self._reasoning_tokens += len(made_of)
        name = f"response.{_CONTENTS[block.kind][0]}.delta"
        if self._quiet:
            return self._emit(name)
        records = self._records_of(snapshot, tokens)
        return self._emit(name, delta=text, **self._place(block, entries), midstream=records)

    def _place(self, block: OpenBlock, entries: list[Entry]) -> dict[str, Any]:
        """The fields that say which item and which part of it an event is about."""
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": self._closed}
        if block.call is None:
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = entries
        return place

    def _part(self, block: OpenBlock, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _CONTENTS[block.kind][0], "text": text}
        if block.kind == "text":
            part |= {"annotations": [], "logprobs": self._entries}
        return part

    def _end(self, block: OpenBlock, ending: Ending | None) -> bytes:
        status = "completed" if ending is None else END_NAMES[ending.reason].responses
        text, place = "".join(block.texts), self._place(block, self._entries)
        done = f"response.{_CONTENTS[block.kind][0]}.done"
        if block.call is not None:
            item = self._item | {"status": status, "arguments": text}
            data = self._emit(done, arguments=text, name=item["name"], **place)
        else:
            part = self._part(block, text)
            item = self._item | {"status": status, "content": [part]}
            data = self._emit(done, text=text, **place)
            place.pop("logprobs", None)
            data += self._emit("response.content_part.done", **place, part=part)
        data += self._emit("response.output_item.done", output_index=self._closed, item=item)
        self._output.append(item)
        return data

    def _finish(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        data = self._end_items(ending)
        records = self._records_at_end(part, ending, extras)
        records.snapshots = spans(ending.spans)
        status, response = self._finished(part, ending, extras, records)
        return data + self._emit(f"response.{status}", response=msgspec.Raw(response))

    def _whole(self, part: ChoicePart, ending: Ending, extras: Extras) -> bytes:
        self._end_items(ending)
        return self._finished(part, ending, extras, self._records_of_whole(part, ending, extras))[1]

    def _end_items(self, ending: Ending) -> bytes:
        data = b""
        if self._open is None and not self._output:
            # An answer that says nothing is a message all the same.
            self._open = OpenBlock("text", None)
            data = self._begin(self._open)
        return data + self._close(ending)

    def _finished(
        self, part: ChoicePart, ending: Ending, extras: Extras, records: Records
    ) -> tuple[str, bytes]:
        """The status, and the response as JSON, which is kept if it is to be stored."""
        assert extras.counts is not None
        status = END_NAMES[ending.reason].responses
        usage = responses_usage(extras.counts, self._reasoning_tokens)
        response = self._response(part.snapshot, status, usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        data = _encode(response | {"midstream": records})
        if self._details.keep is not None:
            self._details.keep(self._head.id, data)
        return status, data

    def _response(self, snapshot: str, status: str, usage: ResponsesUsage | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.served(snapshot),
            "output": self._output,
            "usage": usage,
            **self._details.echoed,
        }
