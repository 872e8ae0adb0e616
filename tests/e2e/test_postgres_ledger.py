"""`midstream serve` with its ledger in a real PostgreSQL: what was published is served after everything else is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from postgres import PASSWORD, Postgres
from serving import Server, serve

from midstream.client import SnapshotPublisher

# Of a busy machine.
WITHIN_S = 400.0
DEPLOYMENT = "/v1/accounts/local/deployments/default"


@pytest.fixture
def arguments(tmp_path: Path, postgres_url: str, tiny_model: Callable[..., Path]) -> tuple[str, ...]:
    bucket = (tmp_path / "bucket").as_uri()
    words = ("--model", str(tiny_model()), "--replicas", "1", "--bucket", bucket)
    return (*words, "--database", postgres_url)


def publish(server: Server, bucket: Path, identity: str, checkpoint: Path) -> int | None:
    """The generation under which every replica serves it."""
    with SnapshotPublisher(server.url, bucket.as_uri(), work_dir=bucket.parent / "work") as publisher:
        done = publisher.publish(identity, checkpoint, timeout_s=WITHIN_S)
        return done.replicas[0].generation


def label(server: Server) -> str:
    body = {"model": "default", "prompt": "ab", "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WITHIN_S, trust_env=False)
    return str(answer.raise_for_status().json()["model"]).partition("@")[2]


def ledger(server: Server) -> dict[str, Any]:
    got: dict[str, Any] = httpx.get(
        f"{server.url}{DEPLOYMENT}/ledger", timeout=WITHIN_S, trust_env=False
    ).json()
    return got


@pytest.mark.timeout(1800)
@pytest.mark.variant
def test_what_was_published_outlives_the_server_and_its_state_directory(
    tmp_path: Path, arguments: tuple[str, ...], postgres_process: Postgres, tiny_model: Callable[..., Path]
) -> None:
    bucket = tmp_path / "bucket"
    with serve(tmp_path / "first", *arguments) as server:
        assert publish(server, bucket, "step-1", tiny_model(seed=1)) == 1
        assert label(server) == "step-1"
        patched = httpx.patch(
            f"{server.url}{DEPLOYMENT}",
            json={"hotLoadTransitionType": "SYNC"},
            timeout=WITHIN_S,
            trust_env=False,
        )
        assert patched.status_code == 200, patched.text
        with psycopg.connect(postgres_process.url("postgres"), autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'ledger-%'")
        assert publish(server, bucket, "step-2", tiny_model(seed=2)) == 2, "a lost connection loses no signal"
        before = ledger(server)
        assert server.stop() == 0
        logs = [server.log]
    assert not (tmp_path / "first" / "ledger.db").exists()
    with serve(tmp_path / "second", *arguments) as server:
        assert label(server) == "step-2", "it was ready when it served what is desired"
        after = until_recorded(server)
        assert (after["desired_snapshot_identity"], after["generation"]) == ("step-2", 2)
        kept = ("identity", "kind", "url", "generation", "fingerprint", "signalled_at", "ready_at")
        assert [[row[name] for name in kept] for row in after["snapshots"]] == [
            [row[name] for name in kept] for row in before["snapshots"]
        ]
        row = httpx.get(f"{server.url}{DEPLOYMENT}", timeout=WITHIN_S, trust_env=False).json()
        assert row["hotLoadTransitionType"] == "SYNC"
        assert publish(server, bucket, "step-3", tiny_model(seed=3)) == 3
        assert label(server) == "step-3"
        logs.append(server.log)
    assert not [log for log in logs if PASSWORD in log.read_text()]


def until_recorded(server: Server) -> dict[str, Any]:
    """The ledger once it has what the new boot did."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        found = ledger(server)
        boots = {moved["boot"] for moved in found["snapshots"][-1]["transitions"]}
        if len(boots) == 2 and found["snapshots"][-1]["transitions"][-1]["stage"] == "idle":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
