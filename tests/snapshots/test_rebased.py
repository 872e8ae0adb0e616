"""Whole files of an incremental snapshot, put beside its delta: digested, written, and taken instead of the chain."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip_last, put_directory, rot, weights, write_checkpoint
from fingerprints import snapshot_fingerprint

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.core.types import Content, SnapshotFiles
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.content import content_fingerprint, directory_content
from midstream.snapshots.store import chain as chain_module
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.local import directory_bytes

Chain = tuple[SnapshotFiles, ...]


class World:
    """A bucket with a full snapshot `s0` and deltas on it, each link with its content. listed: what was read of the bucket."""

    def __init__(self, tmp_path: Path, runner: asyncio.Runner) -> None:
        self.tmp_path = tmp_path
        self.bucket = (tmp_path / "bucket").as_uri()
        self.run = runner.run
        self.chain: Chain = ()
        self.listed: list[str] = []

    def publish(self, count: int) -> Chain:
        for _ in range(count):
            i = len(self.chain)
            source, files = write_checkpoint(self.source(i), seed=i), self.source(i)
            if i > 0:
                files = self.tmp_path / f"delta{i}"
                encode_delta(self.source(i - 1), source, files, "arc_v2")
            url = put_directory(self.bucket, f"s{i}", files)
            own = SnapshotFiles(
                snapshot=f"s{i}",
                url=url,
                fingerprint=self.run(snapshot_fingerprint(url)),
                compression="arc_v2" if i else None,
                content=directory_content(files, [path.name for path in files.iterdir()]),
            )
            self.chain = (*self.chain, own)
        return self.chain

    def source(self, number: int) -> Path:
        return self.tmp_path / f"source{number}"

    def whole(self, content: Content, number: int) -> SnapshotFiles:
        return SnapshotFiles(
            snapshot=f"s{number}",
            url=f"{self.bucket}/s{number}.full",
            fingerprint=content_fingerprint(content),
            content=content,
        )


class Replica:
    def __init__(self, world: World, name: str = "r0", bytes_max: int | None = None) -> None:
        self.world = world
        self.cache = SnapshotCache(world.tmp_path / name, bytes_max)
        self.fetcher = ChainFetcher(self.cache, threads=1)

    def load(self, chain: Chain, serves: bool = True) -> Path:
        async def steps() -> Path:
            path = await self.fetcher.fetch(chain)
            return path if path is not None else await self.fetcher.rebuild(chain)

        self.world.listed.clear()
        path = self.world.run(steps())
        assert weights(path) == weights(self.world.source(int(chain[-1].snapshot[1:])))
        if serves:
            self.world.run(self.fetcher.release([chain]))
        return path

    def digest(self, chain: Chain) -> Content:
        return self.world.run(self.fetcher.digest(chain))

    def keep(self, chain: Chain, content: Content) -> None:
        name = f"{chain[-1].snapshot}.full"
        self.world.run(self.fetcher.whole_files.keep(name, self.world.bucket, content))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with asyncio.Runner() as runner:
        made = World(tmp_path, runner)
        real = chain_module.list_snapshot

        async def list_snapshot(url: str, fingerprint: str | None = None) -> Any:
            made.listed.append(url.rpartition("/")[2])
            return await real(url, fingerprint)

        monkeypatch.setattr(chain_module, "list_snapshot", list_snapshot)
        monkeypatch.setattr("midstream.snapshots.store.kept.list_snapshot", list_snapshot)
        yield made


def rebased(world: World, replica: Replica, chain: Chain) -> SnapshotFiles:
    """The link that stands for `chain`, once the replica has put its whole files into the bucket."""
    content = replica.digest(chain)
    replica.keep(chain, content)
    return world.whole(content, len(chain) - 1)


def test_the_whole_files_are_what_an_independent_rebuild_makes(world: World) -> None:
    replica = Replica(world)
    chain = world.publish(4)
    replica.load(chain)
    whole = rebased(world, replica, chain)
    put = world.tmp_path / "bucket" / "s3.full"
    assert weights(put) == weights(world.source(3))
    # Another replica rebuilt from the first link on, and has the same bytes.
    other = Replica(world, "r1")
    other.load(chain)
    assert other.digest(chain) == whole.content == replica.digest(chain)
    assert (put / "config.json").read_bytes() == (world.source(3) / "config.json").read_bytes()


def test_a_joiner_fetches_the_whole_files_and_later_deltas_only(world: World) -> None:
    replica = Replica(world)
    chain = world.publish(4)
    replica.load(chain)
    whole = rebased(world, replica, chain)
    later = world.publish(2)
    joiner = Replica(world, "r1")
    joiner.load((whole, *later[4:]))
    assert sorted(joiner.world.listed) == ["s3.full", "s4", "s5"]
    # Whole files and later ones stay where they are after a restart.
    again = Replica(world, "r1")
    again.load((whole, *later[4:]))
    assert world.listed == []


def test_a_replica_that_rebuilt_the_snapshot_fetches_it_no_more(world: World) -> None:
    replica = Replica(world)
    chain = world.publish(4)
    replica.load(chain)
    whole = rebased(world, replica, chain)
    later = world.publish(1)
    replica.load((whole, later[4]))
    assert world.listed == ["s4"]


def test_deltas_that_came_while_the_files_were_put_are_not_replayed(world: World) -> None:
    replica = Replica(world)
    chain = world.publish(3)
    replica.load(chain)
    content = replica.digest(chain)
    # The signals of these came before the ledger knew of the whole files.
    for _ in range(2):
        replica.load(world.publish(1))
    whole = world.whole(content, 2)
    later = world.publish(1)
    replica.load((whole, *later[3:]))
    assert world.listed == ["s5"]


def bound(world: World, chain: Chain) -> int:
    """Of a cache: what serves, and what is rebuilt from it, with its delta."""
    path = Replica(world, "measured").load(chain)
    return 2 * directory_bytes(path) + 2 * directory_bytes(world.tmp_path / "bucket" / chain[-1].snapshot)


def test_links_to_the_whole_files_take_no_room(world: World) -> None:
    chain = world.publish(4)
    bytes_max = bound(world, chain)
    replica = Replica(world, bytes_max=bytes_max)
    for i in range(len(chain)):
        replica.load(chain[: i + 1])
    whole = rebased(world, replica, chain)
    later: Chain = (whole,)
    for i in range(4, 8):
        later = (*later, world.publish(1)[i])
        replica.load(later)
        assert world.listed == [f"s{i}"]
        files = [path.stat() for path in replica.cache.root.rglob("*") if path.is_file()]
        used = {(one.st_dev, one.st_ino): one.st_size for one in files}
        assert sum(used.values()) <= bytes_max


def test_files_that_are_put_make_way_for_a_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = world.publish(3)
    bytes_max = bound(world, chain)
    replica = Replica(world, bytes_max=bytes_max)
    for i in range(len(chain)):
        path = replica.load(chain[: i + 1])
    content = replica.digest(chain)
    real = shutil.copyfile

    def room_is_needed(source: Any, target: Any, **options: Any) -> Any:
        replica.cache.make_room(bytes_max, (), "the next snapshot")
        return real(source, target, **options)

    world.run(replica.fetcher.release([]))
    monkeypatch.setattr(shutil, "copyfile", room_is_needed)
    with pytest.raises(SnapshotError):
        replica.keep(chain, content)
    assert not path.exists()
    assert not (world.tmp_path / "bucket" / "s2.full").exists()


def test_files_that_went_bad_since_they_were_digested_are_not_put(world: World) -> None:
    chain = world.publish(3)
    replica = Replica(world)
    path = replica.load(chain)
    content = replica.digest(chain)
    rot(path / "model.safetensors", flip_last)
    with pytest.raises(SnapshotCorrupt, match="is damaged"):
        replica.keep(chain, content)
    assert not (world.tmp_path / "bucket" / "s2.full").exists()
    # And from now on they are not taken for the snapshot.
    with pytest.raises(SnapshotMissing):
        replica.digest(chain)
    # Made anew, they are digested anew.
    replica.load(chain)
    replica.keep(chain, replica.digest(chain))
    assert weights(world.tmp_path / "bucket" / "s2.full") == weights(world.source(2))


def test_files_that_went_bad_before_they_were_digested_stop_no_later_rebase(world: World) -> None:
    """Their digest tells nobody that they are bad. Other replicas' digests do."""
    chain = world.publish(3)
    replica = Replica(world)
    path = replica.load(chain)
    rot(path / "model.safetensors", flip_last)
    other = Replica(world, "r1")
    other.load(chain)
    assert replica.digest(chain) != other.digest(chain)
    world.run(replica.fetcher.distrust_chain(chain))
    with pytest.raises(SnapshotMissing):
        replica.digest(chain)
    # The next snapshot is made of sound files, though its delta says nothing of the rest.
    later = world.publish(1)
    replica.load(later)
    whole = rebased(world, replica, later)
    assert weights(world.tmp_path / "bucket" / "s3.full") == weights(world.source(3))
    other.load(later)
    assert other.digest(later) == whole.content


def test_whole_files_that_were_damaged_in_the_bucket_are_found_by_their_digest(world: World) -> None:
    chain = world.publish(3)
    replica = Replica(world)
    replica.load(chain)
    whole = rebased(world, replica, chain)
    rot(world.tmp_path / "bucket" / "s2.full" / "model.safetensors", flip_last)
    joiner = Replica(world, "r1")
    with pytest.raises(SnapshotCorrupt, match=r"s2.full.*has the digest"):
        joiner.load((whole,))


def test_what_is_not_here_whole_is_not_digested(world: World) -> None:
    chain = world.publish(3)
    replica = Replica(world)
    replica.load(chain[:2])
    with pytest.raises(SnapshotMissing, match="s2: its whole files are not in this snapshot cache"):
        replica.digest(chain)
