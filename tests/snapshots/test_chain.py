"""Incremental snapshots end to end on files: what is fetched, rebuilt, replayed and kept, with real deltas."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import files, flip_last, put_directory, rot, weights, write_checkpoint
from fingerprints import snapshot_fingerprint
from s3server import S3Server

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.core.types import SnapshotFiles
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.store import chain as chain_module
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.fetch import partial_directory
from midstream.snapshots.store.local import directory_bytes


class World:
    """A bucket with a full snapshot `s0` and deltas `s1`, `s2`, ...; a replica's cache; what was read of the bucket."""

    def __init__(self, tmp_path: Path, bucket: str, runner: asyncio.Runner, shards: int = 1) -> None:
        self.bucket = bucket
        self.sources = tmp_path / "trainer"
        self.deltas = tmp_path / "deltas"
        self.cache_root = tmp_path / "cache"
        self.shards = shards
        self.chain: tuple[SnapshotFiles, ...] = ()
        self.listed: list[str] = []
        self.run = runner.run

    def publish(self, count: int, compression: Any = "arc_v2") -> tuple[SnapshotFiles, ...]:
        for _ in range(count):
            i = len(self.chain)
            source = write_checkpoint(self.sources / f"s{i}", seed=i, shards=self.shards)
            if i > 0:
                encode_delta(self.sources / f"s{i - 1}", source, self.deltas / f"s{i}", compression)
            url = put_directory(self.bucket, f"s{i}", self.deltas / f"s{i}" if i else source)
            fingerprint = self.run(snapshot_fingerprint(url))
            own = SnapshotFiles(
                snapshot=f"s{i}", url=url, fingerprint=fingerprint, compression=compression if i else None
            )
            self.chain = (*self.chain, own)
        return self.chain

    def fetcher(self, bytes_max: int | None = None) -> ChainFetcher:
        """A replica's, after a start: the cache is opened anew."""
        self.cache = SnapshotCache(self.cache_root, bytes_max)
        return ChainFetcher(self.cache, threads=1)

    def load(self, fetcher: ChainFetcher, chain: tuple[SnapshotFiles, ...], **options: Any) -> Path:
        """As the swap runner does. The whole files are what the trainer had."""

        async def steps() -> Path:
            path = await fetcher.fetch(chain, **options)
            return path if path is not None else await fetcher.rebuild(chain)

        path = self.run(steps())
        source = self.sources / chain[-1].snapshot
        assert weights(path) == weights(source)
        assert (path / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert (path / "tokenizer.json").exists()
        self.run(fetcher.release([chain]))
        return path


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=["file", "s3"])
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3: S3Server,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> World:
    bucket = (tmp_path / "bucket").as_uri() if request.param == "file" else f"s3://rollouts/{tmp_path.name}"
    return watched(World(tmp_path, bucket, runner, shards=2), monkeypatch)


@pytest.fixture
def local(tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> World:
    return watched(World(tmp_path, (tmp_path / "bucket").as_uri(), runner), monkeypatch)


def watched(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    real = chain_module.list_snapshot

    async def list_snapshot(url: str, fingerprint: str | None = None) -> Any:
        world.listed.append(url.rpartition("/")[2])
        return await real(url, fingerprint)

    monkeypatch.setattr(chain_module, "list_snapshot", list_snapshot)
    return world


def test_a_delta_is_applied_to_what_serves_and_only_it_is_fetched(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    for _ in range(3):
        local.listed.clear()
        chain = local.publish(1)
        local.load(fetcher, chain)
        assert local.listed == [chain[-1].snapshot]
        assert not local.cache.delta(chain[-1]).exists()


def test_a_fresh_replica_replays_the_chain_from_the_full_snapshot(world: World) -> None:
    chain = world.publish(4)
    fetcher = world.fetcher()
    progress: list[tuple[int, int]] = []
    path = world.load(fetcher, chain, progress=lambda done, total: progress.append((done, total)))
    assert sorted(world.listed) == ["s0", "s1", "s2", "s3"]
    assert progress[-1][0] == progress[-1][1] > 0
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    # Inner links are of no use.
    assert not world.cache.whole(chain[:2]).exists()
    assert not world.cache.whole(chain[:3]).exists()
    world.listed.clear()
    # Started again: it is here.
    assert world.load(world.fetcher(), chain) == path
    assert world.listed == []


def test_a_replica_that_missed_deltas_goes_on_from_what_it_has(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(2))
    chain = local.publish(3)
    local.listed.clear()
    local.load(local.fetcher(), chain)
    assert sorted(local.listed) == ["s2", "s3", "s4"]


@pytest.mark.parametrize("compression", ["arc_v1", "arc_v2"])
def test_both_formats_and_mixed_ones_are_rebuilt(local: World, compression: Any) -> None:
    local.publish(2, compression)
    local.load(local.fetcher(), local.publish(1, "arc_v2"))


def test_a_full_snapshot_is_found_again_without_the_bucket(local: World) -> None:
    chain = local.publish(1)
    path = local.load(local.fetcher(), chain)
    shutil.rmtree(local.cache_root.parent / "bucket")
    assert local.load(local.fetcher(), chain) == path
    (path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SnapshotMissing):
        local.load(local.fetcher(), chain)


def test_files_that_changed_since_the_signal_are_refused_wherever_they_stand_in_the_chain(
    local: World,
) -> None:
    chain = local.publish(3)
    url = chain[1].url
    name = Path(url.removeprefix("file://")) / "tokenizer.json"
    name.write_text("[1]")
    with pytest.raises(SnapshotCorrupt, match=r"s1: its files changed since the snapshot was signalled"):
        local.load(local.fetcher(), chain)


@pytest.mark.parametrize("deltas", [0, 2])
def test_zeros_where_weights_were_are_not_served(local: World, deltas: int) -> None:
    """Of the right size, behind a header that is whole."""
    chain = local.publish(1 + deltas)
    path = local.load(local.fetcher(), chain)
    file = path / "model.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:header] + bytes(len(data) - header))
    local.load(local.fetcher(), chain)


def corrupt(directory: Path) -> None:
    rot(sorted(directory.glob("*.safetensors"))[-1], flip_last)


def test_a_parent_that_went_bad_on_disk_is_replayed_from_the_bucket(world: World) -> None:
    fetcher = world.fetcher()
    corrupt(world.load(fetcher, world.publish(3)))
    chain = world.publish(1)
    world.listed.clear()
    world.load(fetcher, chain)
    assert set(world.listed) == {"s0", "s1", "s2", "s3"}


class Told:
    """What a rebuild says. listed: what was read of the bucket when each thing was said."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.said: list[tuple[str, list[str]]] = []

    def begun(self, directory: Path) -> None:
        self.said.append(("begun", [*self.world.listed]))

    def made(self, tensor: str) -> None:
        pass

    def given_up(self) -> None:
        self.said.append(("given up", [*self.world.listed]))


def test_a_rebuild_that_is_refused_is_given_up_before_the_replay(local: World) -> None:
    fetcher = local.fetcher()
    corrupt(local.load(fetcher, local.publish(1)))
    chain, told = local.publish(1), Told(local)
    local.listed.clear()
    assert local.run(fetcher.fetch(chain)) is None
    whole = local.run(fetcher.rebuild(chain, told))
    assert told.said == [("begun", ["s1"]), ("given up", ["s1"])]
    assert "s0" in local.listed
    assert weights(whole) == weights(local.sources / "s1")


def test_a_rebuild_that_is_refused_for_good_is_given_up_and_one_that_passes_is_not(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    passes, refused = Told(local), Told(local)
    chain = local.publish(1)
    assert local.run(fetcher.fetch(chain)) is None
    local.run(fetcher.rebuild(chain, passes))
    assert [what for what, _ in passes.said] == ["begun"]
    # Of a full snapshot that was just fetched, nothing is replayed.
    fresh, bad = local.fetcher(), local.chain[:1] + bad_delta_on(local, 0)
    assert local.run(fresh.fetch(bad, refetch=True)) is None
    with pytest.raises(SnapshotCorrupt):
        local.run(fresh.rebuild(bad, refused))
    assert [what for what, _ in refused.said] == ["begun", "given up"]


def test_a_full_snapshot_that_went_bad_on_disk_is_fetched_again(local: World) -> None:
    fetcher = local.fetcher()
    corrupt(local.load(fetcher, local.publish(1)))
    local.load(fetcher, local.publish(1))


def bad_delta(world: World) -> tuple[SnapshotFiles, ...]:
    """A chain whose last delta is of another parent: its checksums do not come out."""
    chain = world.publish(2)
    last = chain[-1]
    other = write_checkpoint(world.sources / "other", seed=99, shards=world.shards)
    encode_delta(other, world.sources / last.snapshot, world.deltas / "bad", "arc_v2")
    url = put_directory(world.bucket, last.snapshot, world.deltas / "bad", overwrite=True)
    fingerprint = world.run(snapshot_fingerprint(url))
    return (
        *chain[:-1],
        SnapshotFiles(snapshot=last.snapshot, url=url, fingerprint=fingerprint, compression="arc_v2"),
    )


def test_a_bad_delta_is_refused_by_name_and_its_parent_still_serves(local: World) -> None:
    fetcher = local.fetcher()
    serving = local.publish(2)
    path = local.load(fetcher, serving)
    before = files(path)
    chain = bad_delta(local)
    with pytest.raises(SnapshotCorrupt, match=r"^s3, on s2: .*model.*safetensors.*"):
        local.load(fetcher, chain)
    assert files(path) == before
    assert weights(local.load(fetcher, serving)) == weights(local.sources / "s1")
    leftovers = [p.name for p in local.cache_root.iterdir() if p.name.startswith((".moving", ".fetch"))]
    assert leftovers == []


def test_a_bad_delta_costs_one_replay_not_one_per_attempt(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    chain = bad_delta(local)[:1] + bad_delta_on(local, 0)
    for listed in (["s0", "s1", "s1"], []):
        local.listed.clear()
        with pytest.raises(SnapshotCorrupt, match=r"^s1, on s0: "):
            local.load(fetcher, chain)
        assert sorted(local.listed) == listed


def bad_delta_on(world: World, i: int) -> tuple[SnapshotFiles, ...]:
    other = write_checkpoint(world.sources / "another", seed=98, shards=world.shards)
    encode_delta(other, world.sources / f"s{i + 1}", world.deltas / "worse", "arc_v2")
    url = put_directory(world.bucket, f"s{i + 1}", world.deltas / "worse", overwrite=True)
    fingerprint = world.run(snapshot_fingerprint(url))
    return (SnapshotFiles(snapshot=f"s{i + 1}", url=url, fingerprint=fingerprint, compression="arc_v2"),)


def test_a_bad_delta_does_not_vouch_for_its_parent(local: World) -> None:
    """The parent, found good then, may go bad later; a good delta on it is replayed."""
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    chain = bad_delta(local)[:1] + bad_delta_on(local, 0)
    with pytest.raises(SnapshotCorrupt, match=r"^s1, on s0: "):
        local.load(fetcher, chain)
    corrupt(local.cache.whole(chain[:1]))
    good = put_directory(local.bucket, "s1", local.deltas / "s1", overwrite=True)
    fingerprint = local.run(snapshot_fingerprint(good))
    local.load(
        fetcher,
        (chain[0], SnapshotFiles(snapshot="s1", url=good, fingerprint=fingerprint, compression="arc_v2")),
    )


def test_only_the_latest_bad_deltas_are_remembered(local: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "REFUTED_KEPT", 1)
    fetcher = local.fetcher()
    serving = local.publish(1)
    local.load(fetcher, serving)
    other = write_checkpoint(local.sources / "other", seed=97)
    chains = []
    for name in ("x", "y"):
        child = write_checkpoint(local.sources / name, seed=96)
        encode_delta(other, child, local.deltas / name, "arc_v2")
        url = put_directory(local.bucket, name, local.deltas / name)
        fingerprint = local.run(snapshot_fingerprint(url))
        chains.append(
            (*serving, SnapshotFiles(snapshot=name, url=url, fingerprint=fingerprint, compression="arc_v2"))
        )
    replays = []
    for i in (0, 0, 1, 0):
        local.listed.clear()
        with pytest.raises(SnapshotCorrupt, match=rf"^{'xy'[i]}, on s0: "):
            local.load(fetcher, chains[i])
        replays.append("s0" in local.listed)
    assert replays == [True, False, True, True]


def test_files_fetched_early_during_a_rebuild_take_no_room_from_it(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = local.publish(4)
    put_directory(local.bucket, "big", write_checkpoint(local.sources / "big", size=300))
    fetcher = local.fetcher(bytes_max=12_000)
    real = chain_module.rebuild
    refused: list[str] = []

    async def scenario() -> Path:
        loop = asyncio.get_running_loop()

        def hinted_meanwhile(*args: Any, **kwargs: Any) -> None:
            early = fetcher.prefetch(f"{local.bucket}/big", ["model.safetensors"])
            refused.append(str(asyncio.run_coroutine_threadsafe(early, loop).exception(60)))
            real(*args, **kwargs)

        monkeypatch.setattr(chain_module, "rebuild", hinted_meanwhile)
        assert await fetcher.fetch(chain) is None
        return await fetcher.rebuild(chain)

    assert weights(local.run(scenario())) == weights(local.sources / "s3")
    assert len(refused) == 3
    assert all("do not fit into the snapshot cache" in message for message in refused)


def test_files_fetched_early_leave_room_for_what_a_rebuild_is_writing(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = local.fetcher(bytes_max=100_000)
    local.load(fetcher, local.publish(1))
    chain = local.publish(1)
    put_directory(local.bucket, "next", write_checkpoint(local.sources / "next", seed=5))
    early = (local.sources / "next" / "model.safetensors").stat().st_size
    real = chain_module.rebuild
    refused: list[str] = []

    async def scenario() -> Path:
        loop = asyncio.get_running_loop()

        def hinted_meanwhile(*args: Any, **kwargs: Any) -> None:
            held = sum(directory_bytes(p) for p in local.cache_root.iterdir() if p.name[0] != ".")
            # Room for either.
            local.cache.bytes_max = held + early + 100
            hint = fetcher.prefetch(f"{local.bucket}/next", ["model.safetensors"])
            refused.append(str(asyncio.run_coroutine_threadsafe(hint, loop).exception(60)))
            real(*args, **kwargs)

        monkeypatch.setattr(chain_module, "rebuild", hinted_meanwhile)
        assert await fetcher.fetch(chain) is None
        return await fetcher.rebuild(chain)

    assert weights(local.run(scenario())) == weights(local.sources / "s1")
    assert "do not fit into the snapshot cache" in refused[0]
    local.run(fetcher.release([chain]))
    local.run(fetcher.prefetch(f"{local.bucket}/next", ["model.safetensors"]))


def test_files_fetched_early_during_a_replay_take_no_room_from_it(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = local.fetcher(bytes_max=14_000)
    corrupt(local.load(fetcher, local.publish(3)))
    chain = local.publish(1)
    put_directory(local.bucket, "big", write_checkpoint(local.sources / "big", size=380))
    real = chain_module.list_snapshot
    refused: list[str] = []

    async def hinted_meanwhile(url: str, fingerprint: str | None = None) -> Any:
        if url == chain[1].url:
            with pytest.raises(SnapshotError) as caught:
                await fetcher.prefetch(f"{local.bucket}/big", ["model.safetensors"])
            refused.append(str(caught.value))
        return await real(url, fingerprint)

    monkeypatch.setattr(chain_module, "list_snapshot", hinted_meanwhile)
    local.load(fetcher, chain)
    assert len(refused) == 1
    assert "do not fit into the snapshot cache" in refused[0]


def test_a_bad_delta_whose_full_snapshot_has_left_the_bucket_says_what_was_wrong_first(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    chain = (*local.chain, *bad_delta(local)[1:2])
    chain = (*chain[:1], *bad_delta_on(local, 0))
    shutil.rmtree(local.cache_root.parent / "bucket" / "s0")
    path = local.cache.whole(chain[:1])
    with pytest.raises(
        SnapshotCorrupt, match=r"^s1, on s0: .*once more from s0: .*s0: there is no such snapshot"
    ):
        local.load(fetcher, chain)
    assert weights(path) == weights(local.sources / "s0")


def test_a_rebuild_that_is_cancelled_leaves_the_parent_and_goes_again(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    chain = local.publish(1)
    real = chain_module.rebuild

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def slow(*args: Any, cancelled: Callable[[], bool], **kwargs: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            while not cancelled():
                pass
            real(*args, cancelled=cancelled, **kwargs)

        monkeypatch.setattr(chain_module, "rebuild", slow)
        assert await fetcher.fetch(chain) is None
        task = asyncio.create_task(fetcher.rebuild(chain))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    local.run(scenario())
    assert not local.cache.whole(chain).exists()
    assert [p.name for p in local.cache_root.iterdir() if p.name.startswith((".moving", ".fetch"))] == []
    monkeypatch.setattr(chain_module, "rebuild", real)
    local.load(fetcher, chain)


def test_the_chain_in_use_is_never_evicted_and_too_small_a_cache_is_a_clear_error(local: World) -> None:
    size = sum(len(data) for data in files(write_checkpoint(local.sources / "size")).values())
    fetcher = local.fetcher(bytes_max=3 * size + 6000)
    serving = local.load(fetcher, local.publish(1))
    for _ in range(6):
        serving = local.load(fetcher, local.publish(1))
        held = sum(p.stat().st_size for p in local.cache_root.rglob("*.safetensors"))
        assert held <= 3 * size + 6000
    tight = local.fetcher(bytes_max=size + 100)
    local.run(tight.release([local.chain]))
    assert serving.exists()
    chain = local.publish(1)
    with pytest.raises(SnapshotError, match=r"s7.*do not fit into the snapshot cache, which is bounded to "):
        local.load(tight, chain)
    assert weights(serving) == weights(local.sources / "s6")


def test_files_hinted_at_are_used_and_survive_the_end_of_another_load(local: World) -> None:
    fetcher = local.fetcher()
    local.load(fetcher, local.publish(1))
    serving = local.chain
    chain = local.publish(1)
    local.run(fetcher.prefetch(chain[-1].url, ["model.safetensors"]))
    local.run(fetcher.release([serving]))
    partial = partial_directory(local.cache_root, chain[-1].url)
    early = {p.name for p in partial.iterdir()}
    assert len(early) == 2
    progress: list[tuple[int, int]] = []
    local.load(fetcher, chain, progress=lambda done, total: progress.append((done, total)))
    assert progress[0][0] >= (local.deltas / "s1" / "model.safetensors").stat().st_size
    assert not partial.exists()


def test_files_hinted_at_do_not_push_out_what_serves_nor_pass_the_bound(local: World) -> None:
    fetcher = local.fetcher(bytes_max=4000)
    serving = local.load(fetcher, local.publish(1))
    put_directory(local.bucket, "big", write_checkpoint(local.sources / "big", size=200))
    url = f"{local.bucket}/big"
    with pytest.raises(SnapshotError, match=r"files fetched early: .* do not fit into the snapshot cache"):
        local.run(fetcher.prefetch(url, ["model.safetensors"]))
    assert serving.exists()
    (journal,) = partial_directory(local.cache_root, url).glob("*.done")
    assert journal.stat().st_size == 0


def test_content_nobody_knows_is_never_taken_from_the_cache(local: World) -> None:
    """Without a fingerprint the bucket is asked every time."""
    fetcher = local.fetcher()
    chain = tuple(
        SnapshotFiles(snapshot=f.snapshot, url=f.url, compression=f.compression) for f in local.publish(2)
    )
    local.load(fetcher, chain)
    other = write_checkpoint(local.sources / "s0b", seed=50)
    shutil.rmtree(local.sources / "s1")
    write_checkpoint(local.sources / "s1", seed=51)
    encode_delta(other, local.sources / "s1", local.deltas / "s1b", "arc_v2")
    put_directory(local.bucket, "s0", other, overwrite=True)
    put_directory(local.bucket, "s1", local.deltas / "s1b", overwrite=True)
    local.load(fetcher, chain)


def test_what_a_fetch_has_found_in_the_cache_is_nobody_elses_to_evict(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two policies: one finds its snapshot there, and the other one needs room before the first has gone on."""
    chain = local.publish(1)
    one = local.fetcher(bytes_max=10 * 2**20)
    path = local.load(one, chain)
    local.run(one.release([]))
    look = ChainFetcher._newest_whole

    def looked(fetcher: ChainFetcher, links: tuple[SnapshotFiles, ...]) -> int:
        found = look(fetcher, links)
        with pytest.raises(SnapshotError, match="do not fit"):
            local.cache.make_room(11 * 2**20, (), "another one")
        return found

    monkeypatch.setattr(ChainFetcher, "_newest_whole", looked)
    assert local.run(one.fetch(chain)) == path
    assert weights(path) == weights(local.sources / "s0")
    monkeypatch.undo()
    local.run(one.release([]))
    with pytest.raises(SnapshotError, match="do not fit"):
        local.cache.make_room(11 * 2**20, (), "another one")
    assert not path.exists(), "nobody keeps it any more"


class SlowCache(SnapshotCache):
    """asked, may: it was asked for room, and may make some."""

    def __init__(self, root: Path) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        super().__init__(root)

    def make_room(self, *args: Any, **more: Any) -> None:
        self.asked.set()
        assert self.may.wait(60)
        super().make_room(*args, **more)


@pytest.mark.parametrize("refetch", [False, True])
def test_a_fetch_that_is_cancelled_has_ended_when_it_says_so(local: World, refetch: bool) -> None:
    """Its thread would evict entries and reserve the disk beside the next fetch, and for nobody."""
    chain = local.publish(1)

    async def main() -> None:
        cache = SlowCache(local.cache_root)
        fetching = asyncio.create_task(ChainFetcher(cache, threads=1).fetch(chain, refetch=refetch))
        assert await asyncio.to_thread(cache.asked.wait, 60)
        fetching.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not fetching.done()
        cache.may.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    local.run(main())
