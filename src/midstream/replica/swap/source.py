"""Where a replica gets its snapshots: the swap driver's port, and its implementation over the local cache of the bucket.

Always holds: no method touches an engine.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.core.errors import SnapshotCorrupt, SnapshotMissing
from midstream.core.types import Desired, Hint, SnapshotContent
from midstream.replica.swap.hints import Hints
from midstream.snapshots.layout import CheckpointSpec, read_spec
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.verify import check_compatible


class SnapshotSource(abc.ABC):
    """Where snapshots come from. Failures are SnapshotError; any method may be cancelled at any await."""

    @abc.abstractmethod
    async def fetch(self, desired: Desired, *, anew: bool = False) -> Path | None:
        """A local directory with the snapshot's files, complete but not yet verified. None: the fetched files have to be
        applied to a parent's first (`rebuild`). anew: from the bucket, also if they are here. Raises SnapshotError."""

    @abc.abstractmethod
    async def rebuild(self, desired: Desired) -> Path:
        """After `fetch` returned None: the directory with the whole files. Raises SnapshotError."""

    @abc.abstractmethod
    async def verify(self, path: Path, desired: Desired) -> None:
        """Raises SnapshotError unless the files at `path` are a whole snapshot that fits the served model."""

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
    """base: the tensors and the configuration of the served model, which every snapshot must fit."""

    def __init__(self, chains: ChainFetcher, base: CheckpointSpec) -> None:
        self._chains = chains
        self._base = base

    async def fetch(self, desired: Desired, *, anew: bool = False) -> Path | None:
        return await self._chains.fetch(desired.files, anew=anew)

    async def rebuild(self, desired: Desired) -> Path:
        return await self._chains.rebuild(desired.files)

    async def verify(self, path: Path, desired: Desired) -> None:
        try:
            spec = await asyncio.to_thread(read_spec, path)
        except (SnapshotCorrupt, SnapshotMissing):
            # The local copy may be bad, so the next attempt takes it from the bucket.
            await self._chains.distrust(path)
            raise
        check_compatible(self._base, spec, frozenset(desired.ignore_config))

    async def contents(self, desired: Desired) -> tuple[SnapshotContent, ...]:
        links = desired.files
        found = await self._chains.contents(links)
        return tuple(
            SnapshotContent(snapshot=link.snapshot, fingerprint=link.fingerprint, files=content)
            for link, content in zip(links, found, strict=False)
            if link.content is None
        )

    async def release(self, keep: Sequence[Desired]) -> None:
        await self._chains.release([desired.files for desired in keep if desired.files])

    async def prefetch(self, hint: Hint) -> None:
        await self._chains.prefetch(hint.url, hint.files)
