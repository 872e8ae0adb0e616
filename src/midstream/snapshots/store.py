"""Copies a snapshot's files out of its bucket.

Always holds:
- `dest` either does not change or becomes exactly the files listed at the start: work happens in a sibling
  temporary directory that is renamed at the end, and is removed on failure and on cancellation. (A process
  killed between the two renames that replace an existing `dest` leaves none, never half of one.)
- Only files of a snapshot are fetched (SNAPSHOT_FILES), never anything pickled, and only plain names: nothing
  is written outside `dest`.
- A file that is replaced, grows or shrinks while it is read is an error, never a mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
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

__all__ = ["SNAPSHOT_FILES", "check_identity", "fetch_snapshot", "snapshot_url"]

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


async def fetch_snapshot(url: str, dest: Path, progress: Progress | None = None) -> None:
    """Make `dest` a copy of the snapshot directory at `url`, replacing what was there.

    A `dest` that an earlier fetch made of exactly these files (names, sizes, entity tags) is left as it is, so
    calling this is also how a cached copy is used: a snapshot published again under its old name is noticed.
    `progress(bytes_done, bytes_total)` is called on the event loop. Raises SnapshotMissing when nothing is
    there, SnapshotCorrupt when a file changes while it is read, SnapshotError when the disk refuses.
    """
    store = await asyncio.to_thread(_open_store, url)
    listed = await _list(store, url)
    if await asyncio.to_thread(_is_copy_of, dest, listed):
        return
    temporary = dest.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        await asyncio.to_thread(temporary.mkdir, parents=True)
        await _fetch_all(store, url, listed, temporary, progress)
        await asyncio.to_thread((temporary / LISTING_FILE).write_bytes, _encoded(listed))
        await asyncio.to_thread(_move_into_place, temporary, dest)
    except OSError as error:
        raise SnapshotError(f"{url}: cannot write to {dest.parent}: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)


def _open_store(url: str) -> LocalStore:
    try:
        path = file_url_path(url)
    except ConfigError as error:
        raise SnapshotMissing(f"{url}: {error}") from error
    if not os.path.isdir(path):  # unlike Path.is_dir, False for a name no file system takes
        raise SnapshotMissing(f"{url}: there is no such snapshot")
    return LocalStore(path)


async def _list(store: LocalStore, url: str) -> list[_Listed]:
    try:
        result = await store.list_with_delimiter_async()
    except BaseError as error:
        raise SnapshotMissing(f"{url}: cannot be listed: {_first_line(error)}") from error
    listed = [_Listed(o["path"], o["size"], o["e_tag"]) for o in result["objects"]]
    wanted = sorted((f for f in listed if is_snapshot_file(f.name)), key=lambda f: f.size, reverse=True)
    if not wanted:
        raise SnapshotMissing(f"{url}: holds no snapshot files (config.json, *.safetensors)")
    return wanted


def _encoded(listed: list[_Listed]) -> bytes:
    return msgspec.json.encode(sorted((f.name, f.size, f.etag) for f in listed))


def _is_copy_of(dest: Path, listed: list[_Listed]) -> bool:
    if any(f.etag is None for f in listed):
        return False
    try:
        same = (dest / LISTING_FILE).read_bytes() == _encoded(listed)
        return same and all((dest / f.name).stat().st_size == f.size for f in listed)
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
    changed = f"{url}: {file.name} changed while it was read"
    read = 0
    with await asyncio.to_thread(path.open, "xb") as out:
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
            raise SnapshotCorrupt(f"{url}: {file.name} cannot be read: {_first_line(error)}") from error
    if read != file.size:
        raise SnapshotCorrupt(f"{changed}: it was listed with {file.size} bytes, {read} could be read")
    if after["e_tag"] != file.etag:
        raise SnapshotCorrupt(changed)


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
    return str(error).strip().split("\n", 1)[0]
