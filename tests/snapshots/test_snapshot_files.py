"""Fetching, layout, verification and cache, on real files."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import fetch_snapshot
from fingerprints import snapshot_fingerprint
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from midstream.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotIncompatible,
    SnapshotMissing,
    SnapshotRefused,
)
from midstream.snapshots.identity import check_identity, file_url_path, snapshot_url
from midstream.snapshots.layout import (
    CheckpointSpec,
    TensorSpec,
    read_checkpoint,
    read_file_layout,
    read_spec,
)
from midstream.snapshots.store import bucket, fetch
from midstream.snapshots.store.local import CONTENT_FILE, FINITE_FILE, LISTING_FILE, STAMPS_FILE, is_whole
from midstream.snapshots.store.verify import check_compatible

CONFIG = {"model_type": "tiny", "hidden_size": 8, "rope": {"theta": 10000, "kinds": ["a", "b"]}}


def write_checkpoint(directory: Path, shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = {f"layers.{i}.w": np.full((3, 2), i, dtype=np.float32) for i in range(4)}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for s in range(shards):
        name = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {k: v for i, (k, v) in enumerate(tensors.items()) if i % shards == s}
        save_file(part, directory / name)
        weight_map.update(dict.fromkeys(part, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_header(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def fetch_from(source: Path, dest: Path, **kwargs: Any) -> None:
    asyncio.run(fetch_snapshot(source.as_uri(), dest, **kwargs))


def temporaries(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("."))


# --- identities ---


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        ("", "must not be empty"),
        ("base", "is reserved"),
        (".", "none of them empty"),
        ("..", "none of them empty"),
        ("/step", "none of them empty"),
        ("step/", "none of them empty"),
        ("a//b", "none of them empty"),
        ("a/../b", "none of them empty"),
        ("a/./b", "none of them empty"),
        ("a\\b", "a backslash"),
        ("a\0b", "control characters"),
        ("a\nb", "control characters"),
        ("a\x85b", "control characters"),
        ("a\u2028b", "control characters"),
        ("step@2", "'@'"),
        ("\ud800", "valid Unicode"),
        ("x" * 513, "at most 512 characters, got 513"),
    ],
)
def test_an_identity_that_could_escape_or_confuse_is_refused(identity: str, says: str) -> None:
    with pytest.raises(SnapshotRefused, match=says) as caught:
        check_identity(identity)
    assert caught.value.param == "identity"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "identity", ["step-1", "run/7/step 2", "100%", "...", "ünïcode#?", "\ufffd", "Base", "x" * 512]
)
def test_an_ordinary_identity_is_accepted_and_its_url_leads_back_to_it(identity: str) -> None:
    assert str(file_url_path(snapshot_url("file:///bucket/", identity))) == f"/bucket/{identity}"


@given(st.text(max_size=40))
def test_no_accepted_identity_leaves_its_bucket(identity: str) -> None:
    try:
        url = snapshot_url("file:///bucket", identity)
    except SnapshotRefused:
        return
    path = os.path.normpath(str(file_url_path(url)))
    assert path == f"/bucket/{identity}"
    assert identity.partition("@") == (identity, "", "")


# --- fetching ---


def test_a_fetched_snapshot_has_the_same_bytes_and_only_the_files_of_a_snapshot(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "bucket" / "step 1%", shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(name)
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "tokenizer.pkl", ".hidden.safetensors"):
        (source / name).write_text("no")
    (source / "nested").mkdir()
    (source / "nested" / "x.safetensors").write_text("no")
    seen: list[tuple[int, int]] = []

    fetch_from(source, tmp_path / "dest", progress=lambda done, total: seen.append((done, total)))

    fetched = {p.name: p.read_bytes() for p in (tmp_path / "dest").iterdir() if not p.name.startswith(".")}
    assert fetched == {name: (source / name).read_bytes() for name in fetched}
    assert sorted(fetched) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    total = sum(len(data) for data in fetched.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert temporaries(tmp_path) == []


def test_fetching_again_replaces_what_was_there(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "step")
    fetch_from(source, tmp_path / "dest")
    (tmp_path / "dest" / "stale").write_text("old")
    (source / "config.json").write_text("{}")
    fetch_from(source, tmp_path / "dest")
    names = {p.name for p in (tmp_path / "dest").iterdir()}
    # On some machines the fetch sees that all numbers are finite.
    names.discard(FINITE_FILE)
    assert names == {CONTENT_FILE, LISTING_FILE, STAMPS_FILE, "config.json", "model.safetensors"}
    assert (tmp_path / "dest" / "config.json").read_text() == "{}"
    assert temporaries(tmp_path) == []


def test_a_copy_is_used_again_until_the_snapshot_or_the_copy_changes(tmp_path: Path) -> None:
    source, dest = write_checkpoint(tmp_path / "step"), tmp_path / "dest"
    progress: list[tuple[int, int]] = []

    def fetches() -> bool:
        progress.clear()
        fetch_from(source, dest, progress=lambda done, total: progress.append((done, total)))
        assert (dest / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        return bool(progress)

    assert [fetches(), fetches()] == [True, False]
    weights = (source / "model.safetensors").read_bytes()
    (source / "again").write_bytes(weights[:-1] + b"x")
    (source / "again").rename(source / "model.safetensors")
    assert [fetches(), fetches()] == [True, False]
    (source / "tokenizer.json").write_text("{}")
    assert [fetches(), fetches()] == [True, False]
    os.truncate(dest / "model.safetensors", 10)
    assert [fetches(), fetches()] == [True, False]


def fingerprint(source: Path) -> str:
    return asyncio.run(snapshot_fingerprint(source.as_uri()))


def test_a_fingerprint_changes_with_the_files_of_the_snapshot_and_with_nothing_else(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "step", shards=2)
    first = fingerprint(source)
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "deeper").mkdir()
    (source / "deeper" / "model.safetensors").write_bytes(b"x")
    assert fingerprint(source) == first
    (source / "config.json").write_bytes((source / "config.json").read_bytes())
    rewritten = fingerprint(source)
    (source / "tokenizer.json").write_text("{}")
    assert len({first, rewritten, fingerprint(source)}) == 3
    with pytest.raises(SnapshotMissing, match=r"file://.*/absent: there is no such snapshot"):
        fingerprint(tmp_path / "absent")


def test_files_that_are_not_those_that_were_signalled_are_not_fetched(tmp_path: Path) -> None:
    source, dest = write_checkpoint(tmp_path / "step"), tmp_path / "cache" / "step"
    signalled = fingerprint(source)
    (source / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 9}))
    with pytest.raises(
        SnapshotCorrupt, match=r"step: its files changed since the snapshot was signalled; signal it again$"
    ):
        fetch_from(source, dest, fingerprint=signalled)
    assert not dest.exists()
    fetch_from(source, dest, fingerprint=fingerprint(source))
    assert read_spec(dest).config["hidden_size"] == 9


def test_a_copy_is_whole_whatever_became_of_the_bucket_and_not_when_a_file_of_its_own_changed(
    tmp_path: Path,
) -> None:
    source, dest = write_checkpoint(tmp_path / "step"), tmp_path / "cache" / "step"
    signalled = fingerprint(source)
    fetch_from(source, dest, fingerprint=signalled)
    source.rename(tmp_path / "away")
    assert is_whole(dest, signalled, [None])
    assert not is_whole(dest, "0" * 64, [None])
    (dest / "model.safetensors").write_bytes(b"short")
    assert not is_whole(dest, signalled, [None])
    with pytest.raises(SnapshotMissing):
        fetch_from(source, dest)


def test_messages_about_a_place_are_short(tmp_path: Path) -> None:
    long = snapshot_url(tmp_path.as_uri(), "/".join(["\N{SNOWMAN}" * 80] * 6))
    for url in (long, "s3://" + "b" * 5000):
        with pytest.raises(SnapshotMissing) as caught:
            asyncio.run(fetch_snapshot(url, tmp_path / "d"))
        assert len(str(caught.value)) <= 1000


def test_an_absent_or_empty_snapshot_is_missing_and_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "weights.bin").write_text("no")
    for name in ("absent", "empty", "x" * 300):
        with pytest.raises(SnapshotMissing, match=name):
            fetch_from(tmp_path / name, tmp_path / "dest")
    with pytest.raises(SnapshotMissing, match="ftp://host/x"):
        asyncio.run(fetch_snapshot("ftp://host/x", tmp_path / "dest"))
    assert not (tmp_path / "dest").exists()


class ChangingStore(bucket.LocalStore):
    """Runs `change` between the listing and the first read."""

    change: Any = None

    async def list_with_delimiter_async(self, *args: Any, **kwargs: Any) -> Any:
        result = await super().list_with_delimiter_async(*args, **kwargs)
        type(self).change()
        return result


@pytest.mark.parametrize("how", ["rewritten", "truncated", "grown", "removed"])
def test_a_file_that_changes_after_the_listing_fails_the_fetch_and_leaves_the_old_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    source = write_checkpoint(tmp_path / "step")
    fetch_from(source, tmp_path / "dest")
    # So that there is something to fetch.
    (source / "config.json").write_text("{}")
    before = (tmp_path / "dest" / "model.safetensors").read_bytes()
    weights = source / "model.safetensors"
    changes = {
        "rewritten": lambda: (source / "new").write_bytes(before) and (source / "new").rename(weights),
        "truncated": lambda: os.truncate(weights, 20),
        "grown": lambda: weights.write_bytes(before + b"more"),
        "removed": weights.unlink,
    }
    monkeypatch.setattr(ChangingStore, "change", staticmethod(changes[how]))
    monkeypatch.setattr(bucket, "LocalStore", ChangingStore)
    with pytest.raises(SnapshotCorrupt, match=r"model\.safetensors changed while it was read"):
        fetch_from(source, tmp_path / "dest")
    assert (tmp_path / "dest" / "model.safetensors").read_bytes() == before
    assert [name for name in temporaries(tmp_path) if not name.startswith(fetch.PARTIAL_PREFIX)] == []


# --- layout ---


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_spec_lists_every_tensor_with_its_shape_dtype_and_file(tmp_path: Path, shards: int) -> None:
    spec = read_spec(write_checkpoint(tmp_path / "c", shards=shards))
    assert spec.config == CONFIG
    assert sorted(spec.tensors) == ["layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w"]
    assert {(t.dtype, t.shape) for t in spec.tensors.values()} == {("F32", (3, 2))}
    files = {t.file for t in spec.tensors.values()}
    assert files == {p.name for p in (tmp_path / "c").glob("*.safetensors")}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_metadata_of_a_checkpoints_files_is_not_held(tmp_path: Path, shards: int) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", shards=shards)
    for file in checkpoint.glob("*.safetensors"):
        save_file(load_file(file), file, metadata={"note": "x" * 1000})
        assert read_file_layout(file).metadata != {}
    _, layouts = read_checkpoint(checkpoint)
    assert [layout.metadata for layout in layouts.values()] == [{}] * shards


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_file_is_corrupt_at_any_length(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path / "c") / "model.safetensors"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(SnapshotCorrupt, match=r"^model\.safetensors: truncated"):
        read_spec(tmp_path / "c")


def test_bytes_after_the_last_tensor_are_corrupt(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c") / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SnapshotCorrupt, match=r"^model\.safetensors: 1 bytes after the last tensor"):
        read_spec(tmp_path / "c")


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": F32 | {"data_offsets": [0, 4]}}, "does not fill its 4 bytes"),
        ({"a": F32 | {"data_offsets": [4, 12]}}, "a starts at byte 4 of the data, not at 0"),
        ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 12]}}, "b starts at byte 4"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype 'F99'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, "not a whole number"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "not a whole number"),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, "no dtype, shape and data_offsets"),
        ({"a": 5}, "no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, "does not fill"),
    ],
)
def test_a_header_that_lies_is_corrupt(tmp_path: Path, header: dict[str, Any], says: str) -> None:
    path = write_header(tmp_path / "m.safetensors", header, bytes(12))
    with pytest.raises(SnapshotCorrupt, match=says):
        read_file_layout(path)


EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"__metadata__": {"a": [0]}}', "__metadata__"),
        (b'{"__metadata__": []}', "__metadata__"),
        (b' {"a": %b}' % json.dumps(EMPTY).encode(), "does not begin"),
        (json.dumps({"a": EMPTY | {"more": 1}}).encode(), "a has more than dtype, shape and data_offsets"),
        (json.dumps({"a": EMPTY | {"shape": [2**40, 2**40, 0]}}).encode(), "does not fill"),
    ],
)
def test_what_the_safetensors_package_refuses_is_corrupt(tmp_path: Path, header: bytes, says: str) -> None:
    data = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match=says):
        read_file_layout(tmp_path / "model.safetensors")


def test_a_shape_of_very_many_dimensions_is_not_multiplied_out(tmp_path: Path) -> None:
    """The product of a header of 20 MB has 60 million bits: it took minutes."""
    header = json.dumps({"a": EMPTY | {"shape": [2**62] * 10**6}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(SnapshotCorrupt, match="does not fill"):
        read_file_layout(tmp_path / "model.safetensors")


def test_header_bytes_that_are_not_a_json_object_are_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    twice = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{}}'
    for text, says in [
        (b"[]", "not a JSON object"),
        (b"{oops", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (twice, "names a key twice"),
        # Python reads 0, `safetensors` a float, which it refuses.
        (b'{"a":{"dtype":"I8","shape":[4,-0],"data_offsets":[0,0]}}', "not a whole number"),
        (b'{"a":{"dtype":"I8","shape":[4,0],"data_offsets":[-0,0]}}', "not a whole number"),
    ]:
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(SnapshotCorrupt, match=says):
            read_file_layout(path)
    path.write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    with pytest.raises(SnapshotCorrupt, match="truncated"):
        read_file_layout(path)


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt_or_describe_exactly_themselves(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_file_layout(path).tensors
    except SnapshotCorrupt as error:
        assert str(error).startswith("m.safetensors: ")  # noqa: PT017 - success is legal too
    else:
        assert tensors == {}
        assert json.loads(data[8:]).keys() <= {"__metadata__"}


def test_an_absent_shard_is_missing_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SnapshotMissing, match=r"model-00002-of-00003\.safetensors: is not there"):
        read_spec(source)


def test_an_index_that_disagrees_with_its_shards_is_corrupt(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", shards=2)
    index = source / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    other = dict(zip(sorted(set(good.values())), sorted(set(good.values()))[::-1], strict=True))
    cases = [
        ({**good, "ghost": good["layers.0.w"]}, "lacks ghost"),
        ({k: v for k, v in good.items() if k != "layers.0.w"}, "holds layers.0.w"),
        ({**good, "layers.0.w": other[good["layers.0.w"]]}, "layers.0.w"),
        ({**good, "layers.0.w": "../model.safetensors"}, "not a shard's name"),
        ({**good, "layers.0.w": "weights.bin"}, "not a shard's name"),
        ({}, "has no weight_map"),
    ]
    for weight_map, says in cases:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(SnapshotCorrupt, match=says):
            read_spec(source)


def test_weight_files_nothing_accounts_for_are_corrupt(tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", shards=2)
    save_file({"x": np.zeros(1)}, sharded / "model.safetensors")
    with pytest.raises(SnapshotCorrupt, match=r"^model\.safetensors: is not named by"):
        read_spec(sharded)
    single = write_checkpoint(tmp_path / "single")
    save_file({"x": np.zeros(1)}, single / "model-00001-of-00001.safetensors")
    with pytest.raises(SnapshotCorrupt, match=r"model-00001-of-00001\.safetensors: beside"):
        read_spec(single)


def test_missing_config_or_weights_are_missing_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    (source / "model.safetensors").unlink()
    with pytest.raises(SnapshotMissing, match=r"neither model\.safetensors nor"):
        read_spec(source)
    (source / "config.json").unlink()
    with pytest.raises(SnapshotMissing, match=r"config\.json: is not there"):
        read_spec(source)


# --- compatibility ---


def spec_of(config: dict[str, Any] | None = None, **tensors: TensorSpec) -> CheckpointSpec:
    return CheckpointSpec(tensors, CONFIG if config is None else config)


W = TensorSpec("BF16", (4, 2), "model.safetensors")


def test_a_snapshot_with_other_shards_and_training_fields_is_compatible() -> None:
    base = spec_of({**CONFIG, "dtype": "bfloat16"}, w=W)
    new = spec_of({**CONFIG, "transformers_version": "9", "use_cache": False, "rope": {**CONFIG["rope"]}},
                  w=TensorSpec("BF16", (4, 2), "model-00001-of-00002.safetensors"))  # fmt: skip
    check_compatible(base, new)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({**CONFIG, "extra": 1}, r"^Extra snapshot model config options: extra; publish with"),
        (
            {"model_type": "tiny", "rope": CONFIG["rope"]},
            r"^Extra base model config options: hidden_size; publish with",
        ),
        ({**CONFIG, "hidden_size": 9}, r"^Config value mismatch for hidden_size: 8 in the base model, 9 in"),
        (
            {**CONFIG, "hidden_size": "8"},
            r"^Types mismatch for hidden_size: number in the base model, str in",
        ),
        ({**CONFIG, "hidden_size": True}, r"^Types mismatch for hidden_size: number .*, bool in"),
        ({**CONFIG, "rope": {"theta": 1, "kinds": ["a", "b"]}}, r"^Config value mismatch for rope\.theta"),
        (
            {**CONFIG, "rope": {"theta": 10000}},
            r"^Extra base model config options: rope\.kinds; publish with",
        ),
        ({**CONFIG, "rope": {"theta": 10000, "kinds": ["a", "c"]}}, r"mismatch for rope\.kinds\[1\]"),
        ({**CONFIG, "rope": {"theta": 10000, "kinds": ["a"]}}, r"^Config value mismatch for rope\.kinds"),
    ],
)
def test_a_config_that_differs_is_named_and_can_be_ignored(new: dict[str, Any], says: str) -> None:
    with pytest.raises(SnapshotIncompatible, match=says):
        check_compatible(spec_of(w=W), spec_of(new, w=W))
    check_compatible(spec_of(w=W), spec_of(new, w=W), ignore=frozenset({"extra", "hidden_size", "rope"}))


def test_whole_numbers_and_floats_of_equal_value_are_the_same_setting() -> None:
    check_compatible(spec_of({"theta": 10000}, w=W), spec_of({"theta": 10000.0}, w=W))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, r"tensor w is missing from the snapshot$"),
        ({"w": W, "x": W, "y": W}, r"tensor x is not in the base model \(and 1 more\)"),
        ({"w": TensorSpec("BF16", (2, 4), "f")}, r"tensor w has shape \[2, 4\], the base model \[4, 2\]"),
        ({"w": TensorSpec("F32", (4, 2), "f")}, r"tensor w has dtype F32, the base model BF16"),
    ],
)
def test_a_tensor_that_differs_is_named(tensors: dict[str, TensorSpec], says: str) -> None:
    with pytest.raises(SnapshotIncompatible, match=says):
        check_compatible(spec_of(w=W), spec_of(**tensors))


# --- messages ---


HUGE = {"model_type": "tiny", **{f"field_{i}_{'x' * 50}": 0 for i in range(50_000)}}
LONG = "n" * 10_000


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_compatible(spec_of(), spec_of(HUGE)),
        lambda: check_compatible(spec_of(HUGE), spec_of({"model_type": "tiny"})),
        lambda: check_compatible(spec_of({LONG: 1}), spec_of({LONG: 2})),
        lambda: check_compatible(spec_of({LONG: 1}), spec_of({LONG: "1"})),
        lambda: check_compatible(spec_of({"a": {LONG: {LONG: 1}}}), spec_of({"a": {LONG: {LONG: 2}}})),
        lambda: check_compatible(spec_of({"a": LONG}), spec_of({"a": "m" * 10**6})),
        lambda: check_compatible(spec_of({"a": [1]}), spec_of({"a": list(range(10**5))})),
        lambda: check_compatible(spec_of({"a": 1}), spec_of({"a": 10**4299})),
        lambda: check_compatible(spec_of(**{LONG: W}), spec_of()),
        lambda: check_compatible(spec_of(), spec_of(**{LONG: W})),
        lambda: check_compatible(spec_of(**{LONG: W}), spec_of(**{LONG: TensorSpec("F32", (4, 2), "f")})),
        lambda: check_compatible(spec_of(w=W), spec_of(w=TensorSpec("BF16", (1,) * 10**5, "f"))),
    ],
)
def test_no_message_about_a_snapshot_is_longer_than_a_person_reads(check: Callable[[], None]) -> None:
    with pytest.raises(SnapshotIncompatible) as caught:
        check()
    assert len(str(caught.value)) <= 1000


def test_fields_beyond_the_first_five_are_counted() -> None:
    extra = {f"x{i}": 0 for i in range(8)}
    with pytest.raises(
        SnapshotIncompatible, match=r"options: x0, x1, x2, x3, x4 \(and 3 more\); publish with"
    ):
        check_compatible(spec_of({}), spec_of(extra))


@pytest.mark.parametrize(
    "config",
    [
        b'{"a": 1, "\\ud800": 2}',
        b'{"a": "\\udfff"}',
        b'{"a": [{"b": ["\\ud800\\u0041"]}]}',
        b'{"a": 1, "a": "\\ud800"}',
        b'{"n\\u0000ame": "control characters are text"}',
    ],
)
def test_text_that_cannot_be_encoded_is_refused_when_it_is_read(tmp_path: Path, config: bytes) -> None:
    directory = write_checkpoint(tmp_path / "c")
    (directory / "config.json").write_bytes(config)
    if b"ud" not in config:
        assert read_spec(directory).config == json.loads(config)
        return
    with pytest.raises(SnapshotCorrupt, match=r"^config\.json: ") as caught:
        read_spec(directory)
    str(caught.value).encode()


def test_messages_about_weight_files_are_short_and_can_be_encoded(tmp_path: Path) -> None:
    ok: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "config.json").write_text("{}")
    seen = []
    for header in (
        {"\ud800": ok},
        {LONG: {}},
        {LONG: {**ok, "shape": [-1]}},
        {LONG: {**ok, "dtype": "\ud800" + LONG}},
        {LONG: {**ok, "dtype": LONG}},
        {LONG: {**ok, "shape": [1] * 10**5, "data_offsets": [0, 5]}},
        {LONG: {**ok, "data_offsets": [4, 8]}},
        {LONG: {**ok, "shape": [], "data_offsets": [10**4000, 10**4000 + 4]}},
        {LONG: {**ok, "shape": [10**4000] * 2}},
    ):
        with pytest.raises(SnapshotCorrupt) as caught:
            read_file_layout(write_header(tmp_path / "model.safetensors", header, b"1234"))
        seen.append(str(caught.value))
    write_header(tmp_path / "model.safetensors", {"w": ok}, b"1234")
    file = "model.safetensors"
    for weight_map in ({LONG: 7}, {LONG: LONG}, {"w": file, LONG: file}, {LONG: file}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(SnapshotCorrupt) as caught:
            read_spec(tmp_path)
        seen.append(str(caught.value))
    for weight_map in ({"w": "n" * 300 + ".safetensors"}, {"w": "a\0b.safetensors"}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(SnapshotError) as missing:
            read_spec(tmp_path)
        seen.append(str(missing.value))
    assert [message for message in seen if len(message) > 1000] == []
    "".join(seen).encode()


def test_a_name_with_line_breaks_makes_no_second_line_in_a_log(tmp_path: Path) -> None:
    index = {"weight_map": {"a\nERROR forged\x1b[2J\u2028": 5}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SnapshotCorrupt) as caught:
        read_spec(tmp_path)
    assert str(caught.value).isprintable()
    assert "a\\nERROR forged" in str(caught.value)
