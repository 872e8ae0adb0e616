"""Copies of snapshot files in memory. A server loads them while streams stand still, and so waits for no disk.

Owns: one directory in the machine's memory file system. One replica uses it at a time: the one that holds the lock of its
cache directory.
Always holds: `put` returns a whole copy, byte for byte, or the directory that it was given. Files take at most a share of the
free memory. Copies of a process that died are gone when the next process of the same user begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.engine.base import StagingFailed
from midstream.engine.servers.switching import StagedFiles, check_alone
from midstream.engine.vllm.beside import CannotStage, StagedWeights, WorkerWeights
from midstream.snapshots.tasks import finished

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
SHARE = 0.5
CHUNK_BYTES = 16 * 2**20
PREFIX = "midstream-"
GONE = "gone-"
LOCK = ".lock"
MEMINFO = Path("/proc/meminfo")

_REMOVER = ThreadPoolExecutor(1, "unstaging")


class _Cancelled(Exception):
    """Nobody wants the copy any more."""


class Staging:
    """owner: the replica's cache directory. shm: a file system in memory. share: of its free space, for one snapshot."""

    def __init__(self, owner: Path, shm: Path = SHM, share: float = SHARE) -> None:
        digest = hashlib.sha256(f"{os.getuid()}:{owner.resolve()}".encode()).hexdigest()
        self._root = shm / f"{PREFIX}{digest[:24]}"
        self._shm = shm
        self._share = share
        self._numbers = itertools.count(1)
        # The descriptor that locks the directory, once there is one.
        self._lock: int | None = None
        self.close()
        _sweep(shm)

    async def put(self, directory: Path) -> Path:
        """A copy in memory of the regular files of `directory`, or `directory` itself when they do not fit.

        Raises OSError when they cannot be read, and when vLLM would load other files, too. Leaves nothing when cancelled.
        """
        check_alone(directory)
        target = self._root / str(next(self._numbers))
        cancelled = threading.Event()
        try:
            copied = await finished(self._copy, directory, target, cancelled, on_cancel=cancelled.set)
        except BaseException:
            # This includes cancellation.
            self.drop(target)
            raise
        return target if copied else directory

    def drop(self, path: Path) -> None:
        """Free a copy that `put` returned. Any other directory stays. Another thread frees the memory."""
        if path.parent != self._root:
            return
        gone = path.with_name(f"{GONE}{path.name}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(gone)
            _REMOVER.submit(shutil.rmtree, gone, ignore_errors=True)

    def close(self) -> None:
        """Free everything. `put` may follow."""
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _copy(self, directory: Path, target: Path, cancelled: threading.Event) -> bool:
        """Copy the directory. True if `target` is now a whole copy; if not, it does not exist."""
        files = snapshot_files(directory)
        if files is None:
            logger.warning("%s: not staged in memory, because a link leads out of it", directory)
            return False
        size, room = sum(file.stat().st_size for file in files.values()), self._room()
        if size > room:
            logger.info("%s: not staged in memory: %d bytes, and room for %d", directory, size, room)
            return False
        try:
            if self._lock is None:
                self._lock = _claim(self._root)
            target.mkdir()
        except OSError as error:
            logger.warning("%s: cannot be used, so vLLM reads snapshots from disk: %s", self._root, error)
            return False
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for name, file in files.items():
            with file.open("rb", buffering=0) as source:
                problem = _copy_file(source.fileno(), target / name, buffer, cancelled)
            if problem is not None:
                logger.warning("%s: not staged in memory: %s", directory, problem)
                self.drop(target)
                return False
        return True

    def _room(self) -> int:
        """The bytes that a snapshot may take."""
        try:
            free = os.statvfs(self._shm)
        except OSError:
            return 0
        return int(self._share * min(free.f_bavail * free.f_frsize, _available_memory()))


@dataclass(frozen=True)
class Staged(StagedFiles):
    """fast: where vLLM reads the files, if its workers do not have them already."""

    fast: Path
    weights: StagedWeights | None = None


class VllmStager:
    """One snapshot at a time, beside what serves: in the workers, or as a copy of its files.

    while_alive: raises EngineDied when the boot ends meanwhile. in_background: runs what nobody waits for.
    """

    def __init__(
        self,
        staging: Staging,
        while_alive: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
        in_background: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._staging = staging
        self._while_alive = while_alive
        self._in_background = in_background
        self._preparing: asyncio.Task[Staged] | None = None
        self.staged: Staged | None = None
        #: Of a server that has proved that its workers can stage.
        self.workers: WorkerWeights | None = None

    async def stage(self, snapshot: str, directory: Path, *, in_workers: bool = True) -> None:
        """Like Slot.stage. in_workers: these may be used."""
        self.drop()
        preparing = self._prepare(snapshot, directory, self.workers if in_workers else None)
        mine = self._preparing = asyncio.create_task(preparing, name=f"staging {snapshot}")
        try:
            await self._while_alive(asyncio.wait((mine,)))
            if self._preparing is not mine:
                raise StagingFailed(f"snapshot {snapshot!r} was given up while it was staged")
            self.staged, self._preparing = mine.result(), None
        except BaseException as error:
            # This includes cancellation. What was made nevertheless is freed.
            mine.cancel()
            await asyncio.wait((mine,))
            if not mine.cancelled() and mine.exception() is None:
                self._free(mine.result())
            if isinstance(error, OSError):
                raise StagingFailed(f"the snapshot's files cannot be read: {error}") from error
            raise

    def loaded(self, snapshot: str, directory: Path) -> None:
        """The server has these weights already, so no copy is made."""
        self.drop()
        self.staged = Staged(snapshot, directory, directory)

    def drop(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        if self.staged is not None:
            self._free(self.staged)
            self.staged = None

    async def rest(self) -> None:
        """Return when no worker loads weights. Raises StagingFailed."""
        if self.workers is not None:
            await self.workers.rest()

    async def _prepare(self, snapshot: str, directory: Path, workers: WorkerWeights | None) -> Staged:
        """Raises StagingFailed, OSError."""
        check_alone(directory)
        if workers is not None:
            weights = workers.next()
            try:
                await weights.load(directory)
                return Staged(snapshot, directory, directory, weights)
            except CannotStage as error:
                logger.warning("vLLM loads %s in place, while streams stand still: %s", snapshot, error)
                self._give_back(weights)
                await workers.rest()
            except BaseException:
                # This includes cancellation.
                self._give_back(weights)
                raise
        return Staged(snapshot, directory, await self._staging.put(directory))

    def _free(self, staged: Staged) -> None:
        self._staging.drop(staged.fast)
        if staged.weights is not None:
            self._give_back(staged.weights)

    def _give_back(self, weights: StagedWeights) -> None:
        self._in_background(weights.drop(), "vLLM's workers free weights")


def snapshot_files(directory: Path) -> dict[str, Path] | None:
    """The regular files of `directory` by name, links resolved; None when a link leads out of it. Raises OSError."""
    root = directory.resolve(strict=True)
    files = {}
    for entry in sorted(root.iterdir()):
        file = entry.resolve()
        if not file.is_relative_to(root):
            return None
        if file.is_file():
            files[entry.name] = file
    return files


def _claim(directory: Path) -> int:
    """Make `directory`, which no other user can enter, and lock it while this process lives. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_private(directory):
        raise PermissionError(f"{directory} belongs to another user")
    lock = _lock(directory, os.O_CREAT)
    if lock is None:
        raise BlockingIOError(f"{directory} is in use")
    return lock


def _is_private(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _lock(directory: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the lock; None while another process holds it. Raises OSError if there is no lock file."""
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If they differ, another process has swept the directory meanwhile.
        if os.path.samestat(os.fstat(lock), os.stat(directory / LOCK)):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _sweep(shm: Path) -> None:
    """Free the copies of this user's processes that have died. The system has released their locks."""
    for directory in shm.glob(f"{PREFIX}*"):
        # An error shows that the directory is gone, or not one of ours.
        with contextlib.suppress(OSError):
            if _is_private(directory) and (lock := _lock(directory)) is not None:
                logger.info("%s: left behind by a process that died; removing it", directory)
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _copy_file(source: int, target: Path, buffer: memoryview, cancelled: threading.Event) -> OSError | None:
    """Copy, and return the error if `target` could not be written. Raises OSError if the source cannot be read."""
    try:
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error
    try:
        while count := os.readv(source, [buffer]):
            if cancelled.is_set():
                raise _Cancelled
            written = 0
            while written < count:
                try:
                    written += os.write(out, buffer[written:count])
                except OSError as error:
                    # Usually ENOSPC: other processes write there, too.
                    return error
    finally:
        os.close(out)
    return None


def _available_memory() -> int:
    """Bytes of memory that are available without swapping; 0 if the system does not report them."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), flags=re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
