"""A request that asks for certain snapshots: sent where one serves, made to wait for it, or answered with what is served.

Owns: reading the wish from headers and from a replica's refusal (versions.py), and the wait.
Always holds: a request without a wish costs four look-ups; no body is read for one; a body is read before its request waits, so
that one that contradicts its headers is refused at once; what waits is woken by reports and signals,
and ends when its client leaves; a stream that goes on elsewhere is still bound to the snapshot that it is pinned to, and one
of whose rest nothing was computed yet to the whole wish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from midstream.errors import MidstreamError, SnapshotNotServed
from midstream.fleet.view import ReplicaView
from midstream.gateway.bodies import NOT_JSON
from midstream.gateway.inference import InferenceExchange
from midstream.gateway.versions import REFUSE, SEND, Admission, Verdict
from midstream.names import HEADER_MODEL, ServedNames
from midstream.types import ReplicaReport
from midstream.versions import (
    HEADER_ADMITTED,
    HEADER_REFUSED,
    NOTHING,
    Refusal,
    Wish,
    as_header,
    from_header,
    wish_of_body,
    wish_of_headers,
)

if TYPE_CHECKING:
    from midstream.gateway.proxy import Placed

BODY_READ_BYTES_MAX = 2**20  # a longer one is read by a replica only
_MODEL = HEADER_MODEL.encode()
_ADMITTED = HEADER_ADMITTED.encode()
_REFUSED = HEADER_REFUSED.encode()


class _Asking(msgspec.Struct):
    model: str
    midstream: dict[str, Any] | None = None


_body = msgspec.json.Decoder(_Asking)


class VersionedExchange(InferenceExchange):
    _wish: Wish | None = None  # of the headers
    _admission: Admission | None = None
    _verdict: Verdict = SEND
    _timer: asyncio.TimerHandle | None = None  # of a wait
    _unfit: Refusal | None = None  # said by the replica whose answer is being read
    _begun = False  # its stream is to go on under a snapshot that is fixed, or under any: only its pin counts
    _sent_under: ReplicaReport | None = None  # what was known of the replica that it was sent to

    def start(self) -> None:
        try:
            self._wish = wish_of_headers(self._request.first)
        except MidstreamError as error:
            self._fail(error)
            return
        super().start()

    # -- upstream.ResponseSink

    def response_head(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        refused = status == SnapshotNotServed.status and not self._answered
        self._unfit = _refusal(headers) if refused else None
        if self._unfit is None:
            super().response_head(status, reason, headers, body)
        else:
            self._not_begun()

    def response_body(self, data: bytes) -> None:
        if self._unfit is None:
            super().response_body(data)

    def response_end(self) -> None:
        unfit, self._unfit = self._unfit, None
        if unfit is None:
            super().response_end()
            return
        assert self._view is not None
        self._connection = None
        if self._admission is None:
            self._admission = self._asking(NOTHING)
        try:
            self._admission.refused(self._view, unfit, self._sent_under)
        except MidstreamError as error:
            self._fail(error)
            return
        self._proxy.metrics.retries["other_snapshot"] += 1
        self._send_to_a_replica()

    # -- which replica

    def _place(self) -> Placed | None:
        if self._admission is None:
            if self._wish is None:
                return super()._place()
            self._admission = self._asking(self._wish)
        if self._begun:
            self._admission.go_on()
        else:
            self._verdict = self._judged(self._admission)
        return super()._place() if self._verdict is SEND else None

    def _eligible(self) -> Callable[[ReplicaView], bool] | None:
        return None if self._admission is None else self._admission.fits

    def _not_placed(self) -> None:
        verdict, replicas = self._verdict, self._deployment.replicas
        if self._admission is None or verdict is SEND:
            super()._not_placed()
        elif not self._admission.body_known and len(self._request.body) <= BODY_READ_BYTES_MAX:
            self._judge_with_body(self._admission)
        elif verdict is REFUSE:
            self._fail(self._admission.refusal(replicas.views))
        else:
            self._waits = True
            replicas.wait(self._send_to_a_replica, any_report=self._admission.doubted)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(verdict.until, self._send_to_a_replica)

    def _judge_with_body(self, admission: Admission) -> None:
        """Before it waits, or is refused: the body may ask for something else than the headers, or name what is not here."""
        try:
            admission.learn_body(
                wish_of_request(self._deployment.names, self._request.first, self._request.body)
            )
        except MidstreamError as error:
            self._fail(error)
        else:
            self._send_to_a_replica()

    def _asking(self, wish: Wish) -> Admission:
        return Admission(wish, self._deployment.order, asyncio.get_running_loop().time())

    def _judged(self, admission: Admission) -> Verdict:
        replicas, session = self._deployment.replicas, self._session
        home = None if session is None else self._deployment.sessions.home(session)
        at_home = None if home is None else replicas.named(home)
        if at_home is not None and not at_home.usable:
            at_home = None
        return admission.judge(replicas.views, self._tried, at_home, asyncio.get_running_loop().time())

    def _left(self) -> None:
        super()._left()
        self._unfit = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- what kinds of exchanges differ in

    def _upstream_headers(self) -> list[bytes]:
        lines = super()._upstream_headers()
        assert self._view is not None
        self._sent_under = self._view.report
        if self._admission is not None:
            admitted = self._admission.header(self._view)
            if admitted is not None:
                lines.append(_ADMITTED + b": " + as_header(admitted).encode())
        return lines


def _refusal(headers: list[tuple[bytes, bytes]]) -> Refusal | None:
    return next((from_header(value, Refusal) for name, value in headers if name == _REFUSED), None)


def wish_of_request(names: ServedNames, headers: Mapping[bytes, bytes], body: bytes) -> Wish:
    """What a body, or the name of its model, asks for: what a replica would say of it. Nothing, if the body cannot be read:
    the replica names what is wrong with it. `headers` have lower-case names.

    Raises NotFound for a model that is not served here, and InvalidRequest.
    """
    try:
        fields = _body.decode(body)
    except NOT_JSON:
        return NOTHING
    named = names.wanted(fields.model, headers.get(_MODEL, b"").decode("utf-8", "replace"))
    return wish_of_body(fields.midstream).with_(Wish(named))
