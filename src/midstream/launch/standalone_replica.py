"""A replica without a supervisor and gateways of its own: for gateways on other machines, or several of them.

Always holds: it is started again when it dies, at the same port. When this process ends, however it ends, the replica is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from midstream.core.config import Settings
from midstream.core.errors import ConfigError
from midstream.core.served_names import deployment_resource, model_resource
from midstream.http.channel import STOP_GRACE_S
from midstream.launch.engines import engine_fields, replica_fields
from midstream.launch.local import engine_settings, stop_signals, until_stopped
from midstream.launch.process import KILL_AFTER_S, Child
from midstream.launch.specs import ReplicaSpec

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def replica_spec(settings: Settings, model: str, directory: Path) -> ReplicaSpec:
    """model: its bare name. Raises ConfigError when the replica could be reached by others and has no token."""
    own = settings.replica
    if own.token is None and own.host not in LOOPBACK:
        raise ConfigError(
            f"--host {own.host}: needs the setting replica.token, the same as its gateways have: whoever knows it may ask"
        )
    return ReplicaSpec(
        host=own.host,
        port=own.port,
        model_dir=str(directory),
        model=model_resource(settings, model),
        deployment=deployment_resource(settings),
        token=own.token or "",
        tls_cert=own.tls_cert,
        tls_key=own.tls_key,
        engine=engine_settings(settings, 1),
        **replica_fields(settings, "replica"),
        **engine_fields(settings, 0, 1, alone=True),
    )


async def run(spec: ReplicaSpec, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartFailed."""
    child = Child("replica", "midstream.launch.replica", spec)

    async def serve() -> None:
        await child.start()
        scheme = "http" if spec.tls_cert is None else "https"
        on_ready(f"midstream replica ready on {scheme}://{spec.host}:{child.port} (model {spec.model})")
        await child.supervise()

    try:
        await until_stopped(serve(), stop_signals())
    finally:
        await child.stop(STOP_GRACE_S + KILL_AFTER_S)
