"""Whole files that are here and are to lie in the bucket as a full snapshot: digested, put there, and known again by content.

Owns: which rebuilt files were digested, and which files are being put into a bucket.
Always holds:
- What is put has the content that was asked for, byte for byte: files that changed on the disk since are refused.
- Rebuilt files that were digested stand for the full snapshot of that content. A chain that begins with it needs no fetch: it
  gets names of its own for these files (`adopt`), and the cache counts them once.
- Rebuilt files stay here while they are put, unless another user of the cache needs their room. So a put holds up no swap.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, SnapshotRefused
from midstream.core.types import Content, SnapshotFiles
from midstream.snapshots.content import content_fingerprint, file_content
from midstream.snapshots.identity import public_url, snapshot_url
from midstream.snapshots.layout import snapshot_files
from midstream.snapshots.messages import shown
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.kept import lacking_files, put_kept
from midstream.snapshots.store.local import (
    forget_listing,
    is_whole,
    move_into_place,
    note_contents,
    noted_contents,
    temporary_directory,
    write_own_listing,
)
from midstream.snapshots.store.upload import OnFile
from midstream.snapshots.tasks import finished

log = logging.getLogger(__name__)

#: Digests of rebuilt files that are remembered.
DIGESTS_KEPT = 4


class WholeFiles:
    """putting: whole files of full snapshots that are being put into a bucket; the cache keeps them."""

    def __init__(self, cache: SnapshotCache) -> None:
        self._cache = cache
        self.putting: list[Path] = []
        # What rebuilt files were made from, by the fingerprint of their own content. The latest is the last.
        self._made_of: dict[str, tuple[Content, ...]] = {}
        self._contents: dict[tuple[Content, ...], Content] = {}

    def __repr__(self) -> str:
        return f"<WholeFiles {len(self._made_of)} digested, {len(self.putting)} on their way>"

    async def digest(self, path: Path, snapshot: str) -> Content:
        """The content of the whole files at `path`. Raises SnapshotMissing when they leave meanwhile, SnapshotError."""
        stop = threading.Event()
        return await finished(self._digest, path, snapshot, stop, on_cancel=stop.set)

    def _digest(self, path: Path, snapshot: str, stop: threading.Event) -> Content:
        made_of = noted_contents(path)
        if (known := self._contents.get(made_of)) is not None:
            return known
        with self._cache.users.lending(path):
            try:
                names = snapshot_files(file.name for file in path.iterdir())
                found = []
                # One after the other, on one core: nobody waits for it, and the engine computes beside it.
                for name in sorted(names):
                    if stop.is_set():
                        raise SnapshotError(f"{shown(snapshot)}: is not digested, as that was given up")
                    found.append(file_content(path / name))
            except OSError as error:
                raise SnapshotMissing(
                    f"{shown(snapshot)}: its whole files left this snapshot cache"
                ) from error
            if not is_whole(path, None, made_of):
                raise SnapshotMissing(f"{shown(snapshot)}: its whole files left this snapshot cache")
        content = tuple(found)
        self._remember(content, made_of)
        return content

    def _remember(self, content: Content, made_of: tuple[Content, ...]) -> None:
        self._made_of[content_fingerprint(content)] = made_of
        self._contents[made_of] = content
        while len(self._made_of) > DIGESTS_KEPT:
            self._contents.pop(self._made_of.pop(next(iter(self._made_of))), None)

    def adopt(self, chain: Sequence[SnapshotFiles]) -> None:
        """Give the newest link of `chain` that is here under another chain its place under this one. Hold the cache's lock.

        chain: begins with a full snapshot. That may be one whose content rebuilt files have.
        """
        made_of = self._made_of.get(chain[0].fingerprint or "")
        for i in reversed(range(len(chain))) if made_of is not None else ():
            links = chain[: i + 1]
            contents = [link.content for link in links if link.content is not None]
            if len(contents) < len(links):
                continue
            place = self._cache.whole(links)
            if is_whole(place, None, contents):
                return
            assert made_of is not None
            found = self._cache.find_made_of((*made_of, *contents[1:]))
            if found is not None and self._linked(found, place, contents):
                log.info("%s is here already, from before it had full files", shown(links[-1].snapshot))
                return

    def _linked(self, path: Path, place: Path, contents: Sequence[Content]) -> bool:
        temporary = temporary_directory(self._cache.root)
        try:
            temporary.mkdir()
            for name in snapshot_files(file.name for file in path.iterdir()):
                os.link(path / name, temporary / name)
            note_contents(temporary, contents)
            write_own_listing(temporary)
            move_into_place(temporary, place)
        except OSError as error:
            log.warning("%s cannot be linked, and is fetched: %s", place.name, error.strerror or error)
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    async def keep(self, snapshot: str, bucket: str, content: Content) -> None:
        """Put the whole files of this content into `bucket` as `snapshot`, unless they are there. Durable on return.

        Raises SnapshotMissing when the cache does not have them any more, SnapshotRefused when other files are there,
        SnapshotError.
        """
        url = snapshot_url(bucket, snapshot)
        stop = threading.Event()

        def check(_: str) -> None:
            if stop.is_set():
                raise SnapshotError(f"{shown(snapshot)}: is not put into the bucket, as that was given up")

        # Once more if something came there meanwhile: maybe the same files, by another replica.
        for _ in range(2):
            if (lacking := await lacking_files(url, content)) is None:
                return
            if await finished(self._put, url, snapshot, content, lacking, check, on_cancel=stop.set):
                return
        raise SnapshotRefused(f"{public_url(url)}: is there already, and is no snapshot")

    def _put(
        self, url: str, snapshot: str, content: Content, lacking: Collection[str], on_file: OnFile
    ) -> bool:
        with contextlib.ExitStack() as stack:
            with self._cache.users.lock:
                path = self._cache.find_full(content)
                if path is not None:
                    self.putting.append(path)
                    stack.callback(self.putting.remove, path)
                else:
                    path = self._rebuilt(content)
                    if path is None:
                        raise SnapshotMissing(f"{shown(snapshot)}: its files are not in this snapshot cache")
                    stack.enter_context(self._cache.users.lending(path))
            try:
                return put_kept(url, path, content, lacking, on_file)
            except SnapshotCorrupt:
                self.distrust(path)
                raise

    def distrust(self, path: Path) -> None:
        """The whole files at `path` are not used any more, and their digest is forgotten."""
        content = self._contents.pop(noted_contents(path), None)
        if content is not None:
            self._made_of.pop(content_fingerprint(content), None)
        with contextlib.suppress(OSError):
            forget_listing(path)

    def _rebuilt(self, content: Content) -> Path | None:
        made_of = self._made_of.get(content_fingerprint(content))
        return None if made_of is None else self._cache.find_made_of(made_of)
