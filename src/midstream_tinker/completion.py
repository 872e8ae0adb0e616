"""One completion of the gateway's public port, asked for until it is there.

Always holds: the same request is sent every time. An error that a retry may cure is retried until its time is up; any other one
is raised at once. One connection carries one request. It is closed when the caller is cancelled, which ends the generation.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from midstream.core.call_attempts import CallAttempts, Heard, NoAnswer, Verdict
from midstream.core.http_answer import HttpAnswer, NotThatAnswer
from midstream.core.retry import Backoff
from midstream.http.call import CallFailed, call, until_answered
from midstream_tinker.trainer.types import Category, WorkFailed

logger = logging.getLogger(__name__)

PATH = "/v1/completions"
# Time without a sign of life of the server. Then a sample fails.
UNREACHABLE_S = 600.0
# Time in all while the server is too busy.
BUSY_S = 3600.0
# Connections that ended under one request.
LOSSES_MAX = 10
CONNECT_S = 10.0
BACKOFF = Backoff(first_s=0.25, last_s=8.0)
# An option that the Tinker API does not have.
_HINT = " or set context_length_exceeded_behavior: truncate"


class NotServed(Exception):
    """The snapshot that was asked for is not served. refusal: the gateway's body."""

    def __init__(self, message: str, refusal: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.refusal = refusal

    @property
    def serving(self) -> list[str]:
        entries = self.refusal.get("serving")
        found = [entry.get("snapshot") for entry in entries or () if isinstance(entry, dict)]
        return [snapshot for snapshot in found if isinstance(snapshot, str)]


class NotThere(WorkFailed):
    """The model that was asked for is not known to the server."""


class Completions:
    def __init__(
        self,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        unreachable_s: float = UNREACHABLE_S,
        busy_s: float = BUSY_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """url: of the gateway, may change while requests are under way ("": not up yet). tls: for an https one."""
        self.url = url
        self._tls = tls
        self._unreachable_s = unreachable_s
        self._busy_s = busy_s
        self._sleep = sleep
        self._now = now

    def __repr__(self) -> str:
        return f"Completions({self.url})"

    async def complete(
        self, body: bytes, headers: Mapping[str, str], comes_back: Callable[[NotServed], bool]
    ) -> HttpAnswer:
        """The answer of a 200.

        Raises WorkFailed, and NotServed when `comes_back` says that waiting for the snapshot is in vain.
        """
        attempts = _SampleAttempts(self._unreachable_s, self._busy_s, comes_back, self._now)
        return await until_answered(attempts, lambda: self._send(body, headers), self._sleep)

    async def _send(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Raises CallFailed when there is no connection, Lost when it ended before the response did."""
        if not self.url:
            raise CallFailed("it is not up yet")
        given = {"connection": "close", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return await call(self.url, "POST", PATH, body, None, lines, connect_s=CONNECT_S, tls=self._tls)


class _SampleAttempts(CallAttempts):
    """Attempts for one sample. unreachable_s: the most time without a sign of life of the server. busy_s: the most time in all.
    Both in seconds, of requests and pauses. comes_back: whether the snapshot that a refusal asks for may be served yet."""

    def __init__(
        self,
        unreachable_s: float,
        busy_s: float,
        comes_back: Callable[[NotServed], bool],
        now: Callable[[], float],
    ) -> None:
        super().__init__(BACKOFF)
        self._unreachable_s = unreachable_s
        self._busy_s = busy_s
        self._comes_back = comes_back
        self._now = now
        self._began = now()
        # Waited in all, and since the server gave a sign of life.
        self._waited_s = self._silent_s = 0.0
        self._losses = 0

    def begin(self) -> None:
        super().begin()
        self._began = self._now()

    def verdict(self, answer: HttpAnswer) -> Verdict:
        if answer.status == 200:
            return "take"
        if answer.outcome in ("busy", "absent"):
            return "again"
        return "again" if answer.status == 409 and self._comes_back(_not_served(answer)) else "refuse"

    def pause_s(self, heard: Heard) -> float:
        # Many samples may wait for one server, so pauses grow whatever it asks for.
        asked_s = _asked_s(heard) if isinstance(heard, HttpAnswer) else 0.0
        return max(asked_s, super().pause_s(heard)) * random.uniform(0.75, 1.25)

    def allows(self, heard: Heard, pause_s: float) -> bool:
        if isinstance(heard, NoAnswer) and heard.lost:
            # The server worked on the request until then.
            self._silent_s = 0.0
            self._losses += 1
        else:
            spent_s = self._now() - self._began
            silent = isinstance(heard, NoAnswer) or heard.outcome == "absent"
            self._silent_s = self._silent_s + spent_s if silent else 0.0
            self._waited_s += spent_s
        self._waited_s += pause_s
        self._silent_s += pause_s
        late = self._waited_s > self._busy_s or self._silent_s > self._unreachable_s
        return not late and self._losses <= LOSSES_MAX

    def refused(self, answer: HttpAnswer) -> Exception:
        if answer.status == 409:
            return _not_served(answer)
        if answer.status == 404:
            return NotThere(answer.problem)
        category: Category = "user" if 400 <= answer.status < 500 else "server"
        return WorkFailed(answer.problem.removesuffix(_HINT), category)

    def gave_up(self, heard: Heard) -> WorkFailed:
        return WorkFailed(f"the server could not serve the sample: {heard.problem}", "server")

    def pausing(self, heard: Heard, pause_s: float) -> None:
        logger.debug("a sample is sent again in %.2f s: %s", pause_s, heard.problem)


def _not_served(answer: HttpAnswer) -> NotServed:
    return NotServed(answer.problem, _refusal(answer))


def _refusal(answer: HttpAnswer) -> dict[str, Any]:
    try:
        return answer.read(dict[str, Any])
    except NotThatAnswer:
        return {}


def _asked_s(answer: HttpAnswer) -> float:
    # A gateway names seconds. A date counts as passed, so that this needs no time of day.
    return min(answer.asked_pause_s(now=math.inf) or 0.0, BACKOFF.last_s)
