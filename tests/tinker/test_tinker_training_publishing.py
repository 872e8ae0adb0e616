"""Trained weights through SnapshotPublisher, to a server that takes signals and rebuilds deltas."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy

sys.path.append(str(Path(__file__).parents[1] / "client"))

import publish_world
from s3server import S3Server

from midstream.snapshots.store.upload import list_directory, put_directory
from midstream_tinker import publishing as publishing_module
from midstream_tinker.chains import remove_snapshot
from midstream_tinker.publishing import DeploymentPublisher
from midstream_tinker.trainer.types import WorkFailed

KEY = "tml-key"


class Scene:
    def __init__(self, root: Path, url: str, server: publish_world.World) -> None:
        self.server = server
        self._root = root
        self.publisher = DeploymentPublisher(
            gateway_url=url,
            deployment="accounts/a/deployments/d",
            bucket=server.bucket.as_uri(),
            work_dir=root / "publish",
            full_every=3,
        )

    def export(self, step: int) -> Path:
        directory = self._root / f"export-{step}"
        directory.mkdir()
        safetensors.numpy.save_file(publish_world.weights(step), directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "x"}')
        return directory

    def assert_serves(self, step: int) -> None:
        served, expected = self.server.served(), publish_world.weights(step)
        assert served.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(served[name], values)


@contextmanager
def scene(root: Path) -> Iterator[Scene]:
    world = publish_world.World(root)
    world.api_key = KEY
    with publish_world.listening(world) as url:
        yield Scene(root, url, world)


def deltas(at: Scene) -> list[str | None]:
    """Of each signal the server took, what it stands on."""
    told = [signal.get("incremental_snapshot_metadata") for signal in at.server.signals]
    return [None if metadata is None else metadata["previous_snapshot_identity"] for metadata in told]


def names(at: Scene) -> list[str]:
    return sorted(place.name for place in at.server.bucket.iterdir())


async def test_steps_are_served_as_deltas_on_the_one_before_and_now_and_then_whole(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        for step in range(5):
            await at.publisher.publish(f"run-{step}", at.export(step), KEY)
            at.assert_serves(step)
        assert deltas(at) == [None, "run-0", "run-1", None, "run-3"]


async def test_old_steps_leave_the_bucket_and_what_was_kept_stays(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        await at.publisher.keep("run-0-best", at.export(0))
        stranger = at.server.bucket / "somebody-elses"
        stranger.mkdir()
        # Whole: 1, 4 and 7.
        for step in range(1, 8):
            await at.publisher.publish(f"run-{step}", at.export(step), KEY)
        names = sorted(place.name for place in at.server.bucket.iterdir())
        assert names == ["run-0-best", "run-4", "run-5", "run-6", "run-7", "somebody-elses"]
        # With its manifest.
        assert len(list((at.server.bucket / "run-0-best").iterdir())) == 3
        at.assert_serves(7)


async def test_a_step_that_fails_to_load_takes_nothing_from_the_bucket(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        await at.publisher.publish("run-1", at.export(1), KEY)
        for step in (2, 3, 4):
            at.server.fail = f"run-{step}"
            with pytest.raises(WorkFailed):
                await at.publisher.publish(f"run-{step}", at.export(step), KEY)
        # What replicas fall back on.
        assert (at.server.bucket / "run-1" / "model.safetensors").exists()


async def test_steps_that_were_ready_too_late_are_kept_for_what_stands_on_them_and_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path) as at:
        at.publisher = DeploymentPublisher(
            gateway_url=at.publisher.gateway_url,
            deployment="accounts/a/deployments/d",
            bucket=at.server.bucket.as_uri(),
            work_dir=tmp_path / "publish",
            full_every=6,
            ready_s=0.0,
        )
        ready = at.server.status

        def loading() -> dict[str, object]:
            told = ready()
            told["replicas"][0]["readiness"] = at.server.desired not in ("run-2", "run-4")
            return told

        # Whole: 1; 2 and 4 are late.
        for step in range(1, 7):
            monkeypatch.setattr(at.server, "status", loading)
            if step in (2, 4):
                with pytest.raises(WorkFailed, match=f"run-{step}"):
                    await at.publisher.publish(f"run-{step}", at.export(step), KEY)
            else:
                await at.publisher.publish(f"run-{step}", at.export(step), KEY)
            monkeypatch.setattr(at.server, "status", ready)
        assert deltas(at) == [None, "run-1", "run-2", "run-3", "run-4", "run-5"]
        assert names(at) == [f"run-{step}" for step in range(1, 7)]
        # Whole: 7 and 13.
        for step in range(7, 14):
            await at.publisher.publish(f"run-{step}", at.export(step), KEY)
        assert names(at) == sorted(f"run-{step}" for step in range(7, 14))


async def test_old_files_that_somebody_else_removes_meanwhile_fail_no_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path) as at:
        monkeypatch.setattr(
            publishing_module, "list_directory", lambda bucket, identity: (["model.safetensors"], [])
        )
        # Whole: 1, 4 and 7.
        for step in range(1, 8):
            if step == 7:
                (at.server.bucket / "run-1" / "model.safetensors").unlink()
            await at.publisher.publish(f"run-{step}", at.export(step), KEY)
        at.assert_serves(7)


async def test_what_failed_leaves_the_bucket_in_the_end(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        for step in range(1, 9):
            at.server.fail = f"run-{step}" if step % 2 == 0 else None
            try:
                await at.publisher.publish(f"run-{step}", at.export(step), KEY)
            except WorkFailed:
                assert step % 2 == 0
        assert names(at) == ["run-5", "run-6", "run-7", "run-8"]


async def test_what_is_asked_for_at_once_is_published_in_that_order(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        calls = [at.publisher.publish(f"run-{step}", at.export(step), KEY) for step in range(3)]
        await asyncio.gather(*calls)
        assert [signal["identity"] for signal in at.server.signals] == ["run-0", "run-1", "run-2"]
        at.assert_serves(2)


async def test_what_is_kept_serves_when_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        await at.publisher.publish("run-1", at.export(1), KEY)
        await at.publisher.keep("run-2-best", at.export(2))
        at.assert_serves(1)
        await at.publisher.publish("run-3", at.export(3), KEY)
        await at.publisher.serve("run-2-best", KEY)
        at.assert_serves(2)
        await at.publisher.publish("run-4", at.export(4), KEY)
        at.assert_serves(4)
        # Nothing stands on what was served in between.
        assert deltas(at) == [None, "run-1", None, None]


async def test_a_wrong_key_is_the_callers_fault(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        for key in (None, "tml-other"):
            with pytest.raises(WorkFailed, match="a valid API key is needed") as failed:
                await at.publisher.publish(f"run-{key}", at.export(len(str(key))), key)
            assert failed.value.category == "user"
        assert at.server.signals == []


async def test_weights_that_no_replica_can_load_fail_with_its_words_and_the_next_are_whole(
    tmp_path: Path,
) -> None:
    with scene(tmp_path) as at:
        await at.publisher.publish("run-1", at.export(1), KEY)
        at.server.fail = "run-2"
        with pytest.raises(WorkFailed, match="r0 could not load snapshot 'run-2': Adler-32 differs"):
            await at.publisher.publish("run-2", at.export(2), KEY)
        await at.publisher.publish("run-3", at.export(3), KEY)
        assert deltas(at) == [None, "run-1", None]
        at.assert_serves(3)


async def test_an_export_that_is_no_checkpoint_fails_and_is_not_signalled(tmp_path: Path) -> None:
    with scene(tmp_path) as at:
        directory = at.export(1)
        (directory / "model.safetensors").write_bytes(b"torn")
        for act in (at.publisher.publish("run-1", directory, KEY), at.publisher.keep("run-1", directory)):
            with pytest.raises(WorkFailed) as failed:
                await act
            assert failed.value.category == "server"
        assert at.server.signals == []
        assert not any(at.server.bucket.iterdir())


async def test_stopping_ends_a_publication_that_waits_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path) as at:
        asked = threading.Event()

        def away(request: httpx.Request) -> httpx.Response:
            asked.set()
            return httpx.Response(503, json={"error": {"message": "the gateway is starting"}})

        monkeypatch.setattr(at.server, "handle", away)
        publishing = asyncio.create_task(at.publisher.publish("run-1", at.export(1), KEY))
        assert await asyncio.to_thread(asked.wait, 30)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        monkeypatch.undo()
        await at.publisher.publish("run-2", at.export(2), KEY)
        at.assert_serves(2)


def test_a_snapshot_is_removed_from_an_object_store_and_nothing_beside_it(
    tmp_path: Path, s3: S3Server
) -> None:
    bucket = "s3://rollouts/removed"
    directory = tmp_path / "whole"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes(b"{}")
    for identity in ("run-1", "run-10"):
        put_directory(bucket, identity, directory)
    remove_snapshot(bucket, "run-1")
    remove_snapshot(bucket, "never-there")
    assert list_directory(bucket, "run-1") == ([], [])
    assert list_directory(bucket, "run-10") == (["config.json", "model.safetensors"], [])
