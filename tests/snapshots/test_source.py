"""The replica's port onto its snapshots: what reaches the swap runner."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest
from checkpoints import CONFIG, flip_last, rot, weights, write_checkpoint

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import BASE_SNAPSHOT, Desired, Hint, SnapshotFiles
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import snapshot_fingerprint


def make_source(tmp_path: Path) -> CachedSource:
    base = write_checkpoint(tmp_path / "base", seed=100)
    return CachedSource(ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1), read_spec(base))


def test_a_full_snapshot_needs_no_rebuild_and_an_incremental_one_does(tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "s0", seed=0)
    child = write_checkpoint(tmp_path / "s1", seed=1)
    encode_delta(full, child, tmp_path / "d1", "arc_v2")
    source = make_source(tmp_path)
    first = Desired(snapshot="s0", generation=1, url=full.as_uri())
    second = Desired(
        snapshot="s1",
        generation=2,
        url=(tmp_path / "d1").as_uri(),
        compression="arc_v2",
        parents=(SnapshotFiles(snapshot="s0", url=full.as_uri()),),
    )

    async def scenario() -> None:
        path = await source.fetch(first)
        assert path is not None
        await source.verify(path, first)
        await source.release([first])
        await source.prefetch(Hint(snapshot="s1", url=second.url or "", files=("model.safetensors",)))
        assert await source.fetch(second) is None
        path = await source.rebuild(second)
        await source.verify(path, second)
        assert weights(path) == weights(child)
        await source.release([Desired(snapshot=BASE_SNAPSHOT, generation=3), second])
        assert path.exists()

    asyncio.run(scenario())


def test_the_base_model_is_nobodys_parent(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "s0", seed=100)
    encode_delta(base, write_checkpoint(tmp_path / "s1", seed=1), tmp_path / "d1", "arc_v2")
    desired = Desired(
        snapshot="s1", generation=1, url=(tmp_path / "d1").as_uri(), compression="arc_v2", parents=()
    )
    with pytest.raises(
        SnapshotIncompatible, match=r"^s1: is incremental .* the first snapshot must be a full one$"
    ):
        asyncio.run(make_source(tmp_path).fetch(desired))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**CONFIG, "extra": 1}, r"^Extra snapshot model config options: extra$"),
        ({"model_type": "tiny"}, r"^Extra base model config options: hidden_size$"),
        ({**CONFIG, "hidden_size": 9}, r"^Config value mismatch for hidden_size"),
        ({**CONFIG, "hidden_size": "8"}, r"^Types mismatch"),
    ],
)
def test_fields_the_trainer_lets_differ_are_not_compared(
    tmp_path: Path, config: dict[str, object], says: str
) -> None:
    path = write_checkpoint(tmp_path / "new", config=config)
    source = make_source(tmp_path)
    desired = Desired(snapshot="new", generation=1, url=path.as_uri())
    with pytest.raises(SnapshotIncompatible, match=says):
        asyncio.run(source.verify(path, desired))
    with pytest.raises(SnapshotIncompatible, match=says):
        asyncio.run(
            source.verify(
                path, Desired(snapshot="new", generation=1, url="file:///x", ignore_config=("other",))
            )
        )
    relaxed = Desired(snapshot="new", generation=1, url=path.as_uri(), ignore_config=("extra", "hidden_size"))
    asyncio.run(source.verify(path, relaxed))


@pytest.mark.parametrize("links", [1, 2])
def test_what_is_fetched_anew_trusts_no_local_file(tmp_path: Path, links: int) -> None:
    """A reload after a failed check: the local files may be what is wrong, even if their sizes are right."""
    full, child = write_checkpoint(tmp_path / "s0", seed=0), write_checkpoint(tmp_path / "s1", seed=1)
    encode_delta(full, child, tmp_path / "d1", "arc_v2")
    source = make_source(tmp_path)
    first = SnapshotFiles(
        snapshot="s0", url=full.as_uri(), fingerprint=asyncio.run(snapshot_fingerprint(full.as_uri()))
    )
    url = (tmp_path / "d1").as_uri()
    desired = {
        1: Desired(snapshot="s0", generation=1, url=first.url, fingerprint=first.fingerprint),
        2: Desired(
            snapshot="s1",
            generation=1,
            url=url,
            fingerprint=asyncio.run(snapshot_fingerprint(url)),
            compression="arc_v2",
            parents=(first,),
        ),
    }[links]
    expected = weights(full if links == 1 else child)

    async def load(anew: bool = False) -> Path:
        path = await source.fetch(desired, anew=anew)
        return path if path is not None else await source.rebuild(desired)

    async def scenario() -> None:
        path = await load()
        rot(path / "model.safetensors", flip_last)
        # Bytes are not read.
        assert weights(await load()) != expected
        await source.release([desired])
        assert weights(await load(anew=True)) == expected
        full.rename(tmp_path / "away")
        with pytest.raises(SnapshotMissing):
            await load(anew=True)
        # Nothing is lost for want of the bucket.
        assert weights(path) == expected

    asyncio.run(scenario())


def test_a_local_file_whose_header_went_bad_costs_one_attempt(tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "s0")
    url = full.as_uri()
    desired = Desired(
        snapshot="s0", generation=1, url=url, fingerprint=asyncio.run(snapshot_fingerprint(url))
    )

    def zero(data: bytearray) -> None:
        data[:] = bytes(len(data))

    async def load(source: CachedSource) -> Path:
        path = await source.fetch(desired)
        assert path is not None
        await source.verify(path, desired)
        return path

    rot(asyncio.run(load(make_source(tmp_path))) / "model.safetensors", zero)
    source = CachedSource(ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1), read_spec(full))
    with pytest.raises(SnapshotCorrupt, match=r"^model\.safetensors: "):
        asyncio.run(load(source))
    assert weights(asyncio.run(load(source))) == weights(full)


def test_files_that_cannot_be_read_for_a_moment_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = write_checkpoint(tmp_path / "s0")
    url = full.as_uri()
    desired = Desired(
        snapshot="s0", generation=1, url=url, fingerprint=asyncio.run(snapshot_fingerprint(url))
    )
    source = make_source(tmp_path)
    path = asyncio.run(source.fetch(desired))
    assert path is not None

    def no_descriptor(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", no_descriptor)
        with pytest.raises(SnapshotError, match=r"^config\.json: cannot be read"):
            asyncio.run(source.verify(path, desired))
    # Without the bucket, only the cached copy can be used.
    shutil.rmtree(full)
    assert asyncio.run(source.fetch(desired)) == path
    asyncio.run(source.verify(path, desired))
