"""Copying in parallel parts: interrupted, continued, changed under way, out of room. On local buckets and on S3."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fetch_snapshot, files, write_checkpoint
from fingerprints import snapshot_fingerprint
from s3server import S3Server

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.snapshots import content
from midstream.snapshots.store import fetch
from midstream.snapshots.store.fetch import (
    fetch_listed,
    partial_directory,
    prefetch_files,
)
from midstream.snapshots.store.listing import Listing, list_snapshot
from midstream.snapshots.store.local import LISTING_FILE
from midstream.snapshots.store.upload import upload_order

PART = 1000
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "PART_BYTES", PART)


@pytest.fixture(params=["file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Bucket:
    return Bucket(tmp_path, s3 if request.param == "s3" else None)


class Bucket:
    """One snapshot in a local directory or in S3, whose files a test changes."""

    def __init__(self, tmp_path: Path, s3: S3Server | None) -> None:
        self.s3 = s3
        self.prefix = f"fetch-{random.randrange(10**12)}"
        self.directory = tmp_path / "bucket"
        self.directory.mkdir()
        self.url = f"s3://rollouts/{self.prefix}" if s3 else self.directory.as_uri()

    def put(self, name: str, data: bytes) -> None:
        if self.s3 is not None:
            self.s3.put("rollouts", f"{self.prefix}/{name}", data)
        else:
            (self.directory / f"{name}.new").write_bytes(data)
            (self.directory / f"{name}.new").rename(self.directory / name)

    def remove(self, name: str) -> None:
        if self.s3 is not None:
            self.s3.delete("rollouts", f"{self.prefix}/{name}")
        else:
            (self.directory / name).unlink()


class Watched:
    """A store whose reads a test sees, delays and breaks; `reads` are (name, part number)."""

    def __init__(self, store: Any, before: Callable[[str, int], Any] = lambda name, number: None) -> None:
        self._store = store
        self._before = before
        self.reads: list[tuple[str, int]] = []

    async def get_async(self, name: str, options: dict[str, Any]) -> Any:
        self.reads.append((name, options["range"][0] // PART))
        waits = self._before(name, len(self.reads))
        if waits is not None:
            await waits
        return await self._store.get_async(name, options=options)

    async def head_async(self, name: str) -> Any:
        return await self._store.head_async(name)


async def fetch_watched(
    url: str, dest: Path, before: Callable[[str, int], Any] = lambda name, number: None
) -> list[tuple[str, int]]:
    listing = await list_snapshot(url)
    watched = Watched(listing.store, before)
    try:
        await fetch_listed(Listing(url, watched, listing.files), dest)  # type: ignore[arg-type]
    finally:
        fetch_watched.reads = watched.reads  # type: ignore[attr-defined]
    return watched.reads


def parts(name: str, data: bytes) -> set[tuple[str, int]]:
    return {(name, n) for n in range(-(-len(data) // PART))}


def blob(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def listed(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_every_part_is_read_once_and_put_in_its_place(bucket: Bucket, tmp_path: Path) -> None:
    expected = {
        WEIGHTS: blob(10 * PART + 1),
        "config.json": b"{}",
        "vocab.json": b"",
        "b.safetensors": blob(PART),
    }
    for name, data in expected.items():
        bucket.put(name, data)
    reads = asyncio.run(fetch_watched(bucket.url, tmp_path / "dest"))
    assert files(tmp_path / "dest") == expected
    assert sorted(reads) == sorted(set().union(*(parts(n, d) for n, d in expected.items())))
    assert listed(tmp_path) == ["bucket", "dest"]


def test_parts_are_read_side_by_side_across_files(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(WEIGHTS, blob(9 * PART))
    # 12 parts: two full rounds.
    bucket.put("b.safetensors", blob(3 * PART))
    # Nobody passes alone.
    together = asyncio.Barrier(fetch.PARTS_IN_FLIGHT)
    asyncio.run(
        asyncio.wait_for(
            fetch_watched(bucket.url, tmp_path / "dest", lambda name, number: together.wait()), timeout=60
        )
    )
    assert (tmp_path / "dest" / WEIGHTS).read_bytes() == blob(9 * PART)


def test_a_cancelled_fetch_goes_on_where_it_was(bucket: Bucket, tmp_path: Path) -> None:
    data = blob(20 * PART)
    bucket.put(WEIGHTS, data)
    bucket.put("config.json", b"{}")

    async def scenario() -> tuple[list[Any], list[Any]]:
        never = asyncio.get_running_loop().create_future()
        reached = asyncio.Event()

        def stop_after_ten(name: str, number: int) -> Any:
            if number > 10:
                reached.set()
                return never
            return None

        first = asyncio.create_task(fetch_watched(bucket.url, tmp_path / "dest", stop_after_ten))
        await reached.wait()
        done: set[Any] = set()
        # Written, not only read.
        while len(done) < 10 - fetch.PARTS_IN_FLIGHT:
            await asyncio.sleep(0)
            done = set(range(journalled(partial_directory(tmp_path, bucket.url))))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not (tmp_path / "dest").exists()
        begun = fetch_watched.reads  # type: ignore[attr-defined]
        return begun, await fetch_watched(bucket.url, tmp_path / "dest")

    begun, again = asyncio.run(scenario())
    assert len(again) < 20
    assert set(begun) | set(again) == parts(WEIGHTS, data) | {("config.json", 0)}
    assert files(tmp_path / "dest") == {WEIGHTS: data, "config.json": b"{}"}
    assert listed(tmp_path) == ["bucket", "dest"]


async def test_a_read_that_breaks_as_it_is_cancelled_leaves_a_cancelled_fetch(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put(WEIGHTS, blob(3 * PART))

    reached = asyncio.Event()

    async def broken() -> None:
        reached.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise SnapshotError("the connection was closed") from None

    task = asyncio.create_task(fetch_watched(bucket.url, tmp_path / "dest", lambda name, number: broken()))
    await reached.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def journalled(partial: Path) -> int:
    return sum(p.stat().st_size // 36 for p in partial.glob("*.done")) if partial.exists() else 0


KILLED = """
import asyncio, sys
from midstream.snapshots import content
from midstream.snapshots.store import fetch, listing
from pathlib import Path
content.PART_BYTES = int(sys.argv[3])
def progress(done, total):
    if done >= 7 * content.PART_BYTES:
        print(done, flush=True)
        sys.stdin.read()  # the parts that are there are there; nothing more happens
listed = asyncio.run(listing.list_snapshot(sys.argv[1]))
asyncio.run(fetch.fetch_listed(listed, Path(sys.argv[2]), progress))
"""


def test_a_process_killed_half_way_leaves_what_the_next_one_uses(bucket: Bucket, tmp_path: Path) -> None:
    data = blob(30 * PART)
    bucket.put(WEIGHTS, data)
    arguments = [sys.executable, "-c", KILLED, bucket.url, str(tmp_path / "dest"), str(PART)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) >= 7 * PART
        process.kill()
    assert not (tmp_path / "dest").exists()
    partial = partial_directory(tmp_path, bucket.url)
    (journal,) = partial.glob("*.done")
    with journal.open("ab") as torn:
        # A record cut short.
        torn.write(b"\x01")
    kept = journalled(partial)
    reads = asyncio.run(fetch_watched(bucket.url, tmp_path / "dest"))
    assert 7 <= kept < 30
    assert len(reads) == 30 - kept
    assert (tmp_path / "dest" / WEIGHTS).read_bytes() == data


def test_what_is_left_of_another_version_is_not_used(bucket: Bucket, tmp_path: Path) -> None:
    new, same = blob(8 * PART, seed=1), blob(3 * PART, seed=2)
    bucket.put(WEIGHTS, blob(8 * PART))
    bucket.put("b.safetensors", same)
    asyncio.run(prefetch_files(bucket.url, tmp_path, [WEIGHTS, "b.safetensors"]))
    bucket.put(WEIGHTS, new)
    reads = asyncio.run(fetch_watched(bucket.url, tmp_path / "dest"))
    assert sorted(reads) == sorted(parts(WEIGHTS, new))
    assert files(tmp_path / "dest") == {WEIGHTS: new, "b.safetensors": same}


def test_files_fetched_early_are_not_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    data = blob(5 * PART)
    bucket.put(WEIGHTS, data)
    asyncio.run(prefetch_files(bucket.url, tmp_path, [WEIGHTS]))
    assert listed(tmp_path) == sorted([partial_directory(tmp_path, bucket.url).name, "bucket"])
    bucket.put("config.json", b"{}")
    assert asyncio.run(fetch_watched(bucket.url, tmp_path / "dest")) == [("config.json", 0)]
    assert files(tmp_path / "dest") == {WEIGHTS: data, "config.json": b"{}"}


@pytest.mark.parametrize("name", ["absent.safetensors", "../config.json", "weights.bin", "a/config.json"])
def test_only_files_of_the_snapshot_can_be_fetched_early(bucket: Bucket, tmp_path: Path, name: str) -> None:
    bucket.put("config.json", b"{}")
    with pytest.raises(SnapshotMissing) as caught:
        asyncio.run(prefetch_files(bucket.url, tmp_path, [name]))
    assert str(caught.value).startswith(f"{bucket.url}: {name} ")


@pytest.mark.parametrize("how", ["rewritten", "truncated", "grown", "removed"])
@pytest.mark.parametrize("after", [1, 12])
def test_a_file_that_changes_under_way_is_an_error_that_names_it(
    bucket: Bucket, tmp_path: Path, how: str, after: int
) -> None:
    data = blob(12 * PART)
    bucket.put(WEIGHTS, data)
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "old").write_text("serves on")
    change = {
        "rewritten": lambda: bucket.put(WEIGHTS, blob(12 * PART, seed=1)),
        "truncated": lambda: bucket.put(WEIGHTS, data[: 2 * PART]),
        "grown": lambda: bucket.put(WEIGHTS, data + b"more"),
        "removed": lambda: bucket.remove(WEIGHTS),
    }[how]

    def before(name: str, number: int) -> None:
        if number == after:
            change()

    with pytest.raises(SnapshotCorrupt) as caught:
        asyncio.run(fetch_watched(bucket.url, tmp_path / "dest", before))
    assert str(caught.value).startswith(f"{bucket.url}: {WEIGHTS} changed while it was read")
    assert files(tmp_path / "dest") == {"old": b"serves on"}
    if how == "rewritten":
        asyncio.run(fetch_snapshot(bucket.url, tmp_path / "dest"))
        assert (tmp_path / "dest" / WEIGHTS).read_bytes() == blob(12 * PART, seed=1)


def test_a_file_changed_after_its_last_part_is_found_too(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(WEIGHTS, blob(2 * PART))

    class Late(Watched):
        async def head_async(self, name: str) -> Any:
            bucket.put(WEIGHTS, blob(2 * PART, seed=1))
            return await super().head_async(name)

    async def scenario() -> None:
        listing = await list_snapshot(bucket.url)
        late: Any = Late(listing.store)
        await fetch_listed(Listing(bucket.url, late, listing.files), tmp_path / "dest")

    with pytest.raises(SnapshotCorrupt, match="changed while it was read"):
        asyncio.run(scenario())
    assert not (tmp_path / "dest").exists()


def test_a_disk_that_is_nearly_full_is_an_error_before_anything_is_read(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(WEIGHTS, blob(4 * PART))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=3 * PART))
    with pytest.raises(
        SnapshotError, match=f"4000 bytes are to be fetched, .* has only {3 * PART} bytes free"
    ):
        asyncio.run(fetch_watched(bucket.url, tmp_path / "dest"))
    assert fetch_watched.reads == []  # type: ignore[attr-defined]


def test_a_disk_that_is_full_half_way_is_an_error_and_gets_its_room_back(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(WEIGHTS, blob(10 * PART))
    real, written = os.pwrite, 0

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        written += 1
        if written > 4:
            raise OSError(28, "No space left on device")
        # A short write is no error.
        return real(fd, data[:300], offset)

    monkeypatch.setattr(fetch.os, "pwrite", pwrite)
    monkeypatch.setattr(fetch.os, "copy_file_range", no_kernel_copy)
    with pytest.raises(SnapshotError, match=r"cannot write to .*: No space left on device"):
        asyncio.run(fetch_snapshot(bucket.url, tmp_path / "dest"))
    assert listed(tmp_path) == ["bucket"]


async def test_a_fetch_has_its_room_before_another_process_looks_at_the_disk(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Its files have their blocks before their first byte comes."""
    size = 64 * 4096
    bucket.put(WEIGHTS, blob(size))

    listing = await list_snapshot(bucket.url)
    fetch.reserve_files(tmp_path, listing)
    (reserved,) = partial_directory(tmp_path, bucket.url).glob("*.part")
    assert reserved.stat().st_blocks * 512 >= size
    await fetch_listed(listing, tmp_path / "dest")
    assert files(tmp_path / "dest") == {WEIGHTS: blob(size)}


def test_a_disk_whose_room_goes_meanwhile_gets_back_what_was_reserved(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(WEIGHTS, blob(4 * PART))

    def taken(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "reserve", taken)
    with pytest.raises(SnapshotError, match=r"cannot write to .*: No space left on device"):
        asyncio.run(fetch_watched(bucket.url, tmp_path / "dest"))
    assert fetch_watched.reads == []  # type: ignore[attr-defined]
    assert listed(tmp_path) == ["bucket"]


def test_files_fetched_early_do_not_fill_the_disk(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(WEIGHTS, blob(4 * PART))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=3 * PART))
        with pytest.raises(SnapshotError, match="4000 bytes are to be fetched"):
            asyncio.run(prefetch_files(bucket.url, tmp_path, [WEIGHTS]))
    assert journalled(partial_directory(tmp_path, bucket.url)) == 0

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.os, "pwrite", full)
    monkeypatch.setattr(fetch.os, "copy_file_range", no_kernel_copy)
    where = re.escape(str(tmp_path)[:200])
    with pytest.raises(SnapshotError, match=f"cannot write to {where}.*: No space left on device"):
        asyncio.run(prefetch_files(bucket.url, tmp_path, [WEIGHTS]))
    assert listed(tmp_path) == ["bucket"]


def no_kernel_copy(*_: Any) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def kernel_copy_of_a_share(*_: Any) -> int:
    """As of CIFS."""
    raise OSError(errno.EIO, "Input/output error")


def kernel_copy_of_nothing(*_: Any) -> int:
    """As of file systems in user space that cannot, and do not say so."""
    return 0


@pytest.mark.parametrize(
    "kernel_copy", [None, no_kernel_copy, kernel_copy_of_a_share, kernel_copy_of_nothing]
)
def test_a_local_bucket_is_copied_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_copy: Callable[..., int] | None
) -> None:
    if kernel_copy is not None:
        monkeypatch.setattr(fetch.os, "copy_file_range", kernel_copy)
    (tmp_path / "source").mkdir()
    expected = {WEIGHTS: blob(7 * PART + 3), "b.safetensors": blob(PART, seed=1), "vocab.json": b""}
    for name, data in expected.items():
        (tmp_path / "source" / name).write_bytes(data)
    seen: list[tuple[int, int]] = []
    url = (tmp_path / "source").as_uri()
    asyncio.run(fetch_snapshot(url, tmp_path / "dest", lambda done, total: seen.append((done, total))))
    assert files(tmp_path / "dest") == expected
    assert seen[0] == (0, 8 * PART + 3)
    assert seen[-1] == (8 * PART + 3,) * 2


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SnapshotError, match=r"source: cannot write to .*file"):
        asyncio.run(fetch_snapshot(source.as_uri(), tmp_path / "file" / "dest"))


def test_a_pipe_in_a_local_bucket_is_an_error_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    os.mkfifo(tmp_path / "source" / WEIGHTS)
    url = (tmp_path / "source").as_uri()
    for attempt in (
        lambda: fetch_snapshot(url, tmp_path / "dest"),
        lambda: prefetch_files(url, tmp_path, [WEIGHTS]),
    ):
        with pytest.raises(SnapshotCorrupt, match=r"source: model\.safetensors is not a regular file"):
            asyncio.run(asyncio.wait_for(attempt(), timeout=60))


def test_a_manifest_beside_a_configuration_is_another_programs_file(tmp_path: Path) -> None:
    """Else snapshots that were signalled before SkyRL's deltas were read would list differently."""
    source = write_checkpoint(tmp_path / "source")
    before = asyncio.run(snapshot_fingerprint(source.as_uri()))
    (source / "manifest.json").write_text("{}")
    asyncio.run(fetch_snapshot(source.as_uri(), tmp_path / "dest", fingerprint=before))
    assert not (tmp_path / "dest" / "manifest.json").exists()
    assert "manifest.json" not in upload_order(path.name for path in source.iterdir())
    # A delta of SkyRL has neither configuration nor index.
    (source / "config.json").unlink()
    assert asyncio.run(snapshot_fingerprint(source.as_uri())) != before
    asyncio.run(fetch_snapshot(source.as_uri(), tmp_path / "delta"))
    assert (tmp_path / "delta" / "manifest.json").exists()


def test_a_link_to_a_file_is_fetched_as_the_file(tmp_path: Path) -> None:
    """As in the directories that Hugging Face's own cache is made of."""
    (tmp_path / "source").mkdir()
    (tmp_path / "blob").write_bytes(blob(3 * PART))
    (tmp_path / "source" / WEIGHTS).symlink_to(tmp_path / "blob")
    asyncio.run(fetch_snapshot((tmp_path / "source").as_uri(), tmp_path / "dest"))
    assert files(tmp_path / "dest") == {WEIGHTS: blob(3 * PART)}
    assert not (tmp_path / "dest" / WEIGHTS).is_symlink()


def test_a_read_that_breaks_off_is_tried_again(bucket: Bucket, tmp_path: Path) -> None:
    from obstore.exceptions import GenericError

    bucket.put(WEIGHTS, blob(3 * PART))
    broken = 0

    def before(name: str, number: int) -> None:
        nonlocal broken
        if number <= fetch.PART_ATTEMPTS - 1:
            broken += 1
            raise GenericError("error decoding response body")

    asyncio.run(fetch_watched(bucket.url, tmp_path / "dest", before))
    assert broken == fetch.PART_ATTEMPTS - 1
    assert (tmp_path / "dest" / WEIGHTS).read_bytes() == blob(3 * PART)
    assert LISTING_FILE in listed(tmp_path / "dest")
