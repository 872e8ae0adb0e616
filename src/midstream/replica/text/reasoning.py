"""Reasoning in generated text: the streaming parser. reasoning_tags.py finds the tags. Pure.

Always holds: the `raw` of all items, in order, is the text it was given, and the items joined by kind do not depend on how the
text was cut into pieces. Reasoning stands at the beginning of an answer or nowhere. What the template writes between tags and
text, and only that, belongs to the markup.
"""

from __future__ import annotations

from typing import NamedTuple

from midstream.replica.text.reasoning_tags import Place, ReasoningFormat
from midstream.replica.text.toolcalls import SPACE, unfinished


class Part(NamedTuple):
    """A stretch of generated text. text, reasoning: what is shown of it; of markup, nothing."""

    raw: str
    text: str = ""
    reasoning: str = ""


class ReasoningParser:
    """prompt: the text before the answer. continued: it ends inside an answer."""

    def __init__(self, form: ReasoningFormat, prompt: str, continued: bool = False) -> None:
        self._form = form
        self._held = ""
        #: Whitespace of the markup that may come next.
        self._skip = ""
        self._place: Place = "begin"
        ended = prompt.rstrip(SPACE)
        space = prompt[len(ended) :]
        if ended.endswith(form.opening):
            self._place, self._skip = "inside", form.after_open.removeprefix(space)
        elif ended.endswith(form.closing):
            self._place, self._skip = "outside", form.after_close.removeprefix(space)
        elif continued:
            opened, closed = prompt.rfind(form.opening), prompt.rfind(form.closing)
            self._place = "inside" if opened > closed else "outside"

    @property
    def place(self) -> Place:
        """Where the next text stands."""
        return self._place

    def pass_over(self, text: str) -> None:
        """Skip the answer so far, which the client has."""
        self.push(text)
        self.flush()

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._parts(final=False)

    def flush(self) -> list[Part]:
        """The rest, when no more text comes."""
        return self._parts(final=True)

    def _parts(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held and (part := self._next(final)) is not None:
            parts.append(part)
        return parts

    def _next(self, final: bool) -> Part | None:
        if self._place == "begin":
            return self._begin(final)
        if self._skip:
            if self._held[0] == self._skip[0]:
                self._skip = self._skip[1:]
                return Part(self._take(1))
            self._skip = ""
        if self._place == "outside":
            text = self._take(len(self._held))
            return Part(text, text=text)
        return self._inside(final)

    def _begin(self, final: bool) -> Part | None:
        begun, opening = self._held.lstrip(SPACE), self._form.opening
        if begun.startswith(opening):
            self._place, self._skip = "inside", self._form.after_open
            return Part(self._take(len(self._held) - len(begun) + len(opening)))
        if not final and opening.startswith(begun):
            return None
        self._place = "outside"
        return self._next(final)

    def _inside(self, final: bool) -> Part | None:
        form = self._form
        at = self._held.find(form.closing)
        if at < 0:
            keep = max(
                unfinished(self._held, form.before_close + form.closing), unfinished(self._held, form.closing)
            )
            shown = self._take(len(self._held) - (0 if final else keep))
            return Part(shown, reasoning=shown) if shown else None
        markup = len(form.before_close) if self._held[:at].endswith(form.before_close) else 0
        if at > markup:
            shown = self._take(at - markup)
            return Part(shown, reasoning=shown)
        self._place, self._skip = "outside", form.after_close
        return Part(self._take(at + len(form.closing)))

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken
