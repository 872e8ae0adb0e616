"""The attempts of one call to a server: whether an answer ends the call, and when the request is sent again. Pure.

Each caller has its own subclass of `CallAttempts`. Two drivers send requests and sleep: `client/calls.py` in a thread, and
`until_answered` of `http/call.py` in an event loop.
Always holds: a call ends with an answer that its rules take, or with an error that the caller's class makes. No rule about
attempts stands in a driver.
"""

from __future__ import annotations

import abc
from typing import Literal, NamedTuple

from midstream.core.http_answer import HttpAnswer
from midstream.core.retry import Backoff


class NoAnswer(NamedTuple):
    """Nothing came back, or no whole answer. problem: why. lost: the connection ended before the answer did, so the server may
    have worked on the request."""

    problem: str
    lost: bool = False


#: What an attempt ends with.
Heard = HttpAnswer | NoAnswer
#: take: the answer is what the call returns. again: a repeated request may be answered otherwise. refuse: it would not.
Verdict = Literal["take", "again", "refuse"]


class CallAttempts(abc.ABC):
    """One call. For each attempt the driver calls `begin`, sends the request, and passes what came of it to `after`. It stops
    when `after` returns an answer, or raises.

    begun: how many attempts have begun.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.begun = 0
        self._backoff = backoff

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.begun} begun)"

    def begin(self) -> None:
        """The driver sends the request now."""
        self.begun += 1

    def after(self, heard: Heard) -> HttpAnswer | float:
        """What follows an attempt that ended with `heard`: the answer of the call, or the pause before the next attempt, in
        seconds. Raises the errors of `refused` and `gave_up`."""
        if isinstance(heard, HttpAnswer):
            verdict = self.verdict(heard)
            if verdict == "take":
                return heard
            if verdict == "refuse":
                raise self.refused(heard)
        pause_s = self.pause_s(heard)
        if not self.allows(heard, pause_s):
            raise self.gave_up(heard)
        self.pausing(heard, pause_s)
        return pause_s

    def verdict(self, answer: HttpAnswer) -> Verdict:
        """As the table of outcomes says."""
        if answer.outcome == "done":
            return "take"
        return "refuse" if answer.outcome == "refused" else "again"

    def pause_s(self, heard: Heard) -> float:
        """The pause after `heard`, in seconds: it grows with each attempt."""
        return self._backoff.pause_s(self.begun)

    @abc.abstractmethod
    def allows(self, heard: Heard, pause_s: float) -> bool:
        """Whether another attempt may follow `heard` after such a pause. Called once for each attempt that ends the call in no
        other way."""

    @abc.abstractmethod
    def refused(self, answer: HttpAnswer) -> Exception:
        """The error of a call whose request has to change."""

    @abc.abstractmethod
    def gave_up(self, heard: Heard) -> Exception:
        """The error of a call that may not be tried again. heard: what the last attempt ended with."""

    def pausing(self, heard: Heard, pause_s: float) -> None:  # noqa: B027 - optional to override
        """The pause begins. A subclass may log it."""
