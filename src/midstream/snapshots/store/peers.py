"""Pushed snapshots on other replicas: who has one, fetching it from there, and finding what others may have from here.

Always holds:
- A replica is asked for a snapshot by its content alone. Its bytes are digested while they come, as those of a bucket.
- What one replica gave stays when it is gone, and the next one gives the rest. Bytes that are not the expected ones are
  forgotten, and all of them come from one replica then.
- What others get are files of a whole directory that noted this content. No path comes from who asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from obstore.exceptions import BaseError

from midstream.core.errors import SnapshotCorrupt, SnapshotError
from midstream.core.transfer import FILES_PATH
from midstream.core.types import Content, FileContent, SnapshotFiles
from midstream.snapshots.arc2.files import Making
from midstream.snapshots.content import content_fingerprint
from midstream.snapshots.messages import shown
from midstream.snapshots.store.bucket import open_peer
from midstream.snapshots.store.fetch import Progress, fetch_listed, partial_directory
from midstream.snapshots.store.links import Links
from midstream.snapshots.store.listing import BucketFile, Listing, open_regular
from midstream.snapshots.store.local import is_whole, noted_contents

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerListing(Listing):
    """The files as one replica has them. address: of it. asked: it, and those that were asked before it."""

    address: str = ""
    asked: tuple[str, ...] = ()
    link: SnapshotFiles | None = field(default=None, repr=False)


class Peers:
    """The other replicas of a deployment. token: what they ask for. addresses: the ones to ask, the best first. They may change
    at any time, and count from the next look on."""

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.addresses: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<Peers {', '.join(self.addresses)}>"

    async def find(self, link: SnapshotFiles) -> PeerListing | None:
        """The first replica that has these files. None: none of them has, or their content is not known."""
        return await self._find(link)

    async def _find(self, link: SnapshotFiles, asked: tuple[str, ...] = ()) -> PeerListing | None:
        """asked: replicas to pass over."""
        if not link.content or link.fingerprint is None:
            return None
        files = sorted(link.content, key=lambda file: file.size, reverse=True)
        listed = tuple(BucketFile(file.name, file.size, etag(file), "") for file in files)
        while (address := next((one for one in self.addresses if one not in asked), None)) is not None:
            asked = (*asked, address)
            try:
                store = open_peer(f"{address.rstrip('/')}{FILES_PATH}/{link.fingerprint}", self._token)
                found = await store.head_async(listed[0].name)
            except (BaseError, FileNotFoundError) as error:
                log.debug("%s does not have %s: %s", address, shown(link.snapshot), error)
                continue
            if found["size"] == listed[0].size:
                log.info("%s comes from the replica at %s", shown(link.snapshot), address)
                return PeerListing(link.url, store, listed, address, asked, link)
        return None

    async def fetch(
        self,
        listing: PeerListing,
        dest: Path,
        progress: Progress | None = None,
        *,
        slots: asyncio.Semaphore | None = None,
        content: Content | None = None,
        links: Links | None = None,
        making: Making | None = None,
    ) -> None:
        """As fetch_listed. The other replicas are asked, too, before it raises."""
        again = True
        while True:
            mixed = await asyncio.to_thread(_has_parts, partial_directory(dest.parent, listing.url))
            try:
                await fetch_listed(
                    listing, dest, progress, slots=slots, content=content, links=links, making=making
                )
                return
            except SnapshotError as error:
                log.warning("the replica at %s: %s", listing.address, error)
                if mixed and again and isinstance(error, SnapshotCorrupt):
                    # Another one may have given the wrong bytes.
                    again = False
                    continue
                assert listing.link is not None
                found = await self._find(listing.link, listing.asked)
                if found is None:
                    raise
                listing, again = found, True


def _has_parts(partial: Path) -> bool:
    """Whether a fetch before has left something there."""
    return any(journal.stat().st_size for journal in partial.glob("*.done"))


def open_held(root: Path, fingerprint: str, name: str) -> tuple[int, FileContent] | None:
    """One file of the snapshot with this fingerprint, open, and what it has. None: it is not in the cache at `root`.

    Raises OSError.
    """
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        noted = noted_contents(path)
        if len(noted) != 1 or content_fingerprint(noted[0]) != fingerprint or not is_whole(path, None, noted):
            continue
        for file in noted[0]:
            if file.name == name:
                return _opened(path / file.name, file)
    return None


def _opened(path: Path, file: FileContent) -> tuple[int, FileContent] | None:
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        # It has just left the cache.
        return None
    if os.fstat(opened).st_size == file.size:
        return opened, file
    os.close(opened)
    return None


def etag(file: FileContent) -> str:
    """Two replicas that have the same file give the same tag."""
    return f'"{file.digest}"'
