"""Publishing into a bucket that is no directory: a real S3 server, files one by one, each hinted at."""

from __future__ import annotations

import errno
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from publish_world import World, weights
from s3server import SECRET_KEY, S3Server, s3_server

from midstream.client import PublishError, SnapshotPublisher, checkpoint
from midstream.client.bucket import Bucket, open_bucket
from midstream.core.errors import SnapshotError
from midstream.snapshots import content


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.make_bucket("rollouts")
        yield server


class RemoteWorld(World):
    """Takes a snapshot's files from S3 when it is signalled; a hint at a file that is not there is remembered."""

    def __init__(self, root: Path, s3: S3Server, prefix: str) -> None:
        super().__init__(root)
        self.s3 = s3
        self.prefix = prefix
        self.not_there: list[str] = []
        self.hint_status = 202

    def publisher(self, **kwargs: Any) -> SnapshotPublisher:
        http = httpx.Client(transport=httpx.MockTransport(self.handle))
        arguments = {"work_dir": self.work, "http": http, "sleep": lambda _: None}
        return SnapshotPublisher("http://server", f"s3://rollouts/{self.prefix}", **(arguments | kwargs))

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/hint"):
            body = json.loads(request.content)
            self.hints.append(body)
            for name in body["files"]:
                try:
                    self.s3.get("rollouts", f"{self.prefix}/{body['identity']}/{name}")
                except urllib.error.HTTPError:
                    self.not_there.append(name)
            return httpx.Response(self.hint_status, json={})
        return super().handle(request)

    def signal(self, body: dict[str, Any]) -> httpx.Response:
        files = self.bucket / body["identity"]
        files.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            data = self.s3.get("rollouts", f"{self.prefix}/{body['identity']}/{name}")
            (files / name).write_bytes(data)
        return super().signal(body)


@pytest.fixture
def world(
    tmp_path: Path, s3: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> RemoteWorld:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return RemoteWorld(tmp_path, s3, request.node.name)


def test_full_and_delta_snapshots_through_s3_with_a_hint_for_each_file(world: RemoteWorld) -> None:
    with world.publisher() as publisher:
        kinds = [publisher.publish(f"run/{i}", weights(i), config_dir=world.config).kind for i in range(3)]
    assert kinds == ["full", "delta", "delta"]
    assert world.served()["b"].tobytes() == weights(2)["b"].tobytes()
    assert [(hint["identity"], hint["files"]) for hint in world.hints[:3]] == [
        ("run/0", ["model.safetensors"]), ("run/0", ["config.json"]), ("run/1", ["model.safetensors"]),
    ]  # fmt: skip
    assert "incremental_snapshot_metadata" not in world.hints[0]
    assert world.hints[2]["incremental_snapshot_metadata"]["previous_snapshot_identity"] == "run/0"
    assert world.not_there == []


def test_a_server_without_hints_is_asked_once_per_snapshot_and_off_means_never(world: RemoteWorld) -> None:
    world.hint_status = 404
    with world.publisher() as publisher:
        for step in range(2):
            publisher.publish(f"{step}", weights(step), config_dir=world.config)
    assert [hint["identity"] for hint in world.hints] == ["0", "1"]
    with world.publisher(hints=False) as publisher:
        publisher.publish("2", weights(2), config_dir=world.config)
    assert len(world.hints) == 2


def test_what_is_there_is_not_replaced_unasked(world: RemoteWorld) -> None:
    with world.publisher() as publisher:
        assert publisher.write_full("a/b", weights(0), config_dir=world.config) is None
        publisher.write_full("hidden/.step", weights(0), config_dir=world.config)
        for identity, says in (
            ("a/b", "'a/b' is already in the bucket s3://rollouts/"),
            ("a", "'a/b' lies inside it"),
            ("hidden", "'hidden/.step' lies inside it"),
            ("a/b/c", "it lies inside the snapshot 'a/b'"),
        ):
            with pytest.raises(PublishError, match=says):
                publisher.publish(identity, weights(1), config_dir=world.config)
        publisher.publish("a/b", weights(1), config_dir=world.config, overwrite=True)
    assert world.served()["a"].tobytes() == weights(1)["a"].tobytes()


def test_a_bucket_that_refuses_is_an_error_without_secrets(world: RemoteWorld) -> None:
    http = httpx.Client(transport=httpx.MockTransport(world.handle))
    with (
        SnapshotPublisher("http://server", "s3://no-such-bucket/x", http=http) as publisher,
        pytest.raises(
            PublishError, match=r"snapshot 'a': s3://no-such-bucket/x/a: cannot be listed"
        ) as caught,
    ):
        publisher.publish("a", weights(0), config_dir=world.config)
    assert SECRET_KEY not in str(caught.value)
    assert world.signals == []


def test_a_local_disk_that_is_full_is_an_error_like_others(
    world: RemoteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_weights", full)
    with (
        world.publisher() as publisher,
        pytest.raises(
            PublishError, match=r"'a' cannot be written to s3://rollouts/.*No space left on device"
        ),
    ):
        publisher.write_full("a", weights(0), config_dir=world.config)


@pytest.fixture(params=["a local directory", "s3"])
def bucket(world: RemoteWorld, request: pytest.FixtureRequest) -> Bucket:
    return open_bucket(
        str(world.root / "elsewhere") if "local" in request.param else f"s3://rollouts/{world.prefix}"
    )


def test_a_directory_that_is_gone_is_an_error_of_both_kinds_of_bucket(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"'a' cannot be written.*No such file or directory"):
        bucket.put("a", tmp_path / "gone", overwrite=False)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), SnapshotError("Input/output error")]
)
def test_a_disk_that_fails_while_files_are_digested_is_an_error_of_both_kinds_of_bucket(
    bucket: Bucket, world: RemoteWorld, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: Any) -> None:
        raise error

    def fill(directory: Path) -> None:
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(content, "file_content", failing)
    with pytest.raises(PublishError, match=r"'a'.*Input/output error"):
        bucket.put("a", world.config, overwrite=False)
    with pytest.raises(PublishError, match=r"'b'.*Input/output error"):
        bucket.write("b", fill, overwrite=False)


def test_a_temporary_directory_that_cannot_be_made_is_an_error(
    world: RemoteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(world.root / "gone"))
    with (
        world.publisher() as publisher,
        pytest.raises(PublishError, match=r"'a' cannot be written.*No such file or directory"),
    ):
        publisher.write_full("a", weights(0), config_dir=world.config)
