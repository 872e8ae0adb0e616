"""A request as whoever serves it sees it, the head of a response as bytes, and the limits of a connection. No I/O.

Always holds: a refusal has the one error shape of errors.py, with its Retry-After.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from midstream.errors import MidstreamError

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


@dataclass(slots=True, eq=False)
class Request:
    """One request, whole. `headers` keep their order, with lower-case names; `first` has the first of each name."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    first: Mapping[bytes, bytes]
    body: bytes
    http10: bool
    keep_alive: bool
    lines: bytes | None = (
        None  # of a request read by a wire, instead of `headers`: what is to be sent on, as lines
    )


@dataclass(slots=True, frozen=True)
class Limits:
    max_body_bytes: int
    max_header_bytes: int
    keep_alive_s: float
    head_timeout_s: float = 30.0  # from the first byte of a request to the end of its head
    body_idle_s: float = 60.0  # between two reads of a request's body


def error_response(
    error: MidstreamError, *, close: bool, with_body: bool = True, extra: bytes = b""
) -> bytes:
    """A whole HTTP response in the API's error shape; `extra` holds further header lines."""
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    return response_head(error.status, headers, close=close, extra=extra) + (body if with_body else b"")


def response_head(status: int, headers: Mapping[str, str], *, close: bool, extra: bytes = b"") -> bytes:
    """Status line and headers up to the blank line; `extra` holds further header lines."""
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"".join((_STATUS_LINES[status], *lines, extra, end))
