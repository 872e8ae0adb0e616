"""Puts a snapshot's files into an object store (S3, Google Cloud Storage, Azure), and lists directories there.

Always holds:
- Each file appears whole: weights, then the other files, then configuration and index. So a snapshot with its index, or
  without shards with its configuration, has all its files.
- The manifest comes last. It has the content of every file.
- Only files of a snapshot and their manifest are put, into the snapshot's own directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from obstore.exceptions import BaseError

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.core.types import Content
from midstream.snapshots.content import MANIFEST_FILE, difference, directory_content, encode_manifest
from midstream.snapshots.durable import sync_directory, sync_file
from midstream.snapshots.identity import parse_bucket, public_url, snapshot_url
from midstream.snapshots.layout import CONFIG_FILE, INDEX_FILE, snapshot_files
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import Store, describe, open_bucket

UPLOAD_PART_BYTES = 16 * 2**20
#: S3 takes 10,000 parts of one file.
UPLOAD_PARTS_MAX = 9_000
UPLOADS_IN_FLIGHT = 6

OnFile = Callable[[str], None]


def put_directory(bucket: str, identity: str, directory: Path, on_file: OnFile | None = None) -> None:
    """Put the snapshot files of `directory` into `bucket` as `identity`. Replaces the files that are there.

    on_file: gets the name of each file once it can be fetched.
    Raises ConfigError (not a bucket's URL), SnapshotRefused (not an identity), SnapshotMissing (no snapshot file in
    `directory`), SnapshotError (the bucket refuses, or a file cannot be read).
    """
    url = snapshot_url(bucket, identity)
    names = upload_order(file.name for file in directory.iterdir() if file.is_file())
    if not names:
        raise SnapshotMissing(
            f"{shown(directory.name)}: holds no snapshot files (config.json, *.safetensors)"
        )
    before, _ = list_directory(bucket, identity)
    store = open_bucket(url)
    with ThreadPoolExecutor(1, "manifest") as beside:
        digested = beside.submit(directory_content, directory, names)
        for name in names:
            _put(store, url, directory / name)
            if on_file is not None:
                on_file(name)
        content = _digested(digested)
    _put_manifest(store, url, content, stale=sorted(set(before) - set(names)))


def put_content(
    url: str, directory: Path, content: Content, lacking: Iterable[str], on_file: OnFile | None = None
) -> None:
    """Put the files of `directory` that `url` lacks, then the manifest. url: in an object store.

    content: of the whole snapshot; other bytes in `directory` are refused before one is put. on_file: as of `put_directory`.
    Raises SnapshotCorrupt (these bytes are others), SnapshotError (the bucket refuses, or a file cannot be read).
    """
    check_content(directory, content)
    store = open_bucket(url)
    for name in upload_order(lacking):
        _put(store, url, directory / name)
        if on_file is not None:
            on_file(name)
    _put_manifest(store, url, content)


def check_content(directory: Path, content: Content) -> None:
    """Raise SnapshotCorrupt unless the files of `content` in `directory` have it; SnapshotError if that cannot be known."""
    try:
        found = directory_content(directory, [file.name for file in content])
    except OSError as error:
        raise SnapshotError(f"{shown(directory.name)}: cannot be read: {error.strerror or error}") from error
    if (other := difference(content, found)) is not None:
        raise SnapshotCorrupt(f"{shown(directory.name)}: is damaged: {other}")


def _put_manifest(store: Store, url: str, content: Content, stale: Sequence[str] = ()) -> None:
    try:
        store.put(MANIFEST_FILE, encode_manifest(content))
        if stale:
            store.delete(stale)
    except BaseError as error:
        raise SnapshotError(
            f"{public_url(url)}: its manifest cannot be put, or old files removed: {describe(error)}"
        ) from None


def _digested(content: Future[Content]) -> Content:
    try:
        return content.result()
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {error.strerror or error}") from error


def put_file(url: str, path: Path) -> None:
    """Put one file into the directory that `url` names, under its own name; a local directory is made, and synced.

    Raises ConfigError (not a bucket's URL), SnapshotError.
    """
    place = parse_bucket(url)
    local = Path(place.path) if place.kind == "file" else None
    try:
        if local is not None:
            local.mkdir(parents=True, exist_ok=True)
        _put(open_bucket(url), url, path)
        if local is not None:
            sync_file(local / path.name)
            sync_directory(local)
    except OSError as error:
        raise SnapshotError(f"{public_url(url)}: {error.strerror or error}") from error


def list_files(url: str) -> list[str]:
    """The paths of all files below the directory that `url` names, sorted. Raises SnapshotMissing, SnapshotError."""
    try:
        return sorted(one["path"] for batch in open_bucket(url).list() for one in batch)
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: cannot be listed: {describe(error)}") from None


def read_file(url: str, path: str, *, bytes_max: int) -> bytes:
    """One of `list_files`. Raises SnapshotMissing, SnapshotCorrupt (larger than that, or a link out of a local bucket),
    SnapshotError."""
    place = parse_bucket(url)
    if place.kind == "file" and not Path(place.path, path).resolve().is_relative_to(
        Path(place.path).resolve()
    ):
        raise SnapshotCorrupt(f"{public_url(url)}: {shown(path)} leads out of the bucket")
    if place.kind == "file" and Path(place.path, path).exists() and not Path(place.path, path).is_file():
        raise SnapshotCorrupt(f"{public_url(url)}: {shown(path)} is not a regular file")
    try:
        found = open_bucket(url).get(path)
        if found.meta["size"] > bytes_max:
            raise SnapshotCorrupt(f"{public_url(url)}: {shown(path)} has more than {bytes_max} bytes")
        return bytes(found.bytes())
    except FileNotFoundError:
        raise SnapshotMissing(f"{public_url(url)}: there is no {shown(path)}") from None
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: {shown(path)} cannot be read: {describe(error)}") from None


def list_directory(bucket: str, path: str) -> tuple[list[str], list[str]]:
    """(snapshot files, directories) directly inside `path` of `bucket`, sorted by name; both empty if nothing is there.

    Raises SnapshotError when the store does not answer.
    """
    url = snapshot_url(bucket, path)
    try:
        result = open_bucket(url).list_with_delimiter()
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: cannot be listed: {describe(error)}") from None
    names = sorted(snapshot_files(o["path"] for o in result["objects"]))
    inside = sorted(p.rstrip("/").rpartition("/")[2] for p in result["common_prefixes"])
    return names, inside


def upload_order(names: Iterable[str]) -> list[str]:
    """The snapshot files among `names`: weights, other files, the configuration, the index."""
    order = {CONFIG_FILE: 2, INDEX_FILE: 3}
    return sorted(
        snapshot_files(names), key=lambda n: (order.get(n, 0 if n.endswith(".safetensors") else 1), n)
    )


def _put(store: Store, url: str, path: Path) -> None:
    try:
        size = os.stat(path).st_size
        part = max(UPLOAD_PART_BYTES, -(-size // UPLOAD_PARTS_MAX))
        store.put(path.name, path, chunk_size=part, max_concurrency=UPLOADS_IN_FLIGHT)
    except BaseError as error:
        raise SnapshotError(
            f"{public_url(url)}: {shown(path.name)} cannot be put: {describe(error)}"
        ) from None
    except OSError as error:
        raise SnapshotError(f"{shown(path.name)}: cannot be read: {error.strerror or error}") from error
