"""Puts a snapshot's directory into the bucket.

Always holds:
- In a local directory a snapshot appears whole or not at all: it is copied beside its place and renamed, so a trainer that
  dies leaves at most a hidden directory behind. Elsewhere files appear one by one, what makes them a snapshot last.
- A snapshot comes with its manifest, which says what every file is, byte for byte; it is written last.
- What `put` and `write` return after survives a power cut, as far as the file system keeps what is synced.
- An existing snapshot is not replaced unless the caller says so, and no other one is touched in doing so.
- What a bucket refuses is a PublishError, without credentials in it.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midstream.client.errors import PublishError
from midstream.errors import SnapshotError
from midstream.snapshots.content import MANIFEST_FILE, directory_content, encode_manifest
from midstream.snapshots.durable import sync_directory, sync_tree
from midstream.snapshots.fetch import TEMPORARY_PREFIX, move_into_place
from midstream.snapshots.identity import file_url_path, parse_bucket
from midstream.snapshots.store import is_snapshot_file
from midstream.snapshots.upload import OnFile, list_directory, put_directory, upload_order
from midstream.types import Content

_PREFIX = ".publish-"  # of what is not in its place yet
_LEFTOVERS = (_PREFIX, TEMPORARY_PREFIX)  # of a trainer that died
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # with one slash forgotten too


class Bucket(abc.ABC):
    """One bucket, by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    @abc.abstractmethod
    def exists(self, identity: str) -> bool:
        """Whether anything of that name is there."""

    @abc.abstractmethod
    def check(self, identity: str, overwrite: bool) -> None:
        """Raise PublishError when `identity` is taken, lies inside another snapshot, or has others inside it."""

    @abc.abstractmethod
    def put(self, identity: str, directory: Path, *, overwrite: bool, on_file: OnFile | None = None) -> None:
        """Copy `directory` to its place. on_file: told each file that can be read from now on, where they appear singly."""

    @abc.abstractmethod
    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> Path | None:
        """Let `fill` write the files of `identity` into a directory; where they are now, if that is a directory."""


class LocalBucket(Bucket):
    """`root` is made when the first snapshot is put."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        super().__init__(self.root.as_uri())

    def exists(self, identity: str) -> bool:
        return os.path.exists(
            self.root / identity
        )  # unlike Path.exists, False for a name no file system takes

    def check(self, identity: str, overwrite: bool) -> None:
        try:
            self._check(identity, overwrite)
        except OSError as error:
            raise PublishError(f"snapshot {identity!r} cannot be written to {self}: {error}") from error

    def _check(self, identity: str, overwrite: bool) -> None:
        place = self.root / identity
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
        names = upload_order(file.name for file in directory.iterdir() if file.is_file())

        def copy(temporary: Path) -> Content:
            with ThreadPoolExecutor(1, "manifest") as beside:
                digested = beside.submit(
                    directory_content, directory, names
                )  # of what is meant, not of the copy
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
        temporary = place.parent / f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            above = _not_there_yet(place.parent)
            temporary.mkdir(parents=True)
            content = fill(temporary)
            (temporary / MANIFEST_FILE).write_bytes(encode_manifest(content))
            sync_tree(temporary)
            move_into_place(temporary, place)
            for name in (place, *above):
                sync_directory(name.parent)
            return place
        except OSError as error:
            raise PublishError(f"snapshot {identity!r} cannot be written to {self}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class RemoteBucket(Bucket):
    """S3, Google Cloud Storage or Azure; credentials come from the environment."""

    def exists(self, identity: str) -> bool:
        with _refusals(identity):
            return bool(list_directory(self.url, identity)[0])

    def check(self, identity: str, overwrite: bool) -> None:
        with _refusals(identity):
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
        with _refusals(identity):
            put_directory(self.url, identity, directory, on_file)

    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> None:
        self.check(identity, overwrite)
        with tempfile.TemporaryDirectory(prefix="midstream-publish-") as temporary:
            try:
                fill(Path(temporary))
            except OSError as error:
                raise PublishError(f"snapshot {identity!r} cannot be written: {error}") from error
            self.put(identity, Path(temporary), overwrite=overwrite)


def open_bucket(bucket: str) -> Bucket:
    """`bucket`: a URL, or the path of a local directory. Raises ConfigError."""
    if not _SCHEME.match(bucket):
        return LocalBucket(Path(bucket))
    if parse_bucket(bucket).kind == "file":
        return LocalBucket(file_url_path(bucket))
    return RemoteBucket(bucket)


@contextlib.contextmanager
def _refusals(identity: str) -> Iterator[None]:
    try:
        yield
    except SnapshotError as error:
        raise PublishError(f"snapshot {identity!r}: {error}") from error


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
    return PublishError(f"snapshot {identity!r} is already in the bucket {bucket}")


def _not_there_yet(directory: Path) -> list[Path]:
    """`directory` and what is above it, as far as it has to be made, the innermost first."""
    return list(itertools.takewhile(lambda path: not path.exists(), (directory, *directory.parents)))


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
