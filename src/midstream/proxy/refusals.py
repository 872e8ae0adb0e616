"""What a replica's answer is, by its status and headers. Pure.

Always holds: each answer is one event of the table (request_state.py): the head that the client gets, or the one reason of a
refusal. A replica's own word for the reason, in a header, goes before the status.
"""

from __future__ import annotations

from midstream.core.errors import (
    HEADER_ANOTHER_BOOT,
    HEADER_HANDED,
    HEADER_LOST,
    HEADER_NOT_LOADED,
    NotFound,
    Overloaded,
    ReplicaUnavailable,
    SnapshotNotServed,
    SnapshotTransition,
)
from midstream.core.price import Handed
from midstream.core.responses import HEADER_HELD_BY
from midstream.core.versions import HEADER_REFUSED, from_header
from midstream.proxy.heads import Headers
from midstream.proxy.request_state import RequestEvent, RequestPhase

#: By status: what a header says of the reason.
_BY_HEADER: dict[int, dict[bytes, RequestEvent]] = {
    ReplicaUnavailable.status: {
        HEADER_LOST.encode(): RequestEvent.ENGINE_LOST,
        HEADER_ANOTHER_BOOT.encode(): RequestEvent.OTHER_BOOT,
        HEADER_NOT_LOADED.encode(): RequestEvent.POLICY_NOT_LOADED,
        HEADER_HANDED.encode(): RequestEvent.HANDED_OVER,
    },
    SnapshotNotServed.status: {HEADER_REFUSED.encode(): RequestEvent.UNFIT},
    NotFound.status: {HEADER_HELD_BY.encode(): RequestEvent.HELD_ELSEWHERE},
}
#: What the status alone says.
_BY_STATUS = {
    SnapshotTransition.status: RequestEvent.TRANSITION,
    Overloaded.status: RequestEvent.BUSY,
    ReplicaUnavailable.status: RequestEvent.UNAVAILABLE,
}
#: They do not show that the replica is well: requests that failed on it before still count.
NO_SIGN_OF_LIFE = frozenset((RequestEvent.ENGINE_LOST, RequestEvent.OTHER_BOOT, RequestEvent.UNAVAILABLE))
_HANDED = HEADER_HANDED.encode()
_CHUNKED = (b"transfer-encoding", b"chunked")


def handed_in(headers: Headers) -> Handed | None:
    """What a replica says of a turn that it hands over; None: nothing that can be read."""
    return next((from_header(value, Handed) for name, value in headers if name == _HANDED), None)


def answer(phase: RequestPhase, status: int, headers: Headers) -> RequestEvent:
    """HEAD, or the reason of a refusal. phase: SENT or RESUME_SENT."""
    resuming = phase is RequestPhase.RESUME_SENT
    if status == 200:
        # Nearly all answers take this branch.
        return RequestEvent.CANNOT_RESUME if resuming and _CHUNKED not in headers else RequestEvent.HEAD
    events = _BY_HEADER.get(status)
    if events is not None:
        for name, _ in headers:
            if name in events:
                return events[name]
    return _BY_STATUS.get(status, RequestEvent.CANNOT_RESUME if resuming else RequestEvent.HEAD)
