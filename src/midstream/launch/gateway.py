"""The gateway process: public port, control app, ledger and reconciler.

Owns: wiring concrete classes. Run as `python -m midstream.launch.gateway` by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from midstream.api.app import control_app
from midstream.api.board import Board
from midstream.api.dashboard import DashboardApi
from midstream.api.deployments import DeploymentsApi
from midstream.api.hotload import hotload_apis
from midstream.api.reference import ReferenceApi
from midstream.core.errors import ConfigError, NotFound
from midstream.core.private import UMASK
from midstream.core.served_names import ServedNames, names_of
from midstream.core.supervision import Accepting, Listening
from midstream.core.types import TransitionType
from midstream.fleet.desired_state import DesiredState, Running, replica_count
from midstream.fleet.loop import Reconciler
from midstream.fleet.membership import MembershipApi, Resolver, entries_of_settings
from midstream.fleet.push import PushDoor
from midstream.fleet.push_upkeep import PushUpkeep
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.sessions import SessionTable
from midstream.fleet.tally import GatewayReport
from midstream.http.channel import STOP_GRACE_S, StdioChannel, run_child
from midstream.http.heap import return_memory
from midstream.http.tls import client_tls
from midstream.launch.reference import document
from midstream.launch.specs import GatewaySpec
from midstream.launch.tracing import tracer_of
from midstream.ledger import DeploymentRow, Ledger, LedgerUnavailable
from midstream.ledger.deployments import PolicyLimits
from midstream.ledger.records import DeploymentChange
from midstream.proxy import audit
from midstream.proxy.handover import Offer, take_over
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway

logger = logging.getLogger(__name__)

#: A ledger that does not answer at the start is asked again for so long.
LEDGER_WAIT_S = 60.0
LEDGER_PAUSE_S = 1.0
#: A gateway waits so long until it can use all replicas, while other gateways listen.
CATCH_UP_S = 10.0
CATCH_UP_POLL_S = 0.02
#: Requests of unknown sessions wait so long at most for replicas to say which sessions they hold.
LEARN_S = 1.5
#: How many collections of younger objects come before one of all objects. With 10,000 open streams that takes a tenth of a
#: second, in which no stream goes on. Hardly anything that lives long is garbage which only a collection finds.
COLLECTIONS_PER_FULL = 1000
#: The field of the default deployment with the settings of its last start.
_START_SETTINGS = "_settings"


async def serve(spec: GatewaySpec, channel: StdioChannel) -> None:
    return_memory()
    os.umask(UMASK)
    audit.write_to(spec.settings.audit_log)
    if spec.replica_ca is not None:
        # A file that cannot be used ends the start, not the first call.
        client_tls(spec.replica_ca)
    ledger = Ledger(spec.ledger)
    row = await first_answer(ledger, spec)
    deployments = Deployments(_run_time(ledger, spec, row), spec.models)
    desired_state = _desired_state(spec, ledger, deployments, channel)
    door = PushDoor(ledger, spec.push)
    gateway = _gateway(spec, ledger, deployments, desired_state, door)
    offer = Offer(lambda: gateway.sockets)
    stop = asyncio.create_task(
        channel.stop_requested(lambda line: desired_state.running(msgspec.json.decode(line, type=Running)))
    )
    background: list[asyncio.Task[None]] = []
    tracing = contextlib.ExitStack()
    try:
        gateway.proxy.tracer = tracing.enter_context(tracer_of(spec.tracing, "gateway"))
        starts_alone = spec.takes_over is None and not spec.shares_port
        port = await gateway.start(spec.host, spec.port) if starts_alone else spec.port
        # Whatever exists now stays.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_PER_FULL)
        channel.send(Listening(port=port, offer=offer.path))
        channel.pulse.on_stall = gateway.proxy.metrics.stall_s["gateway"].observe
        channel.pulse.start()
        background.append(asyncio.create_task(desired_state.run()))
        background.append(asyncio.create_task(PushUpkeep(ledger, deployments, door).run()))
        if spec.takes_over is not None:
            await _take_over(spec, spec.takes_over, gateway, desired_state)
            channel.send(Accepting())
        elif spec.shares_port:
            await _join(spec, gateway, desired_state)
        taken = asyncio.create_task(offer.taken())
        background.append(taken)
        done, _ = await asyncio.wait((stop, *background), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # A background task that ended is a bug: this process ends, and is started again.
            task.result()
        if taken in done:
            await _retire(gateway, stop, spec.settings.restart_drain_s)
        if stop.done() or not taken.done():
            await gateway.drain(STOP_GRACE_S)
    finally:
        offer.close()
        await gateway.close()
        await door.close()
        for task in (stop, *background):
            task.cancel()
        await asyncio.gather(stop, *background, return_exceptions=True)
        ledger.close()
        tracing.close()


def _gateway(
    spec: GatewaySpec, ledger: Ledger, deployments: Deployments, desired_state: DesiredState, door: PushDoor
) -> Gateway:
    metrics = GatewayMetrics(deployments)
    metrics.pushes = door.counts
    board = Board(deployments, metrics)
    app = control_app(
        deployments,
        metrics,
        created=int(time.time()),
        keyed=bool(spec.settings.api_keys),
        apis=(
            *_publishing(spec, ledger, deployments, desired_state, door),
            DashboardApi(board, lambda: metrics.listening()),
            ReferenceApi(document),
        ),
    )
    gateway = Gateway(
        spec.settings,
        deployments,
        metrics,
        app,
        front_path=spec.tinker_path,
        replica_token=spec.token,
        replica_ca=spec.replica_ca,
    )
    _report(desired_state, gateway, metrics, board)
    return gateway


def _desired_state(
    spec: GatewaySpec, ledger: Ledger, deployments: Deployments, channel: StdioChannel
) -> DesiredState:
    desired_state = DesiredState(
        ledger,
        deployments,
        lambda row: _run_time(ledger, spec, row),
        channel.send,
        settings=entries_of_settings(spec.settings.replicas, spec.settings.replica_weights),
    )
    desired_state.make_policy = lambda row, of, policy: _policy(ledger, row, of, policy)
    if spec.settings.replicas_dns is not None:
        desired_state.resolver = Resolver(spec.settings.replicas_dns, desired_state.wake)
    return desired_state


def _publishing(
    spec: GatewaySpec, ledger: Ledger, deployments: Deployments, desired_state: DesiredState, door: PushDoor
) -> list[object]:
    """The APIs of deployments, of replicas and of hot loads."""
    changed, buckets = desired_state.changed, spec.settings.allowed_buckets
    return [
        DeploymentsApi(ledger, deployments, bucket=spec.bucket, allowed_buckets=buckets, changed=changed),
        MembershipApi(ledger, deployments, allowed=spec.settings.allowed_replicas, changed=changed),
        *hotload_apis(
            ledger,
            deployments,
            allowed_buckets=buckets,
            chain_max=spec.settings.chain_max,
            rebase_after=spec.settings.rebase_after,
            changed=changed,
            limits=PolicyLimits(spec.settings.max_policies, spec.settings.max_policies_per_tenant),
            look=desired_state.look,
            door=door,
        ),
    ]


async def _retire(gateway: Gateway, stop: asyncio.Task[None], drain_s: float) -> None:
    """Finish the requests that it has, within drain_s, or until `stop`."""
    logger.info("another process took over the port; this one finishes its requests")
    rest = asyncio.create_task(gateway.retire(drain_s))
    await asyncio.wait((stop, rest), return_when="FIRST_COMPLETED")
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)


async def _take_over(spec: GatewaySpec, path: str, gateway: Gateway, desired_state: DesiredState) -> None:
    """Listen where another process does, once this one has caught up. That one retires. Raises OSError."""
    await _caught_up(desired_state)
    taken = await take_over(path)
    await gateway.start(spec.host, spec.port, taken.sockets)
    taken.confirm()


async def _join(spec: GatewaySpec, gateway: Gateway, desired_state: DesiredState) -> None:
    """Listen beside the other gateways, once this one has caught up, or at once while none of them listens. Raises OSError."""
    await _caught_up(desired_state, lambda: desired_state.heard and desired_state.siblings.listening == 0)
    await gateway.start(spec.host, spec.port)
    desired_state.wake()


async def _caught_up(desired_state: DesiredState, alone: Callable[[], bool] = lambda: False) -> None:
    """Wait until this process can use every replica, for CATCH_UP_S at most. alone: no other gateway serves meanwhile."""
    until = time.monotonic() + CATCH_UP_S
    # Many events can make it true, so it is polled.
    while not (desired_state.caught_up or alone()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(CATCH_UP_POLL_S)


def _report(desired_state: DesiredState, gateway: Gateway, metrics: GatewayMetrics, board: Board) -> None:
    """Report this process's counts and readiness to the supervisor, and include the other gateways' counts in the metrics."""
    boot = secrets.token_hex(8)
    metrics.siblings = lambda: desired_state.siblings
    metrics.report = desired_state.report_now
    metrics.listening = lambda: bool(gateway.sockets)
    metrics.ready = lambda: bool(gateway.sockets) and desired_state.caught_up

    def report() -> GatewayReport:
        # It is asked for in every round: the dashboard's past needs no clock of its own.
        board.look()
        return GatewayReport(
            boot=boot,
            listening=metrics.listening(),
            ready=metrics.ready(),
            changes=desired_state.changes,
            tally=metrics.tally(),
        )

    desired_state.report = report


async def first_answer(ledger: Ledger, spec: GatewaySpec) -> DeploymentRow:
    """Like default_deployment(). Asks again while the database is busy. Raises ConfigError after LEDGER_WAIT_S."""
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
    """The row of the deployment of the command line. Raises ConfigError.

    A setting that changed since the last start counts. One that did not leaves the value that the API was given since.
    """
    transition: TransitionType = "SYNC" if spec.transition == "sync" else "ASYNC"
    settings = {"replicas": spec.replicas, "transition": transition, "bucket": spec.bucket}
    before: Mapping[str, Any] = {}
    bucket = spec.bucket
    with contextlib.suppress(NotFound):
        known = await ledger.deployment(spec.deployment)
        before = known.fields.get(_START_SETTINGS) or {}
        bucket = known.bucket_url if before.get("bucket") == spec.bucket else spec.bucket
    row = await ledger.ensure_deployment(spec.deployment, spec.model, bucket, None, spec.replicas)
    change: DeploymentChange = {}
    if before.get("replicas") != spec.replicas:
        change["replicas_min"] = change["replicas_max"] = spec.replicas
    if before.get("transition") != transition:
        change["transition"] = transition
    if not change and before == settings:
        return row
    change["fields"] = {_START_SETTINGS: settings}
    return await ledger.update_deployment(row.name, **change)


def _run_time(ledger: Ledger, spec: GatewaySpec, row: DeploymentRow) -> Deployment:
    facts = DeploymentReplicas(
        token=spec.token,
        tls_ca=spec.replica_ca,
        learn_s=LEARN_S,
        silence_s=spec.settings.replica_silence_s,
    )
    replicas = ReplicaSet(facts)
    return Deployment(
        ServedNames(row.model, row.name),
        replicas,
        Reconciler(ledger, replicas, row.name, swap_order=spec.settings.swap_order, signalled_at_once=True),
        SessionTable(spec.settings.max_sessions),
        wanted=replica_count(row),
    )


def _policy(ledger: Ledger, row: DeploymentRow, of: Deployment, policy: str) -> Deployment:
    replicas = ReplicaSet(of.replicas.facts, policy, row.created_at)
    # Policies switch by themselves: no replica waits for another one's turn.
    reconciler = Reconciler(ledger, replicas, row.name, signalled_at_once=True)
    names = names_of(of.names, policy)
    return Deployment(names, replicas, reconciler, of.sessions, policy=policy, of=of)


def main() -> int:
    return run_child("gateway", GatewaySpec, serve)


if __name__ == "__main__":
    raise SystemExit(main())
