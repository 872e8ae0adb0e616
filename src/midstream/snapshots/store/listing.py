"""Lists the files that a snapshot's directory in its bucket holds now.

Always holds: only files of a snapshot count (layout.snapshot_files). Two listings with one fingerprint describe the same
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.core.types import Content
from midstream.snapshots.adapter import ADAPTER_CONFIG_FILE, CONFIG_BYTES_MAX, is_adapter_listing
from midstream.snapshots.content import MANIFEST_BYTES_MAX, MANIFEST_FILE, parse_manifest, size_difference
from midstream.snapshots.identity import file_url_path, parse_bucket, public_url
from midstream.snapshots.layout import is_snapshot_file, snapshot_files
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import RETRY_S, Store, describe, open_bucket

#: A trainer's signal waits for a fingerprint.
FINGERPRINT_S_MAX = 1.5 * RETRY_S


@dataclass(frozen=True)
class BucketFile:
    """size: in bytes. modified: stands for the entity tag if a store has none."""

    name: str
    size: int
    etag: str | None
    modified: str

    @property
    def version(self) -> str:
        return self.etag or self.modified


@dataclass(frozen=True)
class Listing:
    """The files of one snapshot, the largest first, and their store."""

    url: str
    store: Store
    files: tuple[BucketFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def encoded(self) -> bytes:
        return msgspec.json.encode(sorted((f.name, f.size, f.version) for f in self.files))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.encoded()).hexdigest()


@dataclass(frozen=True)
class DirectoryContents:
    """What a snapshot's directory holds. sizes: of its files, in bytes. content: by its manifest, if it has one.

    adapter_config: the bytes of an adapter's configuration. None: it is no adapter, or its configuration is too long.
    """

    fingerprint: str
    sizes: Mapping[str, int]
    content: Content | None = None
    adapter_config: bytes | None = None


async def list_snapshot(url: str, fingerprint: str | None = None) -> Listing:
    """The files in the bucket directory at `url` now.

    fingerprint: the expected one; None for any. Raises SnapshotMissing when no snapshot file is there, SnapshotCorrupt when
    the files are others, SnapshotError when the store does not answer.
    """
    store = await asyncio.to_thread(open_bucket, url)
    try:
        result = await store.list_with_delimiter_async()
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: cannot be listed: {describe(error)}") from None
    found = [
        BucketFile(o["path"], o["size"], o["e_tag"], o["last_modified"].isoformat())
        for o in result["objects"]
    ]
    names = snapshot_files(file.name for file in found)
    wanted = sorted((f for f in found if f.name in names), key=lambda f: f.size, reverse=True)
    if not wanted:
        raise SnapshotMissing(f"{public_url(url)}: holds no snapshot files (config.json, *.safetensors)")
    await asyncio.to_thread(_check_regular, store, url, [file.name for file in wanted])
    listing = Listing(url, store, tuple(wanted))
    if fingerprint is not None and listing.fingerprint != fingerprint:
        raise SnapshotCorrupt(
            f"{public_url(url)}: its files changed since the snapshot was signalled; signal it again"
        )
    return listing


def open_regular(path: str | Path) -> int:
    """Open a file of a local bucket without waiting. Raises OSError, also when it is not a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _check_regular(store: Store, url: str, names: list[str]) -> None:
    """Check that files of a local bucket are regular files or links to them. Opening others may wait for ever."""
    if not isinstance(store, LocalStore):
        return
    for name in names:
        # The caller that opens a missing file reports it.
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.stat(os.path.join(str(store.prefix), name)).st_mode):
                raise SnapshotCorrupt(f"{public_url(url)}: {shown(name)} is not a regular file")


async def find_file(url: str, name: str) -> tuple[Store, BucketFile]:
    """One file of the snapshot at `url`. Raises SnapshotMissing when it is not there or is not a snapshot's."""
    if not is_snapshot_file(name):
        raise SnapshotMissing(f"{public_url(url)}: {shown(name)} is not a file of a snapshot")
    store = await asyncio.to_thread(open_bucket, url)
    await asyncio.to_thread(_check_regular, store, url, [name])
    try:
        o = await store.head_async(name)
    except FileNotFoundError as error:
        raise SnapshotMissing(f"{public_url(url)}: {shown(name)} is not there") from error
    except BaseError as error:
        raise _unreadable(url, name, error) from None
    return store, BucketFile(name, o["size"], o["e_tag"], o["last_modified"].isoformat())


async def find_snapshot(url: str, bucket: str | None = None) -> DirectoryContents:
    """What the directory at `url` holds now. Reads no file but the manifest and an adapter's configuration.

    bucket: no link may lead out of it. Raises SnapshotMissing when no snapshot file is there, SnapshotCorrupt when the
    manifest is invalid or not of these files, SnapshotError when the store does not answer.
    """
    try:
        async with asyncio.timeout(FINGERPRINT_S_MAX):
            if bucket is not None:
                await asyncio.to_thread(check_inside, url, bucket)
            listing = await list_snapshot(url)
            sizes = {file.name: file.size for file in listing.files}
            content = await read_manifest(listing)
            if content is not None and (other := size_difference(content, sizes)) is not None:
                raise SnapshotCorrupt(f"{public_url(url)}: is not what its {MANIFEST_FILE} says: {other}")
            return DirectoryContents(
                listing.fingerprint, sizes, content, await _adapter_config(listing, sizes)
            )
    except TimeoutError:
        raise SnapshotError(f"{public_url(url)}: did not answer within {FINGERPRINT_S_MAX:g} s") from None


async def _adapter_config(listing: Listing, sizes: Mapping[str, int]) -> bytes | None:
    """Raises SnapshotCorrupt, SnapshotError."""
    if not is_adapter_listing(sizes) or sizes[ADAPTER_CONFIG_FILE] > CONFIG_BYTES_MAX:
        return None
    return await read_beginning(listing, ADAPTER_CONFIG_FILE, CONFIG_BYTES_MAX)


def check_inside(url: str, bucket: str, names: Iterable[str] | None = None) -> None:
    """Raise SnapshotCorrupt when the directory at `url` in a local bucket, or a file in it, is a link that leads out.

    names: of the files to check; None for all of the snapshot.
    """
    if parse_bucket(bucket).kind != "file":
        return
    root, directory = file_url_path(bucket).resolve(), file_url_path(url)
    if not directory.resolve().is_relative_to(root):
        raise SnapshotCorrupt(f"{public_url(url)}: leads out of the bucket")
    # The caller that lists a missing directory reports it.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        checked = snapshot_files(os.listdir(directory)) if names is None else filter(is_snapshot_file, names)
        for name in (*sorted(checked), MANIFEST_FILE):
            if not (directory / name).resolve().is_relative_to(root):
                raise SnapshotCorrupt(f"{public_url(url)}: {shown(name)} leads out of the bucket")


async def read_manifest(listing: Listing) -> Content | None:
    """The content that the manifest says; None if there is no manifest. Raises SnapshotCorrupt, SnapshotError."""
    try:
        if isinstance(listing.store, LocalStore):
            path = os.path.join(str(listing.store.prefix), MANIFEST_FILE)
            return parse_manifest(await asyncio.to_thread(_read_local, path))
        found = await listing.store.get_async(MANIFEST_FILE)
        if found.meta["size"] > MANIFEST_BYTES_MAX:
            raise SnapshotCorrupt(
                f"{public_url(listing.url)}: {MANIFEST_FILE} has more than {MANIFEST_BYTES_MAX} bytes"
            )
        return parse_manifest(bytes(await found.bytes_async()))
    except FileNotFoundError:
        return None
    except (BaseError, OSError) as error:
        raise _unreadable(listing.url, MANIFEST_FILE, error) from None


def _read_local(path: str) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MANIFEST_BYTES_MAX + 1)
    if len(data) > MANIFEST_BYTES_MAX:
        raise SnapshotCorrupt(f"{MANIFEST_FILE}: has more than {MANIFEST_BYTES_MAX} bytes")
    return data


async def read_beginning(listing: Listing, name: str, count: int) -> bytes:
    """The first bytes of one of its files, at most `count`. Raises SnapshotCorrupt, SnapshotError."""
    store = listing.store
    count = min(count, next(file.size for file in listing.files if file.name == name))
    try:
        if isinstance(store, LocalStore):
            return await asyncio.to_thread(_read_some, os.path.join(str(store.prefix), name), count)
        # A store refuses an empty range.
        return bytes(await store.get_range_async(name, start=0, end=count)) if count else b""
    except (BaseError, OSError) as error:
        raise _unreadable(listing.url, name, error) from None


def _unreadable(url: str, name: str, error: BaseError | OSError) -> SnapshotError:
    """A file of a local bucket that cannot be opened is damaged. A store's own error may pass."""
    at = f"{public_url(url)}: {shown(name)} cannot be read"
    if isinstance(error, BaseError):
        return SnapshotError(f"{at}: {describe(error)}")
    return SnapshotCorrupt(f"{at}: {error.strerror or error}")


def _read_some(path: str, count: int) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(count)


def has_manifest(url: str) -> bool:
    """Whether the snapshot at `url` has a manifest. Raises SnapshotError, and obstore's BaseError."""
    try:
        open_bucket(url).head(MANIFEST_FILE)
    except FileNotFoundError:
        return False
    return True
