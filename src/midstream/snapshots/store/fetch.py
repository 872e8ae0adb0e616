"""Copies a snapshot's files from its bucket in parallel parts, and continues an interrupted copy.

Always holds:
- `dest` stays as it is, or becomes exactly the listed files. They are fetched into a sibling directory, and moved at the end.
  A process killed between the two renames of a replacement leaves no `dest`, never half of one.
- The next fetch of a URL uses the parts of an interrupted one. A file must have the same name, size and entity tag. A part
  counts once its bytes are written.
- A file that is replaced, grows or shrinks while it is read is an error.
- Parts are digested on the way. Bytes other than the expected ones never reach `dest`.
- Nothing is written outside `dest` and its sibling. A file of `dest` that is a link (links.py) is never written to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import struct
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError, GenericError, PreconditionError
from obstore.store import HTTPStore, LocalStore

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.core.types import Content, FileContent
from midstream.snapshots import content as contents
from midstream.snapshots.arc2.files import Making
from midstream.snapshots.content import difference, in_groups
from midstream.snapshots.finite import parts_show_finite
from midstream.snapshots.identity import public_url
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import Store, describe
from midstream.snapshots.store.links import Links, tell_of_links
from midstream.snapshots.store.listing import BucketFile, Listing, find_file, open_regular
from midstream.snapshots.store.local import (
    copy_some,
    is_whole,
    made_finite,
    move_into_place,
    note_contents,
    note_finite,
    reserve,
    reserved_bytes,
    temporary_directory,
    write_listing,
)
from midstream.snapshots.tasks import all_of, computed, finished

#: Directories with the files of fetches under way. They outlive a process.
PARTIAL_PREFIX = ".part-"
PARTS_IN_FLIGHT = 6
#: The store itself retries only until the body of a response has begun.
PART_ATTEMPTS = 3
#: Room for listings and journals.
_NOTES_BYTES = 2**20
#: An entry of a journal: the number of a part, and its digest.
_ENTRY = struct.Struct("<I32s")
NOT_MEANT = "its bytes are not those that this name means"

Progress = Callable[[int, int], None]


def partial_directory(parent: Path, url: str) -> Path:
    """The directory in `parent` for files of the snapshot at `url` while they are fetched."""
    return parent / f"{PARTIAL_PREFIX}{hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}"


async def fetch_listed(
    listing: Listing,
    dest: Path,
    progress: Progress | None = None,
    *,
    slots: asyncio.Semaphore | None = None,
    content: Content | None = None,
    links: Links | None = None,
    making: Making | None = None,
) -> None:
    """Make `dest` a copy of the listed files, replacing what was there. Notes their content in it (local.py).

    A `dest` that has these files already is left as it is. slots: shared by fetches that run together. content: of the
    expected files; None for any. links: what links large files of a local bucket; None copies them. making: learns of linked
    weights before they are digested (`tell_of_links`). `progress(bytes_done, bytes_total)` is called on the event loop.

    Raises SnapshotCorrupt, which names the file, when the content differs or a file changes while it is read. Raises
    SnapshotError when the bucket does not answer or the disk refuses.
    """
    if listing.files[0].etag is not None and await asyncio.to_thread(
        is_whole, dest, listing.fingerprint, [content]
    ):
        # That was seen when they were fetched.
        await asyncio.to_thread(made_finite, dest)
        return
    async with _partial_files(dest.parent, listing.url) as partial:
        with contextlib.ExitStack() as stack:
            sources = [(listing.store, file) for file in listing.files]
            parts = await finished(_open_all, stack, partial, listing.url, sources, links)
            await finished(_keep_only, partial, parts)
            await finished(_reserve, dest.parent, listing.url, parts)
            async with _read_ahead(making, dest.parent, parts) as ahead:
                await _fetch_parts(parts, progress, slots or asyncio.Semaphore(PARTS_IN_FLIGHT), ahead)
            found = tuple(sorted((part.content() for part in parts), key=lambda file: file.name))
        if content is not None and (other := difference(content, found)) is not None:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            raise SnapshotCorrupt(f"{public_url(listing.url)}: {NOT_MEANT}: {other}")
        await finished(_finish, partial, parts, listing, found, dest, links)


@contextlib.asynccontextmanager
async def _partial_files(parent: Path, url: str) -> AsyncIterator[Path]:
    """The partial directory of `url`. An OSError removes it and becomes a SnapshotError that names `parent`."""
    partial = partial_directory(parent, url)
    try:
        yield partial
    except OSError as error:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        raise _cannot_write(parent, url, error) from error


def _cannot_write(parent: Path, url: str, error: OSError) -> SnapshotError:
    where = shown(str(parent), 200)
    return SnapshotError(f"{public_url(url)}: cannot write to {where}: {error.strerror or error}")


async def prefetch_files(
    url: str,
    parent: Path,
    names: Iterable[str],
    *,
    slots: asyncio.Semaphore | None = None,
    make_room: Callable[[int], None] = lambda needed: None,
) -> None:
    """Fetch these files of the snapshot at `url` early. A later fetch into `parent` finds them.

    make_room: called in a thread with the bytes that will be written.
    Raises SnapshotMissing when a file is not there, SnapshotCorrupt when it changes meanwhile, SnapshotError.
    """
    found = [await find_file(url, name) for name in names]
    async with _partial_files(parent, url) as partial:
        with contextlib.ExitStack() as stack:
            parts = await finished(_open_all, stack, partial, url, found)
            await finished(make_room, sum(p.missing_bytes for p in parts))
            await finished(_reserve, parent, url, parts)
            await _fetch_parts(parts, None, slots or asyncio.Semaphore(PARTS_IN_FLIGHT))


class _PartialFile:
    """One file that is being fetched: its bytes, and a journal with the number and digest of each part that is there."""

    def __init__(
        self, directory: Path, url: str, store: Store, file: BucketFile, links: Links | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(
            f"2 {file.size} {contents.PART_BYTES} {file.version} {file.name}".encode()
        ).hexdigest()[:40]
        self.file = file
        self.path = directory / f"{key}.part"
        self.journal = directory / f"{key}.done"
        self._url = url
        self._store = store
        self._links = links
        self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        count = -(-file.size // contents.PART_BYTES)
        written = os.pread(self._log, _ENTRY.size * (count + 1) * 4, 0)
        whole = len(written) // _ENTRY.size * _ENTRY.size
        self._digests: dict[int, bytes] = dict(_ENTRY.iter_unpack(written[:whole]))
        # Of the words in the parts that were read here (content.py).
        self._largest: dict[int, Mapping[int, int]] = {}
        self.linked = self._link()
        if self.linked:
            self._data = os.open(self.path, os.O_RDONLY)
        else:
            _drop_link(self.path)
            self._data = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        if self.linked:
            self._digests = {}
            os.ftruncate(self._log, 0)
        elif file.etag is None or os.fstat(self._data).st_size != file.size:
            # These bytes may be another file's.
            self._digests = {}
            os.ftruncate(self._log, 0)
            os.ftruncate(self._data, file.size)
        elif len(written) != whole:
            os.ftruncate(self._log, whole)
        numbers = self._digests
        self.missing = [n for n in range(count) if n not in numbers]

    def _link(self) -> bool:
        """Whether the file is linked, and held, instead of copied. One that was copied in part is copied to its end."""
        if self._links is None or self._digests or not isinstance(self._store, LocalStore):
            return False
        return self._links.link(self._source, self.file.size, self.path)

    @property
    def _source(self) -> str:
        assert isinstance(self._store, LocalStore)
        return os.path.join(str(self._store.prefix), self.file.name)

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in map(self._range, self.missing))

    @property
    def reserved_bytes(self) -> int:
        return self.file.size if self.linked else reserved_bytes(self._data)

    def reserve(self) -> None:
        """Raises OSError when the disk has no room for the whole file."""
        if self.reserved_bytes < self.file.size:
            reserve(self._data, self.file.size)

    def content(self) -> FileContent:
        """Only when no part is missing."""
        count = -(-self.file.size // contents.PART_BYTES)
        digest = contents.combined(self._digests[n] for n in range(count))
        return FileContent(self.file.name, self.file.size, digest)

    @property
    def shows_finite(self) -> bool:
        """Whether the pass that digested the parts showed all numbers to be finite. Only when no part is missing."""
        seen = self._largest
        largest = {self._range(number)[0]: part for number, part in seen.items()}
        return seen.keys() == self._digests.keys() and parts_show_finite(self.path, largest)

    @property
    def has_weights(self) -> bool:
        return self.file.name.endswith(".safetensors")

    def close(self) -> None:
        os.close(self._data)
        os.close(self._log)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def _range(self, number: int) -> tuple[int, int]:
        return number * contents.PART_BYTES, min((number + 1) * contents.PART_BYTES, self.file.size)

    @property
    def changed(self) -> str:
        return f"{public_url(self._url)}: {shown(self.file.name)} changed while it was read"

    @property
    def steps(self) -> Iterable[Sequence[int]]:
        """The missing parts: those of a local file in groups, which are digested together."""
        return in_groups(self.missing) if isinstance(self._store, LocalStore) else [[n] for n in self.missing]

    async def fetch(self, step: Sequence[int]) -> int:
        """Fetch the parts of one of `steps` and return their bytes. Raises SnapshotCorrupt, SnapshotError, OSError."""
        if isinstance(self._store, LocalStore):
            await computed(self._copy, step, self._source)
        else:
            for number in step:
                await self._fetch_part(number)
        return sum(end - start for start, end in map(self._range, step))

    async def _fetch_part(self, number: int) -> None:
        start, end = self._range(number)
        for attempt in range(PART_ATTEMPTS):
            try:
                result = await self._store.get_async(
                    self.file.name, options={"if_match": self.file.etag, "range": (start, end)}
                )
                data = memoryview(await result.bytes_async())
                break
            except (PreconditionError, FileNotFoundError) as error:
                raise self._gone(error) from None
            except BaseError as error:
                if attempt + 1 == PART_ATTEMPTS or not isinstance(error, GenericError):
                    raise self._unreadable(error) from None
        has = result.meta["size"]
        if has != self.file.size or len(data) != end - start:
            has = start + len(data) if has == self.file.size else has
            raise SnapshotCorrupt(f"{self.changed}: it was listed with {self.file.size} bytes and has {has}")
        await finished(self._write, number, data)

    def _copy(self, numbers: Sequence[int], source: str) -> None:
        """Copy parts from a local bucket, in the kernel if possible. check_unchanged looks at the file at the end."""
        ranges = [self._range(number) for number in numbers]
        if not self.linked:
            self._copy_ranges(ranges, source)
        for number, part in zip(numbers, contents.read_parts(self._data, ranges), strict=True):
            self._note(number, part.digest)
            self._largest[number] = part.largest

    def _copy_ranges(self, ranges: Iterable[tuple[int, int]], source: str) -> None:
        try:
            file = open_regular(source)
        except OSError as error:
            raise SnapshotCorrupt(f"{self.changed}: {error.strerror}") from None
        try:
            for position, end in ranges:
                while position < end:
                    count = copy_some(file, self._data, position, end)
                    if count == 0:
                        raise SnapshotCorrupt(
                            f"{self.changed}: it was listed with {self.file.size} bytes and has {position}"
                        )
                    position += count
        finally:
            os.close(file)

    def _write(self, number: int, data: memoryview) -> None:
        position = self._range(number)[0]
        digest = hashlib.sha256(data).digest()
        while data:
            written = os.pwrite(self._data, data, position)
            data, position = data[written:], position + written
        self._note(number, digest)

    def _note(self, number: int, digest: bytes) -> None:
        """Note that the part is there. It is not fetched again. Of a linked file that holds for this fetch only."""
        if not self.linked:
            os.write(self._log, _ENTRY.pack(number, digest))
        self._digests[number] = digest

    def _gone(self, error: Exception) -> SnapshotError:
        """A bucket's file was replaced or removed. A replica may just have evicted it, and its parts here are sound."""
        if isinstance(self._store, HTTPStore):
            return self._unreadable(error)
        return SnapshotCorrupt(self.changed)

    def _unreadable(self, error: Exception) -> SnapshotError:
        return SnapshotError(
            f"{public_url(self._url)}: {shown(self.file.name)} cannot be read: {describe(error)}"
        )

    async def check_unchanged(self) -> None:
        """Raise SnapshotCorrupt unless the bucket still has the file that was listed; SnapshotError if that cannot be known."""
        try:
            after = await self._store.head_async(self.file.name)
        except FileNotFoundError as error:
            raise self._gone(error) from None
        except BaseError as error:
            raise self._unreadable(error) from None
        version = after["e_tag"] or after["last_modified"].isoformat()
        if (version, after["size"]) != (self.file.version, self.file.size):
            raise SnapshotCorrupt(self.changed)


def _drop_link(path: Path) -> None:
    """Remove a link to a bucket's file, which an interrupted fetch left: nothing may be written to it."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_nlink > 1:
            path.unlink()


def _open_all(
    stack: contextlib.ExitStack,
    partial: Path,
    url: str,
    files: Sequence[tuple[Store, BucketFile]],
    links: Links | None = None,
) -> list[_PartialFile]:
    parts = []
    for store, file in files:
        parts.append(_PartialFile(partial, url, store, file, links))
        stack.callback(parts[-1].close)
    return parts


@contextlib.asynccontextmanager
async def _read_ahead(
    making: Making | None, parent: Path, parts: Sequence[_PartialFile]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Gives what tells `making` of the weights, if all of them are linked. Call it when the other files are there."""
    directory = temporary_directory(parent)

    async def tell() -> None:
        if making is not None and all(part.linked for part in parts if part.has_weights):
            files = {part.file.name: part.path for part in parts}
            await finished(tell_of_links, making, directory, files)

    try:
        yield tell
    finally:
        await finished(shutil.rmtree, directory, True)


async def _fetch_parts(
    files: list[_PartialFile],
    progress: Progress | None,
    slots: asyncio.Semaphore,
    copied: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Fetch all missing parts, a few at a time. Then check that every file is unchanged.

    copied: called when all but the linked files are there."""
    total = sum(f.file.size for f in files)
    done = total - sum(f.missing_bytes for f in files)

    async def fetch(file: _PartialFile, step: Sequence[int]) -> None:
        nonlocal done
        count = await file.fetch(step)
        done += count
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(done, total)
    await _in_parallel(slots, ((f, fetch(f, step)) for f in files if not f.linked for step in f.steps))
    if copied is not None:
        await copied()
    await _in_parallel(slots, ((f, fetch(f, step)) for f in files if f.linked for step in f.steps))
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
    """Remove parts of files that are not in the listing."""
    wanted = {path.name for part in parts for path in (part.path, part.journal)}
    for path in partial.iterdir():
        if path.name not in wanted:
            path.unlink(missing_ok=True)


def reserve_files(parent: Path, listing: Listing, links: Links | None = None) -> None:
    """Set aside room in `parent` for files that are fetched next, with the same `links`. Raises SnapshotError."""
    try:
        with contextlib.ExitStack() as stack:
            partial = partial_directory(parent, listing.url)
            sources = [(listing.store, file) for file in listing.files]
            parts = _open_all(stack, partial, listing.url, sources, links)
            _keep_only(partial, parts)
            _reserve(parent, listing.url, parts)
    except OSError as error:
        raise _cannot_write(parent, listing.url, error) from error


def _reserve(parent: Path, url: str, parts: Sequence[_PartialFile]) -> None:
    """Have the disk keep room for the whole files. No other fetch, of any process, counts it as free then.

    Raises SnapshotError, and OSError when the room went meanwhile.
    """
    needed = sum(max(0, part.file.size - part.reserved_bytes) for part in parts)
    free = shutil.disk_usage(parent).free
    if needed and needed + _NOTES_BYTES > free:
        where = shown(str(parent), 200)
        raise SnapshotError(
            f"{public_url(url)}: {needed} bytes are to be fetched, but {where} has only {free} bytes free"
        )
    for part in parts:
        part.reserve()


def _finish(
    partial: Path,
    parts: list[_PartialFile],
    listing: Listing,
    found: Content,
    dest: Path,
    links: Links | None,
) -> None:
    weights = [part for part in parts if part.has_weights]
    finite = bool(weights) and all(part.shows_finite for part in weights)
    temporary = temporary_directory(dest.parent)
    temporary.mkdir()
    try:
        for part in parts:
            os.rename(part.path, temporary / part.file.name)
            if links is not None:
                links.moved(part.path, dest / part.file.name)
        note_contents(temporary, [found])
        write_listing(temporary, listing.encoded())
        if finite:
            note_finite(temporary)
        move_into_place(temporary, dest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
