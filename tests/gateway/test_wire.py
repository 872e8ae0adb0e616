"""Compiled connections: whatever comes, however it is cut, they do what the Python path does; and their own endings."""

import asyncio
import contextlib
import errno
import random
import resource
import socket
from collections.abc import Iterator

import pytest
import uvloop
from gateway_harness import Message, Peer, post, read_chunk, read_head, run, staged

from midstream.compiled import NoCompiler
from midstream.errors import ConfigError
from midstream.gateway import wire
from midstream.gateway.wire import WireLoop, new_event_loop

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


def requests(rng: random.Random) -> Iterator[list[bytes]]:
    """Requests as the reads in which they come; most have one thing that is not plain."""
    while True:
        lines = [b"Host: t", b"Content-Length: 3", b"X-A: 1", b"Connection: keep-alive"][: rng.randint(1, 4)]
        for _ in range(rng.choice((0, 1, 1, 2))):
            lines.insert(rng.randint(0, len(lines)), rng.choice(LINES))
        start = rng.choice(STARTS) if rng.random() < 0.2 else STARTS[0]
        end = b"\n" if rng.random() < 0.05 else b"\r\n"
        body = rng.choice((b"xyz", b"xyz", b"xyz", b"", b"wxyz", b"3\r\nxyz\r\n0\r\n\r\n"))
        data = end.join([start, *lines, b"", b""]) + body
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((0, 0, 1, 3))))
        yield [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def test_any_head_however_cut_is_served_or_refused_as_the_python_path_does() -> None:
    outcomes: list[list[tuple[list[bytes], list[bytes], object]]] = []

    async def main() -> None:
        async def echo(request: Message, peer: Peer) -> None:
            peer.respond(request.body)

        seen: list[tuple[list[bytes], list[bytes], object]] = []
        rng = random.Random(7)
        async with staged(echo, echo) as stage:
            for reads, _ in zip(requests(rng), range(1500), strict=False):
                client = await stage.connect()
                for read in reads:
                    client.send(read)
                    await asyncio.sleep(0)
                client.send(b"\r\n" + post(b"last", headers="Connection: close\r\n"))
                answers = await client.closed()
                statuses = [line[:12] for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
                served = [m for mock in stage.mocks for m in mock.requests]
                for message in served:
                    message.headers = {
                        name: value for name, value in message.headers.items() if name != "x-midstream-placed"
                    }
                    if message.headers.get("x-request-id") != "mine":
                        message.headers.pop("x-request-id")
                seen.append((reads, statuses, [(m.start, sorted(m.headers.items()), m.body) for m in served]))
                for mock in stage.mocks:
                    mock.requests.clear()
        outcomes.append(seen)

    run(main, compares=True)
    for compiled, python in zip(*outcomes, strict=True):
        assert compiled == python
    refused = sum(statuses == [b"HTTP/1.1 400"] for _, statuses, _ in outcomes[0])
    assert 300 < refused < 1200, "both were tried"


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
def test_any_chunks_however_cut_pass_byte_for_byte_and_leave_the_connection_usable(kind: str) -> None:
    async def main() -> None:
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

    run(main)


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
def test_a_response_whose_framing_breaks_is_seen_to_be_broken(broken: bytes) -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.slow
def test_a_thousand_streams_at_once_keep_their_own_bytes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = 1000
    loops = []

    async def main() -> None:
        everyone = asyncio.Barrier(count)
        loops.append(asyncio.get_running_loop())

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

    try:
        run(main)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(loops[0], WireLoop)


def test_an_exception_in_a_protocol_is_reported_and_ends_its_connection_only() -> None:
    class Fails(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise ZeroDivisionError("on purpose")

    reported: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WireLoop)
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

        async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            ended.set()

        ended = asyncio.Event()
        async with await asyncio.start_server(hello, "127.0.0.1", 0) as server:
            await loop.connect(Fails, "127.0.0.1", server.sockets[0].getsockname()[1])
            await ended.wait()

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())
    assert [str(error) for error in reported] == ["on purpose"]


def test_a_loop_that_closes_ends_its_connections_and_tells_them() -> None:
    class Told(asyncio.Protocol):
        lost = False

        def connection_lost(self, error: Exception | None) -> None:
            self.lost = True

    here, there = socket.socketpair()
    loop = WireLoop()
    protocol = Told()
    transport = loop.adopt(here, protocol)
    loop.close()
    loop.close()
    assert (protocol.lost, transport.is_closing(), there.recv(1)) == (True, True, b"")
    transport.write(b"late")
    there.close()


def test_a_name_is_looked_up_and_each_of_its_addresses_tried() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WireLoop)
        connected = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            assert await reader.read() == b""
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:  # not on ::1
            port = server.sockets[0].getsockname()[1]
            transport, _ = await loop.connect(asyncio.Protocol, "localhost", port)
            await connected.wait()
            transport.close()
        with pytest.raises(ConnectionRefusedError):
            await loop.connect(asyncio.Protocol, "localhost", port)

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())


def test_connections_are_accepted_again_after_descriptors_ran_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Short(socket.socket):
        left = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    class Greets(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(b"hello")
            transport.close()

    monkeypatch.setattr(wire, "ACCEPT_AGAIN_S", 0.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WireLoop)
        sock = Short()
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        end = loop.listen(sock, Greets, -1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()
        end()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())
    assert caplog.text.count("no connection can be accepted for a while") == 2


def test_without_a_compiler_the_loop_is_uvloops_or_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise NoCompiler("no C++ compiler was found")

    monkeypatch.setattr(wire, "_open", no_compiler)
    with pytest.raises(ConfigError, match="data_path is native: no C"):
        new_event_loop("native")
    for data_path in ("auto", "python"):
        loop = new_event_loop(data_path)  # type: ignore[arg-type]
        assert isinstance(loop, uvloop.Loop)
        loop.close()
