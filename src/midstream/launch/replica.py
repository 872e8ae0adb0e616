"""One replica process: its engine, its files, and the HTTP app around them.

Owns: wiring concrete classes. Run as `python -m midstream.launch.replica` by the supervisor.
Always holds: one process at a time has a cache directory, and a directory of records.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from midstream.core.config import parse_size
from midstream.core.errors import ConfigError
from midstream.core.private import UMASK
from midstream.core.served_names import ServedNames
from midstream.core.supervision import Listening
from midstream.engine.base import EngineDied
from midstream.http.channel import STOP_GRACE_S, StdioChannel, run_child
from midstream.http.ipc import StartedChild
from midstream.http.tls import server_tls
from midstream.launch.auditing import AuditorProcess
from midstream.launch.caches import held
from midstream.launch.engines import (
    make_engine,
    requests_max,
    residency,
)
from midstream.launch.specs import ReplicaSpec
from midstream.launch.tracing import tracer_of
from midstream.replica.audit import Audits
from midstream.replica.journal import Journal, records_url
from midstream.replica.policy import Bounds
from midstream.replica.record_files import RecordFiles
from midstream.replica.replica import Replica
from midstream.replica.server import ReplicaServer
from midstream.replica.swap.companions import Companions
from midstream.replica.swap.source import CachedSource
from midstream.replica.text.chat import TextModel
from midstream.snapshots.layout import read_spec as read_checkpoint
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.peers import Peers
from midstream.transfer.in_place import InPlaceReceiver
from midstream.transfer.process import GlooReceiver

log = logging.getLogger(__name__)

#: For another process that finishes streams, and for its engine to end then.
OTHER_ENDS_S = 2 * STOP_GRACE_S


@contextlib.contextmanager
def alone(directory: Path, wait_s: float = OTHER_ENDS_S) -> Iterator[None]:
    """Hold a directory that belongs to one replica process. Waits for that of a killed server to end.

    Raises ConfigError when it does not end within `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as holding:
        while True:
            try:
                holding.enter_context(held(directory))
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{directory}: another replica process uses it and does not end"
                    ) from error
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def held_directories(spec: ReplicaSpec) -> Iterator[None]:
    """Hold the directories of snapshots and of records. Raises ConfigError as `alone`."""
    os.umask(UMASK)
    with contextlib.ExitStack() as holding:
        holding.enter_context(alone(Path(spec.cache_dir)))
        if spec.records.bucket is not None:
            holding.enter_context(alone(Path(spec.records_dir)))
        yield


async def serve(spec: ReplicaSpec, channel: StdioChannel, begun: StartedChild | None = None) -> None:
    model_dir = Path(spec.model_dir)
    tls = server_tls("replica", spec.tls_cert, spec.tls_key)
    sock = socket.create_server((spec.host, spec.port), backlog=2048)
    own, cache = spec.settings, _cache(spec)
    base = read_checkpoint(model_dir)
    engine = make_engine(spec, begun)
    # An engine that cannot prove what it staged may read the files when it switches.
    chains = ChainFetcher(
        cache, threads=spec.engine.threads or None, links=engine.proves_staged, peers=Peers(spec.token)
    )
    replica = Replica(
        name=spec.name or f"{spec.host}:{sock.getsockname()[1]}",
        engine=engine,
        text=TextModel.load(model_dir),
        bounds=Bounds(
            requests_max(spec),
            spec.session_idle_s,
            own.pin_drain_s,
            residency(spec),
            own.resident_policies,
            kv_budget=own.kv_budget,
            kv_waiting_max=own.kv_waiting_max,
        ),
        source=CachedSource(chains, base, Companions(model_dir)),
        names=ServedNames(spec.model, spec.deployment),
        base_directory=model_dir,
    )
    if (weights := engine.in_place) is not None:
        replica.transfers.receivers = lambda: InPlaceReceiver(weights, base, model_dir, cache)
    else:
        replica.transfers.receivers = lambda: GlooReceiver(base, model_dir, cache)
    kept = _keep(spec, replica)
    _audit(spec, replica)
    server = ReplicaServer(replica, sock, spec.token, tls)
    tracing = contextlib.ExitStack()
    try:
        replica.tracer = tracing.enter_context(tracer_of(spec.tracing, replica.name))
        for one in kept:
            await asyncio.to_thread(one.start)
        await server.start()
        await replica.start()
        # Whatever exists now stays. Collections that skip it do not hold up streams.
        gc.collect()
        gc.freeze()
        channel.send(Listening(port=sock.getsockname()[1]))
        replica.watch(channel.pulse)
        channel.pulse.start()
        await channel.stop_requested()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await replica.drained()
    finally:
        await replica.close()
        await server.close()
        for one in kept:
            await asyncio.to_thread(one.close)
        tracing.close()


def _cache(spec: ReplicaSpec) -> SnapshotCache:
    limit = spec.settings.snapshot_cache
    bytes_max = None if limit is None else parse_size("replica.snapshot_cache", limit)
    return SnapshotCache(Path(spec.cache_dir), bytes_max)


def _keep(spec: ReplicaSpec, replica: Replica) -> list[Journal | RecordFiles]:
    """What has the replica's records; none where they are not kept."""
    own, bucket = spec.records, spec.records.bucket
    if bucket is None:
        return []
    deployment = spec.deployment.rpartition("/")[2]
    url, about = records_url(bucket, deployment), {"deployment": deployment}
    waiting_max, files_max = (
        parse_size("records.disk", own.disk),
        parse_size("records.files_max", own.files_max),
    )
    journal = Journal(Path(spec.records_dir), url, replica.name, about, bytes_max=waiting_max)
    files = RecordFiles(bucket, deployment, keep_s=own.files_keep_s, bytes_max=files_max)
    replica.keep_records(journal)
    replica.keep_record_files(files)
    return [journal, files]


def _audit(spec: ReplicaSpec, replica: Replica) -> None:
    if not spec.records.audit_share:
        return
    if spec.kind != "embedded":
        log.warning("records.audit_share: the engine %s does not audit turns (feature audit)", spec.kind)
        return
    replica.audit_turns(
        Audits(
            replica.name,
            spec.records.audit_share,
            partial(AuditorProcess.start, spec.engine),
            base=Path(spec.model_dir),
            model=spec.model,
            clock=replica.clock,
        )
    )


def main(
    begun: StartedChild | None = None,
    around: Callable[[ReplicaSpec], AbstractContextManager[None]] = held_directories,
) -> int:
    """begun: the engine process of a spare replica. around: entered once it has its settings."""
    serving = partial(serve, begun=begun)
    return run_child("replica", ReplicaSpec, serving, (EngineDied,), around, spare=begun is not None)


if __name__ == "__main__":
    raise SystemExit(main())
