"""The tool calls of one choice while it is generated: pieces of generated text in, pieces of content and calls out. Pure.

Always holds: every record goes through, with a piece of its snapshot; content is labelled with the snapshot of the tokens
it came from, a call with that of the token that completed it.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Callable

from midstream.replica.choice import Piece, ToolCall
from midstream.replica.toolcalls import Item, ParsedCall, ToolParser


class CallStage:
    """Stands after a Choice. parallel: False when the first call is to be the only one."""

    def __init__(self, parser: ToolParser, parallel: bool, new_id: Callable[[], str]) -> None:
        self._parser = parser
        self._parallel = parallel
        self._new_id = new_id
        self._numbers = itertools.count()
        self._held: deque[tuple[str, int]] = deque()  # snapshot and length of text the parser holds back
        self.called = False

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
            if piece.tokens:
                _add(out, Piece(piece.snapshot, "", piece.tokens))
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
                _add(out, Piece(snapshot, item.raw[start : start + taken], ()))
            elif item.calls and not left:
                _add(out, Piece(snapshot, "", (), calls=tuple(map(self._numbered, item.calls))))

    def _numbered(self, call: ParsedCall) -> ToolCall:
        self.called = True
        return ToolCall(next(self._numbers), call.id or self._new_id(), call.name, call.arguments)


def _add(out: list[Piece], piece: Piece) -> None:
    """Append, or make one with the last piece if it is of the same snapshot and has no records yet."""
    last = out[-1] if out else None
    if last is None or last.snapshot != piece.snapshot or last.tokens:
        out.append(piece)
        return
    out[-1] = Piece(piece.snapshot, last.text + piece.text, piece.tokens, calls=last.calls + piece.calls)


def id_maker(length: int | None) -> Callable[[], str]:
    """Ids as OpenAI's look, or of the length that a template insists on."""
    return lambda: uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"
