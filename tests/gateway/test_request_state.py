"""The way of a request: the table by itself, and the one class that drives it, in any order of what replicas and clients do."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from diagrams import mermaid, rulings_table
from gateway_harness import NAMES, reconciler
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reports import replica_report

from midstream.core.config import GatewaySettings
from midstream.core.errors import HEADER_ANOTHER_BOOT, HEADER_LOST, HEADER_NOT_LOADED
from midstream.core.table import IllegalMove
from midstream.core.wires import WirePath
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http.message import Request
from midstream.http.upstream import UpstreamHead
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.proxy import Pools, Proxy
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.request import ProxiedRequest
from midstream.proxy.request_state import (
    ANSWERED,
    AT_UPSTREAM,
    MAY_PASS,
    MOVES,
    RULINGS,
    SEEN,
    RequestAction,
    RequestEvent,
    RequestPhase,
    Ruling,
)

DIAGRAM = Path(__file__).parents[2] / "docs" / "state-machines.md"


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    assert mermaid(MOVES) in DIAGRAM.read_text()
    assert len(mermaid(MOVES).splitlines()) == len(MOVES) + 2
    assert rulings_table() in DIAGRAM.read_text()


def test_every_reason_of_a_refusal_is_a_move_of_both_phases_that_can_hear_it() -> None:
    sent = {RequestPhase.SENT: RequestPhase.HELD, RequestPhase.RESUME_SENT: RequestPhase.RESUME_HELD}
    heard = {(at, event) for at, event in MOVES if event in RULINGS}
    assert {at for at, _ in heard} == set(sent)
    for (at, held), (reason, rulings) in itertools.product(sent.items(), RULINGS.items()):
        ruling = rulings[at is RequestPhase.RESUME_SENT]
        if ruling is None:
            assert (at, reason) == (RequestPhase.SENT, RequestEvent.CANNOT_RESUME), (
                "every other reason can be heard"
            )
            with pytest.raises(IllegalMove):
                MOVES.move(at, reason)
        elif ruling is Ruling.LAST_WORD:
            assert at is RequestPhase.SENT
            assert MOVES[at, reason] == (RequestPhase.PASSING, RequestAction.PASS_HEAD)
        else:
            assert MOVES[at, reason] == (held, RequestAction.HOLD)
            passes = at is RequestPhase.SENT and ruling in MAY_PASS
            assert passes or ruling not in MAY_PASS, "no refusal is the rest of a stream"
            for event in (RequestEvent.ELSEWHERE, RequestEvent.FAILED, RequestEvent.CLIENT_GONE):
                assert (held, event) in MOVES


def test_an_upstream_has_seen_the_request_from_the_moment_it_was_sent() -> None:
    """Also while another connection is opened for it."""
    for (at, event), (to, action) in MOVES.items():
        if action is RequestAction.SEND or (
            at in SEEN and to in AT_UPSTREAM and event is not RequestEvent.ELSEWHERE
        ):
            assert to in SEEN
        assert (to in SEEN) <= (at in SEEN or action is RequestAction.SEND)


def test_whatever_happens_a_request_can_end_and_has_one_response() -> None:
    after: dict[RequestPhase, set[RequestPhase]] = {
        phase: {to for (at, _), (to, _) in MOVES.items() if at is phase} for phase in RequestPhase
    }
    seen, frontier = {RequestPhase.PLACING}, [RequestPhase.PLACING]
    while frontier:
        frontier = [to for at in frontier for to in after[at] - seen]
        seen |= set(frontier)
    assert seen == set(RequestPhase), "every phase is reached"
    assert not after[RequestPhase.OVER]
    for phase in set(RequestPhase) - {RequestPhase.OVER}:
        for event in (RequestEvent.FAILED, RequestEvent.CLIENT_GONE):
            assert MOVES[phase, event][0] is RequestPhase.OVER
    for (at, _), (to, action) in MOVES.items():
        assert not (at in ANSWERED and to not in ANSWERED and to is not RequestPhase.OVER), (
            "an answer is not taken back"
        )
        assert (action is RequestAction.PASS_HEAD) == (at not in ANSWERED and to is RequestPhase.PASSING)
        assert (action is RequestAction.ANSWER_ERROR) <= (at not in ANSWERED)
        assert (action is RequestAction.SEND) <= (at in AT_UPSTREAM)


def test_a_move_that_the_table_does_not_have_raises() -> None:
    with pytest.raises(IllegalMove, match="'end' at 'placing'"):
        MOVES[RequestPhase.PLACING, RequestEvent.END]


# -- the class that drives it

EVENTS = 4
RESUMABLE = [
    (b"content-type", b"text/event-stream"),
    (b"transfer-encoding", b"chunked"),
    (b"x-midstream-resumable", b"1"),
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int) -> bytes:
    """One write of a stream that tells of itself; the last one is its end."""
    if number == EVENTS:
        return chunk(b": m end\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"
    opening = '{"id":"x","created":1,"seed":7,"prompts":"d"}\n: m {"c":0,"t":[100],"s":"base"}'
    return chunk(f": m {opening if not number else f'0:{number}'}\n\ndata: {number}\n\n".encode())


def head_of(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> UpstreamHead:
    return UpstreamHead(status, b"A reason", list(headers), dict(headers), body)


class FakeConnection:
    """One upstream connection: what was sent over it, and how far its answer is."""

    malformed = False

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.sink: Any = None
        self.sent = b""
        self.answering = self.in_chunk = False
        #: The events of the stream that are still to come.
        self.left = b""

    def __repr__(self) -> str:
        return f"FakeConnection({self.pool.url}, answering={self.answering}, left={len(self.left)})"

    def send(self, sink: Any, head: bytes, body: bytes, *, head_request: bool) -> None:
        self.sink, self.sent, self.left, self.answering = sink, head + b"\n" + body, b"", False
        self.take_body: Any = sink.response_body

    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def abandon(self) -> None:
        self.sink = None

    def lose(self) -> None:
        sink, self.sink = self.sink, None
        sink.upstream_lost("connection lost", answered=self.answering)

    def end(self) -> None:
        sink, self.sink = self.sink, None
        self.pool.idle.append(self)
        sink.response_end()

    @property
    def resumes(self) -> int | None:
        """How many events the client has, as the request says; None: it is not one to go on."""
        if b"/replica/resume" not in self.sent:
            return None
        state = json.loads(self.sent.partition(b"\r\n\r\n")[2])["state"]
        return len(state.split("\n")) - 1


class FakePool:
    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[FakeConnection] = []
        self.used: list[FakeConnection] = []
        self.refuses = False

    def take(self) -> FakeConnection | None:
        return self.idle.pop() if self.idle else None

    async def open(self, *, decode: bool = False) -> FakeConnection:
        if self.refuses:
            raise ConnectionRefusedError(111, "Connection refused")
        self.used.append(FakeConnection(self))
        return self.used[-1]

    def close(self) -> None: ...


class FakeClient:
    writable = True
    closes_after_response = False

    def __init__(self) -> None:
        self.got = b""
        self.endings: list[str] = []

    def write(self, data: bytes) -> None:
        assert not self.endings, "nothing follows the end"
        self.got += data

    def finish(self, *, close: bool = False) -> None:
        self.endings.append("whole")

    def end_short(self, last: bytes = b"") -> None:
        self.write(last)
        self.endings.append("short")

    def reset(self) -> None:
        self.endings.append("reset")


class Requests(RuleBasedStateMachine):
    """Three replicas behind one proxy; connections and clients are fakes, all else is what serves."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.requests: list[tuple[ProxiedRequest, FakeClient]] = []
        self.pools: dict[str, FakePool] = {}

    def teardown(self) -> None:
        for request, client in self.requests:
            if not client.endings:
                self.happens(request.client_gone)
                client.endings.append("gone")
        self.what_is_over_is_nowhere()
        assert [view.replica.in_flight for view in self.replicas.views] == [0, 0, 0]
        assert self.replicas.waiting == 0
        self.loop.close()

    def happens(self, action: Callable[[], object]) -> None:
        """In the loop; what is due after it runs, too."""

        async def play() -> None:
            action()
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(play())

    def pool(self, url: str) -> FakePool:
        return self.pools.setdefault(url, FakePool(url))

    @initialize()
    def start(self) -> None:
        async def build() -> None:
            self.replicas = ReplicaSet(
                DeploymentReplicas([(f"replica-{i}", f"http://127.0.0.{i + 1}:1") for i in range(3)])
            )
            for view in self.replicas.views:
                view.replica.hear(replica_report(replica=view.name, boot=f"b1 of {view.name}", ready=True))
                view.admitted = True
            deployments = Deployments(Deployment(NAMES, self.replicas, reconciler(self.replicas)))
            pools = Pools(cast(Any, self.pool), cast(Any, FakePool("control")))
            self.proxy = Proxy(GatewaySettings(), deployments, GatewayMetrics(deployments), pools)

        self.loop.run_until_complete(build())

    def busy(self) -> list[FakeConnection]:
        """Connections with a request on them."""
        return [one for pool in self.pools.values() for one in pool.used if one.sink is not None]

    def quiet(self) -> list[FakeConnection]:
        return [one for one in self.busy() if not one.answering]

    def streaming(self) -> list[FakeConnection]:
        return [one for one in self.busy() if one.answering]

    @precondition(lambda self: len(self.requests) < 4)
    @rule(key=st.sampled_from([None, "a", "b"]))
    def ask(self, key: str | None) -> None:
        headers = [(b"host", b"t"), *([(b"x-session-id", key.encode())] if key else [])]
        body = b'{"number":%d}' % len(self.requests)
        asked = Request(b"POST", b"/v1/completions", headers, dict(headers), body, False, True)
        client = FakeClient()

        route = ReplicaRoute(self.proxy, asked, WirePath("completions", "Completes."))
        request = ProxiedRequest(self.proxy, asked, cast(Any, client), route)
        self.requests.append((request, client))
        self.happens(request.start)

    @precondition(lambda self: self.quiet())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(self.quiet()))
        begins = connection.resumes or 0
        whole = b"".join(event(number) for number in range(begins, EVENTS + 1))
        cut = data.draw(st.integers(0, len(whole)))
        connection.answering, connection.left = True, whole[cut:]
        headers = RESUMABLE[:2] if connection.resumes is not None else RESUMABLE
        self.happens(lambda: connection.sink.response_head(head_of(200, headers, whole[:cut])))
        if not connection.left:
            self.happens(connection.end)

    @precondition(lambda self: self.streaming())
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(self.streaming()))
        cut = data.draw(st.integers(1, max(1, len(connection.left))))
        part, connection.left = connection.left[:cut], connection.left[cut:]
        if part:
            self.happens(lambda: connection.take_body(part))
        if not connection.left:
            self.happens(connection.end)

    @precondition(lambda self: self.quiet())
    @rule(
        data=st.data(),
        status=st.sampled_from([400, 425, 429, 503]),
        size=st.sampled_from([10, 70_000]),
        word=st.sampled_from([None, HEADER_LOST, HEADER_ANOTHER_BOOT, HEADER_NOT_LOADED]),
    )
    def refuse(self, data: st.DataObject, status: int, size: int, word: str | None) -> None:
        connection = data.draw(st.sampled_from(self.quiet()))
        connection.answering = True
        body = b'{"error":{"message":"' + b"x" * size + b'"}}'
        headers = [(b"content-length", b"%d" % len(body)), *([(word.encode(), b"1")] if word else [])]
        self.happens(lambda: connection.sink.response_head(head_of(status, headers, b"")))
        self.happens(lambda: connection.take_body(body))
        self.happens(connection.end)

    @precondition(lambda self: self.quiet())
    @rule(data=st.data(), serving=st.sampled_from(["base", "other"]))
    def refuse_for_its_version(self, data: st.DataObject, serving: str) -> None:
        connection = data.draw(st.sampled_from(self.quiet()))
        connection.answering = True
        said = json.dumps({"serving": serving, "constraint": {"snapshot": "base"}}).encode()
        self.happens(
            lambda: connection.sink.response_head(head_of(409, [(b"x-midstream-refused", said)], b"{}"))
        )
        self.happens(connection.end)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.happens(data.draw(st.sampled_from(self.busy())).lose)

    @rule(number=st.integers(0, 2))
    def fall_silent(self, number: int) -> None:
        view = self.replicas.views[number]
        upstream = self.proxy.upstreams.get(view.replica)
        here = set() if upstream is None else upstream.requests
        together = [request for request, _ in self.requests if request in here]
        for request in together:
            self.happens(partial(request.give_up, "nothing was heard of it", together))

    @rule(number=st.integers(0, 2), boot=st.sampled_from(["b1", "b2", None]))
    def report(self, number: int, boot: str | None) -> None:
        view = self.replicas.views[number]
        view.replica.suspended, view.replica.failures = False, 0
        report = replica_report(view.name, f"{boot} of {view.name}") if boot else None

        def admitted_again() -> None:
            view.replica.hear(report)
            view.admitted = True

        self.happens(admitted_again)

    @rule(number=st.integers(0, 2), refuses=st.booleans())
    def listen(self, number: int, refuses: bool) -> None:
        self.pool(self.replicas.views[number].url).refuses = refuses

    @precondition(lambda self: any(not client.endings for _, client in self.requests))
    @rule(data=st.data(), leaves=st.booleans())
    def end_one(self, data: st.DataObject, leaves: bool) -> None:
        request, client = data.draw(st.sampled_from([pair for pair in self.requests if not pair[1].endings]))
        if leaves:
            self.happens(request.client_gone)
            client.endings.append("gone")
        else:
            self.happens(lambda: request.cut("the gateway is shutting down"))

    @invariant()
    def a_client_gets_its_own_events_once_and_in_order(self) -> None:
        for _, client in self.requests:
            assert len(client.endings) <= 1
            numbers = [int(n) for n in re.findall(rb"data: (\d)\n", client.got)]
            assert numbers == list(range(len(numbers)))
            assert client.got.count(b"HTTP/1.1 ") <= 1
            if client.endings == ["whole"] and b"[DONE]" not in client.got:
                assert b"HTTP/1.1 200" not in client.got, "a short stream is not taken for a whole one"
            if b"[DONE]" in client.got:
                assert numbers == list(range(EVENTS))
            if client.endings and b"HTTP/1.1 200" not in client.got and client.endings != ["gone"]:
                assert re.match(rb"HTTP/1\.1 [45]\d\d ", client.got), "who got no answer got an error"

    @invariant()
    def what_is_over_is_nowhere(self) -> None:
        if not hasattr(self, "replicas"):
            return
        here = Counter(
            replica.name for replica, upstream in self.proxy.upstreams.items() for _ in upstream.requests
        )
        for view in self.replicas.views:
            assert view.replica.in_flight == here[view.name]
        alive = sum(not client.endings for _, client in self.requests)
        assert sum(here.values()) + self.replicas.waiting <= alive
        assert len(self.busy()) <= alive


TestRequests = Requests.TestCase
TestRequests.settings = settings(deadline=None, stateful_step_count=30)
