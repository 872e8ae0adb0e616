"""Makes the whole files of a chain on this machine: fetches what is missing, and rebuilds link after link.

Owns: one replica's cache while snapshots are fetched into it.
Always holds:
- The name of a whole directory has a digest of its chain, so no other content is taken for it.
- A rebuild starts at the newest link that has its whole files in the cache, else at the full snapshot.
- A link that cannot be applied to cached files is tried once more on files fetched again, which replace them. So a bad delta
  leaves the cached parent, or an equal copy of it.
- The snapshot that serves, and the files of the running attempt, are never evicted.
- If the ledger has the content of a link, other bytes are refused, and a cached copy of other bytes is not used.
- A link that is known by its content alone is compared by it, here and in the bucket. Its files may come from elsewhere
  (`received`, peers.py), before the bucket has them, or be what was rebuilt here (whole_files.py).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotIncompatible, SnapshotMissing
from midstream.core.types import Content, FileContent, SnapshotFiles
from midstream.snapshots.arc2.files import Making
from midstream.snapshots.content import by_content
from midstream.snapshots.identity import directory_name
from midstream.snapshots.messages import shown
from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.fetch import (
    PARTS_IN_FLIGHT,
    Progress,
    fetch_listed,
    partial_directory,
    prefetch_files,
    reserve_files,
)
from midstream.snapshots.store.kept import Sleep, kept_listing
from midstream.snapshots.store.links import Links
from midstream.snapshots.store.listing import Listing, list_snapshot
from midstream.snapshots.store.local import (
    directory_bytes,
    forget_listing,
    is_whole,
    made_finite,
    move_into_place,
    note_contents,
    noted_contents,
    temporary_directory,
    write_own_listing,
)
from midstream.snapshots.store.peers import PeerListing, Peers, open_held
from midstream.snapshots.store.received import ReceivedFiles
from midstream.snapshots.store.whole_files import WholeFiles
from midstream.snapshots.tasks import finished, together
from midstream.snapshots.trainer_deltas.records import Lineage

log = logging.getLogger(__name__)

#: Links of a chain that are listed or fetched in parallel.
LINKS_TOGETHER = 4
#: Snapshots that keep their early files over a release.
HINTS_KEPT = 4
#: Bad deltas that are remembered, so that they cost no second replay.
REFUTED_KEPT = 16

Chain = Sequence[SnapshotFiles]
T = TypeVar("T")


class ChainFetcher:
    """threads: of a rebuild; None for one per core. sleep: between two looks into the bucket.

    peers: have what was pushed.
    links: whether large files of a local bucket are linked. Their user asks `check_unchanged` when it has its own copy.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        threads: int | None = None,
        *,
        sleep: Sleep = asyncio.sleep,
        links: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self._cache = cache
        self._peers = peers or Peers()
        self._threads = threads
        self._sleep = sleep
        self._slots = asyncio.Semaphore(PARTS_IN_FLIGHT)
        self._links = Links(enabled=links)
        # The paths in use at the last release, and those of the attempt since then.
        self._in_use: frozenset[Path] = frozenset()
        self._attempting: frozenset[Path] = frozenset()
        # The chain that was fetched again. Its rebuild takes nothing from the cache.
        self._refetched: Chain = ()
        # Partial directories of early files, the latest last.
        self._hinted: list[Path] = []
        self._hinting = asyncio.Lock()
        # The full snapshot that the last `fetch` fetched. A delta that fails on it is bad.
        self._fresh: Path | None = None
        #: Whole files that the last `fetch` or `rebuild` found in the cache, and nobody has read since they were made.
        self.found_here: Path | None = None
        # Whole files that could not be made from files fetched again either, the latest last.
        self._refuted: list[Path] = []
        #: Looks at a full snapshot's files in the bucket before they are fetched, and may write into an empty directory.
        #: Raises SnapshotError, OSError.
        self.before: Callable[[Listing, Path], Awaitable[None]] | None = None
        self._received = ReceivedFiles(cache)
        self.whole_files = WholeFiles(cache)
        cache.users.keeping[self] = lambda: {
            *self._in_use,
            *self._attempting,
            *self._hinted,
            *self._received.directories,
            *self.whole_files.putting,
        }

    def close(self) -> None:
        """Nothing of it is in use any more."""
        self._links.end()
        self._received.close()
        self._cache.users.leave(self)

    async def remove_policy(self, policy: str) -> None:
        """Remove all files of an unused policy."""
        if (doomed := self._cache.set_policy_aside(policy)) is not None:
            await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)

    def of_policy(self, policy: str) -> ChainFetcher:
        """A fetcher with a cache of its own, inside this one's directory."""
        cache = self._cache.of_policy(policy)
        return ChainFetcher(cache, self._threads, sleep=self._sleep, links=self._links.enabled)

    def received(self, content: Content, directory: Path) -> None:
        """Whole files of this content came by another way than the bucket. The next `fetch` of a full snapshot with this
        content takes them, unless newer ones come before.

        directory: in the root of the cache, with a name of `temporary_directory`. It is the fetcher's from now on.
        """
        self._received.hold(content, directory)

    def forget_received(self, directory: Path) -> None:
        """Remove these files, unless a `fetch` has taken them already."""
        self._received.forget(directory)

    def open_held(self, fingerprint: str, name: str) -> tuple[int, FileContent] | None:
        """As peers.open_held, in this cache."""
        return open_held(self._cache.root, fingerprint, name)

    def meet(self, addresses: Sequence[str]) -> None:
        """Other replicas that may have what was pushed, from now on. A `fetch` that waits for it asks them, too."""
        self._peers.addresses = tuple(addresses)

    async def fetch(
        self,
        chain: Chain,
        progress: Progress | None = None,
        *,
        refetch: bool = False,
        making: Making | None = None,
    ) -> Path | None:
        """Fetch what `chain` needs. Returns the directory of its whole files, or None if `rebuild` has to make them.

        refetch: do not trust the cache. Its files stay until they are replaced. making: may learn of a full snapshot's files
        before they are digested. Raises SnapshotError.
        """
        if chain[0].compression is not None:
            raise SnapshotIncompatible(
                f"{chain[0].snapshot}: is incremental and stands on nothing; the first snapshot must be a full one"
            )
        self._refetched = tuple(chain) if refetch else ()
        self._links.end()
        start = await self._claim(chain, -1 if refetch else None)
        path = self._cache.whole(chain)
        if start == len(chain) - 1 and not await finished(self._links.hold, path):
            await self.distrust(path)
            start = await self._claim(chain)
        self.found_here = path if start == len(chain) - 1 else None
        if self.found_here is not None:
            # If they were seen to be finite, that was when they came.
            await asyncio.to_thread(made_finite, path)
            self._cache.touch(path)
            return path
        fetched = start < 0
        if refetch:
            await self._refetch_full(chain)
            start = 0
        elif start < 0 and await self._take_received(chain):
            start, fetched = 0, False
        if start < len(chain) - 1:
            await self._fetch_from(chain, start, progress, making if len(chain) == 1 else None)
        self._fresh = self._cache.whole(chain[:1]) if fetched else None
        return path if len(chain) == 1 else None

    async def rebuild(self, chain: Chain, making: Making | None = None) -> Path:
        """Make the whole files of `chain`, link after link. Raises SnapshotError that names the link at fault.

        making: learns of the last link.
        """
        refetch = self._refetched == tuple(chain)
        start = await self._claim(chain, 0 if refetch else None)
        found = self._cache.whole(chain[: max(start, 0) + 1])
        self.found_here = None if start < 0 or found == self._fresh else found
        try:
            await self._rebuild_from(chain, start, making)
        except SnapshotCorrupt as error:
            if making is not None:
                making.given_up()
            if start < 0 or found == self._fresh or self._cache.whole(chain) in self._refuted:
                raise
            log.warning("%s; once more from the full snapshot %s", error, chain[0].snapshot)
            await self._replay(chain, error)
            self.found_here = None
        return self._cache.whole(chain)

    def check_unchanged(self) -> None:
        """Raise SnapshotCorrupt if files that the last `fetch` returned may have changed since it began."""
        self._links.check()

    async def _take_received(self, chain: Chain) -> bool:
        """Whether the full snapshot was received, and is in its place now."""
        full, content = self._cache.whole(chain[:1]), chain[0].content
        if content is None:
            return False
        return await finished(self._received.take, content, full, self._kept(chain, -1), chain[0].snapshot)

    async def digest(self, chain: Chain) -> Content:
        """The content of the whole files of `chain`. Raises SnapshotMissing when they are not in the cache, SnapshotError."""
        if await finished(self._look_for_whole, chain) < len(chain) - 1:
            raise SnapshotMissing(
                f"{shown(chain[-1].snapshot)}: its whole files are not in this snapshot cache"
            )
        return await self.whole_files.digest(self._cache.whole(chain), chain[-1].snapshot)

    async def prefetch(self, url: str, names: Iterable[str]) -> None:
        """Fetch files that a later `fetch` will need. Raises SnapshotError."""
        partial = partial_directory(self._cache.root, url)
        self._hinted = [*(p for p in self._hinted if p != partial), partial][-HINTS_KEPT:]
        async with self._hinting:
            await prefetch_files(
                url, self._cache.root, names, slots=self._slots, make_room=self._make_room_for_hint
            )

    def _make_room_for_hint(self, needed: int) -> None:
        kept = self._in_use | self._attempting | set(self._hinted)
        self._cache.make_room(needed, kept, "files fetched early")

    async def contents(self, chain: Chain) -> tuple[Content, ...]:
        """The contents that the cached whole files of `chain` were made from, one for each link."""
        return await asyncio.to_thread(noted_contents, self._cache.whole(chain))

    async def distrust(self, path: Path) -> None:
        """The files at `path` are not those that were fetched or made. They stay, but are not used again."""
        await asyncio.to_thread(forget_listing, path)

    async def distrust_chain(self, chain: Chain) -> None:
        """As `distrust`, of the whole files of `chain` and of its beginnings."""
        for i in range(len(chain)):
            await asyncio.to_thread(self.whole_files.distrust, self._cache.whole(chain[: i + 1]))

    async def release(self, keep: Sequence[Chain]) -> None:
        """From now on only the chains of `keep` are in use: their whole files, or the files to make them from."""
        self._links.end()
        self._in_use = frozenset(await asyncio.to_thread(self._needed, keep))
        self._attempting = frozenset()
        await asyncio.to_thread(self._cache.prune, self._in_use | set(self._hinted))

    def _needed(self, keep: Sequence[Chain]) -> set[Path]:
        return {path for chain in keep for path in self._attempt(chain, self._newest_whole(chain))}

    def _attempt(self, chain: Chain, start: int) -> set[Path]:
        """The paths that making `chain` from its link `start` touches, without inner links. start: -1 for nothing cached."""
        links = chain[max(start, 0) + 1 :]
        return {
            self._cache.whole(chain),
            self._cache.whole(chain[: max(start, 0) + 1]),
            *(self._cache.delta(link) for link in links),
            *(partial_directory(self._cache.root, link.url) for link in (*links, *chain[:1])),
        }

    async def _claim(self, chain: Chain, start: int | None = None) -> int:
        """Keep what making `chain` touches. Returns the index of the newest link to start from, as `_newest_whole`.

        start: that index, where it is not to be looked for.
        """
        if start is None:
            # All of them, before one is looked at: it must not be evicted between the look and the claim.
            prefixes = range(len(chain))
            self._attempting = frozenset().union(*(self._attempt(chain[: i + 1], -1) for i in prefixes))
            start = await finished(self._look_for_whole, chain)
        self._attempting = frozenset(self._attempt(chain, start))
        return start

    def _look_for_whole(self, chain: Chain) -> int:
        """What was being evicted is gone by now, and what is kept by now is not evicted."""
        with self._cache.users.lock:
            self.whole_files.adopt(chain)
            return self._newest_whole(chain)

    def _newest_whole(self, chain: Chain) -> int:
        """Index of the newest link that has its whole files in the cache; -1 for none. Links of unknown content do not
        count."""
        for i in reversed(range(len(chain))):
            links = chain[: i + 1]
            own = _listed_as(chain[0]) if i == 0 else None
            contents = [link.content for link in links]
            if _known(links) and is_whole(self._cache.whole(links), own, contents):
                return i
        return -1

    async def _fetch_from(
        self, chain: Chain, start: int, progress: Progress | None = None, making: Making | None = None
    ) -> None:
        """Fetch the own files of the links after `start`, in parallel. start: -1 includes the full snapshot."""
        wanted = [(self._cache.whole(chain[:1]), chain[0])] if start < 0 else []
        wanted += [(self._cache.delta(link), link) for link in chain[max(start, 0) + 1 :]]
        found = await together((self._listed(path, link) for path, link in wanted), LINKS_TOGETHER)
        listed = [(path, *one) for (path, _), one in zip(wanted, found, strict=True) if one is not None]
        if start < 0 and listed and listed[0][0] == wanted[0][0]:
            await self._look_at(listed[0][1])
        await finished(self._make_room_for, chain, start, [listing for _, listing, _ in listed])
        done, total = [0] * len(listed), sum(listing.size for _, listing, _ in listed)

        def advance(i: int, count: int, _: int) -> None:
            done[i] = count
            if progress is not None:
                progress(sum(done), total)

        fetches = (
            self._fetch_of(listing)(path, partial(advance, i), content=content, making=making)
            for i, (path, listing, content) in enumerate(listed)
        )
        await together(fetches, LINKS_TOGETHER)

    async def _listed(self, path: Path, link: SnapshotFiles) -> tuple[Listing, Content | None] | None:
        """What the bucket has of `link`; None if `path` has it already."""
        whole = partial(is_whole, path, _listed_as(link), [link.content])
        if not _known([link]) or not await asyncio.to_thread(whole):
            return await self._in_bucket(link)
        self._cache.touch(path)
        return None

    async def _in_bucket(self, link: SnapshotFiles) -> tuple[Listing, Content | None]:
        """Its files in the bucket, and the content that they must have. What was pushed is waited for, unless it was here and
        failed its check: no replica brings such files to the bucket."""
        if by_content(link.fingerprint):
            refuted = await asyncio.to_thread(self._is_distrusted, link)
            return await kept_listing(link, self._sleep, waits=not refuted, elsewhere=self._peers.find)
        return await list_snapshot(link.url, link.fingerprint), link.content

    def _is_distrusted(self, link: SnapshotFiles) -> bool:
        """Whether these very files are here, and are not to be used."""
        path = self._cache.whole([link])
        return noted_contents(path) == (link.content,) and not is_whole(path, None, [link.content])

    def _make_room_for(self, chain: Chain, start: int, listed: Sequence[Listing]) -> None:
        partials = (partial_directory(self._cache.root, listing.url) for listing in listed)
        have = sum(directory_bytes(path) for path in partials if path.is_dir())
        needed = max(0, sum(listing.size for listing in listed) - have)

        def reserve() -> None:
            for listing in listed:
                reserve_files(self._cache.root, listing, self._links)

        self._cache.make_room(needed, self._kept(chain, start), chain[-1].snapshot, reserve=reserve)

    async def _look_at(self, listing: Listing) -> None:
        if self.before is None:
            return
        scratch = temporary_directory(self._cache.root)
        try:
            await finished(scratch.mkdir)
            await self.before(listing, scratch)
        except OSError as error:
            raise SnapshotError(
                f"{scratch.parent}: cannot be written to: {error.strerror or error}"
            ) from error
        finally:
            await finished(shutil.rmtree, scratch, True)

    def _kept(self, chain: Chain, start: int) -> frozenset[Path]:
        return self._in_use | self._attempt(chain, start)

    async def _replay(self, chain: Chain, cause: SnapshotError) -> None:
        """Fetch and rebuild all once more. Cached files are replaced when their successors are whole."""
        self._attempting |= self._attempt(chain, 0)
        # Nothing that was read until now is used.
        self._links.end()
        try:
            await self._refetch_full(chain)
            await self._rebuild_from(chain, 0)
        except SnapshotError as error:
            if str(error) == str(cause):
                if _known(chain):
                    self._refuted = [*self._refuted, self._cache.whole(chain)][-REFUTED_KEPT:]
                raise
            raise SnapshotCorrupt(f"{cause} (once more from {chain[0].snapshot}: {error})") from error

    def _fetch_of(self, listing: Listing) -> Callable[..., Coroutine[Any, Any, None]]:
        of_peer = isinstance(listing, PeerListing)
        fetch: Callable[..., Coroutine[Any, Any, None]] = self._peers.fetch if of_peer else fetch_listed
        return partial(fetch, listing, slots=self._slots, links=self._links)

    async def _refetch_full(self, chain: Chain) -> None:
        """Fetch the full snapshot beside its cached copy, which is replaced at the end. Drop the cached deltas."""
        for link in chain[1:]:
            await finished(self._cache.drop, self._cache.delta(link))
        full = self._cache.whole(chain[:1])
        listing, content = await self._in_bucket(chain[0])
        await self._look_at(listing)
        await finished(self._make_room_for, chain, -1, [listing])
        fresh = temporary_directory(self._cache.root)
        try:
            await self._fetch_of(listing)(fresh, content=content)
            await finished(move_into_place, fresh, full)
        finally:
            await finished(shutil.rmtree, fresh, True)

    async def _rebuild_from(self, chain: Chain, start: int, making: Making | None = None) -> None:
        await self._fetch_from(chain, start)
        inner: Path | None = None
        for i in range(max(start, 0) + 1, len(chain)):
            await self._apply(chain, i, making if i == len(chain) - 1 else None)
            # Only the last one is needed.
            if inner is not None and inner not in self._in_use:
                await finished(self._cache.drop, inner)
            inner = self._cache.whole(chain[: i + 1])
        for link in chain[1:]:
            await finished(self._cache.drop, self._cache.delta(link))

    async def _apply(self, chain: Chain, i: int, making: Making | None) -> None:
        """The whole files of link `i` from those of the link before."""
        parent, link, compression = self._cache.whole(chain[:i]), chain[i], chain[i].compression
        # Inner links count, too.
        self._attempting |= {parent, self._cache.whole(chain[: i + 1])}
        if compression is None:
            raise SnapshotIncompatible(f"{link.snapshot}: is a full snapshot and stands on nothing")
        size = await asyncio.to_thread(directory_bytes, parent)
        kept, what = self._kept(chain, i - 1), f"{link.snapshot}, rebuilt"
        self._cache.touch(parent)
        out = temporary_directory(self._cache.root)
        stop = threading.Event()
        lineage = Lineage(directory_name(chain[i - 1].url), directory_name(link.url))

        def apply() -> None:
            delta = self._cache.delta(link)
            self._links.hold_whole(parent, chain[i - 1].snapshot)
            self._links.hold_whole(delta, link.snapshot)
            finite = rebuild(
                parent,
                delta,
                out,
                compression,
                lineage=lineage,
                threads=self._threads,
                cancelled=stop.is_set,
                making=making,
            )
            # The checksums of some formats say nothing of tensors that did not change.
            self._links.check_held()
            note_contents(out, (*noted_contents(parent), *noted_contents(delta)))
            write_own_listing(out, finite=finite)
            move_into_place(out, self._cache.whole(chain[: i + 1]))

        try:
            await finished(partial(self._cache.make_room, size, kept, what, user=self))
            await finished(apply, on_cancel=stop.set)
        except SnapshotError as error:
            raise type(error)(f"{link.snapshot}, on {chain[i - 1].snapshot}: {error}") from error
        except OSError as error:
            raise SnapshotError(f"{link.snapshot}: cannot be rebuilt: {error.strerror or error}") from error
        finally:
            self._cache.wrote(self)
            await finished(shutil.rmtree, out, True)


def _known(chain: Chain) -> bool:
    """Whether it is said which files these are. A fingerprint by content needs the content beside it."""
    return all(
        link.content is not None if by_content(link.fingerprint) else link.fingerprint is not None
        for link in chain
    )


def _listed_as(link: SnapshotFiles) -> str | None:
    """The fingerprint that a listing of its files must have; None for any."""
    return None if by_content(link.fingerprint) else link.fingerprint
