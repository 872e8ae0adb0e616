"""A stream whose replica is lost: its client gets every event once, from another replica where it has to be."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from gateway_harness import Handler, Message, Peer, Stage, post, read_chunk, read_head, run, staged
from hypothesis import given
from hypothesis import strategies as st
from reports import changed

from midstream.ledger import Signalled
from midstream.proxy.resume import GATHERED_BYTES_MAX, UNFINISHED_BYTES_MAX, ResumeLog

SESSION = "x-multi-turn-session-id: s1\r\n"
OPENING = '{"id":"x","created":1,"seed":7,"prompts":"d"}'
BODY = b'{"model": "m",  "stream":true, "n": 1.0}'
# Of a whole stream.
EVENTS = 5
DONE = b"data: [DONE]\n\n"


def write(number: int) -> bytes:
    """What a replica writes at a time: comments and an event."""
    kv = '{"c":0,"t":[100],"s":"base","kv":[["base",0,4]]}'
    told = f": m {OPENING}\n: m {kv}\n\n" if number == 0 else f": m 0:{100 + number}\n\n"
    return f'{told}data: {{"n":{number}}}\n\n'.encode()


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WRITES = [*(framed(write(number)) for number in range(EVENTS)), framed(b": m end\n\n" + DONE)]
STREAM = b"".join(WRITES)


def begin(peer: Peer, more: str = "x-midstream-resumable: 1\r\n") -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    peer.send(f"{head}{more}\r\n".encode())


async def die(peer: Peer) -> None:
    await peer.writer.drain()
    peer.writer.close()


def go_on(request: Message, peer: Peer) -> None:
    """What a replica does that is asked to go on with a stream: the events that the client does not have."""
    state = json.loads(request.body)["state"].split("\n")
    assert state[0] == OPENING
    begin(peer, "")
    for number in range(len(state) - 1, EVENTS):
        peer.chunk(b'data: {"n":%d}\n\n' % number)
    peer.chunk(DONE)
    peer.end_stream()


def losing(data: bytes, times: int = 99) -> Handler:
    """A replica that dies after it has sent `data` of a stream, but goes on with those of others.

    times: so many streams die in all, then they do not any more.
    """
    left = [times]

    async def handler(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start:
            go_on(request, peer)
            return
        begin(peer)
        left[0] -= 1
        if left[0] >= 0:
            peer.send(data)
            await die(peer)
        else:
            peer.send(STREAM)
            peer.end_stream()

    return handler


def troubled(trouble: Handler, times: int = 1) -> Handler:
    """Replicas that go on with a stream only after `times` of them had `trouble` with that."""
    left = [times]

    async def handler(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start and left[0]:
            left[0] -= 1
            await trouble(request, peer)
        else:
            await losing(WRITES[0] + WRITES[1])(request, peer)

    return handler


async def refuse(request: Message, peer: Peer) -> None:
    peer.respond(b'{"error":{"message":"not here","code":"conflict"}}', "409 Conflict")


async def reset(request: Message, peer: Peer) -> None:
    peer.abort()


async def answer(stage: Stage, headers: str = "", version: str = "1.1") -> tuple[list[Any], bool]:
    """The events that the client gets, and whether the response was complete."""
    client = await stage.connect()
    client.send(post(BODY, headers=headers, version=version))
    head = await read_head(client.reader)
    assert head.status == 200
    assert "x-midstream-resumable" not in head.headers
    body, complete = b"", False
    try:
        while chunk := await read_chunk(client.reader):
            assert chunk.endswith(b"\n\n")
            body += chunk
        complete = True
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    client.writer.close()
    data = re.findall(rb"(?m)^data: (.*)$", body)
    return [event.decode() if event == b"[DONE]" else json.loads(event) for event in data], complete


def numbers(first: int, last: int) -> list[Any]:
    return [{"n": number} for number in range(first, last)]


WHOLE = ([*numbers(0, EVENTS), "[DONE]"], True)


def error(events: Sequence[Any], code: str = "engine_error") -> str:
    problem = events[-1]["error"]
    assert problem["code"] == code
    return str(problem["message"])


def resumes(stage: Stage) -> list[dict[str, Any]]:
    found = [
        request for mock in stage.mocks for request in mock.requests if "/replica/resume" in request.start
    ]
    return [json.loads(request.body) for request in found]


def test_wherever_a_stream_breaks_its_client_gets_every_event_once() -> None:
    ends = [0]
    for data in WRITES:
        ends.append(ends[-1] + len(data))
    # What the next stream consists of.
    broken: list[bytes] = []

    async def handler(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start:
            go_on(request, peer)
            return
        begin(peer)
        if broken:
            peer.send(broken.pop())
            await die(peer)
        else:
            peer.send(STREAM)
            peer.end_stream()

    async def main() -> None:
        async with staged(handler, handler) as stage:
            for cut in range(len(STREAM)):
                broken.append(STREAM[:cut])
                for mock in stage.mocks:
                    mock.requests.clear()
                stage.metrics.retries.clear()
                assert await answer(stage) == WHOLE, cut
                check(stage, sum(end <= cut for end in ends) - 1)

    def check(stage: Stage, had: int) -> None:
        requests = [request for mock in stage.mocks for request in mock.requests]
        # Begun again.
        if had == 0:
            assert [request.body for request in requests] == [BODY] * 2
            return
        [asked] = resumes(stage)
        assert asked["state"].count("\n") == had
        assert asked["path"] == "/v1/completions"
        assert (asked["exact"], asked["body"]) == (True, json.loads(BODY))
        assert asked["lost"] == f"replica-{int('resume' in stage.mocks[0].requests[0].start)}"
        assert stage.metrics.retries["resumed"] == 1
        assert stage.metrics.cut_responses == {}

    run(main)


async def test_a_stream_of_which_only_the_end_of_the_response_is_missing_is_ended() -> None:
    async with staged(*[losing(STREAM)] * 2) as stage:
        assert await answer(stage) == WHOLE
        assert resumes(stage) == []
        assert await answer(stage) == WHOLE


async def test_what_came_of_the_end_of_a_lost_response_is_not_written_behind_the_end() -> None:
    end = b"0\r\n\r\n"

    async with staged(*[losing(STREAM + end[:cut]) for cut in range(1, len(end))]) as stage:
        for _ in stage.mocks:
            client = await stage.connect()
            client.send(post(BODY))
            head = await read_head(client.reader)
            while await read_chunk(client.reader):
                pass
            client.send(post(BODY))
            again = await read_head(client.reader)
            assert (again.start, again.status) == (head.start, 200), "the next response begins at once"
            client.writer.close()
        assert resumes(stage) == []


async def test_the_request_is_sent_on_as_it_came() -> None:
    async with staged(*[losing(WRITES[0])] * 2, replica_token="secret") as stage:
        forged = "x-midstream-boot: b2\r\nx-midstream-resumable: 9\r\nx-midstream-placed: 1\r\nx-request-id: r7\r\n"
        assert await answer(stage, SESSION + forged) == WHOLE
        lost, other = (mock.requests[0] for mock in stage.mocks)
        if "resume" in lost.start:
            lost, other = other, lost
        assert lost.headers["x-midstream-resumable"] == "1"
        assert "x-midstream-resumable" not in other.headers
        boots = {one.headers["x-midstream-boot"] for one in (lost, other)}
        assert boots == {"boot of replica-0", "boot of replica-1"}, "each is asked for its own"
        for name in ("x-request-id", "x-midstream-token", "x-midstream-session"):
            assert other.headers[name] == lost.headers[name]
        assert other.body.endswith(b',"body":' + BODY + b"}")
        assert int(other.headers["x-midstream-placed"]) > int(lost.headers["x-midstream-placed"])


async def test_a_session_lives_where_its_stream_was_resumed() -> None:
    async with staged(*[losing(WRITES[0])] * 3) as stage:
        assert await answer(stage, SESSION) == WHOLE
        [asked] = resumes(stage)
        [there] = [i for i, mock in enumerate(stage.mocks) if any("resume" in r.start for r in mock.requests)]
        assert f"replica-{there}" != asked["lost"]
        client = await stage.connect()
        client.send(post(BODY, headers=SESSION))
        head = await read_head(client.reader)
        assert head.headers["x-midstream-replica"] == f"replica-{there}"
        assert head.headers["x-midstream-route-reason"] == "sticky"


async def test_one_that_refuses_is_followed_by_the_next_and_the_last_reason_is_told() -> None:
    async with staged(*[troubled(refuse)] * 3) as stage:
        assert await answer(stage) == WHOLE
        assert len(resumes(stage)) == 2
    async with staged(*[troubled(refuse, 9)] * 2) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 2), False)
        assert error(events) == (
            "replica-0 failed in the middle of the response and no other replica could continue it: not here"
        )
        assert sum(stage.metrics.cut_responses.values()) == 1


async def test_a_stream_is_shown_to_no_third_replica_but_an_unreachable_one_does_not_count() -> None:
    async with staged(*[troubled(reset)] * 3) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 2), False)
        assert error(events, "request_lost_replicas").startswith("replicas were lost while they")
        assert sum(len(mock.requests) for mock in stage.mocks) == 2
    async with staged(*[losing(WRITES[0])] * 4) as stage:
        for mock in stage.mocks[1:3]:
            mock.stop()
        assert await answer(stage) == WHOLE
        assert [len(mock.requests) for mock in stage.mocks] == [1, 0, 0, 1]


@pytest.mark.parametrize("inside", [True, False])
async def test_a_stream_that_is_lost_again_after_it_was_resumed_is_seen_to_be_short(inside: bool) -> None:
    async def dying(request: Message, peer: Peer) -> None:
        if "resume" in request.start:
            begin(peer, "")
            peer.chunk(b'data: {"n":1}\n\n')
            peer.send(b"10\r\ndata:" if inside else b"")
            await die(peer)
        else:
            await losing(WRITES[0])(request, peer)

    async with staged(dying, dying, dying) as stage:
        events, complete = await answer(stage)
        assert (events[:2], complete) == (numbers(0, 2), False)
        if not inside:
            assert "replicas were lost" in error(events, "request_lost_replicas")
        assert len(resumes(stage)) == 1


async def test_a_pooled_connection_that_went_stale_is_no_loss() -> None:
    calls: list[str] = []

    async def handler(request: Message, peer: Peer) -> None:
        calls.append(request.start.split()[1])
        if calls[-1] == "/replica/resume" and calls.count(calls[-1]) == 1:
            # As an idle connection is lost just when it is used.
            peer.abort()
        elif calls[-1] == "/replica/resume":
            go_on(request, peer)
        elif request.body == b"{}":
            peer.respond()
        else:
            await losing(WRITES[0])(request, peer)

    async with staged(handler, handler) as stage:
        for _ in range(2):
            assert (await stage.ask(post())).status == 200
        assert await answer(stage) == WHOLE
        assert stage.metrics.retries["stale_connection"] == 1


async def test_off_any_and_what_nobody_knows() -> None:
    async with staged(*[losing(WRITES[0])] * 2) as stage:
        events, complete = await answer(stage, "x-midstream-failover: off\r\n")
        assert (events[:-1], complete) == (numbers(0, 1), False)
        assert error(events) == "replica-0 failed in the middle of the response"
        assert "x-midstream-resumable" not in stage.mocks[0].requests[0].headers
        assert await answer(stage, "X-Midstream-Failover: Any\r\n") == WHOLE
        assert [asked["exact"] for asked in resumes(stage)] == [False]
        refused = await stage.ask(post(BODY, headers="x-midstream-failover: maybe\r\n"))
        assert (refused.status, refused.error["param"]) == (400, "x-midstream-failover")
        await stage.ask(post(b"{}", path="/health", headers="x-midstream-failover: maybe\r\n"))


async def test_only_replicas_of_the_streams_snapshot_are_asked_unless_any_will_do() -> None:
    async with staged(*[losing(WRITES[0])] * 3) as stage:
        for view in stage.views[1:]:
            assert view.report is not None
            view.report = changed(view.report, snapshot="step-2")
        events, _ = await answer(stage)
        assert error(events).endswith("no other replica serves snapshot 'base' now")
        assert resumes(stage) == []
        assert (await answer(stage, "x-midstream-failover: any\r\n"))[1]
    swapped = framed(b': m {"c":0,"t":[1],"s":"b","kv":[["base",0,4],["b",4,5]]}\n\ndata: {"n":1}\n\n')
    async with staged(*[losing(WRITES[0] + swapped)] * 2) as stage:
        events, _ = await answer(stage)
        assert "swap" in error(events)
        assert resumes(stage) == []


async def test_a_replica_that_falls_silent_is_given_up_and_its_stream_goes_on() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        if "resume" in request.start:
            go_on(request, peer)
        else:
            begin(peer)
            peer.send(WRITES[0] + WRITES[1][:-3])
            # Which is how a stopped process looks.
            await peer.closed()

    async with staged(handler, handler, unreachable_s=0.0) as stage:
        asked = asyncio.create_task(answer(stage))
        await stage.mocks[0].asked(1)
        [request] = stage.gateway.proxy.upstream(stage.views[0].replica).requests
        # Turns of the loop.
        for _ in range(1000):
            if request.answered:
                break
            await asyncio.sleep(0)
        request.give_up("nothing was heard of it")
        assert await asked == WHOLE


async def test_a_client_that_leaves_while_its_stream_is_resumed_leaves_the_other_replica_too() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start:
            asked.set()
            await peer.closed()
            left.set()
        else:
            await losing(WRITES[0])(request, peer)

    async with staged(*[handler] * 3) as stage:
        client = await stage.connect()
        client.send(post(BODY, headers=SESSION))
        await asked.wait()
        client.abort()
        await left.wait()
        assert stage.in_flight() == [0, 0, 0]
        assert sum(len(mock.requests) for mock in stage.mocks) == 2, "the third is not asked"


async def test_a_reset_between_two_reads_of_the_client_costs_no_event() -> None:
    had = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        if "resume" in request.start:
            go_on(request, peer)
            return
        begin(peer)
        peer.send(WRITES[0] + WRITES[1] + WRITES[2][:7])
        await had.wait()
        peer.abort()

    async with staged(handler, handler) as stage:
        client = await stage.connect()
        client.send(post(BODY))
        await read_head(client.reader)
        got = [await read_chunk(client.reader) for _ in range(2)]
        assert got == [write(0), write(1)]
        had.set()
        while got[-1]:
            got.append(await read_chunk(client.reader))
        assert b"".join(got[2:]) == b"".join(b'data: {"n":%d}\n\n' % n for n in range(2, EVENTS)) + DONE
        [asked] = resumes(stage)
        assert asked["state"].endswith("\n0:101")


async def test_the_clients_connection_serves_on_after_a_stream_was_resumed() -> None:
    async with staged(*[losing(WRITES[0] + WRITES[1][:5])] * 2) as stage:
        client = await stage.connect()
        for _ in range(3):
            client.send(post(BODY))
            message = await client.message()
            assert re.findall(rb"(?m)^data: (.*)$", message.body) == [
                *(b'{"n":%d}' % n for n in range(EVENTS)), b"[DONE]",
            ]  # fmt: skip
        assert stage.metrics.retries["resumed"] == 3


async def test_a_slow_replica_keeps_its_stream() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        begin(peer)
        for byte in STREAM:
            peer.send(bytes([byte]))
            await asyncio.sleep(0)
        peer.end_stream()

    async with staged(handler, handler) as stage:
        assert await answer(stage) == WHOLE
        assert stage.metrics.retries == {}
        assert sum(len(mock.requests) for mock in stage.mocks) == 1


async def test_streams_that_tell_nothing_and_plain_responses_are_as_before() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        begin(peer, "")
        peer.chunk(b'data: {"n":0}\n\n')
        await die(peer)

    async with staged(handler, handler) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 1), False)
        assert error(events) == "replica-0 failed in the middle of the response"
        assert resumes(stage) == []


def test_what_passes_is_whole_chunks_and_what_they_tell_is_kept() -> None:
    for step in (1, 3, 7, 50, len(STREAM)):
        passed, out = ResumeLog(), b""
        data = STREAM + b"0\r\n\r\n"
        for at in range(0, len(data), step):
            new = passed.take(data[at : at + step])
            assert new.endswith(b"\r\n") or not new
            out += new
        assert out == data
        told = passed.lines()
        assert told is not None
        assert told.decode().split("\n")[::5] == [OPENING, "0:104"], step
        assert told.endswith(b"\n0:104\nend\n")


#: Of chunks: lines of the log, what looks like one, and ends of lines that only text has.
BYTES = (
    b"\n: m ",
    b"\n",
    b": m ",
    b": m",
    b"m 0:7",
    b"a\rb",
    b"\x0b\x0c\x1c\x85\xe2\x80\xa8",
    b"\\n: m x",
    b"0",
)


@given(st.lists(st.lists(st.sampled_from(BYTES), max_size=12), max_size=8), st.integers(1, 40))
def test_the_lines_of_any_bytes_are_those_that_an_expression_finds(
    bodies: list[list[bytes]], step: int
) -> None:
    data = b"".join(framed(b"".join(body) + b"\n\n") for body in bodies)
    for gathered in (0, 30, GATHERED_BYTES_MAX):
        with patch("midstream.proxy.resume.GATHERED_BYTES_MAX", gathered):
            passed = ResumeLog()
            out = b"".join(passed.take(data[at : at + step]) for at in range(0, len(data), step))
            assert passed.lines() == b"".join(line + b"\n" for line in re.findall(rb"\n: m (.*)", out))
            assert out == data


def test_a_long_stream_is_kept_by_what_it_tells_only() -> None:
    passed = ResumeLog()
    passed.take(WRITES[0])
    event = framed(b": m 0:7\n\ndata: " + b"x" * 500 + b"\n\n")
    for _ in range(1000):
        assert passed.take(event) == event
        assert passed._size <= GATHERED_BYTES_MAX + len(event)
    told = passed.lines()
    assert told is not None
    assert told.count(b"\n0:7") == 1000


def test_an_event_too_long_to_hold_passes_and_is_not_resumable() -> None:
    passed = ResumeLog()
    long = b"%x\r\n" % (2 * UNFINISHED_BYTES_MAX) + b"x" * (UNFINISHED_BYTES_MAX + 1)
    assert passed.take(WRITES[0] + long[:9]) == WRITES[0]
    assert passed.take(long[9:]) == long
    assert passed.take(b"more") == b"more"
    assert passed.rest() == b"", "nothing comes twice"
    assert passed.lines() is None


def test_what_a_stream_tells_is_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.proxy.resume.LINES_BYTES_MAX", 1000)
    passed = ResumeLog()
    event = framed(b": m 0:7\n\ndata: " + b"x" * 500 + b"\n\n")
    for _ in range(500):
        assert passed.take(event) == event
    assert passed.lines() is None
    assert passed.take(event[:-1]) == b"", "the client has whole events all the same"


@pytest.mark.parametrize("mode", ["exact", "any"])
@pytest.mark.parametrize("there", ["base", "v1", "v1 beside base"])
async def test_a_stream_that_is_pinned_goes_on_only_where_its_snapshot_serves_or_stays(
    mode: str, there: str
) -> None:
    placed = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        await placed.wait()
        await losing(WRITES[0] + WRITES[1])(request, peer)

    async with staged(handler, handler) as stage:
        second = stage.views[1].report
        assert second is not None
        constraint = f"x-midstream-snapshot: base\r\nx-midstream-failover: {mode}\r\n"
        stage.views[1].report = changed(second, snapshot="elsewhere")
        client = asyncio.create_task(answer(stage, constraint + "x-midstream-min-snapshot: base\r\n"))
        await stage.mocks[0].asked(1)
        serving, _, resident = there.partition(" beside ")
        stays = tuple(resident.split())
        stage.views[1].report = changed(second, snapshot=serving, resident=stays)
        placed.set()
        events, complete = await client
        if there != "v1":
            assert (events, complete) == WHOLE
            (resume,) = [r for r in stage.mocks[1].requests if "/replica/resume" in r.start]
            told = json.loads(resume.headers["x-midstream-admitted"])
            assert told == {"snapshot": "base", "pinned": True, "body": True}
        else:
            assert (events[:2], complete) == (numbers(0, 2), False)
            assert "no other replica could continue it" in error(events)
            assert resumes(stage) == []


OVER = f': m {OPENING}\n: m {{"c":0,"t":[9],"s":"v1","kv":[["v1",0,4]],"over":true}}\n\ndata: {{"n":0}}\n\n'.encode()


@pytest.mark.parametrize("there", ["base", "v1"])
@pytest.mark.parametrize("came", [WRITES[0][:9], framed(OVER)], ids=["no event", "only what is over"])
async def test_a_stream_with_nothing_computed_of_what_is_left_is_judged_anew(came: bytes, there: str) -> None:
    placed = asyncio.Event()

    async def broken(request: Message, peer: Peer) -> None:
        await placed.wait()
        begin(peer)
        peer.send(came)
        await die(peer)

    async with staged(broken, losing(b"", times=0)) as stage:
        stage.gateway.proxy.deployments.default.order.learn([Signalled("v1", 1, True)])
        first, second = (view.report for view in stage.views)
        assert first is not None
        assert second is not None
        stage.views[0].report = changed(first, snapshot="v1")
        constraint = "x-midstream-min-snapshot: v1\r\nx-midstream-snapshot-wait: 0\r\n"
        client = asyncio.create_task(answer(stage, constraint))
        await stage.mocks[0].asked(1)
        stage.views[1].report = changed(second, snapshot=there)
        placed.set()
        events, complete = await client
        if there == "v1":
            assert (events, complete) == WHOLE
            told = json.loads(stage.mocks[1].requests[0].headers["x-midstream-admitted"])
            assert told["snapshot"] == "v1"
        else:
            assert (events[:-1], complete) == (numbers(0, came.count(b"data")), False)
            assert "no replica can take the request now" in error(events)
            assert stage.mocks[1].requests == []
