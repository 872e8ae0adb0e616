"""Compiled connections where two things happen at once or a peer breaks the rules: nothing is lost or kept for good."""

import asyncio
import json
import resource
import socket
import sys
from typing import cast

import pytest
from gateway_harness import Message, Peer, post, read_chunk, read_head, run, staged

from midstream.gateway.wire import WireLoop, WireTransport

RULES = ((), (), 65536, 65536)


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
def test_events_that_came_with_a_broken_frame_are_not_taken_for_passed_on(rest: bytes) -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.parametrize("end", [b"zz\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n"])
def test_no_error_event_is_written_into_a_chunk_whose_rest_was_not_passed_on(end: bytes) -> None:
    async def main() -> None:
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

    run(main)


class Refuses(asyncio.Protocol):
    """Wants no body, as a client's connection does that has refused a request."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.told = asyncio.Event()
        self.ended = asyncio.Event()

    def request_begun(self, target: bytes, first: dict[bytes, bytes]) -> bool:
        self.names = list(first)
        self.told.set()
        return False

    def raw_received(self, data: bytes) -> bool:
        self.told.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def test_heads_of_requests_that_nobody_wants_are_not_kept() -> None:
    head = b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nX-Kept: 1\r\n\r\n"

    async def main() -> None:
        loop = cast(WireLoop, asyncio.get_running_loop())
        ours, theirs = socket.socketpair()
        protocol = Refuses()
        loop.adopt(theirs, protocol, loop.rules(*RULES))
        ours.setblocking(False)

        async def refused() -> None:
            for data in (head, b"x"):  # after bytes that come as such heads are read again
                protocol.told.clear()
                await loop.sock_sendall(ours, data)
                await protocol.told.wait()

        await refused()
        name = protocol.names[0]  # a name is one object in all requests
        assert name == b"x-kept"
        before = sys.getrefcount(name)
        for _ in range(50):
            await refused()
        assert protocol.names[0] is name
        assert sys.getrefcount(name) <= before
        ours.close()
        await protocol.ended.wait()

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())


def test_what_a_protocol_stops_watching_may_be_ready_in_the_same_turn() -> None:
    """As when a client leaves just as the answer to its request for /metrics comes."""

    class Stops(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            asyncio.get_running_loop().remove_reader(watched)
            done.set()

    done = asyncio.Event()
    watched, other = socket.socketpair()

    async def main() -> None:
        loop = cast(WireLoop, asyncio.get_running_loop())
        ours, theirs = socket.socketpair()
        transport = loop.adopt(theirs, Stops())
        loop.add_reader(watched, watched.recv, 1)
        ours.send(b"x")
        other.send(b"x")  # both wait for the next turn, in this order
        await done.wait()
        await asyncio.sleep(0)
        assert watched.recv(2) == b"x"
        transport.abort()
        ours.close()

    with asyncio.Runner(loop_factory=WireLoop) as runner, watched, other:
        runner.run(main())


def test_a_connection_is_reset_also_when_descriptors_ran_out() -> None:
    async def main() -> None:
        loop = cast(WireLoop, asyncio.get_running_loop())
        accepted: asyncio.Future[WireTransport] = loop.create_future()

        class Client(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set_result(cast(WireTransport, transport))

        listening = socket.create_server(("127.0.0.1", 0))
        end = loop.listen(listening, Client, loop.rules(*RULES))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        transport = await accepted
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            transport.reset()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        end()

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())


def test_an_idle_connection_keeps_nothing_of_the_stream_it_had() -> None:
    async def main() -> None:
        async def handler(request: Message, peer: Peer) -> None:
            peer.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                b"x-midstream-resumable: 1\r\n\r\n"
            )
            peer.send(chunk(event(0)) + chunk(event(1)) + chunk(LAST) + b"0\r\n\r\n")

        async with staged(handler) as stage:
            client = await stage.connect()
            client.send(post(b'{"stream":true}'))
            await client.message()
            connection = stage.pool(stage.views[0]).take()
            assert connection is not None
            assert connection.wire is not None
            assert connection.wire.relayed()[-1] == b""

    with asyncio.Runner(loop_factory=WireLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("end", [b"0;x\r\n\r\n", b"0\r\nx-a: 1\r\n\r\n"])
def test_a_stream_that_can_be_resumed_ends_however_its_last_chunk_is_written(end: bytes) -> None:
    async def main() -> None:
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

    run(main)


def test_an_interrupt_while_connections_end_reaches_whoever_runs_the_loop() -> None:
    ended: list[str] = []

    class Interrupted(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            ended.append("one")
            if len(ended) == 1:
                raise KeyboardInterrupt

    loop = WireLoop()
    pairs = [socket.socketpair() for _ in range(3)]
    transports = [loop.adopt(theirs, Interrupted()) for _, theirs in pairs]
    for transport in transports:
        transport.abort()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    assert len(ended) == 3
    loop.close()
    for ours, _ in pairs:
        ours.close()
