"""Requests of the Tinker API, passed to the Tinker front: a process of its own behind a private Unix socket.

Always holds:
- The caller's API key is checked here as elsewhere, and reaches the front as it was sent: the front asks in its name.
- The gateway's own answers have the front's shape, `{"detail", "param"}`. A request for a result never gets a 5xx of the
  gateway: the SDK would ask again without a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.core.errors import MidstreamError, Overloaded, ReplicaUnavailable, Unauthorized
from midstream.http.auth import CREDENTIALS
from midstream.http.message import Request
from midstream.proxy.route import Route

if TYPE_CHECKING:
    from midstream.proxy.proxy import Proxy

PREFIX = b"/api/v1/"
_RESULTS = (PREFIX + b"retrieve_future", PREFIX + b"retrieve_futures")


class _Shaped(MidstreamError):
    def body(self) -> dict[str, Any]:
        return {"detail": self.message, "param": self.param}


class FrontUnauthorized(_Shaped, Unauthorized):
    pass


class _Down(_Shaped, ReplicaUnavailable):
    pass


class _ResultNotYet(_Shaped, Overloaded):
    pass


class FrontRoute(Route):
    path_class = "tinker"

    def __init__(self, proxy: Proxy, request: Request) -> None:
        super().__init__(proxy, request)
        self.shows_labels = True
        assert proxy.front is not None
        self.pool = proxy.front

    def own_lines(self) -> list[bytes]:
        first, dropped = self._request.first, self._proxy.dropped_headers
        given = (name for name in CREDENTIALS if name in dropped and name in first)
        return [b"%b: %b\r\n" % (name, first[name]) for name in given]

    def where(self) -> str:
        return "the Tinker front"

    def shaped(self, error: MidstreamError) -> MidstreamError:
        path = self._request.target.partition(b"?")[0]
        return (_ResultNotYet if path in _RESULTS else _Down)(error.message)
