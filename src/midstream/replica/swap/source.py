"""Where a replica gets its snapshots: the swap driver's port, and its implementation over the local cache of the bucket.

Always holds: no method touches an engine.
"""

from __future__ import annotations

import abc
import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, SnapshotNotFinite
from midstream.core.types import Desired, Hint, SnapshotContent
from midstream.replica.swap.companions import Companions
from midstream.replica.swap.hints import Hints
from midstream.snapshots.adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS_FILE,
    CONFIG_BYTES_MAX,
    check_sizes,
    is_adapter,
    is_adapter_listing,
    read_adapter,
)
from midstream.snapshots.arc2.files import Making, weights_files
from midstream.snapshots.finite import check_finite
from midstream.snapshots.layout import (
    CONFIG_FILE,
    MAX_HEADER_BYTES,
    CheckpointSpec,
    FileLayout,
    read_checkpoint,
)
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import Listing, read_beginning
from midstream.snapshots.store.local import made_finite
from midstream.snapshots.store.verify import check_compatible, ties
from midstream.snapshots.tasks import finished
from midstream.snapshots.tied import check_tied

log = logging.getLogger(__name__)


class SnapshotSource(abc.ABC):
    """Where snapshots come from. Failures are SnapshotError; any method may be cancelled at any await.

    chains: the files that are here, for what is no swap: they are received, given to other replicas, and put into the bucket.
    """

    chains: ChainFetcher

    async def blames_itself(self, path: Path) -> bool:
        """After `verify` of `path` has failed: whether files that were here before may be to blame. They are used no more."""
        return False

    @abc.abstractmethod
    async def fetch(
        self, desired: Desired, *, refetch: bool = False, making: Making | None = None
    ) -> Path | None:
        """A local directory with the snapshot's files, complete but not yet verified. None: the fetched files have to be
        applied to a parent's first (`rebuild`). refetch: from the bucket, also if they are here. making: may learn of the
        files before. Raises SnapshotError."""

    @abc.abstractmethod
    async def rebuild(self, desired: Desired, making: Making | None = None) -> Path:
        """After `fetch` returned None: the directory with the whole files. making: may learn of them before. Raises
        SnapshotError."""

    @abc.abstractmethod
    async def verify(self, path: Path, desired: Desired) -> None:
        """Raises SnapshotError unless the files at `path` are a whole snapshot that fits the served model, and all its numbers
        are finite."""

    async def check_unchanged(self) -> None:  # noqa: B027
        """Call it when the engine has its own copy of what `fetch` returned. Raises SnapshotError if the files may have changed
        since they were verified."""

    def of_policy(self, policy: str) -> SnapshotSource:
        """The source of one policy's snapshots, which keeps files of its own. Raises OSError."""
        raise NotImplementedError(f"{type(self).__name__} has the deployment's own snapshots only")

    async def close(self) -> None:  # noqa: B027
        """Nothing of it is in use any more. Its files stay."""

    async def remove_policy(self, policy: str) -> None:  # noqa: B027
        """Remove the files of a policy that was ended."""

    async def contents(self, desired: Desired) -> tuple[SnapshotContent, ...]:
        """The content of each link's files that `desired` does not state. Call it after `fetch` or `rebuild`."""
        return ()

    @abc.abstractmethod
    async def release(self, keep: Sequence[Desired]) -> None:
        """Allows local files to be deleted, except those of `keep` and of the chains they stand on. `keep` begins with the
        serving snapshot; the one to be loaded next may follow. Called after every attempt, also a failed one."""

    @abc.abstractmethod
    async def prefetch(self, hint: Hint) -> None:
        """Fetches files that will be needed soon, so that `fetch` finds them. Never runs during a `fetch`; it is cancelled
        before one begins. Raises SnapshotError."""


@dataclass(frozen=True)
class Files:
    """Where a snapshot's files come from. base_directory: those of the base weights, which are always here."""

    source: SnapshotSource
    hints: Hints
    base_directory: Path


class CachedSource(SnapshotSource):
    """base: the tensors and the configuration of the served model, which every snapshot must fit.

    companions: of the served model; None if nothing is said of a snapshot's own tokenizer.

    A LoRA adapter is a snapshot, too. A checkpoint without a configuration has the served model's: some trainers write weights
    alone.
    """

    def __init__(
        self, chains: ChainFetcher, base: CheckpointSpec, companions: Companions | None = None
    ) -> None:
        self.chains = chains
        self._base = base
        self._companions = companions
        chains.before = self._look_at

    async def _look_at(self, listing: Listing, scratch: Path) -> None:
        """Refuse an adapter that does not fit, by its configuration and its header, before the rest is fetched."""
        sizes = {file.name: file.size for file in listing.files}
        if not is_adapter_listing(sizes) or not set(ADAPTER_FILES) <= sizes.keys():
            return
        check_sizes(sizes)
        length = int.from_bytes(await read_beginning(listing, ADAPTER_WEIGHTS_FILE, 8), "little")
        header = await read_beginning(listing, ADAPTER_WEIGHTS_FILE, 8 + min(length, MAX_HEADER_BYTES))
        config = await read_beginning(listing, ADAPTER_CONFIG_FILE, CONFIG_BYTES_MAX)

        def look() -> None:
            (scratch / ADAPTER_CONFIG_FILE).write_bytes(config)
            with (scratch / ADAPTER_WEIGHTS_FILE).open("wb") as file:
                file.write(header)
                # The rest is a hole: only what the header says of it is looked at.
                file.truncate(sizes[ADAPTER_WEIGHTS_FILE])
            read_adapter(scratch, self._base)

        await finished(look)

    async def blames_itself(self, path: Path) -> bool:
        found = self.chains.found_here
        if found is None or found == path:
            return found is not None
        # Deltas say nothing of what they do not change.
        try:
            await _check_finite(found, await asyncio.to_thread(weights_files, found))
        except SnapshotError as error:
            log.warning("%s in this snapshot cache, of which another was made: %s", found.name, error)
            await self.chains.distrust(found)
            return True
        return False

    async def fetch(
        self, desired: Desired, *, refetch: bool = False, making: Making | None = None
    ) -> Path | None:
        return await self.chains.fetch(desired.files, refetch=refetch, making=making)

    async def rebuild(self, desired: Desired, making: Making | None = None) -> Path:
        return await self.chains.rebuild(desired.files, making)

    async def verify(self, path: Path, desired: Desired) -> None:
        try:
            if self._companions is not None:
                await asyncio.to_thread(self._companions.look, desired.snapshot, path)
            await self._verify(path, frozenset(desired.ignore_config))
        except (SnapshotCorrupt, SnapshotMissing, SnapshotNotFinite):
            # The local copy may be bad, so the next attempt takes it from the bucket.
            await self.chains.distrust(path)
            raise

    async def _verify(self, path: Path, ignore_config: frozenset[str]) -> None:
        """The headers first: they tell without reading the weights."""
        if is_adapter(path):
            await asyncio.to_thread(read_adapter, path, self._base)
            files = await asyncio.to_thread(weights_files, path)
        else:
            await asyncio.to_thread(self._with_config, path)
            spec, files = await asyncio.to_thread(read_checkpoint, path)
            check_compatible(self._base, spec, ignore_config)
            if ties(self._base, spec):
                await asyncio.to_thread(check_tied, path, spec)
        if await asyncio.to_thread(made_finite, path):
            # In the pass that read or wrote them.
            return
        await _check_finite(path, files)

    async def check_unchanged(self) -> None:
        self.chains.check_unchanged()

    def of_policy(self, policy: str) -> SnapshotSource:
        return CachedSource(self.chains.of_policy(policy), self._base, self._companions)

    async def close(self) -> None:
        self.chains.close()

    async def remove_policy(self, policy: str) -> None:
        await self.chains.remove_policy(policy)

    def _with_config(self, path: Path) -> None:
        config = path / CONFIG_FILE
        if not config.exists():
            written = path / f".{CONFIG_FILE}"
            written.write_text(json.dumps(self._base.config))
            written.replace(config)

    async def contents(self, desired: Desired) -> tuple[SnapshotContent, ...]:
        links = desired.files
        found = await self.chains.contents(links)
        return tuple(
            SnapshotContent(snapshot=link.snapshot, fingerprint=link.fingerprint, files=content)
            for link, content in zip(links, found, strict=False)
            if link.content is None
        )

    async def release(self, keep: Sequence[Desired]) -> None:
        await self.chains.release([desired.files for desired in keep if desired.files])

    async def prefetch(self, hint: Hint) -> None:
        await self.chains.prefetch(hint.url, hint.files)


async def _check_finite(path: Path, files: Mapping[str, FileLayout]) -> None:
    stop = threading.Event()
    check = partial(check_finite, path, files, cancelled=stop.is_set)
    await finished(check, on_cancel=stop.set)
