"""The gateway's span of a request for inference, where spans are exported (core/tracing.py).

Always holds: a span begins with its request and ends with the response, once. Replicas continue it, also those that the request
is sent to again.
"""

from __future__ import annotations

from midstream.core.tracing import HEADER_TRACEPARENT, HEADER_TRACESTATE, Attribute, Tracer
from midstream.http.message import Request
from midstream.proxy.route import Route

_CONTEXT = (HEADER_TRACEPARENT.encode(), HEADER_TRACESTATE.encode())
_SERVER_ERROR = 500


class RequestSpan:
    def __init__(self, tracer: Tracer, request: Request) -> None:
        self._path = request.target.partition(b"?")[0].decode("latin-1")
        self._method = request.method.decode("latin-1")
        context = {
            name.decode(): request.first[name].decode("latin-1") for name in _CONTEXT if name in request.first
        }
        self._span = tracer.begin(f"{self._method} {self._path}", context)
        #: To be sent to each replica.
        self.line = b"%b: %b\r\n" % (_CONTEXT[0], self._span.traceparent.encode())
        self._sent = 0
        self._status = 0

    def sent(self, route: Route) -> None:
        """It goes to a replica."""
        self._sent += 1
        if not self._span.unseen:
            self._span.event("sent", route.span_attributes())

    def head(self, status: int) -> None:
        """The client gets the head of its response."""
        self._status = status
        if not self._span.unseen:
            self._span.event("first byte", {})

    def end(self, route: Route, status: int | None = None, error: str | None = None) -> None:
        """status: of an error that the client gets; None: of the head that it got."""
        if self._span.unseen:
            self._span.end({})
            return
        status = self._status if status is None else status
        attributes: dict[str, Attribute] = {
            "http.request.method": self._method,
            "url.path": self._path,
            "http.response.status_code": status,
            "midstream.sends": self._sent,
            **route.span_attributes(),
        }
        if error is None and status >= _SERVER_ERROR:
            error = str(status)
        self._span.end(attributes, error)
