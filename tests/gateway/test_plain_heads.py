"""What is read without the parser comes out as the parser reads it, and only what is plain is read so."""

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import httptools
import pytest
from test_framing import LINES, requests

from midstream.core.errors import MidstreamError
from midstream.http import plain, reader, upstream
from midstream.http.message import ConnectionLimits, Request
from midstream.http.plain import HeaderLines, HeadStart, NotPlain
from midstream.http.reader import RequestReader
from midstream.http.upstream import UpstreamConnection, UpstreamHead, UpstreamPool
from midstream.proxy.heads import ClientLines, UpstreamLines, to_upstream

HEADS = 20_000
LIMITS = ConnectionLimits(max_body_bytes=16, max_header_bytes=256, keep_alive_s=1.0)
ANSWER_LINES = [
    *LINES,
    b"Content-Length: 0",
    b"Transfer-Encoding: chunked",
    b"Proxy-Connection: close",
    b"Date: Sat, 21 Nov 2026 20:00:00 GMT",
    b"content-length: 000000000000000000003",
]


class Reading(RequestReader):
    """Notes what the reader asks of a connection, and what it says in the end."""

    def __init__(self, *, plain_ones: bool) -> None:
        super().__init__(LIMITS)
        self.notes: list[object] = []
        self.requests: list[Request] = []
        self.refused = False
        self.last_start: HeadStart | None = None
        if not plain_ones:
            self._plain_head_bytes_max = 0

    def _take_head(self, method: bytes, target: bytes, first: Mapping[bytes, bytes], length: int) -> None:
        self.notes.append(("head", method, target, dict(first), length))

    def _hold_more(self, more: int) -> None:
        self.notes.append(("more", more))

    def _take_request(self, request: Request) -> None:
        self.notes.append(told(request))
        self.requests.append(request)

    def read(self, data: bytes) -> list[object]:
        try:
            if (request := self.feed(data)) is not None:
                self._take_request(request)
        except (MidstreamError, httptools.HttpParserError) as error:
            cause = error if isinstance(error, MidstreamError) else error.__context__
            unfinished, self.refused = self.unfinished, True
            self.notes.append((type(error), str(cause or error), unfinished and told(unfinished)))
        return self.notes


def told(request: Request) -> tuple[object, ...]:
    head = (request.method, request.target, request.headers, dict(request.first))
    return (*head, request.body, request.http10, request.keep_alive, request.caller)


def changed(data: bytes, rng: random.Random) -> bytes:
    """One byte in three is another one, is gone, or comes twice."""
    at, what = rng.randrange(len(data)), rng.randrange(9)
    if what > 2:
        return data
    middle = (bytes([rng.choice(b"\0\t\n\r :,0aZ~\x7f\xff")]), b"", data[at : at + 1] * 2)[what]
    return data[:at] + middle + data[at + 1 :]


def test_a_request_is_the_same_with_the_parser_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come after it on its connection, which may begin as it did."""
    monkeypatch.setattr(plain, "LINES_MAX", 64)
    rng, lines = random.Random(1), UpstreamLines(frozenset((b"connection", b"content-length")))
    made, without, begun_alike = requests(rng), 0, 0
    for _ in range(HEADS // 2):
        one, other = Reading(plain_ones=True), Reading(plain_ones=False)
        request = changed(next(made), rng)
        for _ in range(8):
            assert one.read(request) == other.read(request), request
            assert len(one.requests) == len(other.requests)
            if one.refused or one._in_message or not all(came.keep_alive for came in one.requests):
                break
            for came, parsed in zip(one.requests, other.requests, strict=True):
                without += came.start is not None
                begun_alike += came.start is not None and came.start is one.last_start
                one.last_start = came.start
                sent = to_upstream(came, b"/", 3, lines, [])
                assert sent == to_upstream(parsed, b"/", 3, lines, []), request
            one.requests, other.requests = [], []
            if rng.random() < 0.5:
                request = changed(next(made), rng)
    assert HEADS / 50 < begun_alike < without
    assert max(len(reader._header_lines), len(reader._request_lines)) <= 1024


def test_a_head_is_known_by_the_lines_that_no_request_changes() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-A: 1\r\nAuthorization: Bearer secret\r\n"
    reading = Reading(plain_ones=True)
    for session in (b"a", b"b", b"c"):
        reading.read(head + b"X-Session-ID: " + session + b"\r\nContent-Length: 3\r\n\r\nxyz")
    starts = [request.start for request in reading.requests]
    assert [start and start.text for start in starts] == [head[: head.index(b"Authorization")]] * 3
    assert starts[0] is starts[1] is starts[2]
    reading.read(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-A: 2\r\nContent-Length: 3\r\n\r\nxyz")
    last = reading.requests[-1].start
    assert last is not None
    assert last.headers == [(b"host", b"t")]


class Sink:
    def __init__(self) -> None:
        self.notes: list[object] = []

    def response_head(self, head: UpstreamHead) -> None:
        self.notes.append((head.status, head.reason, list(head.headers), dict(head.first), head.body))

    def response_body(self, data: bytes) -> None:
        self.notes.append(data)

    def response_end(self) -> None:
        self.notes.append("end")

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        self.notes.append((reason, answered))


class Transport:
    closing = False

    def get_extra_info(self, name: str) -> None: ...
    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


async def _never(factory: object) -> None:
    raise AssertionError("nothing is connected here")


def answered(answers: list[list[bytes]], *, head_request: bool) -> list[object]:
    """What comes of responses in these reads, one after the other, as long as the connection stays open."""
    pool = UpstreamPool(_never, 1)
    connection, wire = UpstreamConnection(pool), Transport()
    connection.connection_made(cast(Any, wire))
    found: list[object] = []
    for reads in answers:
        if wire.closing:
            break
        sink = Sink()
        connection.send(sink, b"GET / HTTP/1.1\r\n\r\n", b"", head_request=head_request)
        for read in reads:
            if connection._sink is None or wire.closing:
                break
            connection.data_received(read)
        found += [sink.notes, connection.answering, connection.in_chunk, connection.malformed, repr(pool)]
        if connection._sink is not None:
            connection.connection_lost(None)
            break
    return found


def test_an_idle_connection_holds_nothing_of_the_exchange_before() -> None:
    connection = UpstreamConnection(UpstreamPool(_never, 1))
    connection.connection_made(cast(Any, Transport()))
    sink = Sink()
    held = weakref.ref(sink)
    connection.send(sink, b"GET / HTTP/1.1\r\n\r\n", b"", head_request=False)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
    connection.data_received(b"xyz")
    assert sink.notes[-1] == "end"
    del sink
    assert held() is None


async def test_a_connection_that_was_refused_does_not_wait_for_a_collection() -> None:
    made: list[weakref.ref[asyncio.Protocol]] = []

    async def refused(factory: Callable[[], asyncio.Protocol]) -> None:
        made.append(weakref.ref(factory()))
        raise ConnectionRefusedError

    gc.disable()
    try:
        with contextlib.suppress(ConnectionRefusedError):
            await UpstreamPool(refused, 1).open()
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def answers(rng: random.Random) -> Iterator[bytes]:
    """Responses; most have one thing that is not plain."""
    while True:
        lines = [b"Server: uvicorn", b"X-A: 1", b"Connection: keep-alive"][: rng.randint(0, 3)]
        chunked = rng.random() < 0.4
        lines.append(b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 3")
        for _ in range(rng.choice((0, 0, 1, 2))):
            lines.insert(rng.randint(0, len(lines)), rng.choice(ANSWER_LINES))
        start = b"HTTP/1.1 200 OK"
        if rng.random() < 0.2:
            start = rng.choice((b"HTTP/1.1 204 No", b"HTTP/1.0 200 OK", b"HTTP/1.1 200", b"HTTP/1.1 100 OK"))
        bodies = (b"xyz", b"xyz", b"", b"wxyz", b"xyz\r\n")
        in_chunks = (b"3\r\nxyz\r\n0\r\n\r\n",) * 3 + (b"3;a=b\r\nxyz\r\n0\r\nt: 1\r\n\r\n", b"3\r\nxy")
        body = rng.choice(in_chunks if chunked else bodies)
        yield b"\r\n".join([start, *lines, b"", b""]) + body


def test_a_response_is_the_same_with_the_parser_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "LINES_MAX", 64)
    rng, taken = random.Random(2), [0]
    take_plain = UpstreamConnection._take_plain

    def counted(self: UpstreamConnection, sink: Any, data: bytes) -> bool:
        found = take_plain(self, sink, data)
        taken[0] += found
        return found

    made = answers(rng)
    for _ in range(HEADS // 2):
        reads = []
        for response in (changed(next(made), rng), next(made)):
            cut = rng.choice((len(response), len(response), rng.randint(1, len(response))))
            reads.append([part for part in (response[:cut], response[cut:]) if part])
        head_request = rng.random() < 0.1
        monkeypatch.setattr(UpstreamConnection, "_take_plain", counted)
        one = answered(reads, head_request=head_request)
        monkeypatch.setattr(UpstreamConnection, "_take_plain", lambda self, sink, data: False)
        assert one == answered(reads, head_request=head_request), reads
    assert HEADS / 16 < taken[0] < HEADS * 7 / 8
    assert len(upstream._header_lines) <= 1024


def test_a_stream_is_within_a_chunk_from_the_end_of_its_size_to_the_end_of_its_data() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"4;a=b\r\ndata\r\n"
    for cut in range(len(chunk) + 1):
        for whole in (b"", chunk * 2):
            found = answered([[head + whole + chunk[:cut]]], head_request=False)
            assert found[2] == (len(b"4;a=b\r\n") <= cut < len(chunk)), (whole, cut)


def test_no_credential_and_no_long_line_is_remembered() -> None:
    lines = HeaderLines((), chunked=False)
    assert lines[b"Authorization: Bearer secret"] == (b"authorization", b"Bearer secret")
    assert lines[b"x-a: " + b"1" * 1000] == (b"x-a", b"1" * 1000)
    assert lines == {}
    assert lines[b"X-A: 1"] is lines[b"X-A: 1"]
    assert lines == {b"X-A: 1": (b"x-a", b"1")}


@pytest.mark.parametrize(
    "line",
    [b"", b" a: 1", b"a : 1", b"a:", b"a: ", b"a:  1", b"a: 1 ", b"a: \xe4", b"a: 1\n", b"a: 1\r", b"a_b: 1"],
)
def test_a_line_that_two_parsers_may_read_differently_is_not_plain(line: bytes) -> None:
    with pytest.raises(NotPlain):
        HeaderLines((), chunked=True)[line]


def test_what_goes_on_is_remembered_within_the_same_bounds() -> None:
    request_lines, answer_lines = (
        UpstreamLines(frozenset((b"x-b",))),
        ClientLines(http10=False, labels=False),
    )
    for name in (b"x-a", b"x-b", b"x-midstream-a", b"authorization", b"set-cookie"):
        for value in (b"1", b"1" * plain.LINE_BYTES_MAX):
            goes_on = name not in (b"x-b", b"x-midstream-a")
            line = b"%b: %b\r\n" % (name, value)
            assert request_lines[name, value] == (line if goes_on else b"")
            assert answer_lines[name, value] == (b"" if name == b"x-midstream-a" else line)
    assert (
        list(request_lines)
        == list(answer_lines)
        == [(b"x-a", b"1"), (b"x-b", b"1"), (b"x-midstream-a", b"1")]
    )
    for number in range(plain.LINES_MAX):
        assert request_lines[b"x-a", b"%d" % number] == b"x-a: %d\r\n" % number
    assert len(request_lines) <= plain.LINES_MAX
