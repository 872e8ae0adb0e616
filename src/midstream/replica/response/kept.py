"""What a choice keeps of itself while it is generated, for the end of its response. Pure.

Always holds: texts, tokens and calls are in the order in which they were generated.
"""

from __future__ import annotations

import msgspec

from midstream.replica.response.choice import Piece, Scored, ToolCall


class Kept(msgspec.Struct):
    """What one choice keeps for the end: all of a plain response, or the `raw_output` of a stream."""

    text: list[str]
    echoed: list[Scored]
    generated: list[Scored]
    calls: list[ToolCall] = []
    #: How many texts stand before each call.
    calls_at: list[int] = []
    reasoning: list[str] = []

    def keep(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.calls.extend(piece.calls)
        self.calls_at.extend(len(self.text) for _ in piece.calls)
        if piece.reasoning:
            self.reasoning.append(piece.reasoning)
        (self.echoed if piece.echoed else self.generated).extend(piece.tokens)
