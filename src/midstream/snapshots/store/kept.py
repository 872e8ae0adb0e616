"""Pushed snapshots in their bucket: known by their content alone, and put there behind the load.

Always holds:
- A snapshot is taken from the bucket only if its manifest says the content that its fingerprint names. Without a manifest,
  its files have at least the sizes of that content; whoever reads them compares the bytes.
- A directory that holds other files is left as it is. The manifest comes last.
- In a local bucket the directory appears whole.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from obstore.exceptions import BaseError

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, SnapshotRefused
from midstream.core.types import Content, FileContent, SnapshotFiles
from midstream.snapshots import content as contents
from midstream.snapshots.content import content_fingerprint, difference, size_difference
from midstream.snapshots.identity import parse_bucket, public_url
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import describe
from midstream.snapshots.store.fetch import NOT_MEANT
from midstream.snapshots.store.listing import BucketFile, Listing, list_snapshot, read_manifest
from midstream.snapshots.store.upload import OnFile, check_content, put_content, upload_order
from midstream.snapshots.store.whole import write_whole

log = logging.getLogger(__name__)

#: For so long a fetch waits for a pushed snapshot that is not in its bucket yet.
KEPT_WAIT_S = 120.0
_POLL_S = 1.0

Sleep = Callable[[float], Awaitable[object]]
#: Looks for the files in another place than the bucket. None: they are not there.
Elsewhere = Callable[[SnapshotFiles], Awaitable[Listing | None]]


async def kept_listing(
    link: SnapshotFiles,
    sleep: Sleep = asyncio.sleep,
    *,
    waits: bool = True,
    elsewhere: Elsewhere | None = None,
) -> tuple[Listing, Content]:
    """The files of `link`, which is known by its content, and that content. Waits until the bucket or `elsewhere` has them.

    waits: False looks once.

    Raises SnapshotMissing when it does not get them in time, SnapshotCorrupt when it has another snapshot there,
    SnapshotError when it does not answer.
    """
    if link.content is not None and content_fingerprint(link.content) != link.fingerprint:
        raise SnapshotCorrupt(
            f"{public_url(link.url)}: its files changed since the snapshot was signalled; signal it again"
        )
    waited = 0.0
    while (found := await _found(link, elsewhere)) is None:
        if not waits or waited >= KEPT_WAIT_S:
            raise SnapshotMissing(
                f"{public_url(link.url)}: the snapshot was pushed, and its files are not in the bucket yet"
            )
        if not waited:
            log.info("%s was pushed, and is awaited in its bucket", shown(link.snapshot))
        await sleep(_POLL_S)
        waited += _POLL_S
    return found


async def _found(link: SnapshotFiles, elsewhere: Elsewhere | None) -> tuple[Listing, Content] | None:
    """Also where the bucket does not answer."""
    try:
        found, problem = await _in_bucket(link), None
    except SnapshotCorrupt:
        raise
    except SnapshotError as error:
        found, problem = None, error
    if found is None and elsewhere is not None and link.content is not None:
        listing = await elsewhere(link)
        found = None if listing is None else (listing, link.content)
    if found is None and problem is not None:
        raise problem
    return found


async def _in_bucket(link: SnapshotFiles) -> tuple[Listing, Content] | None:
    """None while the bucket does not have all of it."""
    try:
        listing = await list_snapshot(link.url)
    except SnapshotMissing:
        return None
    stated = await read_manifest(listing)
    if stated is None:
        # It is being put there, or was copied without its manifest.
        content = link.content
        return None if content is None or _other_sizes(content, listing) else (listing, content)
    if content_fingerprint(stated) != link.fingerprint:
        what = "" if link.content is None else f": {difference(link.content, stated)}"
        raise SnapshotCorrupt(f"{public_url(link.url)}: {NOT_MEANT}{what}")
    if (other := _other_sizes(stated, listing)) is not None:
        raise SnapshotCorrupt(f"{public_url(link.url)}: {NOT_MEANT}: {other}")
    return listing, stated


def _other_sizes(content: Content, listing: Listing) -> str | None:
    return size_difference(content, {file.name: file.size for file in listing.files})


async def check_place(url: str, content: Content) -> None:
    """Raise SnapshotRefused when the directory at `url` has other files than `content`, as far as its manifest and the sizes
    show. Reads no other file. SnapshotError when the store does not answer."""
    try:
        listing = await list_snapshot(url)
    except SnapshotMissing:
        return
    stated = await read_manifest(listing)
    if stated is None:
        here = {file.name for file in listing.files}
        differs = _other_sizes(tuple(file for file in content if file.name in here), listing)
    else:
        differs = difference(content, stated)
    if differs is not None:
        raise SnapshotRefused(
            f"the bucket has other files at {public_url(url)}: {differs}. Push under another name, or remove them",
            param="identity",
        )


async def lacking_files(url: str, content: Content) -> frozenset[str] | None:
    """The files of `content` that the directory at `url` lacks. None: it has all, and the manifest, which was put last.

    Raises SnapshotRefused when it holds other files, SnapshotError when the store does not answer.
    """
    names = frozenset(file.name for file in content)
    try:
        listing = await list_snapshot(url)
    except SnapshotMissing:
        return names
    stated = await read_manifest(listing)
    if stated is None:
        # Left by an upload that was interrupted, or by somebody else.
        found = tuple([await _read_content(listing, file) for file in listing.files])
        here = {file.name for file in found}
        other = difference(tuple(file for file in content if file.name in here), found)
    else:
        other = difference(content, stated) or _other_sizes(content, listing)
    if other is not None:
        raise SnapshotRefused(f"{public_url(url)}: has other files than the pushed ones already: {other}")
    return None if stated is not None else names - here


async def _read_content(listing: Listing, file: BucketFile) -> FileContent:
    """Reads the file, part after part."""
    parts = []
    try:
        for start in range(0, file.size, contents.PART_BYTES):
            end = min(start + contents.PART_BYTES, file.size)
            data = await listing.store.get_range_async(file.name, start=start, end=end)
            parts.append((await asyncio.to_thread(hashlib.sha256, data)).digest())
    except BaseError as error:
        at = f"{public_url(listing.url)}: {shown(file.name)}"
        raise SnapshotError(f"{at} cannot be read: {describe(error)}") from None
    return FileContent(file.name, file.size, contents.combined(parts))


def put_kept(url: str, directory: Path, content: Content, lacking: Collection[str], on_file: OnFile) -> bool:
    """Put the files of `content` from `directory` to `url`, which lacks those. on_file: called after each; may end it.

    False: something came there meanwhile. Raises SnapshotCorrupt when the bytes in `directory` are others, SnapshotError when
    the bucket refuses or the disk does.
    """
    place = parse_bucket(url)
    if place.kind != "file" or len(lacking) < len(content):
        put_content(url, directory, content, lacking, on_file)
        return True

    def copy(temporary: Path) -> Content:
        for name in upload_order(file.name for file in content):
            shutil.copyfile(directory / name, temporary / name)
            on_file(name)
        check_content(temporary, content)
        return content

    try:
        write_whole(Path(place.path), copy, replace=False)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise SnapshotError(f"{public_url(url)}: cannot be written: {error.strerror or error}") from error
    return True
