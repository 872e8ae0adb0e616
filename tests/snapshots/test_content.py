"""What a snapshot's files are, byte for byte: digests, the manifest, and other bytes under a known name."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import fetch_snapshot, flip_last, put_directory, rot, weights, write_checkpoint
from fingerprints import snapshot_fingerprint

from midstream.core.errors import SnapshotCorrupt
from midstream.core.types import Content, FileContent, SnapshotFiles
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.content import (
    MANIFEST_FILE,
    PART_BYTES,
    by_content,
    content_fingerprint,
    difference,
    directory_content,
    encode_manifest,
    file_content,
    parse_manifest,
    size_difference,
)
from midstream.snapshots.store import fetch
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.local import noted_contents

NAMES = ["config.json", "model.safetensors", "tokenizer.json"]


def file(name: str = "a", size: int = 1, digest: str = "0" * 64) -> FileContent:
    return FileContent(name, size, digest)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def test_a_digest_is_that_of_the_digests_of_the_parts(tmp_path: Path) -> None:
    data = os.urandom(2**20) * 17
    (tmp_path / "x").write_bytes(data)
    parts = [hashlib.sha256(data[at : at + PART_BYTES]).digest() for at in (0, PART_BYTES)]
    expected = FileContent("x", len(data), hashlib.sha256(b"".join(parts)).hexdigest())
    assert file_content(tmp_path / "x") == expected
    (tmp_path / "empty").write_bytes(b"")
    assert file_content(tmp_path / "empty").digest == hashlib.sha256().hexdigest()


def test_a_copy_is_digested_while_it_is_made_and_a_continued_one_too(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    source = write_checkpoint(tmp_path / "s0")
    (source / "model.safetensors").write_bytes(os.urandom(2**20) * 33)
    content = directory_content(source, NAMES)
    runner.run(fetch.prefetch_files(source.as_uri(), tmp_path, ["model.safetensors"]))
    runner.run(fetch_snapshot(source.as_uri(), tmp_path / "dest"))
    assert noted_contents(tmp_path / "dest") == (content,)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([file("a"), file("b")], None),
        ([file("a"), file("b", digest="1" * 64)], f"b has the digest {'1' * 64} instead of {'0' * 64}"),
        ([file("a"), file("b", size=2)], "b has 2 bytes instead of 1"),
        ([file("a")], "b is missing"),
        ([file("a"), file("b"), file("c")], "c is there, and was not one of its files"),
    ],
)
def test_the_first_file_that_is_another_is_named(found: list[FileContent], words: str | None) -> None:
    expected = (file("a"), file("b"))
    assert difference(expected, tuple(found)) == words
    sizes = {one.name: one.size for one in found}
    assert size_difference(expected, sizes) == (words if words is None or "digest" not in words else None)


def test_a_fingerprint_by_content_is_that_of_names_sizes_and_digests_in_any_order() -> None:
    content = (file("a", 7, "f" * 64), file("b.safetensors", 2**40))
    mark = content_fingerprint(content)
    canonical = f'[["a",7,"{"f" * 64}"],["b.safetensors",{2**40},"{"0" * 64}"]]'
    assert mark == "content:" + hashlib.sha256(canonical.encode()).hexdigest()
    assert content_fingerprint(content[::-1]) == mark
    others = [
        content[:1],
        (file("A", 7, "f" * 64), content[1]),
        (file("a", 8, "f" * 64), content[1]),
        (file("a", 7, "e" * 64), content[1]),
    ]
    assert len({mark, *map(content_fingerprint, others)}) == 5


def test_only_a_fingerprint_by_content_is_taken_for_one(tmp_path: Path, runner: asyncio.Runner) -> None:
    source = write_checkpoint(tmp_path / "s0")
    listed = runner.run(snapshot_fingerprint(source.as_uri()))
    assert by_content(content_fingerprint(directory_content(source, NAMES)))
    assert [by_content(mark) for mark in (listed, None, "")] == [False] * 3


def test_a_manifest_says_what_was_put_into_it() -> None:
    content = (file("a", 7, "f" * 64), file("b.safetensors", 2**40))
    assert parse_manifest(encode_manifest(content)) == content


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(format="midstream.manifest.v9"), "is no manifest: Invalid enum value"),
        (lambda m: m["files"][0].pop("size"), "is no manifest: .*required field"),
        (lambda m: m["files"][0].update(digest="XYZ"), "a has no digest and size"),
        (lambda m: m["files"][0].update(size=-1), "a has no digest and size"),
        (lambda m: m["files"].append(m["files"][0]), "names a file twice"),
    ],
)
def test_a_manifest_that_is_not_understood_is_refused(change: Any, says: str) -> None:
    manifest = msgspec.json.decode(encode_manifest((file("a"),)))
    change(manifest)
    with pytest.raises(SnapshotCorrupt, match=f"^{MANIFEST_FILE}: {says}"):
        parse_manifest(msgspec.json.encode(manifest))
    with pytest.raises(SnapshotCorrupt, match="is no manifest"):
        parse_manifest(b"\xff\xfe{")


class Replica:
    """A replica's cache over a bucket."""

    def __init__(self, tmp_path: Path, runner: asyncio.Runner) -> None:
        self.root = tmp_path / "cache"
        self.chains = ChainFetcher(SnapshotCache(self.root), threads=1)
        self.run = runner.run

    def load(self, *chain: SnapshotFiles) -> Path:
        async def steps() -> Path:
            path = await self.chains.fetch(chain)
            return path if path is not None else await self.chains.rebuild(chain)

        path = self.run(steps())
        self.run(self.chains.release([chain]))
        return path

    def contents(self, *chain: SnapshotFiles) -> tuple[Content, ...]:
        return self.run(self.chains.contents(chain))

    def forget(self) -> None:
        for path in self.root.glob("s*"):
            shutil.rmtree(path)


@pytest.fixture
def replica(tmp_path: Path, runner: asyncio.Runner) -> Replica:
    return Replica(tmp_path, runner)


def link(runner: asyncio.Runner, url: str, **more: Any) -> SnapshotFiles:
    fingerprint = runner.run(snapshot_fingerprint(url))
    return SnapshotFiles(snapshot=url.rpartition("/")[2], url=url, fingerprint=fingerprint, **more)


def known(one: SnapshotFiles, content: Content) -> SnapshotFiles:
    return msgspec.structs.replace(one, content=content)


def test_bytes_changed_under_a_known_name_are_refused_though_size_and_time_are_the_same(
    tmp_path: Path, runner: asyncio.Runner, replica: Replica
) -> None:
    source = write_checkpoint(tmp_path / "bucket" / "s0")
    first = link(runner, source.as_uri())
    replica.load(first)
    (content,) = replica.contents(first)
    assert content == directory_content(source, NAMES)
    rot(source / "model.safetensors", flip_last)
    assert link(runner, source.as_uri()) == first, "nothing but the bytes tells"
    replica.forget()
    bad = file_content(source / "model.safetensors").digest
    with pytest.raises(
        SnapshotCorrupt,
        match=rf"/s0: its bytes are not those that this name means: model\.safetensors has the digest {bad} instead",
    ):
        replica.load(known(first, content))
    assert list(replica.root.glob("[s.]*-*")) == [], "nothing of it is kept"


def test_a_cached_copy_of_other_bytes_is_not_used(
    tmp_path: Path, runner: asyncio.Runner, replica: Replica
) -> None:
    source = write_checkpoint(tmp_path / "bucket" / "s0")
    first = link(runner, source.as_uri())
    content = directory_content(source, NAMES)
    rot(source / "model.safetensors", flip_last)
    # Nobody knew yet what it should be.
    path = replica.load(first)
    assert weights(path) == weights(source)
    with pytest.raises(SnapshotCorrupt, match="instead of"):
        replica.load(known(first, content))
    rot(source / "model.safetensors", flip_last)
    assert weights(replica.load(known(first, content))) == weights(source)


@pytest.mark.parametrize("changed", [0, 1])
def test_every_link_of_a_chain_is_held_to_its_bytes(
    tmp_path: Path, runner: asyncio.Runner, replica: Replica, changed: int
) -> None:
    full, child = write_checkpoint(tmp_path / "b" / "s0"), write_checkpoint(tmp_path / "s1", seed=1)
    encode_delta(full, child, tmp_path / "b" / "s1", "arc_v2")
    urls = [full.as_uri(), (tmp_path / "b" / "s1").as_uri()]
    chain = [link(runner, urls[0]), link(runner, urls[1], compression="arc_v2")]
    replica.load(*chain)
    contents = replica.contents(*chain)
    assert [[one.name for one in content] for content in contents] == [NAMES, NAMES]
    held = [known(one, content) for one, content in zip(chain, contents, strict=True)]
    assert weights(replica.load(*held)) == weights(child)
    replica.forget()
    rot(tmp_path / "b" / f"s{changed}" / "tokenizer.json", lambda data: data.__setitem__(0, 32))
    with pytest.raises(SnapshotCorrupt, match=rf"/s{changed}: .*: tokenizer\.json has the digest"):
        replica.load(*held)


def test_a_cache_of_before_digests_were_noted_is_fetched_again(
    tmp_path: Path, runner: asyncio.Runner, replica: Replica
) -> None:
    source = write_checkpoint(tmp_path / "bucket" / "s0")
    first = link(runner, source.as_uri())
    (replica.load(first) / ".content.json").unlink()
    replica.load(first)
    assert replica.contents(first) == (directory_content(source, NAMES),)


def test_a_pipe_in_the_place_of_a_file_that_was_listed_is_an_error_at_once(
    tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened as a file, it would wait for a writer for ever."""
    source = write_checkpoint(tmp_path / "s0")
    real = fetch._open_all

    def swapped(*arguments: Any) -> Any:
        (source / "model.safetensors").unlink()
        os.mkfifo(source / "model.safetensors")
        return real(*arguments)

    monkeypatch.setattr(fetch, "_open_all", swapped)
    with pytest.raises(
        SnapshotCorrupt, match=r"model\.safetensors changed while it was read: it is not a reg"
    ):
        runner.run(asyncio.wait_for(fetch_snapshot(source.as_uri(), tmp_path / "dest"), 120))


def test_what_is_published_carries_its_manifest(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "made")
    put_directory((tmp_path / "bucket").as_uri(), "s0", source)
    manifest = tmp_path / "bucket" / "s0" / MANIFEST_FILE
    assert parse_manifest(manifest.read_bytes()) == directory_content(source, NAMES)


@pytest.mark.parametrize("nested", [b'{"x":' + b"[" * 5000, b'{"x":"\xff"}', b'{"format":"\xff"}'])
def test_a_manifest_that_is_nested_too_deeply_or_no_text_is_refused(nested: bytes) -> None:
    with pytest.raises(SnapshotCorrupt, match="is no manifest"):
        parse_manifest(nested)
