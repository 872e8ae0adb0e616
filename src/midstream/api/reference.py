"""The reference of the HTTP API, served: an OpenAPI document, and a page that shows it.

    GET /openapi.json    GET /docs    GET /docs/FILE

Always holds:
- They say nothing of the server but its version, so they need no key, as the dashboard's page and files do.
- The document is made when it is first asked for, in a thread, and kept. A start costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from midstream.api.pages import page_file, tag_of, tagged
from midstream.core.scopes import DOCS, DOCS_FILES, OPENAPI

_PACKAGE = "midstream.apidocs"
#: The arguments of openapi.document.
Behind = Callable[[], tuple[Any, Any]]


def reference_routes(behind: Behind) -> list[BaseRoute]:
    """Routes for the control app. behind: the bodies and answers of the processes behind the gateway, as openapi.document takes
    them; called once, when the document is made."""
    made = _Document(behind)
    return [
        Route(OPENAPI, made.get, methods=["GET"]),
        Route(DOCS, page_file(_PACKAGE, "index.html"), methods=["GET"]),
        *(Route(f"{DOCS}/{name}", page_file(_PACKAGE, name), methods=["GET"]) for name in DOCS_FILES),
    ]


class _Document:
    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self._making = asyncio.Lock()
        self._made: tuple[bytes, str] | None = None

    async def get(self, request: Request) -> Response:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)
        return tagged(request, *self._made, "application/json")

    def _make(self) -> tuple[bytes, str]:
        from midstream.api.openapi import document

        data = msgspec.json.encode(document(*self._behind()))
        return data, tag_of(data)
