"""The scopes of API keys, enforced: on every route of the control app, and on the deployment that a request is for.

Owns: how the data path of the gateway passes the rights of a key to the control app.
Always holds:
- An endpoint is served only after its need was met. Where keys are in use, a request that does not say what its key may do
  may do nothing.
- To a key that is not for every deployment, a deployment that it may not use and one that does not exist look the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.routing import BaseRoute

from midstream.core.endpoints import Endpoint
from midstream.core.errors import Forbidden, InvalidRequest, NotFound, ReplicaUnavailable
from midstream.core.headers import HEADER_DEPLOYMENT, HEADER_MODEL, HEADER_SCOPES, HEADER_TENANT
from midstream.core.scopes import EVERYTHING, NOTHING, Grant, ScopeNeed, forbidden, parse_grant
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.routes import log_refusal, routes_of

logger = logging.getLogger(__name__)

# Characters of a client's text that are shown in a message.
SHOWN_CHARS = 200
# The key of the grant in a request's scope.
_STATE = "midstream.grant"


def guarded(apis: Iterable[object], deployments: Deployments, *, keyed: bool) -> list[BaseRoute]:
    """The routes of the gateway's APIs, each behind what it needs. keyed: API keys are in use."""

    def check(request: Request, endpoint: Endpoint) -> None:
        scopes = request.headers.get(HEADER_SCOPES, "") if keyed else None
        grant = EVERYTHING if scopes is None else parse_grant(scopes.split())
        request.scope[_STATE] = grant
        if endpoint.need is not None:
            check_need(endpoint.need, grant, request, deployments)

    return routes_of(apis, check)


def grant_of(request: Request) -> Grant:
    """What the key of a request to a guarded route may do."""
    grant: Grant = request.scope.get(_STATE, NOTHING)
    return grant


def check_need(need: ScopeNeed, grant: Grant, request: Request, deployments: Deployments) -> None:
    """Raises Forbidden, and NotFound for a deployment that the key may use and that is not there."""
    try:
        if need.on == "every" and not grant.everywhere(need.scopes):
            raise forbidden(need.scopes, "every deployment")
        if need.on == "some" and not grant.anywhere(need.scopes):
            raise forbidden(need.scopes, "any deployment")
        if need.on == "named" and not grant.allows(need.scopes, name := request.path_params["name"]):
            raise forbidden(need.scopes, f"deployment {_cut(name)!r}")
        if need.on == "meant" and not grant.everywhere(need.scopes):
            headers = request.headers
            named = headers.get(HEADER_DEPLOYMENT) or None, headers.get(HEADER_MODEL) or None
            meant(grant, need.scopes, lambda: deployments.named(headers), *named)
    except Forbidden as error:
        log_refusal(logger, request, request.headers.get(HEADER_TENANT, ""), error)
        raise


def meant(
    grant: Grant,
    scopes: tuple[str, ...],
    find: Callable[[], Deployment],
    deployment: str | None,
    model: str | None,
) -> Deployment:
    """The deployment that `find` finds, where the key may use it. deployment, model: what the request calls it, if anything.

    Raises Forbidden, and NotFound for a deployment that the key may use and that is not there; what `find` raises, for a key
    that is for every one. ReplicaUnavailable while the gateway is catching up.
    """
    if grant.everywhere(scopes):
        return find()
    if deployment is not None:
        resource = f"deployment {_cut(deployment)!r}"
    elif model is not None:
        resource = f"model {_cut(model)!r}"
    else:
        resource = "the default deployment"
    if not grant.anywhere(scopes):
        raise forbidden(scopes, resource)
    try:
        found = find()
    except ReplicaUnavailable:
        raise ReplicaUnavailable(f"{resource} is not known to this gateway, which has just started") from None
    except (NotFound, InvalidRequest):
        if deployment is not None and grant.allows(scopes, deployment.strip().partition("@")[0]):
            raise NotFound(f"{resource} is not served here", param=HEADER_DEPLOYMENT) from None
        raise forbidden(scopes, resource) from None
    if not grant.allows(scopes, found.host.name):
        raise forbidden(scopes, resource)
    return found


def scopes_header(grant: Grant) -> bytes:
    """The header line by which the data path passes a grant to the control app."""
    return f"{HEADER_SCOPES}: {grant}\r\n".encode()


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def shown_only(grant: Grant, scopes: tuple[str, ...], found: Iterable[Deployment]) -> list[Deployment]:
    """Those that a key with one of `scopes` may see."""
    return [deployment for deployment in found if grant.allows(scopes, deployment.name)]
