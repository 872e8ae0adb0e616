"""What a target is, and what targets share: pieces of an input, and a property that does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


class Wrong(AssertionError):
    """A property does not hold for an input."""


class Target(NamedTuple):
    """run: feeds the production parser and raises for what must not be. seeds: valid inputs, made anew by the encoders.

    words: what mutations should know of the format. max_bytes: of a mutated input. timeout_s: an input that takes longer hangs.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()
    max_bytes: int = 4096
    timeout_s: int = 10


def check(holds: object, what: str, *values: object) -> None:
    if not holds:
        raise Wrong(f"{what}: {', '.join(ascii(value)[:400] for value in values)}")


def controlled(data: bytes) -> tuple[int, bytes]:
    """The first byte, which chooses how the rest is used; 0 if there is none."""
    return (data[0] if data else 0), data[1:]


def pieces(data: bytes, control: int) -> Iterator[bytes]:
    """`data` cut as `control` (0 to 255) says: pieces of two sizes in turn, each from 1 to 16 bytes or from 1 to 241."""
    sizes = (1 + control % 16, 1 + 16 * (control // 16))
    at = number = 0
    while at < len(data):
        size = sizes[number % 2]
        yield data[at : at + size]
        at, number = at + size, number + 1


def outcome(
    refusals: type[Exception] | tuple[type[Exception], ...], call: Callable[[], _T]
) -> tuple[_T | None, Exception | None]:
    """What `call` gives, or how it refuses. Any other exception is the target's finding."""
    try:
        return call(), None
    except refusals as error:
        return None, error
