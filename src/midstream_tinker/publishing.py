"""Trained weights on their way to the replicas: into the bucket, signalled, served everywhere.

Always holds:
- One publication at a time goes to the deployment, in the order in which they were asked for, each with its caller's key.
  Adapters do not wait for one another, nor for publications.
- What goes wrong is `WorkFailed`, with the server's own words; nothing is left running when a call ends or is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import httpx

from midstream.client import SnapshotPublisher
from midstream.client.bucket import open_bucket as open_for_snapshots
from midstream.client.errors import NotReadyInTime, PublishError, SignalRefused, SnapshotFailed, Unanswered
from midstream.core.errors import ConfigError, MidstreamError, SnapshotError
from midstream.snapshots.adapter import ADAPTER_CONFIG_FILE
from midstream.snapshots.store.upload import list_directory
from midstream.snapshots.tasks import finished
from midstream_tinker.chains import Chains, remove_snapshot
from midstream_tinker.trainer.types import Category, WorkFailed

logger = logging.getLogger(__name__)


REQUEST_TIMEOUT_S = 30.0
# The time that the replicas have to load a snapshot.
READY_S = 600.0
FULL_EVERY = 20

T = TypeVar("T")
_FAILURES = (PublishError, MidstreamError, SnapshotError, ConfigError, OSError)


class Publish(Protocol):
    """Where trained weights go. Every call raises WorkFailed."""

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
            to.snapshots.signal(identity, retry_s=self._ready_s)
            to.snapshots.wait_until_ready(identity, self._ready_s)

        await self._do(api_key, signal, f"serving {identity!r}")

    async def _do(self, api_key: str | None, act: Callable[[SnapshotPublisher], T], what: str) -> T:
        """`act` in a thread, in its turn. Raises WorkFailed; a cancelled caller ends it at its next pause."""
        stop = threading.Event()

        def run() -> T:
            with self._publisher(api_key, stop) as publisher:
                return act(publisher)

        async with self._turn:
            return await self._in_thread(run, what, stop.set)

    async def _in_thread(
        self, act: Callable[[], T], what: str, on_cancel: Callable[[], None] | None = None
    ) -> T:
        """Raises WorkFailed."""
        try:
            return await finished(act, on_cancel=on_cancel)
        except _FAILURES as error:
            raise WorkFailed(f"{what} failed: {error}", _category(error)) from error
        except _Stopped as error:
            raise WorkFailed(f"{what} was given up: the server is stopping", "server") from error

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
