"""What clients may hold of a gateway: a slow body, unfinished bodies together, connections and requests of a tenant."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from gateway_harness import Message, Peer, Stage, get, post, respond_ok, run, staged
from tiers import slow

from midstream.http.budget import Budget, BudgetBounds
from midstream.http.heap import return_memory
from midstream.http.http1 import ClientConnection, Exchange
from midstream.http.message import ConnectionLimits, Request

BODY = b"x" * 300_000
BOUNDS = {
    "max_body_bytes": 400_000,
    "max_unfinished_body_bytes": 1_000_000,
    "max_unfinished_body_bytes_per_tenant": 1_000_000,
}


def plain(body: bytes, key: str = "a") -> bytes:
    return post(body, headers=f"X-Api-Key: {key}\r\n")


def chunked(body: bytes, key: str = "a") -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-Api-Key: {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


FRAMINGS = pytest.mark.parametrize("framed", [plain, chunked], ids=["plain", "chunked"])


class Clock:
    """A loop's clock, a service and a transport in one, for one connection."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.now = 0.0
        self.draining = False
        self.budget = Budget(BudgetBounds())
        self.written = b""
        self.served: list[Request] = []
        self.connection = ClientConnection(self, limits, cast(Any, self))
        self.connection.connection_made(cast(asyncio.BaseTransport, self))

    def time(self) -> float:
        return self.now

    def comes(self, data: bytes, after_s: float) -> None:
        """The server looks at its connections each half second."""
        until = self.now + after_s
        while self.now < until:
            self.now = min(self.now + 0.5, until)
            self.connection.check_deadline(self.now)
        self.connection.data_received(data)

    def connected(self, client: ClientConnection) -> None: ...
    def disconnected(self, client: ClientConnection) -> None: ...
    def refused(self, error: Exception, *request: object) -> None: ...
    def check_head(self, *head: object) -> None: ...

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        self.served.append(request)
        return cast(Exchange, self)

    def start(self) -> None: ...
    def abort(self) -> None: ...
    def get_extra_info(self, name: str) -> None: ...
    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return False


LIMITS = ConnectionLimits(10**6, 10**4, 75.0, min_body_rate=100, body_window_s=10.0)


@FRAMINGS
@pytest.mark.parametrize(
    ("pieces", "passes"),
    [
        ([(500, 3.0)] * 20, True),
        ([(1200, 8.0), (10, 1.0)] * 3, True),
        ([(0, 9.4)], True),
        ([(1, 2.0)] * 20, False),
        ([(2000, 1.0)] + [(90, 1.0)] * 30, False),
        ([(0, 11.0)], False),
    ],
    ids=["slow", "stalling", "short and late", "a byte now and then", "fast, then too slow", "nothing more"],
)
def test_a_body_has_to_bring_so_much_in_each_window(
    framed: Callable[[bytes], bytes], pieces: list[tuple[int, float]], passes: bool
) -> None:
    whole = framed(b"x" * sum(size for size, _ in pieces) + b"-")
    clock = Clock(LIMITS)
    rest = len(b"-") + (len(b"\r\n0\r\n\r\n") if framed is chunked else 0)
    at = len(whole) - sum(size for size, _ in pieces) - rest
    clock.connection.data_received(whole[:at])
    for size, after_s in pieces:
        clock.comes(whole[at : at + size], after_s)
        at += size
    clock.comes(whole[at:], 0.1)
    if passes:
        assert clock.written == b""
        assert [len(request.body) for request in clock.served] == [sum(size for size, _ in pieces) + 1]
    else:
        assert clock.served == []
        assert clock.written.startswith(b"HTTP/1.1 408 ")
        assert b"at least 1000 bytes are expected in 10 s (min_body_rate)" in clock.written


@FRAMINGS
def test_what_comes_of_a_body_with_its_head_counts_in_the_first_window(
    framed: Callable[[bytes], bytes],
) -> None:
    whole = framed(b"x" * 1001)
    rest = len(b"x") + (len(b"\r\n0\r\n\r\n") if framed is chunked else 0)
    clock = Clock(LIMITS)
    clock.connection.data_received(whole[:-rest])
    clock.comes(whole[-rest:], 12.0)
    assert clock.written == b""
    assert [len(request.body) for request in clock.served] == [1001]


def test_a_body_behind_a_request_that_is_served_has_time() -> None:
    clock = Clock(LIMITS)
    clock.connection.data_received(plain(b"first") + plain(b"second")[:-1])
    clock.comes(b"", 60.0)
    clock.connection.finish()
    clock.comes(b"d", 9.0)
    assert [request.body for request in clock.served] == [b"first", b"second"]
    assert clock.written == b""


def test_what_comes_of_a_body_in_the_read_of_the_request_before_it_is_counted() -> None:
    clock = Clock(LIMITS)
    clock.connection.data_received(plain(b"x" * 10) + plain(b"x" * 20)[:-10])
    assert [request.body for request in clock.served] == [b"x" * 10]
    assert clock.budget.held_bytes == 10


@FRAMINGS
async def test_trickling_bodies_are_cut_off_and_what_they_hold_is_given_back(
    framed: Callable[[bytes], bytes],
) -> None:
    async with staged(respond_ok, body_window_s=0.2) as stage:
        clients = [await stage.connect() for _ in range(50)]
        for client in clients:
            client.send(framed(BODY)[:100_000])
        for client in clients:
            answer = await client.message()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
            assert "min_body_rate" in answer.error["message"]
        assert stage.gateway.service.budget.held_bytes == 0, "though the connections linger"
        assert stage.mocks[0].requests == []


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is counted tells nobody
        await asyncio.sleep(0.01)


async def holds(stage: Stage, count: int) -> None:
    await until(lambda: stage.gateway.service.budget.held_bytes >= count)


@FRAMINGS
async def test_unfinished_bodies_are_bounded_together_and_room_comes_back(
    framed: Callable[[bytes], bytes],
) -> None:
    async with staged(respond_ok, **BOUNDS) as stage:
        clients = [await stage.connect() for _ in range(3)]
        for number, client in enumerate(clients, 1):
            client.send(framed(BODY)[:-10])
            await holds(stage, number * 299_000)
        refused = await stage.connect()
        refused.send(framed(BODY)[:-10])
        answer = await refused.message()
        assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
        assert "1000000 bytes together (max_unfinished_body_bytes)" in answer.error["message"]
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("1", "true")
        assert answer.headers["connection"] == "close"
        clients[0].send(framed(BODY)[-10:])
        assert (await clients[0].message()).status == 200
        assert (await stage.ask(framed(BODY))).status == 200, "one is complete: there is room"
        clients[1].abort()
        clients[2].abort()
        await until(lambda: stage.gateway.service.budget.held_bytes == 0)
        assert [request.body for request in stage.mocks[0].requests] == [BODY] * 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def body_of_a_client_that_leaves(framed: Callable[[bytes], bytes]) -> list[list[int]]:
    """Bytes that this process holds before a body, with it, and after its client has left; on either event loop."""
    return_memory()
    body = framed(b"x" * 60_000_000)[:-10]
    rounds = []

    async def main() -> None:
        async with staged(respond_ok) as stage:
            # That keeps no copy of what it sends.
            client = socket.socket()
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", stage.port))
            before = resident_bytes()
            await asyncio.get_running_loop().sock_sendall(client, body)
            await holds(stage, 59_000_000)
            with_body = resident_bytes()
            # A connection and its parser refer to each other: that must not keep the body.
            gc.disable()
            client.close()
            await until(lambda: stage.gateway.service.budget.held_bytes == 0)
            rounds.append([before, with_body, resident_bytes()])
            gc.enable()

    run(main)
    return rounds


@pytest.mark.parametrize("framed", [plain, slow(chunked)], ids=["plain", "chunked"])
def test_what_a_body_took_is_the_systems_again_when_its_client_leaves(
    framed: Callable[[bytes], bytes],
) -> None:
    # In a process of its own: what other tests of a process left free could hold a body unseen, or be let go meanwhile.
    script = f"import test_gateway_bounds as t; print(t.body_of_a_client_that_leaves(t.{framed.__name__}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    for before, with_body, after in json.loads(done.stdout):
        assert with_body > before + 40_000_000
        assert after < before + 20_000_000


@FRAMINGS
async def test_a_tenant_fills_its_own_share_only(framed: Callable[[bytes, str], bytes]) -> None:
    bounds = {**BOUNDS, "max_unfinished_body_bytes_per_tenant": 500_000}
    async with staged(respond_ok, api_keys=("a", "b"), **bounds) as stage:
        mine = await stage.connect()
        mine.send(framed(BODY, "a")[:-10])
        await holds(stage, 299_000)
        answer = await stage.ask(framed(BODY, "a"))
        assert answer.status == 413
        assert "500000 bytes together (max_unfinished_body_bytes_per_tenant)" in answer.error["message"]
        assert (await stage.ask(framed(BODY, "b"))).status == 200
        assert (await stage.ask(plain(b"{}", "a"))).status == 200, "it does not wait for more"


@FRAMINGS
async def test_no_body_is_read_of_who_has_no_key(framed: Callable[[bytes, str], bytes]) -> None:
    async with staged(respond_ok, api_keys=("a",)) as stage:
        client = await stage.connect()
        client.send(framed(BODY, "b")[:400])
        assert (await client.message()).status == 401
        health = await stage.connect()
        health.send(framed(BODY, "b").replace(b"/v1/completions", b"/health")[:400])
        assert (await health.message()).status == 401, "a question about health has no body"
        assert (await stage.ask(get("/health", "Content-Length: 0\r\n"))).status == 200


async def test_requests_in_flight_of_a_tenant_are_bounded_and_its_connections_stay() -> None:
    go_on = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        peer.start_stream()
        await go_on.wait()
        peer.end_stream()

    async with staged(slow, api_keys=("a", "b"), max_requests_per_tenant=2) as stage:
        clients = [await stage.connect() for _ in range(3)]
        for client in clients[:2]:
            client.send(plain(b"{}"))
        await stage.mocks[0].asked(2)
        for framed in (plain, chunked):
            clients[2].send(framed(b"{}"))
            answer = await clients[2].message()
            assert (answer.status, answer.error["code"]) == (429, "overloaded_error")
            assert "2 requests in flight, as many as max_requests_per_tenant" in answer.error["message"]
            assert answer.headers["retry-after"] == "1"
            assert "connection" not in answer.headers
        assert stage.metrics.requests["refused", 429] == 2
        assert (await stage.ask(get("/v1/models", "X-Api-Key: a\r\n"))).status == 200, "completions count"
        other = await stage.connect()
        other.send(plain(b"{}", "b"))
        await stage.mocks[0].asked(3)
        clients[0].abort()
        await until(lambda: stage.in_flight() == [2])
        clients[2].send(plain(b"{}"))
        await stage.mocks[0].asked(4)
        go_on.set()
        for client in (*clients[1:], other):
            assert (await client.message()).status == 200


async def test_connections_of_a_tenant_are_bounded_and_idle_ones_make_room() -> None:
    go_on = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        if request.body != b"quick":
            await go_on.wait()
        peer.respond()

    async with staged(slow, api_keys=("a", "b"), max_connections_per_tenant=2) as stage:
        busy, idle, third, fourth, other = [await stage.connect() for _ in range(5)]
        busy.send(plain(b"slow"))
        await stage.mocks[0].asked(1)
        idle.send(plain(b"quick"))
        assert (await idle.message()).status == 200
        third.send(plain(b"slow"))
        assert await idle.closed() == b""
        await stage.mocks[0].asked(3)
        fourth.send(plain(b"quick"))
        answer = await fourth.message()
        assert (answer.status, answer.error["code"]) == (429, "overloaded_error")
        assert "max_connections_per_tenant" in answer.error["message"]
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        other.send(plain(b"quick", "b"))
        assert (await other.message()).status == 200
        go_on.set()
        assert [(await client.message()).status for client in (busy, third)] == [200, 200]
        assert (await stage.ask(plain(b"quick"))).status == 200


@pytest.mark.parametrize("bound", ["max_requests_per_tenant", "max_connections_per_tenant"])
async def test_a_question_for_health_behind_a_request_does_not_take_it_out_of_the_count(bound: str) -> None:
    go_on = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        await go_on.wait()
        peer.respond()

    async with staged(slow, api_keys=("a",), **{bound: 1}) as stage:
        first, second = await stage.connect(), await stage.connect()
        first.send(chunked(b"slow") + get("/health"))
        await stage.mocks[0].asked(1)
        second.send(plain(b"slow"))
        assert (await second.message()).status == 429
        go_on.set()
        assert [(await first.message()).status for _ in range(2)] == [200, 200]


async def test_a_compressed_body_is_refused_before_it_is_read_and_says_what_to_send() -> None:
    async with staged(respond_ok) as stage:
        for encoding in ("gzip", "br", "gzip, identity", "GZIP"):
            for path in ("/v1/completions", "/api/v1/asample", "/hot_load/v1/models/hot_load"):
                head = f"Content-Encoding: {encoding}\r\n"
                client = await stage.connect()
                client.send(post(b"xx", path, head)[:-1])
                answer = await client.message()
                assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")
                assert encoding.lower() in answer.error["message"]
                assert answer.headers["accept-encoding"] == "identity"
        assert stage.mocks[0].requests == []
        assert (await stage.ask(post(headers="Content-Encoding: identity\r\n"))).status == 200
        assert (await stage.ask(get("/health", "Content-Encoding: gzip\r\n"))).status == 200


@pytest.mark.parametrize("ends", [b"", b"\r\nx\r\n0\r\n\r\n"], ids=["endless", "ends"])
async def test_chunk_extensions_are_bounded_over_a_body(ends: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"1;%b\r\nx\r\n" % (b"e" * 9_000)] * 100

    async with staged(respond_ok, max_header_bytes=20_000) as stage:
        few = head + b"".join(chunks[:2]) + b"0\r\n\r\n"
        assert (await stage.ask(few)).status == 200
        client = await stage.connect()
        client.send(head + b"".join(chunks) + b"1;" + b"e" * 900_000 + ends)
        answer = await client.message()
        assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
        assert "chunk extensions and trailers are over 20000 bytes" in answer.error["message"]
        small = head + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
        assert (await stage.ask(small)).status == 200, "what chunks need by themselves does not count"
        assert [request.body for request in stage.mocks[0].requests] == [b"xx", b"x" * 100_000]
