"""JSON that others wrote, decoded within the recursion limit; and which part of it a decoder refused.

Owns: the reading of msgspec's messages.
Always holds: a reader of JSON from another process catches all of NOT_JSON, so that any bytes raise the reader's own error.
A client's body is read by `decoded`, so that no later code meets the recursion limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from midstream.core.errors import InvalidRequest

#: Nested too deeply it is a RecursionError, and not UTF-8 in a text a UnicodeDecodeError.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_FAULT = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<place>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)

_T = TypeVar("_T")
#: Of the recursion limit, what is left to those who write or show a decoded value.
FRAMES_LEFT = 100
#: A body with so few brackets is nowhere near the limit.
SHALLOW_BRACKETS = 128


def decoded(decode: Callable[[bytes], _T], data: bytes) -> _T:
    """`decode(data)`, which fails FRAMES_LEFT frames before the recursion limit. Raises NOT_JSON."""
    if data.count(b"[") + data.count(b"{") <= SHALLOW_BRACKETS:
        return decode(data)
    return _below(FRAMES_LEFT, decode, data)


def _below(frames: int, decode: Callable[[bytes], _T], data: bytes) -> _T:
    return _below(frames - 1, decode, data) if frames else decode(data)


def message_of(body: bytes, decoder: msgspec.json.Decoder[_T], what: str) -> _T:
    """A message of another process of the server. Raises InvalidRequest, which says what it should be."""
    try:
        return decoder.decode(body)
    except NOT_JSON as error:
        raise InvalidRequest(f"not {what}: {error}") from error


class Fault(NamedTuple):
    """Why a decoder refused a value. place: of the part at fault, such as `.tools[0].name`; empty: all of it."""

    place: str
    what: str

    @property
    def field(self) -> str:
        return self.place.removeprefix(".")

    def __str__(self) -> str:
        return f"{self.field}: {self.what}" if self.place else self.what


def fault(error: msgspec.ValidationError) -> Fault:
    found = _FAULT.fullmatch(str(error))
    assert found is not None
    what, place = found["what"], found["place"] or ""
    if missing := _MISSING.fullmatch(what):
        what, place = "this field is required", f"{place}.{missing[1]}"
    what = what.replace("`", "")
    return Fault(place, what[:1].lower() + what[1:])


def converted(value: Any, kind: type[_T], where: str, param: str) -> _T:
    """A part of a body, which is at `where`. Raises InvalidRequest, which names the place within the part."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = fault(error)
        raise InvalidRequest(f"{where}{found.place}: {found.what}", param=param) from error
