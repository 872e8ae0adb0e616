"""Requests the gateway refuses itself: framing that two parsers could read differently, limits, timeouts, keys, names."""

import asyncio
import logging

import pytest
from gateway_harness import Message, Peer, get, post, respond_ok, run, staged

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
KEY = "sk-very-secret"


DOUBTFUL = [
    HEAD + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    HEAD + CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    HEAD + b"Content-Length: 3, 4\r\n\r\nabcd",
    HEAD + b"Content-Length: +3\r\n\r\nabc",
    HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    HEAD + b"Content-Length : 3\r\n\r\nabc",
    HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding\r\n : chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    HEAD + CHUNKED + b"\r\nzz\r\nab\r\n0\r\n\r\n",
    HEAD + CHUNKED + b"\r\n2\nab\n0\n\n",
    HEAD + CHUNKED + b"\r\n2\r\nabc\r\n0\r\n\r\n",
    HEAD + b"X: a\r\n folded: b\r\n\r\n",
    HEAD + b"X: a\x00b\r\n\r\n",
    HEAD + b"X: a\rY: b\r\n\r\n",
    HEAD + b"Host: other\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\nHost: t\n\n",
    b"POST /v1/completions HTTP/2.0\r\nHost: t\r\n\r\n",
    b"POST http://other/v1/completions HTTP/1.1\r\n\r\n",
    b"POST http://me@other/v1/completions HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST ftp://other/v1/completions HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST http:///v1/completions HTTP/1.1\r\nHost: t\r\n\r\n",
    HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n",
    b"CONNECT other:80 HTTP/1.1\r\nHost: t\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"GET\r\n\r\n",
]


async def test_a_request_of_doubtful_framing_is_refused_and_the_connection_closed() -> None:
    async with staged(respond_ok) as stage:
        for request_bytes in DOUBTFUL:
            client = await stage.connect()
            client.send(request_bytes + get("/health"))
            answer = await client.message()
            assert (answer.status, answer.error["code"]) == (400, "invalid_request_error"), request_bytes
            assert answer.headers["connection"] == "close", request_bytes
            assert await client.closed() == b"", "nothing after the refusal is served"
            client.writer.close()
        assert stage.mocks[0].requests == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(b"x" * 2001), 413),
        (HEAD + b"Content-Length: 99999999999999\r\n\r\n", 413),
        (HEAD + CHUNKED + b"\r\n" + b"3e8\r\n%b\r\n" % (b"x" * 1000) * 3, 413),
        (HEAD + b"X: " + b"x" * 2000 + b"\r\n\r\n", 431),
        (HEAD + b"X: 1\r\n" * 400 + b"\r\n", 431),
        (HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + b"X: 1\r\n" * 400 + b"\r\n", 431),
        (HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2001\r\n\r\n", 413),
        (HEAD + b"X: " + b"x" * 4000, 431),
        (b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 431),
        (HEAD + CHUNKED + b"\r\n1\r\nx\r\n0\r\n" + b"T: 1\r\n" * 400 + b"\r\n", 431),
    ],
)
async def test_limits_are_answered_even_while_the_client_still_sends(
    request_bytes: bytes, status: int
) -> None:
    async with staged(respond_ok, max_body_bytes=2000, max_header_bytes=1500) as stage:
        client = await stage.connect()
        half = len(request_bytes) // 2
        client.send(request_bytes[:half])
        await client.writer.drain()
        client.send(request_bytes[half:] + b"more" * 50_000)
        answer = await client.message()
        assert answer.status == status
        assert str(1500 if status == 431 else 2000) in answer.error["message"]
        assert await client.closed() == b""
        assert stage.mocks[0].requests == []
        assert stage.metrics.requests == {("refused", status): 1}


async def test_bodies_and_heads_at_the_limit_pass() -> None:
    async with staged(respond_ok, max_body_bytes=2000, max_header_bytes=1500) as stage:
        assert (await stage.ask(post(b"x" * 2000, headers=f"X: {'x' * 1300}\r\n"))).status == 200


async def test_a_slow_head_and_a_stalled_body_time_out_and_a_served_stream_does_not() -> None:
    timed_out = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        await timed_out.wait()
        peer.respond(b"late")

    async with staged(slow, head_s=0.5, body_window_s=0.5) as stage:
        served = await stage.connect()
        served.send(post())
        await stage.mocks[0].asked(1)
        partial, stalled = [await stage.connect() for _ in range(2)]
        partial.send(HEAD)
        stalled.send(post(b"12345")[:-1])
        answers = [await partial.message(), await stalled.message()]
        assert [(a.status, a.error["code"]) for a in answers] == [(408, "request_timeout")] * 2
        timed_out.set()
        assert (await served.message()).body == b"late"


async def test_an_idle_connection_is_closed_after_its_keep_alive_time() -> None:
    async with staged(respond_ok, keep_alive_s=0.5) as stage:
        client = await stage.connect()
        client.send(post())
        assert (await client.message()).status == 200
        assert await client.closed() == b""


def test_a_key_is_needed_everywhere_but_on_health(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    good = [
        f"Authorization: Bearer {KEY}",
        f"authorization: bearer  {KEY}",
        f"X-Api-Key: {KEY}",
        f"Authorization: Bearer wrong\r\nX-Api-Key: {KEY}",
    ]
    bad = [
        f"Authorization: Basic {KEY}",
        f"X-Api-Key: {KEY}x",
        "Authorization: Bearer",
        "X-Api-Key:",
        "X-A: 1",
    ]

    async def main() -> None:
        async with staged(respond_ok, api_keys=("other", KEY)) as stage:
            for header in good + bad:
                status = 200 if header in good else 401
                assert (await stage.ask(post(headers=f"{header}\r\n"))).status == status, header
                assert (await stage.ask(get("/v1/models", f"{header}\r\n"))).status == status, header
                assert (await stage.ask(get("/metrics", f"{header}\r\n"))).status == status, header
            assert (await stage.ask(get("/health"))).status == 200
            assert len(stage.mocks[0].requests) == len(good)
            for request in stage.mocks[0].requests:
                assert not {"authorization", "x-api-key"} & set(request.headers)
                assert len(request.headers["x-midstream-tenant"]) == 16
                assert KEY not in str(request)

    run(main)
    assert "mapped to worker" in caplog.text
    assert KEY not in caplog.text


async def test_tenants_do_not_share_sessions() -> None:
    async with staged(respond_ok, respond_ok, api_keys=("a", "b")) as stage:
        reasons = []
        for key in ("a", "b", "a", "b"):
            answer = await stage.ask(post(headers=f"X-Api-Key: {key}\r\nX-Session-ID: s\r\n"))
            reasons.append(answer.headers["x-midstream-route-reason"])
        assert reasons == ["new", "new", "sticky", "sticky"]
        tenants = {r.headers["x-midstream-tenant"] for mock in stage.mocks for r in mock.requests}
        assert len(tenants) == 2


async def test_a_request_for_another_model_or_deployment_is_not_found() -> None:
    model, deployment = "accounts/local/models/tiny-moe", "accounts/local/deployments/default"
    served = [model, f"{model}@step-3", "tiny-moe", "tiny-moe@base", deployment, "default"]
    foreign = ["accounts/other/models/tiny-moe", "other", "tiny-moe-2", "", "@base"]

    async with staged(respond_ok) as stage:
        for header in ("fireworks-model", "Fireworks-Deployment"):
            for name in served:
                assert (await stage.ask(post(headers=f"{header}: {name}\r\n"))).status == 200, name
            for name in foreign:
                answer = await stage.ask(post(headers=f"{header}: {name}\r\n"))
                assert (answer.status, answer.error["code"]) == (404, "not_found_error"), name
                assert answer.error["param"] == header.lower()


async def test_a_session_header_that_cannot_be_a_key_is_named() -> None:
    async with staged(respond_ok) as stage:
        for value in ("x" * 513, "a\tb"):
            answer = await stage.ask(post(headers=f"x-session-affinity: {value}\r\n"))
            assert answer.status == 400, value
            assert answer.error["param"] == "x-session-affinity"
