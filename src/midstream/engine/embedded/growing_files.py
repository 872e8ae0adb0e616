"""A snapshot that is read while its files are still being made: which of its tensors may be read.

Always holds: a tensor may be read once the replica has named it, or once all files were proved. `whole` returns only then, so
nothing is computed with weights of which anything is unproved. Files at another place are the same only if they are the same
inodes.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from midstream.snapshots.layout import CONFIG_FILE

#: By name: device and inode.
Inodes = dict[str, tuple[int, int]]


class GrowingFilesEnded(Exception):
    """The files will not be finished, or others were."""


class _Phase(enum.Enum):
    MAKING = "making"
    WHOLE = "whole"
    DROPPED = "dropped"


class GrowingFiles:
    """One thread reads; the engine's loop says what it may. directory: where the files are. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._inodes = _inodes(directory)
        self._changed = threading.Condition()
        self._made: set[str] = set()
        self._phase = _Phase.MAKING

    def __repr__(self) -> str:
        return f"GrowingFiles({self.directory.name}, {self._phase.value}, {len(self._made)} tensors)"

    def made(self, tensors: Iterable[str]) -> None:
        """These may be read."""
        with self._changed:
            self._made.update(tensors)
            self._changed.notify_all()

    def complete(self, directory: Path) -> bool:
        """Whether the whole and proved files in `directory` are those that were made. If so, all may be read."""
        try:
            same = _inodes(directory) == self._inodes
        except OSError:
            return False
        with self._changed:
            if not same or self._phase is not _Phase.MAKING:
                return False
            self._phase, self.directory = _Phase.WHOLE, directory
            self._changed.notify_all()
        return True

    def drop(self) -> None:
        """Whoever waits gives up."""
        with self._changed:
            if self._phase is _Phase.MAKING:
                self._phase = _Phase.DROPPED
                self._changed.notify_all()

    def wait_for(self, tensors: Collection[str]) -> None:
        """Returns when these may be read. Raises GrowingFilesEnded."""
        self._wait(lambda: self._made.issuperset(tensors))

    def whole(self) -> Path:
        """Returns where the files lie when all are proved. Raises GrowingFilesEnded."""
        self._wait(lambda: False)
        return self.directory

    def _wait(self, made: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not _Phase.MAKING or made())
            if self._phase is _Phase.DROPPED:
                raise GrowingFilesEnded("the files were not finished")


def _inodes(directory: Path) -> Inodes:
    found = {}
    for path in [directory / CONFIG_FILE, *directory.glob("*.safetensors")]:
        state = path.stat()
        found[path.name] = (state.st_dev, state.st_ino)
    return found
