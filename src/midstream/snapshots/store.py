"""Copies a snapshot's files out of its bucket.

Always holds:
- `dest` either does not change or becomes exactly the files listed at the start: work happens in a sibling
  temporary directory that is renamed at the end, and is removed on failure and on cancellation. (A process
  killed between the two renames that replace an existing `dest` leaves none, never half of one.)
- Only files of a snapshot are fetched (SNAPSHOT_FILES), never anything pickled, and only plain names: nothing
  is written outside `dest`.
- A file that is replaced, grows or shrinks while it is read is an error, never a mix.
- With a fingerprint, `dest` becomes the very files that had it, or does not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import LocalStore

from midstream.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.snapshots.identity import check_identity, file_url_path, snapshot_url
from midstream.snapshots.messages import TEXT_CHARS, shown

__all__ = ["SNAPSHOT_FILES", "check_identity", "fetch_snapshot", "snapshot_fingerprint", "snapshot_url"]

SNAPSHOT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.safetensors",
    "model.safetensors.index.json",
)
TEMPORARY_PREFIX = ".fetch-"
LISTING_FILE = ".listing.json"  # in a fetched directory: what it is a copy of
PARALLEL_FILES = 4
CHUNK_BYTES = 4 * 2**20
URL_CHARS = 400  # of a URL in a message

Progress = Callable[[int, int], None]


def is_snapshot_file(name: str) -> bool:
    """Whether a file of this name belongs to a snapshot and may be fetched."""
    plain = "/" not in name and "\\" not in name and not name.startswith(".")
    pickled = name.endswith((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))
    return plain and not pickled and any(fnmatch.fnmatchcase(name, pattern) for pattern in SNAPSHOT_FILES)


@dataclass(frozen=True)
class _Listed:
    name: str
    size: int
    etag: str | None
    modified: str  # stands in for the entity tag where a store has none


async def fetch_snapshot(
    url: str, dest: Path, progress: Progress | None = None, *, fingerprint: str | None = None
) -> None:
    """Make `dest` a copy of the snapshot directory at `url`, replacing what was there.

    fingerprint: what the snapshot must be (see snapshot_fingerprint); None: whatever is there now. A `dest` that an
    earlier fetch made of exactly these files (names, sizes, entity tags) is left as it is, so calling this is also how a
    cached copy is used; with a fingerprint, that needs no bucket.
    `progress(bytes_done, bytes_total)` is called on the event loop. Raises SnapshotMissing when nothing is
    there, SnapshotCorrupt when the files are others or one changes while it is read, SnapshotError when the disk refuses.
    """
    if fingerprint is not None and await asyncio.to_thread(_is_whole_copy, dest, fingerprint):
        return
    store = await asyncio.to_thread(_open_store, url)
    files = await _list(store, url)
    if fingerprint is not None and _fingerprint(_encoded(files)) != fingerprint:
        raise SnapshotCorrupt(
            f"{_at(url)}: its files changed since the snapshot was signalled; signal it again"
        )
    if await asyncio.to_thread(_is_copy_of, dest, files):
        return
    temporary = dest.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        await asyncio.to_thread(temporary.mkdir, parents=True)
        await _fetch_all(store, url, files, temporary, progress)
        await asyncio.to_thread((temporary / LISTING_FILE).write_bytes, _encoded(files))
        await asyncio.to_thread(_move_into_place, temporary, dest)
    except OSError as error:
        where = shown(str(dest.parent), 200)
        raise SnapshotError(f"{_at(url)}: cannot write to {where}: {_first_line(error)}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)


async def snapshot_fingerprint(url: str) -> str:
    """A digest of what the snapshot at `url` is made of now: its files' names, sizes and entity tags, not their bytes.

    Raises SnapshotMissing when no snapshot file is there, SnapshotError when that cannot be known now.
    """
    store = await asyncio.to_thread(_open_store, url)
    return _fingerprint(_encoded(await _list(store, url)))


def _at(url: str) -> str:
    return shown(url, URL_CHARS)


def _open_store(url: str) -> LocalStore:
    try:
        path = file_url_path(url)
    except ConfigError as error:
        raise SnapshotMissing(f"{_at(url)}: {shown(str(error), TEXT_CHARS)}") from error
    if not os.path.isdir(path):  # unlike Path.is_dir, False for a name no file system takes
        raise SnapshotMissing(f"{_at(url)}: there is no such snapshot")
    return LocalStore(path)


async def _list(store: LocalStore, url: str) -> list[_Listed]:
    try:
        result = await store.list_with_delimiter_async()
    except BaseError as error:
        raise SnapshotError(f"{_at(url)}: cannot be listed: {_first_line(error)}") from error
    found = [
        _Listed(o["path"], o["size"], o["e_tag"], o["last_modified"].isoformat()) for o in result["objects"]
    ]
    wanted = sorted((f for f in found if is_snapshot_file(f.name)), key=lambda f: f.size, reverse=True)
    if not wanted:
        raise SnapshotMissing(f"{_at(url)}: holds no snapshot files (config.json, *.safetensors)")
    return wanted


def _encoded(files: list[_Listed]) -> bytes:
    return msgspec.json.encode(sorted((f.name, f.size, f.etag or f.modified) for f in files))


def _fingerprint(listing: bytes) -> str:
    return hashlib.sha256(listing).hexdigest()


def _is_copy_of(dest: Path, files: list[_Listed]) -> bool:
    if any(f.etag is None for f in files):
        return False
    return _is_whole_copy(dest, _fingerprint(_encoded(files)))


def _is_whole_copy(dest: Path, fingerprint: str) -> bool:
    try:
        listing = (dest / LISTING_FILE).read_bytes()
        if _fingerprint(listing) != fingerprint:
            return False
        entries = msgspec.json.decode(listing, type=list[tuple[str, int, str]])
        return all((dest / name).stat().st_size == size for name, size, _ in entries)
    except OSError:
        return False


async def _fetch_all(
    store: LocalStore, url: str, listed: list[_Listed], directory: Path, progress: Progress | None
) -> None:
    total, done = sum(f.size for f in listed), 0
    slots = asyncio.Semaphore(PARALLEL_FILES)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    async def fetch(file: _Listed) -> None:
        async with slots:
            await _fetch_file(store, url, file, directory / file.name, advance)

    try:
        async with asyncio.TaskGroup() as group:
            for file in listed:
                group.create_task(fetch(file))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _fetch_file(
    store: LocalStore, url: str, file: _Listed, path: Path, advance: Callable[[int], None]
) -> None:
    changed = f"{_at(url)}: {shown(file.name)} changed while it was read"
    read = 0
    with await _open_new(path) as out:
        try:
            result = await store.get_async(file.name, options={"if_match": file.etag})
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                read += len(chunk)
                if read > file.size:
                    raise SnapshotCorrupt(f"{changed}: it was listed with {file.size} bytes and has more")
                await _uncancelled(asyncio.to_thread(_write, out, chunk))
                advance(len(chunk))
            after = await store.head_async(file.name)
        except (PreconditionError, FileNotFoundError) as error:
            raise SnapshotCorrupt(changed) from error
        except BaseError as error:
            raise SnapshotCorrupt(
                f"{_at(url)}: {shown(file.name)} cannot be read: {_first_line(error)}"
            ) from error
    if read != file.size:
        raise SnapshotCorrupt(f"{changed}: it was listed with {file.size} bytes, {read} could be read")
    if after["e_tag"] != file.etag:
        raise SnapshotCorrupt(changed)


async def _open_new(path: Path) -> BinaryIO:
    """A new file, which is closed again when the one who waits for it is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(path.open, "xb"))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            task.result().close()
        raise


def _write(out: BinaryIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]


async def _uncancelled(write: Coroutine[Any, Any, None]) -> None:
    """Await `write` to its end even when cancelled: its thread uses a file that the caller closes next."""
    task = asyncio.ensure_future(write)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what counts
        raise


def _move_into_place(temporary: Path, dest: Path) -> None:
    old = temporary.with_name(temporary.name + "-old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(dest, old)
    try:
        os.rename(temporary, dest)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, dest)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return shown(str(error).strip().split("\n", 1)[0], 200)
