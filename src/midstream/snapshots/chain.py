"""From what a snapshot stands on to its whole files on this machine: fetches what is missing, rebuilds link after link.

Owns: one replica's cache while snapshots are fetched into it.
Always holds:
- A whole directory is found under a digest of the whole chain it came from, so no other content is ever taken for it.
- A chain starts at its newest link whose whole files are here, else at the full snapshot; nothing else is ever a parent.
- A link that cannot be applied to files found in the cache is tried once more on files made anew from the bucket, which
  replace them; a delta that is bad itself leaves the cached parent as it was or replaces it by an equal one.
- What serves, and what the attempt in work needs, is never evicted.
- Where the ledger knows what a link's files are, other bytes are refused, and a cached copy of other bytes is not used.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import threading
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from midstream.errors import SnapshotCorrupt, SnapshotError, SnapshotIncompatible
from midstream.snapshots.cache import SnapshotCache
from midstream.snapshots.content import agree, note_contents, noted_contents
from midstream.snapshots.delta import rebuild
from midstream.snapshots.fetch import (
    PARTS_IN_FLIGHT,
    TEMPORARY_PREFIX,
    Progress,
    fetch_listed,
    move_into_place,
    partial_directory,
    prefetch_files,
)
from midstream.snapshots.store import (
    Listing,
    directory_bytes,
    forget_listing,
    is_whole,
    list_snapshot,
    write_own_listing,
)
from midstream.snapshots.tasks import all_of, finished
from midstream.types import Content, SnapshotFiles

log = logging.getLogger(__name__)

LINKS_TOGETHER = 4  # of a chain, listed or fetched side by side
HINTS_KEPT = 4  # snapshots whose early files outlive a release
REFUTED_KEPT = 16  # bad deltas that are remembered, so that they cost no second replay

Chain = Sequence[SnapshotFiles]
T = TypeVar("T")


class ChainFetcher:
    """`threads`: what a rebuild computes with; None: one per core."""

    def __init__(self, cache: SnapshotCache, threads: int | None = None) -> None:
        self._cache = cache
        self._threads = threads
        self._slots = asyncio.Semaphore(PARTS_IN_FLIGHT)
        self._in_use: frozenset[Path] = frozenset()  # as of the last release
        self._attempting: frozenset[Path] = frozenset()  # since then
        self._anew: Chain = ()  # fetched anew: its rebuild takes nothing from the cache either
        self._growing = 0  # bytes that a rebuild will write, beside the entries of the cache
        self._hinted: list[Path] = []  # partial directories, the latest last
        self._hinting = asyncio.Lock()
        self._fresh: Path | None = None  # fetched by the last `fetch`: a delta that fails on it is bad itself
        self._refuted: list[Path] = []  # what could not be made of files made anew either, the latest last

    async def fetch(
        self, chain: Chain, progress: Progress | None = None, *, anew: bool = False
    ) -> Path | None:
        """The whole files of `chain`, if they are here or in the bucket as they are; None: `rebuild` has to make them.

        All that a rebuild needs is then here. anew: what is in the cache is not trusted, but stays until it is replaced.
        Raises SnapshotError.
        """
        if chain[0].compression is not None:
            raise SnapshotIncompatible(
                f"{chain[0].snapshot}: is incremental and stands on nothing; the first snapshot must be a full one"
            )
        self._anew = tuple(chain) if anew else ()
        start = -1 if anew else await asyncio.to_thread(self._newest_whole, chain)
        self._attempting = frozenset(self._attempt(chain, start))
        if start == len(chain) - 1:
            path = self._cache.whole(chain)
            self._cache.touch(path)
            return path
        if anew:
            await self._fetch_full_anew(chain)
            start = 0
        await self._fetch_from(chain, start, progress)
        self._fresh = self._cache.whole(chain[:1]) if start < 0 or anew else None
        return self._cache.whole(chain) if len(chain) == 1 else None

    async def rebuild(self, chain: Chain) -> Path:
        """Make the whole files of `chain`, link after link. Raises SnapshotError that names the link at fault."""
        anew = self._anew == tuple(chain)
        start = 0 if anew else await asyncio.to_thread(self._newest_whole, chain)
        self._attempting = frozenset(self._attempt(chain, start))
        found = self._cache.whole(chain[: max(start, 0) + 1])
        try:
            await self._rebuild_from(chain, start)
        except SnapshotCorrupt as error:
            if start < 0 or found == self._fresh or self._cache.whole(chain) in self._refuted:
                raise
            log.warning("%s; once more from the full snapshot %s", error, chain[0].snapshot)
            await self._replay(chain, error)
        return self._cache.whole(chain)

    async def prefetch(self, url: str, names: Iterable[str]) -> None:
        """Fetch files early that a later `fetch` will want. Raises SnapshotError."""
        partial = partial_directory(self._cache.root, url)
        self._hinted = [*(p for p in self._hinted if p != partial), partial][-HINTS_KEPT:]
        async with self._hinting:
            await prefetch_files(
                url, self._cache.root, names, slots=self._slots, make_room=self._make_room_for_hint
            )

    def _make_room_for_hint(self, needed: int) -> None:
        kept = self._in_use | self._attempting | set(self._hinted)
        self._cache.make_room(needed + self._growing, kept, "files fetched early")

    async def contents(self, chain: Chain) -> tuple[Content, ...]:
        """What the whole files of `chain`, which are here, were made from: the files of each link."""
        return await asyncio.to_thread(noted_contents, self._cache.whole(chain))

    async def distrust(self, path: Path) -> None:
        """What is in the directory at `path` is not what was fetched or made: it is no longer found, but stays."""
        await asyncio.to_thread(forget_listing, path)

    async def release(self, keep: Sequence[Chain]) -> None:
        """Only what `keep` needs is in use from now on: the whole files, or what they will be made of."""
        self._in_use = frozenset(await asyncio.to_thread(self._needed, keep))
        self._attempting = frozenset()
        await asyncio.to_thread(self._cache.prune, self._in_use | set(self._hinted))

    def _needed(self, keep: Sequence[Chain]) -> set[Path]:
        return {path for chain in keep for path in self._attempt(chain, self._newest_whole(chain))}

    def _attempt(self, chain: Chain, start: int) -> set[Path]:
        """All that loading `chain` from its link `start` on (-1: from nothing) touches, inner links excepted."""
        links = chain[max(start, 0) + 1 :]
        return {
            self._cache.whole(chain),
            self._cache.whole(chain[: max(start, 0) + 1]),
            *(self._cache.delta(link) for link in links),
            *(partial_directory(self._cache.root, link.url) for link in (*links, *chain[:1])),
        }

    def _newest_whole(self, chain: Chain) -> int:
        """Index of the newest link whose whole files are here; -1: none. Links of unknown content do not count."""
        for i in reversed(range(len(chain))):
            if _known(chain[: i + 1]):
                own = chain[0].fingerprint if i == 0 else None
                if _holds(self._cache.whole(chain[: i + 1]), chain[: i + 1], own):
                    return i
        return -1

    async def _fetch_from(self, chain: Chain, start: int, progress: Progress | None = None) -> None:
        """Fetch the full snapshot (start -1) and the own files of the links after `start`, all together."""
        wanted = [(self._cache.whole(chain[:1]), chain[0])] if start < 0 else []
        wanted += [(self._cache.delta(link), link) for link in chain[max(start, 0) + 1 :]]
        found = await _together(self._listed(path, link) for path, link in wanted)
        listed = [
            (path, listing, link.content)
            for (path, link), listing in zip(wanted, found, strict=True)
            if listing is not None
        ]
        await asyncio.to_thread(self._make_room_for, chain, start, [listing for _, listing, _ in listed])
        meters = _Meters(len(listed), progress)
        await _together(
            fetch_listed(listing, path, meters.one(i, listing.size), slots=self._slots, content=content)
            for i, (path, listing, content) in enumerate(listed)
        )

    async def _listed(self, path: Path, link: SnapshotFiles) -> Listing | None:
        """What is in the bucket of what belongs at `path`; None: it is there already."""
        if link.fingerprint is None or not await asyncio.to_thread(_holds, path, [link], link.fingerprint):
            return await list_snapshot(link.url, link.fingerprint)
        self._cache.touch(path)
        return None

    def _make_room_for(self, chain: Chain, start: int, listed: Sequence[Listing]) -> None:
        partials = (partial_directory(self._cache.root, listing.url) for listing in listed)
        have = sum(directory_bytes(path) for path in partials if path.is_dir())
        needed = max(0, sum(listing.size for listing in listed) - have)
        self._cache.make_room(needed, self._kept(chain, start), chain[-1].snapshot)

    def _kept(self, chain: Chain, start: int) -> frozenset[Path]:
        return self._in_use | self._attempt(chain, start)

    async def _replay(self, chain: Chain, cause: SnapshotError) -> None:
        """Everything from the bucket again; what is in the cache is replaced as its successor is ready."""
        self._attempting |= self._attempt(chain, 0)
        try:
            await self._fetch_full_anew(chain)
            await self._rebuild_from(chain, 0)
        except SnapshotError as error:
            if str(error) == str(cause):
                if _known(chain):
                    self._refuted = [*self._refuted, self._cache.whole(chain)][-REFUTED_KEPT:]
                raise
            raise SnapshotCorrupt(f"{cause} (once more from {chain[0].snapshot}: {error})") from error

    async def _fetch_full_anew(self, chain: Chain) -> None:
        """Beside the old copy, which goes only when the new one is there. Deltas here are not trusted either."""
        for link in chain[1:]:
            await finished(self._cache.drop, self._cache.delta(link))
        full = self._cache.whole(chain[:1])
        listing = await list_snapshot(chain[0].url, chain[0].fingerprint)
        await asyncio.to_thread(self._make_room_for, chain, -1, [listing])
        fresh = self._cache.root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            await fetch_listed(listing, fresh, slots=self._slots, content=chain[0].content)
            await finished(move_into_place, fresh, full)
        finally:
            await finished(_remove, fresh)

    async def _rebuild_from(self, chain: Chain, start: int) -> None:
        await self._fetch_from(chain, start)
        made: list[Path] = []
        for i in range(max(start, 0) + 1, len(chain)):
            await self._apply(chain, i)
            made.append(self._cache.whole(chain[: i + 1]))
            for inner in made[:-1]:  # only the last is of use to anybody
                if inner not in self._in_use:
                    await finished(self._cache.drop, inner)
            del made[:-1]
        for link in chain[1:]:
            await finished(self._cache.drop, self._cache.delta(link))

    async def _apply(self, chain: Chain, i: int) -> None:
        """The whole files of link `i` from those of the link before."""
        parent, link = self._cache.whole(chain[:i]), chain[i]
        self._attempting |= {
            parent,
            self._cache.whole(chain[: i + 1]),
        }  # inner links too, from files fetched early
        if link.compression is None:
            raise SnapshotIncompatible(f"{link.snapshot}: is a full snapshot and stands on nothing")
        size = await asyncio.to_thread(directory_bytes, parent)
        await asyncio.to_thread(
            self._cache.make_room, size, self._kept(chain, i - 1), f"{link.snapshot}, rebuilt"
        )
        self._cache.touch(parent)
        out = self._cache.root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        stop = threading.Event()

        def apply() -> None:
            assert link.compression is not None
            rebuild(
                parent,
                self._cache.delta(link),
                out,
                link.compression,
                threads=self._threads,
                cancelled=stop.is_set,
            )
            made_from = (*noted_contents(parent), *noted_contents(self._cache.delta(link)))
            note_contents(out, made_from)
            write_own_listing(out)
            move_into_place(out, self._cache.whole(chain[: i + 1]))

        self._growing = size
        try:
            await finished(apply, on_cancel=stop.set)
        except SnapshotError as error:
            raise type(error)(f"{link.snapshot}, on {chain[i - 1].snapshot}: {error}") from error
        except OSError as error:
            raise SnapshotError(f"{link.snapshot}: cannot be rebuilt: {error.strerror or error}") from error
        finally:
            self._growing = 0
            await finished(_remove, out)


class _Meters:
    """One progress of several fetches."""

    def __init__(self, count: int, progress: Progress | None) -> None:
        self._progress = progress
        self._done = [0] * count
        self._total = [0] * count

    def one(self, i: int, total: int) -> Progress | None:
        if self._progress is None:
            return None
        self._total[i] = total

        def advance(done: int, _: int) -> None:
            assert self._progress is not None
            self._done[i] = done
            self._progress(sum(self._done), sum(self._total))

        return advance


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order, a few at a time: a chain can be long, and every file of a fetch is open. Raises the first error."""
    steps = list(work)
    slots = asyncio.Semaphore(LINKS_TOGETHER)

    async def one(step: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await step

    try:
        return await all_of(one(step) for step in steps)
    finally:
        for step in steps:
            step.close()


def _holds(path: Path, chain: Chain, fingerprint: str | None) -> bool:
    """Whether what was made of `chain`, with the very bytes that are asked for, is at `path`."""
    return agree([link.content for link in chain], noted_contents(path)) and is_whole(path, fingerprint)


def _known(chain: Chain) -> bool:
    return all(link.fingerprint is not None for link in chain)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
