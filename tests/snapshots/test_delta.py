"""Delta directories: made by the reference, made by us, sharded, laid out otherwise, and wrong in every way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import CompressionFormat
from midstream.snapshots.arc2.encode import encode_delta, encode_tensors
from midstream.snapshots.arc2.files import RebuildCancelled
from midstream.snapshots.layout import read_file_layout, read_spec
from midstream.snapshots.rebuild import rebuild, verify

VECTORS = Path(__file__).parent / "vectors" / "arc2"
CHECKSUMS = {
    "l0.empty": "1",
    "l0.i": "16252950",
    "l0.q": "927663864",
    "l0.s": "1864633075",
    "l0.same": "319685149",
    "l0.scalar": "8650849",
    "l0.w": "2448698279",
}
BOTH: tuple[CompressionFormat, ...] = ("arc_v1", "arc_v2")
Arrays = Mapping[str, NDArray[Any]]


def vector(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True)
    shutil.copy(VECTORS / f"{name}.safetensors", directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"made": name}))
    return directory


def arrays(seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    result: dict[str, NDArray[Any]] = {
        f"layers.{i}.w": rng.standard_normal((40 + i, 300)).astype(np.float32) for i in range(5)
    }
    return result | {
        "embed": rng.standard_normal((500, 700)).astype(np.float16),
        "empty": np.empty((0, 3), np.float32),
        "scalar": np.array(3, np.int64),
        "bias é": rng.integers(0, 255, 17, dtype=np.uint8),
    }


def changed(tensors: Arrays, seed: int = 1) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    result = {name: array.copy() for name, array in tensors.items()}
    for name, array in result.items():
        if name != "layers.0.w":
            array[rng.random(array.shape) < 0.02] += 1
    return result


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def checkpoint(directory: Path, tensors: Arrays, shards: int = 1, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
        return directory
    weight_map = {}
    for s in range(shards):
        name = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {k: v for i, (k, v) in enumerate(tensors.items()) if i % shards == s}
        save_file(part, directory / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def loaded(directory: Path) -> dict[str, NDArray[Any]]:
    return {name: array for p in directory.glob("*.safetensors") for name, array in load_file(p).items()}


def assert_equal(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        assert one[name].tobytes() == other[name].tobytes(), name


def edit_header(path: Path, change: Any) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def write_delta(directory: Path, file: str, blobs: Mapping[str, bytes], checksums: Mapping[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()},
        directory / file,
        dict(checksums),
    )
    return directory


# -- against the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", BOTH)
def test_the_references_deltas_give_its_child_byte_for_byte(
    tmp_path: Path, compression: CompressionFormat
) -> None:
    parent = vector(tmp_path / "parent", "A_src")
    delta = vector(tmp_path / "delta", f"A_diff_{compression}")
    verify(parent, delta, compression)
    rebuild(parent, delta, tmp_path / "out", compression)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (VECTORS / "A_dst.safetensors").read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"made": f"A_diff_{compression}"}


@pytest.mark.parametrize("compression", BOTH)
def test_our_delta_says_what_the_references_says(tmp_path: Path, compression: CompressionFormat) -> None:
    parent, child = vector(tmp_path / "parent", "A_src"), vector(tmp_path / "child", "A_dst")
    stats = encode_delta(parent, child, tmp_path / "delta", compression)
    ours = read_file_layout(tmp_path / "delta/model.safetensors")
    assert ours.metadata == CHECKSUMS
    assert (stats.tensors, stats.changed, stats.bytes_in) == (7, 5, 178)
    theirs = vector(tmp_path / "theirs", f"A_diff_{compression}")
    assert differences(tmp_path / "delta", compression) == differences(theirs, compression)
    assert {t.dtype for t in ours.tensors.values()} == {"U8"}


def differences(delta: Path, compression: CompressionFormat) -> dict[str, bytes]:
    unpack = zlib.decompress if compression == "arc_v1" else zstandard.decompress
    return {name: unpack(blob.tobytes()) for name, blob in load_file(delta / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("A_bad_checksum", SnapshotCorrupt, r"model.safetensors: l0.w: checksum 2448698279 .* '1' expected"),
        ("A_bad_size", SnapshotCorrupt, r"l0.w: its blob holds more than the 96 bytes"),
        ("A_bad_zstd", SnapshotCorrupt, r"l0.w: its blob is not valid zstd"),
        ("A_missing_checksum", SnapshotCorrupt, r"l0.w has no checksum"),
        ("A_missing_key", SnapshotIncompatible, r"l0.scalar is missing from the delta"),
    ],
)
def test_bad_vectors_are_refused_by_name_and_change_nothing(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    parent, delta = vector(tmp_path / "parent", "A_src"), vector(tmp_path / "delta", name)
    before = contents(tmp_path)
    with pytest.raises(error, match=message):
        rebuild(parent, delta, tmp_path / "out", "arc_v2")
    with pytest.raises(error, match=message):
        verify(parent, delta, "arc_v2")
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "parent"]


def test_the_other_format_is_refused(tmp_path: Path) -> None:
    parent = vector(tmp_path / "parent", "A_src")
    with pytest.raises(SnapshotCorrupt, match="its blob is not valid zlib"):
        verify(parent, vector(tmp_path / "zstd", "A_diff_arc_v2"), "arc_v1")
    with pytest.raises(SnapshotCorrupt, match="its blob is not valid zstd"):
        verify(parent, vector(tmp_path / "zlib", "A_diff_arc_v1"), "arc_v2")


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", BOTH)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_round_trip_is_exact(
    tmp_path: Path, compression: CompressionFormat, shards: int, threads: int
) -> None:
    parent = checkpoint(tmp_path / "parent", arrays(), shards, step=1)
    child = checkpoint(tmp_path / "child", changed(arrays()), shards, step=2)
    before = contents(parent)
    stats = encode_delta(parent, child, tmp_path / "delta", compression, threads=threads)
    rebuild(parent, tmp_path / "delta", tmp_path / "out", compression, threads=threads)
    assert contents(tmp_path / "out") == contents(child)
    assert contents(parent) == before
    assert {p.name for p in (tmp_path / "delta").iterdir()} == {p.name for p in parent.iterdir()}
    assert stats.bytes_in == sum(a.nbytes for a in arrays().values())
    assert stats.bytes_out < stats.bytes_in / 5
    assert (stats.tensors, stats.changed) == (9, 9 - len(_same(parent, child)))


def _same(parent: Path, child: Path) -> set[str]:
    old, new = loaded(parent), loaded(child)
    return {name for name in old if old[name].tobytes() == new[name].tobytes()}


@pytest.mark.parametrize(("parents", "childs"), [(3, 1), (1, 3), (3, 2)])
def test_a_child_in_other_files_is_laid_out_as_its_parent(tmp_path: Path, parents: int, childs: int) -> None:
    parent = checkpoint(tmp_path / "parent", arrays(), parents)
    child = checkpoint(tmp_path / "child", changed(arrays()), childs)
    encode_delta(parent, child, tmp_path / "delta")
    rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in parent.iterdir()}
    assert_equal(loaded(tmp_path / "out"), changed(arrays()))
    assert read_spec(tmp_path / "out").tensors == read_spec(parent).tensors
    verify(parent, tmp_path / "delta", "arc_v2", result=child)


class InMemory:
    def __init__(self, array: NDArray[Any], dtype: str) -> None:
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def data(self) -> Any:
        return self._array.data


NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


def test_tensors_in_memory_give_the_same_delta_as_files(tmp_path: Path) -> None:
    parent = checkpoint(tmp_path / "parent", arrays(), 2, step=1)
    child = checkpoint(tmp_path / "child", changed(arrays()), 2, step=2)
    tensors = {name: InMemory(a, NAMES[a.dtype.name]) for name, a in changed(arrays()).items()}
    encode_delta(parent, child, tmp_path / "one")
    encode_tensors(parent, tensors, tmp_path / "other", others=child)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    encode_tensors(parent, tensors, tmp_path / "third")
    assert (tmp_path / "third/config.json").read_bytes() == (parent / "config.json").read_bytes()


def test_the_delta_of_an_adapter_gives_the_adapter(tmp_path: Path) -> None:
    made = []
    for number, tensors in enumerate((arrays(), changed(arrays()))):
        directory = tmp_path / f"adapter-{number}"
        directory.mkdir()
        save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": number}))
        made.append(directory)
    parent, child = made
    stats = encode_delta(parent, child, tmp_path / "delta", "arc_v2")
    assert 0 < stats.bytes_out < stats.bytes_in
    assert sorted(contents(tmp_path / "delta")) == ["adapter_config.json", "adapter_model.safetensors"]
    verify(parent, tmp_path / "delta", "arc_v2", result=child)
    rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2")
    assert contents(tmp_path / "out") == contents(child)


def test_a_chain_of_deltas(tmp_path: Path) -> None:
    state, parent = arrays(), checkpoint(tmp_path / "0", arrays(), 2)
    for step in range(1, 5):
        state = changed(state, seed=step)
        child = checkpoint(tmp_path / f"child{step}", state, 2)
        encode_delta(parent, child, tmp_path / f"delta{step}")
        rebuild(parent, tmp_path / f"delta{step}", tmp_path / f"{step}", "arc_v2")
        parent = tmp_path / f"{step}"
    assert_equal(loaded(parent), state)


def test_a_delta_of_weights_alone_takes_the_parents_other_files(tmp_path: Path) -> None:
    parent = checkpoint(tmp_path / "parent", arrays(), 2, step=1)
    (parent / ".listing.json").write_text("of the parent's bucket")
    (parent / "training.pt").write_text("pickled")
    encode_delta(parent, checkpoint(tmp_path / "child", changed(arrays()), 2), tmp_path / "delta")
    for path in (tmp_path / "delta").iterdir():
        if path.suffix == ".json":
            path.unlink()
    rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2")
    names = {p.name for p in parent.iterdir()} - {".listing.json", "training.pt"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"step": 1}


def test_the_result_has_the_parents_header(tmp_path: Path) -> None:
    """Metadata of the child's own file does not travel in a delta."""
    parent = checkpoint(tmp_path / "parent", arrays())
    child = checkpoint(tmp_path / "child", changed(arrays()))
    edit_header(child / "model.safetensors", lambda h: h["__metadata__"].update(step="7"))
    encode_delta(parent, child, tmp_path / "delta")
    rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2")
    assert read_file_layout(tmp_path / "out/model.safetensors") == read_file_layout(
        parent / "model.safetensors"
    )


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    parent = checkpoint(tmp_path / "parent", arrays(), 2)
    total = sum(a.nbytes for a in arrays().values())
    seen: list[tuple[int, int]] = []

    def note(done: int, of: int) -> None:
        seen.append((done, of))

    encode_delta(
        parent, checkpoint(tmp_path / "child", changed(arrays()), 2), tmp_path / "delta", progress=note
    )
    assert [of for _, of in seen] == [total] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
    seen.clear()
    rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2", progress=note)
    assert seen[-1] == (total, total)
    assert len({done for done, _ in seen}) == len(seen)


class Watched:
    """What is said of a checkpoint while it is made. seen: the bytes of each tensor in its file when it was named."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.there: set[str] = set()
        self.seen: dict[str, bytes] = {}

    def begun(self, directory: Path) -> None:
        self.directory = directory
        self.there = {path.name for path in directory.iterdir()}

    def given_up(self) -> None:
        raise AssertionError("who applies deltas says it")

    def made(self, tensor: str) -> None:
        assert self.directory is not None
        for file in self.directory.glob("*.safetensors"):
            layout = read_file_layout(file)
            if tensor in layout.ranges:
                begin, end = layout.ranges[tensor]
                self.seen[tensor] = file.read_bytes()[begin:end]


@pytest.mark.parametrize("compression", BOTH)
def test_each_tensor_is_named_when_it_is_made_in_files_that_are_otherwise_complete(
    tmp_path: Path, compression: CompressionFormat
) -> None:
    parent, child = checkpoint(tmp_path / "p", arrays(), 2), checkpoint(tmp_path / "c", changed(arrays()), 2)
    encode_delta(parent, child, tmp_path / "d", compression)
    watched = Watched()
    assert rebuild(parent, tmp_path / "d", tmp_path / "out", compression, making=watched)
    assert watched.there == {path.name for path in (tmp_path / "out").iterdir()}
    expected = {name: array.tobytes() for name, array in changed(arrays()).items()}
    assert watched.seen == expected


def test_large_tensors_are_made_first_and_the_others_layer_by_layer(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": np.ones((2, 3), np.float32) for i in (10, 2, 0, 1)}
    tensors |= {"z.large": np.ones((500, 3), np.float32), "a": np.ones(3, np.float32)}
    parent = checkpoint(tmp_path / "p", tensors)
    encode_delta(parent, checkpoint(tmp_path / "c", changed(tensors)), tmp_path / "d")
    watched = Watched()
    rebuild(parent, tmp_path / "d", tmp_path / "out", "arc_v2", threads=1, making=watched)
    assert [*watched.seen] == ["z.large", "a", *(f"layers.{i}.w" for i in (0, 1, 2, 10))]


def test_a_tensor_that_is_not_finite_or_has_another_checksum_is_not_named(tmp_path: Path) -> None:
    new = changed(arrays())
    new["layers.1.w"][3, 4] = np.nan
    parent, delta = checkpoint(tmp_path / "p", arrays()), tmp_path / "d"
    encode_delta(parent, checkpoint(tmp_path / "c", new), delta)
    watched = Watched()
    assert not rebuild(parent, delta, tmp_path / "out", "arc_v2", making=watched)
    assert watched.seen.keys() == new.keys() - {"layers.1.w"}
    metadata, blobs = (
        read_file_layout(delta / "model.safetensors", gaps=True).metadata,
        delta / "model.safetensors",
    )
    save_file(load_file(blobs), blobs, metadata={**metadata, "layers.2.w": "1"})
    watched = Watched()
    with pytest.raises(SnapshotCorrupt, match=r"layers\.2\.w: checksum"):
        rebuild(parent, delta, tmp_path / "other", "arc_v2", making=watched)
    assert not watched.seen.keys() & {"layers.1.w", "layers.2.w"}
    assert watched.directory is not None
    assert not watched.directory.exists()


def test_each_header_of_the_parent_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, delta = prepared(tmp_path)
    whole = checkpoint(tmp_path / "child", changed(arrays()), 1)
    headers = {name: (parent / name).read_bytes() for name in (ONE, TWO)}
    texts = {name: raw[8 : 8 + int.from_bytes(raw[:8], "little")].decode() for name, raw in headers.items()}
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    rebuild(parent, delta, tmp_path / "out", "arc_v2")
    assert [parsed.count(text) for text in texts.values()] == [1, 1]
    parsed.clear()
    verify(parent, delta, "arc_v2")
    assert [parsed.count(text) for text in texts.values()] == [1, 1]
    parsed.clear()
    encode_delta(parent, whole, tmp_path / "again")
    assert [parsed.count(text) for text in texts.values()] == [1, 1]


# -- refusals ----------------------------------------------------------------------------------------------------------


def prepared(tmp_path: Path, shards: int = 2) -> tuple[Path, Path]:
    parent = checkpoint(tmp_path / "parent", arrays(), shards)
    child = checkpoint(tmp_path / "child", changed(arrays()), shards)
    encode_delta(parent, child, tmp_path / "delta")
    shutil.rmtree(child)
    return parent, tmp_path / "delta"


def refused(parent: Path, delta: Path, error: type[Exception], message: str) -> None:
    """`rebuild` and `verify` refuse alike, and leave everything as it was."""
    root = parent.parent
    before = contents(root)
    with pytest.raises(error, match=message):
        verify(parent, delta, "arc_v2")
    with pytest.raises(error, match=message):
        rebuild(parent, delta, root / "out", "arc_v2")
    assert contents(root) == before
    assert not (root / "out").exists()


def test_another_parent_is_refused_by_a_checksum(tmp_path: Path) -> None:
    _, delta = prepared(tmp_path)
    other = checkpoint(tmp_path / "other", changed(arrays(), seed=5), 2)
    refused(
        other, delta, SnapshotCorrupt, r"safetensors: .*: checksum \d+ of the rebuilt tensor, '\d+' expected"
    )


def test_a_missing_file(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    (delta / TWO).unlink()
    refused(parent, delta, SnapshotMissing, f"{TWO}: is not in the delta")


def test_a_file_too_many(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    shutil.copy(delta / TWO, delta / "model-3.safetensors")
    refused(
        parent, delta, SnapshotIncompatible, "model-3.safetensors: is in the delta, but not in its parent"
    )


def test_a_missing_directory(tmp_path: Path) -> None:
    parent, _ = prepared(tmp_path)
    refused(parent, tmp_path / "nowhere", SnapshotMissing, "nowhere: is not there")
    with pytest.raises(SnapshotMissing):
        rebuild(tmp_path / "nowhere", tmp_path / "delta", tmp_path / "out", "arc_v2")


def test_a_tensor_too_many(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path, 1)
    file = delta / "model.safetensors"
    layout = read_file_layout(file)
    blobs = {name: blob.tobytes() for name, blob in load_file(file).items()} | {"more": b"x"}
    write_delta(delta, file.name, blobs, layout.metadata | {"more": "1"})
    refused(parent, delta, SnapshotIncompatible, "more is in the delta, but not in its parent")


def test_a_tensor_in_another_file_than_its_parents(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    one, two = (delta / ONE).read_bytes(), (delta / TWO).read_bytes()
    (delta / ONE).write_bytes(two)
    (delta / TWO).write_bytes(one)
    refused(parent, delta, SnapshotIncompatible, f"{ONE}: .* missing from the delta")


def test_an_index_of_another_layout(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["embed"] = "model-00009-of-00002.safetensors"
    path.write_text(json.dumps(index))
    refused(parent, delta, SnapshotIncompatible, "index.json: embed is in 'model-00009")
    path.write_text("{")
    refused(parent, delta, SnapshotCorrupt, "index.json: is not valid JSON")
    path.write_text("{}")
    refused(parent, delta, SnapshotCorrupt, "index.json: has no weight_map")


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (
            f'{{"weight_map": {{"embed": "../{ONE}", "embed": "{ONE}"}}}}',
            SnapshotCorrupt,
            "names a key twice",
        ),
        ('{"weight_map": {"embed": "x"}, "weight_map": {}}', SnapshotCorrupt, "names a key twice"),
        (
            f'{{"weight_map": {{"embed": "../{ONE}"}}}}',
            SnapshotCorrupt,
            "embed is mapped to '../model.*not a shard's name",
        ),
        ('{"weight_map": {"embed": "/etc/x.safetensors"}}', SnapshotCorrupt, "not a shard's name"),
        ('{"weight_map": {"embed": "model.bin"}}', SnapshotCorrupt, "not a shard's name"),
        (
            '{"weight_map": {"embed": null}}',
            SnapshotCorrupt,
            "embed is mapped to None, which is not a shard's name",
        ),
        ('{"weight_map": {}}', SnapshotCorrupt, "has no weight_map"),
        ('{"weight_map": {"\\ud800": "model.safetensors"}}', SnapshotCorrupt, "not valid Unicode"),
        ("[]", SnapshotCorrupt, "is not a JSON object"),
        (
            f'{{"weight_map": {{"embed": "{ONE}"}}}}',
            SnapshotIncompatible,
            "is in None in the delta, in 'model-0000",
        ),
        (None, SnapshotError, "index.json: cannot be read: Is a directory"),
    ],
)
def test_a_deltas_index_is_read_as_strictly_as_a_checkpoints(
    tmp_path: Path, index: str | None, error: type[Exception], message: str
) -> None:
    parent, delta = prepared(tmp_path)
    path = delta / "model.safetensors.index.json"
    if index is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(index)
    refused(parent, delta, error, message)


def test_a_deltas_index_that_names_a_file_which_is_not_there(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    assert (delta / "model.safetensors.index.json").exists()
    (delta / ONE).unlink()
    refused(parent, delta, SnapshotMissing, f"{ONE}: is not in the delta")


def test_an_index_for_a_parent_in_one_file(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path, 1)
    (delta / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(parent, delta, SnapshotIncompatible, "index.json: is in the delta, but not in its parent")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("I8", lambda n: [n]), ("U8", lambda n: [n, 1]), ("U8", lambda n: [1, n])]
)
def test_a_blob_that_is_no_row_of_bytes(tmp_path: Path, dtype: str, shape: Any) -> None:
    parent, delta = prepared(tmp_path, 1)

    def change(header: dict[str, Any]) -> None:
        header["embed"] |= {"dtype": dtype, "shape": shape(header["embed"]["shape"][0])}

    edit_header(delta / "model.safetensors", change)
    refused(parent, delta, SnapshotIncompatible, r"embed is .*, not a U8 blob of one dimension")


@pytest.mark.parametrize("value", [None, 7, "", "0x1", "00001", " 1"])
def test_a_checksum_that_is_no_decimal_text(tmp_path: Path, value: Any) -> None:
    parent, delta = prepared(tmp_path, 1)
    edit_header(delta / "model.safetensors", lambda h: h["__metadata__"].update(empty=value))
    message = "empty: checksum 1 .* expected" if isinstance(value, str) else "empty has no checksum"
    refused(parent, delta, SnapshotCorrupt, message)


def test_no_metadata_at_all(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path, 1)
    edit_header(delta / "model.safetensors", lambda h: h.pop("__metadata__"))
    refused(parent, delta, SnapshotCorrupt, "has no checksum in the metadata")


def test_a_truncated_delta_file(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    raw = (delta / TWO).read_bytes()
    for size in (len(raw) - 1, len(raw) // 2, 9, 0):
        (delta / TWO).write_bytes(raw[:size])
        refused(parent, delta, SnapshotCorrupt, f"{TWO}: truncated")


@pytest.mark.parametrize("name", ["embed", "layers.0.w", "scalar"])
def test_a_flipped_byte_of_any_blob_is_found(tmp_path: Path, name: str) -> None:
    """In an unchanged tensor's blob as well; a byte that only says how it was compressed may pass, with the right result."""
    parent, delta = prepared(tmp_path, 1)
    rebuild(parent, delta, tmp_path / "good", "arc_v2")
    good = (tmp_path / "good/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "good")
    file = delta / "model.safetensors"
    raw = bytearray(file.read_bytes())
    begin, end = read_file_layout(file).ranges[name]
    errors = []
    for position in {*range(begin, min(begin + 12, end)), (begin + end) // 2, end - 1}:
        raw[position] ^= 0x55
        file.write_bytes(raw)
        try:
            rebuild(parent, delta, tmp_path / "out", "arc_v2")
        except SnapshotCorrupt as error:
            errors.append(str(error))
        else:
            assert (tmp_path / "out/model.safetensors").read_bytes() == good
            shutil.rmtree(tmp_path / "out")
        raw[position] ^= 0x55
    assert len(errors) >= 5
    assert all(f"model.safetensors: {name}: " in error for error in errors)


def test_something_at_out_is_never_replaced(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    for act in (
        lambda: rebuild(parent, delta, tmp_path / "out", "arc_v2"),
        lambda: encode_delta(parent, parent, tmp_path / "out"),
    ):
        with pytest.raises(SnapshotError, match="out: exists already"):
            act()
    assert contents(tmp_path / "out") == {"mine": b"kept"}


def test_cancelling_stops_and_leaves_nothing(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    before, calls = contents(tmp_path), []

    def cancelled() -> bool:
        calls.append(1)
        return len(calls) > 3

    with pytest.raises(RebuildCancelled):
        rebuild(parent, delta, tmp_path / "out", "arc_v2", cancelled=cancelled)
    with pytest.raises(RebuildCancelled):
        encode_delta(parent, parent, tmp_path / "out", cancelled=lambda: True)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "parent"]


def test_an_error_of_progress_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)

    def broken(done: int, total: int) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        rebuild(parent, delta, tmp_path / "out", "arc_v2", progress=broken)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "parent"]


@pytest.mark.parametrize("what", ["rebuild", "encode"])
def test_a_parent_that_becomes_shorter_meanwhile_is_an_error_and_leaves_nothing(
    tmp_path: Path, what: str
) -> None:
    parent, delta = prepared(tmp_path, 1)
    other = checkpoint(tmp_path / "other", changed(arrays()))

    def shorten(done: int, total: int) -> None:
        os.truncate(parent / "model.safetensors", 1000)

    acts: dict[str, Callable[[], object]] = {
        "rebuild": lambda: rebuild(parent, delta, tmp_path / "out", "arc_v2", threads=1, progress=shorten),
        "encode": lambda: encode_delta(parent, other, tmp_path / "out", threads=1, progress=shorten),
    }
    with pytest.raises(SnapshotCorrupt, match="a file became shorter while it was read"):
        acts[what]()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "other", "parent"]


def test_an_interrupt_stops_the_threads_and_leaves_nothing(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    seen: list[int] = []

    def interrupting(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rebuild(parent, delta, tmp_path / "out", "arc_v2", threads=1, progress=interrupting)
    assert not any(thread.name.startswith("delta") for thread in threading.enumerate())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "parent"]


@pytest.mark.parametrize("what", ["rebuild", "encode"])
def test_a_disk_that_refuses_is_an_error_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    parent, delta = prepared(tmp_path, 1)
    other = checkpoint(tmp_path / "other", changed(arrays()))
    acts: dict[str, Callable[[], object]] = {
        "rebuild": lambda: rebuild(parent, delta, tmp_path / "out", "arc_v2"),
        "encode": lambda: encode_delta(other, parent, tmp_path / "out"),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
    try:
        with pytest.raises(SnapshotError, match="out: File too large"):
            acts[what]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta", "other", "parent"]


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    state = {f"w{i}": np.full((3,), i, np.float32) for i in range(120)}
    parent = checkpoint(tmp_path / "parent", state, 120)
    child = checkpoint(tmp_path / "child", {k: v + 1 for k, v in state.items()}, 120)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        encode_delta(parent, child, tmp_path / "delta")
        rebuild(parent, tmp_path / "delta", tmp_path / "out", "arc_v2")
        verify(parent, tmp_path / "delta", "arc_v2", result=child)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_equal(loaded(tmp_path / "out"), {k: v + 1 for k, v in state.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("embed"), "embed: is in the parent, but not in the child"),
        (lambda t: t.update(more=t["embed"]), "more: is in the child, but not in the parent"),
        (
            lambda t: t.update(embed=t["embed"].T.copy()),
            r"embed is F16\[700, 500\] in the child, F16\[500, 700\]",
        ),
        (lambda t: t.update(embed=t["embed"].view(np.int16)), r"embed is I16.* in the child, F16"),
    ],
)
def test_a_child_that_is_no_child_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    parent, tensors = checkpoint(tmp_path / "parent", arrays()), changed(arrays())
    change(tensors)
    with pytest.raises(SnapshotIncompatible, match=message):
        encode_delta(parent, checkpoint(tmp_path / "child", tensors), tmp_path / "delta")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["child", "parent"]


def test_a_tensor_in_memory_of_too_few_bytes_is_refused(tmp_path: Path) -> None:
    parent = checkpoint(tmp_path / "parent", arrays())
    tensors = {name: InMemory(a, NAMES[a.dtype.name]) for name, a in arrays().items()}
    tensors["embed"]._array = tensors["embed"]._array[:-1]
    with pytest.raises(
        SnapshotIncompatible, match="embed: has 698600 bytes in the child, 700000 in the parent"
    ):
        encode_tensors(parent, tensors, tmp_path / "delta")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parent"]


def test_verify_compares_a_result(tmp_path: Path) -> None:
    parent, delta = prepared(tmp_path)
    rebuild(parent, delta, tmp_path / "out", "arc_v2")
    verify(parent, delta, "arc_v2", result=tmp_path / "out")
    with pytest.raises(SnapshotIncompatible, match=r"parent: .* is not what the delta makes"):
        verify(parent, delta, "arc_v2", result=parent)
    smaller = arrays()
    smaller.pop("embed")
    with pytest.raises(SnapshotIncompatible, match="embed: is in one of parent and smaller only"):
        verify(parent, delta, "arc_v2", result=checkpoint(tmp_path / "smaller", smaller))


PEAK = """
import re, sys
from pathlib import Path
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.rebuild import rebuild
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
root = Path(sys.argv[1])
for act in (
    lambda: encode_delta(root / "parent", root / "child", root / "delta", threads=2),
    lambda: rebuild(root / "parent", root / "delta", root / "out", "arc_v2", threads=2),
):
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    act()
    print(status("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """64 MB in one file: encoding maps the tensors it works on, rebuilding holds blobs and pieces."""
    bits = np.random.default_rng(0).integers(0, 2**15, (8, 2**22), dtype=np.uint16)
    parent = {f"w{i}": row for i, row in enumerate(bits)}
    checkpoint(tmp_path / "parent", parent)
    checkpoint(tmp_path / "child", {name: row ^ (np.arange(2**22) % 50 == 0) for name, row in parent.items()})
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    encoding, rebuilding = map(int, done.stdout.split())
    assert encoding < 40 * 1024
    assert rebuilding < 12 * 1024


FAULTS = """
import resource, sys
from pathlib import Path
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.rebuild import rebuild, verify
def faults(act):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    act()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
root = Path(sys.argv[1])
parent, child, delta = (root / name for name in ("parent", "child", "delta"))
print(
    faults(lambda: encode_delta(parent, child, root / "again", threads=1)),
    faults(lambda: rebuild(parent, delta, root / "out", "arc_v2", threads=1)),
    faults(lambda: verify(parent, delta, "arc_v2", threads=1)),
)
"""


def test_memory_is_used_again_from_tensor_to_tensor(tmp_path: Path) -> None:
    """Fresh memory for every tensor took a third of a rebuild's CPU time: each page of it is a fault."""
    tensors = {f"w{i}": np.zeros((1024 + 16 * i, 512), np.float32) for i in range(32)}
    parent = checkpoint(tmp_path / "parent", tensors)
    child = checkpoint(tmp_path / "child", changed(tensors))
    encode_delta(parent, child, tmp_path / "delta")
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    pages = sum(array.nbytes for array in tensors.values()) // resource.getpagesize()
    for faults in done.stdout.split():
        assert int(faults) < pages / 4, done.stdout
