"""What a power cut may take: nothing that was signalled, and no delta stands on what it may have spoilt."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from publish_world import World, weights

from midstream.client import PublishError
from midstream.client.bucket import open_bucket
from midstream.snapshots import durable


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Disk:
    """Every sync and rename below `root`, and each signal, in their order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        # Syncing a path that ends so fails with this.
        self.refuse: tuple[str, int] | None = None
        real_sync, real_rename = os.fsync, os.rename

        def fsync(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if self.refuse is not None and path.endswith(self.refuse[0]):
                raise OSError(self.refuse[1], os.strerror(self.refuse[1]))
            real_sync(file)
            self.note("sync", root, path)

        def rename(source: Any, target: Any) -> None:
            real_rename(source, target)
            self.events = [(what, self.moved(path, root, source, target)) for what, path in self.events]
            self.note("rename", root, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)

    def note(self, what: str, root: Path, path: Any) -> None:
        if Path(path).is_relative_to(root):
            self.events.append((what, Path(path).relative_to(root).as_posix()))

    def moved(self, path: str, root: Path, source: Any, target: Any) -> str:
        """Shown by the names files have at the end."""
        if (root / path).is_relative_to(source):
            return (Path(target) / (root / path).relative_to(source)).relative_to(root).as_posix()
        return path


def test_files_and_their_names_are_on_disk_before_the_signal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(world.bucket, monkeypatch)

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            disk.events.append(("signal", ""))
        return world.handle(request)

    with world.publisher(http=httpx.Client(transport=httpx.MockTransport(handle))) as publisher:
        for step in range(2):
            assert publisher.publish(f"run/{step}", weights(step), config_dir=world.config)
    first = disk.events[: disk.events.index(("signal", "")) + 1]
    names = ("config.json", "midstream.manifest.json", "model.safetensors")
    assert sorted(first[:3]) == [("sync", f"run/0/{name}") for name in names]
    assert first[3:] == [
        ("sync", "run/0"),
        ("rename", "run/0"),
        ("sync", "run"),
        # It had to be made.
        ("sync", "."),
        ("signal", ""),
    ]
    delta = disk.events[len(first) :]
    assert sorted(delta[:-4]) == [
        ("sync", f"run/1/{p.name}") for p in sorted((world.bucket / "run/1").iterdir())
    ]
    assert delta[-4:] == [("sync", "run/1"), ("rename", "run/1"), ("sync", "run"), ("signal", "")]


@pytest.mark.parametrize("name", ["model.safetensors", "bucket"])
def test_a_disk_that_cannot_keep_the_files_is_an_error_and_nothing_is_signalled(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Disk(world.bucket, monkeypatch).refuse = (name, errno.EIO)
    with world.publisher() as publisher, pytest.raises(PublishError, match=r"'0' .*Input/output error"):
        publisher.publish("0", weights(0), config_dir=world.config)
    assert world.signals == []


def test_a_file_system_without_syncing_is_published_to_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(world.bucket, monkeypatch).refuse = ("", errno.EINVAL)
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
    assert np.array_equal(world.served()["a"], weights(0)["a"])


def test_a_checkpoint_that_a_power_cut_may_have_spoilt_is_nobodys_parent(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "boot").write_text("boot-1\n")
    monkeypatch.setattr(durable, "_KERNEL_BOOT_ID", tmp_path / "boot")
    kinds = []
    for step, boot in enumerate(("boot-1", "boot-1", "boot-2", "boot-2", "")):
        (tmp_path / "boot").write_text(boot)
        with world.publisher() as publisher:
            kinds.append(publisher.publish(f"{step}", weights(step), config_dir=world.config).kind)
    assert kinds == ["full", "delta", "full", "delta", "full"]
    assert len(list(world.work.glob("checkpoint-*"))) == 1


def test_a_work_directory_that_is_full_does_not_make_a_failure_of_what_is_served(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # In the way of what is to be written.
    (world.work / "parent.new").mkdir(parents=True)
    with world.publisher() as publisher:
        kinds = [publisher.publish(f"{i}", weights(i), config_dir=world.config).kind for i in range(2)]
    assert "will begin with a full snapshot" in caplog.text
    with world.publisher() as publisher:
        kinds.append(publisher.publish("2", weights(2), config_dir=world.config).kind)
    assert kinds == ["full", "delta", "full"]
    assert np.array_equal(world.served()["b"], weights(2)["b"])


# --- names and places ---


def test_a_name_no_file_system_takes_is_an_error_that_shows_it(world: World) -> None:
    with world.publisher() as publisher:
        for identity in ("x" * 300, "run/" + "x" * 300):
            with pytest.raises(PublishError, match=r"'.*xxx' cannot be written to .*File name too long"):
                publisher.publish(identity, weights(0), config_dir=world.config)


@pytest.mark.parametrize("bucket", ["s3:/weights/run", "file:/weights", "gs:/weights"])
def test_a_url_with_a_slash_forgotten_is_no_directory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    from midstream.core.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    if bucket.startswith("file:"):
        assert str(open_bucket(bucket)) == "file:///weights"
    else:
        with pytest.raises(ConfigError, match="is not a bucket's name"):
            open_bucket(bucket)
    assert list(tmp_path.iterdir()) == []


def test_only_files_of_a_snapshot_are_published(world: World, tmp_path: Path) -> None:
    (world.config / "chat_template.jinja").write_text("{{ messages }}")
    (world.config / "chat_template.pt").write_bytes(b"pickled")
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        place = publisher.write_full("1", weights(1), config_dir=world.config)
    for directory in (world.bucket / "0", place):
        assert directory is not None
        assert sorted(p.name for p in directory.iterdir()) == [
            "chat_template.jinja",
            "config.json",
            "midstream.manifest.json",
            "model.safetensors",
        ]
