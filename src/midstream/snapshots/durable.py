"""Makes files survive a power cut, and detects that there may have been one.

Always holds: what `sync_tree` and `sync_directory` have synced survives a power cut, as far as the file system promises it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Some network file systems offer no sync, above all of directories.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def boot_id() -> str | None:
    """Names the time since this machine was started. None if it is not known: then there may have been a power cut."""
    try:
        return _KERNEL_BOOT_ID.read_text().strip() or None
    except OSError:
        # This is not Linux.
        return None


def sync_tree(directory: Path) -> None:
    """Sync every file below `directory`, then the directories. Raises OSError."""
    for at, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(os.path.join(at, name))
        _sync(at)


def sync_file(path: Path) -> None:
    """Raises OSError."""
    _sync(str(path))


def sync_directory(directory: Path) -> None:
    """Sync the names in `directory`, not the files. Raises OSError."""
    _sync(str(directory))


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(file)
