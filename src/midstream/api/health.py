"""Whether the server can serve, and its metrics.

Always holds: everybody learns whether a replica can be used. The rest is said to a key, of the deployments that it may use.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from midstream.api.answers import DeploymentHealth, Health, ReplicaHealth
from midstream.api.capabilities import engine_of
from midstream.core.endpoints import PLAIN_TEXT, Endpoint, serves
from midstream.core.scopes import OBSERVE, SCOPES, ScopeNeed
from midstream.core.wires import TRAINER_HEALTH
from midstream.fleet.access import grant_of, shown_only
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.view import ReplicaView
from midstream.http.bodies import answered
from midstream.proxy.metrics import CONTENT_TYPE, GatewayMetrics


class HealthApi:
    def __init__(self, deployments: Deployments, metrics: GatewayMetrics) -> None:
        self._deployments = deployments
        self._metrics = metrics

    @serves(
        *(
            Endpoint("GET", path, None, "Answers 200 while a replica can be used, else 503.", answer=Health)
            for path in ("/health", *TRAINER_HEALTH)
        )
    )
    async def health(self, request: Request) -> Response:
        grant = grant_of(request)
        up = any(view.usable for deployment in self._deployments for view in deployment.replicas.views)
        health = Health("ok" if up else "unavailable")
        if grant.anywhere(SCOPES):
            shown = shown_only(grant, SCOPES, self._deployments)
            views = [view for deployment in shown for view in deployment.replicas.views]
            health.deployments = [_of_deployment(deployment) for deployment in shown]
            health.usable_replicas = sum(view.usable for view in views)
            health.gateway_workers_ready = self._metrics.workers_ready
            health.replicas = [_of_replica(view) for view in views]
        return answered(health, 200 if up else 503)

    @Endpoint(
        "GET",
        "/metrics",
        ScopeNeed((OBSERVE,), "every"),
        "Gives all metrics in Prometheus' text format.",
        kinds=PLAIN_TEXT,
    )
    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.exposition(), media_type=CONTENT_TYPE)


def _of_deployment(deployment: Deployment) -> DeploymentHealth:
    views = deployment.replicas.views
    return DeploymentHealth(
        name=deployment.name,
        model=deployment.model,
        wanted=deployment.wanted,
        usable=sum(view.usable for view in views),
        elsewhere=sum(view.usable and not view.replica.own for view in views),
        failed=sorted(deployment.troubles),
    )


def _of_replica(view: ReplicaView) -> ReplicaHealth:
    report = view.report
    return ReplicaHealth(
        name=view.name,
        reachable=report is not None,
        ready=report is not None and report.ready,
        usable=view.usable,
        snapshot=report.own.snapshot if report else None,
        stage=report.own.stage if report else None,
        in_flight=view.replica.in_flight,
        engine=engine_of(report),
    )
