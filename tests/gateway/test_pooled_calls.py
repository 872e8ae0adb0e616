"""A gateway's calls to its replicas over connections that stay open: none waits for another or reaches a later process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from gateway_harness import Handler, Message, MockReplica, Peer, respond_ok
from reports import replica_report

from midstream.core.errors import ReplicaUnavailable
from midstream.core.transfer import TRANSFER_PATH
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.replicas import DeploymentReplicas


class Called:
    """A mock replica and what a gateway calls it with."""

    def __init__(self, mock: MockReplica, replicas: DeploymentReplicas) -> None:
        self.mock, self.replicas = mock, replicas

    @property
    def known(self) -> KnownReplica:
        return self.replicas.members[0]

    async def call(
        self, body: bytes = b"{}", path: str = "/replica/hint", timeout_s: float | None = None
    ) -> bytes:
        return await self.replicas.post(self.known, path, body, 200, timeout_s)


@contextlib.asynccontextmanager
async def called(handler: Handler) -> AsyncIterator[Called]:
    mock = MockReplica(handler)
    await mock.start()
    replicas = DeploymentReplicas([("replica-0", f"http://127.0.0.1:{mock.port}")])
    watching = asyncio.create_task(replicas.run())
    try:
        yield Called(mock, replicas)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        mock.stop()


def calls_to(answer: Handler) -> Handler:
    """Events that say nothing, and calls that are answered so."""

    async def handler(request: Message, peer: Peer) -> None:
        if request.start.startswith("GET /replica/events "):
            peer.start_stream("application/x-ndjson")
        else:
            await answer(request, peer)

    return handler


def bodies(mock: MockReplica) -> list[bytes]:
    return [request.body for request in mock.requests if request.start.startswith("POST")]


async def listening(stage: Called) -> None:
    """Until the event stream is open: it has one connection."""
    await stage.mock.asked(1)


async def test_one_connection_serves_one_call_after_the_other() -> None:
    async with called(calls_to(respond_ok)) as stage:
        await listening(stage)
        for _ in range(5):
            assert await stage.call() == b'{"ok":true}'
        assert stage.mock.connections == 2


async def test_a_call_never_waits_behind_another() -> None:
    """A trace of a long session may take seconds, and a swap must not wait for it."""
    go_on = asyncio.Event()

    async def answer(request: Message, peer: Peer) -> None:
        if request.body == b"long":
            await go_on.wait()
        peer.respond(request.body)

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        assert await stage.call(b"first") == b"first"
        long = asyncio.create_task(stage.call(b"long"))
        await stage.mock.asked(3)
        assert await stage.call(b"short") == b"short"
        assert not long.done()
        go_on.set()
        assert await long == b"long"
        assert stage.mock.connections == 3


async def test_a_call_that_an_idle_connection_lost_unanswered_is_sent_once_more() -> None:
    """The replica closes connections that were idle for long. A call may cross with that."""

    async def answer(request: Message, peer: Peer) -> None:
        if request.body == b"crosses" and len(bodies(stage.mock)) == 2:
            peer.abort()
        else:
            peer.respond(request.body)

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        assert await stage.call(b"first") == b"first"
        assert await stage.call(b"crosses") == b"crosses"
        assert bodies(stage.mock) == [b"first", b"crosses", b"crosses"]


async def test_a_call_is_sent_at_most_twice() -> None:
    async def answer(request: Message, peer: Peer) -> None:
        if request.body == b"first":
            peer.respond()
        else:
            peer.abort()

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        await stage.call(b"first")
        with pytest.raises(ReplicaUnavailable):
            await stage.call(b"crashes")
        assert bodies(stage.mock) == [b"first", b"crashes", b"crashes"]


async def test_a_call_is_sent_once_if_its_answer_has_begun_or_it_is_an_order_to_receive_weights() -> None:
    async def answer(request: Message, peer: Peer) -> None:
        if request.body == b"first":
            peer.respond()
            return
        if request.body == b"half":
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            await peer.writer.drain()
        peer.writer.close()

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        for body, path in ((b"half", "/replica/hint"), (b"order", TRANSFER_PATH)):
            await stage.call(b"first")
            with pytest.raises(ReplicaUnavailable):
                await stage.call(body, path)
        assert bodies(stage.mock) == [b"first", b"half", b"first", b"order"]


async def test_the_connection_of_a_call_that_took_too_long_serves_no_other() -> None:
    """Else its late answer would be taken for that of the next call."""
    go_on = asyncio.Event()

    async def answer(request: Message, peer: Peer) -> None:
        if request.body == b"slow":
            await go_on.wait()
        peer.respond(request.body)

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        await stage.call(b"first")
        with pytest.raises(ReplicaUnavailable, match=r"no response within 0\.01 s"):
            await stage.call(b"slow", timeout_s=0.01)
        go_on.set()
        assert await stage.call(b"next") == b"next"


async def test_an_answer_in_chunks_is_read_to_its_end_and_keeps_the_connection() -> None:
    async def answer(request: Message, peer: Peer) -> None:
        peer.start_stream("application/json")
        peer.chunk(request.body[:3])
        peer.chunk(request.body[3:])
        peer.end_stream()

    async with called(calls_to(answer)) as stage:
        await listening(stage)
        for body in (b"one answer", b"another one"):
            assert await stage.call(body) == body
        assert stage.mock.connections == 2


async def test_a_call_is_for_the_boot_that_reported_last_and_says_so() -> None:
    """Else a process that took over the address could take what is meant for the one before it."""
    async with called(calls_to(respond_ok)) as stage:
        await listening(stage)
        await stage.call()
        stage.known.hear(replica_report(boot="b1"))
        await stage.call()
        # Who answers there now may be a replica of another deployment.
        stage.known.hear(None)
        await stage.call()
        stage.known.hear(replica_report(boot="b2\r\nx-other: 1"))
        await stage.call()
        heads = [request.headers for request in stage.mock.requests if request.start.startswith("POST")]
        assert [head.get("x-midstream-boot") for head in heads] == [None, "b1", "b1", None]
        assert not any("x-other" in head for head in heads)


async def test_a_replica_that_is_gone_is_not_called() -> None:
    """Its address may be that of another replica by now, which would take the call for its own."""
    async with called(calls_to(respond_ok)) as stage:
        await listening(stage)
        gone = stage.known
        stage.replicas.set_members([])
        with pytest.raises(ReplicaUnavailable, match="gone"):
            await stage.replicas.post(gone, "/replica/hint", b"{}", 200)
        # What a trainer's group has there is still ended. Orders name their boot.
        await stage.replicas.post(gone, TRANSFER_PATH, b"order", 200)
        assert bodies(stage.mock) == [b"order"]


async def ended(peer: Peer) -> None:
    """The gateway closes the connection."""
    with contextlib.suppress(ConnectionError):
        await peer.writer.wait_closed()


async def test_idle_connections_end_with_the_event_stream_and_with_the_replica() -> None:
    """A machine that is lost closes none of them, and a call over one would wait for its time limit."""
    async with called(calls_to(respond_ok)) as stage:
        await listening(stage)
        await stage.call()
        events, first = stage.mock.peers
        events.abort()
        await ended(first)
        before = len(stage.mock.peers)
        await stage.mock.asked(3)
        assert await stage.call() == b'{"ok":true}'
        later = stage.mock.peers[before:]
        stage.replicas.set_members([])
        for peer in later:
            await ended(peer)
