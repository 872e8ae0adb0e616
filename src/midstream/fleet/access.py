"""The scopes of API keys, enforced: on every route of an app, and on the deployment that a request is for.

Owns: how the gateway's data path tells the control app what a key may do, and the refusal with its line in the log.
Always holds:
- An endpoint is served only after its need was met. Where keys are in use, a request that does not say what its key may do
  may do nothing.
- To a key that is not for every deployment, a deployment that it may not use and one that does not exist look the same.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midstream.core.endpoints import Bound, Endpoint, bound, own_letters
from midstream.core.errors import Forbidden, InvalidRequest, NotFound
from midstream.core.headers import HEADER_SCOPES, HEADER_TENANT
from midstream.core.scopes import EVERYTHING, NOTHING, Grant, Need, forbidden, parse_grant
from midstream.fleet.registry import DEPLOYMENT_HEADER, MODEL_HEADER, Deployment, Deployments
from midstream.http.bodies import answered, body_of

logger = logging.getLogger(__name__)

# Characters of a client's text that are shown in a message or a line of the log.
SHOWN_CHARS = 200
# The key of the grant in a request's scope.
_STATE = "midstream.grant"

#: Raises what a request is refused with. The endpoint is the one that the request is to.
Check = Callable[[Request, Endpoint], None]
Handler = Callable[[Request], Awaitable[Response]]


def guarded(apis: Iterable[object], deployments: Deployments, *, keyed: bool) -> list[BaseRoute]:
    """The routes of the gateway's APIs, each behind what it needs. keyed: API keys are in use."""

    def check(request: Request, endpoint: Endpoint) -> None:
        told = request.headers.get(HEADER_SCOPES, "") if keyed else None
        grant = EVERYTHING if told is None else parse_grant(told.split())
        request.scope[_STATE] = grant
        if endpoint.need is not None:
            check_need(endpoint.need, grant, request, deployments)

    return routes_of(apis, check)


def routes_of(apis: Iterable[object], check: Check) -> list[BaseRoute]:
    """A route for each path of these objects' endpoints, with `check` before each handler, the most specific first."""
    by_path: dict[str, dict[str, Handler]] = {}
    for api in apis:
        for one in bound(type(api)):
            handler = _behind(check, api, one)
            for path in one.endpoint.paths:
                by_path.setdefault(path, {})[one.endpoint.method] = handler
    paths = sorted(by_path, key=lambda path: -own_letters(path))
    return [Route(path, _by_method(by_path[path]), methods=[*by_path[path]]) for path in paths]


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    async def serve(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return serve


def _behind(check: Check, api: object, one: Bound) -> Handler:
    endpoint, handler = one.endpoint, getattr(api, one.handler)

    async def serve(request: Request) -> Response:
        check(request, endpoint)
        given = () if one.reads is None else (await body_of(request, one.reads),)
        answer = await handler(request, *given)
        return answer if isinstance(answer, Response) else answered(answer, endpoint.status)

    return serve


def grant_of(request: Request) -> Grant:
    """What the key of a request to a guarded route may do."""
    grant: Grant = request.scope.get(_STATE, NOTHING)
    return grant


def check_need(need: Need, grant: Grant, request: Request, deployments: Deployments) -> None:
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
            named = headers.get(DEPLOYMENT_HEADER) or None, headers.get(MODEL_HEADER) or None
            meant(deployments, grant, need.scopes, lambda: deployments.named(headers), *named)
    except Forbidden as error:
        log_refusal(logger, request, request.headers.get(HEADER_TENANT, ""), error)
        raise


def meant(
    deployments: Deployments,
    grant: Grant,
    scopes: tuple[str, ...],
    find: Callable[[], Deployment],
    deployment: str | None,
    model: str | None,
) -> Deployment:
    """The deployment that `find` finds, for a key that is not for every one; what the request calls it, if anything.

    Raises Forbidden, and NotFound for a deployment that the key may use and that is not there.
    """
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
    except (NotFound, InvalidRequest):
        if deployment is not None and grant.allows(scopes, deployment.strip().partition("@")[0]):
            raise NotFound(f"{resource} is not served here", param=DEPLOYMENT_HEADER) from None
        raise forbidden(scopes, resource) from None
    if not grant.allows(scopes, found.host.name):
        raise forbidden(scopes, resource)
    return found


def log_refusal(log: logging.Logger, request: Request, tenant: str, error: Forbidden) -> None:
    where = quote(request.scope["path"])[:SHOWN_CHARS]
    log.warning("refused: tenant %s, %s %s: %s", tenant or "-", request.method, where, error.message)


def scopes_header(grant: Grant) -> bytes:
    """What the data path tells the control app."""
    return f"{HEADER_SCOPES}: {grant}".encode()


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def shown_only(grant: Grant, scopes: tuple[str, ...], found: Iterable[Deployment]) -> list[Deployment]:
    """Those that a key with one of `scopes` may see."""
    return [deployment for deployment in found if grant.allows(scopes, deployment.name)]
