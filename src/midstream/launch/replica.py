"""One replica process: the embedded engine, its files, and the HTTP app around them.

Owns: wiring concrete classes. Run as `python -m midstream.launch.replica` by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import uvloop

from midstream.engine.base import EngineDied
from midstream.engine.embedded.process import EmbeddedEngine
from midstream.errors import ConfigError, SnapshotError, SnapshotIncompatible
from midstream.launch.child import (
    STOP_GRACE_S,
    Announcer,
    Listening,
    ReplicaSpec,
    configure_logging,
    raise_file_limit,
    read_spec,
    stop_requested,
)
from midstream.names import ServedNames
from midstream.replica.admission import Door
from midstream.replica.chat import TextModel
from midstream.replica.replica import Replica
from midstream.replica.runner import SnapshotSource
from midstream.replica.server import ReplicaServer
from midstream.snapshots.cache import SnapshotCache
from midstream.snapshots.layout import CheckpointSpec
from midstream.snapshots.layout import read_spec as read_checkpoint
from midstream.snapshots.store import fetch_snapshot
from midstream.snapshots.verify import check_compatible
from midstream.types import Desired, Hint

logger = logging.getLogger(__name__)

CACHED_SNAPSHOTS = 1  # kept on disk besides the one that serves


class CachedSource(SnapshotSource):
    """Snapshots from a bucket through the local cache."""

    def __init__(self, cache: SnapshotCache, base: CheckpointSpec) -> None:
        self._cache = cache
        self._base = base

    async def fetch(self, desired: Desired) -> Path:
        assert desired.url is not None
        path = self._cache.path(desired.snapshot)
        await fetch_snapshot(desired.url, path, fingerprint=desired.fingerprint)
        return path

    async def rebuild(self, desired: Desired) -> Path:
        raise SnapshotIncompatible(f"{desired.snapshot} is incremental, which this server does not take")

    async def verify(self, path: Path, desired: Desired) -> None:
        spec = await asyncio.to_thread(read_checkpoint, path)
        check_compatible(self._base, spec, frozenset(desired.ignore_config))

    async def release(self, keep: Sequence[Desired]) -> None:
        await asyncio.to_thread(self._cache.prune, {desired.snapshot for desired in keep})

    async def prefetch(self, hint: Hint) -> None:
        logger.debug("nothing is fetched before %s is signalled", hint.snapshot)


async def serve(spec: ReplicaSpec, announce: Announcer) -> int:
    model_dir = Path(spec.model_dir)
    sock = socket.create_server((spec.host, spec.port), backlog=2048)
    replica = Replica(
        name=spec.name,
        engine=EmbeddedEngine(model_dir, spec.engine),
        text=TextModel.load(model_dir),
        requests_max=spec.engine.max_running + spec.engine.max_waiting,
        source=CachedSource(
            SnapshotCache(Path(spec.cache_dir), CACHED_SNAPSHOTS), read_checkpoint(model_dir)
        ),
        names=ServedNames(spec.model, spec.deployment),
        base_directory=model_dir,
    )
    server = ReplicaServer(replica, sock, spec.token)
    try:
        await server.start()
        await replica.start()
        gc.collect()
        gc.freeze()  # what is there now stays: no collection needs to look at it while streams wait
        announce(Listening(port=sock.getsockname()[1]))
        await stop_requested()
        replica.gate.set(Door.DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await replica.gate.drained()
    finally:
        await replica.close()
        await server.close()
    return 0


def main() -> int:
    announce = Announcer()
    spec = read_spec(ReplicaSpec)
    configure_logging(spec.name, spec.log_level)
    raise_file_limit()
    try:
        return uvloop.run(serve(spec, announce))
    except (ConfigError, SnapshotError, EngineDied, OSError) as error:
        announce(Listening(error=str(error)))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
