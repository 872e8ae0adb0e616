"""The short way of a token through a stream: of one that needs nothing but an event of its own.

Owns: which streams have it, and which of their events may take it.
Always holds: the bytes, and what is left in the choice, are those of the long way (`Generation._released`, `Parts`, and the
encoder's `event`). An event that cannot take the short way has changed nothing, and takes the long one.
"""

from __future__ import annotations

from collections.abc import Sequence

from midstream.core.resumption import ResumeLogWriter
from midstream.core.types import GenerationEvent
from midstream.replica.request.checked import Checked
from midstream.replica.response.answer import Parts, TokenEncoder
from midstream.replica.response.choice import Choice, Piece, Scored
from midstream.replica.response.records import LOGPROB_MIN
from midstream.replica.response.referenced import ReferencedRecords
from midstream.replica.turns.history import History


class TokenLane:
    """For a stream that no other replica began, without an echo, and without stages behind its choices.

    checked: each token needs what it asks for. histories: one for each prompt, or none. referenced: gets the records, too.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        parts: Parts,
        encoder: TokenEncoder,
        log: ResumeLogWriter | None,
        histories: Sequence[History],
        referenced: ReferencedRecords | None,
        checked: Checked,
    ) -> None:
        self._choices = choices
        self._begun = parts.begun
        self._encoder = encoder
        self._log = log
        self._histories = histories
        self._referenced = referenced
        self._n = checked.n
        self._routes, self._router_weights, self._masks = (
            checked.routes,
            checked.router_weights,
            checked.masks,
        )

    def data(self, event: GenerationEvent) -> bytes | None:
        """The bytes of an event that is one more token of its choice. None: it takes the long way."""
        index, tokens = event.index, event.tokens
        if (
            len(tokens) != 1
            or event.kv_snapshots is not None
            or event.cached_tokens is not None
            or event.queued_s is not None
            or index not in self._begun
        ):
            return None
        record = tokens[0]
        # The long way says what is wrong.
        if not record.logprob >= LOGPROB_MIN or (self._routes and record.route is None):
            return None
        if (self._masks and record.mask is None) or (self._router_weights and record.router_weights is None):
            return None
        choice = self._choices[index]
        offset = choice.chars
        text = choice.advance(record)
        if text is None:
            return None
        if self._histories:
            piece = Piece(record.snapshot, text, (Scored(record, offset),))
            self._histories[index // self._n].take(index, [piece], replayed=False)
        if self._referenced is not None:
            self._referenced.take(index, record)
        data = self._encoder.token_event(index, record, offset)
        return data if self._log is None else self._log.write(index, event, False) + data
