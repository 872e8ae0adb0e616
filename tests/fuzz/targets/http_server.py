"""Requests on a client's connection: http/http1.py and http/reader.py, as a gateway's and a replica's ports use them.

Checked: nothing but an answer comes of any bytes. The requests and the answer are the same however the bytes are cut. A
request that is written again in the plainest way is read as the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast

from midstream.core.errors import MidstreamError
from midstream.http.budget import Budget, BudgetBounds
from midstream.http.http1 import ClientConnection
from midstream.http.message import ConnectionLimits, Request
from targets.target import Target, check, controlled, pieces

LIMITS = ConnectionLimits(max_body_bytes=2048, max_header_bytes=1024, keep_alive_s=60)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Where a limit is passed depends on how much of a head was there at once.
SIZE_STATUSES = (413, 431)


class Wire:
    """The transport: keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = self.aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.written += b"".join(parts)

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class StoppedClock:
    def time(self) -> float:
        return 0.0


class Exchange:
    answered = True

    def __init__(self, client: ClientConnection) -> None:
        self._client = client

    def start(self) -> None:
        self._client.write(ANSWER)
        self._client.finish()

    def client_paused(self) -> None: ...
    def client_resumed(self) -> None: ...
    def client_gone(self) -> None: ...
    def cut(self, reason: str) -> None: ...


class Service:
    draining = False

    def __init__(self) -> None:
        self.budget = Budget(BudgetBounds())
        self.requests: list[Request] = []
        self.refusals: list[MidstreamError] = []

    def connected(self, client: ClientConnection) -> None: ...
    def disconnected(self, client: ClientConnection) -> None: ...

    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None: ...

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        self.requests.append(request)
        return Exchange(client)

    def refused(self, error: MidstreamError, request: Request | None, client: ClientConnection) -> None:
        self.refusals.append(error)


def served(parts: Iterable[bytes]) -> tuple[Service, Wire]:
    service, wire = Service(), Wire()
    connection = ClientConnection(service, LIMITS, cast("asyncio.AbstractEventLoop", StoppedClock()))
    connection.connection_made(cast("asyncio.Transport", wire))
    for part in parts:
        if wire.closing:
            break
        connection.data_received(part)
        check(not wire.aborted, "a client's bytes broke its connection without an answer", part)
    connection.connection_lost(None)
    check(service.budget.held_bytes == 0, "bytes stay counted after the connection's end")
    return service, wire


def told(request: Request) -> tuple[Any, ...]:
    return request.method, request.target, request.headers, request.body, request.http10, request.keep_alive


def run(data: bytes) -> None:
    control, stream = controlled(data)
    whole, wire = served([stream])
    cut, cut_wire = served(pieces(stream, control))
    statuses = [error.status for error in (*whole.refusals, *cut.refusals)]
    if not set(statuses) & {*SIZE_STATUSES}:
        check(
            [*map(told, whole.requests)] == [*map(told, cut.requests)],
            "other requests when the bytes are cut",
            [*map(told, whole.requests)],
            [*map(told, cut.requests)],
        )
        # A body that is there already is not asked for.
        answers, cut_answers = (w.written.replace(CONTINUE, b"") for w in (wire, cut_wire))
        check(answers == cut_answers, "another answer when the bytes are cut", answers, cut_answers)
    check(len(whole.refusals) <= 1, "a connection goes on after a refusal")
    for error in whole.refusals:
        check(400 <= error.status < 500, "a client's bytes are the server's fault", error)
    for request in whole.requests:
        check(len(request.body) <= LIMITS.max_body_bytes, "a body over the limit", len(request.body))
        check_again(request)


def check_again(request: Request) -> None:
    framing = (b"transfer-encoding", b"content-length", b"expect", b"connection", b"keep-alive")
    headers = [(name, value) for name, value in request.headers if name not in framing]
    lines = [name + b": " + value for name, value in headers]
    version = b"1.0" if request.http10 else b"1.1"
    start = request.method + b" " + request.target + b" HTTP/" + version
    plain = b"\r\n".join([start, *lines, b"content-length: %d" % len(request.body), b"", request.body])
    again, _ = served([plain])
    if again.refusals and again.refusals[0].status in SIZE_STATUSES:
        return
    check(len(again.requests) == 1, "a request that was read is refused when it is written again", plain)
    read = again.requests[0]
    kept = [(name, value) for name, value in read.headers if name not in framing]
    same = (read.method, read.target, read.body) == (request.method, request.target, request.body)
    check(same and kept == headers, "another request when it is written again", told(request), told(read))


def seeds() -> Iterable[bytes]:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
    for control in (b"\x00", b"\x35"):
        yield control + head + b'content-length: 13\r\nx-session-id: s\r\n\r\n{"model":"m"}'
        yield control + head + b"transfer-encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nx-t: 1\r\n\r\n"
        yield control + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"
        yield control + b"GET http://b:1/x?y HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        yield control + head + b"upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}"
        yield control + head + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}"
        yield control + b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
        yield control + head + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"
        yield control + head + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


WORDS = (
    *(
        b"POST ",
        b"GET ",
        b"CONNECT ",
        b"HEAD ",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b" HTTP/2.0\r\n",
        b"http://a",
    ),
    *(b"\r\n", b"\r\n\r\n", b"host: ", b"content-length: ", b"transfer-encoding: ", b"chunked", b"identity"),
    *(b"connection: ", b"close", b"keep-alive", b"upgrade", b"upgrade: h2c\r\n", b"expect: 100-continue\r\n"),
    *(b"content-encoding: ", b"gzip", b"0\r\n\r\n", b"0" * 64, b"; a=b", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
)
TARGET = Target(run, seeds, WORDS, 8192)
