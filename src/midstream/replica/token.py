"""Keeps everybody but the gateway out of a replica: its port is open to every user of the machine.

Always holds: without the right token nothing of the app is reached; the comparison takes the same time whatever differs.
"""

from __future__ import annotations

import hmac
import json

from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.errors import Unauthorized
from midstream.types import HEADER_TOKEN


class TokenGuard:
    """ASGI middleware; an empty token lets everybody in (a replica started by hand)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token or self._known(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("this replica answers its gateway only")
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _known(self, scope: Scope) -> bool:
        name = HEADER_TOKEN.encode()
        given = next((value for key, value in scope["headers"] if key == name), b"")
        return hmac.compare_digest(given, self._token)
