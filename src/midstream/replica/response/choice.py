"""One choice of a response while it is generated: token records in; labelled pieces of text, records and calls out. Pure.

Always holds: a piece carries one snapshot, that of its records and of the tokens its text came from; the pieces of a
choice in order hold every record up to its end exactly once and the whole visible text; after the end nothing comes.
A character with bytes from two snapshots belongs to the token that completed it, and so does a tool call.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from midstream.core.types import FinishReason, TokenRecord
from midstream.replica.text.toolcalls import Item, ParsedCall, ToolParser
from midstream.replica.text.vocabulary import StopStrings, Vocabulary

#: Snapshot, start and end over prompt and generated tokens.
KvSpans = list[tuple[str, int, int]]


class Scored(msgspec.Struct, frozen=True):
    """A record and where its text begins in the text of the choice, in characters (echoed prompt included)."""

    record: TokenRecord
    text_offset: int


class ToolCall(msgspec.Struct, frozen=True):
    """index: within the message. arguments: JSON text, as generated."""

    index: int
    id: str
    name: str
    arguments: str


class Piece(msgspec.Struct, frozen=True):
    """echoed: tokens of the prompt that are shown again. tokens: generated ones."""

    snapshot: str
    text: str
    tokens: tuple[Scored, ...]
    echoed: tuple[Scored, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    #: Comes before `text`.
    reasoning: str = ""


class Choice:
    """`silent` tokens (the ones that end generation) have a record but no text; `shown` ones have text though special.

    min_tokens: no stop string ends before so many tokens, nor in the last of them. stop_shown: it is part of the text.
    """

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        stops: tuple[str, ...],
        silent: Collection[int],
        shown: frozenset[int] = frozenset(),
        *,
        min_tokens: int = 0,
        stop_shown: bool = False,
    ) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.generated = 0
        self.echoed = False
        #: A call was begun in thinking that was never closed, so that it is no call.
        self.call_in_thinking = False
        #: The token that it generated last.
        self.last: int | None = None
        self.snapshot: str | None = None
        #: A snapshot, and the number of the first token that it generated.
        self._runs: list[tuple[str, int]] = []
        #: The snapshots that computed the KV of all positions.
        self.kv: KvSpans = []
        #: A token number, and the KV spans of the tokens before it.
        self.earlier_kv: list[tuple[int, KvSpans]] = []
        self._detokenizer = vocabulary.detokenizer(shown)
        self._stops = StopStrings(stops, stop_shown) if stops else None
        self._min_tokens = min_tokens
        self._silent = silent
        #: Snapshot and length of the text that the stop filter holds back.
        self._held: deque[tuple[str, int]] = deque()
        #: Of the text so far, echoed prompt included.
        self.chars = 0

    def __repr__(self) -> str:
        return f"Choice({self.index}, generated={self.generated}, finish={self.finish})"

    def echo(self, records: tuple[TokenRecord, ...]) -> list[Piece]:
        """Pieces of the echoed prompt: a new one wherever the snapshot changes."""
        self.echoed = True
        pieces: list[Piece] = []
        text, run = "", list[Scored]()
        for record in records:
            if run and run[-1].record.snapshot != record.snapshot:
                pieces.append(Piece(run[-1].record.snapshot, text, (), tuple(run)))
                text, run = "", []
            run.append(Scored(record, self.chars))
            new = self._detokenizer.push(record.token_id)
            text += new
            self.chars += len(new)
        if run:
            pieces.append(Piece(run[-1].record.snapshot, text, (), tuple(run)))
            self.snapshot = run[-1].record.snapshot
        return pieces

    def feed(self, record: TokenRecord) -> list[Piece]:
        """The pieces one generated token releases; sets `finish` when it completes a stop string."""
        assert self.finish is None
        snapshot, token = record.snapshot, record.token_id
        if not self._runs or self._runs[-1][0] != snapshot:
            self._runs.append((snapshot, self.generated))
        self.generated += 1
        self.snapshot, self.last = snapshot, token
        scored = (Scored(record, self.chars),)
        if token in self._silent:
            text = ""
        elif (known := self._detokenizer.known.get(token)) is not None:
            text = known
        else:
            text = self._detokenizer.push(token)
        self.chars += len(text)
        if self._stops is None:
            return [Piece(snapshot, text, scored)]
        pieces = self._through_stops(snapshot, text)
        if self._stops.matched is not None:
            self.finish = "stop"
        if pieces and pieces[-1].snapshot == snapshot:
            pieces[-1] = replace(pieces[-1], tokens=scored)
        else:
            pieces.append(Piece(snapshot, "", scored))
        return pieces

    def advance(self, record: TokenRecord) -> str | None:
        """As `feed`, where all that a token releases is its own text, which is returned. None: it has to be fed."""
        token = record.token_id
        if self.snapshot != record.snapshot or self._stops is not None or token in self._silent:
            return None
        text = self._detokenizer.known.get(token)
        if text is not None:
            self.generated += 1
            self.last = token
            self.chars += len(text)
        return text

    def end(self, reason: FinishReason) -> list[Piece]:
        """The engine ended the choice: what was held back comes out."""
        assert self.finish is None
        snapshot = self.snapshot or ""
        tail = self._detokenizer.flush()
        self.finish = reason
        if self._stops is None:
            return [Piece(snapshot, tail, ())] if tail else []
        pieces = self._through_stops(snapshot, tail)
        if self._stops.matched is not None:
            self.finish = "stop"
        return pieces + self._label(self._stops.flush())

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stops is None else self._stops.matched

    def rename_kv(self, renamed: Sequence[tuple[str, str]]) -> None:
        """Earlier spans under a name mean this label from now on. renamed: name and label of each."""
        for name, label in renamed:
            for kv in (self.kv, *(kv for _, kv in self.earlier_kv)):
                kv[:] = [(label if snapshot == name else snapshot, start, end) for snapshot, start, end in kv]

    def take_kv(self, spans: Sequence[tuple[str, int, int]], prompt_len: int) -> None:
        """What the engine says of the KV from the next token on: that of before and more, or KV that was computed again."""
        self.close_kv(prompt_len)
        if self.kv and not _continues(self.kv, spans):
            self.earlier_kv.append((self.generated, self.kv))
        self.kv = list(spans)

    def close_kv(self, prompt_len: int) -> None:
        """The last KV span grew up to the token before the last one."""
        if self.kv:
            snapshot, start, end = self.kv[-1]
            self.kv[-1] = (snapshot, start, max(end, prompt_len + self.generated - 1))

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Snapshot, start and end over the generated tokens."""
        runs = pairwise([*self._runs, ("", self.generated)])
        return [(snapshot, start, end) for (snapshot, start), (_, end) in runs]

    def _through_stops(self, snapshot: str, text: str) -> list[Piece]:
        assert self._stops is not None
        if text:
            self._held.append((snapshot, len(text)))
        return self._label(self._stops.push(text, self.generated <= self._min_tokens))

    def _label(self, shown: str) -> list[Piece]:
        """Cut released text where the snapshot of the tokens it came from changes."""
        pieces: list[Piece] = []
        while shown:
            snapshot, length = self._held.popleft()
            part, shown = shown[:length], shown[length:]
            if len(part) < length:
                self._held.appendleft((snapshot, length - len(part)))
            if pieces and pieces[-1].snapshot == snapshot:
                pieces[-1] = replace(pieces[-1], text=pieces[-1].text + part)
            else:
                pieces.append(Piece(snapshot, part, ()))
        return pieces


def _continues(before: KvSpans, after: Sequence[tuple[str, int, int]]) -> bool:
    """True if `after` says the same as `before` of each position, and perhaps something of more positions."""
    *ended, (snapshot, start, end) = before
    if list(after[: len(ended)]) != ended or len(after) == len(ended):
        return False
    last = after[len(ended)]
    return last[:2] == (snapshot, start) and last[2] >= end


class CallStage:
    """Stands after a Choice. parallel: False when the first call is to be the only one."""

    def __init__(self, parser: ToolParser, parallel: bool, new_id: Callable[[], str]) -> None:
        self._parser = parser
        self._parallel = parallel
        self._new_id = new_id
        self._numbers = itertools.count()
        #: Snapshot and length of the text that the parser holds back.
        self._held: deque[tuple[str, int]] = deque()
        self.called = False
        self.call_in_thinking = False

    @property
    def complete(self) -> bool:
        """The one call that was asked for is there."""
        return self.called and not self._parallel

    def feed(self, pieces: list[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            if piece.text:
                self._held.append((piece.snapshot, len(piece.text)))
                for item in self._parser.push(piece.text):
                    self._release(item, out)
            if piece.reasoning:
                add_piece(out, Piece(piece.snapshot, "", (), reasoning=piece.reasoning))
            if piece.tokens:
                add_piece(out, Piece(piece.snapshot, "", piece.tokens))
        return out

    def end(self) -> list[Piece]:
        """The choice has ended: what was held back."""
        out: list[Piece] = []
        for item in self._parser.flush():
            self._release(item, out)
        return out

    def _release(self, item: Item, out: list[Piece]) -> None:
        """Cut an item where the snapshot of the tokens it came from changes; a call keeps the last one's."""
        left = len(item.raw)
        while left:
            snapshot, length = self._held.popleft()
            taken = min(length, left)
            left -= taken
            if taken < length:
                self._held.appendleft((snapshot, length - taken))
            if item.text:
                start = len(item.raw) - left - taken
                add_piece(out, Piece(snapshot, item.raw[start : start + taken], ()))
            elif item.calls and not left:
                add_piece(out, Piece(snapshot, "", (), calls=tuple(map(self._numbered, item.calls))))

    def _numbered(self, call: ParsedCall) -> ToolCall:
        self.called = True
        return ToolCall(next(self._numbers), call.id or self._new_id(), call.name, call.arguments)


def add_piece(out: list[Piece], piece: Piece) -> None:
    """Append, or make one with the last piece if it is of the same snapshot and has no records yet."""
    last = out[-1] if out else None
    if last is None or last.snapshot != piece.snapshot or last.tokens:
        out.append(piece)
        return
    out[-1] = Piece(
        piece.snapshot,
        last.text + piece.text,
        piece.tokens,
        calls=last.calls + piece.calls,
        reasoning=last.reasoning + piece.reasoning,
    )


def id_maker(length: int | None, seed: str) -> Callable[[], str]:
    """Ids as OpenAI's look, or of the length that a template insists on.

    They are the same ones again for the same seed, so that a resumed stream continues with those that it would have had.
    """
    numbers = itertools.count()

    def new() -> str:
        drawn = hashlib.blake2b(f"{seed}/{next(numbers)}".encode(), digest_size=16).hexdigest()
        return drawn[:length] if length else f"call_{drawn[:24]}"

    return new
