"""One replica process: its engine, its files, and the HTTP app around them.

Owns: wiring concrete classes. Run as `python -m midstream.launch.replica` by the supervisor.
Always holds: one process at a time has a cache directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from midstream.engine.base import EngineDied
from midstream.errors import ConfigError, SnapshotError
from midstream.launch.caches import held
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
from midstream.launch.engines import make_engine, requests_max
from midstream.names import ServedNames
from midstream.private import UMASK
from midstream.replica.admission import Door
from midstream.replica.chat import TextModel
from midstream.replica.replica import Bounds, Replica
from midstream.replica.server import ReplicaServer
from midstream.replica.source import CachedSource
from midstream.snapshots.cache import SnapshotCache
from midstream.snapshots.chain import ChainFetcher
from midstream.snapshots.layout import read_spec as read_checkpoint

OTHER_ENDS_S = 2 * STOP_GRACE_S  # it finishes streams, then its engine ends


@contextlib.contextmanager
def alone(cache_dir: Path, wait_s: float = OTHER_ENDS_S) -> Iterator[None]:
    """Hold the cache directory, which belongs to one replica process: that of a server that was killed may still end.

    Raises ConfigError when it does not end within `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as holding:
        while True:
            try:
                holding.enter_context(held(cache_dir))
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{cache_dir}: another replica process uses it and does not end"
                    ) from error
                time.sleep(0.05)
        yield


async def serve(spec: ReplicaSpec, announce: Announcer) -> int:
    model_dir = Path(spec.model_dir)
    sock = socket.create_server((spec.host, spec.port), backlog=2048)
    replica = Replica(
        name=spec.name or f"{spec.host}:{sock.getsockname()[1]}",
        engine=make_engine(spec),
        text=TextModel.load(model_dir),
        bounds=Bounds(requests_max(spec), spec.session_idle_s, spec.pin_drain_s),
        source=CachedSource(
            ChainFetcher(
                SnapshotCache(Path(spec.cache_dir), spec.cache_bytes), threads=spec.engine.threads or None
            ),
            read_checkpoint(model_dir),
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
    configure_logging(spec.name or "replica", spec.log_level)
    raise_file_limit()
    os.umask(UMASK)
    try:
        with alone(Path(spec.cache_dir)):
            return uvloop.run(serve(spec, announce))
    except (ConfigError, SnapshotError, EngineDied, OSError) as error:
        announce(Listening(error=str(error)))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
