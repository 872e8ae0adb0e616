"""A request for OpenAI's Responses API, which may continue a response that another replica holds.

Only a replica reads the body. One that has no such response answers with a 404 that names the replica of the response's id
(core/responses.py), and the request goes there.

Always holds: a request is sent on so once. Where the replica it names cannot be asked now, the answer is a 503, as the response
may still be there.
"""

from __future__ import annotations

from collections.abc import Sequence

from midstream.core.errors import ReplicaUnavailable
from midstream.core.responses import HEADER_HELD_BY
from midstream.fleet.view import ReplicaView
from midstream.http.upstream import UpstreamHead
from midstream.proxy.replica_route import ReplicaRoute
from midstream.proxy.request_state import RequestEvent, RequestPhase, Ruling, ruling
from midstream.proxy.route import ELSEWHERE, HEAD, Judgement

RESPONSES = "responses"
_HELD_BY = HEADER_HELD_BY.encode()


class ResponsesRoute(ReplicaRoute):
    #: The replicas that are passed over for the one that holds the response.
    _passed: frozenset[str] = frozenset()

    def head(self, phase: RequestPhase, head: UpstreamHead) -> RequestEvent:
        if head.status == 200 and phase is RequestPhase.SENT:
            # Others may continue the stream if this one is lost.
            self._tries.replicas -= self._passed
        return super().head(phase, head)

    def held(self, phase: RequestPhase, refusal: RequestEvent, head: UpstreamHead) -> Judgement:
        if ruling(phase, refusal) is Ruling.HOLDER:
            return self._to_holder(head)
        return super().held(phase, refusal, head)

    def _to_holder(self, head: UpstreamHead) -> Judgement:
        named = next((value for name, value in head.headers if name == _HELD_BY), b"").decode("latin-1")
        views, leaving = self._deployment.replicas.views, self._deployment.replicas.leaving
        holder = view_named((*views, *leaving), named)
        if self._passed or holder is None or holder is self._at.view or holder.name in self._tries.replicas:
            return HEAD
        if not holder.usable:
            return self._failed(ReplicaUnavailable(f"{named}, which made the response, cannot be asked now"))
        self._passed = frozenset(view.name for view in views if view is not holder) - self._tries.replicas
        self._tries.replicas |= self._passed
        self._proxy.metrics.retries["holder"] += 1
        return ELSEWHERE


def view_named(views: Sequence[ReplicaView], name: str) -> ReplicaView | None:
    """The replica of this name, which may be one of its own that the gateway does not use."""
    for view in views:
        if name in (view.name, view.report.replica if view.report else None):
            return view
    return None
