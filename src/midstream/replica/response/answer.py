"""What a choice says, in words of our own: the one form in which every wire gets events of streams and whole responses. Pure.

Always holds: a whole choice is the sum of the pieces of its stream. What each dialect calls an EndReason and TokenCounts
is in wire/dialects.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.references import InFiles, RecordReference
from midstream.core.types import TokenRecord
from midstream.core.versions import as_version
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, KvSpans, Piece
from midstream.replica.text.vocabulary import Vocabulary

#: end: the model ended it. stop: a stop string of the request did. context: the context was full before `max_tokens`.
EndReason = Literal["end", "stop", "length", "context", "tool_calls", "abort", "dead_end"]


class ResponseHead(NamedTuple):
    """id, created (seconds since the epoch): of the response. wide_routes: the model has more than 256 experts.
    route_shape: MoE layers and experts per token of a route. vocab_size: of the model."""

    id: str
    created: int
    model: str
    wide_routes: bool
    route_shape: tuple[int, int] = (0, 0)
    vocab_size: int = 0


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of a request, over all prompts and choices. cached: prompt tokens whose KV was reused; None: the engine does
    not say (vLLM, after a stop string)."""

    prompt: int
    completion: int
    cached: int | None


class Extras(msgspec.Struct):
    """What a last event or a whole response says beside its choices.

    counts: None where another event has them. prompts: by prompt, records of its last tokens, where they were asked for.
    took_s: seconds since the request came. reference: of the file that has the records. in_files: by choice, columns that are
    in files.
    """

    counts: TokenCounts | None = None
    perf_metrics: dict[str, Any] | UnsetType = UNSET
    prompts: Mapping[int, tuple[TokenRecord, ...]] = {}
    took_s: float = 0.0
    reference: RecordReference | UnsetType = UNSET
    in_files: Sequence[InFiles] = ()


#: Of an event that ends no choice.
NOTHING = Extras()


class Ending(msgspec.Struct, frozen=True):
    """How a choice ended. stop_text, stop_token: the stop string or the token that ended it. spans: the snapshots of its
    tokens. kv, earlier_kv: as in Choice. whole: all that it said, where the wire keeps it."""

    reason: EndReason
    generated: int
    stop_text: str | None
    stop_token: int | None
    spans: list[tuple[str, int, int]]
    kv: KvSpans
    earlier_kv: list[tuple[int, KvSpans]]
    call_in_thinking: bool
    whole: Piece


class ChoicePart(msgspec.Struct, frozen=True):
    """What one event tells of a choice, or all of the choice in a whole response.

    snapshot: of the tokens, or of the last one. piece: the pieces as one. first: no part of the choice was sent before.
    ending: None while more comes.
    """

    index: int
    prompt: Prompt
    snapshot: str
    pieces: Sequence[Piece]
    piece: Piece
    first: bool
    ending: Ending | None = None


def first_and_last_version(parts: Sequence[ChoicePart]) -> tuple[int | str, int | str]:
    """The versions at the first token of the first choice, and at the last one of the last. parts: whole choices, or their
    last parts."""
    first, last = (
        [span[0] for span in part.ending.spans] if part.ending else [] for part in (parts[0], parts[-1])
    )
    return as_version((first or [parts[0].snapshot])[0]), as_version((last or [parts[-1].snapshot])[-1])


class TokenEncoder(Protocol):
    """An encoder that can make the event of a token from its numbers."""

    def token_event(self, index: int, record: TokenRecord, offset: int) -> bytes:
        """As the `event` of a part that is one token of a choice, neither the first part of it nor the last.

        record: its log-probability is a number that JSON has. offset: where the token's text, which it has by itself, begins
        in the choice's text.
        """


def joined(pieces: Sequence[Piece], snapshot: str) -> Piece:
    if not pieces:
        return Piece(snapshot, "", ())
    return Piece(
        snapshot,
        "".join([piece.text for piece in pieces]),
        tuple([scored for piece in pieces for scored in piece.tokens]),
        tuple([scored for piece in pieces for scored in piece.echoed]),
        tuple([call for piece in pieces for call in piece.calls]),
        "".join([piece.reasoning for piece in pieces]),
    )


class Parts:
    """Makes the parts of a request's choices. keeps: an ending has all that its choice said."""

    def __init__(
        self, checked: Checked, prompts: Sequence[Prompt], vocabulary: Vocabulary, *, keeps: bool
    ) -> None:
        self._checked = checked
        self._n = checked.n
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._keeps = keeps
        #: The choices that have a part already.
        self.begun: set[int] = set()
        #: By choice, its pieces so far, where they are kept.
        self._pieces: dict[int, list[Piece]] = {}

    def part(self, index: int, piece: Piece) -> ChoicePart:
        """The next part of a choice. index: the number of the choice."""
        if self._keeps:
            self._pieces.setdefault(index, []).append(piece)
        first = index not in self.begun
        self.begun.add(index)
        return ChoicePart(index, self._prompts[index // self._n], piece.snapshot, (piece,), piece, first)

    def end(self, choice: Choice, snapshot: str) -> ChoicePart:
        """snapshot: of a choice without tokens."""
        index, snapshot = choice.index, choice.snapshot or snapshot
        ending = self._ending(choice, self._pieces.get(index, ()), snapshot)
        first = index not in self.begun
        self.begun.add(index)
        nothing = Piece(snapshot, "", ())
        return ChoicePart(index, self._prompts[index // self._n], snapshot, (), nothing, first, ending)

    def whole(self, choice: Choice, pieces: Sequence[Piece], snapshot: str) -> ChoicePart:
        """All of a choice that has ended."""
        index, snapshot = choice.index, choice.snapshot or snapshot
        ending = self._ending(choice, pieces, snapshot)
        return ChoicePart(
            index, self._prompts[index // self._n], snapshot, pieces, ending.whole, True, ending
        )

    def _ending(self, choice: Choice, pieces: Sequence[Piece], snapshot: str) -> Ending:
        stop_text, stop_token = self._stopped_by(choice)
        return Ending(
            self._reason(choice, stop_text),
            choice.generated,
            stop_text,
            stop_token,
            choice.spans,
            choice.kv,
            choice.earlier_kv,
            choice.call_in_thinking,
            joined(pieces, snapshot),
        )

    def _reason(self, choice: Choice, stop_text: str | None) -> EndReason:
        assert choice.finish is not None
        if choice.finish == "stop":
            return "end" if stop_text is None else "stop"
        most = self._checked.max_tokens
        is_cut = choice.finish == "length" and most is not None and choice.generated < most
        return "context" if is_cut else choice.finish

    def _stopped_by(self, choice: Choice) -> tuple[str | None, int | None]:
        """The stop string and the token that ended it. A stop string that is the name of a special token, which has no text,
        ends a choice as its token."""
        if choice.finish != "stop":
            return None, None
        last, found = choice.last, choice.stop_string
        if found is not None or last is None:
            return found, None
        name = self._vocabulary.raw_text([last])
        is_token = last in self._checked.sampling.stop_token_ids
        return name if name in self._checked.stops else None, last if is_token else None
