"""Requests of the Tinker API, passed to the front's Unix socket and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import (
    Handler,
    Message,
    MockReplica,
    Peer,
    Stage,
    get,
    post,
    respond_ok,
    run,
    staged,
)

KEY = "tml-secret"
SUBMIT, RETRIEVE = "/api/v1/asample", "/api/v1/retrieve_future"


class MockFront(MockReplica):
    def __init__(self, path: str, handler: Handler) -> None:
        super().__init__(handler)
        self.path = path

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path, limit=2**24, backlog=1024)

    def stop(self) -> None:
        super().stop()
        Path(self.path).unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def fronted(handler: Handler = respond_ok, **settings: Any) -> AsyncIterator[tuple[Stage, MockFront]]:
    with tempfile.TemporaryDirectory() as directory:
        front = MockFront(f"{directory}/front.sock", handler)
        await front.start()
        async with staged(respond_ok, front_path=front.path, **settings) as stage:
            yield stage, front
        front.stop()


def shaped(answer: Message) -> str:
    """The sentence of an error in the front's shape."""
    body = json.loads(answer.body)
    assert set(body) == {"detail", "param"}
    return str(body["detail"])


async def test_requests_and_responses_pass_as_they_are() -> None:
    sent, told = bytes(range(256)) * 300, bytes(reversed(range(256))) * 500

    async def handler(request: Message, peer: Peer) -> None:
        labels = "x-midstream-snapshot: tinker-1\r\ncontent-type: application/x-protobuf\r\n"
        peer.respond(told, "408 Request Timeout", labels)

    async with fronted(handler) as (stage, front):
        headers = "content-type: application/x-protobuf\r\nx-api-key: tml-x\r\nx-idempotency-key: k\r\n"
        answer = await stage.ask(post(sent, "/api/v1/forward_backward?a=b", headers))
        assert (answer.status, answer.body) == (408, told)
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert answer.headers["x-midstream-snapshot"] == "tinker-1"
        (asked,) = front.requests
        assert asked.start == "POST /api/v1/forward_backward?a=b HTTP/1.1"
        assert asked.body == sent
        expected = {
            "content-type": "application/x-protobuf",
            "x-api-key": "tml-x",
            "x-idempotency-key": "k",
        }
        assert expected.items() <= asked.headers.items()
        await stage.ask(get("/api/v1/samplers/sampling_1"))
        assert front.requests[1].start == "GET /api/v1/samplers/sampling_1 HTTP/1.1"
        assert not stage.mocks[0].requests


async def test_a_response_reaches_the_client_while_the_front_still_writes_it() -> None:
    go_on = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        peer.start_stream("application/octet-stream")
        peer.chunk(b"first")
        await go_on.wait()
        peer.chunk(b"second")
        peer.end_stream()

    async with fronted(handler) as (stage, _):
        client = await stage.connect()
        client.send(post(path=RETRIEVE))
        await client.message(head_only=True)
        assert await client.reader.readuntil(b"first\r\n") == b"5\r\nfirst\r\n"
        go_on.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"6\r\nsecond\r\n0\r\n\r\n"


@pytest.mark.parametrize("credential", [f"X-API-Key: {KEY}\r\n", f"Authorization: Bearer {KEY}\r\n"])
async def test_a_key_is_checked_and_reaches_the_front_and_nobody_else(credential: str) -> None:
    async with fronted(api_keys=(KEY,)) as (stage, front):
        for refused in (post(path=SUBMIT), get("/api/v1/samplers/x", "X-API-Key: tml-wrong\r\n")):
            answer = await stage.ask(refused)
            assert answer.status == 401
            assert "API key" in shaped(answer)
        assert not front.requests
        assert (await stage.ask(post(path=SUBMIT, headers=credential))).status == 200
        assert (await stage.ask(get("/api/v1/samplers/x", credential))).status == 200
        name, _, value = credential.strip().partition(": ")
        assert [request.headers[name.lower()] for request in front.requests] == [value] * 2
        await stage.ask(post(headers=credential))
        assert KEY not in str(stage.mocks[0].requests)


async def test_without_a_front_such_paths_are_unknown() -> None:
    async with staged(respond_ok) as stage:
        answer = await stage.ask(post(path=SUBMIT))
        assert (answer.status, answer.error["code"]) == (404, "not_found_error")


async def test_a_front_that_is_not_up_is_asked_again_later_and_results_never_get_a_5xx() -> None:
    async with fronted() as (stage, front):
        assert (await stage.ask(post(path=SUBMIT))).status == 200
        front.stop()
        down = await stage.ask(post(path=SUBMIT))
        assert (down.status, down.headers["retry-after"]) == (503, "1")
        assert "Tinker front" in shaped(down)
        not_yet = await stage.ask(post(path=RETRIEVE))
        assert (not_yet.status, not_yet.headers["retry-after"]) == (429, "1")
        assert "Tinker front" in shaped(not_yet)
        assert (await stage.ask(post())).status == 200, "inference does not need it"
        await front.start()
        assert (await stage.ask(post(path=SUBMIT))).status == 200


def test_a_front_that_dies_under_a_poll_or_within_a_result_is_seen() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        if request.body == b"part":
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
            await peer.writer.drain()
        front_dies.set()

    front_dies = asyncio.Event()

    async def main() -> None:
        nonlocal front_dies
        front_dies = asyncio.Event()
        async with fronted(handler) as (stage, front):
            client = await stage.connect()
            client.send(post(b"wait", RETRIEVE))
            await front_dies.wait()
            front.stop()
            answer = await client.message()
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            await front.start()
            front_dies.clear()
            client = await stage.connect()
            client.send(post(b"part", RETRIEVE))
            assert await client.reader.readuntil(b"half")
            front.stop()
            assert await client.closed() == b""

    run(main)


async def test_a_client_that_leaves_a_poll_leaves_the_front_too() -> None:
    left: asyncio.Queue[bytes] = asyncio.Queue()

    async def handler(request: Message, peer: Peer) -> None:
        left.put_nowait(await peer.closed())

    async with fronted(handler) as (stage, front):
        client = await stage.connect()
        client.send(post(path=RETRIEVE))
        await front.asked(1)
        client.abort()
        assert await left.get() == b""


async def test_hundreds_of_polls_wait_side_by_side_and_samples_pass_meanwhile() -> None:
    count = 700

    done = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        if request.start.startswith(f"POST {RETRIEVE}"):
            await done.wait()
        peer.respond(request.body)

    async with fronted(handler) as (stage, front):
        clients = [await stage.connect() for _ in range(count)]
        for number, client in enumerate(clients):
            client.send(post(b"%d" % number, RETRIEVE))
        await front.asked(count)
        assert (await stage.ask(post())).status == 200
        assert (await stage.ask(post(b"new", SUBMIT))).body == b"new"
        done.set()
        answers = [await client.message() for client in clients]
        assert [int(answer.body) for answer in answers] == list(range(count))
