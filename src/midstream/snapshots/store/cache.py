"""The local cache of one replica: the snapshots it has fetched or rebuilt, within a bound.

It contains the caches of its policies, and one bound covers all of them.

Always holds:
- A directory appears whole, by a rename. Two contents have two directories, whatever their names.
- Directories that a user of the cache keeps are never removed. Of all others, the least recently used one is removed first.
- Room that was made for one user stays that user's: its files are written or reserved before another user can ask for room.
- The root belongs to one replica process. Opening it removes the leftovers of an interruption, in the caches of policies too.
  What they hold stays, as full snapshots do, for a policy of that name that asks for these very files.
- Files are not synced, since the bucket has them. So opening removes all if the machine was started since the last time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from midstream.core.errors import SnapshotError
from midstream.core.private import private_directory
from midstream.core.types import Content, SnapshotFiles
from midstream.snapshots.durable import boot_id
from midstream.snapshots.messages import shown
from midstream.snapshots.store.fetch import PARTIAL_PREFIX
from midstream.snapshots.store.local import (
    TEMPORARY_PREFIX,
    directory_bytes,
    is_whole,
    linked_files,
    noted_contents,
    temporary_directory,
)
from midstream.snapshots.store.spare import SPARE_PREFIX, keep_spare, take_spare

BOOT_FILE = ".boot"
#: The directory of the policies' caches.
POLICIES = ".policies"
#: Snapshots that stay besides those in use, if there is no bound in bytes.
OTHERS_KEPT = 1
#: And of policies.
POLICIES_KEPT = 64


@dataclass(frozen=True)
class _Entry:
    """size: in bytes."""

    path: Path
    size: int
    used_ns: int

    @property
    def spare(self) -> bool:
        return self.path.name.startswith(SPARE_PREFIX)


class Users:
    """The users that share the bound of a cache: what each keeps, and how many bytes each is writing beside the entries."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keeping: dict[object, Callable[[], Collection[Path]]] = {}
        self.writing: dict[object, int] = {}
        # Kept until somebody needs the room.
        self.lent: set[Path] = set()

    def kept(self) -> set[Path]:
        return {path for kept in tuple(self.keeping.values()) for path in kept()} | self.lent

    @contextlib.contextmanager
    def lending(self, path: Path) -> Iterator[None]:
        """`path` is read meanwhile, and may leave all the same."""
        with self.lock:
            self.lent.add(path)
        try:
            yield
        finally:
            with self.lock:
                self.lent.discard(path)

    def leave(self, user: object) -> None:
        self.keeping.pop(user, None)
        self.writing.pop(user, None)


class SnapshotCache:
    """bytes_max: of all entries, also during a fetch. None: what is in use and OTHERS_KEPT more. Raises OSError.

    around: the cache that contains this one and bounds it.
    """

    def __init__(
        self, root: Path, bytes_max: int | None = None, *, around: SnapshotCache | None = None
    ) -> None:
        self.root = root
        self._around = around
        self.bytes_max: int | None = bytes_max if around is None else around.bytes_max
        self.users: Users = Users() if around is None else around.users
        # Whether a weights file that leaves is kept for the next one.
        self._spares = False
        private_directory(root)
        now = boot_id()
        same_boot = now is not None and _noted_boot(root) == now
        for path in root.iterdir():
            if path.is_dir() and not (same_boot and _lasting(path)):
                self.drop(path)
        for directory in _directories(root / POLICIES):
            SnapshotCache(directory, around=self)
            if not _directories(directory):
                shutil.rmtree(directory, ignore_errors=True)
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

    def find_full(self, content: Content) -> Path | None:
        """The whole files of a full snapshot of this content, under whatever name. Reads no file but what each notes."""
        for path in _directories(self.root):
            if not path.name.startswith(".") and is_whole(path, None, [content]):
                return path
        return None

    def find_made_of(self, contents: tuple[Content, ...]) -> Path | None:
        """Whole files that were made from these, a full snapshot's and then deltas', under whatever name."""
        for path in _directories(self.root):
            made_of_them = not path.name.startswith(".") and noted_contents(path) == contents
            if made_of_them and is_whole(path, None, contents):
                return path
        return None

    def of_policy(self, policy: str) -> SnapshotCache:
        """The cache of one policy's snapshots."""
        return SnapshotCache(self._of_policy(policy), around=self)

    def set_policy_aside(self, policy: str) -> Path | None:
        """Take the policy's cache away, partial files too, once no user has it. Returns what is to be removed."""
        doomed = temporary_directory(self.root)
        try:
            self._of_policy(policy).rename(doomed)
        except FileNotFoundError:
            return None
        return doomed

    def _of_policy(self, policy: str) -> Path:
        return self.root / POLICIES / hashlib.sha256(policy.encode()).hexdigest()[:32]

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
            if not self._spares or path.name.startswith(SPARE_PREFIX) or not keep_spare(self.root, doomed):
                shutil.rmtree(doomed, ignore_errors=True)

    def take_spare(self, dest: Path) -> bool:
        """Move the weights of a snapshot that left to `dest`, to be written over. Whether there were any. From now on those
        that leave are kept for that."""
        with self.users.lock:
            self._spares = True
            return take_spare(self.root, dest)

    def make_room(
        self,
        needed: int,
        keep: Collection[Path],
        what: str,
        *,
        user: object = None,
        reserve: Callable[[], None] = lambda: None,
    ) -> None:
        """Make room for `needed` more bytes. Removes nothing of `keep`, nor what users keep.

        reserve: takes the room before anybody else asks for some. user: who writes these bytes beside the entries, until
        `wrote`, in place of those that it was writing. Raises SnapshotError that names `what`.
        """
        with self.users.lock:
            self._make_room(needed, keep, what, user)
            if user is not None:
                self.users.writing[user] = needed
            try:
                reserve()
            except SnapshotError:
                # The disk is full, maybe with what fetches that were given up had reserved.
                self.users.lent.clear()
                self._evict(0, keep)
                reserve()

    def wrote(self, user: object) -> None:
        self.users.writing.pop(user, None)

    def _make_room(self, needed: int, keep: Collection[Path], what: str, user: object) -> None:
        if self.bytes_max is None:
            return
        writing = self.users.writing.copy()
        others = sum(writing.values()) - writing.get(user, 0)
        used = self._evict(self.bytes_max - needed - others, keep)
        if used + needed + others > self.bytes_max and self.users.lent:
            self.users.lent.clear()
            used = self._evict(self.bytes_max - needed - others, keep)
        if used + needed + others > self.bytes_max:
            raise SnapshotError(
                f"{shown(what)}: {needed} bytes do not fit into the snapshot cache, which is bounded to {self.bytes_max} "
                f"and holds {used + others} that are in use; a larger replica.snapshot_cache is needed"
            )

    def prune(self, keep: Collection[Path]) -> None:
        """Remove the least recently used entries, but none of `keep` nor of what users keep, until the bound holds."""
        with self.users.lock:
            if self.bytes_max is not None:
                self._evict(self.bytes_max, keep)
                return
            kept = {*keep, *self.users.kept()}
            others = [entry for entry in self._entries() if entry.path not in kept and not entry.spare]
            own = [entry for entry in others if entry.path.parent == self._outer.root]
            of_policies = [entry for entry in others if entry.path.parent != self._outer.root]
            for entries, count in ((own, OTHERS_KEPT), (of_policies, POLICIES_KEPT)):
                for entry in entries[: max(0, len(entries) - count)]:
                    if entry.path not in self.users.kept():
                        self.drop(entry.path)

    def _evict(self, bytes_max: int, keep: Collection[Path]) -> int:
        """Like `prune`, down to `bytes_max`. Returns the bytes that are left."""
        entries = _counted_once(self._entries(), {*keep, *self.users.kept()})
        used = sum(entry.size for entry in entries)
        for entry in entries:
            if used <= bytes_max:
                break
            # Asked for each: a user may have begun to use an entry meanwhile.
            if entry.path not in keep and entry.path not in self.users.kept():
                self.drop(entry.path)
                used -= entry.size
        return used

    @property
    def _outer(self) -> SnapshotCache:
        return self if self._around is None else self._around._outer

    def _entries(self) -> list[_Entry]:
        """The entries of all caches that share the bound, the least recently used one first."""
        root = self._outer.root
        entries: list[_Entry] = []
        for directory in (root, *_directories(root / POLICIES)):
            for path in _directories(directory):
                if not path.name.startswith((TEMPORARY_PREFIX, POLICIES)):
                    with contextlib.suppress(FileNotFoundError):
                        entries.append(_Entry(path, directory_bytes(path), path.stat().st_mtime_ns))
        return sorted(entries, key=lambda entry: entry.used_ns)


def _counted_once(entries: Sequence[_Entry], kept: Collection[Path]) -> list[_Entry]:
    """Files that two entries have count for one of them: for one that stays, else for the one that goes last."""
    seen: set[tuple[int, int]] = set()
    shared: dict[Path, int] = {}
    for entry in sorted(entries, key=lambda entry: (entry.path in kept, entry.used_ns), reverse=True):
        linked = linked_files(entry.path)
        shared[entry.path] = sum(size for file, size in linked.items() if file in seen)
        seen.update(linked)
    return [replace(entry, size=entry.size - shared[entry.path]) for entry in entries]


def _directories(parent: Path) -> list[Path]:
    """The directories in `parent`, which may vanish meanwhile."""
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def entry_name(name: str, chain: Sequence[SnapshotFiles]) -> str:
    """A file name for the content of `chain`: the readable beginning of `name`, and a digest of name and content."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
    content = [(f.snapshot, f.url, f.fingerprint, f.compression) for f in chain]
    digest = hashlib.sha256(msgspec.json.encode([name, content])).hexdigest()
    return f"{readable}-{digest[:40]}"


def _lasting(path: Path) -> bool:
    return path.name.startswith((PARTIAL_PREFIX, POLICIES)) or not path.name.startswith(".")


def _noted_boot(root: Path) -> str | None:
    try:
        return (root / BOOT_FILE).read_text().strip()
    except (OSError, ValueError):
        # It was never noted, or a power cut took it.
        return None
