"""The checkpoint that was published last, kept whole on the trainer's disk. The next delta is encoded against it.

Always holds:
- The server accepted `parent` under that identity and generation. It is written down only after the server took the signal. A
  publisher that dies in between remembers an older one, which the server no longer stands on.
- After the machine was restarted there is no parent: a power cut may have spoilt it, since its files are not synced to disk.
- One publisher uses a work directory at a time. Leftovers of a dead one are removed by the next.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from midstream.client.errors import PublishError
from midstream.snapshots.durable import boot_id

log = logging.getLogger(__name__)

STATE_FILE = "parent.json"
LOCK_FILE = "lock"
CHECKPOINT_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Parent:
    """The snapshot that the next delta may stand on. generation: the server's number for the signal; None when its answer had
    none. deltas: since the last full snapshot, this one included; 0 for a full one. directory: of its whole checkpoint."""

    identity: str
    generation: int | None
    deltas: int
    directory: Path


class WorkDirectory:
    """A directory for checkpoints, made when it is needed. Raises PublishError when another publisher uses `root`.

    root: kept between runs; None for a temporary directory that `close` removes. target: where snapshots go (server,
    deployment, bucket). A parent that was published to another target is not used.
    """

    def __init__(self, root: Path | None, target: str) -> None:
        self._root = root
        self._target = target
        self._remove: Callable[[], object] | None = None
        self._lock: IO[bytes] | None = None
        self._opened: Path | None = None
        self._parent: Parent | None = None

    @property
    def parent(self) -> Parent | None:
        """The snapshot that was published last, if it is known. Raises PublishError."""
        self._open()
        return self._parent

    def new_directory(self) -> Path:
        """An empty directory, for a checkpoint or a delta. Raises PublishError."""
        directory = self._open() / f"{CHECKPOINT_PREFIX}{secrets.token_hex(8)}"
        try:
            directory.mkdir()
        except OSError as error:
            raise PublishError(f"the work directory {directory.parent} cannot be used: {error}") from error
        return directory

    def keep(self, directory: Path, identity: str, generation: int | None, deltas: int) -> None:
        """`directory`, made by new_directory, is the parent from now on. The one before is removed.

        The snapshot is served whether or not this can be written down, so an error of the disk is only a warning.
        """
        before = self._parent
        state = {
            "target": self._target,
            "boot": boot_id(),
            "identity": identity,
            "generation": generation,
            "deltas": deltas,
            "directory": directory.name,
        }
        path = self._open() / STATE_FILE
        temporary = path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(state, indent=2))
            os.replace(temporary, path)
        except OSError as error:
            log.warning("a trainer started next will begin with a full snapshot: %s", error)
        self._parent = Parent(identity, generation, deltas, directory)
        if before is not None:
            shutil.rmtree(before.directory, ignore_errors=True)

    def forget(self) -> None:
        """Removes the parent, so that the next snapshot is a full one."""
        before, self._parent = self._parent, None
        (self._open() / STATE_FILE).unlink(missing_ok=True)
        if before is not None:
            shutil.rmtree(before.directory, ignore_errors=True)

    def close(self) -> None:
        """Gives up the lock, and removes a temporary directory. May be called twice."""
        self._opened = self._parent = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _open(self) -> Path:
        if self._opened is not None:
            return self._opened
        if self._root is None:
            self._opened = Path(tempfile.mkdtemp(prefix="midstream-publish-"))
            self._remove = weakref.finalize(self, shutil.rmtree, self._opened, ignore_errors=True)
            return self._opened
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            lock = (self._root / LOCK_FILE).open("ab")
        except OSError as error:
            raise PublishError(f"the work directory {self._root} cannot be used: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise PublishError(f"the work directory {self._root} is used by another publisher") from error
        self._lock = lock
        self._opened = self._root
        self._parent = self._read(self._root)
        for left in self._root.glob(f"{CHECKPOINT_PREFIX}*"):
            if self._parent is None or left != self._parent.directory:
                shutil.rmtree(left, ignore_errors=True)
        return self._root

    def _read(self, root: Path) -> Parent | None:
        try:
            state = json.loads((root / STATE_FILE).read_text())
            name = str(state["directory"])
            parent = Parent(str(state["identity"]), state["generation"], int(state["deltas"]), root / name)
        except (OSError, ValueError, KeyError, TypeError):
            # None was kept, or it cannot be read: the next snapshot is full.
            return None
        known = name.startswith(CHECKPOINT_PREFIX) and "/" not in name and parent.directory.is_dir()
        boot = boot_id()
        sound = boot is not None and state.get("boot") == boot
        return parent if known and sound and state.get("target") == self._target else None
