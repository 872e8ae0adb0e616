"""Files that came to this machine by another way than the bucket, and wait here for the snapshot that they are.

Always holds: the newest files alone are held, whole, in a temporary directory inside the root of a cache. No other user of the
cache evicts them, and their bytes count to its bound. The next start of the process removes them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path

from midstream.core.types import Content
from midstream.snapshots.content import size_difference
from midstream.snapshots.layout import is_snapshot_file
from midstream.snapshots.messages import shown
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.local import (
    made_finite,
    move_into_place,
    note_contents,
    temporary_directory,
    write_own_listing,
)
from midstream.snapshots.tasks import behind

log = logging.getLogger(__name__)


class ReceivedFiles:
    """For use from several threads. Only `take` waits for the disk."""

    def __init__(self, cache: SnapshotCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._held: tuple[Content, Path] | None = None
        # The last removal of files that were held.
        self.removal: Future[None] | None = None

    def __repr__(self) -> str:
        return f"<ReceivedFiles {self._held[1].name if self._held else None}>"

    @property
    def directories(self) -> tuple[Path, ...]:
        held = self._held
        return () if held is None else (held[1],)

    def hold(self, content: Content, directory: Path) -> None:
        """Hold these files, and remove those that were held. directory: a temporary one in the cache's root."""
        with self._lock:
            if self._held is not None and self._held[1] != directory:
                self._remove(self._held[1])
            self._held = (content, directory)
            self._count()

    def forget(self, directory: Path | None = None) -> None:
        """Remove what is held. directory: only if these are the files."""
        with self._lock:
            if self._held is not None and directory in (None, self._held[1]):
                self._remove(self._held[1])
                self._held = None
                self._count()

    def take(self, content: Content, dest: Path, keep: Collection[Path], what: str) -> bool:
        """Move the held files to `dest` if they have this content. Returns whether they did. Call it in a thread.

        keep: what stays in the cache. Raises SnapshotError that names `what` when the cache has no room for the files.
        """
        with self._lock:
            held = self._held
        if held is None or held[0] != content:
            return False
        self._cache.make_room(_bytes(content), keep, what, user=self)
        with self._lock:
            if self._held is not held:
                # Of newer ones, as before.
                self._count()
                return False
            try:
                why_not = _move(content, held[1], dest)
            except OSError as error:
                why_not = error.strerror or str(error)
            self._held = None
            self._count()
            if why_not is not None:
                self._remove(held[1])
        if why_not is not None:
            log.warning("the files received of %s cannot be used: %s", shown(what), why_not)
        return why_not is None

    def close(self) -> None:
        self.forget()
        self._cache.users.leave(self)

    def _count(self) -> None:
        if self._held is None:
            self._cache.wrote(self)
        else:
            self._cache.users.writing[self] = _bytes(self._held[0])

    def _remove(self, directory: Path) -> None:
        """The name is free at once. The next start removes what an interruption leaves."""
        doomed = temporary_directory(self._cache.root)
        with contextlib.suppress(OSError):
            directory.rename(doomed)
            self.removal = behind(shutil.rmtree, doomed, True)


def _bytes(content: Content) -> int:
    return sum(file.size for file in content)


def _move(content: Content, directory: Path, dest: Path) -> str | None:
    """Returns why the files are not those of `content` any more, or None. Raises OSError."""
    sizes = {file.name: file.stat().st_size for file in directory.iterdir() if is_snapshot_file(file.name)}
    if (other := size_difference(content, sizes)) is not None:
        return other
    note_contents(directory, [content])
    # Whoever filled them may have seen that the numbers are finite.
    write_own_listing(directory, finite=made_finite(directory))
    move_into_place(directory, dest)
    return None
