"""One completion of the gateway's public port, asked for until it is there.

Always holds: the same request is sent every time. An error that a retry may cure is retried until its time is up; any other one
is raised at once. One connection carries one request. It is closed when the caller is cancelled, which ends the generation.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.http.call import CallFailed, ResponseStream
from midstream_tinker.trainer.types import Failed

logger = logging.getLogger(__name__)

PATH = "/v1/completions"
# Time without a sign of life of the server. Then a sample fails.
UNREACHABLE_S = 600.0
# Time in all while the server is too busy.
BUSY_S = 3600.0
# Connections that ended under one request.
LOSSES_MAX = 10
CONNECT_S = 10.0
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 8.0
_BUSY = frozenset({408, 425, 429})
_ABSENT = frozenset({502, 503, 504})
# An option that the Tinker API does not have.
_HINT = " or set context_length_exceeded_behavior: truncate"


class Answer(NamedTuple):
    """headers: lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Lost(CallFailed):
    """The connection ended before the response did."""


class NotServed(Exception):
    """The snapshot that was asked for is not served. refusal: the gateway's body."""

    def __init__(self, refusal: Mapping[str, Any]) -> None:
        super().__init__(_message(refusal))
        self.refusal = refusal

    @property
    def serving(self) -> list[str]:
        entries = self.refusal.get("serving")
        found = [entry.get("snapshot") for entry in entries or () if isinstance(entry, dict)]
        return [snapshot for snapshot in found if isinstance(snapshot, str)]


class NotThere(Failed):
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
    ) -> Answer:
        """The answer of a 200. Raises Failed, and NotServed when `comes_back` says that waiting for the snapshot is in vain."""
        # Waited in all, and since the server gave a sign of life.
        waited_s = silent_s = 0.0
        pause_s, losses = FIRST_PAUSE_S, 0
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
                problem, asked_s = self._not_done(answer, comes_back), _retry_after_s(answer)
                spent_s = self._now() - began
                waited_s += spent_s
                silent_s = silent_s + spent_s if answer.status in _ABSENT else 0.0
            wait_s = max(asked_s, pause_s) * random.uniform(0.75, 1.25)
            waited_s, silent_s = waited_s + wait_s, silent_s + wait_s
            if waited_s > self._busy_s or silent_s > self._unreachable_s or losses > LOSSES_MAX:
                raise Failed(f"the server could not serve the sample: {problem}", "server")
            logger.debug("a sample is sent again in %.2f s: %s", wait_s, problem)
            await self._sleep(wait_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _not_done(self, answer: Answer, comes_back: Callable[[NotServed], bool]) -> str:
        """Why it is to be tried again. Raises what is final."""
        refusal = _decoded(answer.body)
        message = _message(refusal) or f"the server answered {answer.status}"
        if answer.status in _BUSY or answer.status in _ABSENT:
            return message
        if answer.status == 409:
            not_served = NotServed(refusal)
            if comes_back(not_served):
                return message
            raise not_served
        if answer.status == 404:
            raise NotThere(message)
        raise Failed(message.removesuffix(_HINT), "user" if 400 <= answer.status < 500 else "server")

    async def _send(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Raises CallFailed when there is no connection, Lost when it ended before the response did."""
        if not self.url:
            raise CallFailed("it is not up yet")
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n{lines}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        loop = asyncio.get_running_loop()
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        stream = _Response(request)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: stream, host, port, ssl=self._tls if secure else None)
            reason = await stream.ended
        except TimeoutError as error:
            raise CallFailed(f"no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            raise CallFailed(str(error) or type(error).__name__) from error
        finally:
            stream.abort()
        if reason is not None:
            raise Lost(reason)
        return Answer(stream.status, stream.headers, b"".join(stream.parts))


class _Response(ResponseStream):
    def __init__(self, request: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        super().__init__(request, self.parts.append)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except NOT_JSON:
        return {}


def _message(refusal: Mapping[str, Any]) -> str:
    error = refusal.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _retry_after_s(answer: Answer) -> float:
    value = answer.headers.get("retry-after", "").strip()
    return min(float(value), LAST_PAUSE_S) if value.isdecimal() else 0.0
