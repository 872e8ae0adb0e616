"""Puts a snapshot's directory into the bucket.

Always holds:
- In a local directory a snapshot appears whole or not at all: it is copied beside its place and renamed, so a trainer that
  dies leaves at most a hidden directory behind.
- An existing snapshot is not replaced unless the caller says so, and no other one is touched in doing so.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from midstream.client.errors import PublishError
from midstream.snapshots.identity import file_url_path
from midstream.snapshots.store import is_snapshot_file

OnFile = Callable[[str], None]


class LocalBucket:
    """`root` is made when the first snapshot is put."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def exists(self, identity: str) -> bool:
        return (self.root / identity).exists()

    def check(self, identity: str, overwrite: bool) -> None:
        """Raise PublishError when `identity` is taken, lies inside another snapshot, or has others inside it."""
        place = self.root / identity
        around = identity.rpartition("/")[0]
        while around:
            if any(is_snapshot_file(name) for name in _names(self.root / around)):
                raise PublishError(
                    f"snapshot {identity!r} cannot be written: it lies inside the snapshot {around!r}"
                )
            around = around.rpartition("/")[0]
        names = [name for name in _names(place) if not name.startswith(".")]
        inside = [name for name in names if (place / name).is_dir()]
        if inside:
            raise PublishError(
                f"snapshot {identity!r} cannot be written: {f'{identity}/{inside[0]}'!r} lies inside it"
            )
        if (names or place.is_file()) and not overwrite:
            raise PublishError(f"snapshot {identity!r} is already in the bucket {self}")

    def put(self, identity: str, directory: Path, *, overwrite: bool, on_file: OnFile | None = None) -> None:
        """Copy `directory` to its place. on_file: not called, since the files appear all at once."""

        def copy(temporary: Path) -> None:
            shutil.copytree(directory, temporary, copy_function=shutil.copyfile, dirs_exist_ok=True)

        self.write(identity, copy, overwrite=overwrite)

    def write(self, identity: str, fill: Callable[[Path], None], *, overwrite: bool) -> Path:
        """Let `fill` write the snapshot's files into a directory that takes its place afterwards."""
        self.check(identity, overwrite)
        place = self.root / identity
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.parent / f".publish-{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            fill(temporary)
            _move(temporary, place)
            return place
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []


def _move(temporary: Path, place: Path) -> None:
    if place.exists():
        old = temporary.with_name(temporary.name + "-old")
        place.rename(old)
        temporary.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(place)


Bucket = LocalBucket


def open_bucket(bucket: str) -> Bucket:
    """`bucket`: a URL, or the path of a local directory. Raises ConfigError."""
    return LocalBucket(file_url_path(bucket) if "://" in bucket else Path(bucket))
