"""Deltas as Miles and SkyRL write them: what they make of a parent, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load_file, save_file
from test_delta import (
    Arrays,
    Watched,
    arrays,
    assert_equal,
    changed,
    checkpoint,
    contents,
    edit_header,
    loaded,
)
from trainer_writers import write_miles, write_skyrl

from midstream.cli import main
from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import TrainerFormat
from midstream.snapshots import rebuild as rebuild_module
from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.trainer_deltas import overwrite
from midstream.snapshots.trainer_deltas.records import Lineage

FORMATS: tuple[TrainerFormat, ...] = ("miles_delta", "skyrl_delta")
WRITERS: dict[str, Callable[..., Path]] = {"miles_delta": write_miles, "skyrl_delta": write_skyrl}
INDEX = "model.safetensors.index.json"


def needed(algorithm: str) -> None:
    package = {"xxh3-128": "xxhash", "blake3": "blake3"}.get(algorithm)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def prepared(root: Path, form: TrainerFormat, **how: Any) -> tuple[Path, Path, Arrays]:
    """A parent, a delta on it, and the tensors that it makes."""
    old = arrays()
    new = changed(old)
    parent = checkpoint(root / "parent", old, 2, made="parent")
    return parent, WRITERS[form](root / "delta", old, new, **how), new


CASES = [
    *(("miles_delta", {"encoding": e, "algorithm": "adler32"}) for e in ("xor", "overwrite")),
    ("miles_delta", {"algorithm": "xxh3-128", "files": 1}),
    ("miles_delta", {"algorithm": "blake3"}),
    ("skyrl_delta", {"algorithm": "sha256"}),
    ("skyrl_delta", {"algorithm": "xxh3-128"}),
]


@pytest.mark.parametrize(("form", "how"), CASES)
def test_a_delta_gives_its_child_byte_for_byte_in_the_parents_files(
    tmp_path: Path, form: TrainerFormat, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed(how["algorithm"])
    # Tensors of several pieces, and blobs of several runs of positions.
    for module in (rebuild_module, overwrite):
        monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(overwrite, "POSITIONS_HELD", 100)
    parent, delta, new = prepared(tmp_path, form, **how)
    before = contents(tmp_path)
    watched = Watched()
    assert rebuild(parent, delta, tmp_path / "out", form, making=watched)
    assert watched.seen == {name: array.tobytes() for name, array in new.items()}
    assert_equal(loaded(tmp_path / "out"), new)
    out = contents(tmp_path / "out")
    assert out.keys() == contents(parent).keys()
    assert out["config.json"] == (parent / "config.json").read_bytes()
    assert contents(tmp_path).items() >= before.items()


@pytest.mark.parametrize("form", FORMATS)
def test_a_delta_that_changes_nothing_gives_the_parent(tmp_path: Path, form: TrainerFormat) -> None:
    old = arrays()
    parent = checkpoint(tmp_path / "parent", old)
    delta = WRITERS[form](tmp_path / "delta", old, old)
    rebuild(parent, delta, tmp_path / "out", form)
    assert contents(tmp_path / "out") == contents(parent)


def test_one_version_stands_on_another(tmp_path: Path) -> None:
    old = arrays()
    path, form = checkpoint(tmp_path / "parent", old), FORMATS[0]
    for version in (1, 2, 3):
        new = changed(old, seed=version)
        directory = write_miles(tmp_path / f"weight_v{version:06d}", old, new, version)
        out = tmp_path / f"out{version}"
        rebuild(path, directory, out, form, lineage=Lineage(path.name, directory.name))
        path, old = out, new
    assert_equal(loaded(path), old)


def test_a_checksum_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, delta, _ = prepared(tmp_path, "miles_delta", algorithm="adler32")
    index_of(delta, lambda said: said["metadata"].update(checksum_format="xxh3-128"))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(SnapshotError, match=r"pip install 'midstream\[deltas\]'"):
        rebuild(parent, delta, tmp_path / "out", "miles_delta")


def refused(root: Path, form: TrainerFormat, error: type[Exception], *words: str, **how: Any) -> None:
    before = contents(root)
    with pytest.raises(error) as caught:
        rebuild(root / "parent", root / "delta", root / "out", form, **how)
    for word in words:
        assert word in str(caught.value)
    assert contents(root) == before


def index_of(delta: Path, change: Callable[[Any], None]) -> None:
    path = next(path for path in (delta / INDEX, delta / "manifest.json") if path.exists())
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))


@pytest.mark.parametrize("form", FORMATS)
def test_another_parent_is_refused_by_a_checksum_and_by_its_name(tmp_path: Path, form: TrainerFormat) -> None:
    prepared(tmp_path, form, version=7)
    place = {"miles_delta": "weight_v{:06d}", "skyrl_delta": "delta-{:08d}"}[form].format
    shutil.rmtree(tmp_path / "parent")
    checkpoint(tmp_path / "parent", arrays(seed=9), 2)
    refused(tmp_path, form, SnapshotCorrupt, "checksum", ".safetensors: ")
    for lineage in (Lineage(place(5), place(7)), Lineage(place(6), place(8)), Lineage(place(7), place(8))):
        refused(tmp_path, form, SnapshotIncompatible, "version", lineage=lineage)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("where", ["blob", "checksum", "cut", "missing file", "no index", "cut index"])
def test_a_planted_fault_names_its_file_and_its_tensor(
    tmp_path: Path, form: TrainerFormat, where: str
) -> None:
    _, delta, _ = prepared(tmp_path, form)
    file = min(delta.glob("*.safetensors"))
    name = min(load_file(file))
    if where == "blob":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        refused(tmp_path, form, SnapshotCorrupt, file.name)
    elif where == "checksum":
        if form == "miles_delta":
            edit_header(file, lambda header: header["__metadata__"].update({name: "00000001"}))
        else:
            index_of(delta, lambda said: said["tensors"][0].update(checksum="0" * 64))
        refused(tmp_path, form, SnapshotCorrupt, file.name, name, "checksum")
    elif where == "cut":
        file.write_bytes(file.read_bytes()[:-5])
        refused(tmp_path, form, SnapshotCorrupt, file.name, "truncated")
    elif where == "missing file":
        file.unlink()
        refused(tmp_path, form, SnapshotMissing, file.name)
    else:
        said = delta / (INDEX if form == "miles_delta" else "manifest.json")
        if where == "no index":
            said.unlink()
            refused(tmp_path, form, SnapshotMissing, said.name)
        else:
            said.write_bytes(said.read_bytes()[:-9])
            refused(tmp_path, form, SnapshotCorrupt, said.name)


OUT = "../../parent/model-00001-of-00002.safetensors"
MILES_FAULTS: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (lambda said: said["weight_map"].update({"embed": OUT}), SnapshotCorrupt, "embed is mapped to"),
    (lambda said: said["weight_map"].pop("embed"), SnapshotCorrupt, "embed, which"),
    (lambda said: said["metadata"].pop("delta_encoding"), SnapshotIncompatible, "full snapshot"),
    (lambda said: said["metadata"].update(delta_encoding="add"), SnapshotIncompatible, "xor or overwrite"),
    (lambda said: said["metadata"].update(compression_format="lz4"), SnapshotIncompatible, "zstd"),
    (lambda said: said["metadata"].update(checksum_format="crc"), SnapshotIncompatible, "adler32"),
    (lambda said: said["metadata"].update(base_version="-1"), SnapshotCorrupt, "base_version '-1'"),
    (lambda said: said["metadata"].update(base_version="000001"), SnapshotIncompatible, "cannot stand on"),
    (lambda said: said.update(weight_map=[]), SnapshotCorrupt, "no metadata and weight_map"),
]
SKYRL_FAULTS: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (lambda said: said["payload_files"].append(OUT), SnapshotCorrupt, "not a file's name"),
    (lambda said: said["tensors"][0].update(payload_file=OUT), SnapshotCorrupt, "none of its payload_files"),
    (lambda said: said["tensors"].append(said["tensors"][0]), SnapshotCorrupt, "twice"),
    (lambda said: said["tensors"].pop(), SnapshotCorrupt, "does not name"),
    (lambda said: said["tensors"][0].update(shape=[1]), SnapshotIncompatible, "shape (1,)"),
    (lambda said: said["tensors"][0].update(dtype="int8"), SnapshotIncompatible, "dtype 'int8'"),
    (lambda said: said["tensors"][0].update(uncompressed_num_bytes=3), SnapshotIncompatible, "size 3"),
    (lambda said: said["tensors"][0].update(compressed_num_bytes=3), SnapshotCorrupt, "not of 3"),
    (lambda said: said["tensors"][0].update(checksum_algorithm="md5"), SnapshotIncompatible, "'md5'"),
    (lambda said: said["tensors"][0].update(name="another"), SnapshotIncompatible, "another is in the delta"),
    (lambda said: said.update(version="1"), SnapshotCorrupt, "no manifest"),
]


@pytest.mark.parametrize("number", range(len(MILES_FAULTS) + len(SKYRL_FAULTS)))
def test_an_index_that_is_not_understood_is_refused_by_name(tmp_path: Path, number: int) -> None:
    change, error, word = (MILES_FAULTS + SKYRL_FAULTS)[number]
    form: TrainerFormat = FORMATS[number >= len(MILES_FAULTS)]
    _, delta, _ = prepared(tmp_path, form)
    index_of(delta, change)
    refused(tmp_path, form, error, word)


def blob_of(count: int, positions: list[int], values: list[int], more: bytes = b"") -> bytes:
    data = np.array([count], "<u4").tobytes() + np.array(positions, "<u4").tobytes() + bytes(values) + more
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    ("blob", "word"),
    [
        (blob_of(2, [5, 5], [1, 1]), "do not ascend"),
        (blob_of(2, [5, 4], [1, 1]), "do not ascend"),
        (blob_of(1, [1200], [1]), "changes byte 1200"),
        (blob_of(2**32 - 1, [], []), "changes 4294967295 bytes"),
        (blob_of(2, [1, 2], [1]), "holds 13 bytes"),
        (blob_of(1, [1], [1], b"more"), "holds more"),
        (zstandard.ZstdCompressor().compress(b"ab"), "no number"),
        (b"no zstd at all", "zstd"),
    ],
)
def test_an_overwrite_blob_that_lies_is_refused(tmp_path: Path, blob: bytes, word: str) -> None:
    old = {"w": np.zeros(300, np.float32)}
    checkpoint(tmp_path / "parent", old)
    delta = write_miles(tmp_path / "delta", old, {"w": np.ones(300, np.float32)}, encoding="overwrite")
    (file,) = delta.glob("*.safetensors")
    save_file({"w": np.frombuffer(blob, np.uint8)}, file, {"w": "00000001"})
    refused(tmp_path, "miles_delta", SnapshotCorrupt, file.name, "w: its blob", word)


def test_the_command_checks_and_applies_them_and_writes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, delta, new = prepared(tmp_path, "skyrl_delta")
    paths = ["--parent", str(parent), "--delta", str(delta), "--format", "skyrl_delta"]
    assert main(["delta", "verify", *paths]) == 0
    assert main(["delta", "decode", *paths, "--out", str(tmp_path / "out")]) == 0
    assert_equal(loaded(tmp_path / "out"), new)
    assert main(["delta", "verify", *paths, "--out", str(tmp_path / "out")]) == 0
    assert main(["delta", "verify", *paths, "--out", str(parent)]) == 1
    assert "is not what the delta makes" in capsys.readouterr().err
    encode = [
        "delta",
        "encode",
        "--parent",
        str(parent),
        "--child",
        str(parent),
        "--out",
        str(tmp_path / "d"),
    ]
    assert main([*encode, "--format", "skyrl_delta"]) == 2
    assert "is only read" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_a_number_that_is_not_finite_is_seen_while_it_is_written(tmp_path: Path, form: TrainerFormat) -> None:
    old = arrays()
    new = changed(old)
    new["layers.1.w"][3, 4] = np.nan
    parent, delta = checkpoint(tmp_path / "parent", old), WRITERS[form](tmp_path / "delta", old, new)
    watched = Watched()
    assert not rebuild(parent, delta, tmp_path / "out", form, making=watched)
    assert watched.seen.keys() == new.keys() - {"layers.1.w"}
    assert_equal(loaded(tmp_path / "out"), new)
