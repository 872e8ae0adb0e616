"""Where a replica gets its snapshots: the swap runner's port over the local cache of the bucket. No engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from midstream.errors import SnapshotError
from midstream.replica.runner import SnapshotSource
from midstream.snapshots.chain import ChainFetcher
from midstream.snapshots.layout import CheckpointSpec, read_spec
from midstream.snapshots.verify import check_compatible
from midstream.types import Desired, Hint, SnapshotContent


class CachedSource(SnapshotSource):
    """`base`: what the served model is made of; every snapshot must fit it."""

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
        except SnapshotError:  # perhaps it went bad here: the next attempt takes it from the bucket
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
