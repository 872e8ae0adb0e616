"""The gateway process: data path, control app, ledger and reconciler.

Owns: wiring concrete classes. Run as `python -m midstream.launch.gateway` by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from midstream.errors import ConfigError, NotFound
from midstream.fleet.loop import Reconciler
from midstream.fleet.replicas import ReplicaSet
from midstream.gateway.app import control_app
from midstream.gateway.deployments import deployment_routes
from midstream.gateway.handover import Offer, take_over
from midstream.gateway.hotload import hotload_routes
from midstream.gateway.membership import Resolver, entries_of_settings, membership_routes
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.roster import Roster, Running, replica_count
from midstream.gateway.server import Gateway
from midstream.gateway.sessions import SessionTable
from midstream.gateway.wire import data_path, new_event_loop
from midstream.launch.child import (
    CATCH_UP_S,
    STOP_GRACE_S,
    Accepting,
    Announcer,
    GatewaySpec,
    Listening,
    configure_logging,
    raise_file_limit,
    read_spec,
    return_memory,
    stop_requested,
)
from midstream.launch.workers import Workers
from midstream.ledger import DeploymentRow, Ledger, LedgerUnavailable
from midstream.ledger.records import DeploymentChange
from midstream.names import ServedNames
from midstream.private import UMASK
from midstream.types import TransitionType

logger = logging.getLogger(__name__)

LEDGER_WAIT_S = 60.0  # a ledger that does not answer at the start is asked again for so long
LEDGER_PAUSE_S = 1.0
CATCH_UP_POLL_S = 0.02
LEARN_S = 1.5  # requests of unknown sessions wait so long at most for replicas to say what they hold
_SAID = "_settings"  # of the default deployment: what the settings said of it when it was last started


async def serve(spec: GatewaySpec, announce: Announcer) -> int:
    ledger = Ledger(spec.ledger)
    row = await first_answer(ledger, spec)
    deployments = Deployments(_run_time(ledger, spec, row), spec.models)
    metrics = GatewayMetrics(deployments)
    workers = Workers(spec, deployments, metrics)
    roster = _roster(spec, ledger, deployments, announce, workers)
    keyed = bool(spec.settings.api_keys)
    app = control_app(
        deployments,
        metrics,
        created=int(time.time()),
        keyed=keyed,
        extra_routes=_served_api(spec, ledger, deployments, roster),
    )
    gateway = Gateway(
        spec.settings,
        deployments,
        metrics,
        app,
        front_path=spec.tinker_path,
        replica_token=spec.token,
    )
    offer = Offer(lambda: gateway.sockets, workers.offers)
    stop = asyncio.create_task(
        stop_requested(lambda line: roster.running(msgspec.json.decode(line, type=Running)))
    )
    background: list[asyncio.Task[None]] = []
    try:
        port = spec.port
        if spec.takes_over is None:
            port = await gateway.start(spec.host, spec.port)
        announce(Listening(port=port, offer=offer.path))
        background.append(asyncio.create_task(roster.run()))
        theirs: Mapping[str, str] = {}
        if spec.takes_over is not None:
            theirs = await _take_over(spec, spec.takes_over, gateway, roster)
            announce(Accepting())
        if spec.settings.workers > 1:
            background.append(workers.start(gateway.control_path, port, theirs))
        taken = asyncio.create_task(offer.taken())
        background.append(taken)
        done, _ = await asyncio.wait((stop, *background), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a background task that ended is a bug: end, and be started again
        if taken in done:
            await _retire(gateway, workers, stop, spec.settings.restart_drain_s)
        if stop.done() or not taken.done():
            await asyncio.gather(gateway.drain(STOP_GRACE_S), workers.stop())
    finally:
        offer.close()
        await gateway.close()
        for task in (stop, *background):
            task.cancel()
        await asyncio.gather(stop, *background, return_exceptions=True)
        await workers.stop()
        ledger.close()
    return 0


def _roster(
    spec: GatewaySpec, ledger: Ledger, deployments: Deployments, announce: Announcer, workers: Workers
) -> Roster:
    roster = Roster(
        ledger,
        deployments,
        lambda row: _run_time(ledger, spec, row),
        announce,
        settings=entries_of_settings(spec.settings.replicas, spec.settings.replica_weights),
        busy=workers.leader.busy,
    )
    if spec.settings.replicas_dns is not None:
        roster.resolver = Resolver(spec.settings.replicas_dns, roster.wake)
    return roster


def _served_api(
    spec: GatewaySpec, ledger: Ledger, deployments: Deployments, roster: Roster
) -> list[BaseRoute]:
    """The control API beside what every gateway has."""
    return [
        *deployment_routes(
            ledger,
            deployments,
            bucket=spec.bucket,
            allowed_buckets=spec.settings.allowed_buckets,
            changed=roster.look_once,
        ),
        *membership_routes(
            ledger, deployments, allowed=spec.settings.allowed_replicas, changed=roster.look_once
        ),
        *hotload_routes(
            ledger,
            deployments,
            allowed_buckets=spec.settings.allowed_buckets,
            chain_max=spec.settings.chain_max,
        ),
    ]


async def _retire(gateway: Gateway, workers: Workers, stop: asyncio.Task[None], drain_s: float) -> None:
    """Finish the requests that are there, for drain_s at most, or until `stop`."""
    logger.info("another process took over the port; this one finishes its requests")
    workers.retire()
    rest = asyncio.gather(gateway.retire(drain_s), workers.left())
    await asyncio.wait((stop, rest), timeout=drain_s, return_when="FIRST_COMPLETED")
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)


async def _take_over(spec: GatewaySpec, path: str, gateway: Gateway, roster: Roster) -> Mapping[str, str]:
    """Listen where another process does, once this one can use every replica, or has tried for CATCH_UP_S; that one retires.

    Returns where the processes beside that one offer their sockets. Raises OSError.
    """
    until = time.monotonic() + CATCH_UP_S
    while not roster.caught_up and time.monotonic() < until:  # noqa: ASYNC110 - many things say when
        await asyncio.sleep(CATCH_UP_POLL_S)
    taken = await take_over(path)
    await gateway.start(spec.host, spec.port, taken.sockets)
    taken.confirm()
    return taken.workers


async def first_answer(ledger: Ledger, spec: GatewaySpec) -> DeploymentRow:
    """default_deployment(), of a database that may be busy with others when the server starts. Raises ConfigError."""
    until = time.monotonic() + LEDGER_WAIT_S
    while True:
        try:
            return await default_deployment(ledger, spec)
        except LedgerUnavailable as error:
            if time.monotonic() >= until:
                raise ConfigError(f"{error}, for {LEDGER_WAIT_S:g} s") from error
            logger.warning("%s; asking again", error)
            await asyncio.sleep(LEDGER_PAUSE_S)


async def default_deployment(ledger: Ledger, spec: GatewaySpec) -> DeploymentRow:
    """The row of the deployment of the command line.

    What the settings say of it counts when they say something else than at the last start; otherwise what the API was told
    since stays. Raises ConfigError.
    """
    transition: TransitionType = "SYNC" if spec.transition == "sync" else "ASYNC"
    said = {"replicas": spec.replicas, "transition": transition, "bucket": spec.bucket}
    before: Mapping[str, Any] = {}
    bucket = spec.bucket
    with contextlib.suppress(NotFound):
        known = await ledger.deployment(spec.deployment)
        before = known.fields.get(_SAID) or {}
        bucket = known.bucket_url if before.get("bucket") == spec.bucket else spec.bucket
    row = await ledger.ensure_deployment(spec.deployment, spec.model, bucket, None, spec.replicas)
    change: DeploymentChange = {}
    if before.get("replicas") != spec.replicas:
        change["replicas_min"] = change["replicas_max"] = spec.replicas
    if before.get("transition") != transition:
        change["transition"] = transition
    if not change and before == said:
        return row
    change["fields"] = {_SAID: said}
    return await ledger.update_deployment(row.name, **change)


def _run_time(ledger: Ledger, spec: GatewaySpec, row: DeploymentRow) -> Deployment:
    replicas = ReplicaSet(token=spec.token, learn_s=LEARN_S, silence_s=spec.settings.replica_silence_s)
    return Deployment(
        ServedNames(row.model, row.name),
        replicas,
        Reconciler(ledger, replicas, row.name, swap_order=spec.swap_order),
        SessionTable(spec.settings.max_sessions),
        wanted=replica_count(row),
    )


def main() -> int:
    announce = Announcer()
    spec = read_spec(GatewaySpec)
    configure_logging("gateway", spec.log_level)
    raise_file_limit()
    return_memory()
    os.umask(UMASK)
    try:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(data_path(spec.settings))) as runner:
            return runner.run(serve(spec, announce))
    except (ConfigError, OSError) as error:
        announce(Listening(error=str(error)))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
