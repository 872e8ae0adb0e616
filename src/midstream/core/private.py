"""Directories and files of the server's own that no other user of the machine may read.

Always holds: when `private_directory` returns, this user owns the directory, and no other user can read or write it,
whatever the umask. The one exception is logged: a directory that root owns, and that this user was given and cannot change.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from midstream.core.errors import ConfigError

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
# The umask of processes that write only files of their own.
UMASK = 0o077
_OTHERS = 0o077
_ROOT = 0


def private_directory(directory: Path) -> Path:
    """Made if it is not there; tightened, with a log line, where others can read it.

    Raises ConfigError when it is somebody else's, OSError when it cannot be made.
    """
    made = not directory.exists()
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    _tighten(directory, DIRECTORY_MODE, quiet=made)
    return directory


def private_file(path: Path) -> Path:
    """Like private_directory, for a file, which is made empty if it is missing. Files that SQLite makes beside it get its
    mode."""
    with_it = [path.with_name(path.name + end) for end in ("-wal", "-shm")]
    made = not path.exists()
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    for file in (path, *with_it):
        if file.exists():
            _tighten(file, FILE_MODE, quiet=made)
    return path


def _tighten(path: Path, mode: int, *, quiet: bool) -> None:
    found = path.stat()
    if found.st_uid not in (os.getuid(), _ROOT):
        raise ConfigError(
            f"{path}: belongs to user {found.st_uid}, who could read and change what is in it; this server runs as user "
            f"{os.getuid()}: give it a directory of its own, or change the owner"
        )
    bits = stat.S_IMODE(found.st_mode)
    if not bits & _OTHERS:
        return
    try:
        path.chmod(mode)
    except PermissionError:
        logger.warning("%s: its mode is %04o, others may read it, and it cannot be changed", path, bits)
        return
    if not quiet:
        logger.warning(
            "%s: its mode was %04o; it is %04o now, so that no other user can read it", path, bits, mode
        )
