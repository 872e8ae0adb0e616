"""Puts a snapshot's directory into the bucket.

Always holds:
- In a local directory a snapshot appears whole or not at all. It is copied beside its place and renamed, so a trainer that dies
  leaves at most a hidden directory behind. In an object store files appear one by one. The configuration or the index comes
  last.
- The manifest is written after all other files. It has the size and the digest of each.
- A snapshot survives a power cut once `put` or `write` has returned, as far as the file system keeps synced files.
- An existing snapshot is not replaced unless the caller says so. No other snapshot is touched then.
- An error of a bucket or of a local disk is a PublishError, without credentials in it.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from midstream.client.errors import PublishError
from midstream.core.errors import SnapshotError
from midstream.core.types import Content
from midstream.snapshots.content import directory_content
from midstream.snapshots.identity import file_url_path, parse_bucket
from midstream.snapshots.layout import is_snapshot_file
from midstream.snapshots.store.local import TEMPORARY_PREFIX
from midstream.snapshots.store.upload import OnFile, list_directory, put_directory, upload_order
from midstream.snapshots.store.whole import WRITING_PREFIX, write_whole

#: Begin the names of directories that a dead trainer left behind.
_LEFTOVERS = (WRITING_PREFIX, TEMPORARY_PREFIX)
#: One slash is enough, since the other one may have been forgotten.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class Bucket(abc.ABC):
    """One bucket, by its URL. Every method raises PublishError for an error of the bucket or of a local disk."""

    #: Whether a look into it takes calls over a network.
    remote: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    @abc.abstractmethod
    def exists(self, identity: str) -> bool:
        """Whether a file or a directory of that name is there."""

    @abc.abstractmethod
    def check(self, identity: str, overwrite: bool) -> None:
        """Raise PublishError when `identity` is taken, lies inside another snapshot, or has others inside it."""

    @abc.abstractmethod
    def put(self, identity: str, directory: Path, *, overwrite: bool, on_file: OnFile | None = None) -> None:
        """Copy the snapshot files of `directory` to their place.

        on_file: in an object store, gets the name of each file once it can be read.
        """

    @abc.abstractmethod
    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> Path | None:
        """Let `fill` write the files of `identity` into a directory. Returns their place, if that is a local directory."""

    @contextlib.contextmanager
    def _errors(self, identity: str) -> Iterator[None]:
        """Errors of the bucket and of a local disk become a PublishError."""
        try:
            yield
        except PublishError:
            raise
        except OSError as error:
            raise PublishError(f"snapshot {identity!r} cannot be written to {self}: {error}") from error
        except SnapshotError as error:
            raise PublishError(f"snapshot {identity!r}: {error}") from error


class LocalBucket(Bucket):
    """A local directory. It is made when the first snapshot is put."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        super().__init__(self.root.as_uri())

    def exists(self, identity: str) -> bool:
        # Unlike Path.exists, this is False for a name that no file system takes.
        return os.path.exists(self.root / identity)

    def check(self, identity: str, overwrite: bool) -> None:
        place = self.root / identity
        with self._errors(identity):
            for around in _around(identity):
                if any(is_snapshot_file(name) for name in _names(self.root / around)):
                    raise _inside_another(identity, around)
            names = [name for name in _names(place) if not name.startswith(_LEFTOVERS)]
            inside = [name for name in names if (place / name).is_dir()]
            if inside:
                raise _around_another(identity, inside[0])
            if (names or place.is_file()) and not overwrite:
                raise _taken(identity, self)

    def put(self, identity: str, directory: Path, *, overwrite: bool, on_file: OnFile | None = None) -> None:
        def copy(temporary: Path) -> Content:
            names = upload_order(file.name for file in directory.iterdir() if file.is_file())
            with ThreadPoolExecutor(1, "manifest") as beside:
                # The originals are digested: the copies may differ.
                digested = beside.submit(directory_content, directory, names)
                for name in names:
                    shutil.copyfile(directory / name, temporary / name)
                return digested.result()

        self._write(identity, copy, overwrite=overwrite)

    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> Path:
        def filled(temporary: Path) -> Content:
            fill(temporary)
            return directory_content(temporary, upload_order(_names(temporary)))

        return self._write(identity, filled, overwrite=overwrite)

    def _write(self, identity: str, fill: Callable[[Path], Content], *, overwrite: bool) -> Path:
        self.check(identity, overwrite)
        place = self.root / identity
        with self._errors(identity):
            write_whole(place, fill, replace=True)
        return place


class RemoteBucket(Bucket):
    """S3, Google Cloud Storage or Azure. Credentials come from the environment."""

    remote = True

    def exists(self, identity: str) -> bool:
        with self._errors(identity):
            return bool(list_directory(self.url, identity)[0])

    def check(self, identity: str, overwrite: bool) -> None:
        with self._errors(identity):
            for around in _around(identity):
                if list_directory(self.url, around)[0]:
                    raise _inside_another(identity, around)
            names, inside = list_directory(self.url, identity)
            if inside:
                raise _around_another(identity, inside[0])
            if names and not overwrite:
                raise _taken(identity, self)

    def put(self, identity: str, directory: Path, *, overwrite: bool, on_file: OnFile | None = None) -> None:
        self.check(identity, overwrite)
        with self._errors(identity):
            put_directory(self.url, identity, directory, on_file)

    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> None:
        self.check(identity, overwrite)
        with (
            self._errors(identity),
            tempfile.TemporaryDirectory(prefix="midstream-publish-") as temporary,
        ):
            fill(Path(temporary))
            self.put(identity, Path(temporary), overwrite=overwrite)


def open_bucket(bucket: str) -> Bucket:
    """bucket: a URL, or the path of a local directory. Raises ConfigError."""
    if not _SCHEME.match(bucket):
        return LocalBucket(Path(bucket))
    if parse_bucket(bucket).kind == "file":
        return LocalBucket(file_url_path(bucket))
    return RemoteBucket(bucket)


def _around(identity: str) -> Iterator[str]:
    """The names of the directories that `identity` lies in, the innermost first."""
    around = identity.rpartition("/")[0]
    while around:
        yield around
        around = around.rpartition("/")[0]


def _inside_another(identity: str, around: str) -> PublishError:
    return PublishError(f"snapshot {identity!r} cannot be written: it lies inside the snapshot {around!r}")


def _around_another(identity: str, inside: str) -> PublishError:
    return PublishError(f"snapshot {identity!r} cannot be written: {f'{identity}/{inside}'!r} lies inside it")


def _taken(identity: str, bucket: Bucket) -> PublishError:
    return PublishError(
        f"snapshot {identity!r} is already in the bucket {bucket}; name another one, or replace it with overwrite"
    )


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
