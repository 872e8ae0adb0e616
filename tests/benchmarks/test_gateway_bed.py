"""The test bed of the routers: what the load generator counts is what the mock replicas served, and they are replicas."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from gateway import loads, tools
from gateway.routers import Midstream

from midstream.core.measures import Trajectories
from midstream.core.reports import ReplicaReport
from midstream.core.sessions import SessionsReport

pytestmark = pytest.mark.variant

MOCKS = 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bed")
    tools.build(folder)
    return folder


@pytest.fixture
def bed(built: Path) -> Iterator[tools.Bed]:
    with tools.Bed(built, MOCKS) as bed:
        yield bed


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return loads.write(tmp_path)


@pytest.mark.parametrize("body", ["1k", "64k", "ids"])
def test_the_load_counts_what_the_mocks_served(bed: tools.Bed, files: dict[str, Path], body: str) -> None:
    bed.begin(bed.ports[1], files[body], 8, "requests", 200)
    load = bed.end()
    assert (load["asked"], load["ok"], load["failed"], load["cut"]) == (200, 200, 0, 0)
    assert load["statuses"] == {"200": 200}
    assert [counts["requests"] for counts in bed.counts()] == [0, 200, 0]
    assert load["latency"]["count"] == 200


def test_a_rate_is_counted_like_any_load(bed: tools.Bed, files: dict[str, Path]) -> None:
    bed.begin(bed.ports[0], files["1k"], 4, "requests", 100, rate=20_000)
    assert bed.end()["ok"] == bed.total("requests") == 100


@pytest.mark.parametrize("interval_s", [0.0, 0.001])
def test_every_chunk_is_counted_once_on_both_sides(
    bed: tools.Bed, files: dict[str, Path], interval_s: float
) -> None:
    bed.pace(interval_s, 25)
    bed.begin(bed.ports[0], files["stream"], 8, "hold", 0)
    load = bed.end()
    assert (load["ok"], load["failed"]) == (8, 0)
    assert load["events"] == bed.total("chunks") == 8 * 25
    # Those of the time in which streams were opened are counted apart.
    assert load["opening_events"] + load["event_delay"]["count"] == 8 * 25
    assert bed.total("streams") == 0


def test_comments_of_a_stream_that_can_be_resumed_are_no_events(
    bed: tools.Bed, files: dict[str, Path], tmp_path: Path
) -> None:
    marked = tmp_path / "marked"
    marked.write_bytes(
        files["stream"].read_bytes().replace(b"\r\n\r\n", b"\r\nx-midstream-resumable: 1\r\n\r\n", 1)
    )
    bed.pace(0.0, 25)
    bed.begin(bed.ports[0], marked, 4, "hold", 0)
    load = bed.end()
    assert (load["ok"], load["events"], bed.total("resumable")) == (4, 100, 4)


def test_each_key_is_recorded_with_the_mock_that_answered_it(
    bed: tools.Bed, files: dict[str, Path], tmp_path: Path
) -> None:
    record = tmp_path / "record"
    bed.begin(bed.ports[2], files["1k"], 8, "requests", 90, keys=100, record=record)
    bed.end()
    assert record.read_text() == "2" * 90 + "-" * 10


def test_what_is_not_answered_with_200_is_a_failure(
    bed: tools.Bed, files: dict[str, Path], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(files["1k"].read_bytes().replace(b"/v1/chat/completions", b"/v1/chat/nothing", 1))
    bed.begin(bed.ports[0], wrong, 2, "requests", 10)
    load = bed.end()
    assert (load["ok"], load["failed"], load["statuses"]) == (0, 10, {"404": 10})


def test_a_stream_that_ends_without_its_end_is_a_failure(bed: tools.Bed, files: dict[str, Path]) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"t":1}\n\n'
    with _answering(head + b"%x\r\n%b\r\n" % (len(event), event)) as port:
        bed.begin(port, files["stream"], 1, "requests", 1)
        load = bed.end()
    assert (load["ok"], load["failed"], load["cut"], load["events"]) == (0, 1, 1, 1)


def test_a_stream_that_ends_with_an_error_event_is_a_failure(bed: tools.Bed, files: dict[str, Path]) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"error":{}}\n\ndata: [DONE]\n\n'
    with _answering(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)) as port:
        bed.begin(port, files["stream"], 1, "requests", 1)
        load = bed.end()
    assert (load["ok"], load["failed"], load["error_events"]) == (0, 1, 1)


def test_a_request_body_in_chunks_is_read_to_its_end(bed: tools.Bed) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", bed.ports[0]), timeout=120) as client:
        for part in (head, b'5\r\n{"mod', b'\r\n10\r\nel":"m","a":[1]}', b"\r\n0\r\n", b"\r\n"):
            assert bed.total("requests") == 0
            client.sendall(part)
        assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
    assert bed.total("requests") == 1


def test_mocks_speak_a_replicas_event_stream(bed: tools.Bed, files: dict[str, Path]) -> None:
    placed = files["1k"].read_bytes().replace(b"KKKKKKKK", b"00000007")
    placed = placed.replace(
        b"\r\n\r\n", b"\r\nx-midstream-session: step%20by\r\nx-midstream-placed: 42\r\n\r\n", 1
    )
    with socket.create_connection(("127.0.0.1", bed.ports[1]), timeout=120) as client:
        client.sendall(placed)
        assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
    with socket.create_connection(("127.0.0.1", bed.ports[1]), timeout=120) as client:
        client.sendall(b"GET /replica/events HTTP/1.1\r\nhost: x\r\n\r\n")
        lines = list(_lines(client.makefile("rb"), 3))
    told, report, trajectories = lines
    assert msgspec.json.decode(told, type=SessionsReport).held == ((("", "step%20by"), 42),)
    decoded = msgspec.json.decode(report, type=ReplicaReport)
    assert (decoded.replica, decoded.ready, decoded.in_flight) == ("replica-1", True, 0)
    assert msgspec.json.decode(trajectories, type=Trajectories).measures


def test_midstreams_gateway_serves_from_mocks(bed: tools.Bed, files: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "gateway"
    folder.mkdir()
    router = Midstream(folder, bed.urls, min(_cores()))
    try:
        router.start(files["1k"].read_bytes())
        before = bed.total("requests")
        bed.begin(router.port, files["1k"], 16, "requests", 300, keys=30, record=tmp_path / "homes")
        load = bed.end()
        assert (load["ok"], load["failed"]) == (300, 0)
        assert bed.total("requests") - before == 300
        assert bed.total("listeners") == MOCKS
        assert set((tmp_path / "homes").read_text()) == set("012")
        bed.pace(0.001, 10)
        bed.begin(router.port, files["stream"], 16, "hold", 0)
        load = bed.end()
        assert (load["ok"], load["events"]) == (16, 160)
    finally:
        router.stop()


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)


def _lines(stream: object, count: int) -> Iterator[bytes]:
    """The lines of JSON in a chunked answer."""
    while count:
        line = stream.readline()  # type: ignore[attr-defined]
        if line.startswith(b"{"):
            count -= 1
            yield line


@contextlib.contextmanager
def _answering(answer: bytes) -> Iterator[int]:
    """A server that gives its first client this and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
