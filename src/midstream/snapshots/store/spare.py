"""The weights file of a snapshot that left the cache, kept for the next file of its size: its memory and its blocks are there.

Always holds: a cache has one spare file at most, and it is the first to go when room is needed. A file is given away only if no
process has it open or mapped, as the system says, and it has no other name. So no reader sees it change.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from midstream.snapshots.layout import WEIGHTS_FILE

try:
    import fcntl
except ImportError:  # pragma: no cover - on Windows
    fcntl = None  # type: ignore[assignment]

#: Begins the name of the directory that has the spare file.
SPARE_PREFIX = ".spare-"


def keep_spare(root: Path, directory: Path) -> bool:
    """Make the weights of `directory`, which lies in `root` under a name of its own, the spare file. Whether it is now.

    The directory is the caller's to remove if it is not.
    """
    weights = directory / WEIGHTS_FILE
    try:
        found = weights.lstat()
        # A file that its owner may not write to came from a bucket, which has lost its own name for it.
        if not stat.S_ISREG(found.st_mode) or not found.st_mode & stat.S_IWUSR or found.st_nlink != 1:
            return False
        for other in directory.iterdir():
            if other != weights:
                other.unlink()
        remove_spares(root)
        place = root / f"{SPARE_PREFIX}{directory.name.lstrip('.')}"
        directory.rename(place)
    except OSError:
        return False
    # The least recently used of all that the cache has.
    with contextlib.suppress(OSError):
        os.utime(place, (0, 0))
    return True


def take_spare(root: Path, dest: Path) -> bool:
    """Moves a spare file to `dest`, which no other process knows. Returns False if there was none that can be written to; then
    nothing is at `dest`."""
    for directory in _spares(root):
        with contextlib.suppress(OSError):
            os.rename(directory / WEIGHTS_FILE, dest)
            shutil.rmtree(directory, ignore_errors=True)
            if _is_free(dest):
                return True
        dest.unlink(missing_ok=True)
    return False


def remove_spares(root: Path) -> None:
    for directory in _spares(root):
        shutil.rmtree(directory, ignore_errors=True)


def _spares(root: Path) -> list[Path]:
    return list(root.glob(f"{SPARE_PREFIX}*"))


def _is_free(path: Path) -> bool:
    """Whether no process has the file open or mapped: only then the system grants a lease to write. Raises OSError."""
    if fcntl is None or not hasattr(fcntl, "F_SETLEASE") or path.stat().st_nlink != 1:
        return False
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            # Somebody has it, or the file system grants no leases.
            return False
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
