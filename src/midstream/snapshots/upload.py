"""Puts a snapshot's files into a bucket; what a trainer's publisher needs of one.

Always holds:
- In a local directory a snapshot appears whole or not at all: it is copied beside its place and renamed.
- Elsewhere each file appears whole, the weights first, then what goes with them, the index last: a snapshot whose index (or,
  unsharded, configuration) is there has all its files. It counts only once it is signalled.
- Only files of a snapshot are put, into the snapshot's own directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from obstore.exceptions import BaseError

from midstream.errors import SnapshotError, SnapshotMissing
from midstream.snapshots.bucket import Store, describe, open_bucket
from midstream.snapshots.fetch import move_into_place
from midstream.snapshots.identity import file_url_path, parse_bucket, public_url, snapshot_url
from midstream.snapshots.layout import CONFIG_FILE, INDEX_FILE
from midstream.snapshots.messages import shown
from midstream.snapshots.store import is_snapshot_file

UPLOAD_PART_BYTES = 16 * 2**20
UPLOAD_PARTS_MAX = 9_000  # S3 takes 10,000 of one file
UPLOADS_IN_FLIGHT = 6

OnFile = Callable[[str], None]


def put_directory(
    bucket: str, identity: str, directory: Path, *, overwrite: bool = False, on_file: OnFile | None = None
) -> str:
    """Put the snapshot files of `directory` into `bucket` as `identity`; their URL when all are there.

    on_file: told the name of each file once it can be fetched; not called for a local bucket, where all appear at once.
    Raises ConfigError (not a bucket's URL), SnapshotRefused (not an identity), SnapshotMissing (no snapshot file in
    `directory`), SnapshotError (the place is taken and `overwrite` is false, or the bucket refuses).
    """
    kind, url = parse_bucket(bucket).kind, snapshot_url(bucket, identity)
    names = upload_order(file.name for file in directory.iterdir() if file.is_file())
    if not names:
        raise SnapshotMissing(
            f"{shown(directory.name)}: holds no snapshot files (config.json, *.safetensors)"
        )
    before, _ = list_directory(bucket, identity)
    if before and not overwrite:
        raise SnapshotError(f"{public_url(url)}: is already in the bucket")
    if kind == "file":
        _put_local(directory, names, file_url_path(url))
    else:
        _put_remote(directory, names, url, on_file, stale=set(before) - set(names))
    return url


def put_file(bucket: str, identity: str, path: Path) -> None:
    """Put one file of a snapshot, whole. Raises as put_directory."""
    url = snapshot_url(bucket, identity)
    if parse_bucket(bucket).kind == "file":
        file_url_path(url).mkdir(parents=True, exist_ok=True)
    _put(open_bucket(url), url, path)


def list_directory(bucket: str, path: str = "") -> tuple[list[str], list[str]]:
    """(snapshot files, directories) right inside `path` of `bucket`, by name; nothing there is no error.

    Raises SnapshotError when that cannot be known.
    """
    url = snapshot_url(bucket, path) if path else bucket
    try:
        store = open_bucket(url)
    except SnapshotMissing:
        if parse_bucket(bucket).kind == "file":
            return [], []
        raise
    try:
        result = store.list_with_delimiter()
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: cannot be listed: {describe(error)}") from None
    names = sorted(o["path"] for o in result["objects"] if is_snapshot_file(o["path"]))
    inside = sorted(p.rstrip("/").rpartition("/")[2] for p in result["common_prefixes"])
    return names, [name for name in inside if not name.startswith(".")]


def exists(bucket: str, identity: str) -> bool:
    """Whether `bucket` holds any file of the snapshot `identity`. Raises SnapshotError when that cannot be known."""
    return bool(list_directory(bucket, identity)[0])


def upload_order(names: Iterable[str]) -> list[str]:
    """The snapshot files among `names`: weights, then what goes with them, then the configuration, the index last."""
    order = {CONFIG_FILE: 2, INDEX_FILE: 3}
    wanted = [name for name in names if is_snapshot_file(name)]
    return sorted(wanted, key=lambda n: (order.get(n, 0 if n.endswith(".safetensors") else 1), n))


def _put_local(directory: Path, names: list[str], place: Path) -> None:
    temporary = place.parent / f".publish-{secrets.token_hex(8)}"
    try:
        temporary.mkdir(parents=True)
        for name in names:
            shutil.copyfile(directory / name, temporary / name)
        move_into_place(temporary, place)
    except OSError as error:
        raise SnapshotError(
            f"{shown(str(place), 200)}: cannot be written: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_remote(directory: Path, names: list[str], url: str, on_file: OnFile | None, stale: set[str]) -> None:
    store = open_bucket(url)
    for name in names:
        _put(store, url, directory / name)
        if on_file is not None:
            on_file(name)
    try:
        if stale:
            store.delete(sorted(stale))
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: old files cannot be removed: {describe(error)}") from None


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
