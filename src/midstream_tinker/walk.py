"""Walks over the bytes of a protobuf message without making anything of them. Pure.

Always holds: a step costs as much as one field, whatever its size, and holds the interpreter's lock no longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator


def fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of a message in body[at:end]: tag of each, start and end of its value. Raises IndexError, ValueError."""
    while at < end:
        tag, at = _varint(body, at)
        start = at
        match tag & 7:
            case 0:
                _, at = _varint(body, at)
            case 2:
                size, start = _varint(body, at)
                at = start + size
            case 1 | 5 as kind:
                at += 8 if kind == 1 else 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("a field goes beyond its message")
        yield tag, start, at


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """It, and what comes after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
