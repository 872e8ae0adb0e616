"""A replica that shares nothing with its gateway but the network: another address, another state directory, another copy of the
model. It fetches snapshots from the bucket itself and answers nobody without the token."""

from __future__ import annotations

import re
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from certificates import certificate
from s3server import S3Server
from serving import serve, started

from midstream.client import SnapshotPublisher

BUCKET = "s3://rollouts/runs/remote-{scheme}"
#: Of the loopback interface, too, and not the gateway's.
ELSEWHERE = "127.0.0.2"
TOKEN = "known-to-both-machines"
READY = re.compile(rf"midstream replica ready on (https?://{re.escape(ELSEWHERE)}:\d+) ")
SETTINGS = f'[replica]\ntoken = "{TOKEN}"\n'


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", [pytest.param("http", marks=pytest.mark.variant), "https"])
def test_a_replica_elsewhere_serves_snapshots_that_it_fetched_itself(
    s3: S3Server, tiny_model: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for machine in (here, there):
        shutil.copytree(tiny_model(), machine / "model")
        (machine / "settings.toml").write_text(SETTINGS)
    trust: ssl.SSLContext | bool = True
    if scheme == "https":
        cert, key = certificate(there, address=ELSEWHERE)
        (there / "settings.toml").write_text(f'{SETTINGS}tls_cert = "{cert}"\ntls_key = "{key}"\n')
        (here / "settings.toml").write_text(f'{SETTINGS}tls_ca = "{cert}"\n')
        trust = ssl.create_default_context(cafile=cert)

    def of(machine: Path) -> tuple[str, ...]:
        return ("--model", str(machine / "model"), "--config", str(machine / "settings.toml"))

    listening = ("replica", "--host", ELSEWHERE, "--port", "0", "--state-dir", str(there / "state"))
    with started(there / "log", *listening, *of(there)) as replica:
        assert replica.stdout is not None
        ready = READY.match(replica.stdout.readline())
        assert ready, (there / "log").read_text()
        url = ready[1]
        assert url.startswith(f"{scheme}://")
        bucket = BUCKET.format(scheme=scheme)
        options = ("--bucket", bucket, "--replicas", "0", "--replica-url", url, "--no-tinker")
        with serve(here / "state", *of(here), *options) as server:
            with SnapshotPublisher(server.url, bucket, work_dir=tmp_path / "work") as publisher:
                publisher.publish("step-1", tiny_model(seed=1))
            asked = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60, trust_env=False)
            assert answer.json()["model"] == f"{server.model}@step-1"
            assert answer.headers["x-midstream-replica"] == url.removeprefix(f"{scheme}://")
            for key in ({}, {"x-midstream-token": "guessed"}):
                for method, path in (
                    ("GET", "/health"),
                    ("POST", "/replica/desired"),
                    ("POST", "/replica/pause"),
                ):
                    refused = httpx.request(
                        method, url + path, headers=key, json={}, timeout=60, trust_env=False, verify=trust
                    )
                    assert refused.status_code == 401
        assert list((there / "state").rglob("step-1*"))
        assert not list((here / "state").rglob("*.safetensors"))


@pytest.mark.variant
@pytest.mark.timeout(300)
def test_a_replica_with_a_certificate_that_nobody_vouches_for_gets_no_token(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, address=ELSEWHERE)
    (tmp_path / "replica.toml").write_text(f'{SETTINGS}tls_cert = "{cert}"\ntls_key = "{key}"\n')
    (tmp_path / "gateway.toml").write_text(SETTINGS)
    model = ("--model", str(tiny_model()))
    listening = ("replica", "--host", ELSEWHERE, "--port", "0", "--state-dir", str(tmp_path / "there"))
    with started(tmp_path / "log", *listening, *model, "--config", str(tmp_path / "replica.toml")) as replica:
        assert replica.stdout is not None
        ready = READY.match(replica.stdout.readline())
        assert ready, (tmp_path / "log").read_text()
        options = ("--replicas", "0", "--replica-url", ready[1], "--no-tinker")
        state = tmp_path / "here"
        with started(
            tmp_path / "gateway.log",
            *("serve", "--port", "0", "--state-dir", str(state), *model, *options),
            *("--config", str(tmp_path / "gateway.toml")),
        ):
            logged = tmp_path / "gateway.log"
            while "CERTIFICATE_VERIFY_FAILED" not in logged.read_text():
                # The test's own limit ends it.
                time.sleep(0.05)
        assert TOKEN not in (tmp_path / "gateway.log").read_text()
