"""The weights file of a snapshot that left the cache, which the next pushed update writes over."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from midstream.core.types import SnapshotFiles
from midstream.snapshots.store import spare
from midstream.snapshots.store.cache import SnapshotCache

WEIGHTS = "model.safetensors"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system grants leases on Linux")


def entry(cache: SnapshotCache, name: str, size: int = 200) -> Path:
    path = cache.whole([SnapshotFiles(snapshot=name, url=f"file:///b/{name}", fingerprint="f")])
    path.mkdir()
    (path / WEIGHTS).write_bytes(name.encode() * size)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> SnapshotCache:
    cache = SnapshotCache(tmp_path / "cache", bytes_max=1000)
    assert not cache.take_spare(tmp_path / "none")
    return cache


def test_the_weights_of_a_snapshot_that_left_are_given_to_the_next_file(
    cache: SnapshotCache, tmp_path: Path
) -> None:
    left = entry(cache, "a")
    inode = (left / WEIGHTS).stat().st_ino
    cache.drop(left)
    assert cache.take_spare(tmp_path / "next")
    assert (tmp_path / "next").stat().st_ino == inode
    # It is given once, and leaves nothing.
    assert not cache.take_spare(tmp_path / "after")
    assert [path.name for path in cache.root.iterdir()] == [".boot"]


def test_a_file_that_somebody_reads_or_that_has_another_name_is_not_written_over(
    cache: SnapshotCache, tmp_path: Path
) -> None:
    left = entry(cache, "a")
    with (left / WEIGHTS).open("rb") as file:
        reader = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    cache.drop(left)
    assert not cache.take_spare(tmp_path / "next")
    assert not (tmp_path / "next").exists()
    assert reader[:] == b"a" * 200
    linked = entry(cache, "b")
    os.link(linked / WEIGHTS, tmp_path / "other")
    cache.drop(linked)
    assert not cache.take_spare(tmp_path / "next")
    # Between its leave and now.
    late = entry(cache, "c")
    cache.drop(late)
    (kept,) = cache.root.glob(".spare-*")
    os.link(kept / WEIGHTS, tmp_path / "later")
    assert not cache.take_spare(tmp_path / "next")
    assert (tmp_path / "later").read_bytes() == b"c" * 200


def test_a_file_that_cannot_be_written_to_is_no_spare_file_and_leaves_nothing(
    cache: SnapshotCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the place of the next update was taken by it, and the push failed."""
    left = entry(cache, "a")
    (left / WEIGHTS).chmod(0o444)
    cache.drop(left)
    assert not [*cache.root.glob(".spare-*")]
    cache.drop(entry(cache, "b"))

    def refused(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(spare, "_is_free", refused)
    assert not cache.take_spare(tmp_path / "next")
    assert not (tmp_path / "next").exists()


def test_the_spare_file_is_the_first_to_go_and_no_snapshot_that_stays(cache: SnapshotCache) -> None:
    older, newer = entry(cache, "a"), entry(cache, "b")
    cache.drop(entry(cache, "c"))
    cache.drop(entry(cache, "d"))
    (kept,) = cache.root.glob(".spare-*")
    assert (kept / WEIGHTS).read_bytes() == b"d" * 200
    cache.make_room(500, (), "next")
    assert (older.exists(), newer.exists(), kept.exists()) == (True, True, False)
    unbounded = SnapshotCache(cache.root)
    unbounded.take_spare(cache.root / "none")
    unbounded.drop(older)
    other = entry(unbounded, "e")
    unbounded.prune({other})
    assert (newer.exists(), other.exists(), len([*cache.root.glob(".spare-*")])) == (True, True, 1)
