"""Requests of the Tinker API, passed to the Tinker front: a process of its own behind a private Unix socket.

Always holds:
- The caller's API key is checked here as elsewhere, and reaches the front as it was sent: the front asks in its name.
- What the gateway itself answers has the front's shape, `{"detail", "param"}`, and is never a 5xx to who asks for a result:
  the SDK would ask again without a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.errors import MidstreamError, Overloaded, ReplicaUnavailable, Unauthorized
from midstream.gateway.auth import CREDENTIALS
from midstream.gateway.exchange import ControlExchange
from midstream.http_message import Request

if TYPE_CHECKING:
    from midstream.gateway.proxy import Proxy
    from midstream.http1 import ClientConnection

PREFIX = b"/api/v1/"
_RESULTS = (PREFIX + b"retrieve_future", PREFIX + b"retrieve_futures")
_PATH_CLASS = "tinker"


class _Shaped(MidstreamError):
    def body(self) -> dict[str, Any]:
        return {"detail": self.message, "param": self.param}


class FrontUnauthorized(_Shaped, Unauthorized):
    pass


class _Down(_Shaped, ReplicaUnavailable):
    pass


class _ResultNotYet(_Shaped, Overloaded):
    pass


class FrontExchange(ControlExchange):
    _shows_labels = True

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection) -> None:
        super().__init__(proxy, request, client, _PATH_CLASS)
        assert proxy.front is not None
        self._pool = proxy.front

    def _upstream_headers(self) -> list[bytes]:
        first, dropped = self._request.first, self._proxy.dropped_headers
        return [name + b": " + first[name] for name in CREDENTIALS if name in dropped and name in first]

    def _where(self) -> str:
        return "the Tinker front"

    def _fail(self, error: MidstreamError) -> None:
        path = self._request.target.partition(b"?")[0]
        super()._fail((_ResultNotYet if path in _RESULTS else _Down)(error.message))
