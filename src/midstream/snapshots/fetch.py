"""Copies a snapshot's files out of its bucket: in parallel parts, and so that an interrupted copy is continued.

Always holds:
- `dest` either does not change or becomes exactly the files that were listed: work happens in a sibling directory whose
  files are moved into place at the end. (A process killed between the two renames that replace an existing `dest` leaves
  none, never half of one.)
- What an interrupted fetch has is used by the next one of the same URL, file by file, as long as a file is the very one
  (name, size, entity tag): a part counts as there only once its bytes are written.
- A file that is replaced, grows or shrinks while it is read is an error, never a mix.
- What was copied is digested on the way; bytes other than those that were asked for never reach `dest`.
- Nothing is written outside `dest` and that sibling.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError, GenericError, PreconditionError
from obstore.store import LocalStore

from midstream.errors import SnapshotCorrupt, SnapshotError
from midstream.snapshots import content as contents
from midstream.snapshots.bucket import Store, describe
from midstream.snapshots.content import agree, difference, noted_contents
from midstream.snapshots.identity import public_url
from midstream.snapshots.messages import shown
from midstream.snapshots.store import (
    BucketFile,
    Listing,
    find_file,
    is_whole,
    list_snapshot,
    open_regular,
    write_listing,
)
from midstream.snapshots.tasks import all_of, finished
from midstream.types import Content, FileContent

PARTIAL_PREFIX = ".part-"  # files on their way; outlives a process
TEMPORARY_PREFIX = ".moving-"  # no use to anybody once its process has gone
PART_BYTES = 16 * 2**20
PARTS_IN_FLIGHT = 6
PART_ATTEMPTS = 3  # beside the store's own retries, which end where a response's body has begun
_COPY_BYTES = 2**20
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_SPARE_BYTES = 2**20  # for listings and journals
_ENTRY = struct.Struct("<I32s")  # of a journal: the number of a part, its digest
NOT_MEANT = "its bytes are not those that this name means"

Progress = Callable[[int, int], None]


def partial_directory(parent: Path, url: str) -> Path:
    """Where the files of the snapshot at `url` are kept while they are fetched into `parent`."""
    return parent / f"{PARTIAL_PREFIX}{hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"


async def fetch_snapshot(
    url: str, dest: Path, progress: Progress | None = None, *, fingerprint: str | None = None
) -> None:
    """Make `dest` a copy of the snapshot directory at `url`, replacing what was there.

    fingerprint: what the snapshot must be (see snapshot_fingerprint); None: whatever is there now. A `dest` that an
    earlier fetch made of exactly these files is left as it is, so calling this is also how a cached copy is used; with a
    fingerprint, that needs no bucket. `progress(bytes_done, bytes_total)` is called on the event loop.

    Raises SnapshotMissing when nothing is there, SnapshotCorrupt when the files are others or one changes while it is
    read, SnapshotError when the bucket does not answer or the disk refuses.
    """
    if fingerprint is not None and await asyncio.to_thread(is_whole, dest, fingerprint):
        return
    await fetch_listed(await list_snapshot(url, fingerprint), dest, progress)


async def fetch_listed(
    listing: Listing,
    dest: Path,
    progress: Progress | None = None,
    *,
    slots: asyncio.Semaphore | None = None,
    content: Content | None = None,
) -> None:
    """As fetch_snapshot, of files already listed. What they are is noted in `dest` (content.py).

    slots: shared by fetches that run together. content: what the files must be, byte for byte; None: whatever they are.
    Raises SnapshotCorrupt that names the file which is another.
    """
    if listing.files[0].etag is not None and await asyncio.to_thread(_has, dest, listing, content):
        return
    partial = partial_directory(dest.parent, listing.url)
    try:
        with contextlib.ExitStack() as stack:
            sources = [(listing.store, file) for file in listing.files]
            parts = await finished(_open_all, stack, partial, listing.url, sources)
            await finished(_keep_only, partial, parts)
            await finished(_check_space, dest.parent, listing.url, sum(p.missing_bytes for p in parts))
            await _fetch_parts(parts, progress, slots or asyncio.Semaphore(PARTS_IN_FLIGHT))
            found = await finished(_content_of, parts)
        if content is not None and (other := difference(content, found)) is not None:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            raise SnapshotCorrupt(f"{public_url(listing.url)}: {NOT_MEANT}: {other}")
        await finished(_finish, partial, parts, listing, found, dest)
    except OSError as error:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)  # a full disk needs the room
        where = shown(str(dest.parent), 200)
        raise SnapshotError(
            f"{public_url(listing.url)}: cannot write to {where}: {error.strerror or error}"
        ) from error


def _has(dest: Path, listing: Listing, content: Content | None) -> bool:
    """Whether `dest` is a copy of just these files already."""
    return agree([content], noted_contents(dest)) and is_whole(dest, listing.fingerprint)


def _content_of(parts: Sequence[_PartialFile]) -> Content:
    return tuple(sorted((part.content() for part in parts), key=lambda file: file.name))


async def prefetch_files(
    url: str,
    parent: Path,
    names: Iterable[str],
    *,
    slots: asyncio.Semaphore | None = None,
    make_room: Callable[[int], None] = lambda needed: None,
) -> None:
    """Fetch these files of the snapshot at `url` early, for a later fetch into `parent` to find.

    make_room: called in a thread with the bytes that will be written.
    Raises SnapshotMissing when one is not there, SnapshotCorrupt when it changes meanwhile, SnapshotError.
    """
    partial = partial_directory(parent, url)
    found = [await find_file(url, name) for name in names]
    try:
        with contextlib.ExitStack() as stack:
            parts = await finished(_open_all, stack, partial, url, found)
            missing = sum(p.missing_bytes for p in parts)
            await finished(make_room, missing)
            await finished(_check_space, parent, url, missing)
            await _fetch_parts(parts, None, slots or asyncio.Semaphore(PARTS_IN_FLIGHT))
    except OSError as error:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)  # a full disk needs the room
        raise SnapshotError(f"{public_url(url)}: cannot write: {error.strerror or error}") from error


class _PartialFile:
    """One file on its way: its bytes, and a journal with the number and digest of each part that is there."""

    def __init__(self, directory: Path, url: str, store: Store, file: BucketFile) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(f"2 {file.size} {PART_BYTES} {file.version} {file.name}".encode()).hexdigest()[
            :40
        ]
        self.file = file
        self.path = directory / f"{key}.part"
        self.journal = directory / f"{key}.done"
        self._url = url
        self._store = store
        self._data = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        count = -(-file.size // PART_BYTES)
        written = os.pread(self._log, _ENTRY.size * (count + 1) * 4, 0)
        whole = len(written) // _ENTRY.size * _ENTRY.size
        self._digests: dict[int, bytes] = dict(_ENTRY.iter_unpack(written[:whole]))
        if file.etag is None or os.fstat(self._data).st_size != file.size:
            self._digests = {}  # nothing tells whether the bytes are this file's
            os.ftruncate(self._log, 0)
            os.ftruncate(self._data, file.size)
        elif len(written) != whole:
            os.ftruncate(self._log, whole)
        numbers = self._digests
        self.missing = [n for n in range(count) if n not in numbers]

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in map(self._range, self.missing))

    def content(self) -> FileContent:
        """Once no part is missing. Raises OSError."""
        if PART_BYTES != contents.PART_BYTES:
            return contents.file_content(self.path, self.file.name)
        count = -(-self.file.size // PART_BYTES)
        digest = contents.combined(self._digests[n] for n in range(count))
        return FileContent(self.file.name, self.file.size, digest)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._log)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def _range(self, number: int) -> tuple[int, int]:
        return number * PART_BYTES, min((number + 1) * PART_BYTES, self.file.size)

    @property
    def changed(self) -> str:
        return f"{public_url(self._url)}: {shown(self.file.name)} changed while it was read"

    async def fetch_part(self, number: int) -> int:
        """Bytes fetched. Raises SnapshotCorrupt, SnapshotError, OSError."""
        start, end = self._range(number)
        if isinstance(self._store, LocalStore):
            await finished(self._copy, number, os.path.join(str(self._store.prefix), self.file.name))
            return end - start
        for attempt in range(PART_ATTEMPTS):
            try:
                result = await self._store.get_async(
                    self.file.name, options={"if_match": self.file.etag, "range": (start, end)}
                )
                data = memoryview(await result.bytes_async())
                break
            except (PreconditionError, FileNotFoundError):
                raise SnapshotCorrupt(self.changed) from None
            except BaseError as error:
                if attempt + 1 == PART_ATTEMPTS or not isinstance(error, GenericError):
                    raise self._unreadable(error) from None
        has = result.meta["size"]
        if has != self.file.size or len(data) != end - start:
            has = start + len(data) if has == self.file.size else has
            raise SnapshotCorrupt(f"{self.changed}: it was listed with {self.file.size} bytes and has {has}")
        await finished(self._write, number, data)
        return end - start

    def _copy(self, number: int, source: str) -> None:
        """From a local bucket, within the kernel where it can. That the file is still the one listed is seen at the end."""
        try:
            file = open_regular(source)
        except OSError as error:
            raise SnapshotCorrupt(f"{self.changed}: {error.strerror}") from None
        try:
            begin, end = self._range(number)
            position = begin
            while position < end:
                count = _copy_some(file, self._data, position, end)
                if count == 0:
                    raise SnapshotCorrupt(
                        f"{self.changed}: it was listed with {self.file.size} bytes and has {position}"
                    )
                position += count
        finally:
            os.close(file)
        self._note(number, contents.part_digest(self._data, begin, end))

    def _write(self, number: int, data: memoryview) -> None:
        position = self._range(number)[0]
        digest = hashlib.sha256(data).digest()
        while data:
            written = os.pwrite(self._data, data, position)
            data, position = data[written:], position + written
        self._note(number, digest)

    def _note(self, number: int, digest: bytes) -> None:
        """The part is there: from now on nobody fetches it again."""
        os.write(self._log, _ENTRY.pack(number, digest))
        self._digests[number] = digest

    def _unreadable(self, error: Exception) -> SnapshotError:
        return SnapshotError(
            f"{public_url(self._url)}: {shown(self.file.name)} cannot be read: {describe(error)}"
        )

    async def check_unchanged(self) -> None:
        """The file in the bucket is still the one that was listed. Raises SnapshotCorrupt, SnapshotError."""
        try:
            after = await self._store.head_async(self.file.name)
        except FileNotFoundError:
            raise SnapshotCorrupt(self.changed) from None
        except BaseError as error:
            raise self._unreadable(error) from None
        version = after["e_tag"] or after["last_modified"].isoformat()
        if (version, after["size"]) != (self.file.version, self.file.size):
            raise SnapshotCorrupt(self.changed)


def _copy_some(source: int, target: int, position: int, end: int) -> int:
    """Copy some of the bytes from `position` to `end`, to the same place; how many. 0: the source ends before."""
    try:
        if hasattr(os, "copy_file_range"):
            return os.copy_file_range(source, target, end - position, position, position)
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    piece = os.pread(source, min(end - position, _COPY_BYTES), position)
    return os.pwrite(target, piece, position) if piece else 0


def _open_all(
    stack: contextlib.ExitStack, partial: Path, url: str, files: Sequence[tuple[Store, BucketFile]]
) -> list[_PartialFile]:
    parts = []
    for store, file in files:
        parts.append(_PartialFile(partial, url, store, file))
        stack.callback(parts[-1].close)
    return parts


async def _fetch_parts(
    files: list[_PartialFile], progress: Progress | None, slots: asyncio.Semaphore
) -> None:
    """All that is missing, a few parts at a time; then a look whether every file is still the same."""
    total = sum(f.file.size for f in files)
    done = total - sum(f.missing_bytes for f in files)

    async def fetch(file: _PartialFile, number: int) -> None:
        nonlocal done
        count = await file.fetch_part(number)
        done += count
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(done, total)
    await _in_parallel(slots, ((f, fetch(f, number)) for f in files for number in f.missing))
    await _in_parallel(slots, ((f, f.check_unchanged()) for f in files))


async def _in_parallel(
    slots: asyncio.Semaphore, work: Iterator[tuple[_PartialFile, Coroutine[Any, Any, None]]]
) -> None:
    async def worker() -> None:
        for file, step in work:
            try:
                async with slots:
                    await step
            except SnapshotCorrupt:
                await finished(file.forget)
                raise
            finally:
                step.close()

    await all_of(worker() for _ in range(PARTS_IN_FLIGHT))


def _keep_only(partial: Path, parts: list[_PartialFile]) -> None:
    """What was fetched of files that are others now goes."""
    wanted = {path.name for part in parts for path in (part.path, part.journal)}
    for path in partial.iterdir():
        if path.name not in wanted:
            path.unlink(missing_ok=True)


def _check_space(parent: Path, url: str, missing: int) -> None:
    free = shutil.disk_usage(parent).free
    if missing + _SPARE_BYTES > free:
        where = shown(str(parent), 200)
        raise SnapshotError(
            f"{public_url(url)}: {missing} bytes are to be fetched, but {where} has only {free} bytes free"
        )


def _finish(partial: Path, parts: list[_PartialFile], listing: Listing, found: Content, dest: Path) -> None:
    temporary = dest.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        for part in parts:
            os.rename(part.path, temporary / part.file.name)
        contents.note_contents(temporary, [found])
        write_listing(temporary, listing)
        move_into_place(temporary, dest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def move_into_place(temporary: Path, dest: Path) -> None:
    """Rename `temporary` to `dest`, whose content, if any, goes. Raises OSError; then `dest` is what it was."""
    old = temporary.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(dest, old)
    try:
        os.rename(temporary, dest)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, dest)
        raise
    shutil.rmtree(old, ignore_errors=True)
