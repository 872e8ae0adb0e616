"""Requests and responses however they are cut and framed: what comes through is the same, and a broken frame is seen."""

import asyncio
import json
import random
import resource
from collections.abc import Iterator

import pytest
from gateway_harness import Message, Peer, Stage, post, read_chunk, read_head, staged

LINES = [
    b"Host: t",
    b"host:t2",
    b"Content-Length: 3",
    b"content-length: 03",
    b"Content-Length: 3 ",
    b"Content-Length: 4",
    b"Content-Length:",
    b"Content-Length: -3",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Connection: keep-alive",
    b"Connection: Keep-Alive",
    b"Connection: close",
    b"Connection: keep-alive, x-a",
    b"Upgrade: h2c",
    b"Expect: nothing",
    b"TE: trailers",
    b"Keep-Alive: 5",
    b"X-A: 1",
    b"x-a:\t2 \t",
    b"X-A : 3",
    b"X-\xe4: 1",
    b"X-B: \xe4\xf6",
    b"X-C: a\x00b",
    b"X-C: a\x7fb",
    b"X-D: a\rb",
    b" folded",
    b": no name",
    b"no colon",
    b"X-E:",
    b"X-Session-ID: s1",
    b"X-Midstream-Session: forged",
    b"X-Request-ID: mine",
]
STARTS = [
    b"POST /v1/completions HTTP/1.1",
    b"POST /v1/completions?a=%20b HTTP/1.1",
    b"POST /v1/completions HTTP/1.0",
    b"POST  /v1/completions HTTP/1.1",
    b"POST /v1/completions  HTTP/1.1",
    b"POST /v1/compl\xe4tions HTTP/1.1",
    b"POST v1/completions HTTP/1.1",
    b"POST /v1/completions HTTP/1.1 ",
    b"post /v1/completions HTTP/1.1",
    b"GET /v1/completions HTTP/1.1",
    b"\r\nPOST /v1/completions HTTP/1.1",
]


def requests(rng: random.Random) -> Iterator[bytes]:
    """Requests; most have one thing that is not plain."""
    while True:
        lines = [b"Host: t", b"Content-Length: 3", b"X-A: 1", b"Connection: keep-alive"][: rng.randint(1, 4)]
        for _ in range(rng.choice((0, 1, 1, 2))):
            lines.insert(rng.randint(0, len(lines)), rng.choice(LINES))
        start = rng.choice(STARTS) if rng.random() < 0.2 else STARTS[0]
        end = b"\n" if rng.random() < 0.05 else b"\r\n"
        body = rng.choice((b"xyz", b"xyz", b"xyz", b"", b"wxyz", b"3\r\nxyz\r\n0\r\n\r\n"))
        yield end.join([start, *lines, b"", b""]) + body


async def outcome(stage: Stage, reads: list[bytes]) -> tuple[list[bytes], object]:
    """The statuses of the answers, and what replicas got, of a request that comes in these reads, and of a last one."""
    client = await stage.connect()
    for read in reads:
        client.send(read)
        await asyncio.sleep(0)
    client.send(b"\r\n" + post(b"last", headers="Connection: close\r\n"))
    answers = await client.closed()
    served = [message for mock in stage.mocks for message in mock.requests]
    for mock in stage.mocks:
        mock.requests.clear()
    for message in served:
        for name in ("x-midstream-placed", "x-midstream-boot"):
            message.headers.pop(name, None)
        if message.headers.get("x-request-id") != "mine":
            message.headers.pop("x-request-id")
    statuses = [line[:12] for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return statuses, [(m.start, sorted(m.headers.items()), m.body) for m in served]


async def test_any_head_is_served_or_refused_in_the_same_way_however_it_is_cut() -> None:
    refused = 0

    async def echo(request: Message, peer: Peer) -> None:
        peer.respond(request.body)

    rng = random.Random(7)
    async with staged(echo, echo) as stage:
        for data, _ in zip(requests(rng), range(750), strict=False):
            cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((1, 3, 9))))
            reads = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
            whole = await outcome(stage, [data])
            assert await outcome(stage, reads) == whole, reads
            refused += whole[0] == [b"HTTP/1.1 400"]
    assert 150 < refused < 600, "requests of both kinds were tried"


async def test_a_length_with_more_zeros_than_python_reads_as_a_number_is_answered() -> None:
    async def echo(request: Message, peer: Peer) -> None:
        peer.respond(request.body)

    async with staged(echo, echo) as stage:
        zeros = b"0" * 5000
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %b2\r\n\r\n{}" % zeros
        statuses, served = await outcome(stage, [head])
        assert statuses == [b"HTTP/1.1 400"]
        assert served == []


async def test_a_client_that_speaks_http_2_learns_what_is_spoken_here() -> None:
    async with staged() as stage:
        client = await stage.connect()
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"HTTP/1.1, not HTTP/2" in answer


def chunked(rng: random.Random) -> tuple[bytes, bytes]:
    """A body in chunks, with what may be in their framing; and its end."""
    framed = b""
    for _ in range(rng.randint(1, 8)):
        data = rng.choice(
            (b"data: x\n\n", b": m 0:1\ndata: y\n\n", b"\n\n", b"da", b"\n", rng.randbytes(300))
        )
        size = rng.choice((b"%x", b"%X", b"0%x")) % len(data)
        framed += size + rng.choice((b"", b"", b";e=1")) + b"\r\n" + data + b"\r\n"
    return framed, rng.choice((b"0\r\n\r\n", b"00\r\n\r\n", b"0\r\nt: v\r\n\r\n", b"0;x\r\n\r\n"))


@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_any_chunks_however_cut_pass_byte_for_byte_and_leave_the_connection_usable(kind: str) -> None:
    rng = random.Random(11)
    wanted = b""

    async def handler(request: Message, peer: Peer) -> None:
        nonlocal wanted
        body, end = chunked(rng)
        wanted = body + end
        peer.start_stream(kind)
        cuts = sorted(rng.randint(0, len(wanted)) for _ in range(rng.choice((0, 1, 4))))
        for start, stop in zip([0, *cuts], [*cuts, len(wanted)], strict=True):
            peer.send(wanted[start:stop])
            await asyncio.sleep(0)

    async with staged(handler) as stage:
        client = await stage.connect()
        for _ in range(150):
            client.send(post(b'{"stream":true}'))
            assert (await read_head(client.reader)).status == 200
            assert await client.reader.readexactly(len(wanted)) == wanted
        assert stage.mocks[0].connections == 1


@pytest.mark.parametrize(
    "broken",
    [
        b"5\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"\r\nabc\r\n",
        b"3\nabc\r\n",
        b"-3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"fffffffffffffffff\r\nabc",
        b"3\r\nabc\r\n0\r\nbad\x01trailer\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_a_response_whose_framing_breaks_is_seen_to_be_broken(broken: bytes) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream("text/plain")
        peer.chunk(b"first")
        await peer.writer.drain()
        await asyncio.sleep(0)
        peer.send(broken)
        await peer.closed()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        assert await client.closed() != b""
        client = await stage.connect()
        client.send(post())
        answer = await client.closed()
        assert not answer.endswith(b"0\r\n\r\n")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.slow
async def test_a_thousand_streams_at_once_keep_their_own_bytes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = 1000

    try:
        everyone = asyncio.Barrier(count)

        async def handler(request: Message, peer: Peer) -> None:
            peer.start_stream()
            await everyone.wait()
            for n in range(3):
                peer.chunk(b"data: %b-%d\n\n" % (request.body, n))
            peer.end_stream()

        async def one(n: int) -> list[bytes]:
            client = await stage.connect()
            client.send(post(b"%d" % n))
            await read_head(client.reader)
            return [await read_chunk(client.reader) for _ in range(4)]

        async with staged(handler, handler) as stage:
            streams = await asyncio.gather(*(one(n) for n in range(count)))
            assert streams == [[*(b"data: %d-%d\n\n" % (n, k) for k in range(3)), b""] for n in range(count)]
            assert sum(len(mock.requests) for mock in stage.mocks) == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int) -> bytes:
    """One write of a stream that tells of itself."""
    told = (
        '{"id":"x","created":1,"seed":7,"prompts":"d"}\n: m {"c":0,"t":[100],"s":"base"}'
        if not number
        else ""
    )
    return f": m {told or f'0:{number}'}\n\ndata: {number}\n\n".encode()


LAST = b": m end\n\ndata: [DONE]\n\n"
BROKEN = [
    chunk(event(1)) + chunk(event(2)) + b"zz\r\n",
    chunk(event(1)) + chunk(event(2)) + chunk(event(3)) + chunk(LAST) + b"0\r\n\r\nHTTP/1.1 200 OK\r\n",
]


@pytest.mark.parametrize("rest", BROKEN, ids=["no chunk", "bytes after the end"])
async def test_events_that_came_with_a_broken_frame_are_not_taken_for_passed_on(rest: bytes) -> None:
    has_first = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        resumed = "/replica/resume" in request.start
        peer.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            + (b"\r\n" if resumed else b"x-midstream-resumable: 1\r\n\r\n")
        )
        if resumed:
            had = len(json.loads(request.body)["state"].split("\n")) - 1
            peer.send(b"".join(chunk(b"data: %d\n\n" % n) for n in range(had, 4)))
            peer.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        peer.chunk(event(0))
        await has_first.wait()
        peer.send(rest)
        await peer.closed()

    async with staged(handler, handler) as stage:
        client = await stage.connect()
        client.send(post(b'{"stream":true}'))
        await read_head(client.reader)
        got = await read_chunk(client.reader)
        has_first.set()
        while data := await read_chunk(client.reader):
            got += data
        assert [line for line in got.split(b"\n") if line.startswith(b"data")] == [
            b"data: 0",
            b"data: 1",
            b"data: 2",
            b"data: 3",
            b"data: [DONE]",
        ]


@pytest.mark.parametrize("end", [b"zz\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n"])
async def test_no_error_event_is_written_into_a_chunk_whose_rest_was_not_passed_on(end: bytes) -> None:
    has_first = asyncio.Event()
    whole = chunk(b"data: something\n\n")

    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.send(whole + whole[:9])
        await has_first.wait()
        peer.send(whole[9:] + end)
        await peer.closed()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        await read_head(client.reader)
        assert await client.reader.readexactly(len(whole) + 9) == whole + whole[:9]
        has_first.set()
        assert await client.closed() == b""


@pytest.mark.parametrize("end", [b"0;x\r\n\r\n", b"0\r\nx-a: 1\r\n\r\n"])
async def test_a_stream_that_can_be_resumed_ends_however_its_last_chunk_is_written(end: bytes) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-midstream-resumable: 1\r\n\r\n"
        )
        peer.send(chunk(event(0)) + chunk(LAST) + end)

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post(b'{"stream":true}'))
        await read_head(client.reader)
        whole = chunk(event(0)) + chunk(LAST) + end
        assert await client.reader.readexactly(len(whole)) == whole
