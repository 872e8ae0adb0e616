"""What a snapshot's directory in its bucket holds: its files, as they are now.

Always holds: only files of a snapshot count (SNAPSHOT_FILES), never anything pickled, and only plain names; two listings
with one fingerprint describe the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fnmatch
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from midstream.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.snapshots.bucket import RETRY_S, Store, describe, open_bucket
from midstream.snapshots.content import MANIFEST_BYTES_MAX, MANIFEST_FILE, parse_manifest, size_difference
from midstream.snapshots.identity import (
    check_identity,
    file_url_path,
    parse_bucket,
    public_url,
    snapshot_url,
)
from midstream.snapshots.layout import CONFIG_FILE, INDEX_FILE
from midstream.snapshots.messages import shown
from midstream.types import Content

__all__ = [
    "COMPANION_FILES",
    "SNAPSHOT_FILES",
    "WEIGHT_FILES",
    "BucketFile",
    "Listing",
    "check_identity",
    "is_snapshot_file",
    "list_snapshot",
    "snapshot_fingerprint",
    "snapshot_url",
]

WEIGHT_FILES = ("*.safetensors", INDEX_FILE)
COMPANION_FILES = (
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    CONFIG_FILE,
)  # what makes weights a checkpoint
SNAPSHOT_FILES = (*WEIGHT_FILES, *COMPANION_FILES)
LISTING_FILE = ".listing.json"  # in a local directory: what it is a copy of
STAMPS_FILE = ".stamps.json"  # and when each file was last written
FINGERPRINT_S_MAX = 1.5 * RETRY_S  # a trainer's signal waits for it


def is_snapshot_file(name: str) -> bool:
    """Whether a file of this name belongs to a snapshot and may be fetched."""
    plain = "/" not in name and "\\" not in name and "\0" not in name and not name.startswith(".")
    pickled = name.endswith((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))
    return plain and not pickled and any(fnmatch.fnmatchcase(name, pattern) for pattern in SNAPSHOT_FILES)


@dataclass(frozen=True)
class BucketFile:
    name: str
    size: int  # bytes
    etag: str | None
    modified: str  # stands in for the entity tag where a store has none

    @property
    def version(self) -> str:
        return self.etag or self.modified


@dataclass(frozen=True)
class Listing:
    """The files of one snapshot, the largest first, and the store they are read from."""

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
        return fingerprint_of(self.encoded())


def fingerprint_of(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


@dataclass(frozen=True)
class Found:
    """What a signal finds in a snapshot's directory. sizes: of its files, bytes. content: of its manifest, if there is one."""

    fingerprint: str
    sizes: Mapping[str, int]
    content: Content | None = None


async def list_snapshot(url: str, fingerprint: str | None = None) -> Listing:
    """What is in the bucket directory at `url` now.

    fingerprint: what it must be; None: anything. Raises SnapshotMissing when no snapshot file is there, SnapshotCorrupt
    when the files are others, SnapshotError when that cannot be known.
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
    wanted = sorted((f for f in found if is_snapshot_file(f.name)), key=lambda f: f.size, reverse=True)
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
    """A file of a local bucket, to read; never waits for anybody. Raises OSError, also when it is not a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _check_regular(store: Store, url: str, names: list[str]) -> None:
    """In a local bucket. Opening anything else could wait for ever. A link to a file is one."""
    for name in names if isinstance(store, LocalStore) else ():
        with contextlib.suppress(OSError):  # not there: what opens it says so
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
        raise SnapshotError(f"{public_url(url)}: {shown(name)} cannot be read: {describe(error)}") from None
    return store, BucketFile(name, o["size"], o["e_tag"], o["last_modified"].isoformat())


async def snapshot_fingerprint(url: str) -> str:
    """A digest of what the snapshot at `url` is made of now: its files' names, sizes and entity tags, not their bytes.

    Raises SnapshotMissing when no snapshot file is there, SnapshotError when that cannot be known now.
    """
    return (await find_snapshot(url)).fingerprint


async def find_snapshot(url: str, bucket: str | None = None) -> Found:
    """What is at `url` now; of its bytes, only the manifest's are read.

    bucket: nothing of it may lie outside this one, wherever links lead.
    Raises SnapshotMissing when no snapshot file is there, SnapshotCorrupt when the manifest is none or is not of these
    files, SnapshotError when that cannot be known now.
    """
    try:
        async with asyncio.timeout(FINGERPRINT_S_MAX):
            if bucket is not None:
                await asyncio.to_thread(check_inside, url, bucket)
            listing = await list_snapshot(url)
            sizes = {file.name: file.size for file in listing.files}
            content = await _manifest(listing)
            if content is not None and (other := size_difference(content, sizes)) is not None:
                raise SnapshotCorrupt(f"{public_url(url)}: is not what its {MANIFEST_FILE} says: {other}")
            return Found(listing.fingerprint, sizes, content)
    except TimeoutError:
        raise SnapshotError(f"{public_url(url)}: did not answer within {FINGERPRINT_S_MAX:g} s") from None


def check_inside(url: str, bucket: str, names: Iterable[str] | None = None) -> None:
    """In a local bucket: raise SnapshotCorrupt when the directory at `url`, or a file in it, is a link that leads out.

    names: of the files that count; None: those that are a snapshot's.
    """
    if parse_bucket(bucket).kind != "file":
        return
    root, directory = file_url_path(bucket).resolve(), file_url_path(url)
    if not directory.resolve().is_relative_to(root):
        raise SnapshotCorrupt(f"{public_url(url)}: leads out of the bucket")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # what lists it says so
        for name in sorted(os.listdir(directory)) if names is None else names:
            if not is_snapshot_file(name) and name != MANIFEST_FILE:
                continue
            if not (directory / name).resolve().is_relative_to(root):
                raise SnapshotCorrupt(f"{public_url(url)}: {shown(name)} leads out of the bucket")


async def _manifest(listing: Listing) -> Content | None:
    """None: there is none. Raises SnapshotCorrupt, SnapshotError."""
    at = f"{public_url(listing.url)}: {MANIFEST_FILE}"
    try:
        if isinstance(listing.store, LocalStore):
            path = os.path.join(str(listing.store.prefix), MANIFEST_FILE)
            return parse_manifest(await asyncio.to_thread(_read_local, path))
        found = await listing.store.get_async(MANIFEST_FILE)
        if found.meta["size"] > MANIFEST_BYTES_MAX:
            raise SnapshotCorrupt(f"{at} has more than {MANIFEST_BYTES_MAX} bytes")
        return parse_manifest(bytes(await found.bytes_async()))
    except FileNotFoundError:
        return None
    except BaseError as error:
        raise SnapshotError(f"{at} cannot be read: {describe(error)}") from None
    except OSError as error:
        raise SnapshotCorrupt(f"{at} cannot be read: {error.strerror or error}") from error


def _read_local(path: str) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MANIFEST_BYTES_MAX + 1)
    if len(data) > MANIFEST_BYTES_MAX:
        raise SnapshotCorrupt(f"{MANIFEST_FILE}: has more than {MANIFEST_BYTES_MAX} bytes")
    return data


def has_manifest(url: str) -> bool:
    """Raises BaseError, FileNotFoundError apart; SnapshotError."""
    try:
        open_bucket(url).head(MANIFEST_FILE)
    except FileNotFoundError:
        return False
    return True


def write_listing(directory: Path, listing: Listing) -> None:
    """Note in `directory` what it is a copy of."""
    _note(directory, listing.encoded())


def write_own_listing(directory: Path) -> None:
    """Note in `directory` what is in it, made here and in no bucket."""
    files = sorted((f.name, f.stat().st_size, "") for f in directory.iterdir() if f.is_file())
    _note(directory, msgspec.json.encode(files))


def _note(directory: Path, encoded: bytes) -> None:
    names = (name for name, _, _ in _entries(encoded))
    stamps = {name: (directory / name).stat().st_mtime_ns for name in names}
    (directory / STAMPS_FILE).write_bytes(msgspec.json.encode(stamps))
    (directory / LISTING_FILE).write_bytes(encoded)


def _entries(encoded: bytes) -> list[tuple[str, int, str]]:
    """(name, bytes, version) of each file of a listing."""
    return msgspec.json.decode(encoded, type=list[tuple[str, int, str]])


def is_whole(directory: Path, fingerprint: str | None = None) -> bool:
    """Whether `directory` has every file that was noted, with its size, not written to since; with a fingerprint, of that
    snapshot. Bytes are not read: what a disk itself changes is not seen here."""
    try:
        encoded = (directory / LISTING_FILE).read_bytes()
        if fingerprint is not None and fingerprint_of(encoded) != fingerprint:
            return False
        stamps = msgspec.json.decode((directory / STAMPS_FILE).read_bytes(), type=dict[str, int])
        found = [(name, size, (directory / name).stat()) for name, size, _ in _entries(encoded)]
        return all((now.st_size, now.st_mtime_ns) == (size, stamps[name]) for name, size, now in found)
    except (OSError, KeyError, msgspec.DecodeError):
        return False


def forget_listing(directory: Path) -> None:
    """`directory` is not whole from now on, whatever is in it."""
    (directory / LISTING_FILE).unlink(missing_ok=True)


def directory_bytes(directory: Path) -> int:
    """Bytes that the files in `directory` take on disk, at most (a file with holes takes less than its size)."""
    total = 0
    try:
        for file in directory.iterdir():
            found = file.stat()
            total += min(found.st_size, found.st_blocks * 512) if file.suffix == ".part" else found.st_size
    except OSError:  # it goes away while it is looked at
        return total
    return total
