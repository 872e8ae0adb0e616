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

from midstream.core.http_answer import HttpAnswer, NotThatAnswer
from midstream.core.retry import Backoff
from midstream.http.call import CallFailed, Lost, call
from midstream_tinker.trainer.types import WorkFailed

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
        # Waited in all, and since the server gave a sign of life.
        waited_s = silent_s = 0.0
        failures = losses = 0
        while True:
            began, asked_s = self._now(), 0.0
            try:
                answer = await self._send(body, headers)
            except Lost as error:
                # The server worked on the request until then.
                problem, silent_s, losses = str(error), 0.0, losses + 1
            except CallFailed as error:
                problem, spent_s = str(error), self._now() - began
                waited_s, silent_s = waited_s + spent_s, silent_s + spent_s
            else:
                if answer.status == 200:
                    return answer
                problem, asked_s = self._not_done(answer, comes_back), _asked_s(answer)
                spent_s = self._now() - began
                waited_s += spent_s
                silent_s = silent_s + spent_s if answer.outcome == "absent" else 0.0
            failures += 1
            # Many samples may wait for one server, so pauses grow whatever it asks for.
            wait_s = max(asked_s, BACKOFF.pause_s(failures)) * random.uniform(0.75, 1.25)
            waited_s, silent_s = waited_s + wait_s, silent_s + wait_s
            if waited_s > self._busy_s or silent_s > self._unreachable_s or losses > LOSSES_MAX:
                raise WorkFailed(f"the server could not serve the sample: {problem}", "server")
            logger.debug("a sample is sent again in %.2f s: %s", wait_s, problem)
            await self._sleep(wait_s)

    def _not_done(self, answer: HttpAnswer, comes_back: Callable[[NotServed], bool]) -> str:
        """Why it is to be tried again. Raises what is final."""
        message = answer.message or f"the server answered {answer.status}"
        if answer.outcome in ("busy", "absent"):
            return message
        if answer.status == 409:
            not_served = NotServed(message, _refusal(answer))
            if comes_back(not_served):
                return message
            raise not_served
        if answer.status == 404:
            raise NotThere(message)
        raise WorkFailed(message.removesuffix(_HINT), "user" if 400 <= answer.status < 500 else "server")

    async def _send(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        """Raises CallFailed when there is no connection, Lost when it ended before the response did."""
        if not self.url:
            raise CallFailed("it is not up yet")
        given = {"connection": "close", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return await call(self.url, "POST", PATH, body, None, lines, connect_s=CONNECT_S, tls=self._tls)


def _refusal(answer: HttpAnswer) -> dict[str, Any]:
    try:
        return answer.read(dict[str, Any])
    except NotThatAnswer:
        return {}


def _asked_s(answer: HttpAnswer) -> float:
    # A gateway names seconds. A date counts as passed, so that this needs no time of day.
    return min(answer.asked_pause_s(now=math.inf) or 0.0, BACKOFF.last_s)
