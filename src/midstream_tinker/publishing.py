"""Trained weights on their way to the replicas: into the bucket, signalled, served everywhere.

Always holds:
- One publication at a time goes to the deployment, in the order in which they were asked for, each with its caller's key.
  Adapters do not wait for one another, nor for publications.
- What goes wrong is `Failed`, with the server's own words; nothing is left running when a call ends or is cancelled.

Ephemeral snapshots that the bucket does not need any more.

Always holds: the files of the newest CHAINS chains stay, each a full snapshot and the deltas on it. Replicas start from the
newest one, and fall back on the one before. Only snapshots that this process published are ever removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
from obstore.exceptions import BaseError

from midstream.client import SnapshotPublisher
from midstream.client.bucket import open_bucket as open_for_snapshots
from midstream.client.errors import NotReadyInTime, PublishError, SignalRefused, SnapshotFailed, Unanswered
from midstream.core.errors import ConfigError, MidstreamError, SnapshotError
from midstream.snapshots.adapter import ADAPTER_CONFIG_FILE
from midstream.snapshots.content import MANIFEST_FILE
from midstream.snapshots.identity import parse_bucket, snapshot_url
from midstream.snapshots.store.bucket import describe, open_bucket
from midstream.snapshots.store.listing import has_manifest
from midstream.snapshots.store.upload import list_directory
from midstream.snapshots.tasks import finished
from midstream_tinker.trainer.types import Category, Failed

logger = logging.getLogger(__name__)

CHAINS = 2


class Chains:
    """What was published, by what stands on what. Pure."""

    def __init__(self, keep: int = CHAINS) -> None:
        self._keep = keep
        self._chains: list[list[str]] = []

    def published(self, identity: str, previous: str | None) -> list[str]:
        """`identity` serves, a delta on `previous` or, without one, a full snapshot; those that are of no use any more."""
        if previous is not None and self._chains:
            self._chains[-1].append(identity)
            return []
        self._chains.append([identity])
        old, self._chains = self._chains[: -self._keep], self._chains[-self._keep :]
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


REQUEST_TIMEOUT_S = 30.0
# The time that the replicas have to load a snapshot.
READY_S = 600.0
FULL_EVERY = 20

T = TypeVar("T")
_FAILURES = (PublishError, MidstreamError, SnapshotError, ConfigError, OSError)


class Publish(Protocol):
    """Where trained weights go. Every call raises Failed."""

    async def publish(self, identity: str, directory: Path, api_key: str | None) -> None:
        """The checkpoint in `directory` is served by every replica as `identity` when this returns.

        Of what was published before, the bucket keeps what replicas may need.
        """

    async def keep(self, identity: str, directory: Path) -> None:
        """The checkpoint is in the bucket, whole and synced, when this returns; nothing serves it."""

    async def serve(self, identity: str, api_key: str | None) -> None:
        """What was kept as `identity` is served by every replica when this returns."""

    async def put_adapter(self, identity: str, directory: Path) -> None:
        """The adapter is in the bucket, whole and synced, when this returns."""

    async def holds_adapter(self, identity: str) -> bool:
        """Whether `identity` in the bucket is an adapter."""

    async def remove(self, identity: str) -> None:
        """Its files leave the bucket. Never raises."""


class DeploymentPublisher:
    """The port over SnapshotPublisher. Made in the event loop it is used in.

    gateway_url: may be changed when the gateway moved. deployment: its full name. bucket: the deployment's. work_dir: what
    deltas are encoded against; it has room for two checkpoints. tls: for an https gateway.
    """

    def __init__(
        self,
        *,
        gateway_url: str,
        deployment: str,
        bucket: str,
        work_dir: Path,
        full_every: int = FULL_EVERY,
        ready_s: float = READY_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.gateway_url = gateway_url
        self._deployment = deployment
        self._bucket = bucket
        self._work_dir = work_dir
        self._full_every = full_every
        self._ready_s = ready_s
        self._tls = tls
        self._chains = Chains()
        self._turn = asyncio.Lock()

    async def publish(self, identity: str, directory: Path, api_key: str | None) -> None:
        def publish(to: SnapshotPublisher) -> None:
            try:
                done = to.publish(identity, directory, timeout_s=self._ready_s)
            except (SnapshotFailed, NotReadyInTime, SignalRefused):
                self._chains.uncertain(identity)
                raise
            for old in self._chains.published(identity, done.previous):
                remove_snapshot(self._bucket, old)

        await self._do(api_key, publish, f"serving {identity!r}")

    async def keep(self, identity: str, directory: Path) -> None:
        await self._do(None, lambda to: to.write_full(identity, directory), f"keeping {identity!r}")

    async def put_adapter(self, identity: str, directory: Path) -> None:
        def put() -> None:
            open_for_snapshots(self._bucket).put(identity, directory, overwrite=False)

        await self._in_thread(put, f"keeping {identity!r}")

    async def holds_adapter(self, identity: str) -> bool:
        def look() -> bool:
            return ADAPTER_CONFIG_FILE in list_directory(self._bucket, identity)[0]

        return await self._in_thread(look, f"looking for {identity!r}")

    async def remove(self, identity: str) -> None:
        await finished(remove_snapshot, self._bucket, identity)

    async def serve(self, identity: str, api_key: str | None) -> None:
        def signal(to: SnapshotPublisher) -> None:
            to.signal(identity, retry_s=self._ready_s)
            to.wait_until_ready(identity, self._ready_s)

        await self._do(api_key, signal, f"serving {identity!r}")

    async def _do(self, api_key: str | None, act: Callable[[SnapshotPublisher], T], what: str) -> T:
        """`act` in a thread, in its turn. Raises Failed; a cancelled caller ends it at its next pause."""
        stop = threading.Event()

        def run() -> T:
            with self._publisher(api_key, stop) as publisher:
                return act(publisher)

        async with self._turn:
            return await self._in_thread(run, what, stop.set)

    async def _in_thread(
        self, act: Callable[[], T], what: str, on_cancel: Callable[[], None] | None = None
    ) -> T:
        """Raises Failed."""
        try:
            return await finished(act, on_cancel=on_cancel)
        except _FAILURES as error:
            raise Failed(f"{what} failed: {error}", _category(error)) from error
        except _Stopped as error:
            raise Failed(f"{what} was given up: the server is stopping", "server") from error

    def _publisher(self, api_key: str | None, stop: threading.Event) -> SnapshotPublisher:
        def pause(seconds: float) -> None:
            if stop.wait(seconds):
                raise _Stopped

        # Without HTTPS no TLS context is set up, which takes a while.
        tls = self._tls or self.gateway_url.startswith("https:")
        return SnapshotPublisher(
            self.gateway_url,
            self._bucket,
            deployment=self._deployment,
            api_key=api_key,
            full_every=self._full_every,
            work_dir=self._work_dir,
            http=httpx.Client(verify=tls, timeout=REQUEST_TIMEOUT_S, trust_env=False),
            sleep=pause,
        )


class _Stopped(Exception):
    """Nobody wants the result any more."""


def _category(error: Exception) -> Category:
    """A refused signal is the caller's (their key, above all); weights that cannot be loaded may be anybody's."""
    if isinstance(error, SnapshotFailed):
        return "unknown"
    refused = isinstance(error, SignalRefused) and not isinstance(error, Unanswered)
    return "user" if refused else "server"
