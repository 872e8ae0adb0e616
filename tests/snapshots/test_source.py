"""The replica's port onto its snapshots: what reaches the swap runner."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CONFIG, flip_last, rot, weights, write_checkpoint
from fingerprints import snapshot_fingerprint
from safetensors.numpy import load_file, save_file
from trainer_writers import write_miles

from midstream.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotIncompatible,
    SnapshotMissing,
    SnapshotNotFinite,
)
from midstream.core.types import BASE_SNAPSHOT, ArcFormat, Desired, FileContent, Hint, SnapshotFiles
from midstream.replica.swap import source as source_module
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.layout import CheckpointSpec, TensorSpec, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.local import temporary_directory
from midstream_kernels import build, prebuilt


def make_source(tmp_path: Path) -> CachedSource:
    base = write_checkpoint(tmp_path / "base", seed=100)
    return CachedSource(ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1), read_spec(base))


async def test_a_full_snapshot_needs_no_rebuild_and_an_incremental_one_does(tmp_path: Path) -> None:
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
        ({**CONFIG, "extra": 1}, r"^Extra snapshot model config options: extra; publish with"),
        ({"model_type": "tiny"}, r"^Extra base model config options: hidden_size; publish with"),
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

    async def load(refetch: bool = False) -> Path:
        path = await source.fetch(desired, refetch=refetch)
        return path if path is not None else await source.rebuild(desired)

    async def scenario() -> None:
        path = await load()
        rot(path / "model.safetensors", flip_last)
        # Bytes are not read.
        assert weights(await load()) != expected
        await source.release([desired])
        assert weights(await load(refetch=True)) == expected
        full.rename(tmp_path / "away")
        with pytest.raises(SnapshotMissing):
            await load(refetch=True)
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
    # So it is known whom to blame.
    whole = ChainFetcher(SnapshotCache(tmp_path / "cache"))._cache.whole(desired.files)
    assert asyncio.run(source.blames_itself(whole))
    assert weights(asyncio.run(load(source))) == weights(full)
    assert not asyncio.run(source.blames_itself(whole))


@pytest.mark.parametrize("damaged", [True, False])
async def test_a_parent_that_went_bad_is_told_from_a_bad_delta(tmp_path: Path, damaged: bool) -> None:
    """A delta says nothing of the tensors that it does not change."""
    full = write_checkpoint(tmp_path / "s0")
    before = load_file(full / "model.safetensors")
    changed = before["layers.0.w"] + 1
    if not damaged:
        changed[0, 0] = np.nan
    url = write_miles(tmp_path / "weight_v000001", before, before | {"layers.0.w": changed}).as_uri()
    first = SnapshotFiles(
        snapshot="s0", url=full.as_uri(), fingerprint=await snapshot_fingerprint(full.as_uri())
    )
    parent = Desired(snapshot="s0", generation=1, url=first.url, fingerprint=first.fingerprint)
    child = Desired(
        snapshot="s1",
        generation=2,
        url=url,
        fingerprint=await snapshot_fingerprint(url),
        compression="miles_delta",
        parents=(first,),
    )
    source = make_source(tmp_path)

    def not_a_number(data: bytearray) -> None:
        data[-4:] = np.float32(np.nan).tobytes()

    here = await source.fetch(parent)
    assert here is not None
    await source.verify(here, parent)
    await source.release([parent])
    if damaged:
        rot(here / "model.safetensors", not_a_number)
    assert await source.fetch(child) is None
    path = await source.rebuild(child)
    with pytest.raises(SnapshotNotFinite):
        await source.verify(path, child)
    assert await source.blames_itself(path) == damaged
    if damaged:
        assert await source.fetch(child) is None
        await source.verify(await source.rebuild(child), child)
        assert weights(path)["layers.3.w"] == before["layers.3.w"].tobytes()
        assert not await source.blames_itself(path)


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


def spoil(directory: Path, name: str = "layers.2.w", value: float = np.nan) -> Path:
    """One number of the checkpoint is `value`."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][3, 4] = value
            save_file(tensors, file)
    return directory


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("value", "said"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "-infinity")])
async def test_a_number_that_is_not_finite_is_refused_before_the_engine_has_it(
    tmp_path: Path, shards: int, value: float, said: str
) -> None:
    full = spoil(write_checkpoint(tmp_path / "s0", shards=shards), value=value)
    source = make_source(tmp_path)
    desired = Desired(snapshot="s0", generation=1, url=full.as_uri())
    file = "model" if shards == 1 else "model-00001-of-00002"

    path = await source.fetch(desired)
    assert path is not None
    with pytest.raises(
        SnapshotNotFinite, match=rf"^tensor layers\.2\.w is {said} at index \[3, 4\] \({file}\."
    ):
        await source.verify(path, desired)


def test_a_delta_is_refused_for_the_numbers_that_it_makes(tmp_path: Path) -> None:
    """Its own file holds no floating-point number. The next delta may make all of them finite again."""
    states = [write_checkpoint(tmp_path / f"s{i}", seed=i) for i in range(3)]
    spoil(states[1])
    links = [SnapshotFiles(snapshot="s0", url=states[0].as_uri())]
    for i in (1, 2):
        encode_delta(states[i - 1], states[i], tmp_path / f"d{i}", "arc_v2")
        url = (tmp_path / f"d{i}").as_uri()
        links.append(SnapshotFiles(snapshot=f"s{i}", url=url, compression="arc_v2"))
    source = make_source(tmp_path)

    async def load(i: int) -> None:
        desired = Desired(
            snapshot=f"s{i}", generation=i, url=links[i].url, compression="arc_v2", parents=tuple(links[:i])
        )
        assert await source.fetch(desired) is None
        await source.verify(await source.rebuild(desired), desired)

    with pytest.raises(SnapshotNotFinite, match=r"^tensor layers\.2\.w is NaN at index \[3, 4\]"):
        asyncio.run(load(1))
    asyncio.run(load(2))


@pytest.mark.parametrize("compression", ["arc_v1", "arc_v2"])
def test_numbers_that_were_seen_in_the_rebuild_are_not_read_again_until_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: ArcFormat
) -> None:
    states = [write_checkpoint(tmp_path / f"s{i}", seed=i) for i in range(2)]
    encode_delta(*states, tmp_path / "d1", compression)
    urls = [path.as_uri() for path in (states[0], tmp_path / "d1")]
    known = [asyncio.run(snapshot_fingerprint(url)) for url in urls]
    full = SnapshotFiles(snapshot="s0", url=urls[0], fingerprint=known[0])
    desired = Desired(
        snapshot="s1",
        generation=1,
        url=urls[1],
        fingerprint=known[1],
        compression=compression,
        parents=(full,),
    )
    source, read = make_source(tmp_path), []
    monkeypatch.setattr(source_module, "check_finite", lambda path, *_, **__: read.append(path))

    async def load() -> Path:
        path = await source.fetch(desired) or await source.rebuild(desired)
        await source.verify(path, desired)
        return path

    asyncio.run(load())
    assert read == []
    # The files lay in the cache meanwhile.
    path = asyncio.run(load())
    assert read == [path]


def test_numbers_that_were_seen_in_the_fetch_are_not_read_again_until_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(build.SOURCE)
    if prebuilt.features() and "sha_ni" not in prebuilt.features():
        pytest.skip("the processor has no instructions for SHA-256")
    states = [write_checkpoint(tmp_path / f"s{i}", seed=i) for i in range(2)]
    encode_delta(*states, tmp_path / "d1", "arc_v2")
    urls = [path.as_uri() for path in (states[0], tmp_path / "d1")]
    known = [asyncio.run(snapshot_fingerprint(url)) for url in urls]
    first = Desired(snapshot="s0", generation=1, url=urls[0], fingerprint=known[0])
    child = Desired(
        snapshot="s1",
        generation=2,
        url=urls[1],
        fingerprint=known[1],
        compression="arc_v2",
        parents=first.files,
    )
    source, read = make_source(tmp_path), []
    monkeypatch.setattr(source_module, "check_finite", lambda path, *_, **__: read.append(path))

    async def load(desired: Desired) -> Path:
        path = await source.fetch(desired) or await source.rebuild(desired)
        await source.verify(path, desired)
        return path

    path = asyncio.run(load(first))
    assert read == []
    # The files lay in the cache meanwhile.
    assert asyncio.run(load(first)) == path
    assert read == [path]
    # So do those that only a delta was made from.
    shutil.rmtree(path)
    asyncio.run(load(child))
    assert path.exists()
    assert read == [path]
    assert asyncio.run(load(first)) == path
    assert read == [path, path]


def test_an_adapter_is_refused_for_a_number_that_is_not_finite(tmp_path: Path) -> None:
    base = CheckpointSpec({"layers.0.q.weight": TensorSpec("F32", (4, 4), "model.safetensors")}, CONFIG)
    source = CachedSource(ChainFetcher(SnapshotCache(tmp_path / "cache")), base)
    adapter = tmp_path / "a1"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    names = [f"base_model.model.layers.0.q.lora_{side}.weight" for side in "AB"]
    tensors = {names[0]: np.ones((2, 4), np.float32), names[1]: np.ones((4, 2), np.float32)}
    desired = Desired(snapshot="a1", generation=1, url=adapter.as_uri())

    async def load() -> None:
        save_file(tensors, adapter / "adapter_model.safetensors")
        path = await source.fetch(desired)
        assert path is not None
        await source.verify(path, desired)

    asyncio.run(load())
    tensors[names[1]][2, 1] = np.inf
    with pytest.raises(
        SnapshotNotFinite,
        match=r"lora_B\.weight is infinity at index \[2, 1\] \(adapter_model\.safetensors\)$",
    ):
        asyncio.run(load())


def test_a_copy_that_rots_to_a_number_that_is_not_finite_costs_one_attempt(tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "s0")
    url = full.as_uri()
    fingerprint = asyncio.run(snapshot_fingerprint(url))
    desired = Desired(snapshot="s0", generation=1, url=url, fingerprint=fingerprint)
    source = make_source(tmp_path)

    def nan(data: bytearray) -> None:
        data[-4:] = np.float32(np.nan).tobytes()

    async def load() -> Path:
        path = await source.fetch(desired)
        assert path is not None
        await source.verify(path, desired)
        return path

    rot(asyncio.run(load()) / "model.safetensors", nan)
    with pytest.raises(SnapshotNotFinite):
        asyncio.run(load())
    assert weights(asyncio.run(load())) == weights(full)


MODULE = "model.layers.0.self_attn.q_proj"
BASE = CheckpointSpec({f"{MODULE}.weight": TensorSpec("F32", (8, 8), "model.safetensors")}, CONFIG)


def adapter_source(tmp_path: Path) -> CachedSource:
    return CachedSource(ChainFetcher(SnapshotCache(tmp_path / "cache"), threads=1), BASE)


def write_adapter(directory: Path, rank: int = 2, **config: object) -> Path:
    """On one map of the served model."""
    directory.mkdir()
    shapes = {"A": (rank, 8), "B": (8, rank)}
    tensors = {
        f"base_model.model.{MODULE}.lora_{x}.weight": np.zeros(s, np.float32) for x, s in shapes.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(given))
    return directory


def sparse(directory: Path) -> None:
    with (directory / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(50 * 10**9)


def nothing_but_holes(directory: Path) -> None:
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.truncate(50 * 10**9)


def large_rank(directory: Path) -> None:
    header = json.dumps(
        {
            f"base_model.model.{MODULE}.lora_{side}.weight": {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [begin * 10**9, (begin + 24) * 10**9],
            }
            for side, shape, begin in (("A", [10**8, 60], 0), ("B", [60, 10**8], 24))
        }
    ).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 48 * 10**9)


def long_config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"filler": "x" * 2**20}))


def long_list(directory: Path) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "exclude_modules": ["x"] * 10_001}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (sparse, "adapter_model.safetensors"),
        (nothing_but_holes, "adapter_model.safetensors"),
        (large_rank, "lora_A.weight"),
        (long_config, r"adapter_config.json: has 10485\d\d bytes, at most 1048576 are read"),
        (long_list, "exclude_modules has 10001 entries, at most 10000 are read"),
    ],
)
def test_an_adapter_that_cannot_fit_is_refused_before_it_is_fetched(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    source = adapter_source(tmp_path).of_policy("red")
    adapter = write_adapter(tmp_path / "red-1")
    spoil(adapter)
    with pytest.raises(SnapshotError, match=why):
        asyncio.run(source.fetch(Desired(snapshot="red-1", generation=1, url=adapter.as_uri())))
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".boot"]
    assert left == [], "nothing of it was fetched"


def test_a_replica_that_starts_afresh_has_the_adapters_that_the_bucket_lost(tmp_path: Path) -> None:
    """As it has full snapshots: those whose files are asked for, while they are as they were fetched."""
    made, lost = write_adapter(tmp_path / "red-1"), tmp_path / "lost"
    fingerprint = asyncio.run(snapshot_fingerprint(made.as_uri()))

    def desired(**other: object) -> Desired:
        fields = {"snapshot": "red-1", "generation": 1, "url": made.as_uri(), "fingerprint": fingerprint}
        return Desired(**{**fields, **other})  # type: ignore[arg-type]

    async def load(what: Desired, policy: str = "red") -> Path:
        # Each time as a process that has just begun.
        source = adapter_source(tmp_path).of_policy(policy)
        path = await source.fetch(what)
        assert path is not None
        await source.verify(path, what)
        await source.close()
        return path

    first = asyncio.run(load(desired()))
    leftover = temporary_directory(first.parent)
    leftover.mkdir()
    gone = SnapshotCache(tmp_path / "cache" / ".policies" / ("0" * 32))
    made.rename(lost)
    assert asyncio.run(load(desired())) == first
    assert not leftover.exists()
    assert not gone.root.exists(), "it holds nothing"
    for other, policy in ((desired(fingerprint="0" * 64), "red"), (desired(), "blue")):
        with pytest.raises(SnapshotMissing):
            asyncio.run(load(other, policy))
    file = FileContent("adapter_model.safetensors", 1, "0" * 64)
    with pytest.raises(SnapshotMissing):
        asyncio.run(load(desired(content=(file,))))
    assert asyncio.run(load(desired())) == first
    with (first / "adapter_model.safetensors").open("ab") as weights_file:
        weights_file.write(b"x")
    with pytest.raises(SnapshotMissing):
        asyncio.run(load(desired()))


async def test_the_files_of_an_ended_policy_go_and_others_stay(tmp_path: Path) -> None:
    source = adapter_source(tmp_path)

    paths = {}
    for name in ("red", "blue"):
        policy = source.of_policy(name)
        adapter = write_adapter(tmp_path / f"{name}-1")
        desired = Desired(snapshot=f"{name}-1", generation=1, url=adapter.as_uri())
        paths[name] = await policy.fetch(desired)
        assert paths[name] is not None
        await policy.prefetch(Hint(snapshot="2", url=adapter.as_uri(), files=("adapter_model.safetensors",)))
        await policy.close()
    await source.remove_policy("red")
    found = {path.parent for path in (tmp_path / "cache").rglob("adapter_*")}
    assert found == {paths["blue"]}
    # Its early files go with it, too.
    assert len(list((tmp_path / "cache").rglob(".part-*"))) == 1
