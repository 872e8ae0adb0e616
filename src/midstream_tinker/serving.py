"""What the front's endpoints share: who calls, the request's body, JSON answers, errors.

Always holds: a route is served only to a key that has the scope it needs. Every error is a JSON object `{"detail", "param"}`
with a sentence for a person. A body is read up to a limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from midstream.core.beside import beside
from midstream.core.endpoints import JSON, Endpoint, Parameter
from midstream.core.errors import MidstreamError, Unauthorized
from midstream.core.scopes import EVERYTHING, PUBLISH, SAMPLE, Grant, ScopeNeed, forbidden
from midstream.http.auth import Authenticator, tenant_of
from midstream.http.routes import log_refusal
from midstream_tinker.refusals import TinkerRefusal

PREFIX = "/api/v1"
#: Where a request's ASGI scope has its TinkerCaller.
CALLER = "tinker_caller"
#: Where it has the Endpoint that it is to. A path may match a route by more letters than the endpoint's own.
ENDPOINT = "tinker_endpoint"
#: On the default deployment, which the front is of.
SAMPLES, TRAINS = ScopeNeed((SAMPLE,), "meant"), ScopeNeed((PUBLISH,), "meant")
EITHER = ScopeNeed((SAMPLE, PUBLISH), "meant")
MAX_JSON_BYTES = 1 << 20
MAX_SAMPLE_BYTES = 16 << 20
# The SDK sends 5 MB together. One datum alone may have more: 48 layers of 8 experts are 3 KB of routes a token, in int64. The
# gateways before the front take 64 MiB, unless their settings allow more.
MAX_TRAINING_BYTES = 512 << 20
# A number in JSON takes up to 24 times its own size in memory.
MAX_JSON_LOSS_BYTES = 8 << 20

logger = logging.getLogger(__name__)


def get(path: str, summary: str, *query: Parameter, need: ScopeNeed | None = EITHER) -> Endpoint:
    return Endpoint("GET", f"{PREFIX}/{path}", need, summary, query, errors="tinker")


def post(
    path: str,
    need: ScopeNeed,
    summary: str,
    body: type[msgspec.Struct] | None = None,
    *,
    also_read: tuple[str, ...] = (),
    answer: Any = Any,
    kinds: tuple[str, ...] = JSON,
) -> Endpoint:
    """body, also_read, answer, kinds: as of Endpoint, where the handler's annotations do not say them."""
    return Endpoint(
        "POST",
        f"{PREFIX}/{path}",
        need,
        summary,
        body=body,
        also_read=also_read,
        answer=answer,
        kinds=kinds,
        errors="tinker",
    )


class TinkerCaller(NamedTuple):
    tenant: str
    # The key as it was presented, for requests in the caller's name.
    api_key: str | None


def caller(request: Request) -> TinkerCaller:
    """As check_scope found it. Every endpoint that needs a scope has one."""
    found: TinkerCaller = request.scope[CALLER]
    return found


def endpoint_of(request: Request) -> Endpoint:
    """As check_scope was given it."""
    found: Endpoint = request.scope[ENDPOINT]
    return found


def check_scope(authenticator: Authenticator, request: Request, endpoint: Endpoint, deployment: str) -> None:
    """Whether the caller may ask this of the front of this deployment. Raises Unauthorized, Forbidden."""
    request.scope[ENDPOINT], need = endpoint, endpoint.need
    if need is None:
        return
    caller, grant = _known(authenticator, request)
    request.scope[CALLER] = caller
    if grant is not EVERYTHING and not grant.allows(need.scopes, deployment):
        error = forbidden(need.scopes, "the deployment of the Tinker API")
        log_refusal(logger, request, caller.tenant, error)
        raise error


def _known(authenticator: Authenticator, request: Request) -> tuple[TinkerCaller, Grant]:
    """Raises Unauthorized. Without configured keys every key presented is a tenant of its own, and none is one too."""
    key = request.headers.get("x-api-key", "").strip()
    scheme, _, bearer = request.headers.get("authorization", "").strip().partition(" ")
    presented = [key] if key else []
    if scheme.lower() == "bearer" and bearer.strip():
        presented.append(bearer.strip())
    if not authenticator.required:
        one = presented[0] if presented else None
        return TinkerCaller(tenant_of(one or ""), one), EVERYTHING
    for one in presented:
        try:
            known = authenticator.caller({b"x-api-key": one.encode("latin-1")})
        except Unauthorized:
            continue
        return TinkerCaller(known.tenant, one), known.grant
    raise Unauthorized("a valid API key is needed, as 'X-API-Key: KEY' or 'Authorization: Bearer KEY'")


async def body_of(request: Request, limit: int = MAX_JSON_BYTES) -> bytes:
    """Raises TinkerRefusal (413; 400 for an encoding that was not agreed)."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise TinkerRefusal(400, f"bodies in {encoding} are not read here", "content-encoding")
    parts: list[bytes] = []
    size = 0
    # Starlette ends a body with an empty part.
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TinkerRefusal(413, f"the body has more than {limit >> 20} MiB")
        if part:
            parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return await beside.run(size, lambda: b"".join(parts))


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """A client's own notes as the SDK reads them back: texts only."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }


def _error(detail: str, param: str | None, status: int, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"detail": detail, "param": param})
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def tinker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinkerRefusal)
    return _error(error.detail, error.param, error.status, error.headers())


async def midstream_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MidstreamError)
    status = 400 if error.status == 409 else error.status
    return _error(error.message, error.param, status, error.headers())


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.scope['path']}"
    detail = {
        404: f"{where} is not part of the Tinker API as this server has it",
        405: f"{where}: the method is not one of this path",
    }.get(error.status_code, f"{error.detail}: {where}")
    return _error(detail, None, error.status_code, error.headers)


async def disconnected(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    # The client is gone: no response is sent.
    return Response(status_code=400)


async def unexpected(request: Request, error: Exception) -> Response:
    return _error("the server failed on this request; its log says why", None, 500)
