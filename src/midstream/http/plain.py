"""Heads of the plainest form, as nearly all clients and replicas send them, read by the line. Pure.

Owns: what a plain line is, and a memory of such lines: from one message of a connection to the next, nearly all stay the same.
Always holds:
- A line is plain only if every parser reads it the same way. httptools' parser reads whatever is not plain.
- A header that changes how its message is framed, or how its connection is used, is not plain. Of such headers only these are:
  a length in digits, `connection: keep-alive`, and in a response `transfer-encoding: chunked`.
- No memory has more than LINES_MAX entries, nor an entry longer than LINE_BYTES_MAX. A connection remembers one start of a
  head, which is shorter than HEAD_BYTES_MAX. No credential is in either.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import TypeVar

Header = tuple[bytes, bytes]
K = TypeVar("K")
V = TypeVar("V")

#: A longer head is not looked at.
HEAD_BYTES_MAX = 4096
#: Then the memory is cleared: what is in use comes back at once. Each session in use may have a line or two.
LINES_MAX = 2**14
LINE_BYTES_MAX = 128
HEAD_END = b"\r\n\r\n"
#: Lines with them are read each time.
SECRETS = frozenset(
    (b"authorization", b"x-api-key", b"proxy-authorization", b"cookie", b"set-cookie", b"x-midstream-token")
)
_NAME = re.compile(rb"[A-Za-z0-9-]+")
_REQUEST = re.compile(rb"(GET|POST) (/[A-Za-z0-9/._~:%-]*) HTTP/1\.1")
_LENGTH = re.compile(rb"[0-9]{1,15}")


class NotPlain(Exception):
    """A line is not plain."""


class LineMemory(dict[K, V]):
    """A bounded memory. What is not in it is made by `__missing__`, which each kind has."""

    __slots__ = ()

    def keep(self, key: K, value: V) -> None:
        if len(self) >= LINES_MAX:
            self.clear()
        self[key] = value


class Names(LineMemory[bytes, bytes]):
    """A header's name to the same in lower case. Raises NotPlain."""

    __slots__ = ()

    def __missing__(self, name: bytes) -> bytes:
        if _NAME.fullmatch(name) is None:
            raise NotPlain
        lower = name.lower()
        if len(name) <= LINE_BYTES_MAX:
            self.keep(name, lower)
        return lower


_names = Names()


class HeaderLines(LineMemory[bytes, Header]):
    """A header's line to its lower-case name and its value. Raises NotPlain.

    never: names of headers that are not plain here. chunked: chunks are.
    """

    __slots__ = ("_chunked", "_judged", "_never")

    def __init__(self, never: Collection[bytes], *, chunked: bool) -> None:
        super().__init__()
        self._never = frozenset(never)
        self._chunked = chunked
        # Most headers are not among them.
        self._judged = self._never | {b"content-length", b"connection", b"transfer-encoding"}

    def __missing__(self, line: bytes) -> Header:
        written, colon, value = line.partition(b": ")
        if not colon:
            written, colon, value = line.partition(b":")
        # The quickest way to ask whether there is nothing but printable ASCII.
        if not value or value.strip() != value or not value.isascii() or not value.decode().isprintable():
            raise NotPlain
        name, value = header = _names[written], value
        if name in self._judged and not self._may_be(name, value):
            raise NotPlain
        if name not in SECRETS and len(line) <= LINE_BYTES_MAX:
            self.keep(line, header)
        return header

    def _may_be(self, name: bytes, value: bytes) -> bool:
        if name == b"content-length":
            return _LENGTH.fullmatch(value) is not None
        if name == b"connection":
            return value.lower() == b"keep-alive"
        return name not in self._never and self._chunked and value == b"chunked"


class RequestLines(LineMemory[bytes, Header]):
    """The first line of a request to its method and its target. Raises NotPlain."""

    __slots__ = ()

    def __missing__(self, line: bytes) -> Header:
        found = _REQUEST.fullmatch(line)
        if found is None:
            raise NotPlain
        read = found[1], found[2]
        if len(line) <= LINE_BYTES_MAX:
            self.keep(line, read)
        return read


class HeadStart:
    """How the plain heads of a connection begin, up to the end of a line: the next one nearly always begins the same way.

    lines: without their ends. passed_on: how the head for an upstream begins, with the memory that its lines are from, and the
    target. No credential is in it.
    """

    __slots__ = ("first", "headers", "lines", "method", "passed_on", "target", "text")

    def __init__(self, lines: Sequence[bytes], method: bytes, target: bytes, headers: list[Header]) -> None:
        self.lines, self.method, self.target, self.headers = lines, method, target, headers
        self.text = b"\r\n".join((*lines, b""))
        self.first = dict(headers)
        self.passed_on: tuple[object, bytes, bytes] = (None, b"", b"")

    def shared_with(self, lines: Sequence[bytes]) -> HeadStart | None:
        """The part of it with which a head of these lines begins, too. None: it has no header."""
        same = [
            *itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.lines, lines[:-1], strict=False))
        ]
        if len(same) < 2:
            return None
        return HeadStart(self.lines[: len(same)], self.method, self.target, self.headers[: len(same) - 1])


def start_of(lines: Sequence[bytes], of_requests: RequestLines, of_headers: HeaderLines) -> HeadStart:
    """The longest start of a plain head, which has these lines, that leaves its last line and no secret. Raises NotPlain."""
    method, target = of_requests[lines[0]]
    headers = [*map(of_headers.__getitem__, lines[1:-1])]
    count = next((at for at, (name, _) in enumerate(headers) if name in SECRETS), len(headers))
    return HeadStart(lines[: count + 1], method, target, headers[:count])
