"""Listening sockets that pass from one gateway process to its successor: who accepts when, and what a failure leaves."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from gateway_harness import Peer, get, post, respond_ok, staged

from midstream.proxy.handover import Offer, take_over


def listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


async def test_a_connection_that_waits_in_the_queue_is_the_successors() -> None:
    loop = asyncio.get_running_loop()
    mine = listening()
    waiting = socket.create_connection(mine.getsockname())
    offer = Offer(lambda: [mine])
    taken = asyncio.create_task(offer.taken())
    got = await take_over(offer.path)
    assert not taken.done(), "until the successor says that it accepts"
    got.confirm()
    await taken
    offer.close()
    assert not os.path.exists(offer.path)  # noqa: ASYNC240 - at once
    mine.close()
    [theirs] = got.sockets
    accepted, address = await loop.sock_accept(theirs)
    assert address == waiting.getsockname()
    for sock in (accepted, theirs, waiting):
        sock.close()


async def test_the_sockets_are_for_this_user_only() -> None:
    before = os.umask(0)
    try:
        offer = Offer(list)
        directory = Path(offer.path).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    offer.close()
    assert not directory.exists()
    async with staged(respond_ok) as stage:
        assert stat.S_IMODE(Path(stage.gateway.control_path).parent.stat().st_mode) == 0o700


async def test_a_successor_that_dies_before_it_accepts_changes_nothing() -> None:
    mine = listening()
    offer = Offer(lambda: [mine])
    taken = asyncio.create_task(offer.taken())
    for _ in range(2):
        asking = asyncio.create_task(take_over(offer.path))
        await asyncio.wait((asking, taken), return_when=asyncio.FIRST_COMPLETED)
        assert not taken.done()
        (await asking).close()
    got = await take_over(offer.path)
    got.confirm()
    await taken
    got.close()
    offer.close()
    mine.close()
    with pytest.raises(OSError, match="No such file"):
        await take_over(offer.path)


async def test_a_retiring_gateway_answers_once_more_on_each_connection_and_finishes_its_streams() -> None:
    go_on = asyncio.Event()

    async def stream(request: object, peer: Peer) -> None:
        peer.start_stream()
        await go_on.wait()
        peer.chunk(b"data: [DONE]\n\n")
        peer.end_stream()

    async with staged(stream, retiring_idle_s=0.5) as stage:
        streaming, idle, used = [await stage.connect() for _ in range(3)]
        streaming.send(post())
        head = await streaming.message(head_only=True)
        for client in (idle, used):
            client.send(get("/health"))
            assert "connection" not in (await client.message()).headers
        retiring = asyncio.create_task(stage.gateway.retire(60.0))
        used.send(get("/health"))
        answer = await used.message()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await used.closed() == b""
        assert await idle.closed() == b"", "nobody used it"
        assert not retiring.done(), "the stream goes on"
        go_on.set()
        assert head.status == 200
        assert (await streaming.closed()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await retiring


async def test_a_connection_whose_stream_did_not_announce_an_end_is_answered_once_more() -> None:
    go_on = asyncio.Event()

    async def stream(request: object, peer: Peer) -> None:
        peer.start_stream()
        await go_on.wait()
        peer.chunk(b"data: [DONE]\n\n")
        peer.end_stream()

    async with staged(stream, retiring_idle_s=10.0) as stage:
        client = await stage.connect()
        client.send(post())
        head = await client.message(head_only=True)
        retiring = asyncio.create_task(stage.gateway.retire(60.0))
        while not stage.gateway.service.draining:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        go_on.set()
        assert await client.reader.readuntil(b"0\r\n\r\n")
        assert "connection" not in head.headers
        client.send(post())
        again = await client.message()
        assert (again.status, again.headers["connection"]) == (200, "close")
        assert await client.closed() == b""
        await retiring


async def test_what_does_not_end_within_the_bound_is_cut_visibly() -> None:
    async def never(request: object, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        await peer.closed()

    async with staged(never) as stage:
        client = await stage.connect()
        client.send(post())
        await client.message(head_only=True)
        await stage.gateway.retire(0.1)
        assert stage.in_flight() == [1]
        await stage.gateway.close()
        rest = await client.closed()
        assert b'"code":"replica_unavailable"' in rest
        assert b"[DONE]" not in rest
