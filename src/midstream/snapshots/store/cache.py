"""The local cache of one replica: the snapshots it has fetched or rebuilt, within a bound.

Always holds:
- A directory appears whole, by a rename. Two contents have two directories, whatever their names.
- Directories that the caller keeps are never removed. The least recently used directory goes first.
- The root belongs to one replica process. Opening it removes the leftovers of an interruption.
- Files are not synced, since the bucket has them. So opening removes all if the machine was started since the last time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midstream.core.errors import SnapshotError
from midstream.core.private import private_directory
from midstream.core.types import SnapshotFiles
from midstream.snapshots.durable import boot_id
from midstream.snapshots.messages import shown
from midstream.snapshots.store.fetch import PARTIAL_PREFIX
from midstream.snapshots.store.local import TEMPORARY_PREFIX, directory_bytes, temporary_directory

BOOT_FILE = ".boot"
#: The directory of the policies' caches.
POLICIES = ".policies"
#: Snapshots that stay besides those in use, if there is no bound in bytes.
OTHERS_KEPT = 1


@dataclass(frozen=True)
class _Entry:
    """size: in bytes."""

    path: Path
    size: int
    used_ns: int


class SnapshotCache:
    """bytes_max: of all entries, also during a fetch. None: what is in use and OTHERS_KEPT more. Raises OSError."""

    def __init__(self, root: Path, bytes_max: int | None = None) -> None:
        self.root = root
        self.bytes_max = bytes_max
        private_directory(root)
        now = boot_id()
        same_boot = now is not None and _noted_boot(root) == now
        for path in root.iterdir():
            if path.is_dir() and not (same_boot and _lasting(path)):
                self.drop(path)
        # The last step: after an interruption, the next start removes the rest.
        (root / BOOT_FILE).write_text(now or "")

    def __repr__(self) -> str:
        entries = self._entries()
        bound = "unbounded" if self.bytes_max is None else self.bytes_max
        size = sum(entry.size for entry in entries)
        return f"<SnapshotCache {self.root} entries={len(entries)} bytes={size} of {bound}>"

    def whole(self, chain: Sequence[SnapshotFiles]) -> Path:
        """The path for the whole files of `chain`, a full snapshot and then deltas. Nothing need be there."""
        return self.root / entry_name(chain[-1].snapshot, chain)

    def delta(self, link: SnapshotFiles) -> Path:
        """The path for the own files of a delta. Nothing need be there."""
        return self.root / entry_name(f"delta-{link.snapshot}", [link])

    def of_policy(self, policy: str) -> SnapshotCache:
        """The cache of one policy's snapshots. It is removed when this one is opened again."""
        return SnapshotCache(self.root / POLICIES / hashlib.sha256(policy.encode()).hexdigest()[:32])

    def touch(self, path: Path) -> None:
        """Note that `path` is used now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)

    def drop(self, path: Path) -> None:
        """Remove one directory, if it is there."""
        # The rename comes first, so that an interrupted removal leaves no half snapshot under its name.
        doomed = temporary_directory(self.root)
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def make_room(self, needed: int, keep: Collection[Path], what: str) -> None:
        """Make room for `needed` more bytes. Removes nothing of `keep`. Raises SnapshotError that names `what`."""
        if self.bytes_max is None:
            return
        used = self._evict(self.bytes_max - needed, keep)
        if used + needed > self.bytes_max:
            raise SnapshotError(
                f"{shown(what)}: {needed} bytes do not fit into the snapshot cache, which is bounded to {self.bytes_max} "
                f"and holds {used} that are in use; a larger snapshot_cache is needed"
            )

    def prune(self, keep: Collection[Path]) -> None:
        """Remove the least recently used entries, but none of `keep`, until the bound holds."""
        if self.bytes_max is not None:
            self._evict(self.bytes_max, keep)
            return
        others = [entry for entry in self._entries() if entry.path not in keep]
        for entry in others[: max(0, len(others) - OTHERS_KEPT)]:
            self.drop(entry.path)

    def _evict(self, bytes_max: int, keep: Collection[Path]) -> int:
        """As `prune`, down to `bytes_max`. Returns the bytes that are left."""
        entries = self._entries()
        used = sum(entry.size for entry in entries)
        for entry in entries:
            if used <= bytes_max:
                break
            if entry.path not in keep:
                self.drop(entry.path)
                used -= entry.size
        return used

    def _entries(self) -> list[_Entry]:
        """The least recently used entry first."""
        entries = []
        for path in self.root.iterdir():
            if path.is_dir() and not path.name.startswith((TEMPORARY_PREFIX, POLICIES)):
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_Entry(path, directory_bytes(path), path.stat().st_mtime_ns))
        return sorted(entries, key=lambda entry: entry.used_ns)


def entry_name(name: str, chain: Sequence[SnapshotFiles]) -> str:
    """A file name for the content of `chain`: the readable beginning of `name`, and a digest of name and content."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
    content = [(f.snapshot, f.url, f.fingerprint, f.compression) for f in chain]
    digest = hashlib.sha256(msgspec.json.encode([name, content])).hexdigest()
    return f"{readable}-{digest[:40]}"


def _lasting(path: Path) -> bool:
    return path.name.startswith(PARTIAL_PREFIX) or not path.name.startswith(".")


def _noted_boot(root: Path) -> str | None:
    try:
        return (root / BOOT_FILE).read_text().strip()
    except (OSError, ValueError):
        # It was never noted, or a power cut took it.
        return None
