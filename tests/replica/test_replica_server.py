"""The replica's port below the API: who gets in, how responses are framed, how connections end."""

import asyncio
from pathlib import Path
from typing import cast

import httpx
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running, sse

from midstream.core.headers import HEADER_TOKEN
from midstream.http.http1 import ClientConnection
from midstream.replica.app import ReplicaApp
from midstream.replica.exchange import Outbox
from midstream.replica.peer_files import FILES_PATH

BODY = b'{"model":"%b","prompt":"a","max_tokens":3,"stream":true}' % MODEL.encode()


async def connect(here: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(here.url.rpartition(":")[2]))


async def test_without_the_secret_nothing_is_answered_and_no_body_is_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), token="secret") as here:
        reader, writer = await connect(here)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        for path in ("/health", "/replica/report", "/nowhere"):
            assert (await here.http.get(path, headers={HEADER_TOKEN: "secre"})).status_code == 401
        known = {HEADER_TOKEN: "secret"}
        assert (await here.http.get("/health", headers=known)).json() == {"status": "ok"}
        assert (await here.http.get("/nowhere", headers=known)).status_code == 404


async def test_no_endpoint_answers_without_the_secret_or_with_another_one(tmp_path: Path) -> None:
    """A replica on another machine listens where others may reach it."""

    async with running(tmp_path, FakeEngine(), token="secret") as here:
        paths = [path.decode() for path in ReplicaApp(here.replica)._routes]
        assert len(paths) > 20
        for path in (*paths, FILES_PATH, f"{FILES_PATH}/a/b"):
            for method in ("GET", "POST", "DELETE"):
                for key in ({}, {HEADER_TOKEN: "secret2"}):
                    answer = await here.http.request(method, path, headers=key)
                    assert answer.status_code == 401, (method, path, key)
        assert (await here.http.get("/health", headers={HEADER_TOKEN: "secret"})).status_code == 200


async def test_bodies_that_cannot_be_taken_are_refused_before_they_are_read(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for head, status in (
            (b"content-length: 2000000000", b"413"),
            (b"content-length: 9\r\ncontent-encoding: gzip", b"415"),
        ):
            reader, writer = await connect(here)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\n" + head + b"\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
            writer.close()


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        reader, writer = await connect(here)
        writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        *chunks, done = sse(body.decode())
        assert "".join(c["choices"][0]["text"] for c in chunks) == "hell"
        assert done == "[DONE]"


async def test_requests_of_one_connection_are_answered_in_their_order(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        reader, writer = await connect(here)
        post = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
        writer.write(post + b"GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n")
        answers = (await reader.read()).split(b"HTTP/1.1 200 OK")
        writer.close()
        assert len(answers) == 3
        assert answers[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answers[2].endswith(b'{"status":"ok"}')


async def test_what_a_turn_of_the_loop_makes_for_a_client_is_one_write_at_its_end() -> None:
    class Client:
        def __init__(self) -> None:
            self.writes: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.writes.append(data)

    outbox, (one, two, gone) = Outbox(), (Client(), Client(), Client())
    for client, data in ((one, b"1"), (two, b"2"), (gone, b"3"), (one, b"4")):
        outbox.add(cast("ClientConnection", client), data)
    assert outbox.take(cast("ClientConnection", gone)) == b"3"
    assert (one.writes, two.writes) == ([], [])
    await asyncio.sleep(0)
    assert (one.writes, two.writes, gone.writes) == ([b"14"], [b"2"], [])
    outbox.add(cast("ClientConnection", two), b"5")
    await asyncio.sleep(0)
    assert (one.writes, two.writes) == ([b"14"], [b"2", b"5"])


async def test_a_stream_that_the_closing_server_cuts_is_seen_to_be_cut(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=1)) as here:
        fields = {"model": MODEL, "prompt": "a", "max_tokens": 5, "stream": True}
        async with here.http.stream("POST", "/v1/completions", json=fields) as answer:
            chunks = answer.aiter_bytes()
            assert b'"text":"he"' in await anext(chunks)
            closing = asyncio.create_task(here.server.close())
            with pytest.raises(httpx.ReadError):
                await anext(chunks)
            await closing
        await here.engine.any_aborted.wait()
