"""Reasoning in generated text: which tags a chat template puts around it, and the streaming parser. Pure.

Always holds of the tags: they are what the template itself writes, found by rendering probes, never by the name of a model. A
template without reasoning has none, and text under it stays as it is.
Always holds of the parser: the `raw` of all items, in order, is the text it was given, and the items joined by kind do not
depend on how the text was cut into pieces. Reasoning stands at the beginning of an answer or nowhere. What the template
writes between tags and text, and only that, belongs to the markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from midstream.core.errors import InvalidRequest
from midstream.replica.text.toolcalls import SPACE, unfinished

#: The fields that an answer may have its thinking in, the one that counts first.
FIELDS = ("reasoning_content", "reasoning", "thinking")


def of_message(message: dict[str, Any]) -> str:
    """The thinking that a message has beside its content."""
    return next((str(message[name]) for name in FIELDS if message.get(name)), "")


class ReasoningFormat(NamedTuple):
    """Reasoning stands as opening, after_open, TEXT, before_close, closing, after_close.."""

    opening: str
    after_open: str
    before_close: str
    closing: str
    after_close: str


#: messages, and whether the assistant's turn is begun behind them. Raises InvalidRequest where the template refuses.
Render = Callable[[list[dict[str, Any]], bool], str]

#: Where generated text stands; "begin" until it is known whether there is reasoning.
Place = Literal["begin", "inside", "outside"]

_THOUGHT, _ANSWER = "probe thought", "probe answer"
_USER = {"role": "user", "content": "probe"}
_TAG = r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]|◁[^◁▷\s]{1,64}▷"
_TAG_BEFORE = re.compile(rf"(?P<tag>{_TAG})(?P<space>\s*)\Z")
_TAG_AFTER = re.compile(rf"(?P<space>\s*)(?P<tag>{_TAG})(?P<after>\s*)")


def examine(render: Render) -> ReasoningFormat | None:
    plain = _try(render, [_USER, {"role": "assistant", "content": _ANSWER}], False)
    found = _in_history(render, plain)
    return found if found is not None else _in_prompt(render, plain)


def _try(render: Render, messages: list[dict[str, Any]], begins: bool) -> str:
    try:
        return render(messages, begins)
    except InvalidRequest:
        return ""


def _in_history(render: Render, plain: str) -> ReasoningFormat | None:
    """The tags around the reasoning of an earlier answer."""
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    before, thought, rest = _try(render, [_USER, message], False).partition(_THOUGHT)
    opened, closed = _TAG_BEFORE.search(before), _TAG_AFTER.match(rest)
    if not thought or opened is None or closed is None:
        return None
    # The template shows where the answer begins only if it stands right behind the closing tag.
    after = closed["after"] if rest[closed.end() :].startswith(_ANSWER) else ""
    found = ReasoningFormat(opened["tag"], opened["space"], closed["space"], closed["tag"], after)
    return found if _is_own(found, plain) else None


def _in_prompt(render: Render, plain: str) -> ReasoningFormat | None:
    """A tag that the generation prompt leaves open, if the template removes what an earlier answer has between it and its
    counterpart."""
    opened = _TAG_BEFORE.search(_try(render, [_USER], True))
    if opened is None:
        return None
    opening, space = opened["tag"], opened["space"]
    found = ReasoningFormat(opening, space, space, f"{opening[0]}/{opening[1:]}", "\n\n" if space else "")
    if not _is_own(found, plain):
        return None
    content = f"{opening}{_THOUGHT}{found.closing}{_ANSWER}"
    rendered = _try(render, [_USER, {"role": "assistant", "content": content}, _USER], False)
    return found if _ANSWER in rendered and _THOUGHT not in rendered else None


def _is_own(found: ReasoningFormat, plain: str) -> bool:
    """Whether the tags stand for nothing else: a conversation without reasoning has none, but for empty reasoning."""
    if found.opening == found.closing:
        return False
    empty = re.escape(found.opening) + r"\s*" + re.escape(found.closing)
    rest = re.sub(empty, "", plain)
    return bool(plain) and found.opening not in rest and found.closing not in rest


class Part(NamedTuple):
    """A stretch of generated text. text, reasoning: what is shown of it; of markup, nothing."""

    raw: str
    text: str = ""
    reasoning: str = ""


class ReasoningParser:
    """prompt: the text that the answer goes on with. continued: it ends inside an answer."""

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
        """The answer so far, which the client has; it goes on behind it."""
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
