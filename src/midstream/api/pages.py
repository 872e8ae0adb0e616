"""The files of pages: the dashboard's, and those that show the HTTP API.

Always holds:
- Nothing is loaded from elsewhere, and no page may be framed.
- A file is read when it is first asked for. A browser that has it asks for it again by its digest alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

#: By the end of a file's name.
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def kinds_of(names: Iterable[str]) -> tuple[str, ...]:
    """The media types of these files."""
    return tuple(sorted({_kind_of(name) for name in names}))


def _kind_of(name: str) -> str:
    return TYPES[name.rpartition(".")[2]]


class Pages:
    """The files of a package that are shown. names: of the files."""

    def __init__(self, package: str, names: Collection[str]) -> None:
        self._package, self._names = package, frozenset(names)
        self._read: dict[str, tuple[bytes, str]] = {}

    def shown(self, request: Request, name: str) -> Response:
        """Raises HTTPException (404) for a file that is not shown."""
        if name not in self._names:
            raise HTTPException(404)
        if name not in self._read:
            data = (files(self._package) / name).read_bytes()
            self._read[name] = data, tag_of(data)
        return tagged(request, *self._read[name], _kind_of(name))


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
