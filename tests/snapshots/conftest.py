from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from s3server import S3Server, s3_server


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        server.make_bucket("rollouts")
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server with the bucket `rollouts`, and its credentials in the environment."""
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    return s3_process
