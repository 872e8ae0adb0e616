"""Where a replica keeps the snapshots it has fetched, and which of them it keeps.

Always holds: different identities have different directories; `prune` never removes an identity it was told
to keep; directories appear whole (fetch_snapshot renames them), so whatever `path` finds is complete. The
root belongs to one replica process: opening a cache removes what an interrupted fetch left there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from midstream.snapshots.store import TEMPORARY_PREFIX


class SnapshotCache:
    """`keep`: how many snapshots stay on disk besides those `prune` is told to keep, the newest first."""

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 0:
            raise ValueError(f"keep must be at least 0, got {keep}")
        self.root = root
        self.keep = keep
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<SnapshotCache {self.root} snapshots={len(self._directories())} keep={self.keep}>"

    def path(self, identity: str) -> Path:
        """The directory of `identity`, whether or not it has been fetched."""
        return self.root / directory_name(identity)

    def prune(self, keep: Iterable[str] = ()) -> None:
        """Remove all but the identities in `keep` and the `self.keep` newest of the others."""
        kept = {directory_name(identity) for identity in keep}
        others = [d for d in self._directories() if d.name not in kept]
        others.sort(key=lambda d: (d.stat().st_mtime_ns, d.name), reverse=True)
        for directory in others[self.keep :]:
            # Renamed first: a removal cut short must not leave half a snapshot under its name.
            doomed = directory.with_name(TEMPORARY_PREFIX + directory.name)
            directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _directories(self) -> list[Path]:
        return [d for d in self.root.iterdir() if d.is_dir() and not d.name.startswith(".")]


def directory_name(identity: str) -> str:
    """A file name for `identity`: its readable beginning, and a digest that tells it from every other."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", identity)[:40]
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable}-{digest[:40]}"
