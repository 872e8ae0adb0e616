"""What clients see when replicas fail: retries before the first byte, visible ends after it, and never a short 200."""

import asyncio
import json

import pytest
from gateway_harness import Handler, Message, Peer, post, read_chunk, read_head, respond_ok, staged
from reports import replica_report

SESSION = "x-multi-turn-session-id: s1\r\n"


async def die(request: Message, peer: Peer) -> None:
    peer.abort()


def error_of(event: bytes) -> str:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    error = json.loads(event[6:])["error"]
    assert error["status_code"] == 500, "the Fireworks client decides by it whether to try again"
    code: str = error["code"]
    return code


async def test_a_dead_replica_is_replaced_and_its_session_stays_where_it_moved() -> None:
    async with staged(respond_ok, respond_ok, respond_ok) as stage:
        first = await stage.ask(post(headers=SESSION))
        home = int(first.headers["x-midstream-replica"][-1])
        stage.mocks[home].stop()
        moved = await stage.ask(post(headers=SESSION))
        assert moved.status == 200
        assert moved.headers["x-midstream-route-reason"] == "moved"
        refuge = moved.headers["x-midstream-replica"]
        assert refuge != first.headers["x-midstream-replica"]
        # It comes back: nobody moves back.
        await stage.mocks[home].start(stage.mocks[home].port)
        again = await stage.ask(post(headers=SESSION))
        assert again.headers["x-midstream-replica"] == refuge
        assert again.headers["x-midstream-route-reason"] == "sticky"
        assert stage.metrics.upstream_errors[f"replica-{home}"] == 1
        assert stage.metrics.retries["other_replica"] == 1


async def test_death_after_the_request_was_sent_is_retried_elsewhere_and_not_on_every_replica() -> None:
    async with staged(die, respond_ok) as stage:
        answers = [await stage.ask(post()) for _ in range(4)]
        assert [a.headers["x-midstream-replica"] for a in answers] == ["replica-1"] * 4
        assert [request.body for request in stage.mocks[0].requests] == [b"{}"] * len(stage.mocks[0].requests)
    async with staged(die, die, die, die) as stage:
        answer = await stage.ask(post())
        assert (answer.status, answer.error["code"]) == (422, "request_lost_replicas")
        assert sum(len(mock.requests) for mock in stage.mocks) == 2


async def test_refused_everywhere_is_503_after_each_replica_was_tried_once() -> None:
    async with staged(respond_ok, respond_ok, respond_ok) as stage:
        for mock in stage.mocks:
            mock.stop()
        client = await stage.connect()
        # The connection survives; the second request finds no replica that may be alive.
        for _ in range(2):
            client.send(post(headers="x-request-id: r1\r\n"))
            answer = await client.message()
            assert answer.status == 503
            assert answer.headers["x-request-id"] == "r1"
        assert stage.metrics.upstream_errors == {f"replica-{i}": 1 for i in range(3)}


@pytest.mark.parametrize("state", ["unreachable", "not ready", "not admitted"])
async def test_an_unusable_replica_gets_nothing(state: str) -> None:
    async with staged(respond_ok) as stage:
        view = stage.views[0]
        assert view.report is not None
        if state == "unreachable":
            view.replica.hear(None)
        elif state == "not ready":
            view.replica.hear(replica_report(view.name, "b1", ready=False))
        else:
            view.admitted = False
        assert (await stage.ask(post())).status == 503
        assert stage.mocks[0].connections == 0


async def test_a_stale_pooled_connection_is_replaced_without_leaving_the_replica() -> None:
    async def once(request: Message, peer: Peer) -> None:
        peer.respond(request.body)
        # Closes when the second request of the connection comes.
        if request.body == b"1":
            await peer.message()
            peer.abort()

    async with staged(once, once) as stage:
        for body in (b"1", b"2"):
            answer = await stage.ask(post(body, headers=SESSION))
            assert answer.body == body
        assert answer.headers["x-midstream-route-reason"] == "sticky"
        assert stage.metrics.retries == {"stale_connection": 1}
        assert stage.metrics.upstream_errors == {}


def half_of(response: bytes) -> Handler:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(response)
        await peer.writer.drain()
        peer.writer.close()

    return handler


HALF_A_HEAD = b"HTTP/1.1 200 OK\r\ncontent-"


@pytest.mark.parametrize("sent", [HALF_A_HEAD, b"HTTP/1.1 503 X\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_response_of_which_nothing_was_passed_on_is_asked_for_elsewhere(sent: bytes) -> None:
    async with staged(half_of(sent), respond_ok) as stage:
        assert [(await stage.ask(post())).status for _ in range(2)] == [200, 200]
        assert len(stage.mocks[1].requests) == 2


async def test_a_request_whose_responses_die_is_shown_to_two_replicas() -> None:
    async with staged(*[half_of(HALF_A_HEAD)] * 3) as stage:
        answer = await stage.ask(post())
        assert (answer.status, answer.error["code"]) == (422, "request_lost_replicas")
        assert sum(len(mock.requests) for mock in stage.mocks) == 2


async def test_a_stream_that_dies_between_events_ends_with_an_error_event_and_no_final_chunk() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        if request.body == b"an event":
            peer.chunk(b"data: 1\n\n")
        await peer.writer.drain()
        peer.writer.close()

    async with staged(handler) as stage:
        for body in (b"an event", b"nothing"):
            client = await stage.connect()
            client.send(post(body))
            await read_head(client.reader)
            if body == b"an event":
                assert await read_chunk(client.reader) == b"data: 1\n\n"
            assert error_of(await read_chunk(client.reader)) == "engine_error"
            assert await client.closed() == b""
        assert stage.metrics.cut_responses == {"replica-0": 2}


@pytest.mark.parametrize(
    "sent",
    [
        # Inside a chunk.
        b"9\r\ndata:",
        # Inside a chunk that looks like its end.
        b"b\r\ndata: 1\n\n\r\n",
        # A whole chunk, but inside an event.
        b"8\r\ndata: 1\n\r\n",
        # Inside a chunk's size.
        b"9\r\ndata: 1\n\n\r\n5",
    ],
)
async def test_a_stream_that_dies_inside_an_event_just_breaks(sent: bytes) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.send(sent)
        await peer.writer.drain()
        await asyncio.sleep(0.05)
        peer.writer.close()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        await read_head(client.reader)
        assert await client.closed() == sent


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_plain_response_that_dies_breaks_the_connection(version: str, framing: str) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n2\r\nab\r\n".encode()
        )
        await peer.writer.drain()
        peer.writer.close()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post(version=version))
        with pytest.raises(ConnectionResetError):
            await client.reader.readuntil(b"never sent")


@pytest.mark.parametrize(
    "response",
    [
        # An end that looks like a crash.
        b"HTTP/1.1 200 OK\r\n\r\nsome bytes, then the end",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_a_response_that_cannot_be_framed_is_an_error(response: bytes) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(response)
        await peer.closed()

    async with staged(handler) as stage:
        assert (await stage.ask(post())).error["code"] == "engine_error"


@pytest.mark.parametrize("extra", [b"\n", b"\r\n", b"\r\n\r\n"])
@pytest.mark.parametrize(
    "whole",
    [
        b"content-length: 2\r\n\r\nok",
        b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-t: 1\r\n\r\n",
    ],
)
async def test_empty_lines_after_the_end_of_a_response_reach_nobody(whole: bytes, extra: bytes) -> None:
    """A parser passes them over. A client would take them for the beginning of the next response."""

    async def handler(request: Message, peer: Peer) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\n" + whole + (extra if request.body == b"more" else b""))

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post(b"more"))
        assert (await client.message()).error["code"] == "engine_error"
        client.send(post())
        assert (await client.message()).body == b"ok"


async def test_bytes_after_the_end_of_a_response_reach_nobody() -> None:
    head_arrived = asyncio.Event()
    # Enough not to be held until it is whole.
    length = 2**20
    extra = b"x" * length + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    async def handler(request: Message, peer: Peer) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length
        if request.body == b"late":
            peer.send(head)
            await head_arrived.wait()
            peer.send(extra)
        else:
            short = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
            peer.send(short + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        assert (await client.message()).error["code"] == "engine_error"
        client.send(post(b"late"))
        assert (await read_head(client.reader)).status == 200
        head_arrived.set()
        with pytest.raises(ConnectionResetError):
            await client.reader.readuntil(b"never sent")


async def test_interim_empty_and_headless_responses_keep_the_connection_usable() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n")
        peer.send(b"HTTP/1.1 204 No Content\r\nx-n: 1\r\n\r\n" if request.body == b"204" else b"")
        if request.body != b"204":
            peer.respond(b"")

    async with staged(handler) as stage:
        client = await stage.connect()
        for body, status in ((b"204", 204), (b"200", 200), (b"204", 204)):
            client.send(post(body))
            assert (await client.message()).status == status
        assert stage.mocks[0].connections == 1


async def test_a_client_that_leaves_while_the_gateway_connects_leaves_nothing_behind() -> None:
    never = asyncio.Event()
    opening = asyncio.Event()

    async def connect(factory: object) -> object:
        opening.set()
        await never.wait()
        raise AssertionError

    async with staged(respond_ok) as stage:
        stage.pool(stage.views[0])._connect = connect  # type: ignore[assignment]
        client = await stage.connect()
        client.send(post())
        await opening.wait()
        assert stage.in_flight() == [1]
        client.writer.close()
        await stage.gateway.service.all_left()
        assert stage.in_flight() == [0]
        assert stage.metrics.requests == {("completions", 499): 1}


async def test_a_replica_that_does_not_accept_in_time_is_passed_over() -> None:
    async def connect(factory: object) -> object:
        return await asyncio.Event().wait()

    async with staged(respond_ok, respond_ok) as stage:
        pool = stage.pool(stage.views[0])
        pool._connect = connect  # type: ignore[assignment]
        pool._connect_timeout_s = 0.05
        for _ in range(3):
            assert (await stage.ask(post())).headers["x-midstream-replica"] == "replica-1"


@pytest.mark.parametrize(("listed", "status"), [("leaving", 503), ("gone", 404)])
async def test_a_response_is_not_said_to_be_lost_while_the_drained_replica_that_made_it_is_there(
    listed: str, status: int
) -> None:
    async def elsewhere(request: Message, peer: Peer) -> None:
        peer.respond(b'{"error":{}}', "404 Not Found", "x-midstream-held-by: replica-1\r\n")

    async with staged(elsewhere, respond_ok) as stage:
        members = [(view.name, view.url) for view in stage.views]
        facts = stage.gateway.proxy.deployments.default.replicas.facts
        facts.set_members(*((members, {"replica-1"}) if listed == "leaving" else (members[:1],)))
        answer = await stage.ask(post(path="/v1/responses"))
        assert answer.status == status
        if listed == "leaving":
            assert "replica-1, which made the response, cannot be asked now" in answer.error["message"]
        assert stage.mocks[1].requests == []


async def test_a_client_that_closes_its_sending_side_has_left() -> None:
    """As docs/api.md says: generation stops at once, and nothing waits for a client that may be gone."""
    left = asyncio.Event()

    async def generate(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: {}\n\n")
        await peer.closed()
        left.set()

    async with staged(generate) as stage:
        client = await stage.connect()
        client.send(post())
        assert (await read_head(client.reader)).status == 200
        client.writer.write_eof()
        await left.wait()
        assert stage.in_flight() == [0]
