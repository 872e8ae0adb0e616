"""The files of pages: the dashboard's, and those that show the HTTP API.

Always holds:
- Nothing is loaded from elsewhere, and no page may be framed.
- A file is read when it is first asked for. A browser that has it asks for it again by its digest alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

#: By the end of a file's name.
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_file(package: str, name: str) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that gives a file of the package."""
    kind = TYPES[name.rpartition(".")[2]]

    @cache
    def read() -> tuple[bytes, str]:
        data = (files(package) / name).read_bytes()
        return data, tag_of(data)

    async def get(request: Request) -> Response:
        return tagged(request, *read(), kind)

    return get


def tag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:24]}"'


def tagged(request: Request, data: bytes, tag: str, kind: str) -> Response:
    """data, or a 304 to a client that has it. tag: of data."""
    headers = {
        "etag": tag,
        "cache-control": "no-cache",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
