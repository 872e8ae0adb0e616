"""What a power cut leaves of files: making them last, and knowing that there may have been one.

Always holds: when `sync_tree` and `sync_directory` return, what they were given survives a power cut, as far as the file system
promises it at all.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOT_OFFERED = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
)  # by some network file systems, for directories above all


def boot_id() -> str | None:
    """Of the time since this machine was started; None: not known, so a power cut since any moment cannot be ruled out."""
    try:
        return _KERNEL_BOOT_ID.read_text().strip() or None
    except OSError:  # no Linux
        return None


def sync_tree(directory: Path) -> None:
    """Every file below `directory`, then the directories that name them. Raises OSError."""
    for at, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync(os.path.join(at, name))
        _sync(at)


def sync_directory(directory: Path) -> None:
    """The names in `directory`, not what they name. Raises OSError."""
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
