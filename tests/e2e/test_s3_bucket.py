"""A server on an S3 bucket: a full snapshot and deltas hot-loaded, a bucket that goes away, and no credential anywhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from s3server import ACCESS_KEY, SECRET_KEY, S3Server
from serving import Server, serve

from midstream.client import SnapshotFailed, SnapshotPublisher
from midstream.client.errors import SignalRefused

BUCKET = "s3://rollouts/runs/e2e%201"


@pytest.fixture
def server(s3: S3Server, tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    arguments = ("--model", str(tiny_model()), "--bucket", BUCKET, "--replicas", "1", "--log-level", "debug")
    with serve(tmp_path / "state", *arguments) as running:
        yield running


def served(server: Server) -> tuple[str, list[int]]:
    """The label and the greedy tokens of a completion."""
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
    answer.raise_for_status()
    said = answer.json()
    return said["model"], said["choices"][0]["token_ids"]


@pytest.mark.variant
def test_snapshots_are_hot_loaded_from_s3_and_no_credential_is_shown(
    s3: S3Server, server: Server, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with SnapshotPublisher(server.url, BUCKET, work_dir=tmp_path / "work") as publisher:
        publisher.publish("step-1", tiny_model(seed=1))
        label, full = served(server)
        assert label == f"{server.model}@step-1"
        delta = publisher.publish("step-2", tiny_model(seed=2), kind="delta")
        label, tokens = served(server)
        assert label == f"{server.model}@step-2"
        publisher.publish("step-3", tiny_model(seed=2), kind="full")
        # The delta gave the very weights.
        assert served(server) == (f"{server.model}@step-3", tokens)
        assert tokens != full
        assert delta.kind == "delta"
        publisher.write_full("step-4", tiny_model(seed=3))
        s3.put("rollouts", "runs/e2e 1/step-4/model.safetensors", b"truncated")
        with pytest.raises(
            SignalRefused, match=r"step-4: is not what its midstream\.manifest\.json says: model\.saf"
        ):
            publisher.snapshots.signal("step-4")
        s3.delete("rollouts", "runs/e2e 1/step-4/midstream.manifest.json")
        publisher.snapshots.signal("step-4")
        with pytest.raises(SnapshotFailed, match=r"model\.safetensors: truncated"):
            publisher.snapshots.wait_until_ready("step-4")
        assert served(server) == (f"{server.model}@step-3", tokens)
    status = httpx.get(f"{server.url}/hot_load/v1/models/hot_load", timeout=60).text
    shown = [server.log.read_text(), status]
    with sqlite3.connect(server.state_dir / "ledger.db") as ledger:
        shown += ledger.iterdump()
    ledger.close()
    said = "\n".join(shown)
    assert "s3://rollouts/runs/e2e%201/step-4" in said
    assert SECRET_KEY not in said
    assert ACCESS_KEY not in said
