"""Which tags a chat template puts around reasoning. Pure.

Always holds: the tags are what the template itself writes, found by rendering probes, never by the name of a model. A template
without reasoning has none, and text under it stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from midstream.core.errors import InvalidRequest

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
    plain = try_render(render, [_USER, {"role": "assistant", "content": _ANSWER}], False)
    found = _in_history(render, plain)
    return found if found is not None else _in_prompt(render, plain)


def try_render(render: Render, messages: list[dict[str, Any]], begins: bool) -> str:
    """Empty where the template refuses."""
    try:
        return render(messages, begins)
    except InvalidRequest:
        return ""


def _in_history(render: Render, plain: str) -> ReasoningFormat | None:
    """The tags around the reasoning of an earlier answer."""
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    before, thought, rest = try_render(render, [_USER, message], False).partition(_THOUGHT)
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
    opened = _TAG_BEFORE.search(try_render(render, [_USER], True))
    if opened is None:
        return None
    opening, space = opened["tag"], opened["space"]
    found = ReasoningFormat(opening, space, space, f"{opening[0]}/{opening[1:]}", "\n\n" if space else "")
    if not _is_own(found, plain):
        return None
    content = f"{opening}{_THOUGHT}{found.closing}{_ANSWER}"
    rendered = try_render(render, [_USER, {"role": "assistant", "content": content}, _USER], False)
    return found if _ANSWER in rendered and _THOUGHT not in rendered else None


def _is_own(found: ReasoningFormat, plain: str) -> bool:
    """Whether the tags stand for nothing else: a conversation without reasoning has none, but for empty reasoning."""
    if found.opening == found.closing:
        return False
    empty = re.escape(found.opening) + r"\s*" + re.escape(found.closing)
    rest = re.sub(empty, "", plain)
    return bool(plain) and found.opening not in rest and found.closing not in rest
