"""Heads of requests and responses as they are sent on: what is dropped, what is added. Pure.

Always holds: hop-by-hop headers end here, also those that a Connection header names. A client's `x-midstream-` headers do not
reach an upstream. An upstream's reach the client only where `labels` says so, but for the names of ignored fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote

import msgspec

from midstream.core.headers import (
    HEADER_BOOT,
    HEADER_EXPECTED_TOKENS,
    HEADER_HISTORY,
    HEADER_IGNORED_FIELDS,
    HEADER_MOVED,
    HEADER_PLACED,
    HEADER_QUEUE_POSITION,
    HEADER_QUEUE_WAIT,
    HEADER_RECORDS,
    HEADER_SESSION,
    HEADER_STAY,
)
from midstream.core.price import Moved
from midstream.core.resumption import HEADER_RESUMABLE
from midstream.http.message import HOP_BY_HOP, Request
from midstream.http.plain import LINE_BYTES_MAX, SECRETS, Header, HeadStart, LineMemory, NotPlain
from midstream.http.upstream import UpstreamHead

Headers = list[Header]
#: Sessions whose line is remembered.
SESSION_LINES_MAX = 2**14
_WITH_LENGTH = (b"POST", b"PUT", b"PATCH")
_PERSISTENCE = (b"close", b"keep-alive")
_SESSION, _PLACED = HEADER_SESSION.encode(), HEADER_PLACED.encode()
_BOOT, _RESUMABLE = HEADER_BOOT.encode(), HEADER_RESUMABLE.encode() + b": 1\r\n"
#: Headers of a response that go to every client.
_SHOWN = frozenset(
    name.encode() for name in (HEADER_IGNORED_FIELDS, HEADER_QUEUE_POSITION, HEADER_QUEUE_WAIT)
)
_HISTORY, _RECORDS = HEADER_HISTORY.encode(), HEADER_RECORDS.encode()
_EXPECTED = HEADER_EXPECTED_TOKENS.encode()
_MOVED = HEADER_MOVED.encode()
#: For a replica that is to hand the turn to no other one.
STAY_LINE = HEADER_STAY.encode() + b": 1\r\n"


class UpstreamLines(LineMemory[Header, bytes]):
    """A client's header to its line for an upstream. Empty: it does not go there. dropped: names of headers that do not."""

    __slots__ = ("dropped",)

    def __init__(self, dropped: frozenset[bytes]) -> None:
        super().__init__()
        self.dropped = dropped

    def __missing__(self, header: Header) -> bytes:
        name, value = header
        dropped = name in self.dropped or name.startswith(b"x-midstream-")
        line = b"" if dropped else name + b": " + value + b"\r\n"
        if name not in SECRETS and len(name) + len(value) <= LINE_BYTES_MAX:
            self.keep(header, line)
        return line

    def begin(self, start: HeadStart, target: bytes) -> bytes:
        """How a head for this target begins that came with this start, which remembers it."""
        begun = b"".join((_request_line(start.method, target), *map(self.__getitem__, start.headers)))
        start.passed_on = (self, target, begun)
        return begun

    def without(self, names: frozenset[bytes]) -> UpstreamLines:
        """The same, but for headers of these names, too."""
        return UpstreamLines(self.dropped | names)


class ClientLines(LineMemory[Header, bytes]):
    """An upstream's header to its line for a client. Empty: it does not go there. Raises NotPlain for a Connection header that
    names others. labels: the upstream's x-midstream- headers go there."""

    __slots__ = ("_coding", "_labels")

    def __init__(self, *, http10: bool, labels: bool) -> None:
        super().__init__()
        self._coding = b"" if http10 else b"transfer-encoding: chunked\r\n"
        self._labels = labels

    def __missing__(self, header: Header) -> bytes:
        name, value = header
        if name == b"connection" and value.lower() not in _PERSISTENCE:
            raise NotPlain
        line = self._line(header, HOP_BY_HOP)
        if len(name) + len(value) <= LINE_BYTES_MAX and name not in SECRETS:
            self.keep(header, line)
        return line

    def _line(self, header: Header, dropped: frozenset[bytes]) -> bytes:
        name = header[0]
        if name == b"transfer-encoding":
            return self._coding
        if name in dropped:
            return b""
        shown = self._labels or name in _SHOWN or not name.startswith(b"x-midstream-")
        return b"%b: %b\r\n" % header if shown else b""

    def one_by_one(self, headers: Headers) -> Iterator[bytes]:
        """Without the headers that a Connection header before them names."""
        dropped = HOP_BY_HOP
        for name, value in headers:
            if name == b"connection" and value.lower() not in _PERSISTENCE:
                dropped = dropped | _listed(value)
            yield self._line((name, value), dropped)


_client_lines = {
    (http10, labels): ClientLines(http10=http10, labels=labels)
    for http10 in (False, True)
    for labels in (False, True)
}
_line_of = {kind: lines.__getitem__ for kind, lines in _client_lines.items()}


def to_upstream(
    request: Request, target: bytes, length: int, lines: UpstreamLines, added: Sequence[bytes]
) -> bytes:
    """The head to send. target, length: of what is sent, which may be another request than the client's. added: lines with
    their ends."""
    listed = request.first.get(b"connection")
    if listed is not None and listed.lower() not in _PERSISTENCE:
        lines = lines.without(_listed(listed))
    start, headers = request.start, request.headers
    if start is None:
        begun = _request_line(request.method, target)
    else:
        headers = headers[len(start.headers) :]
        made_by, of, begun = start.passed_on
        if made_by is not lines or of != target:
            begun = lines.begin(start, target)
    parts = [begun, *map(lines.__getitem__, headers)]
    if length or request.method in _WITH_LENGTH:
        parts.append(b"content-length: %d\r\n" % length)
    return b"".join((*parts, *added, b"\r\n"))


def _request_line(method: bytes, target: bytes) -> bytes:
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def to_client(
    head: UpstreamHead, added: Collection[bytes], *, http10: bool, close: bool, labels: bool
) -> list[bytes]:
    """The parts of the head to write; without the body. added: whole lines with their ends."""
    kind = http10, labels
    try:
        own = [*map(_line_of[kind], head.headers)]
    except NotPlain:
        own = [*_client_lines[kind].one_by_one(head.headers)]
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return [_status_line(head.status, head.reason), *own, *added, end]


# Replicas have few.
@lru_cache(64)
def _status_line(status: int, reason: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)


# A session has many turns.
@lru_cache(SESSION_LINES_MAX)
def replica_lines(token_line: bytes, boot: str, resumable: bool, key: str | None) -> bytes:
    """The head lines that all requests of a session for a boot have in common. resumable: another replica may continue the
    response. key: of the session; None: there is none.

    The key is percent-encoded, so nothing of a client's stands in the line as it came.
    """
    lines = token_line
    if boot:
        lines += b"%b: %b\r\n" % (_BOOT, boot.encode())
    if resumable:
        lines += _RESUMABLE
    if key is not None:
        lines += b"%b: %b\r\n" % (_SESSION, quote(key, safe="", errors="surrogatepass").encode())
    return lines


def wishes_lines(first: Mapping[bytes, bytes], in_path: bool) -> list[bytes]:
    """The head lines for a replica with what a client asks for beside an answer. in_path: its path named the session."""
    lines = [b"%b: %b\r\n" % (name, first[name]) for name in (_HISTORY, _RECORDS, _EXPECTED) if name in first]
    if in_path and _RECORDS not in first:
        # Who can set nothing but a base URL has the records all the same.
        lines.append(_RECORDS + b": routes\r\n")
    return lines


def placed_line(stamp: int) -> bytes:
    return b"%b: %d\r\n" % (_PLACED, stamp)


def moved_line(moved: Moved) -> bytes:
    """For the new home of a session that moves."""
    return b"%b: %b\r\n" % (_MOVED, msgspec.json.encode(moved))


def _listed(connection: bytes) -> frozenset[bytes]:
    """Header names that a Connection header declares to be hop-by-hop."""
    return frozenset(name.strip().lower() for name in connection.split(b","))
