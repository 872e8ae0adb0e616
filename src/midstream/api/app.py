"""The control app: every endpoint of the gateway that is not proxied inference, as ordinary ASGI.

Always holds: each response, errors included, is JSON in the API's shape (but /metrics, which is Prometheus' text).
The data path has checked the API key before a request comes here, says what it may do, and answers POSTs to inference paths
itself. Every endpoint is behind the scope that it asks for (fleet/access.py), and shows what the key may see.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from midstream.api.accounts import AccountsApi
from midstream.api.health import HealthApi
from midstream.api.inference import InferencePaths
from midstream.api.models import ModelsApi
from midstream.api.responses import ResponsesApi
from midstream.api.trajectories import SessionsApi
from midstream.core.errors import InvalidRequest, MidstreamError, NotFound
from midstream.fleet.access import guarded
from midstream.fleet.registry import Deployments
from midstream.proxy.metrics import GatewayMetrics


def control_app(
    deployments: Deployments,
    metrics: GatewayMetrics,
    *,
    created: int = 0,
    keyed: bool = False,
    apis: Iterable[object] = (),
) -> Starlette:
    """The app; `created` (seconds since the epoch) is when the model came to be served.

    keyed: API keys are in use, so a request that does not say what its key may do may do nothing. apis: further objects
    with methods that serve endpoints (core/endpoints.py).
    """
    own = (
        InferencePaths(),
        HealthApi(deployments, metrics),
        ModelsApi(deployments, created),
        AccountsApi(deployments),
        SessionsApi(deployments),
        ResponsesApi(deployments),
    )
    app = Starlette(
        routes=guarded((*own, *apis), deployments, keyed=keyed),
        exception_handlers={
            MidstreamError: _midstream_error,
            HTTPException: _http_exception,
            Exception: _unexpected,
        },
    )
    # A redirect would name the host that the client claims.
    app.router.redirect_slashes = False
    return app


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
