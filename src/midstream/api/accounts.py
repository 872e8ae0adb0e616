"""The account and its models as Fireworks' control plane shows them: `/v1/accounts`, an account, its models, one model.

Always holds: there is one account, the server's; a model is listed once, whether it is deployed or only can be. A key that is
not for every deployment sees only the models of those that it may use. Read only.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from midstream.core.errors import NotFound
from midstream.core.scopes import SCOPES, forbidden
from midstream.fleet.access import grant_of, shown_only
from midstream.fleet.registry import Deployments


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
        models = [_model(name) for name in self._names(request)]
        return JSONResponse({"models": models, "nextPageToken": "", "totalSize": len(models)})

    async def model(self, request: Request) -> Response:
        account = self._check_account(request)
        name = f"{account}/models/{request.path_params['model']}"
        names = self._names(request)
        if name not in names and not grant_of(request).everywhere(SCOPES):
            raise forbidden(SCOPES, f"model {request.path_params['model']!r}")
        if name not in names:
            raise NotFound(f"there is no model {name}; this server has {', '.join(names)}")
        return JSONResponse(_model(name))

    def _names(self, request: Request) -> list[str]:
        grant = grant_of(request)
        if grant.everywhere(SCOPES):
            return self._deployments.models
        return sorted({one.model for one in shown_only(grant, SCOPES, self._deployments)})

    def _account(self) -> dict[str, Any]:
        name = self._deployments.default.names.account
        return {"name": name, "displayName": name.rpartition("/")[2], "state": "READY", "email": ""}

    def _check_account(self, request: Request) -> str:
        name, own = f"accounts/{request.path_params['account']}", self._deployments.default.names.account
        if name != own:
            raise NotFound(f"there is no account {name}; this server's is {own}")
        return own


def _model(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "displayName": name.rpartition("/")[2],
        "kind": "HF_BASE_MODEL",
        "state": "READY",
        "status": {"code": "OK", "message": ""},
    }
