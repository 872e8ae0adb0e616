"""One replica without a gateway: for gateways on other machines, or several of them.

Always holds: it is started again when it dies, at the same port; when this process ends, however it ends, it is gone too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from midstream.config import Settings, deployment_resource, model_resource, parse_size
from midstream.errors import ConfigError
from midstream.launch.child import STOP_GRACE_S, ReplicaSpec
from midstream.launch.engines import engine_fields
from midstream.launch.local import KILL_AFTER_S, engine_settings
from midstream.launch.process import Child

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def replica_spec(settings: Settings, model: str, directory: Path) -> ReplicaSpec:
    """model: its bare name. Raises ConfigError when strangers could ask it."""
    if settings.replica_token is None and settings.host not in LOOPBACK:
        raise ConfigError(
            f"--host {settings.host}: needs the setting replica_token, the same as its gateways have: whoever knows it may ask"
        )
    size = settings.snapshot_cache
    return ReplicaSpec(
        host=settings.host,
        port=settings.port,
        model_dir=str(directory),
        model=model_resource(settings, model),
        deployment=deployment_resource(settings),
        cache_dir=str(Path(settings.state_dir).absolute() / "snapshots" / "replica"),
        token=settings.replica_token or "",
        engine=engine_settings(settings, 1),
        log_level=settings.log_level,
        session_idle_s=settings.gateway.session_idle_s,
        pin_drain_s=settings.pin_drain_s,
        cache_bytes=None if size is None else parse_size("snapshot_cache", size),
        **engine_fields(settings, 0, 1, alone=True),
    )


async def run(spec: ReplicaSpec, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartFailed."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    child = Child("replica", "midstream.launch.replica", spec)
    serving = asyncio.create_task(_serve(child, spec, on_ready))
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        serving.cancel()
        asked.cancel()
        await asyncio.wait((serving, asked))
        await child.stop(STOP_GRACE_S + KILL_AFTER_S)


async def _serve(child: Child, spec: ReplicaSpec, on_ready: Callable[[str], None]) -> None:
    await child.start()
    on_ready(f"midstream replica ready on http://{spec.host}:{child.port} (model {spec.model})")
    await child.supervise()
