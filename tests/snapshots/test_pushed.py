"""Snapshots that came by another way than the bucket: taken once, held within the bound, kept in the bucket for others."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import files, flip_last, put_directory, rot, weights, write_checkpoint
from fingerprints import snapshot_fingerprint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3server import S3Server

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, SnapshotRefused
from midstream.core.types import Content, SnapshotFiles
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.content import (
    MANIFEST_FILE,
    content_fingerprint,
    directory_content,
    parse_manifest,
)
from midstream.snapshots.durable import sync_tree
from midstream.snapshots.identity import file_url_path, snapshot_url
from midstream.snapshots.store import kept
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import find_snapshot
from midstream.snapshots.store.local import TEMPORARY_PREFIX, temporary_directory
from midstream.snapshots.store.upload import read_file
from midstream.snapshots.store.whole_files import WholeFiles

NAMES = ["config.json", "model.safetensors", "tokenizer.json"]


class Bucket:
    """A bucket, a trainer, and the snapshots that it pushes."""

    def __init__(self, tmp_path: Path, url: str, runner: asyncio.Runner) -> None:
        self.tmp_path = tmp_path
        self.url = url
        self.run = runner.run

    def source(self, name: str, seed: int = 0, **more: Any) -> Path:
        path = self.tmp_path / "trainer" / name
        return path if path.exists() else write_checkpoint(path, seed=seed, **more)

    def content(self, name: str, seed: int = 0) -> Content:
        return directory_content(self.source(name, seed), NAMES)

    def link(self, name: str, seed: int = 0) -> SnapshotFiles:
        content = self.content(name, seed)
        return SnapshotFiles(
            snapshot=name,
            url=snapshot_url(self.url, name),
            fingerprint=content_fingerprint(content),
            content=content,
        )

    def manifest(self, name: str) -> Content:
        return parse_manifest(read_file(snapshot_url(self.url, name), MANIFEST_FILE, bytes_max=2**20))


class Replica:
    """slept: how often it looked into the bucket again. at_poll: called before each time."""

    def __init__(self, bucket: Bucket, name: str = "r0", bytes_max: int | None = None) -> None:
        self.bucket = bucket
        self.run = bucket.run
        self.slept = 0
        self.at_poll: Callable[[int], object] = lambda count: None
        self.root = bucket.tmp_path / name
        self.start(bytes_max)

    def start(self, bytes_max: int | None = None) -> None:
        self.cache = SnapshotCache(self.root, bytes_max)
        self.fetcher = ChainFetcher(self.cache, threads=1, sleep=self._sleep)

    async def _sleep(self, _: float) -> None:
        self.slept += 1
        found = self.at_poll(self.slept)
        if asyncio.iscoroutine(found):
            await found

    def receive(self, name: str, seed: int = 0) -> Path:
        directory = temporary_directory(self.root)
        shutil.copytree(self.bucket.source(name, seed), directory)
        self.fetcher.received(self.bucket.content(name), directory)
        return directory

    def load(self, *chain: SnapshotFiles, **options: Any) -> Path:
        async def steps() -> Path:
            path = await self.fetcher.fetch(chain, **options)
            return path if path is not None else await self.fetcher.rebuild(chain)

        path = self.run(steps())
        assert weights(path) == weights(self.bucket.source(chain[-1].snapshot))
        self.run(self.fetcher.release([chain]))
        return path

    def keep(self, name: str) -> None:
        self.run(self.fetcher.whole_files.keep(name, self.bucket.url, self.bucket.content(name)))

    def removed(self) -> None:
        """Wait until what was let go is gone."""
        if (removal := self.fetcher._received.removal) is not None:
            wait([removal])

    def entries(self) -> set[str]:
        return {path.name for path in self.root.iterdir() if path.is_dir()}


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def local(tmp_path: Path, runner: asyncio.Runner) -> Bucket:
    return Bucket(tmp_path, (tmp_path / "bucket").as_uri(), runner)


@pytest.fixture(params=["file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, runner: asyncio.Runner) -> Bucket:
    url = (tmp_path / "bucket").as_uri() if request.param == "file" else f"s3://rollouts/{tmp_path.name}"
    return Bucket(tmp_path, url, runner)


def test_received_files_are_taken_without_a_copy_and_without_the_bucket(local: Bucket) -> None:
    replica = Replica(local)
    directory = replica.receive("p1")
    inode = (directory / "model.safetensors").stat().st_ino
    path = replica.load(local.link("p1"))
    assert (path / "model.safetensors").stat().st_ino == inode
    assert replica.run(replica.fetcher.contents([local.link("p1")])) == (local.content("p1"),)
    # The directory is in its place, and nothing is left of it.
    assert replica.entries() == {path.name}
    # It is here, also for the same process after a restart.
    assert replica.load(local.link("p1")) == path
    replica.start()
    assert replica.load(local.link("p1")) == path
    assert replica.slept == 0


def test_files_of_another_content_are_not_taken_and_only_the_newest_are_held(local: Bucket) -> None:
    replica = Replica(local)
    old, new = replica.receive("p1"), replica.receive("p2", seed=1)
    replica.removed()
    assert replica.entries() == {new.name}
    with pytest.raises(SnapshotMissing, match="/p1: the snapshot was pushed, and its files are not in the"):
        replica.load(local.link("p1"))
    assert not old.exists()
    replica.load(local.link("p2"))


def test_forgotten_files_are_gone_and_others_stay(local: Bucket) -> None:
    replica = Replica(local)
    held = replica.receive("p1")
    replica.fetcher.forget_received(temporary_directory(replica.root))
    assert held.exists()
    replica.fetcher.forget_received(held)
    replica.removed()
    assert replica.entries() == set()
    taken = replica.receive("p1")
    path = replica.load(local.link("p1"))
    # It may be said late.
    replica.fetcher.forget_received(taken)
    replica.removed()
    assert weights(path) == weights(local.source("p1"))
    replica.receive("p2", seed=1)
    replica.fetcher.close()
    replica.removed()
    assert replica.entries() == {path.name}


def test_a_process_that_ends_after_it_received_starts_without_the_files(local: Bucket) -> None:
    replica = Replica(local)
    replica.receive("p1")
    replica.start()
    assert replica.entries() == set()
    with pytest.raises(SnapshotMissing):
        replica.load(local.link("p1"))


@pytest.mark.parametrize("where", ["note_contents", "write_own_listing", "move_into_place"])
def test_a_process_that_ends_while_it_takes_received_files_leaves_no_half_snapshot(
    local: Bucket, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any, **_named: Any) -> None:
        raise Killed

    replica = Replica(local)
    replica.receive("p1")
    monkeypatch.setattr(f"midstream.snapshots.store.received.{where}", die)
    with pytest.raises(Killed):
        replica.load(local.link("p1"))
    monkeypatch.undo()
    replica.start()
    assert replica.entries() == set()
    put_directory(local.url, "p1", local.source("p1"))
    replica.load(local.link("p1"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "model.safetensors").write_bytes(b"short"),
        lambda directory: (directory / "tokenizer.json").unlink(),
        lambda directory: (directory / "more.safetensors").write_bytes(b""),
        shutil.rmtree,
    ],
)
def test_received_files_that_are_not_what_was_said_are_fetched_from_the_bucket(
    local: Bucket, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(local)
    put_directory(local.url, "p1", local.source("p1"))
    damage(replica.receive("p1"))
    path = replica.load(local.link("p1"))
    replica.removed()
    assert replica.entries() == {path.name}
    assert "the files received of p1 cannot be used: " in caplog.text


def test_received_files_count_to_the_bound_and_are_not_evicted(local: Bucket) -> None:
    size = sum(len(data) for data in files(local.source("p0", size=300)).values())
    replica = Replica(local, bytes_max=int(2.5 * size))
    put_directory(local.url, "f0", local.source("f0", seed=5, size=300))
    put_directory(local.url, "f1", local.source("f1", seed=6, size=300))
    full = [
        SnapshotFiles(
            snapshot=name,
            url=snapshot_url(local.url, name),
            fingerprint=local.run(snapshot_fingerprint(snapshot_url(local.url, name))),
        )
        for name in ("f0", "f1")
    ]
    serving = replica.load(full[0])
    held = replica.receive("p0")
    with pytest.raises(SnapshotError, match=r"f1: .* do not fit into the snapshot cache"):
        replica.load(full[1])
    assert serving.exists()
    assert held.exists()
    # The held files become the entry: they are not counted twice.
    path = replica.load(local.link("p0"))
    assert replica.load(full[1]).exists()
    assert path.exists() != serving.exists()


def test_received_files_that_do_not_fit_beside_what_serves_wait_for_room(local: Bucket) -> None:
    size = sum(len(data) for data in files(local.source("p0", size=300)).values())
    replica = Replica(local, bytes_max=int(1.5 * size))
    replica.receive("p0")
    serving = replica.load(local.link("p0"))
    local.source("p1", seed=1, size=300)
    held = replica.receive("p1")
    with pytest.raises(SnapshotError, match=r"p1: .* do not fit into the snapshot cache"):
        replica.load(local.link("p1"))
    assert serving.exists()
    assert held.exists()
    replica.cache.bytes_max = 3 * size
    replica.load(local.link("p1"))


def test_files_that_went_bad_are_taken_from_the_bucket_next(bucket: Bucket) -> None:
    replica = Replica(bucket)
    replica.receive("p1")
    path = replica.load(bucket.link("p1"))
    replica.keep("p1")
    rot(path / "model.safetensors", flip_last)
    # As after a failed verification.
    replica.run(replica.fetcher.distrust(path))
    assert replica.load(bucket.link("p1")) == path
    rot(path / "model.safetensors", flip_last)
    # As after a failed check.
    assert replica.load(bucket.link("p1"), refetch=True) == path


def test_a_replica_that_joins_waits_until_the_files_are_kept(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replica, joiner = Replica(bucket), Replica(bucket, "r1")
    replica.receive("p1")
    replica.load(bucket.link("p1"))

    def keep(count: int) -> Any:
        return (
            replica.fetcher.whole_files.keep("p1", bucket.url, bucket.content("p1")) if count == 3 else None
        )

    joiner.at_poll = keep
    joiner.load(bucket.link("p1"))
    assert joiner.slept == 3
    assert [r.getMessage() for r in caplog.records if "awaited" in r.getMessage()] == [
        "p1 was pushed, and is awaited in its bucket"
    ]
    assert bucket.manifest("p1") == bucket.content("p1")


def test_what_is_kept_is_a_snapshot_as_a_publisher_writes_it(bucket: Bucket) -> None:
    replica = Replica(bucket)
    replica.receive("run/p1")
    replica.load(bucket.link("run/p1"))
    replica.keep("run/p1")
    found = bucket.run(find_snapshot(snapshot_url(bucket.url, "run/p1"), bucket.url))
    assert found.content == bucket.content("run/p1")
    assert list(found.sizes) != []
    # By its listing, as any trainer signals it.
    plain = SnapshotFiles(
        snapshot="run/p1", url=snapshot_url(bucket.url, "run/p1"), fingerprint=found.fingerprint
    )
    Replica(bucket, "r1").load(plain)


def test_the_wait_for_the_bucket_ends_with_an_error_and_with_a_cancellation(
    local: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(local)
    with pytest.raises(SnapshotMissing, match="the snapshot was pushed, and its files are not in the bucket"):
        replica.load(local.link("p1"))
    assert replica.slept == kept.KEPT_WAIT_S

    async def main() -> None:
        reached = asyncio.Event()

        async def for_ever() -> None:
            reached.set()
            await asyncio.Event().wait()

        replica.at_poll = lambda count: for_ever()
        fetching = asyncio.create_task(replica.fetcher.fetch([local.link("p1")]))
        await reached.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    local.run(main())
    # And the next one is like any other.
    replica.receive("p1")
    replica.load(local.link("p1"))


def test_files_that_failed_their_check_here_are_not_awaited_in_the_bucket(local: Bucket) -> None:
    """Nobody serves NaN, so nobody brings it there. A start must not wait for it before it serves what was good."""
    replica = Replica(local)
    replica.receive("p1")
    path = replica.load(local.link("p1"))
    replica.run(replica.fetcher.distrust(path))
    replica.start()
    with pytest.raises(SnapshotMissing, match="the snapshot was pushed, and its files are not in the bucket"):
        replica.load(local.link("p1"))
    assert replica.slept == 0
    # Where the copy here was to blame, the bucket has them.
    other = Replica(local, "r2")
    other.receive("p1")
    other.load(local.link("p1"))
    other.keep("p1")
    replica.load(local.link("p1"))


@pytest.mark.parametrize("refetch", [False, True])
def test_a_copy_in_the_bucket_that_went_bad_is_refused_by_its_content(local: Bucket, refetch: bool) -> None:
    path = file_url_path(put_directory(local.url, "p1", local.source("p1")))
    rot(path / "model.safetensors", flip_last)
    replica = Replica(local)
    with pytest.raises(
        SnapshotCorrupt, match=r"/p1: its bytes are not those .*model\.safetensors has the dig"
    ):
        replica.load(local.link("p1"), refetch=refetch)
    assert replica.entries() == set()
    assert replica.slept == 0


@pytest.mark.parametrize("content_known", [False, True])
def test_another_snapshot_in_its_place_is_refused_at_once(local: Bucket, content_known: bool) -> None:
    put_directory(local.url, "p1", local.source("other", seed=9))
    link = local.link("p1")
    link = link if content_known else msgspec.structs.replace(link, content=None)
    replica = Replica(local)
    with pytest.raises(SnapshotCorrupt, match="/p1: its bytes are not those that this name means"):
        replica.load(link)
    assert replica.slept == 0


def test_a_content_that_is_not_the_fingerprints_is_refused(local: Bucket) -> None:
    """The name of a parent means other files since."""
    link = msgspec.structs.replace(local.link("p1"), content=local.content("p2", seed=1))
    replica = Replica(local)
    with pytest.raises(SnapshotCorrupt, match="changed since the snapshot was signalled"):
        replica.load(link)
    assert replica.slept == 0


def test_without_its_content_a_link_is_found_in_the_bucket_alone(local: Bucket) -> None:
    replica = Replica(local)
    link = msgspec.structs.replace(local.link("p1"), content=None)
    replica.receive("p1")
    with pytest.raises(SnapshotMissing):
        replica.load(link)
    put_directory(local.url, "p1", local.source("p1"))
    replica.load(link)


def test_an_upload_in_progress_is_awaited(local: Bucket) -> None:
    """Files without a manifest, some missing still."""
    place = file_url_path(local.url) / "p1"
    place.mkdir(parents=True)
    shutil.copy(local.source("p1") / "model.safetensors", place)

    def next_file(count: int) -> None:
        if count == 2:
            for name in ("config.json", "tokenizer.json"):
                shutil.copy(local.source("p1") / name, place)

    replica = Replica(local)
    replica.at_poll = next_file
    replica.load(local.link("p1"))
    assert replica.slept == 2


def delta_on(bucket: Bucket, parent: str, name: str, seed: int) -> SnapshotFiles:
    child = bucket.source(name, seed)
    encode_delta(bucket.source(parent), child, bucket.tmp_path / "deltas" / name, "arc_v2")
    url = put_directory(bucket.url, name, bucket.tmp_path / "deltas" / name)
    return SnapshotFiles(
        snapshot=name, url=url, fingerprint=bucket.run(snapshot_fingerprint(url)), compression="arc_v2"
    )


def test_a_delta_on_pushed_weights_is_applied_to_what_was_received(bucket: Bucket) -> None:
    replica, joiner = Replica(bucket), Replica(bucket, "r1")
    replica.receive("p1")
    chain = (bucket.link("p1"), delta_on(bucket, "p1", "d2", seed=2))
    replica.load(*chain[:1])
    replica.load(*chain)
    assert replica.slept == 0
    # The whole chain from the bucket, once it is there.
    joiner.at_poll = lambda count: (
        put_directory(bucket.url, "p1", bucket.source("p1")) if count == 1 else None
    )
    joiner.load(*chain)
    assert joiner.slept == 1


def test_a_delta_finds_its_pushed_parent_among_what_was_received(local: Bucket) -> None:
    """The parent itself was superseded before it was loaded."""
    replica = Replica(local)
    replica.receive("p1")
    replica.load(local.link("p1"), delta_on(local, "p1", "d2", seed=2))
    assert replica.slept == 0


def test_a_received_parent_that_went_bad_is_replayed_from_the_bucket(local: Bucket) -> None:
    replica = Replica(local)
    rot(replica.receive("p1") / "model.safetensors", flip_last)
    chain = (local.link("p1"), delta_on(local, "p1", "d2", seed=2))
    put_directory(local.url, "p1", local.source("p1"))
    replica.load(*chain)


def test_keeping_twice_changes_nothing(bucket: Bucket) -> None:
    replica = Replica(bucket)
    replica.receive("p1")
    replica.load(bucket.link("p1"))
    replica.keep("p1")
    url = snapshot_url(bucket.url, "p1")
    before = bucket.run(find_snapshot(url))
    replica.keep("p1")
    # Also by one that has it no more.
    Replica(bucket, "r1").keep("p1")
    assert bucket.run(find_snapshot(url)) == before


def test_two_replicas_may_keep_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [Replica(bucket, name) for name in ("r0", "r1")]
    for replica in replicas:
        replica.receive("p1")
        replica.load(bucket.link("p1"))
    # Both have found nothing before one of them writes.
    met = threading.Barrier(2, timeout=60)
    real = WholeFiles._put

    def put(*arguments: Any) -> bool:
        met.wait()
        return real(*arguments)

    monkeypatch.setattr(WholeFiles, "_put", put)

    async def both() -> None:
        await asyncio.gather(
            *(r.fetcher.whole_files.keep("p1", bucket.url, bucket.content("p1")) for r in replicas)
        )

    bucket.run(both())
    assert bucket.manifest("p1") == bucket.content("p1")
    Replica(bucket, "r2").load(bucket.link("p1"))


@pytest.mark.parametrize("manifest", [False, True])
def test_other_files_in_its_place_are_left_alone(bucket: Bucket, s3: S3Server, manifest: bool) -> None:
    other = bucket.source("other", seed=9)
    if manifest:
        put_directory(bucket.url, "p1", other)
    elif bucket.url.startswith("file"):
        shutil.copytree(other, file_url_path(bucket.url) / "p1")
    else:
        s3.put_directory("rollouts", f"{bucket.tmp_path.name}/p1", other)
    url = snapshot_url(bucket.url, "p1")
    before = bucket.run(find_snapshot(url))
    replica = Replica(bucket)
    replica.receive("p1")
    replica.load(bucket.link("p1"))
    with pytest.raises(
        SnapshotRefused, match=r"/p1: has other files than the pushed ones already: model\.sa"
    ):
        replica.keep("p1")
    assert bucket.run(find_snapshot(url)) == before


def test_a_directory_with_no_snapshot_in_its_place_is_left_alone(local: Bucket) -> None:
    put_directory(local.url, "run/p0", local.source("p0", seed=3))
    replica = Replica(local)
    replica.receive("run")
    replica.load(local.link("run"))
    with pytest.raises(SnapshotRefused, match="/run: is there already, and is no snapshot"):
        replica.keep("run")
    assert sorted(os.listdir(file_url_path(local.url))) == ["run"]


def test_an_upload_that_was_interrupted_is_finished(bucket: Bucket, s3: S3Server) -> None:
    name, source = "model.safetensors", bucket.source("p1")
    if bucket.url.startswith("file"):
        (file_url_path(bucket.url) / "p1").mkdir(parents=True)
        shutil.copy(source / name, file_url_path(bucket.url) / "p1")
    else:
        s3.put("rollouts", f"{bucket.tmp_path.name}/p1/{name}", (source / name).read_bytes())
    replica = Replica(bucket)
    replica.receive("p1")
    replica.load(bucket.link("p1"))
    replica.keep("p1")
    assert bucket.manifest("p1") == bucket.content("p1")
    Replica(bucket, "r1").load(bucket.link("p1"))


def test_what_the_cache_has_no_more_or_has_damaged_is_not_kept(bucket: Bucket) -> None:
    replica = Replica(bucket)
    with pytest.raises(SnapshotMissing, match="p1: its files are not in this snapshot cache"):
        replica.keep("p1")
    replica.receive("p1")
    rot(replica.load(bucket.link("p1")) / "model.safetensors", flip_last)
    with pytest.raises(SnapshotCorrupt, match=r"is damaged: model\.safetensors has the digest"):
        replica.keep("p1")
    with pytest.raises(SnapshotMissing):
        bucket.run(find_snapshot(snapshot_url(bucket.url, "p1")))
    with pytest.raises(SnapshotMissing):
        replica.keep("p1")


def test_files_are_not_evicted_while_they_are_put(local: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(local, bytes_max=10 * 2**20)
    replica.receive("p1")
    path = replica.load(local.link("p1"))
    replica.run(replica.fetcher.release([]))
    real = kept.put_kept

    def evicted_meanwhile(*arguments: Any) -> bool:
        with pytest.raises(SnapshotError, match="do not fit"):
            replica.cache.make_room(11 * 2**20, (), "another one")
        return real(*arguments)

    monkeypatch.setattr("midstream.snapshots.store.whole_files.put_kept", evicted_meanwhile)
    replica.keep("p1")
    assert path.exists()
    with pytest.raises(SnapshotError, match="do not fit"):
        replica.cache.make_room(11 * 2**20, (), "another one")
    assert not path.exists(), "it is kept no more"


@pytest.mark.parametrize("files_before", [0, 1, 2])
def test_a_local_snapshot_that_is_kept_appears_whole_or_not_at_all(
    local: Bucket, files_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(local)
    replica.receive("p1")
    replica.load(local.link("p1"))
    real = shutil.copyfile
    copied: list[object] = []

    def full(source: Any, target: Any) -> Any:
        if len(copied) == files_before:
            raise OSError(28, "No space left on device")
        copied.append(real(source, target))
        return target

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SnapshotError, match="/p1: cannot be written: No space left on device"):
        replica.keep("p1")
    assert list(file_url_path(local.url).iterdir()) == []
    monkeypatch.undo()
    seen: list[set[str]] = []

    def sync(directory: Path) -> None:
        sync_tree(directory)
        seen.append({p.name for p in directory.parent.iterdir() if not p.name.startswith(".")})

    monkeypatch.setattr("midstream.snapshots.store.whole.sync_tree", sync)
    replica.keep("p1")
    assert seen == [set()]
    assert {p.name for p in (file_url_path(local.url) / "p1").iterdir()} == {*NAMES, MANIFEST_FILE}


def test_a_keep_that_is_cancelled_ends_at_the_next_file(
    local: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(local)
    replica.receive("p1")
    replica.load(local.link("p1"))
    copying, may = threading.Event(), threading.Event()
    real = shutil.copyfile
    copied: list[object] = []

    def slow(source: Any, target: Any) -> Any:
        copying.set()
        assert may.wait(60)
        copied.append(target)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", slow)

    async def main() -> None:
        keeping = asyncio.create_task(replica.fetcher.whole_files.keep("p1", local.url, local.content("p1")))
        assert await asyncio.to_thread(copying.wait, 60)
        keeping.cancel()
        # The cancellation has reached it.
        for _ in range(5):
            await asyncio.sleep(0)
        may.set()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    local.run(main())
    assert len(copied) == 1
    assert list(file_url_path(local.url).iterdir()) == []
    monkeypatch.undo()
    replica.keep("p1")


def test_a_configuration_that_the_replica_added_is_not_kept(local: Bucket) -> None:
    """It is beside a checkpoint that came without one."""
    source = local.source("p1")
    (source / "config.json").unlink()
    content = directory_content(source, ["model.safetensors", "tokenizer.json"])
    replica = Replica(local)
    directory = temporary_directory(replica.root)
    shutil.copytree(source, directory)
    replica.fetcher.received(content, directory)
    link = SnapshotFiles(
        snapshot="p1",
        url=snapshot_url(local.url, "p1"),
        fingerprint=content_fingerprint(content),
        content=content,
    )
    path = local.run(replica.fetcher.fetch([link]))
    assert path is not None
    (path / "config.json").write_text("{}")
    local.run(replica.fetcher.whole_files.keep("p1", local.url, content))
    assert local.manifest("p1") == content
    assert not (file_url_path(link.url) / "config.json").exists()


STEPS = st.lists(
    st.sampled_from(["receive", "load", "keep", "forget", "restart", "distrust", "join"]), max_size=10
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_whatever_happens_in_whatever_order_a_load_gives_the_pushed_bytes_or_says_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    with asyncio.Runner() as runner:
        root = tmp_path_factory.mktemp("pushed")
        bucket = Bucket(root, (root / "bucket").as_uri(), runner)
        replica, held, path = Replica(bucket), Path("none"), Path("none")
        here = in_bucket = False
        receives = False
        for i, step in enumerate(steps):
            if step == "receive":
                held, receives = replica.receive("p1"), True
            elif step == "forget":
                replica.fetcher.forget_received(held)
                receives = False
            elif step == "restart":
                replica.start()
                receives = False
            elif step == "distrust" and here:
                runner.run(replica.fetcher.distrust(path))
                here = False
            elif step == "keep" and (here or in_bucket):
                replica.keep("p1")
                in_bucket = True
            elif step == "join" and in_bucket:
                Replica(bucket, f"joiner{i}").load(bucket.link("p1"))
            elif step == "load" and (here or receives or in_bucket):
                path = replica.load(bucket.link("p1"))
                receives = receives and here
                here = True
            elif step in ("load", "keep"):
                with pytest.raises(SnapshotMissing):
                    replica.load(bucket.link("p1")) if step == "load" else replica.keep("p1")
            replica.removed()
            temporary = [name for name in replica.entries() if name.startswith(TEMPORARY_PREFIX)]
            assert len(temporary) == int(receives)
        shutil.rmtree(root)
