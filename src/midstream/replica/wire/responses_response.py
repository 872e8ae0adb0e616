"""Responses of OpenAI's Responses API: items and their events, with midstream's records beside them.

Always holds:
- A plain response has the items that its stream would have.
- No record of a token is lost. In a stream it is in the `midstream` of the delta that shows its text or call; where a token
  shows nothing, of an empty delta of the item that is open, and where none is open, of an event `midstream.tokens`.
- Where nothing is told of PING_TOKENS tokens that show nothing, a `keepalive` comes, as OpenAI's own servers send it.
- What an event says depends on those before it alone, so that a resumed stream goes on with the events that it would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Piece, Scored, ToolCall
from midstream.replica.response.kept import Kept
from midstream.replica.response.shapes import Entry, Extras, RawOutput, SnapshotSpan, Usage
from midstream.replica.text.vocabulary import Vocabulary
from midstream.replica.wire.answers import Records
from midstream.replica.wire.base import ResponseHead
from midstream.replica.wire.telling import PING_TOKENS, TellingEncoder, event

_encode = msgspec.json.Encoder().encode
_TEXT, _REASONING, _CALL = "output_text", "reasoning_text", "function_call_arguments"
#: Of an item's id.
_PREFIXES = {_TEXT: "msg_", _REASONING: "rs_", _CALL: "fc_"}


class Details(NamedTuple):
    """echoed: what a response says of its request. places: of each chat message, the field that it came from, and the place in
    it. logprobs: they are told with the text. records: they are told in `midstream`. keep: stores a response, by its id."""

    echoed: dict[str, Any]
    places: list[tuple[str, str]]
    logprobs: bool
    records: bool
    keep: Callable[[str, bytes], None] | None


class _Pieces(Kept):
    pieces: list[Piece] = msgspec.field(default_factory=list)

    def keep(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.generated.extend(piece.tokens)


class _Open:
    """The item that is being shown. entries: log-probabilities of its text."""

    def __init__(self, kind: str, item: dict[str, Any]) -> None:
        self.kind = kind
        self.item = item
        self.said: list[str] = []
        self.entries: list[Entry] = []


class ResponsesEncoder(TellingEncoder):
    """A wire.base.Encoder of one response."""

    def __init__(
        self, checked: Checked, head: ResponseHead, vocabulary: Vocabulary, details: Details
    ) -> None:
        super().__init__(checked, head, vocabulary, told_logprobs=details.records)
        self._details = details
        self._created = head.created
        self._sequence = 0
        #: Nothing is told: the client has it already, or gets it whole.
        self._quiet = False
        self._output: list[dict[str, Any]] = []
        self._open: _Open | None = None
        #: Tokens that have shown nothing yet.
        self._pending: tuple[Scored, ...] = ()
        self._reasoning_tokens = 0
        #: Tokens since the last event.
        self._unshown = 0

    # Streams

    def chunk(self, index: int, piece: Piece, first: Prompt | None) -> bytes:
        data = b"" if first is None else self._start(piece.snapshot, first)
        return data + self._take(piece)

    def finish_chunk(
        self, choice: Choice, snapshot: str, first: Prompt | None, raw: RawOutput | UnsetType, extras: Extras
    ) -> bytes:
        data = b"" if first is None else self._start(snapshot, first)
        data += self._end_items(choice)
        told = self._tail(choice, snapshot, extras)
        told.snapshots = [SnapshotSpan(*span) for span in choice.spans]
        response = self._finished(choice, snapshot, extras, told)
        return data + self._emit(
            f"response.{response['status']}", response=msgspec.Raw(self._stored(response))
        )

    def usage_chunk(self, snapshot: str, extras: Extras) -> bytes:
        """It is in the last event."""
        return b""

    def end(self) -> bytes:
        """There is no event behind the last one. A stream that was whole when it was resumed needs bytes all the same."""
        return b": end\n\n"

    def replayed(self, choice: Choice, pieces: list[Piece], first: Prompt | None) -> None:
        self._quiet = True
        for piece in pieces:
            self.chunk(choice.index, piece, first)
            first = None
        self._quiet = False

    def _start(self, snapshot: str, prompt: Prompt) -> bytes:
        begun = self._response(snapshot, "in_progress", None)
        if self._quiet:
            return self._emit("response.created") + self._emit("response.in_progress")
        told = self._told(snapshot, ())
        told.token_ids, told.prompt_token_ids = UNSET, self._first(snapshot, prompt).prompt_token_ids
        data = self._emit("response.created", response=begun | {"midstream": told})
        return data + self._emit("response.in_progress", response=begun)

    def _take(self, piece: Piece) -> bytes:
        data, tokens, before = b"", piece.tokens, self._sequence
        self._pending += tokens
        if piece.reasoning:
            data += self._show(_REASONING, piece.reasoning, piece.snapshot, tokens)
            tokens = ()
        if piece.text:
            data += self._show(_TEXT, piece.text, piece.snapshot, tokens)
            tokens = ()
        for call in piece.calls:
            data += self._show(_CALL, call.arguments, piece.snapshot, tokens, call)
            tokens = ()
        if tokens and self._records and not self._quiet:
            data += self._silent(piece.snapshot, tokens)
        elif tokens and self._records:
            self._sequence += 1
        self._unshown = 0 if self._sequence > before else self._unshown + len(tokens)
        if self._unshown < PING_TOKENS:
            return data
        self._unshown = 0
        return self._emit("keepalive")

    def _show(
        self, kind: str, text: str, snapshot: str, tokens: tuple[Scored, ...], call: ToolCall | None = None
    ) -> bytes:
        data = b""
        if self._open is None or self._open.kind != kind or call is not None:
            data = self._close("completed") + self._begin(kind, call)
        assert self._open is not None
        pending, self._pending = self._pending, ()
        entries: list[Entry] = []
        if kind == _TEXT and self._details.logprobs:
            entries = self.content(pending).content
            self._open.entries += entries
        elif kind == _REASONING:
            self._reasoning_tokens += len(pending)
        self._open.said.append(text)
        return data + self._delta(text, snapshot, tokens, entries)

    def _silent(self, snapshot: str, tokens: tuple[Scored, ...]) -> bytes:
        """Tokens that show nothing."""
        if self._open is None:
            return self._emit("midstream.tokens", midstream=self._told(snapshot, tokens))
        return self._delta("", snapshot, tokens, [])

    def _delta(self, text: str, snapshot: str, tokens: tuple[Scored, ...], entries: list[Entry]) -> bytes:
        assert self._open is not None
        name = f"response.{self._open.kind}.delta"
        if self._quiet:
            return self._emit(name)
        return self._emit(name, delta=text, **self._place(entries), midstream=self._told(snapshot, tokens))

    def _place(self, entries: list[Entry]) -> dict[str, Any]:
        """The fields that say which item and which part of it an event is about."""
        assert self._open is not None
        place: dict[str, Any] = {"item_id": self._open.item["id"], "output_index": len(self._output)}
        if self._open.kind != _CALL:
            place["content_index"] = 0
        if self._open.kind == _TEXT:
            place["logprobs"] = entries
        return place

    def _begin(self, kind: str, call: ToolCall | None = None) -> bytes:
        index = len(self._output)
        drawn = hashlib.blake2b(f"{self._id}/{index}".encode(), digest_size=16).hexdigest()
        item: dict[str, Any] = {"id": _PREFIXES[kind] + drawn, "status": "in_progress"}
        if call is not None:
            item |= {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == _REASONING:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._open = _Open(kind, item)
        data = self._emit("response.output_item.added", output_index=index, item=item)
        if call is None:
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            data += self._emit("response.content_part.added", **place, part=self._part(""))
        return data

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        part: dict[str, Any] = {"type": self._open.kind, "text": text}
        if self._open.kind == _TEXT:
            part |= {"annotations": [], "logprobs": self._open.entries}
        return part

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        kind, item, text = self._open.kind, self._open.item, "".join(self._open.said)
        place = self._place(self._open.entries)
        if kind == _CALL:
            item = item | {"status": status, "arguments": text}
            data = self._emit(f"response.{kind}.done", arguments=text, name=item["name"], **place)
        else:
            part = self._part(text)
            item = item | {"status": status, "content": [part]}
            data = self._emit(f"response.{kind}.done", text=text, **place)
            place.pop("logprobs", None)
            data += self._emit("response.content_part.done", **place, part=part)
        data += self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return data

    def _emit(self, name: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return b"" if self._quiet else event(name, sequence_number=self._sequence - 1, **fields)

    # Both

    def _end_items(self, choice: Choice) -> bytes:
        # An answer that says nothing is a message all the same.
        data = self._begin(_TEXT) if self._open is None and not self._output else b""
        return data + self._close("completed" if _is_whole(choice) else "incomplete")

    def _finished(self, choice: Choice, snapshot: str, extras: Extras, told: Records) -> dict[str, Any]:
        assert isinstance(extras.usage, Usage)
        status = "completed" if _is_whole(choice) else "incomplete"
        response = self._response(snapshot, status, self._usage(extras.usage))
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | {"midstream": told}

    def _response(self, snapshot: str, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._served(snapshot),
            "output": self._output,
            "usage": usage,
            **self._details.echoed,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        details = usage.prompt_tokens_details
        return {
            "input_tokens": usage.prompt_tokens,
            # None: nobody knows (see shapes.Usage).
            "input_tokens_details": {
                "cached_tokens": None if details is UNSET else details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }

    def _stored(self, response: dict[str, Any]) -> bytes:
        """The response as JSON, which is kept if it is to be stored."""
        data = _encode(response)
        if self._details.keep is not None:
            self._details.keep(self._id, data)
        return data

    # Plain responses

    def kept(self) -> Kept:
        return _Pieces([], [], [])

    def plain(
        self, choices: list[Choice], kept: list[Kept], prompts: list[Prompt], snapshot: str, extras: Extras
    ) -> bytes:
        (choice,), (had,), (prompt,) = choices, kept, prompts
        assert isinstance(had, _Pieces)
        self._quiet = True
        for piece in had.pieces:
            self._take(piece)
        self._end_items(choice)
        told = self._whole(choice, had, prompt, snapshot, extras)
        return self._stored(self._finished(choice, snapshot, extras, told))


def _is_whole(choice: Choice) -> bool:
    return choice.finish in ("stop", "tool_calls")
