"""Endpoints as Starlette routes, with a check before each handler. And the line in the log of a refusal.

Always holds: an endpoint is served only after its check has returned. Of two paths that match a request, the more specific one
is served.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midstream.core.endpoints import Bound, Endpoint, bound, own_letters
from midstream.core.errors import Forbidden
from midstream.http.bodies import answered, body_of

# Characters of a path that are shown in a line of the log.
SHOWN_CHARS = 200

#: Raises what a request is refused with. The endpoint is the one that the request is to.
Check = Callable[[Request, Endpoint], None]
#: Reads the body of a request into a type. Raises what the request is refused with.
Read = Callable[[Request, type[Any]], Awaitable[Any]]
Handler = Callable[[Request], Awaitable[Response]]


def routes_of(apis: Iterable[object], check: Check, read: Read = body_of) -> list[BaseRoute]:
    """A route for each path of these objects' endpoints, with `check` before each handler, the most specific first."""
    by_path: dict[str, dict[str, Handler]] = {}
    for api in apis:
        for one in bound(type(api)):
            handler = _behind(check, read, api, one)
            for path in one.endpoint.paths:
                by_path.setdefault(path, {})[one.endpoint.method] = handler
    paths = sorted(by_path, key=lambda path: -own_letters(path))
    return [Route(path, _by_method(by_path[path]), methods=[*by_path[path]]) for path in paths]


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    async def serve(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return serve


def _behind(check: Check, read: Read, api: object, one: Bound) -> Handler:
    endpoint, handler = one.endpoint, getattr(api, one.handler)

    async def serve(request: Request) -> Response:
        check(request, endpoint)
        given = () if one.reads is None else (await read(request, one.reads),)
        answer = await handler(request, *given)
        return answer if isinstance(answer, Response) else answered(answer, endpoint.status)

    return serve


def log_refusal(log: logging.Logger, request: Request, tenant: str, error: Forbidden) -> None:
    where = quote(request.scope["path"])[:SHOWN_CHARS]
    log.warning("refused: tenant %s, %s %s: %s", tenant or "-", request.method, where, error.message)
