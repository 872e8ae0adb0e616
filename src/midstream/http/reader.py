"""Requests read from the bytes of one connection by httptools' parser, within limits.

Owns: the parser, and the request that is being read.
Always holds:
- A read that is one whole plain request (plain.py) does not need the parser, and comes out as the parser would read it.
- A request that two parsers could frame differently is refused.
- A request comes out as if it had come in origin form: an absolute-form target gives its authority to Host.
- A request comes out as if it had come without an Upgrade header: an offer to switch protocols is passed over.
- Room for a body is asked for before the body is kept. Its framing, extensions and trailers included, is bounded.
"""

from __future__ import annotations

import io
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping

import httptools

from midstream.core.errors import (
    HeadersTooLarge,
    InvalidRequest,
    MidstreamError,
    PayloadTooLarge,
)
from midstream.http.auth import Caller
from midstream.http.message import ConnectionLimits, Request, check_framing, split_absolute_form
from midstream.http.plain import (
    HEAD_BYTES_MAX,
    HEAD_END,
    HeaderLines,
    HeadStart,
    NotPlain,
    RequestLines,
    start_of,
)

# Bytes that a chunk may have beside its data, for its size and its line ends.
CHUNK_FRAMING_BYTES = 24
_request_lines = RequestLines()
_header_lines = HeaderLines((b"upgrade", b"proxy-connection", b"expect", b"content-encoding"), chunked=False)
# A look at a method of a dictionary's subclass takes as long as reading two lines.
_read_line = _header_lines.__getitem__


class RequestReader(ABC):
    """What reads by feed(); the connection is the other part."""

    # More than 30 attributes would be in a dictionary, which takes as much memory again.
    __slots__ = (
        *("_limits", "_made_parser", "_read_bytes", "_offers_upgrade", "_owes_continue", "_in_message"),
        *("_roomless_bytes", "_plain_head_bytes_max", "_head_start", "_method", "_caller", "_headers"),
        *("_first", "_body", "_body_bytes", "_head_done", "_chunks", "_head_fed", "_trailer_bytes"),
        *("_chunked_fed", "_chunk_framing_max", "_target", "_http10"),
    )

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Most connections have plain requests only, and no parser. It refers to its connection: the cycle ends with that.
        self._made_parser: httptools.HttpRequestParser | None = None
        # The read that is being parsed.
        self._read_bytes = 0
        # The head just parsed will be parsed again without its Upgrade header.
        self._offers_upgrade = False
        self._owes_continue = False
        self._in_message = False
        # A body of this length needs no room if it comes in the read of its head.
        self._roomless_bytes = 0
        # Of a plain head, any part of which is as it counts against the limit.
        self._plain_head_bytes_max = min(HEAD_BYTES_MAX, limits.max_header_bytes // 2)
        self._head_start: HeadStart | None = None
        self._method: bytes
        self._caller: Caller | None
        self._headers: list[tuple[bytes, bytes]]
        self._first: dict[bytes, bytes]
        # One buffer, however small the pieces are. It gives its bytes away without a copy, which a bytearray cannot.
        self._body: bytes | io.BytesIO
        self._body_bytes: int
        self._start_message()

    # -- what a connection does with it

    @abstractmethod
    def _take_head(self, method: bytes, target: bytes, first: Mapping[bytes, bytes], length: int) -> None:
        """A head is complete. length: of the body, as the head declares it. Raise MidstreamError to refuse the request."""

    @abstractmethod
    def _hold_more(self, more: int) -> None:
        """Called before so many more bytes of the body are kept. Raise MidstreamError to refuse the request."""

    @abstractmethod
    def _take_request(self, request: Request) -> None:
        """A request is complete that was parsed."""

    # -- reading

    def feed(self, data: bytes) -> Request | None:
        """The request, if the read is one whole plain one. Any other read is parsed, and its requests go to _take_request.

        Raises MidstreamError, or httptools.HttpParserError, perhaps with the former as its context.
        """
        self._roomless_bytes = 0
        start, begun = self._head_start, 0
        if start is not None and data.startswith(start.text):
            begun = len(start.text)
        # A start ends with the end of a line.
        end = (
            -1
            if self._in_message
            else data.find(HEAD_END, begun - 2 if begun else 0, self._plain_head_bytes_max)
        )
        if end < 0:
            self._parse(data)
            return None
        try:
            if start is None or not 0 < begun < end:
                start = self._begin_otherwise(data[:end].split(b"\r\n"))
                begun = len(start.text)
            own = [*map(_read_line, data[begun:end].split(b"\r\n"))]
        except NotPlain:
            # Not parsed here, or this would be the context of the parser's error.
            start = None
        if start is None:
            self._parse(data)
            return None
        method, target, headers = start.method, start.target, start.headers + own
        first = start.first.copy()
        first.update(own)
        length = int(first.get(b"content-length", 0))
        whole = len(data) == end + len(HEAD_END) + length and length <= self._limits.max_body_bytes
        if not whole or len(first) != len(headers) or b"host" not in first:
            self._parse(data)
            return None
        try:
            self._take_head(method, target, first, length)
            if length and length != self._roomless_bytes:
                self._hold_more(length)
        except MidstreamError:
            # For the refusal.
            self._in_message = self._head_done = True
            self._method, self._target, self._headers, self._first = method, target, headers, first
            raise
        caller, self._caller = self._caller, None
        return Request(
            method, target, headers, first, data[end + len(HEAD_END) :], False, True, caller, start
        )

    def _parse(self, data: bytes) -> None:
        if self._in_message and not self._head_done:
            self._head_fed += len(data)
        elif self._in_message and self._chunks:
            self._chunked_fed += len(data)
        rest: bytes | memoryview = data
        while True:
            self._read_bytes = len(rest)
            try:
                self._parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                parsed = upgrade.args[0]
            rest = memoryview(rest)[parsed:]
            self._parse_without_offer()
        if self._head_fed > self._limits.max_header_bytes and not self._head_done:
            raise self._head_too_large()
        if self._in_message and self._chunks:
            self._check_chunk_framing()

    @property
    def _parser(self) -> httptools.HttpRequestParser:
        if self._made_parser is None:
            self._made_parser = httptools.HttpRequestParser(self)
        return self._made_parser

    def _begin_otherwise(self, lines: list[bytes]) -> HeadStart:
        """lines: of a head that does not begin as the last one did. Raises NotPlain."""
        shared = None if self._head_start is None else self._head_start.shared_with(lines)
        self._head_start = found = shared or start_of(lines, _request_lines, _header_lines)
        return found

    def _parse_without_offer(self) -> None:
        """Give a new parser the head again without its Upgrade header, so that it continues with the body.

        The first parser takes what follows such a head for another protocol.
        """
        self._offers_upgrade = False
        line = b"%b %b HTTP/%b" % (
            self._parser.get_method(),
            self._target,
            b"1.0" if self._http10 else b"1.1",
        )
        kept = [name + b": " + value for name, value in self._headers if name != b"upgrade"]
        self._made_parser = None
        self._start_message()
        head = b"\r\n".join([line, *kept, b"\r\n"])
        self._read_bytes = len(head)
        self._parser.feed_data(head)

    def _start_message(self) -> None:
        """Nothing of a request has been read."""
        self._head_done = self._chunks = False
        self._head_fed = self._trailer_bytes = 0
        # Bytes of a body in chunks, without those that came with the head.
        self._chunked_fed = 0
        # How many of these bytes may be framing.
        self._chunk_framing_max = 0
        self._target = b""
        self._headers = []
        self._first = {}
        self._body, self._body_bytes = b"", 0
        self._http10 = False
        self._caller = None

    # -- the parser's calls

    def on_message_begin(self) -> None:
        self._in_message = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:
            self._headers.append((name.lower(), value))
        else:
            # Trailers are dropped.
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > self._limits.max_header_bytes:
                raise self._head_too_large()

    def on_headers_complete(self) -> None:
        self._head_done = True
        self._method = self._parser.get_method()
        self._first = dict(reversed(self._headers))
        if self._head_fed + self._read_bytes > self._limits.max_header_bytes:
            self._check_head_size()
        version = self._parser.get_http_version()
        self._http10 = version == "1.0"
        if not self._http10 and version != "1.1":
            raise InvalidRequest(f"HTTP/{version} is not supported")
        if self._parser.should_upgrade():
            if self._method == b"CONNECT":
                raise InvalidRequest("tunnels are not supported")
            self._offers_upgrade = True
            return
        length = check_framing(self._headers, self._first, http10=self._http10)
        if not self._target.startswith(b"/"):
            self._take_absolute_form()
        if length > self._limits.max_body_bytes:
            raise self._body_too_large()
        self._chunks = b"transfer-encoding" in self._first
        self._take_head(self._method, self._target, self._first, length)
        expects = self._first.get(b"expect", b"").strip().lower() == b"100-continue"
        if expects and not self._http10 and (length or self._chunks):
            self._owes_continue = True

    def on_chunk_header(self) -> None:
        self._chunk_framing_max += CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        self._owes_continue = False
        if self._body_bytes + len(body) > self._limits.max_body_bytes:
            raise self._body_too_large()
        if len(body) != self._roomless_bytes:
            self._hold_more(len(body))
        if not self._body_bytes:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                self._body = io.BytesIO(self._body)
                self._body.seek(0, io.SEEK_END)
            self._body.write(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_message = self._owes_continue = False
        body = self._body if isinstance(self._body, bytes) else self._body.getvalue()
        alive = not self._http10 and self._parser.should_keep_alive()
        method, target, http10 = self._method, self._target, self._http10
        request = Request(method, target, self._headers, self._first, body, http10, alive, self._caller)
        # An idle connection holds no body.
        self._start_message()
        self._take_request(request)

    @property
    def unfinished(self) -> Request | None:
        """The request that is being read, without its body; None before its head is complete."""
        if not self._in_message or not self._head_done:
            return None
        method, target = self._method, self._target
        return Request(method, target, self._headers, self._first, b"", self._http10, False, self._caller)

    # -- limits

    def _check_head_size(self) -> None:
        lengths = map(len, itertools.chain.from_iterable(self._headers))
        size = len(self._target) + sum(lengths) + 4 * len(self._headers)
        if size > self._limits.max_header_bytes:
            raise self._head_too_large()

    def _check_chunk_framing(self) -> None:
        most = self._limits.max_header_bytes
        if self._chunked_fed - self._body_bytes - self._chunk_framing_max > most:
            raise PayloadTooLarge(f"the body's chunk extensions and trailers are over {most} bytes")

    def _take_absolute_form(self) -> None:
        """Keep path and query of `http://authority/path?query`; its authority is the Host that counts."""
        authority, self._target = split_absolute_form(self._target)
        self._headers = [(b"host", authority), *(h for h in self._headers if h[0] != b"host")]
        self._first = dict(reversed(self._headers))

    def _head_too_large(self) -> MidstreamError:
        return HeadersTooLarge(f"the request head is over {self._limits.max_header_bytes} bytes")

    def _body_too_large(self) -> MidstreamError:
        return PayloadTooLarge(f"the request body is over {self._limits.max_body_bytes} bytes")
