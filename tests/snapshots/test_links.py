"""Large files of a local bucket are linked into the cache, and what is loaded has the bytes that were digested."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_delta import arrays, assert_equal, changed, checkpoint, loaded
from trainer_writers import write_miles

from midstream.core.errors import SnapshotCorrupt
from midstream.core.types import FileContent, SnapshotFiles
from midstream.snapshots.content import file_content
from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.store import chain as chain_module
from midstream.snapshots.store import fetch as fetch_module
from midstream.snapshots.store import links as links_module
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.fetch import fetch_listed, partial_directory
from midstream.snapshots.store.links import Links
from midstream.snapshots.store.listing import list_snapshot
from midstream.snapshots.store.local import noted_contents

WEIGHTS = "model.safetensors"
SIZE = 3 * 2**20

pytestmark = pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="leases are Linux's")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(links_module, "LINK_BYTES_MIN", SIZE)
    directory = tmp_path / "bucket" / "s1"
    directory.mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(os.urandom(SIZE))
    (directory / "config.json").write_text("{}")
    return directory


def chain_of(directory: Path) -> list[SnapshotFiles]:
    listing = asyncio.run(list_snapshot(directory.as_uri()))
    return [SnapshotFiles(snapshot="s1", url=directory.as_uri(), fingerprint=listing.fingerprint)]


def test_a_link_whose_directory_was_removed_is_made_again(bucket: Path, tmp_path: Path) -> None:
    """As after bytes that were not the expected ones, whose partial directory is removed."""
    links, path = Links(), tmp_path / "link"
    for _ in range(2):
        assert links.link(str(bucket / WEIGHTS), SIZE, path)
        assert is_link(path)
        path.unlink()
    links.end()
    # None is held twice.
    os.close(os.open(bucket / WEIGHTS, os.O_WRONLY | os.O_NONBLOCK))


def fetched(chains: ChainFetcher, directory: Path) -> Path:
    found = asyncio.run(chains.fetch(chain_of(directory)))
    assert found is not None
    return found


def is_link(path: Path) -> bool:
    return path.stat().st_nlink > 1


def test_a_large_file_is_linked_and_digested_and_a_small_one_copied(bucket: Path, tmp_path: Path) -> None:
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), links=True)
    found = fetched(chains, bucket)
    assert (is_link(found / WEIGHTS), is_link(found / "config.json")) == (True, False)
    assert file_content(bucket / WEIGHTS) in noted_contents(found)[0]
    chains.check_unchanged()
    # A file that is replaced keeps its bytes under the link.
    before = (bucket / WEIGHTS).read_bytes()
    (bucket / "new").write_bytes(bytes(SIZE))
    (bucket / "new").rename(bucket / WEIGHTS)
    assert (found / WEIGHTS).read_bytes() == before


def test_who_writes_to_a_linked_file_waits_and_the_load_fails(bucket: Path, tmp_path: Path) -> None:
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), links=True)
    found = fetched(chains, bucket)
    before = (bucket / WEIGHTS).read_bytes()
    with pytest.raises(BlockingIOError):
        os.open(bucket / WEIGHTS, os.O_WRONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=(bucket / WEIGHTS).write_bytes, args=(bytes(SIZE),))
    writer.start()
    assert (found / WEIGHTS).read_bytes() == before
    with pytest.raises(SnapshotCorrupt, match=r"'?model.safetensors'? was opened for writing while"):
        chains.check_unchanged()
    writer.join(60)
    assert (bucket / WEIGHTS).read_bytes() == bytes(SIZE)
    # The cached link is not used any more.
    again = fetched(chains, bucket)
    assert (again / WEIGHTS).read_bytes() == bytes(SIZE)
    assert file_content(bucket / WEIGHTS) in noted_contents(again)[0]


def test_the_parent_of_a_delta_is_held_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's delta proves only what it changes: the rest of the whole files are the parent's bytes."""
    monkeypatch.setattr(links_module, "LINK_BYTES_MIN", 1000)
    new = changed(arrays())
    full = checkpoint(tmp_path / "bucket" / "v0", arrays())
    delta = write_miles(tmp_path / "bucket" / "weight_v000001", arrays(), new)
    chain = chain_of(full)
    (link,) = chain_of(delta)
    chain.append(msgspec.structs.replace(link, snapshot="v1", compression="miles_delta"))
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1, links=True)
    fetched(chains, full)
    asyncio.run(chains.release([chain[:1]]))
    linked = []

    def apply(parent: Path, *args: Any, **options: Any) -> None:
        linked.append(is_link(parent / WEIGHTS))
        if len(linked) == 1:
            with pytest.raises(BlockingIOError):
                os.open(full / WEIGHTS, os.O_WRONLY | os.O_NONBLOCK)
        rebuild(parent, *args, **options)

    monkeypatch.setattr(chain_module, "rebuild", apply)

    async def load() -> Path:
        assert await chains.fetch(chain) is None
        return await chains.rebuild(chain)

    assert_equal(loaded(asyncio.run(load())), new)
    # Somebody wanted to write meanwhile, so it was made again.
    assert linked == [True, True]


def test_where_nothing_is_linked_nothing_is_held(bucket: Path, tmp_path: Path) -> None:
    """vLLM links an adapter's files from the cache itself, and nobody ends a lease after its load."""
    found = fetched(ChainFetcher(SnapshotCache(tmp_path / "cache")), bucket)
    os.link(found / WEIGHTS, tmp_path / "linked by the engine")
    links = Links(enabled=False)
    assert links.hold(found)
    os.close(os.open(found / WEIGHTS, os.O_WRONLY | os.O_NONBLOCK))
    links.end()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_someone_may_write_to_is_copied(bucket: Path, tmp_path: Path, mapped: bool) -> None:
    writer = (bucket / WEIGHTS).open("r+b")
    memory = mmap.mmap(writer.fileno(), 0) if mapped else None
    if mapped:
        writer.close()
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), links=True)
    found = fetched(chains, bucket)
    assert not is_link(found / WEIGHTS)
    chains.check_unchanged()
    if memory is not None:
        memory.close()
    writer.close()


def test_a_cached_link_is_held_again_or_not_used(bucket: Path, tmp_path: Path) -> None:
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), links=True)
    fetched(chains, bucket)
    chains.check_unchanged()
    assert is_link(fetched(chains, bucket) / WEIGHTS)
    with pytest.raises(BlockingIOError):
        os.open(bucket / WEIGHTS, os.O_WRONLY | os.O_NONBLOCK)
    asyncio.run(chains.release([]))
    with (bucket / WEIGHTS).open("r+b"):
        assert not is_link(fetched(chains, bucket) / WEIGHTS)


async def test_a_link_that_an_interrupted_fetch_left_is_never_written_to(
    bucket: Path, tmp_path: Path
) -> None:
    """The next fetch may copy, and would write to the bucket."""
    before = (bucket / WEIGHTS).read_bytes()
    links = Links()

    async def interrupted() -> None:
        listing = await list_snapshot(bucket.as_uri())

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        await fetch_listed(listing, tmp_path / "dest", stop, links=links)

    with pytest.raises(KeyboardInterrupt):
        await interrupted()
    links.end()
    assert [path for path in partial_directory(tmp_path, bucket.as_uri()).glob("*.part") if is_link(path)]

    await fetch_listed(await list_snapshot(bucket.as_uri()), tmp_path / "dest")
    assert not is_link(tmp_path / "dest" / WEIGHTS)
    assert (bucket / WEIGHTS).read_bytes() == (tmp_path / "dest" / WEIGHTS).read_bytes() == before


class Told:
    """What a `Making` learns, and what it finds then."""

    def __init__(self) -> None:
        self.files: dict[str, os.stat_result] = {}
        self.weights = b""
        self.tensors: list[str] = []
        self.directory: Path | None = None

    def begun(self, directory: Path) -> None:
        self.directory = directory
        self.files = {path.name: path.stat() for path in directory.iterdir()}
        self.weights = (directory / WEIGHTS).read_bytes()

    def made(self, tensor: str) -> None:
        self.tensors.append(tensor)

    def given_up(self) -> None:
        raise AssertionError("nothing was refused")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = checkpoint(tmp_path / "bucket" / "s1", arrays())
    monkeypatch.setattr(links_module, "LINK_BYTES_MIN", (directory / WEIGHTS).stat().st_size)
    return directory


def test_linked_weights_may_be_read_before_they_are_digested(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the files that the fetch then gives, and nothing of them is left elsewhere."""
    told, read = Told(), fetch_module.contents.read_parts
    seen: list[list[str]] = []

    def digested(file: int, ranges: Any) -> Any:
        if os.fstat(file).st_size == (published / WEIGHTS).stat().st_size:
            seen.append(told.tensors.copy())
        return read(file, ranges)

    monkeypatch.setattr(fetch_module.contents, "read_parts", digested)
    cache = SnapshotCache(tmp_path / "cache")
    chains = ChainFetcher(cache, threads=1, links=True)
    path = asyncio.run(chains.fetch(chain_of(published), making=told))
    assert path is not None
    assert seen == [told.tensors]
    assert sorted(told.tensors) == sorted(arrays())
    assert told.weights == (published / WEIGHTS).read_bytes()
    assert told.files.keys() >= {WEIGHTS, "config.json"}
    assert all(os.path.samestat(found, (path / name).stat()) for name, found in told.files.items())
    chains.check_unchanged()
    assert [one.name for one in cache.root.iterdir() if one.is_dir()] == [path.name]
    assert (path / "config.json").stat().st_nlink == 1


def test_of_weights_that_are_copied_nothing_is_told(published: Path, tmp_path: Path) -> None:
    told = Told()
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1, links=False)
    assert asyncio.run(chains.fetch(chain_of(published), making=told)) is not None
    assert told.directory is None


def test_who_writes_to_weights_that_are_read_ahead_ends_the_load(published: Path, tmp_path: Path) -> None:
    opened: list[threading.Thread] = []

    class Overwritten(Told):
        def begun(self, directory: Path) -> None:
            super().begun(directory)
            writer = threading.Thread(target=lambda: (published / WEIGHTS).open("r+b").close())
            writer.start()
            opened.append(writer)
            # It waits for the lease from here on.
            while links_module._unbroken(next(iter(chains._links._leases.values()))):
                pass

    told = Overwritten()
    chains = ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1, links=True)
    assert asyncio.run(chains.fetch(chain_of(published), making=told)) is not None
    with pytest.raises(SnapshotCorrupt, match="was opened for writing while it was loaded"):
        chains.check_unchanged()
    opened[0].join()


def test_weights_that_are_not_the_expected_ones_leave_nothing_behind(published: Path, tmp_path: Path) -> None:
    """They were read ahead, and no snapshot comes of it."""
    told, cache = Told(), SnapshotCache(tmp_path / "cache")
    chains = ChainFetcher(cache, threads=1, links=True)
    other = (file_content(published / "config.json"), FileContent(WEIGHTS, size_of(published), "0" * 64))
    (link,) = chain_of(published)
    with pytest.raises(SnapshotCorrupt, match="its bytes are not those that this name means"):
        asyncio.run(chains.fetch([msgspec.structs.replace(link, content=other)], making=told))
    assert told.tensors
    assert [one for one in cache.root.iterdir() if one.is_dir()] == []


def size_of(directory: Path) -> int:
    return (directory / WEIGHTS).stat().st_size
