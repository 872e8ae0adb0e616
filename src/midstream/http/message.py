"""A request as its handler sees it, what its head may say, the head of a response as bytes, limits. No I/O.

Always holds: a refusal has the one error shape of core/errors.py, with its Retry-After.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from midstream.core.errors import InvalidRequest, MidstreamError, UnsupportedEncoding
from midstream.http.auth import Caller
from midstream.http.plain import HeadStart

#: Headers that are about one connection, and are not passed on.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
#: As many as 2**64 has.
LENGTH_DIGITS_MAX = 20
_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@]+)((?:/[^?]*)?(?:\?.*)?)", re.IGNORECASE | re.DOTALL)
_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


class Request(msgspec.Struct, eq=False):
    """One request, whole. `headers` keep their order, with lower-case names; `first` has the first of each name."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    first: Mapping[bytes, bytes]
    body: bytes
    http10: bool
    keep_alive: bool
    #: As the check of its head found it; None: that check asked for no key.
    caller: Caller | None = None
    #: What its headers begin with; None: that was not looked at.
    start: HeadStart | None = None


@dataclass(slots=True, frozen=True)
class ConnectionLimits:
    max_body_bytes: int
    max_header_bytes: int
    keep_alive_s: float
    # From the first byte of a request to the end of its head.
    head_timeout_s: float = 30.0
    # A body has to bring min_body_rate x body_window_s bytes, and at least one, in each window until it is complete.
    # Bytes per second.
    min_body_rate: int = 1024
    body_window_s: float = 30.0

    @property
    def body_bytes_per_window(self) -> float:
        return max(1, self.min_body_rate * self.body_window_s)


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


def check_framing(
    headers: Sequence[tuple[bytes, bytes]], first: Mapping[bytes, bytes], *, http10: bool
) -> int:
    """The body's length as the head declares it; 0 where it has none or comes in chunks.

    Raises InvalidRequest when two parsers could frame the request differently, UnsupportedEncoding for a compressed body.
    """
    if b"host" not in first and not http10:
        raise InvalidRequest("a request needs a Host header")
    coding = first.get(b"transfer-encoding")
    if coding is not None and (http10 or coding.strip().lower() != b"chunked"):
        raise InvalidRequest("the only transfer coding supported is chunked, from HTTP/1.1 clients")
    if len(first) != len(headers):
        for once in (b"host", b"transfer-encoding", b"content-length", b"content-encoding"):
            if sum(name == once for name, _ in headers) > 1:
                raise InvalidRequest(f"more than one {once.decode()} header")
    if b"content-length" in first and coding is not None:
        raise InvalidRequest("both Content-Length and Transfer-Encoding are present")
    declared = first.get(b"content-length", b"0")
    # The parser reads any number of leading zeros, Python does not.
    if len(declared) > LENGTH_DIGITS_MAX:
        raise InvalidRequest(f"a Content-Length of more than {LENGTH_DIGITS_MAX} digits")
    length = int(declared)
    encoding = first.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity") and (length or coding is not None):
        name = encoding[:40].decode("latin-1")
        raise UnsupportedEncoding(f"Content-Encoding {name!r}: send the body as it is (identity)")
    return length


def split_absolute_form(target: bytes) -> tuple[bytes, bytes]:
    """Authority, and path with query, of a target that is no path. Raises InvalidRequest."""
    form = _ABSOLUTE_FORM.fullmatch(target)
    if form is None:
        raise InvalidRequest("the request target must be a path or an http URL")
    authority, rest = form.groups()
    return authority, rest if rest.startswith(b"/") else b"/" + rest
