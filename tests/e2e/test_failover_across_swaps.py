"""A replica that is killed while the weights change: whatever its streams say next has the right label, or they say why not."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serve
from test_failover import itself, running
from test_version_admission import Steps, Stream, serving, switched_or_staged, until, wanting

from midstream.client import SnapshotPublisher

pytestmark = pytest.mark.timeout(900)

# Tokens: they outlast a swap.
LONG = 6000
ATTEMPTS = 4
PIN_DRAIN_S = 300.0
ANY = {"x-midstream-failover": "any"}


class Seams(Stream):
    """A stream, with what it says of seams."""

    def __init__(self, server: Server, headers: dict[str, str], max_tokens: int, **fields: Any) -> None:
        super().__init__(server, headers, max_tokens, **fields)
        self.seams: list[dict[str, Any]] = []
        # Labels that had come before each seam.
        self.before: list[int] = []

    def run(self) -> None:
        # An error event is the end of a stream; the response is seen to be cut.
        with contextlib.suppress(httpx.RemoteProtocolError):
            super().run()

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: {") and (seam := json.loads(line[6:]).get("midstream", {}).get("resumed")):
            self.seams.append(seam)
            self.before.append(len(self.labels))
        super()._take(line)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("crossed") / "state"
    model = str(tiny_model(dtype="bfloat16", max_positions=LONG + 8))
    with serve(state, "--model", model, "--replicas", "2", "--pin-drain-s", str(PIN_DRAIN_S)) as started:
        yield started


@pytest.fixture(scope="module")
def steps(server: Server, tiny_model: Callable[..., Path]) -> Steps:
    return Steps(server, tiny_model, max_positions=LONG + 8)


@pytest.fixture
def publisher(server: Server) -> Iterator[SnapshotPublisher]:
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as made:
        yield made


def on(server: Server, replica: str, headers: dict[str, str]) -> Seams:
    """A stream that is under way on this replica. Others that were begun for it go on beside it."""
    for _ in range(20):
        session = {"x-session-id": secrets.token_hex(4)}
        stream = Seams(server, headers | session, LONG).begin()
        if stream.replica == replica:
            return stream
    raise AssertionError(f"no session begins on {replica}")


def all_run(server: Server) -> None:
    def ready() -> bool:
        rows = httpx.get(f"{server.url}/health", timeout=60, trust_env=False).json()["replicas"]
        return len(rows) == 2 and all(row["usable"] for row in rows) and len(running(server, itself)) == 2

    until(ready)


def kill(server: Server, replica: str) -> None:
    os.kill(running(server, itself)[replica], signal.SIGKILL)


def in_order(labels: list[str], *order: str) -> bool:
    return labels == sorted(labels, key=order.index)


@pytest.mark.variant
def test_a_replica_that_is_killed_before_its_own_swap_when_the_other_has_switched(
    server: Server, publisher: SnapshotPublisher, steps: Steps
) -> None:
    """Its streams stand on KV of the old snapshot, and only the new one serves: exact ones end, others are computed anew."""
    for _ in range(ATTEMPTS):
        all_run(server)
        old, new = next(iter(serving(publisher).values())), steps.put()
        assert old is not None
        # It holds the swap of its replica off.
        pinned = Seams(server, wanting(snapshot=old), LONG).begin()
        free = [on(server, pinned.replica, ANY), on(server, pinned.replica, {})]
        publisher.snapshots.signal(new)
        until(lambda: new in serving(publisher).values())  # noqa: B023
        until(lambda: switched_or_staged(publisher, pinned.replica, new))  # noqa: B023
        kill(server, pinned.replica)
        for stream in (pinned, *free):
            stream.join()
        publisher.snapshots.wait_until_ready(new, timeout_s=150)
        goes_on, exact = free
        if goes_on.seams and pinned.error and exact.error:
            break
    for stream in (pinned, exact):
        assert not stream.done
        assert stream.error is not None
        assert set(stream.labels) == {old}, "no token of other weights without being asked for"
        assert old in stream.error["message"]
    (seam,) = goes_on.seams
    assert (goes_on.error, goes_on.done, len(goes_on.labels)) == (None, True, LONG)
    assert (seam["from"], seam["exact"], seam["tokens"]) == (pinned.replica, False, goes_on.before)
    assert set(goes_on.labels[: goes_on.before[0]]) == {old}
    assert set(goes_on.labels[goes_on.before[0] :]) == {new}


@pytest.mark.variant
def test_a_replica_that_is_killed_after_its_swap_under_streams_that_crossed_it(
    server: Server, publisher: SnapshotPublisher, steps: Steps
) -> None:
    """Their KV is of two snapshots, which nobody can compute again; streams that began after the swap go on exactly."""
    for _ in range(ATTEMPTS):
        all_run(server)
        old, new = next(iter(serving(publisher).values())), steps.put()
        assert old is not None
        crossing = Seams(server, {}, LONG).begin()
        replica = crossing.replica
        goes_on = on(server, replica, ANY)
        publisher.snapshots.signal(new)
        publisher.snapshots.wait_until_ready(new, timeout_s=150)
        fresh = on(server, replica, {})
        until(lambda: (new in crossing.labels and new in goes_on.labels) or crossing.done)  # noqa: B023
        kill(server, replica)
        for stream in (crossing, goes_on, fresh):
            stream.join()
        if crossing.error and goes_on.seams and fresh.seams:
            break
    assert crossing.error is not None
    assert "swap" in crossing.error["message"]
    assert in_order(crossing.labels, old, new)
    assert (goes_on.error, goes_on.done, len(goes_on.labels)) == (None, True, LONG)
    assert in_order(goes_on.labels, old, new)
    assert [seam["exact"] for seam in goes_on.seams] == [False]
    assert (fresh.error, fresh.done, fresh.labels) == (None, True, [new] * LONG)
    assert [(seam["from"], seam["exact"]) for seam in fresh.seams] == [(replica, True)]
