"""When a request goes to another replica, how often, and when its session moves with it."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable

import pytest
from gateway_harness import (
    Handler,
    Message,
    Peer,
    Stage,
    post,
    read_chunk,
    read_head,
    respond_ok,
    run,
    staged,
)

from midstream.proxy.request import HELD_BYTES_MAX

SESSION = "x-multi-turn-session-id: s1\r\n"
UNAVAILABLE = b'{"error":{"message":"not ready","type":"replica_unavailable","code":"replica_unavailable","param":null}}'


def failing(error: OSError) -> Callable[[object], Awaitable[object]]:
    async def connect(factory: object) -> object:
        raise error

    return connect


async def silent(request: Message, peer: Peer) -> None:
    """A stopped process: the connection stays open and nothing comes."""
    await peer.closed()


def drop_pools(stage: Stage) -> None:
    for view in stage.views:
        stage.pool(view).close()


async def ask_twice_with_a_broken_connect_between(stage: Stage, error: OSError) -> list[Message]:
    """A session's first request, one whose connect fails with `error`, and one after that."""
    answers = [await stage.ask(post(headers=SESSION))]
    drop_pools(stage)
    pool = stage.pool(stage.views[int(answers[0].headers["x-midstream-replica"][-1])])
    connect = pool._connect
    pool._connect = failing(error)
    answers.append(await stage.ask(post(headers=SESSION)))
    pool._connect = connect
    answers.append(await stage.ask(post(headers=SESSION)))
    return answers


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
async def test_the_gateways_own_shortage_is_answered_and_moves_nobody(code: int) -> None:
    async with staged(respond_ok, respond_ok) as stage:
        shortage = OSError(code, "short")
        first, refused, again = await ask_twice_with_a_broken_connect_between(stage, shortage)
        assert (refused.status, refused.error["code"]) == (503, "replica_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert again.headers["x-midstream-route-reason"] == "sticky"
        assert again.headers["x-midstream-replica"] == first.headers["x-midstream-replica"]
        assert stage.metrics.upstream_errors == {}
        assert stage.metrics.retries == {}


async def test_a_session_is_served_elsewhere_once_while_its_replica_stays_usable() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        hiccup = OSError(errno.EHOSTUNREACH, "hiccup")
        answers = await ask_twice_with_a_broken_connect_between(stage, hiccup)
        assert [a.headers["x-midstream-route-reason"] for a in answers] == ["new", "moved", "sticky"]
        replicas = [answer.headers["x-midstream-replica"] for answer in answers]
        assert replicas[0] == replicas[2] != replicas[1]


def killing(stages: list[Stage], killed: list[int]) -> Handler:
    """A replica whose process dies of the body b"poison"."""

    async def handler(request: Message, peer: Peer) -> None:
        if request.body != b"poison":
            peer.respond()
            return
        index = next(i for i, mock in enumerate(stages[0].mocks) if peer in mock.peers)
        killed.append(index)
        stages[0].mocks[index].stop()

    return handler


@pytest.mark.parametrize("warm", [False, True])
async def test_a_request_that_kills_replicas_reaches_two_of_them(warm: bool) -> None:
    stages: list[Stage] = []
    killed: list[int] = []
    async with staged(*[killing(stages, killed)] * 5) as stage:
        stages.append(stage)
        for _ in range(10 if warm else 0):
            await stage.ask(post())
        assert [mock.connections for mock in stage.mocks] == [int(warm)] * 5
        # Also when it comes again.
        for _ in range(3):
            answer = await stage.ask(post(b"poison"))
            assert (answer.status, answer.error["code"]) == (422, "request_lost_replicas")
            assert answer.headers["x-should-retry"] == "false"
            assert len(killed) == 2
        assert (await stage.ask(post(b"harmless"))).status == 200


async def test_a_stale_connection_to_a_living_replica_is_no_lost_send() -> None:
    async def stale(request: Message, peer: Peer) -> None:
        peer.respond()
        # The second request of a connection ends it.
        await peer.message()
        peer.abort()

    async with staged(stale, stale, stale) as stage:
        client = await stage.connect()
        for _ in range(9):
            client.send(post())
            assert (await client.message()).status == 200
        assert stage.metrics.retries == {"stale_connection": 6}
        assert stage.metrics.upstream_errors == {}


def unhear(stage: Stage, index: int, seconds: float) -> None:
    """The replica has been unreachable for so long."""
    stage.views[index].replica.hear(None)
    stage.gateway.proxy.check_replicas(100.0)
    stage.gateway.proxy.check_replicas(100.0 + seconds)


async def test_a_plain_request_on_an_unreachable_replica_is_served_elsewhere_after_the_limit() -> None:
    async with staged(silent, respond_ok, unreachable_s=1000.0) as stage:
        asking = asyncio.create_task(stage.ask(post()))
        await stage.mocks[0].asked(1)
        unhear(stage, 0, 999.0)
        assert stage.in_flight() == [1, 0]
        unhear(stage, 0, 1000.0)
        answer = await asking
        assert (answer.status, answer.headers["x-midstream-replica"]) == (200, "replica-1")
        assert stage.metrics.retries == {"other_replica": 1}


async def test_a_replica_heard_of_again_in_time_keeps_its_requests() -> None:
    release = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        await release.wait()
        peer.respond(b"late")

    async with staged(slow, unreachable_s=1000.0) as stage:
        asking = asyncio.create_task(stage.ask(post()))
        await stage.mocks[0].asked(1)
        report = stage.views[0].replica.heard
        unhear(stage, 0, 999.0)
        stage.views[0].replica.hear(report)
        stage.gateway.proxy.check_replicas(1100.0)
        unhear(stage, 0, 999.0)
        release.set()
        assert (await asking).body == b"late"


async def test_a_stream_on_an_unreachable_replica_ends_with_an_error_event() -> None:
    async def stops(request: Message, peer: Peer) -> None:
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        await silent(request, peer)

    async with staged(stops, unreachable_s=1000.0) as stage:
        client = await stage.connect()
        client.send(post())
        await read_head(client.reader)
        assert await read_chunk(client.reader) == b"data: 1\n\n"
        unhear(stage, 0, 1000.0)
        assert b'"code":"engine_error"' in await read_chunk(client.reader)
        assert await client.closed() == b"", "no final chunk"
        assert stage.metrics.cut_responses == {"replica-0": 1}
        assert stage.in_flight() == [0]


async def test_a_response_that_had_begun_on_an_unreachable_replica_is_not_sent_again() -> None:
    async def half_a_head(request: Message, peer: Peer) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-")
        await silent(request, peer)

    async with staged(half_a_head, respond_ok, unreachable_s=1000.0) as stage:
        asking = asyncio.create_task(stage.ask(post()))
        await stage.mocks[0].asked(1)
        [connection] = stage.pool(stage.views[0])._all
        while not connection.answering:  # noqa: ASYNC110 - nothing tells when a part of a head came
            await asyncio.sleep(0)
        unhear(stage, 0, 1000.0)
        assert (await asking).status == 503
        assert stage.mocks[1].requests == []


async def test_a_request_that_silences_two_replicas_is_not_shown_to_a_third() -> None:
    async with staged(silent, silent, silent, unreachable_s=1000.0) as stage:
        asking = asyncio.create_task(stage.ask(post()))
        for count in (1, 2):
            asked = [asyncio.create_task(mock.asked(1)) for mock in stage.mocks if not mock.requests]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            unhear(stage, stage.in_flight().index(1), 1000.0)
            assert sum(len(mock.requests) for mock in stage.mocks) == count
        assert (await asking).error["code"] == "request_lost_replicas"
        assert sum(len(mock.requests) for mock in stage.mocks) == 2
        for waiting in asked:
            waiting.cancel()


async def test_the_server_looks_for_unreachable_replicas_by_itself() -> None:
    async with staged(silent, respond_ok, unreachable_s=0.01) as stage:
        asking = asyncio.create_task(stage.ask(post()))
        await stage.mocks[0].asked(1)
        stage.views[0].replica.hear(None)
        assert (await asking).headers["x-midstream-replica"] == "replica-1"


def unavailable(*, split: bool) -> Handler:
    async def handler(request: Message, peer: Peer) -> None:
        head = f"HTTP/1.1 503 X\r\nretry-after: 1\r\ncontent-length: {len(UNAVAILABLE)}\r\n\r\n".encode()
        peer.send(head)
        if split:
            await asyncio.sleep(0.01)
        peer.send(UNAVAILABLE)

    return handler


@pytest.mark.parametrize("split", [False, True])
async def test_a_replica_that_cannot_take_a_request_without_session_is_passed_over(split: bool) -> None:
    async with staged(unavailable(split=split), respond_ok) as stage:
        for _ in range(3):
            answer = await stage.ask(post())
            assert (answer.status, answer.headers["x-midstream-replica"]) == (200, "replica-1")
        assert stage.metrics.upstream_errors == {}
        assert stage.mocks[0].connections == 1, "the connection is whole and is used again"


FULL = b'{"error":{"message":"full","type":"overloaded_error","code":"overloaded_error","param":null}}'


def refusing(status: str, body: bytes) -> Handler:
    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(body, status, headers="retry-after: 7\r\n")

    return handler


REFUSALS = [refusing("503 X", UNAVAILABLE), refusing("429 X", FULL)]


def home_of(answer: Message) -> int:
    return int(answer.headers["x-midstream-replica"][-1])


@pytest.mark.parametrize("refuse", REFUSALS, ids=["503", "429"])
async def test_a_session_is_not_taken_from_a_usable_replica_that_is_busy(refuse: Handler) -> None:
    async with staged(respond_ok, respond_ok) as stage:
        home = home_of(await stage.ask(post(headers=SESSION)))
        stage.mocks[home].handler = refuse
        answer = await stage.ask(post(headers=SESSION))
        assert (answer.status in (429, 503), answer.headers["retry-after"]) == (True, "7")
        assert answer.headers["x-midstream-route-reason"] == "sticky"
        assert stage.mocks[1 - home].requests == []


@pytest.mark.parametrize("refuse", REFUSALS, ids=["503", "429"])
async def test_a_session_that_is_new_begins_where_it_is_taken(refuse: Handler) -> None:
    async with staged(respond_ok, respond_ok) as stage:
        home = home_of(await stage.ask(post(headers=SESSION)))
    async with staged(respond_ok, respond_ok) as stage:
        stage.mocks[home].handler = refuse
        first = await stage.ask(post(headers=SESSION))
        assert (first.status, home_of(first)) == (200, 1 - home)
        assert first.headers["x-midstream-route-reason"] == "new"
        stage.mocks[home].handler = respond_ok
        again = await stage.ask(post(headers=SESSION))
        assert (home_of(again), again.headers["x-midstream-route-reason"]) == (1 - home, "sticky")


async def test_a_session_refused_by_all_lives_nowhere_and_the_last_word_has_its_retry_after() -> None:
    async with staged(*[refusing("429 X", FULL)] * 3) as stage:
        answer = await stage.ask(post(headers=SESSION))
        assert (answer.status, answer.headers["retry-after"], answer.error["message"]) == (
            429,
            "7",
            "full",
        )
        assert sum(len(mock.requests) for mock in stage.mocks) == 2, "one other is asked, not every one"
        assert len(stage.gateway.proxy.deployments.default.sessions) == 0


@pytest.mark.parametrize("status", ["400 X", "401 X", "404 X", "413 X", "422 X", "429 X"])
async def test_what_a_client_does_wrong_never_counts_against_a_replica(status: str) -> None:
    async with staged(refusing(status, FULL)) as stage:
        client = await stage.connect()
        for _ in range(20):
            client.send(post(b"bad", headers=SESSION))
            assert (await client.message()).status == int(status[:3])
        stage.mocks[0].handler = respond_ok
        client.send(post(headers=SESSION))
        assert (await client.message()).status == 200
        assert stage.metrics.upstream_errors == {}
        assert stage.views[0].usable


async def test_a_session_passed_over_once_and_refused_there_keeps_its_home() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        home = home_of(await stage.ask(post(headers=SESSION)))
        drop_pools(stage)
        pool = stage.pool(stage.views[home])
        connect, pool._connect = pool._connect, failing(OSError(errno.EHOSTUNREACH, "hiccup"))
        stage.mocks[1 - home].handler = refusing("425 Too Early", FULL)
        assert (await stage.ask(post(headers=SESSION))).status == 425
        [other] = stage.mocks[1 - home].requests
        assert other.headers["x-midstream-placed"] == "0", "for this request alone"
        pool._connect = connect
        again = await stage.ask(post(headers=SESSION))
        assert (home_of(again), again.headers["x-midstream-route-reason"]) == (home, "sticky")


async def test_a_session_leaves_a_replica_that_says_no_and_is_not_usable_any_more() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        first = await stage.ask(post(headers=SESSION))
        home = int(first.headers["x-midstream-replica"][-1])

        async def going(request: Message, peer: Peer) -> None:
            stage.views[home].admitted = False
            peer.respond(UNAVAILABLE, "503 X")

        stage.mocks[home].handler = going
        moved = await stage.ask(post(headers=SESSION))
        assert (moved.status, moved.headers["x-midstream-route-reason"]) == (200, "moved")
        stage.views[home].admitted = True
        again = await stage.ask(post(headers=SESSION))
        assert again.headers["x-midstream-replica"] == moved.headers["x-midstream-replica"]


async def test_at_most_two_replicas_are_asked_and_the_last_word_is_passed_on() -> None:
    async with staged(*[unavailable(split=False)] * 4) as stage:
        answer = await stage.ask(post())
        assert (answer.status, answer.error["message"]) == (503, "not ready")
        assert sum(len(mock.requests) for mock in stage.mocks) == 2


@pytest.mark.parametrize("body", [b"some other 503", b"x" * 300_000])
async def test_another_503_is_passed_on_whole(body: bytes) -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(body, "503 Full")

    async with staged(handler, handler) as stage:
        answer = await stage.ask(post())
        assert (answer.start, answer.body) == ("HTTP/1.1 503 Full", body)
        asked = sum(len(mock.requests) for mock in stage.mocks)
        assert asked == (1 if len(body) > HELD_BYTES_MAX else 2)


async def test_after_a_replica_that_dies_inside_its_503_another_one_is_asked() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        peer.send(b"HTTP/1.1 503 X\r\ncontent-length: 900\r\n\r\n" + UNAVAILABLE)
        await peer.writer.drain()
        peer.writer.close()

    async with staged(handler, respond_ok) as stage:
        answer = await stage.ask(post())
        assert (answer.status, answer.headers["x-midstream-replica"]) == (200, "replica-1")
        assert stage.metrics.upstream_errors == {"replica-0": 1}


def test_the_token_reaches_replicas_and_a_clients_own_does_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    forged = "X-Midstream-Token: forged\r\n"

    async def main() -> None:
        async with staged(respond_ok) as stage:
            await stage.ask(post(headers=forged))
            assert "x-midstream-token" not in stage.mocks[0].requests[0].headers
        async with staged(respond_ok, replica_token="very-secret") as stage:
            answer = await stage.ask(post(headers=forged))
            assert stage.mocks[0].requests[0].headers["x-midstream-token"] == "very-secret"
            assert "very-secret" not in f"{answer} {stage.gateway!r} {stage.gateway.proxy!r}"

    run(main)
    assert "very-secret" not in caplog.text
