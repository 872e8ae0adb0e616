"""A replica that shares nothing with its gateway but the network: another address, another state directory, another copy of the
model. It fetches snapshots from the bucket itself and answers nobody without the token."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from s3server import S3Server
from serving import serve, started

from midstream.client import SnapshotPublisher

BUCKET = "s3://rollouts/runs/remote"
#: Of the loopback interface, too, and not the gateway's.
ELSEWHERE = "127.0.0.2"
TOKEN = "known-to-both-machines"
READY = re.compile(rf"midstream replica ready on (http://{re.escape(ELSEWHERE)}:\d+) ")
SETTINGS = '[replica]\ntoken = "{token}"\n'


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_replica_elsewhere_serves_snapshots_that_it_fetched_itself(
    s3: S3Server, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for machine in (here, there):
        shutil.copytree(tiny_model(), machine / "model")
        (machine / "settings.toml").write_text(SETTINGS.format(token=TOKEN))

    def of(machine: Path) -> tuple[str, ...]:
        return ("--model", str(machine / "model"), "--config", str(machine / "settings.toml"))

    listening = ("replica", "--host", ELSEWHERE, "--port", "0", "--state-dir", str(there / "state"))
    with started(there / "log", *listening, *of(there)) as replica:
        assert replica.stdout is not None
        ready = READY.match(replica.stdout.readline())
        assert ready, (there / "log").read_text()
        url = ready[1]
        options = ("--bucket", BUCKET, "--replicas", "0", "--replica-url", url, "--no-tinker")
        with serve(here / "state", *of(here), *options) as server:
            with SnapshotPublisher(server.url, BUCKET, work_dir=tmp_path / "work") as publisher:
                publisher.publish("step-1", tiny_model(seed=1))
            asked = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60, trust_env=False)
            assert answer.json()["model"] == f"{server.model}@step-1"
            assert answer.headers["x-midstream-replica"] == url.removeprefix("http://")
            for key in ({}, {"x-midstream-token": "guessed"}):
                for method, path in (
                    ("GET", "/health"),
                    ("POST", "/replica/desired"),
                    ("POST", "/replica/pause"),
                ):
                    refused = httpx.request(
                        method, url + path, headers=key, json={}, timeout=60, trust_env=False
                    )
                    assert refused.status_code == 401
        assert list((there / "state").rglob("step-1*"))
        assert not list((here / "state").rglob("*.safetensors"))
