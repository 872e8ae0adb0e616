"""Tool calls in generated text: what a parser gives, and the streaming parsers of JSON markups. Pure.

Always holds: the `raw` of all items of a parser, in order, is the text it was given. Text that looks like a call and is none
comes out as text. The items do not depend on how the text was cut into pieces. A call comes out whole, after its last
character. Whitespace that only separates calls from text belongs to the markup.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

SPACE = " \t\r\n"


class ParsedCall(NamedTuple):
    """arguments: JSON text of an object, exactly as generated. id: only when the markup has one."""

    name: str
    arguments: str
    id: str | None = None


class Item(NamedTuple):
    """A stretch of generated text and what it stands for: `text` to show, calls, or nothing (separating whitespace)."""

    raw: str
    text: str
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    def push(self, text: str) -> list[Item]:
        """What is certain with this text."""

    def flush(self) -> list[Item]:
        """The rest, when no more text comes."""


class _Named(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class _Identified(_Named):
    id: str | None = None


class _Parameters(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


_named = msgspec.json.Decoder(_Named)
_identified = msgspec.json.Decoder(list[_Identified])
_parameters = msgspec.json.Decoder(_Parameters)


class Body(Protocol):
    """Follows one call from behind its opening tag on, looking at each character once."""

    start: int
    at: int

    def follow(self, text: str) -> bool | None:
        """True: complete, up to `at`. False: this cannot be a call. None: more text is needed."""

    def read(self, text: str) -> ParsedCall | None:
        """The call, once it is complete; None: it is none after all."""


class TaggedParser:
    """Each call stands between tags (Hermes, Qwen); `body` follows one that begins at an index."""

    def __init__(self, opening: str, body: Callable[[int], Body]) -> None:
        self._opening = opening
        self._new_body = body
        #: Undecided text: whitespace, then perhaps the beginning of a call.
        self._held = ""
        #: Follows the call that `_held` has begun.
        self._body: Body | None = None
        #: True while nothing but whitespace has followed the last call.
        self._after_call = False

    def push(self, text: str) -> list[Item]:
        self._held += text
        items: list[Item] = []
        while (found := self._next()) is not None:
            items.append(found)
        return items

    def flush(self) -> list[Item]:
        items: list[Item] = []
        while self._held:
            if self._body is not None:
                items.append(self._not_a_call())
                items += self.push("")
            else:
                items.append(self._outside(len(self._held), final=True))
        return items

    def _next(self) -> Item | None:
        if self._body is None:
            start = self._held.find(self._opening)
            if start < 0:
                keep = unfinished(self._held, self._opening)
                end = len(self._held[: len(self._held) - keep].rstrip(SPACE))
                return self._outside(end) if end else None
            before = len(self._held[:start].rstrip(SPACE))
            if before:
                return self._outside(before)
            self._body = self._new_body(start + len(self._opening))
        verdict = self._body.follow(self._held)
        if verdict is None:
            return None
        return self._call() if verdict else self._not_a_call()

    def _outside(self, end: int, final: bool = False) -> Item:
        """The text up to `end`; at the end, whitespace after a call is no text."""
        raw, self._held = self._held[:end], self._held[end:]
        shown = not (final and self._after_call and not raw.strip(SPACE))
        self._after_call = self._after_call and not shown
        return Item(raw, raw if shown else "")

    def _call(self) -> Item:
        body = self._body
        assert body is not None
        call = body.read(self._held)
        if call is None:
            return self._not_a_call()
        raw, self._held = self._held[: body.at], self._held[body.at :]
        self._body, self._after_call = None, True
        return Item(raw, "", (call,))

    def _not_a_call(self) -> Item:
        """The opening tag was text; what follows it is looked at again."""
        assert self._body is not None
        end, self._body = self._body.start, None
        return self._outside(end)


class JsonBody:
    """A JSON object `{"name", "arguments"}` and the tag that closes it."""

    def __init__(self, start: int, closing: str) -> None:
        self.start = self.at = start
        self.object_end = 0
        self._closing = closing
        #: How many characters of the closing tag were seen.
        self._matched = 0
        self._depth = 0
        self._in_string = self._escaped = False

    def follow(self, text: str) -> bool | None:
        while self.at < len(text):
            character = text[self.at]
            if not self._take(character):
                return False
            self.at += 1
            if self._matched == len(self._closing):
                return True
        return None

    def read(self, text: str) -> ParsedCall | None:
        try:
            call = _named.decode(text[self.start : self.object_end])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return None
        return _checked(call.name, call.arguments, None)

    def _take(self, character: str) -> bool:
        if self._in_string:
            return self._take_in_string(character)
        if self.object_end:
            return self._take_after(character)
        if self._depth == 0:
            self._depth = int(character == "{")
            return self._depth == 1 or character in SPACE
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.object_end = self.at + 1
        return character in _JSON_CHARACTERS

    def _take_in_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
        return character >= " "

    def _take_after(self, character: str) -> bool:
        if self._matched == 0 and character in SPACE:
            return True
        if character != self._closing[self._matched]:
            return False
        self._matched += 1
        return True


_JSON_CHARACTERS = frozenset(SPACE + '{}[]",:-+.0123456789eEtruefalsn')


def unfinished(text: str, tag: str) -> int:
    """The length of the longest end of `text` that begins `tag` without completing it."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class _ToTheEndParser(abc.ABC):
    """For markups that nothing closes: from the first character that can only be a call, everything is held to the end."""

    def __init__(self) -> None:
        self._held = ""
        #: True once the text cannot hold a call.
        self._plain = False

    def push(self, text: str) -> list[Item]:
        self._held += text
        end = len(self._held) if self._plain else self._free(self._held)
        return self._shown(end)

    def flush(self) -> list[Item]:
        calls = None if self._plain else self._read(self._held)
        if calls is None:
            return self._shown(len(self._held))
        raw, self._held = self._held, ""
        return [Item(raw, "", calls)]

    def _shown(self, end: int) -> list[Item]:
        raw, self._held = self._held[:end], self._held[end:]
        return [Item(raw, raw)] if raw else []

    @abc.abstractmethod
    def _free(self, held: str) -> int:
        """How much of the held text is text for sure."""

    @abc.abstractmethod
    def _read(self, held: str) -> tuple[ParsedCall, ...] | None:
        """The calls that the whole held text is; None: it is text."""


class ArrayParser(_ToTheEndParser):
    """A token, then a JSON array of all calls (Mistral): text may come before, nothing after."""

    def __init__(self, opening: str) -> None:
        super().__init__()
        self._opening = opening

    def _free(self, held: str) -> int:
        start = held.find(self._opening)
        if start < 0:
            start = len(held) - unfinished(held, self._opening)
        return len(held[:start].rstrip(SPACE))

    def _read(self, held: str) -> tuple[ParsedCall, ...] | None:
        before, found, array = held.partition(self._opening)
        if not found or before.strip(SPACE):
            return None
        try:
            calls = [_checked(c.name, c.arguments, c.id) for c in _identified.decode(array)]
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return None
        return tuple(c for c in calls if c) if calls and all(calls) else None


class ObjectParser(_ToTheEndParser):
    """The whole answer is one JSON object `{"name", "parameters"}`, perhaps after a token (Llama 3)."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def _free(self, held: str) -> int:
        begun = held.lstrip(SPACE)
        may_be_call = begun.startswith(("{", self._prefix)) or self._prefix.startswith(begun)
        self._plain = not may_be_call
        return 0 if may_be_call else len(held)

    def _read(self, held: str) -> tuple[ParsedCall, ...] | None:
        try:
            call = _parameters.decode(held.strip(SPACE).removeprefix(self._prefix))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return None
        checked = _checked(call.name, call.parameters, None)
        return None if checked is None else (checked,)


def _checked(name: str, arguments: msgspec.Raw, call_id: str | None) -> ParsedCall | None:
    """The call, if it has a name and its arguments are an object."""
    text = bytes(arguments).decode()
    return ParsedCall(name, text, call_id) if name and text.startswith("{") else None
