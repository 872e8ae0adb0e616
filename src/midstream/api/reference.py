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

from midstream.api.pages import Pages, kinds_of, tag_of, tagged
from midstream.core.endpoints import HTML, Endpoint
from midstream.core.pages import DOCS, DOCS_FILES, OPENAPI


class ReferenceApi:
    """make: makes the document; called once, in a thread, when it is first asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._pages = Pages("midstream.apidocs", ("index.html", *DOCS_FILES))
        self._make = make
        self._making = asyncio.Lock()
        self._made: tuple[bytes, str] | None = None

    @Endpoint("GET", OPENAPI, None, "Gives this document.")
    async def document(self, request: Request) -> Response:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._encoded)
        return tagged(request, *self._made, "application/json")

    @Endpoint("GET", DOCS, None, "Shows this document.", kinds=HTML)
    async def page(self, request: Request) -> Response:
        return self._pages.shown(request, "index.html")

    @Endpoint(
        "GET",
        DOCS + "/{file}",
        None,
        "Gives a file of the page that shows it.",
        kinds=kinds_of(DOCS_FILES),
        files=DOCS_FILES,
    )
    async def file(self, request: Request) -> Response:
        return self._pages.shown(request, request.path_params["file"])

    def _encoded(self) -> tuple[bytes, str]:
        data = msgspec.json.encode(self._make())
        return data, tag_of(data)
