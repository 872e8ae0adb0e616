"""Responses of upstreams: http/upstream.py, which passes bodies on, and http/call.py, which reads them.

Checked: a response that is whole comes through with the same status, headers and body however it is cut. Bytes after its end
are never part of it. Whatever else comes ends the exchange with a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple, cast

from midstream.http.call import ResponseStream
from midstream.http.upstream import DecodingConnection, UpstreamConnection, UpstreamHead, UpstreamPool
from targets.http_server import Wire
from targets.target import Target, check, controlled, pieces

_loop = asyncio.new_event_loop()


class Read(NamedTuple):
    """headers, body: without chunks' frames. lost: why the response is not whole. left: bytes that came after it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    lost: str | None
    left: int
    raw: bytes = b""


class Sink:
    def __init__(self) -> None:
        self.status = 0
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.body = b""
        self.heads = self.ends = 0
        self.lost: str | None = None

    def response_head(self, head: UpstreamHead) -> None:
        self.heads += 1
        self.status, self.headers, self.body = head.status, tuple(head.headers), head.body

    def response_body(self, data: bytes) -> None:
        self.body += data

    def response_end(self) -> None:
        self.ends += 1

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        check(self.lost is None and self.ends == 0, "a response ends twice", reason)
        self.lost = reason


async def _never(factory: object) -> None:
    raise AssertionError("nothing is connected here")


def passed_on(parts: Iterable[bytes], *, decode: bool, head_request: bool) -> Read:
    pool = UpstreamPool(_never, 1)
    connection = (DecodingConnection if decode else UpstreamConnection)(pool)
    wire, sink = Wire(), Sink()
    connection.connection_made(cast("asyncio.Transport", wire))
    connection.send(sink, b"GET / HTTP/1.1\r\n\r\n", b"", head_request=head_request)
    left = 0
    for part in parts:
        if sink.ends or sink.lost is not None:
            left += len(part)
        elif not wire.closing:
            connection.data_received(part)
    connection.connection_lost(None)
    check(sink.ends + (sink.lost is not None) == 1, "a response has not exactly one end")
    check(sink.heads == 1 or sink.ends == 0, "a response has not exactly one head")
    return Read(sink.status, sink.headers, sink.body, sink.lost, left)


def called(parts: Iterable[bytes]) -> Read:
    async def main() -> Read:
        body: list[bytes] = []
        stream, wire, left = ResponseStream(b"", body.append), Wire(), 0
        stream.connection_made(cast("asyncio.Transport", wire))
        for part in parts:
            if stream.ended.done():
                left += len(part)
            else:
                stream.data_received(part)
        stream.connection_lost(None)
        return Read(stream.status, (), b"".join(body), stream.ended.result(), left)

    return _loop.run_until_complete(main())


def run(data: bytes) -> None:
    control, stream = controlled(data)
    how, stream = controlled(stream)
    decode, head_request = bool(how & 1), bool(how & 2)
    compare(
        passed_on([stream], decode=decode, head_request=head_request),
        passed_on(pieces(stream, control), decode=decode, head_request=head_request),
    )
    compare(called([stream]), called(pieces(stream, control)))


def compare(whole: Read, cut: Read) -> None:
    if whole.lost is None:
        same = (whole.status, whole.headers, whole.body) == (cut.status, cut.headers, cut.body)
        check(same and cut.lost is None, "another response when the bytes are cut", whole, cut)
    elif cut.lost is None:
        check(cut.left, "a response is broken only when it comes at once", whole, cut)


def seeds() -> Iterable[bytes]:
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"choices":[]}\n\n'
    for control in (b"\x00\x00", b"\x21\x01", b"\x35\x02"):
        yield control + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
        yield control + chunks + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
        yield control + b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 425 Too Early\r\ncontent-length: 0\r\n\r\n"
        yield control + b"HTTP/1.1 204 No Content\r\n\r\n"
        yield control + b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nto the end"
        yield control + chunks + b"2;x=y\r\nab\r\n0\r\nx-t: 1\r\n\r\nHTTP/1.1 200 OK\r\n"
        yield control + b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"


WORDS = (
    *(
        b"HTTP/1.1 ",
        b"HTTP/1.0 ",
        b"200 OK\r\n",
        b"100 Continue\r\n\r\n",
        b"204 No Content\r\n",
        b"304 \r\n",
        b"101 ",
    ),
    *(
        b"\r\n\r\n",
        b"content-length: ",
        b"transfer-encoding: chunked\r\n",
        b"connection: close\r\n",
        b"0\r\n\r\n",
    ),
    *(
        b"upgrade: x\r\n",
        b"connection: upgrade\r\n",
        b"\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ),
)
TARGET = Target(run, seeds, WORDS)
