"""The replicas' cache directories: held, taken over, and removed when they are not needed any more.

Owns: the lock of a cache directory, and every renaming and removal of one.
Always holds: only the holder of its lock renames or removes a cache directory, so never under the replica process that uses it.
The lock held is that of the directory that has the name now, not of one that had it before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import IO

from midstream.core.private import private_directory, private_file

logger = logging.getLogger(__name__)

LOCK = ".lock"
#: Begins the names of caches that are being removed.
GONE = ".gone-"


@contextlib.contextmanager
def held(cache_dir: Path) -> Iterator[None]:
    """Hold the directory; it is made if it does not exist. Raises BlockingIOError while another process holds it, and
    OSError."""
    while True:
        private_directory(cache_dir)
        try:
            lock = private_file(cache_dir / LOCK).open("w")
        except FileNotFoundError:
            # Another process removed it since.
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(lock, cache_dir / LOCK):
                yield
                return


def take_over(root: Path, name: str) -> Path:
    """The cache directory of that name below `root`. Raises OSError.

    If there is none, an unused one gets the name, whichever replica had it: files in a cache are found by their content. So
    there are never more caches than were used at once.
    """
    own = root / name
    if not own.is_dir():
        for other in sorted(_caches(root)):
            # An error: it is in use, or was taken or removed since.
            with contextlib.suppress(OSError):
                with held(other):
                    other.rename(own)
                break
    return private_directory(own)


def remove_caches(cache: Path, others: Set[str]) -> None:
    """Remove a replica's cache directory and those of its deployment's other numbers, except those of `others`.

    A directory that a process uses stays.
    """
    deployment = cache.name.rpartition("-")[0]
    doomed = [
        directory
        for directory in _caches(cache.parent)
        if directory.name.rpartition("-")[0] == deployment and directory.name not in others
    ]
    remove_all(_aside(doomed))


def set_strange_caches_aside(root: Path, wanted: Set[str]) -> list[Path]:
    """Rename the caches of deployments without any wanted replica: they ended while no server ran. Returns what to remove.

    A directory that a process uses stays.
    """
    deployments = {name.rpartition("-")[0] for name in wanted}
    _aside(d for d in _caches(root) if d.name.rpartition("-")[0] not in deployments)
    return list(root.glob(f"{GONE}*"))


def remove_all(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _caches(root: Path) -> list[Path]:
    """The cache directories: their names are [DEPLOYMENT-]replica-NUMBER."""
    return [
        directory
        for directory in root.glob("*replica-*")
        if directory.name.rpartition("-")[2].isdecimal() and not directory.name.startswith(GONE)
    ]


def _aside(directories: Iterable[Path]) -> list[Path]:
    """Rename those that no process uses. Returns their new names."""
    aside = []
    for directory in directories:
        gone = directory.parent / f"{GONE}{directory.name}-{secrets.token_hex(4)}"
        try:
            with held(directory):
                directory.rename(gone)
        except BlockingIOError:
            logger.info("%s stays: a process uses it", directory)
        except OSError as error:
            logger.warning("%s stays: %s", directory, error)
        else:
            aside.append(gone)
    return aside


def _is(file: IO[str], path: Path) -> bool:
    """True if the open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
