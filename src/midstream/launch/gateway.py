"""The gateway process: data path, control app, ledger and reconciler.

Owns: wiring concrete classes. Run as `python -m midstream.launch.gateway` by the supervisor.
"""

from __future__ import annotations

import asyncio
import time

import uvloop

from midstream.control.loop import Reconciler
from midstream.errors import ConfigError
from midstream.gateway.app import control_app
from midstream.gateway.hotload import hotload_routes
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.replicas import ReplicaSet
from midstream.gateway.server import Gateway
from midstream.gateway.sessions import SessionTable
from midstream.launch.child import (
    STOP_GRACE_S,
    Announcer,
    GatewaySpec,
    Listening,
    configure_logging,
    raise_file_limit,
    read_spec,
    stop_requested,
)
from midstream.ledger import Ledger
from midstream.names import ServedNames


async def serve(spec: GatewaySpec, announce: Announcer) -> int:
    ledger = Ledger(spec.ledger)
    await ledger.ensure_deployment(
        spec.deployment, spec.model, spec.bucket, "SYNC" if spec.transition == "sync" else "ASYNC"
    )
    names = ServedNames(spec.model, spec.deployment)
    replicas = ReplicaSet(spec.replicas, token=spec.token)
    reconciler = Reconciler(ledger, replicas, spec.deployment)
    sessions = SessionTable(spec.settings.max_sessions)
    deployments = Deployments(Deployment(names, replicas, reconciler, sessions))
    metrics = GatewayMetrics(deployments)
    app = control_app(
        deployments,
        metrics,
        created=int(time.time()),
        extra_routes=hotload_routes(ledger, deployments),
    )
    gateway = Gateway(spec.settings, deployments, metrics, app, replica_token=spec.token)
    background = [asyncio.create_task(replicas.run()), asyncio.create_task(reconciler.run())]
    try:
        announce(Listening(port=await gateway.start(spec.host, spec.port)))
        stop = asyncio.create_task(stop_requested())
        done, _ = await asyncio.wait((stop, *background), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a background task that ended is a bug: end, and be started again
        await gateway.drain(STOP_GRACE_S)
    finally:
        await gateway.close()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        ledger.close()
    return 0


def main() -> int:
    announce = Announcer()
    spec = read_spec(GatewaySpec)
    configure_logging("gateway", spec.log_level)
    raise_file_limit()
    try:
        return uvloop.run(serve(spec, announce))
    except (ConfigError, OSError) as error:
        announce(Listening(error=str(error)))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
