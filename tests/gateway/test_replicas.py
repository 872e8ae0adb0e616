"""ReplicaSet against real sockets: a small server that speaks the replica's event stream."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from gateway_harness import run
from msgspec.structs import replace
from reports import replica_report

from midstream.core.errors import ReplicaUnavailable
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.retry import Backoff
from midstream.core.types import Desired, EngineStats
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas


class EventServer:
    """Serves /replica/events from `send`, and /replica/desired with `desired_status`."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.desired: list[Desired] = []
        self.desired_status = 202
        self.heads: list[bytes] = []
        self.connected = asyncio.Event()

    async def __aenter__(self) -> "EventServer":
        await self.listen(0)
        return self

    async def listen(self, port: int) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.drop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET /replica/events "):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            self.writers.append(writer)
            self.connected.set()
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.desired.append(msgspec.json.decode(await reader.readexactly(length), type=Desired))
        writer.write(f"HTTP/1.1 {self.desired_status} X\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        writer.close()

    def send(self, *reports: ReplicaReport, cut: int | None = None) -> None:
        data = b"".join(msgspec.json.encode(report) + b"\n" for report in reports)
        for part in (data,) if cut is None else (data[:cut], data[cut:]):
            self.writers[-1].write(b"%x\r\n%b\r\n" % (len(part), part))

    def drop(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        self.connected.clear()


def report(**changes: Any) -> ReplicaReport:
    return replica_report(**{"boot": "b1"} | changes)


class Watched:
    """A running ReplicaSet over one EventServer, and a way to wait for what it says."""

    def __init__(self, server: EventServer, **options: Any) -> None:
        self.set = ReplicaSet(
            DeploymentReplicas([("replica-0", f"http://127.0.0.1:{server.port}")], **options)
        )
        self.view = self.set.views[0]
        self.calls = 0
        self._changed = asyncio.Event()
        self.set.subscribe(self._on_change)

    def _on_change(self) -> None:
        self.calls += 1
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> "Watched":
        self.task = asyncio.create_task(self.set.facts.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_reports_arrive_whole_whatever_the_chunking() -> None:
    async with EventServer() as server, Watched(server) as watched:
        await server.connected.wait()
        server.send(report(snapshot="s1"), cut=17)
        await watched.until(lambda: watched.view.replica.heard == report(snapshot="s1"))
        assert repr(watched.set) == "ReplicaSet(1 replicas, 1 reachable, 0 usable)"
        watched.view.admitted = True
        assert watched.view.usable
        server.send(report(ready=False))
        await watched.until(lambda: watched.view.replica.heard == report(ready=False))
        assert not watched.view.usable


async def test_a_replica_with_a_host_of_any_script_holds_up_no_other() -> None:
    async with EventServer() as server:
        replicas = ReplicaSet(
            DeploymentReplicas(
                [("away", "http://ж.invalid:8080"), ("here", f"http://127.0.0.1:{server.port}")]
            )
        )
        hearing = asyncio.create_task(replicas.facts.run())
        connected = asyncio.create_task(server.connected.wait())
        await asyncio.wait({hearing, connected}, return_when=asyncio.FIRST_COMPLETED)
        assert not hearing.done(), hearing.exception()
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


async def test_many_reports_in_one_read_notify_once_with_the_last() -> None:
    async with EventServer() as server, Watched(server) as watched:
        await server.connected.wait()
        server.send(*(report(in_flight=n) for n in range(5)), report(in_flight=4))
        await watched.until(lambda: watched.view.replica.heard == report(in_flight=4))
        assert watched.calls == 1


async def test_who_waits_for_what_is_served_is_not_woken_by_every_report() -> None:
    async with EventServer() as server, Watched(server) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        woken: list[str] = []
        watched.set.wait(lambda: woken.append("snapshot"), any_report=False)
        for n in (1, 2):
            watched.set.wait(lambda n=n: woken.append(f"report {n}"))  # type: ignore[misc]
            server.send(report(in_flight=n))
            await watched.until(lambda n=n: len(woken) == n)  # type: ignore[misc]
        assert (woken, watched.set.waiting) == (["report 1", "report 2"], 1)
        watched.set.wait(lambda: woken.append("report 3"))
        server.send(report(in_flight=2, target="s2", stage="staged"))
        await watched.until(lambda: len(woken) == 4)
        assert (set(woken[2:]), watched.set.waiting) == ({"report 3", "snapshot"}, 0)
        left = lambda: woken.append("left")  # noqa: E731
        watched.set.wait(left, any_report=False)
        watched.set.wait_no_more(left)
        assert watched.set.waiting == 0


async def test_one_broken_connection_does_not_make_the_replica_unreachable() -> None:
    async with EventServer() as server, Watched(server, grace_s=1000.0) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        watched.view.admitted = True
        server.drop()
        await server.connected.wait()
        assert watched.view.usable
        server.send(report(snapshot="s1"))
        await watched.until(lambda: watched.view.replica.heard == report(snapshot="s1"))
        assert watched.view.usable
        assert watched.calls == 2, "nobody was told of a loss"


async def test_a_report_repeated_after_a_refusal_says_again_what_the_replica_holds() -> None:
    async with EventServer() as server, Watched(server) as watched:
        policy = ReplicaSet(watched.set.facts, "red", 5.0)
        policy.subscribe(watched._on_change)
        held = PolicyReport(policy="red", made=5.0, snapshot="red-1", generation=1)
        await server.connected.wait()
        server.send(report(policies=(held,)))
        await watched.until(lambda: policy.views[0].held)
        policy.mark_missing(policy.views[0])
        assert not policy.views[0].held
        # It is idle: its next report is the same, byte for byte.
        server.send(report(policies=(held,)))
        await watched.until(lambda: policy.views[0].held)


async def test_a_replica_that_refuses_the_reconnect_is_unreachable_and_comes_back_admitted() -> None:
    async with EventServer() as server, Watched(server, grace_s=1000.0) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        watched.view.admitted = True
        server.server.close()
        server.drop()
        await watched.until(lambda: watched.view.report is None)
        assert not watched.view.usable
        await server.listen(server.port)
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.usable)


async def test_a_report_outlives_its_broken_stream_only_for_the_grace_period() -> None:
    async with EventServer() as server, Watched(server, grace_s=0.1) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        server.drop()
        await watched.until(lambda: watched.view.report is None)
        # Connected again, but nothing was said.
        await server.connected.wait()


async def test_a_refused_data_connection_counts_only_when_the_event_stream_is_gone_too() -> None:
    never = Backoff(first_s=1000.0, last_s=1000.0)
    async with EventServer() as server, Watched(server, grace_s=1000.0, backoff=never) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        watched.set.refused(watched.view)
        assert watched.view.replica.heard == report()
        server.drop()
        [subscription] = watched.set.facts._subscriptions.values()
        assert subscription.stream is not None
        await asyncio.wait({subscription.stream.ended})
        assert watched.view.replica.heard == report()
        watched.set.refused(watched.view)
        assert watched.view.report is None


def test_the_token_goes_with_every_call_and_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with EventServer() as server, Watched(server, token="very-secret") as watched:
            await server.connected.wait()
            server.desired_status = 500
            with pytest.raises(ReplicaUnavailable) as raised:
                await watched.set.send_desired(watched.view, Desired(snapshot="s1", generation=1))
            assert [head.count(b"\r\nx-midstream-token: very-secret\r\n") for head in server.heads] == [1, 1]
            assert (
                "very-secret"
                not in f"{raised.value} {watched.set!r} {watched.view!r} {watched.set.facts._subscriptions!r}"
            )

    run(main)
    assert "very-secret" not in caplog.text


@pytest.mark.parametrize("token", ["two words", "a\r\nx-midstream-tenant: b", "\N{SNOWMAN}"])
def test_a_token_that_cannot_be_a_header_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as raised:
        ReplicaSet(DeploymentReplicas([], token=token))
    assert token not in str(raised.value)


async def test_a_new_boot_is_not_admitted() -> None:
    async with EventServer() as server, Watched(server) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        watched.view.admitted = True
        server.send(report(boot="b2"))
        await watched.until(lambda: watched.view.replica.heard == report(boot="b2"))
        assert not watched.view.admitted


async def test_a_silent_stream_counts_as_lost() -> None:
    async with EventServer() as server, Watched(server, silence_s=1.0) as watched:
        await server.connected.wait()
        busy = EngineStats(running=2, waiting=1)
        troubled: dict[str, object] = {"long_texts": 3, "stalled_s": 1.5, "engine_silent_s": 7}
        server.send(report(in_flight=4, engine=busy, **troubled))
        await watched.until(lambda: watched.view.report is not None)
        await watched.until(lambda: watched.view.report is None)
        assert watched.calls == 2
        assert watched.view.replica.last_words == (
            "when it was last heard: 4 requests on it, 2 running and 1 waiting in its engine, 3 long texts being read, "
            "its event loop had stood still for 1.5 s, its engine had been silent for 7 s"
        )
        watched.view.replica.hear(report())
        assert watched.view.replica.last_words == ""


WHOLE = msgspec.json.encode(report())
NO_REPORTS = (
    b"{not json}",
    WHOLE.replace(b"replica-0", b"replica-7"),
    # A number that no metric and no ledger takes.
    WHOLE.replace(b'"generation":0', b'"generation":' + b"9" * 400),
    WHOLE.replace(b'"steps":0', b'"steps":-1'),
    b'{"kind":"trajectories","measures":{"generation_seconds":{"counts":[1,2]}}}',
    b'{"kind":"trajectories","measures":{"cached_prompt_share":{"counts":[1,2,3,4,5,6,7,8,%s]}}}'
    % (b"9" * 400),
)


async def test_a_replica_is_told_of_others_only_for_what_was_pushed_and_first_of_those_that_serve_it() -> (
    None
):
    async with EventServer() as server:
        url = f"http://127.0.0.1:{server.port}"
        replicas = ReplicaSet(DeploymentReplicas([(f"r{i}", f"{url}/{i}") for i in range(4)]))
        for number, serves in ((0, "s0"), (1, "s0"), (2, "s1")):
            view = replicas.views[number]
            view.replica.hear(replica_report(replica=view.name, snapshot=serves, ready=True))
        listed = Desired(snapshot="s1", generation=3, url="file:///b/s1", fingerprint="0f")
        pushed = replace(listed, fingerprint="content:0f")
        above = replace(listed, parents=(pushed.files[0],), compression="arc_v2")
        for desired in (listed, pushed, above):
            with contextlib.suppress(ReplicaUnavailable):
                await replicas.send_desired(replicas.views[1], desired)
        assert [sent.peers for sent in server.desired] == [
            (),
            (f"{url}/2", f"{url}/0"),
            (f"{url}/2", f"{url}/0"),
        ]


@pytest.mark.parametrize("line", [line + b"\n" for line in NO_REPORTS], ids=range(len(NO_REPORTS)))
async def test_a_stream_that_is_not_this_replicas_is_not_believed(line: bytes) -> None:
    async with EventServer() as server, Watched(server, silence_s=60) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        server.writers[-1].write(b"%x\r\n%b\r\n" % (len(line), line))
        await watched.until(lambda: watched.view.report is None)


async def test_desired_is_delivered_and_a_refusal_is_an_error() -> None:
    async with EventServer() as server:
        replicas = ReplicaSet(DeploymentReplicas([("replica-0", f"http://127.0.0.1:{server.port}/")]))
        desired = Desired(snapshot="s1", generation=3, url="file:///b/s1")
        await replicas.send_desired(replicas.views[0], desired)
        assert server.desired == [desired]
        server.desired_status = 500
        with pytest.raises(ReplicaUnavailable, match="replica-0 answered 500"):
            await replicas.send_desired(replicas.views[0], desired)
    with pytest.raises(ReplicaUnavailable, match="replica-0"):
        await replicas.send_desired(replicas.views[0], desired)


async def test_a_replica_that_joins_is_heard_and_one_that_is_gone_is_not() -> None:
    async with EventServer() as server, EventServer() as other, Watched(server) as watched:
        await server.connected.wait()
        server.send(report())
        await watched.until(lambda: watched.view.report is not None)
        first = ("replica-0", watched.view.url)
        watched.set.facts.set_members([first, ("replica-1", f"http://127.0.0.1:{other.port}")])
        await other.connected.wait()
        other.send(report(replica="replica-1"))
        await watched.until(lambda: watched.set.views[1].report is not None)
        gone = watched.view
        watched.set.facts.set_members([("replica-1", watched.set.views[1].url)], {"replica-0"})
        assert (gone.report, gone.replica.standing) == (None, "gone")
        assert [(v.name, v.replica.index, v.report is None) for v in watched.set.views] == [
            ("replica-1", 0, False)
        ]
        # The data path may still say so.
        watched.set.refused(gone)
        watched.set.facts.set_members([("replica-1", watched.set.views[0].url)], {"replica-1"})
        assert watched.set.views == ()
        assert watched.set.leaving[0].report is not None, "one that leaves is still heard"
