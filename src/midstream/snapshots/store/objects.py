"""Single files of a bucket: put from memory, listed with their sizes and ages, removed.

Always holds: a file appears whole under its name, and survives a power cut once `put_bytes` has returned.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from obstore.exceptions import BaseError

from midstream.core.errors import SnapshotError
from midstream.snapshots.durable import sync_directory
from midstream.snapshots.identity import parse_bucket, public_url
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import describe, open_bucket

#: Begins the name of a file that is not whole yet, in a local directory. One whose writer died stays.
WRITING_PREFIX = "writing-"
#: An empty file that is put to learn the bucket's time, and stays.
CLOCK = f"{WRITING_PREFIX}clock"
#: A larger file goes into an object store in parts. Those of a writer that died stay there, and no listing shows them.
SINGLE_BYTES_MAX = 128 * 2**20


class FileSeen(NamedTuple):
    """path: below the directory. modified: seconds since the epoch, by the bucket's clock."""

    path: str
    size: int
    modified: float


def put_bytes(url: str, name: str, data: bytes) -> None:
    """Put a file into the directory that `url` names, in place of one of that name; a local directory is made.

    Raises ConfigError (not a bucket's URL), SnapshotError.
    """
    place = parse_bucket(url)
    try:
        if place.kind == "file":
            _write_local(Path(place.path), name, data)
        else:
            open_bucket(url).put(name, data, chunk_size=SINGLE_BYTES_MAX)
    except BaseError as error:
        raise SnapshotError(f"{public_url(url)}: {shown(name)} cannot be put: {describe(error)}") from None
    except OSError as error:
        raise SnapshotError(f"{public_url(url)}: {error.strerror or error}") from error


def _write_local(directory: Path, name: str, data: bytes) -> None:
    try:
        _write_into(directory, name, data)
    except FileNotFoundError:
        _make(directory)
        _write_into(directory, name, data)


def _make(directory: Path) -> None:
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for one in made:
        sync_directory(one.parent)


def _write_into(directory: Path, name: str, data: bytes) -> None:
    temporary = directory / f"{WRITING_PREFIX}{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def is_there(url: str, name: str, size: int) -> bool:
    """A file that `put_bytes` put, as large as it was. A store that does not say so has none."""
    try:
        return open_bucket(url).head(name)["size"] == size
    except (BaseError, FileNotFoundError):
        return False


def files_seen(url: str) -> Iterator[FileSeen]:
    """All files below the directory that `url` names; none where it is not there. A few are in memory at a time.

    Raises SnapshotError.
    """
    place = parse_bucket(url)
    if place.kind == "file" and not os.path.isdir(place.path):
        return
    try:
        for batch in open_bucket(url).list():
            for one in batch:
                yield FileSeen(one["path"], one["size"], one["last_modified"].timestamp())
    except (BaseError, FileNotFoundError) as error:
        raise SnapshotError(f"{public_url(url)}: cannot be listed: {describe(error)}") from None


def time_there(url: str) -> float:
    """Seconds since the epoch, by the bucket's clock. Raises SnapshotError."""
    put_bytes(url, CLOCK, b"")
    try:
        modified: float = open_bucket(url).head(CLOCK)["last_modified"].timestamp()
    except (BaseError, FileNotFoundError) as error:
        raise SnapshotError(f"{public_url(url)}: does not tell its time: {describe(error)}") from None
    return modified


def remove_files(url: str, paths: Sequence[str]) -> None:
    """Of `files_seen`. One that is gone is no error. Raises SnapshotError."""
    for path in paths:
        try:
            open_bucket(url).delete(path)
        except FileNotFoundError:
            continue
        except BaseError as error:
            raise SnapshotError(
                f"{public_url(url)}: {shown(path)} cannot be removed: {describe(error)}"
            ) from None
