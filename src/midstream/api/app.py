"""The control app: every endpoint of the gateway that is not proxied inference, as ordinary ASGI.

Always holds: each response, errors included, is JSON in the API's shape (but /metrics, which is Prometheus' text).
The data path has checked the API key before a request comes here, says what it may do, and answers POSTs to inference paths
itself. Every route is behind what the table of scopes asks for it (access.py), and shows what the key may see.

The account and its models as Fireworks' control plane shows them: `/v1/accounts`, an account, its models, one model.

Always holds: there is one account, the server's; a model is listed once, whether it is deployed or only can be. A key that is
not for every deployment sees only the models of those that it may use. Read only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from midstream.api import status
from midstream.api.responses import response_routes
from midstream.api.trajectories import session_routes
from midstream.core.errors import InvalidRequest, MidstreamError, NotFound
from midstream.core.scopes import SCOPES, Grant, forbidden
from midstream.core.wires import TRAINER_HEALTH, WIRES
from midstream.fleet.access import grant_of, guarded, meant, shown_only
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.view import ReplicaView
from midstream.proxy.metrics import CONTENT_TYPE, GatewayMetrics


def account_routes(deployments: Deployments) -> list[BaseRoute]:
    """Routes for the control app."""
    api = _Accounts(deployments)
    return [
        Route("/v1/accounts", api.accounts, methods=["GET"]),
        Route("/v1/accounts/{account}", api.account, methods=["GET"]),
        Route("/v1/accounts/{account}/models", api.models, methods=["GET"]),
        Route("/v1/accounts/{account}/models/{model}", api.model, methods=["GET"]),
    ]


class _Accounts:
    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    async def accounts(self, request: Request) -> Response:
        return JSONResponse({"accounts": [self._account()], "nextPageToken": "", "totalSize": 1})

    async def account(self, request: Request) -> Response:
        self._check_account(request)
        return JSONResponse(self._account())

    async def models(self, request: Request) -> Response:
        self._check_account(request)
        names = self._names(request)
        adapters = {policy.model for policy in self._deployments.policies()}
        models = [self._model(name, adapter=name in adapters) for name in names]
        return JSONResponse({"models": models, "nextPageToken": "", "totalSize": len(models)})

    async def model(self, request: Request) -> Response:
        account = self._check_account(request)
        name = f"{account}/models/{request.path_params['model']}"
        names = self._names(request)
        if name not in names and not grant_of(request).everywhere(SCOPES):
            raise forbidden(SCOPES, f"model {request.path_params['model']!r}")
        if name not in names:
            raise NotFound(f"there is no model {name}; this server has {', '.join(names)}")
        return JSONResponse(self._model(name, any(one.policy for one in self._deployments.called(name))))

    def _model(self, name: str, adapter: bool) -> dict[str, Any]:
        return {
            "name": name,
            "displayName": name.rpartition("/")[2],
            "kind": "HF_PEFT_ADDON" if adapter else "HF_BASE_MODEL",
            "state": "READY",
            "status": {"code": "OK", "message": ""},
        }

    def _names(self, request: Request) -> list[str]:
        grant = grant_of(request)
        if grant.everywhere(SCOPES):
            return self._deployments.models
        shown = shown_only(grant, SCOPES, self._deployments)
        return sorted({one.model for of in shown for one in (of, *self._deployments.policies(of))})

    def _account(self) -> dict[str, Any]:
        name = self._deployments.default.names.account
        return {"name": name, "displayName": name.rpartition("/")[2], "state": "READY", "email": ""}

    def _check_account(self, request: Request) -> str:
        name, own = f"accounts/{request.path_params['account']}", self._deployments.default.names.account
        if name != own:
            raise NotFound(f"there is no account {name}; this server's is {own}")
        return own


logger = logging.getLogger(__name__)


def control_app(
    deployments: Deployments,
    metrics: GatewayMetrics,
    *,
    created: int = 0,
    keyed: bool = False,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The app; `created` (seconds since the epoch) is when the model came to be served.

    keyed: API keys are in use, so a request that does not say what its key may do may do nothing.
    """
    endpoints = _Endpoints(deployments, metrics, created)
    routes: list[BaseRoute] = [
        *extra_routes,
        *(Route(path, endpoints.health, methods=["GET"]) for path in ("/health", *TRAINER_HEALTH)),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        *account_routes(deployments),
        *session_routes(deployments),
        *response_routes(deployments),
    ]
    for prefix in ("", "/inference"):
        routes.append(Route(f"{prefix}/v1/models", endpoints.models, methods=["GET"]))
        routes.append(Route(f"{prefix}/v1/models/{{model:path}}", endpoints.model, methods=["GET"]))
    routes += [Route(path, _post_only, methods=["POST"]) for path in WIRES]
    app = Starlette(
        routes=guarded(routes, deployments, keyed=keyed),
        exception_handlers={
            MidstreamError: _midstream_error,
            HTTPException: _http_exception,
            Exception: _unexpected,
        },
    )
    # A redirect would name the host that the client claims.
    app.router.redirect_slashes = False
    return app


class _Endpoints:
    def __init__(self, deployments: Deployments, metrics: GatewayMetrics, created: int) -> None:
        self._deployments = deployments
        self._metrics = metrics
        self._created = created

    async def health(self, request: Request) -> Response:
        """Whether there is a usable replica, to everybody; the rest, to a key, of the deployments that it may use."""
        grant = grant_of(request)
        up = any(view.usable for deployment in self._deployments for view in deployment.replicas.views)
        body: dict[str, Any] = {"status": "ok" if up else "unavailable"}
        if grant.anywhere(SCOPES):
            shown = shown_only(grant, SCOPES, self._deployments)
            views = [view for deployment in shown for view in deployment.replicas.views]
            body |= {
                "deployments": [_deployment_summary(deployment) for deployment in shown],
                "usable_replicas": sum(view.usable for view in views),
                "gateway_workers_ready": self._metrics.workers_ready,
                "replicas": [_summary(view) for view in views],
            }
        return JSONResponse(body, status_code=200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models(grant_of(request))})

    async def model(self, request: Request) -> Response:
        asked, grant = str(request.path_params["model"]), grant_of(request)

        def find() -> Deployment:
            return self._deployments.find(asked, param="model")

        found = (
            find() if grant.everywhere(SCOPES) else meant(self._deployments, grant, SCOPES, find, None, asked)
        )
        return JSONResponse(self._model(found))

    def _models(self, grant: Grant) -> list[dict[str, Any]]:
        """Each once, as it stands with the deployment that its name means to this key; then the policies that are served."""
        served: dict[str, Deployment] = {}
        for deployment in shown_only(grant, SCOPES, self._deployments):
            if not deployment.deleting:
                served.setdefault(deployment.model, deployment)
        policies = [
            policy
            for policy in self._deployments.policies()
            if not (policy.deleting or policy.host.deleting)
            and grant.allows(SCOPES, policy.host.name)
            and policy.served
        ]
        return [self._model(one) for one in (*served.values(), *policies)]

    def _model(self, deployment: Deployment) -> dict[str, Any]:
        views = deployment.replicas.views
        reports = [view.report for view in views]
        engines = status.shown(reports)
        # As vLLM shows adapters: under the name that they were loaded by, with what they stand on.
        adapter = {"root": deployment.model, "parent": deployment.host.model} if deployment.policy else {}
        return {
            "id": deployment.policy or deployment.model,
            **adapter,
            "object": "model",
            "created": self._created,
            "owned_by": deployment.names.account.rpartition("/")[2],
            "deployment": deployment.name,
            "snapshots": {view.name: view.report.snapshot if view.report else None for view in views},
            # Where trainers look for it, as vLLM has it there.
            **status.context_of(reports),
            **({} if engines is None else {"midstream": engines}),
        }


def _deployment_summary(deployment: Deployment) -> dict[str, Any]:
    """failed: the replicas that cannot be started. elsewhere: how many of the usable ones others run."""
    return {
        "name": deployment.name,
        "model": deployment.model,
        "wanted": deployment.wanted,
        "usable": sum(view.usable for view in deployment.replicas.views),
        "elsewhere": sum(view.usable and not view.own for view in deployment.replicas.views),
        "failed": sorted(deployment.troubles),
    }


def _summary(view: ReplicaView) -> dict[str, Any]:
    report = view.report
    return {
        "name": view.name,
        "reachable": report is not None,
        "ready": report is not None and report.ready,
        "usable": view.usable,
        "snapshot": report.snapshot if report else None,
        "stage": str(report.stage) if report else None,
        "in_flight": view.in_flight,
        **status.engine_of(report),
    }


async def _post_only(request: Request) -> Response:
    raise InvalidRequest("inference requests are served by the data path")


async def _midstream_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MidstreamError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: NotFound.code, 405: "method_not_allowed"}.get(error.status_code, InvalidRequest.code)
    where = f"{request.method} {request.scope['path']}"
    body = {"message": f"{error.detail}: {where}", "type": code, "code": code, "param": None}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    failure = MidstreamError("the gateway failed on this request; its log says why")
    return JSONResponse(failure.body(), status_code=500)
