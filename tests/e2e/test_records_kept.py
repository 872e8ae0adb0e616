"""A server with --records: what its sessions sampled is in the bucket, whatever happens to its replicas."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, command, serve
from test_exact_sessions import rollout
from test_failover import running

from midstream.client import ServerClient
from midstream.client.journal import gaps_in, read_records, traces_of
from midstream.core.errors import SnapshotMissing
from midstream.replica.journal import Journal

NAME = "replica-0"
DURABLE = re.compile(r'midstream_replica_records_durable_total\{replica="replica-0"\} (\d+)')


def leave_records(tmp_path: Path, name: str) -> None:
    """What a replica of an earlier server left: a record, and a part of one."""
    no_directory = tmp_path / "no directory"
    no_directory.write_text("")
    waiting = tmp_path / "state" / "records" / name
    journal = Journal(waiting, no_directory.as_uri(), name, {"deployment": "rollouts"})
    journal.start()
    journal.add(lambda: {"kind": "turn", "left": True})
    journal.close()
    (segment,) = waiting.glob("*.jsonl")
    with segment.open("ab") as file:
        file.write(b'{"n": 2')


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    url = (tmp_path / "kept").as_uri()
    leave_records(tmp_path, "replica-7")
    with serve(tmp_path / "state", "--replicas", "1", "--records", url) as server:
        yield server, url


def until_durable(server: Server, count: int) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        found = DURABLE.search(httpx.get(f"{server.url}/metrics").text)
        if found and int(found[1]) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"not {count} records are durable: {found}")


def until_back(server: Server, killed: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        up = httpx.get(f"{server.url}/health").status_code == 200
        if up and running(server, lambda pid: pid).get(NAME, killed) != killed:
            return
        time.sleep(0.1)
    raise AssertionError("the replica is not back")


@pytest.mark.variant
def test_a_killed_replicas_records_are_in_the_bucket_once(kept: tuple[Server, str]) -> None:
    server, url = kept
    told: dict[str, list[dict[str, Any]]] = {}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        told["s-1"] = rollout(client, server, 1, {"x-session-id": "s-1"}, {"logprobs": True})
        with closing(ServerClient(server.url)) as http:
            http.sessions.reward("s-1", 0.5)
        until_durable(server, len(told["s-1"]) + 1)
        pid = running(server, lambda pid: pid)[NAME]
        os.kill(pid, signal.SIGKILL)
        until_back(server, pid)
        told["s-2"] = rollout(client, server, 2, {"x-session-id": "s-2"}, {"logprobs": True})
        rollout(client, server, 3, {"x-session-id": "s-3", "x-midstream-records": "none"})
    assert server.stop() == 0

    found = list(read_records(url))
    # With one replica this server has no replica-7.
    assert [record["n"] for record in found if record["replica"] == "replica-7"] == [1]
    records = [record for record in found if record["replica"] == NAME]
    assert gaps_in(records) == 0
    assert [record["kind"] for record in records] == ["turn"] * 6 + ["reward"] + ["turn"] * 6
    assert len({record["boot"] for record in records}) == 2
    traces = {trace["id"]: trace for trace in traces_of(records)}
    assert set(traces) == set(told)
    assert traces["s-1"]["traces"][0]["rewards"][0]["reward"] == 0.5
    for key, answers in told.items():
        [tree] = traces[key]["traces"]
        tokens: list[int] = []
        for turn, answer in zip(tree["turns"], answers, strict=True):
            choice = answer["choices"][0]
            tokens += turn["added"]
            assert tokens == answer["prompt_token_ids"]
            assert turn["token_ids"] == choice["token_ids"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert turn["logprobs"] == pytest.approx(logprobs, abs=1e-5)
            assert len(turn["routing_matrix"]) == len(turn["token_ids"])
            tokens += turn["token_ids"]


def test_a_bucket_that_cannot_be_is_refused_at_the_start_and_one_without_records_says_so(
    tmp_path: Path,
) -> None:
    arguments = ("serve", "--port", "0", "--state-dir", str(tmp_path / "state"), "--records", "ftp://x/y")
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "--records" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SnapshotMissing):
        list(read_records((tmp_path / "nothing").as_uri()))
