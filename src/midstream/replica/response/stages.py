"""What stands between a choice and the wire: reasoning and tool calls are taken out of the text. And where thinking ends and
what an answer must match begins. Pure.

Always holds: a stage passes on every record and every character, each under its own snapshot; markup alone is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import CallStage, Choice, Piece, add_piece, id_maker
from midstream.replica.text import grammar
from midstream.replica.text.chat import TextModel
from midstream.replica.text.reasoning import Part, ReasoningParser
from midstream.replica.text.reasoning_tags import ReasoningFormat
from midstream.replica.text.toolformat import ToolFormat

#: How many tokens of a prompt are looked at if its text is not known.
END_TOKENS = 256
#: Every token is silent.
_ALL = range(2**31)


class TextStage(Protocol):
    @property
    def called(self) -> bool:
        """A tool was called."""

    @property
    def complete(self) -> bool:
        """The one call that was asked for is there."""

    def feed(self, pieces: list[Piece]) -> list[Piece]: ...

    @property
    def call_in_thinking(self) -> bool:
        """At the end: a call was begun in thinking that was never closed."""

    def end(self) -> list[Piece]:
        """The choice has ended: what was held back."""


class ReasoningStage:
    """then: the stage behind it, if there is one. opening: what begins a call; "": calls are not looked for."""

    def __init__(self, parser: ReasoningParser, then: CallStage | None, opening: str = "") -> None:
        self._parser = parser
        self._then = then
        self._opening = opening
        #: The end of the thinking so far, until it has the opening of a call.
        self._thought = ""
        #: Snapshot and length of the text that the parser holds back.
        self._held: deque[tuple[str, int]] = deque()

    @property
    def called(self) -> bool:
        return self._then is not None and self._then.called

    @property
    def complete(self) -> bool:
        return self._then is not None and self._then.complete

    @property
    def call_in_thinking(self) -> bool:
        return bool(self._opening) and self._opening in self._thought and self._parser.place == "inside"

    def _note(self, reasoning: str) -> None:
        if self._opening and self._opening not in self._thought:
            self._thought = self._thought[-len(self._opening) :] + reasoning

    def feed(self, pieces: list[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            if piece.text:
                self._held.append((piece.snapshot, len(piece.text)))
                for part in self._parser.push(piece.text):
                    self._release(part, out)
            if piece.tokens:
                add_piece(out, Piece(piece.snapshot, "", piece.tokens))
        return out if self._then is None else self._then.feed(out)

    def end(self) -> list[Piece]:
        out: list[Piece] = []
        for part in self._parser.flush():
            self._release(part, out)
        return out if self._then is None else self._then.feed(out) + self._then.end()

    def _release(self, part: Part, out: list[Piece]) -> None:
        """Cut a part where the snapshot of the tokens it came from changes."""
        start, size = 0, len(part.raw)
        while start < size:
            snapshot, length = self._held.popleft()
            end = min(start + length, size)
            if end - start < length:
                self._held.appendleft((snapshot, length - (end - start)))
            text, reasoning = part.text[start:end], part.reasoning[start:end]
            self._note(reasoning)
            if text or reasoning:
                add_piece(out, Piece(snapshot, text, (), reasoning=reasoning))
            start = end


def choices_and_stages(
    checked: Checked,
    prompts: Sequence[Prompt],
    ends: frozenset[int],
    text: TextModel,
    tool_format: ToolFormat | None,
    response_id: str,
) -> tuple[list[Choice], list[TextStage] | None]:
    """The choices of a request, and the stage behind each. ends: the tokens that end generation. response_id: ids of tool
    calls follow from it."""
    shown = frozenset[int]()
    numbers = range(len(prompts) * checked.n)
    calls: list[CallStage] | None = None
    if checked.tools is not None and tool_format is not None:
        # Forced calls end where their grammar ends.
        dialect, parallel = tool_format.dialect, checked.tools.parallel or checked.tools.forced
        shown, schemas = text.marker_ids(dialect.markers), checked.tools.schemas
        makers = [id_maker(dialect.id_length, f"{response_id}/{number}") for number in numbers]
        calls = [CallStage(dialect.parser(schemas), parallel, new_id) for new_id in makers]
    stages: list[TextStage] | None = None if calls is None else [*calls]
    form = _reasoning(checked, text)
    if form is not None:
        shown |= text.marker_ids((form.opening, form.closing))
        parsers = [_parser(form, prompts[i // checked.n], text, checked.template.continued) for i in numbers]
        opening = "" if tool_format is None else tool_format.dialect.opening or ""
        stages = [
            ReasoningStage(parser, None if calls is None else calls[i], opening)
            for i, parser in enumerate(parsers)
        ]
    options = checked.text
    if options.special:
        shown = text.vocabulary.special_ids
    if options.stop:
        # A stop string that names a special token is that token.
        shown |= text.marker_ids(checked.stops)
    silent = _ALL if options.none else frozenset() if options.stop else ends
    choices = [
        Choice(
            index,
            text.vocabulary,
            checked.stops,
            silent,
            shown,
            min_tokens=checked.sampling.min_tokens,
            stop_shown=options.stop,
        )
        for index in numbers
    ]
    return choices, stages


def behind_thinking(
    checked: Checked, answer: str | None, prompt: Prompt, text: TextModel, eos_token_ids: tuple[int, ...]
) -> str | None:
    """What all that follows a prompt must match: thinking that the prompt opens or the model begins, and then `answer`."""
    form = None if answer is None or checked.constrain_reasoning else text.reasoning
    if answer is None or form is None:
        return answer
    place = _parser(form, prompt, text, checked.template.continued).place
    end, opening = prompt.text or text.vocabulary.raw_text(prompt.token_ids[-END_TOKENS:]), text.turn_opening
    # A prompt that its client has rendered looks like one of the template.
    chat = (
        checked.template.generation_prompt
        if checked.kind == "chat"
        else bool(opening) and end.endswith(opening)
    )
    if place == "begin" and not chat:
        return answer
    exact = checked.answer.rule is not None
    return grammar.behind_thinking(answer, form, place, text, eos_token_ids, exact=exact)


def _parser(form: ReasoningFormat, prompt: Prompt, text: TextModel, continued: bool) -> ReasoningParser:
    """Stands where the prompt ends, which may have begun the reasoning. continued: it ends inside an answer."""
    ids, raw_text = prompt.token_ids, text.vocabulary.raw_text
    if not prompt.within:
        return ReasoningParser(form, prompt.text or raw_text(ids[-END_TOKENS:]), continued)
    before, answer = ids[: -prompt.within], ids[-prompt.within :]
    parser = ReasoningParser(form, raw_text(before[-END_TOKENS:]))
    parser.pass_over(raw_text(answer))
    return parser


def _reasoning(checked: Checked, text: TextModel) -> ReasoningFormat | None:
    """None: the text stays whole."""
    forced = checked.constrained or (checked.tools is not None and checked.tools.forced)
    whole = forced and checked.constrain_reasoning
    if checked.kind != "chat" or not checked.text.reasoning or checked.text.none or whole:
        return None
    return text.reasoning
