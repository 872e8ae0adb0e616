"""JSON that others wrote, decoded within the recursion limit.

Always holds: a reader of JSON from another process catches all of NOT_JSON, so that any bytes raise the reader's own error.
A client's body is read by `decoded`, so that no later code meets the recursion limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

#: Nested too deeply it is a RecursionError, and not UTF-8 in a text a UnicodeDecodeError.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
