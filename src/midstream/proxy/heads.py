"""Heads of requests and responses as they are sent on: what is dropped, what is added. Pure.

Always holds: hop-by-hop headers end here, also those that a Connection header names. A client's `x-midstream-` headers do not
reach an upstream. An upstream's reach the client only where `labels` says so, but for the names of ignored fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from midstream.core.headers import (
    HEADER_HISTORY,
    HEADER_IGNORED_FIELDS,
    HEADER_PLACED,
    HEADER_RECORDS,
    HEADER_SESSION,
)
from midstream.core.types import Session
from midstream.http.message import HOP_BY_HOP, Request

Headers = list[tuple[bytes, bytes]]
_WITH_LENGTH = (b"POST", b"PUT", b"PATCH")
_PERSISTENCE = (b"close", b"keep-alive")
_SESSION, _PLACED = HEADER_SESSION.encode(), HEADER_PLACED.encode()
_IGNORED = HEADER_IGNORED_FIELDS.encode()
_HISTORY, _RECORDS = HEADER_HISTORY.encode(), HEADER_RECORDS.encode()


class UpstreamHead(NamedTuple):
    """`reason` is the status line after the code; header names are lower-case; `body` came with the head."""

    status: int
    reason: bytes
    headers: Headers
    body: bytes


def to_upstream(
    request: Request, target: bytes, length: int, dropped: frozenset[bytes], added: Sequence[bytes]
) -> bytes:
    """The head to send. target, length: of what is sent, which may be another request than the client's. added: lines."""
    listed = request.first.get(b"connection")
    if listed is not None and listed.lower() not in _PERSISTENCE:
        dropped = dropped | _listed(listed)
    lines = [request.method + b" " + target + b" HTTP/1.1"]
    lines += [
        b": ".join(header)
        for header in request.headers
        if header[0] not in dropped and not header[0].startswith(b"x-midstream-")
    ]
    if length or request.method in _WITH_LENGTH:
        lines.append(b"content-length: %d" % length)
    lines += added
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def to_client(
    head: UpstreamHead, added: Collection[bytes], *, http10: bool, close: bool, labels: bool
) -> list[bytes]:
    """The parts of the head to write; without the body. added: whole lines with their ends."""
    dropped = HOP_BY_HOP
    parts = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    for name, value in head.headers:
        if name == b"transfer-encoding":
            parts.append(b"" if http10 else b"transfer-encoding: chunked\r\n")
        elif name == b"connection" and value.lower() not in _PERSISTENCE:
            dropped = dropped | _listed(value)
        if name not in dropped and (labels or name == _IGNORED or not name.startswith(b"x-midstream-")):
            parts += (name, b": ", value, b"\r\n")
    parts += added
    parts.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return parts


def session_lines(
    first: Mapping[bytes, bytes], session: Session | None, stamp: int | None, in_path: bool
) -> list[bytes]:
    """The head lines with the session of a request, for a replica. first: the client's headers. in_path: its path named the
    session.

    The key is percent-encoded, so nothing of a client's stands in the line as it came.
    """
    lines = []
    if session is not None:
        lines.append(_SESSION + b": " + quote(session[1], safe="", errors="surrogatepass").encode())
        if stamp is not None:
            lines.append(_PLACED + b": %d" % stamp)
    lines += [name + b": " + first[name] for name in (_HISTORY, _RECORDS) if name in first]
    if in_path and _RECORDS not in first:
        # Who can set nothing but a base URL has the records all the same.
        lines.append(_RECORDS + b": routes")
    return lines


def _listed(connection: bytes) -> frozenset[bytes]:
    """Header names that a Connection header declares to be hop-by-hop."""
    return frozenset(name.strip().lower() for name in connection.split(b","))
