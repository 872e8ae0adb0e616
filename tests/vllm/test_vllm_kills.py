"""Processes of vLLM, and the replica over them, killed or stopped under streams; at the end the whole server. Runs last."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import descendants
from vllm_bed import Bed, cmdline, load, logprobs_of, started_at, until
from vllm_streams import Stream, coming, kept_up, on_their_way, random_prompt, under_way

from midstream.client import SnapshotPublisher

STREAMS = 16
# Of a stream: the least and the most.
TOKENS = (250, 550)
SNAPSHOT = "before-the-kills"
VICTIM = "replica-0"
# In nats, in float32. After a token that is missing or one too many, most numbers are off by 0.1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(bed: Bed, weights: Callable[[int], Path]) -> Any:
    """What serves, as transformers computes it."""
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        publisher.publish(SNAPSHOT, weights(5))
    return load(weights(5))


def assert_sound(streams: list[Stream], model: Any) -> None:
    """Every token that came is the snapshot's, given all before it: none was lost, none came twice."""
    for stream in streams:
        assert stream.labels == [SNAPSHOT]
        expected = logprobs_of(model, stream.ids)[len(stream.prompt) - 1 :]
        off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
        assert off.max() <= TOLERANCE, (stream.session, off.argmax(), off.max())


def usable(bed: Bed, replica: str) -> bool:
    with bed.http() as http:
        replicas = http.get("/health").json()["replicas"]
    return any(one["name"] == replica and one["usable"] for one in replicas)


def serves_again(bed: Bed, publisher: SnapshotPublisher) -> bool:
    with bed.http() as http:
        replicas = http.get("/health").json()["replicas"]
    return (
        len(replicas) == 2
        and all(r["ready"] for r in replicas)
        and publisher.snapshots.status().serves(SNAPSHOT)
    )


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("api_server", signal.SIGKILL),
        ("EngineCore", signal.SIGKILL),
        ("replica", signal.SIGKILL),
        ("EngineCore", signal.SIGSTOP),
        ("Worker", signal.SIGSTOP),
    ],
)
def test_a_killed_or_hung_process_costs_no_stream_a_token_and_its_replica_comes_back(
    bed: Bed, model: Any, what: str, how: signal.Signals
) -> None:
    below = descendants(bed.replica_pid(VICTIM))
    # The process that compiles grammars is the replica's own, and stays.
    if what != "replica":
        below = [pid for pid in below if b"grammarcheck" not in cmdline(pid)]
    family = {pid: started_at(pid) for pid in below}
    api_server = bed.process_of(VICTIM, "api_server")
    pid = bed.replica_pid(VICTIM) if what == "replica" else bed.process_of(VICTIM, what)

    def both(streams: Sequence[Stream]) -> bool:
        return all(on_their_way(streams, replica) >= 3 for replica in ("replica-0", "replica-1"))

    def kill() -> None:
        """Kills it while it holds three requests or more. A slow client may not have read yet that others ended."""
        while True:
            until(lambda: bed.in_flight(VICTIM) >= 3, lambda: f"{VICTIM} has nothing to do")
            # What stands still cannot end a stream before it is killed.
            os.kill(pid, signal.SIGSTOP)
            if bed.in_flight(VICTIM) >= 3:
                break
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, how)
        # New streams begin until it is out of rotation, and so go to the other replica alone from then on.
        until(lambda: not usable(bed, VICTIM), lambda: f"{VICTIM} is still used")

    name = f"{what} {how.name}"
    streams = asyncio.run(kept_up(bed.server.url, bed.model, coming(name, TOKENS), STREAMS, kill, both))
    lost = [stream for stream in streams if stream.replica == VICTIM]
    others = [stream for stream in streams if stream.replica != VICTIM]
    assert lost
    assert others
    assert [(s.session, s.error, len(s.tokens)) for s in others if not s.whole or s.resumed] == []
    moved = [stream for stream in lost if stream.resumed]
    assert moved, [stream.error for stream in lost]
    for stream in lost:
        if stream.whole:
            assert [seam["from"] for seam in stream.resumed] in ([VICTIM], [])
        else:
            assert stream.error is not None, f"{stream.session} is short, and nothing says so"
            assert not stream.done
    assert_sound(streams, model)

    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:

        def back() -> bool:
            return api_server not in bed.server.children() and serves_again(bed, publisher)

        until(back, lambda: f"{VICTIM} is not back:\n{bed.server.log.read_text()[-3000:]}")
    left = [pid for pid, start in family.items() if start and started_at(pid) == start]
    assert left == []
    assert bed.strays() == []
    after = [
        Stream(random_prompt(f"after {name} {i}", 30), 20, f"after {name} {i}", seed=i) for i in range(8)
    ]
    asyncio.run(under_way(bed.server.url, bed.model, after, 1, lambda: None))
    assert {stream.replica for stream in after} == {"replica-0", "replica-1"}
    assert all(stream.whole for stream in after)
    assert_sound(after, model)


def test_nothing_is_left_when_the_server_itself_is_killed(bed: Bed) -> None:
    family = bed.family()
    # A gateway, and replicas; each with a keeper, an API server, an engine core and a worker.
    assert len(family) > 8
    os.kill(bed.server.process.pid, signal.SIGKILL)
    bed.server.process.wait(30)

    def left() -> list[int]:
        return [pid for pid, start in family.items() if start and started_at(pid) == start]

    until(lambda: not left() and not bed.strays(), lambda: f"{left()} {bed.strays()}")
