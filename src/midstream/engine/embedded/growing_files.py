"""A snapshot that is read while its files are still made or digested: which of its tensors may be read.

Always holds: a tensor may be read once the replica has named it, or once all files were proved. `whole` returns only then, so
nothing is computed with weights of which anything is unproved. Files at another place are the same only if they are the same
inodes. The files are open until that is decided: the system gives the number of an open inode to no other file.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

from midstream.snapshots.layout import CONFIG_FILE


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
        with ExitStack() as opened:
            # By name.
            self._states = {
                path.name: os.fstat(opened.enter_context(path.open("rb")).fileno())
                for path in _files(directory)
            }
            self._held = opened.pop_all()
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
        with self._changed:
            if self._phase is not _Phase.MAKING or not self._lies_in(directory):
                return False
            self.directory = directory
            self._end(_Phase.WHOLE)
        return True

    def drop(self) -> None:
        """Whoever waits gives up."""
        with self._changed:
            if self._phase is _Phase.MAKING:
                self._end(_Phase.DROPPED)

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

    def _end(self, phase: _Phase) -> None:
        self._phase = phase
        self._held.close()
        self._changed.notify_all()

    def _lies_in(self, directory: Path) -> bool:
        try:
            found = {path.name: path.stat() for path in _files(directory)}
        except OSError:
            return False
        return found.keys() == self._states.keys() and all(
            os.path.samestat(state, self._states[name]) for name, state in found.items()
        )


def _files(directory: Path) -> list[Path]:
    return [directory / CONFIG_FILE, *directory.glob("*.safetensors")]
