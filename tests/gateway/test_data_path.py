"""Bytes through the data path: exactness, streaming, back-pressure, disconnects, keep-alive, control paths."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref

import pytest
from gateway_harness import Message, Peer, get, post, read_chunk, read_head, respond_ok, run, staged


def echo_body(request: Message, peer: Peer) -> None:
    peer.respond(request.body, headers="content-type: application/octet-stream\r\n")


async def echo(request: Message, peer: Peer) -> None:
    echo_body(request, peer)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/completions?a=b"])
async def test_a_request_and_its_response_pass_with_the_headers_set(path: str) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(b"yes", "201 Made", "x-a: b\r\nconnection: keep-alive, x-gone\r\nx-gone: 1\r\n")

    async with staged(handler) as stage:
        hop = "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nTE: trailers\r\n"
        forged = "X-Midstream-Session: forged\r\nx-midstream-tenant: forged\r\n"
        response = await stage.ask(post(b'{"a":1}', path, f"X-Session-ID: t/1\r\n{hop}{forged}"))
        assert response.start == "HTTP/1.1 201 Made"
        assert response.body == b"yes"
        assert response.headers == {
            "content-length": "3",
            "x-a": "b",
            "x-midstream-replica": "replica-0",
            "x-midstream-route-reason": "new",
        }
        [request] = stage.mocks[0].requests
        assert request.start == f"POST {path} HTTP/1.1"
        assert request.body == b'{"a":1}'
        assert len(request.headers.pop("x-request-id")) > 16
        assert request.headers.pop("x-midstream-resumable") == "1"
        # Milliseconds.
        assert int(request.headers.pop("x-midstream-placed")) > 1.7e12
        assert request.headers == {
            "host": "test",
            "content-length": "7",
            "x-session-id": "t/1",
            "x-midstream-boot": "boot of replica-0",
            "x-midstream-session": "t%2F1",
        }


@pytest.mark.parametrize("split", [False, True])
async def test_an_offer_to_upgrade_is_passed_over(split: bool) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{offer}Transfer-Encoding: chunked\r\n\r\n"
    requests = [
        (post(b"first", headers=offer), b"first"),
        (head.encode() + b"2\r\nse\r\n4\r\ncond\r\n0\r\n\r\n", b"second"),
        (post(b"", headers=offer), b""),
        (post(b"last"), b"last"),
    ]
    async with staged(echo) as stage:
        client = await stage.connect()
        data = b"".join(request for request, _ in requests)
        for part in (data[i : i + 1] for i in range(len(data))) if split else (data,):
            client.send(part)
            if split:
                await asyncio.sleep(0)
        for _, body in requests:
            assert (await client.message()).body == body
        for request in stage.mocks[0].requests:
            assert not {"upgrade", "connection", "http2-settings"} & set(request.headers)
        client.send(get("/v1/models", "Connection: Upgrade\r\nUpgrade: websocket\r\n"))
        assert (await client.message()).status == 200


async def test_thousands_of_pipelined_offers_to_upgrade_are_served_in_order() -> None:
    async with staged(echo) as stage:
        client = await stage.connect()
        offer = "Connection: upgrade\r\nUpgrade: h2c\r\n"
        client.send(b"".join(post(b"%d" % n, headers=offer) for n in range(3000)))
        assert [int((await client.message()).body) for _ in range(3000)] == list(range(3000))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://other:80/v1/completions?a=/b?c", "/v1/completions?a=/b?c"),
        ("HTTPS://other:80/inference/v1/completions", "/inference/v1/completions"),
    ],
)
async def test_an_absolute_target_gives_its_path_and_its_host(target: str, path: str) -> None:
    async with staged(echo) as stage:
        assert (await stage.ask(post(b"hi", target))).body == b"hi"
        [request] = stage.mocks[0].requests
        assert request.start == f"POST {path} HTTP/1.1"
        assert request.headers["host"] == "other:80"
        for bare in ("http://other:80", "http://other:80?a=b"):
            assert (await stage.ask(get(bare))).error["message"] == "Not Found: GET /"


async def test_bodies_are_exact_both_ways_at_a_megabyte() -> None:
    body = os.urandom(2**20)
    async with staged(echo) as stage:
        assert (await stage.ask(post(body))).body == body
        chunked = b"".join(
            b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in (body[:1], body[1:70000], body[70000:])
        )
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
        response = await stage.ask(head + chunked + b"0\r\nTrailer: x\r\n\r\n")
        assert response.body == body
        assert stage.mocks[0].requests[1].headers["content-length"] == str(2**20)


async def test_one_byte_at_a_time_passes_both_ways() -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n10;x\r\n"
        + bytes(range(16))
        + b"\r\n"
    )
    reply += b"0\r\nt: v\r\n\r\n"

    async def dribble(request: Message, peer: Peer) -> None:
        for i in range(len(reply)):
            peer.send(reply[i : i + 1])
            await asyncio.sleep(0)

    async with staged(dribble) as stage:
        client = await stage.connect()
        request = post(b'{"user":"u1"}')
        for i in range(len(request)):
            client.send(request[i : i + 1])
            await asyncio.sleep(0)
        head = await read_head(client.reader)
        assert head.headers["x-midstream-route-reason"] == "new"
        body = reply.partition(b"\r\n\r\n")[2]
        # Framing and trailers untouched.
        assert await client.reader.readexactly(len(body)) == body
        assert stage.mocks[0].requests[0].body == b'{"user":"u1"}'
        client.send(request)
        assert (await read_head(client.reader)).headers["x-midstream-route-reason"] == "sticky"


async def test_a_chunk_arrives_while_the_replica_holds_the_next_one() -> None:
    release = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        await release.wait()
        peer.chunk(b"data: 2\n\n")
        peer.end_stream()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        assert (await read_head(client.reader)).headers["transfer-encoding"] == "chunked"
        assert await read_chunk(client.reader) == b"data: 1\n\n"
        assert stage.in_flight() == [1]
        release.set()
        assert [await read_chunk(client.reader) for _ in range(2)] == [b"data: 2\n\n", b""]


@pytest.mark.parametrize("started", [True, False])
async def test_a_client_that_leaves_closes_the_upstream(started: bool) -> None:
    closed = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        if started:
            peer.start_stream()
            peer.chunk(b"data: 1\n\n")
        await peer.closed()
        closed.set()
        peer.abort()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post())
        await stage.mocks[0].asked(1)
        if started:
            await read_head(client.reader)
        client.writer.close()
        await closed.wait()
        assert stage.in_flight() == [0]
        status = 200 if started else 499
        assert stage.metrics.requests["completions", status] == 1


@pytest.mark.parametrize("parsed", [True, False])
def test_closed_connections_do_not_wait_for_a_collection(parsed: bool) -> None:
    """One of all objects takes the longer the more streams are open, and is rare (launch/gateway.py)."""

    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(request.body, headers="connection: close\r\n" if parsed else "")
        peer.writer.close()

    async def main() -> None:
        async with staged(handler) as stage:
            client = await stage.connect()
            [connection] = stage.gateway.service.clients
            client.send(post(headers="Connection: TE\r\n" if parsed else ""))
            assert (await client.message()).start == "HTTP/1.1 200 OK"
            [upstream] = stage.gateway.proxy.upstreams.values()
            client.writer.close()
            gone = asyncio.Semaphore(0)
            held = [weakref.ref(one, lambda _: gone.release()) for one in (connection, *upstream.pool._all)]
            assert bool(connection._made_parser) is parsed
            del connection
            async with asyncio.timeout(10):
                for _ in held:
                    await gone.acquire()

    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()


async def test_a_slow_client_blocks_the_replica_and_not_the_gateways_memory() -> None:
    blocked = False
    sent = 0
    piece = b"x" * 2**16
    total = 64 * 2**20 // len(piece)

    async def handler(request: Message, peer: Peer) -> None:
        nonlocal blocked, sent
        peer.start_stream("application/octet-stream")
        for _ in range(total):
            peer.chunk(piece)
            try:
                async with asyncio.timeout(0.5):
                    await peer.writer.drain()
            except TimeoutError:
                blocked = True
                await peer.writer.drain()
                # It was only slow.
                blocked = False
            sent += 1
        peer.end_stream()

    async with staged(handler) as stage:
        client = await stage.connect(limit=2**16)
        client.send(post())
        await read_head(client.reader)
        [connection] = stage.gateway.service.clients
        while connection.writable or not blocked:
            assert sent < total / 4, "the replica's writes must block long before the body is through"
            # A poll.
            await asyncio.sleep(0.01)
        assert sent < total / 4
        assert connection._transport.get_write_buffer_size() < 2**20
        for _ in range(total):
            assert await read_chunk(client.reader) == piece
        assert await read_chunk(client.reader) == b""


async def test_keep_alive_reuses_both_connections() -> None:
    async with staged(echo) as stage:
        client = await stage.connect()
        for n in range(5):
            client.send(post(b"%d" % n))
            assert (await client.message()).body == b"%d" % n
        assert stage.mocks[0].connections == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def uneven(request: Message, peer: Peer) -> None:
        if int(request.body) % 7 == 0:
            await asyncio.sleep(0.01)
        echo_body(request, peer)

    async with staged(uneven, uneven) as stage:
        client = await stage.connect()
        client.send(b"".join(post(b"%d" % n) for n in range(100)))
        client.send(get("/nowhere"))
        client.send(b"BAD\r\n\r\n")
        assert [int((await client.message()).body) for _ in range(100)] == list(range(100))
        assert (await client.message()).status == 404
        assert (await client.message()).status == 400
        assert await client.closed() == b""


async def test_expect_continue_is_answered_before_the_body() -> None:
    async with staged(echo) as stage:
        client = await stage.connect()
        client.send(
            post(b"", headers="Expect: 100-continue\r\n").replace(b"Content-Length: 0", b"Content-Length: 2")
        )
        assert (await read_head(client.reader)).start == "HTTP/1.1 100 Continue"
        client.send(b"hi")
        assert (await client.message()).body == b"hi"
        assert "expect" not in stage.mocks[0].requests[0].headers


async def test_an_http_1_0_client_gets_plain_bytes_and_a_close() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        peer.chunk(b"data: 2\n\n")
        peer.end_stream()

    async with staged(handler) as stage:
        client = await stage.connect()
        client.send(post(version="1.0", headers="Connection: keep-alive\r\n"))
        head = await read_head(client.reader)
        assert head.headers["connection"] == "close"
        assert "transfer-encoding" not in head.headers
        assert await client.closed() == b"data: 1\n\ndata: 2\n\n"


async def test_connection_close_is_honoured() -> None:
    async with staged(respond_ok) as stage:
        client = await stage.connect()
        client.send(post(headers="Connection: close\r\n") + post())
        assert (await client.message()).headers["connection"] == "close"
        assert await client.closed() == b""
        assert len(stage.mocks[0].requests) == 1


async def test_a_request_id_is_kept_or_made_unique() -> None:
    async with staged(respond_ok) as stage:
        client = await stage.connect()
        for headers in ("X-Request-Id: mine\r\n", "", ""):
            client.send(post(headers=headers))
            await client.message()
        ids = [request.headers["x-request-id"] for request in stage.mocks[0].requests]
        assert ids[0] == "mine"
        assert len(set(ids)) == 3


async def test_200_streams_at_once_keep_their_own_bytes() -> None:
    everyone = asyncio.Barrier(200)

    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        await everyone.wait()
        for n in range(5):
            peer.chunk(b"data: %b-%d\n\n" % (request.body, n))
            await asyncio.sleep(0)
        peer.end_stream()

    async def one(n: int) -> list[bytes]:
        client = await stage.connect()
        client.send(post(b"%d" % n, headers=f"x-session-affinity: s{n}\r\n"))
        return (await client.message()).chunks

    async with staged(handler, handler) as stage:
        streams = await asyncio.gather(*(one(n) for n in range(200)))
        assert streams == [[b"data: %d-%d\n\n" % (n, k) for k in range(5)] for n in range(200)]
        shares = [len(mock.requests) for mock in stage.mocks]
        assert sum(shares) == 200
        assert max(shares) <= 1.25 * 100 + 1, "the load bound holds"


async def test_control_paths_go_through_the_socket_byte_for_byte() -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def,type-arg]
        if scope["type"] == "lifespan":
            while (event := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{event}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event["body"], event.get("more_body", False)
        seen.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 202, "headers": [(b"x-c", b"1")]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    async with staged(respond_ok, app=app) as stage:
        client = await stage.connect()
        body = os.urandom(300_000)
        client.send(post(body, "/hot_load/v1/models/hot_load"))
        response = await client.message()
        assert (response.status, response.body) == (202, body + b"!")
        assert "x-midstream-replica" not in response.headers
        for method in ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH"):
            client.send(get("/v1/completions", method=method))
            response = await client.message(head_only=method == "HEAD")
            assert (response.status, response.headers["x-c"]) == (202, "1")
        assert [entry[0] for entry in seen] == ["POST", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH"]
        assert stage.mocks[0].requests == []


async def test_drain_lets_streams_finish_and_close_cuts_visibly() -> None:
    release = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        if request.body == b"finishes":
            await release.wait()
            peer.end_stream()
        else:
            await peer.closed()
            peer.abort()

    async with staged(handler) as stage:
        idle, finishes, stays = [await stage.connect() for _ in range(3)]
        finishes.send(post(b"finishes"))
        stays.send(post(b"stays"))
        for client in (finishes, stays):
            await read_head(client.reader)
            await read_chunk(client.reader)
        draining = asyncio.create_task(stage.gateway.drain(1.0))
        assert await idle.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await stage.connect()
        release.set()
        assert await finishes.closed() == b"0\r\n\r\n"
        await draining
        await stage.gateway.close()
        event = await read_chunk(stays.reader)
        assert event.startswith(b'data: {"error":{"message":"the gateway is shutting down"')
        assert await stays.closed() == b"", "no final chunk"


def test_the_gateway_imports_no_engine_and_no_torch() -> None:
    code = (
        "import sys; import midstream.proxy.server, midstream.api.app; "
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers') or 'midstream.engine' in m]; "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
