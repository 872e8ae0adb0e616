"""When a request is sent again: what an answer means for a retry, the pause before it, and the time that there is in all.

Always holds: everything here is pure, but for the clock that a deadline reads. The statuses are those of the error tree
(errors.py), and the table below is the only place that says which of them a retry may cure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

from midstream.core.errors import Overloaded, ReplicaUnavailable, RequestTimeout, SnapshotTransition

#: done: a 2xx. busy: the server works, and cannot serve this request now. absent: no server answered, only perhaps a proxy
#: before it. failed: an error inside the server. refused: the request has to change.
Outcome = Literal["done", "busy", "absent", "failed", "refused"]

#: The exceptions to the rule that a 2xx is done, any other answer below 500 a refusal, and the rest a failure.
OUTCOMES: dict[int, Outcome] = {
    RequestTimeout.status: "busy",
    SnapshotTransition.status: "busy",
    Overloaded.status: "busy",
    502: "absent",
    ReplicaUnavailable.status: "absent",
    504: "absent",
}


def outcome_of(status: int) -> Outcome:
    if status in OUTCOMES:
        return OUTCOMES[status]
    if status >= 500:
        return "failed"
    return "done" if 200 <= status < 300 else "refused"


@dataclass(frozen=True)
class Backoff:
    """Pauses between attempts, in seconds: the first one, then each twice as long as the one before, up to the last."""

    first_s: float
    last_s: float

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """The pause after so many failures in a row, at least 1. asked_s: the pause that the server asked for.

        A server that asks for no pause at all is asked again with growing ones, all the same.
        """
        return asked_s or min(self.last_s, self.first_s * 2.0 ** min(failures - 1, 30))


class Deadline:
    """The time that a call has in all, with its retries. total_s: in seconds, from now on."""

    def __init__(self, total_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.total_s = total_s
        self._monotonic = monotonic
        self._until = monotonic() + total_s

    def __repr__(self) -> str:
        return f"Deadline({self.left_s:.1f} of {self.total_s:g} s left)"

    @property
    def left_s(self) -> float:
        """Negative when it has passed."""
        return self._until - self._monotonic()

    def allows(self, pause_s: float) -> bool:
        """True if the deadline has not passed after such a pause."""
        return pause_s <= self.left_s


def asked_pause_s(retry_after: str, now: float) -> float | None:
    """The pause that a Retry-After header asks for, in seconds; None when it is unreadable, or empty.

    now: seconds since the epoch.
    """
    value = retry_after.strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return None
