"""Ephemeral snapshots that the bucket does not need any more.

Always holds: the files of the newest CHAINS chains stay, each a full snapshot and the deltas on it. Replicas start from the
newest one, and fall back on the one before. Only snapshots that this process published are ever removed.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from obstore.exceptions import BaseError

from midstream.core.errors import ConfigError, SnapshotError
from midstream.snapshots.content import MANIFEST_FILE
from midstream.snapshots.identity import parse_bucket, snapshot_url
from midstream.snapshots.store.bucket import describe, open_bucket
from midstream.snapshots.store.listing import has_manifest
from midstream.snapshots.store.upload import list_directory

logger = logging.getLogger(__name__)


CHAINS = 2


class Chains:
    """What was published, by what stands on what. Pure."""

    def __init__(self) -> None:
        self._chains: list[list[str]] = []

    def published(self, identity: str, previous: str | None) -> list[str]:
        """`identity` serves, a delta on `previous` or, without one, a full snapshot; those that are of no use any more."""
        if previous is not None and self._chains:
            self._chains[-1].append(identity)
            return []
        self._chains.append([identity])
        old, self._chains = self._chains[:-CHAINS], self._chains[-CHAINS:]
        return [identity for chain in old for identity in chain]

    def uncertain(self, identity: str) -> None:
        """`identity` may be in the bucket, and may yet serve: it goes together with the snapshot before it."""
        if not self._chains:
            self._chains.append([])
        self._chains[-1].append(identity)


def remove_snapshot(bucket: str, identity: str) -> None:
    """Its files in the bucket, of any kind. Never raises: what stays only takes room."""
    url = snapshot_url(bucket, identity)
    try:
        names, _ = list_directory(bucket, identity)
        manifest = [MANIFEST_FILE] if names and has_manifest(url) else []
        if names:
            open_bucket(url).delete([*names, *manifest])
        place = parse_bucket(url)
    except (
        BaseError,
        OSError,
        SnapshotError,
        ConfigError,
    ) as error:
        # A file that is not there is an OSError.
        logger.warning("the files of the old snapshot %s stay: %s", identity, describe(error))
        return
    if place.kind == "file":
        with contextlib.suppress(OSError):
            Path(place.path).rmdir()
