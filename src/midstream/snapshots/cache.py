"""Where a replica keeps the snapshots it has fetched or rebuilt, within how much room, and which of them go first.

Always holds: directories appear whole (by a rename), so whatever `whole` or `delta` finds has been complete once; two contents
have two directories, whatever they are called; what the caller keeps is never removed; what was used least recently
goes first. The root belongs to one replica process: opening a cache removes what is no use after an interruption, and
everything when the machine was started anew meanwhile, for then the disk may lack what was written last: files are not
synced, since what a power cut takes is in the bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midstream.errors import SnapshotError
from midstream.private import private_directory
from midstream.snapshots.durable import boot_id
from midstream.snapshots.fetch import PARTIAL_PREFIX, TEMPORARY_PREFIX
from midstream.snapshots.messages import shown
from midstream.snapshots.store import directory_bytes
from midstream.types import SnapshotFiles

BOOT_FILE = ".boot"
OTHERS_KEPT = 1  # without a bound in bytes: snapshots that stay besides those in use


@dataclass(frozen=True)
class _Entry:
    path: Path
    size: int  # bytes
    used_ns: int


class SnapshotCache:
    """`bytes_max`: how much all of it may take, also while a snapshot is being fetched; None: what is in use and one more."""

    def __init__(self, root: Path, bytes_max: int | None = None) -> None:
        self.root = root
        self.bytes_max = bytes_max
        private_directory(root)
        now = boot_id()
        same_boot = now is not None and _noted_boot(root) == now
        for path in root.iterdir():
            if path.is_dir() and not (same_boot and _lasting(path)):
                self.drop(path)
        (root / BOOT_FILE).write_text(now or "")  # last: what was not removed is not trusted next time either

    def __repr__(self) -> str:
        entries = self._entries()
        bound = "unbounded" if self.bytes_max is None else self.bytes_max
        size = sum(entry.size for entry in entries)
        return f"<SnapshotCache {self.root} entries={len(entries)} bytes={size} of {bound}>"

    def whole(self, chain: Sequence[SnapshotFiles]) -> Path:
        """Where the whole files are that `chain` (a full snapshot, then deltas) ends in; they need not be there."""
        return self.root / entry_name(chain[-1].snapshot, chain)

    def delta(self, link: SnapshotFiles) -> Path:
        """Where the own files of an incremental snapshot are; they need not be there."""
        return self.root / entry_name(f"delta-{link.snapshot}", [link])

    def touch(self, path: Path) -> None:
        """`path` is used now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)

    def drop(self, path: Path) -> None:
        """Remove one directory, if it is there."""
        # Renamed first: a removal cut short must not leave half a snapshot under its name, nor be in the way of the next.
        doomed = self.root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def make_room(self, needed: int, keep: Collection[Path], what: str) -> None:
        """Make room for `needed` bytes more, without removing any of `keep`. Raises SnapshotError that names `what`."""
        if self.bytes_max is None:
            return
        entries = self._entries()
        used = sum(entry.size for entry in entries)
        for entry in sorted(entries, key=lambda e: e.used_ns):
            if used + needed <= self.bytes_max:
                return
            if entry.path not in keep:
                self.drop(entry.path)
                used -= entry.size
        if used + needed > self.bytes_max:
            raise SnapshotError(
                f"{shown(what)}: {needed} bytes do not fit into the snapshot cache, which is bounded to {self.bytes_max} "
                f"and holds {used} that are in use; a larger snapshot_cache is needed"
            )

    def prune(self, keep: Collection[Path]) -> None:
        """Remove what is over the bound, `keep` excepted: the least recently used first."""
        others = sorted(
            (e for e in self._entries() if e.path not in keep), key=lambda e: e.used_ns, reverse=True
        )
        if self.bytes_max is None:
            for entry in others[OTHERS_KEPT:]:
                self.drop(entry.path)
            return
        used = sum(entry.size for entry in self._entries())
        while others and used > self.bytes_max:
            entry = others.pop()
            self.drop(entry.path)
            used -= entry.size

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in self.root.iterdir():
            if path.is_dir() and not path.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_Entry(path, directory_bytes(path), path.stat().st_mtime_ns))
        return entries


def entry_name(name: str, chain: Sequence[SnapshotFiles]) -> str:
    """A file name for the content of `chain`: the readable beginning of `name`, and a digest of the whole content."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
    content = [(f.snapshot, f.url, f.fingerprint, f.compression) for f in chain]
    digest = hashlib.sha256(msgspec.json.encode([name, content])).hexdigest()
    return f"{readable}-{digest[:40]}"


def _lasting(path: Path) -> bool:
    return path.name.startswith(PARTIAL_PREFIX) or not path.name.startswith(".")


def _noted_boot(root: Path) -> str | None:
    try:
        return (root / BOOT_FILE).read_text().strip()
    except (OSError, ValueError):  # never noted, or a power cut took it
        return None
