"""What a chat template writes behind an answer that was sampled before: the text that a request adds to a turn. Pure.

A template renders a whole conversation, and an answer in it often reads other than it was sampled: thinking is dropped, calls
get other spaces, white space is trimmed. So the answer is rendered as a mark, and only what stands behind the mark is taken.
Where a template shows no mark (Llama 3 drops the content of a message with calls), the conversation up to the answer and the
whole one are rendered, and what the second has more is taken.

Always holds: the text begins with what the template ends an answer with, its closing; `<|im_end|>` and a line feed for
example. A closing is found by probing, once for a template and a set of tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from midstream.replica.text import reasoning_tags
from midstream.replica.text.reasoning_tags import Render, try_render

#: Private-use characters: no template trims, splits or escapes them.
MARK = "\ue0f0\ue0f5\ue0f1"
_USER = {"role": "user", "content": "x"}


class Closings(NamedTuple):
    """What a template writes behind the last answer of a conversation, and behind one that more follows."""

    last: str
    within: str


def closings_of(render: Render) -> Closings | None:
    """None: the template shows no mark."""
    last = _behind(try_render(render, [_USER, {"role": "assistant", "content": MARK}], False))
    return None if last is None else Closings(last, _closing_within(render) or last)


def text_behind(
    render: Render, closings: Closings, messages: Sequence[dict[str, Any]], at: int
) -> str | None:
    """All text behind the answer `messages[at]`; it begins with a closing. None: it cannot be separated from the answer.

    Raises InvalidRequest where the template refuses the conversation.
    """
    last = closings.last
    if any(MARK in str(message.get("content")) for message in messages):
        return None
    marked = _marked(messages, at)
    behind = _behind(render(marked, True))
    calls = ""
    if messages[at].get("tool_calls"):
        own = _behind(try_render(render, marked[: at + 1], False))
        calls = own.removesuffix(last) if own is not None and own.endswith(last) else "\0"
    if behind is not None and behind.startswith(calls):
        return behind[len(calls) :]
    return _difference(render, messages, at, last)


def _closing_within(render: Render) -> str | None:
    behind = _behind(try_render(render, [_USER, {"role": "assistant", "content": MARK}, _USER], False))
    one, two = try_render(render, [_USER], False), try_render(render, [_USER, _USER], False)
    if behind is None or not one or not two.startswith(one):
        return None
    turn = two[len(one) :]
    return behind.removesuffix(turn) if turn and behind.endswith(turn) else None


def _marked(messages: Sequence[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    answer = {name: value for name, value in messages[at].items() if name not in reasoning_tags.FIELDS}
    return [*messages[:at], {**answer, "content": MARK}, *messages[at + 1 :]]


def _behind(rendered: str) -> str | None:
    _, mark, behind = rendered.partition(MARK)
    return behind if mark and MARK not in behind else None


def _difference(render: Render, messages: Sequence[dict[str, Any]], at: int, closing: str) -> str | None:
    part, whole = try_render(render, list(messages[: at + 1]), False), render(list(messages), True)
    if not part or not part.endswith(closing) or not whole.startswith(part):
        return None
    return closing + whole[len(part) :]


def without_end(text: str, closing: str, end: str, markers: Iterable[str]) -> str:
    """The text behind an answer that was sampled up to the end token `end`, which stands in the closing, too.

    Where the template ends an answer with another of the `markers`, as more follows, that one is left out in its stead.
    """
    ends = [closing.index(end) + len(end)] if end in closing else []
    ends = ends or [closing.index(marker) + len(marker) for marker in markers if marker in closing]
    return text[min(ends, default=0) :]
