"""Large files of a local bucket that are used where they lie: a hard link in the cache instead of a copy.

Owns: a read lease on each such file, from before its first byte is read until `check` or `end`.
Always holds: a file is linked only if the system grants the lease. It does that while no process has the file open or mapped
for writing. A process that opens it later waits for the end of the lease, or for the system's time limit. So when `check`
passes, all reads of a linked file saw the same bytes. A rebuild holds what it reads, and keeps its result only after
`check_held`. A file that is replaced by a rename keeps its bytes under the link. A change after the lease shows in the
file's time, which the cache compares. An engine may read a linked file before it is digested: it has a copy of the bytes that
were digested, or `check` fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.snapshots.arc2.files import Making
from midstream.snapshots.layout import read_checkpoint
from midstream.snapshots.messages import shown
from midstream.snapshots.store.listing import open_regular
from midstream.snapshots.store.local import is_whole, noted_contents

#: Smaller files are copied.
LINK_BYTES_MIN = 16 * 2**20
#: Sent when a lease is broken. Ignored, unless somebody handles it.
_SIGNAL = signal.SIGURG
# Linux only.
_SET_SIGNAL, _SET_LEASE, _GET_LEASE = (
    getattr(fcntl, name, None) for name in ("F_SETSIG", "F_SETLEASE", "F_GETLEASE")
)


class Links:
    """For use from several threads.

    enabled: False copies every file, for engines that read a snapshot after it is staged."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled and _SET_LEASE is not None
        self._lock = threading.Lock()
        # By the path of the link.
        self._leases: dict[Path, int] = {}

    def __repr__(self) -> str:
        return f"<Links {sorted(path.name for path in self._leases)}>"

    def link(self, source: str, size: int, path: Path) -> bool:
        """Make `path` a hard link to the file `source`, in place of what is there. False: it has to be copied."""
        if not self.enabled or size < LINK_BYTES_MIN:
            return False
        with self._lock, contextlib.suppress(OSError):
            if path in self._leases:
                if path.exists():
                    return True
                # The partial directory was removed with the link.
                os.close(self._leases.pop(path))
            lease = _leased(source)
            try:
                path.unlink(missing_ok=True)
                os.link(source, path)
                # The name may have been a symbolic link, or another file's by now.
                if os.path.samestat(os.fstat(lease), path.lstat()):
                    self._leases[path] = lease
                    return True
                path.unlink()
            except OSError:
                os.close(lease)
                raise
            os.close(lease)
        return False

    def hold(self, directory: Path) -> bool:
        """Hold the links in a whole directory, made earlier. False if one may have changed since, or cannot be held.

        Where nothing is linked, only the noted times are compared: the engine may have links of its own to the files."""
        try:
            for path in directory.iterdir() if self.enabled else ():
                if path.lstat().st_nlink > 1:
                    with self._lock:
                        if path not in self._leases:
                            self._leases[path] = _leased(str(path))
        except OSError:
            return False
        return is_whole(directory, None, [None] * len(noted_contents(directory)))

    def hold_whole(self, directory: Path, name: str) -> None:
        """As `hold`. Raises SnapshotCorrupt where that is False. name: of the snapshot whose files are there."""
        if not self.hold(directory):
            raise SnapshotCorrupt(f"the files of {shown(name)} changed since they were fetched")

    def moved(self, path: Path, to: Path) -> None:
        """A link has another name now."""
        with self._lock:
            if path in self._leases:
                self._leases[to] = self._leases.pop(path)

    def check(self) -> None:
        """Raise SnapshotCorrupt if a held file may have other bytes than before. All are let go."""
        try:
            self.check_held()
        finally:
            self.end()

    def check_held(self) -> None:
        """As `check`, but all stay held."""
        with self._lock:
            changed = next((path for path, lease in self._leases.items() if not _unbroken(lease)), None)
        if changed is not None:
            raise SnapshotCorrupt(f"{shown(changed.name)} was opened for writing while it was loaded")

    def end(self) -> None:
        """Who waits to write may do so."""
        with self._lock:
            leases, self._leases = self._leases, {}
        for lease in leases.values():
            os.close(lease)


def tell_of_links(making: Making, directory: Path, files: Mapping[str, Path]) -> None:
    """Have weights read that are linked and held, also before they are digested. If somebody writes to them, `check` says so.

    directory: is made, and has links to them. The caller removes it when the files are in their place. files: all of the
    snapshot, by name. If they are no checkpoint, or cannot be linked, `making` hears nothing.
    """
    with contextlib.suppress(OSError, SnapshotError):
        directory.mkdir()
        for name, path in files.items():
            os.link(path, directory / name)
        layouts = read_checkpoint(directory)[1]
        making.begun(directory)
        for layout in layouts.values():
            for tensor in layout.tensors:
                making.made(tensor)


def _leased(path: str) -> int:
    """An open file with a read lease. Raises OSError, also when someone may write to the file."""
    assert _SET_SIGNAL is not None
    assert _SET_LEASE is not None
    file = open_regular(path)
    try:
        fcntl.fcntl(file, _SET_SIGNAL, _SIGNAL)
        fcntl.fcntl(file, _SET_LEASE, fcntl.F_RDLCK)
    except OSError:
        os.close(file)
        raise
    return file


def _unbroken(lease: int) -> bool:
    assert _GET_LEASE is not None
    return fcntl.fcntl(lease, _GET_LEASE) == fcntl.F_RDLCK
