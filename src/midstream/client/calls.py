"""HTTP requests of the client: the retry rules of the hot-load API, and the deadline of a call.

Always holds: a request is sent again only after no answer, 408, 425, 429 or 5xx, with growing pauses or those of Retry-After.
No request begins after the deadline, and none of a bounded `Caller` lasts past it.
"""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import msgspec

from midstream.client.errors import SignalRefused, Unanswered
from midstream.core.text import NOT_JSON

logger = logging.getLogger(__name__)

RETRY_STATUSES = frozenset({408, 425, 429})
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 10.0
#: A request that failed so often says so, once.
SAID_AFTER = 3
#: Of a server's words.
MESSAGE_CHARS_MAX = 1000


class Answer(NamedTuple):
    """body: decoded JSON. attempts: how many requests it took."""

    body: Any
    attempts: int


class _TimeLeft(dict[str, float | None]):
    """httpx's timeouts of one request, in seconds: each phase has at most the time that is left when it begins."""

    def __init__(self, usual: httpx.Timeout, left_s: Callable[[], float]) -> None:
        super().__init__(usual.as_dict())
        self._left_s = left_s

    def get(self, phase: str, default: Any = None) -> float:
        # A socket that may wait 0 s does not wait at all, which is another error.
        left_s = max(self._left_s(), 0.001)
        usual = super().get(phase, default)
        return left_s if usual is None else min(usual, left_s)


class _Until(httpx.SyncByteStream):
    """The body of an answer. Raises httpx.ReadTimeout once no time is left: httpx's own timeout is that of each piece."""

    def __init__(self, body: Iterable[bytes], left_s: Callable[[], float]) -> None:
        self._body, self._left_s = body, left_s

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._body:
            if self._left_s() < 0:
                raise httpx.ReadTimeout("the answer was still arriving")
            yield piece

    def close(self) -> None:
        if isinstance(self._body, httpx.SyncByteStream):
            self._body.close()


class Caller:
    """bounded: no request lasts past its deadline. Otherwise the deadline ends only the retries, and a request lasts as long
    as the timeouts of `http` allow, because sampling may take an hour."""

    def __init__(
        self,
        http: httpx.Client,
        *,
        bounded: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._http = http
        self._bounded = bounded
        self._sleep = sleep
        self._monotonic = monotonic
        self._now = now

    def call(
        self,
        method: str,
        url: str,
        *,
        deadline_s: float,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer of a 2xx. Raises SignalRefused on any other final answer, Unanswered after `deadline_s`.

        deadline_s: in seconds. 0 asks once, within the timeouts of the connection.
        """
        response, attempts = self._request(method, url, deadline_s, json, headers)
        return Answer(decoded(response), attempts)

    def text(self, method: str, url: str, *, deadline_s: float) -> str:
        """Like `call`, for an answer that is not JSON."""
        return self._request(method, url, deadline_s, None)[0].text

    def once(self, method: str, url: str, *, deadline_s: float, json: Any = None) -> httpx.Response:
        """Whatever is answered, without a retry. Raises httpx.TransportError."""
        return self._ask(method, url, self._monotonic() + deadline_s, json, None)

    def _request(
        self, method: str, url: str, deadline_s: float, json: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[httpx.Response, int]:
        until = self._monotonic() + deadline_s
        pause_s = FIRST_PAUSE_S
        attempts = 0
        while True:
            attempts += 1
            response: httpx.Response | None = None
            try:
                response = self._ask(
                    method, url, until if self._bounded and deadline_s else None, json, headers
                )
            except httpx.TransportError as error:
                problem = f"{method} {url}: {error or type(error).__name__}"
            else:
                if response.is_success:
                    return response, attempts
                problem = f"{method} {url}: {response.status_code} {error_message(response)}"
                if response.status_code not in RETRY_STATUSES and response.status_code < 500:
                    raise SignalRefused(problem, response.status_code)
            asked_s = retry_after_s(response, self._now()) if response is not None else None
            # A server that asks for no pause is asked again all the same with growing ones.
            wait_s = asked_s or pause_s
            left_s = until - self._monotonic()
            if wait_s > left_s:
                status = response.status_code if response is not None else None
                tried = f" (gave up after {deadline_s:g} s)" if deadline_s else ""
                raise Unanswered(problem + tried, status)
            if attempts == SAID_AFTER:
                logger.warning("%s; sending it again for up to %.0f s more", problem, left_s)
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _ask(
        self, method: str, url: str, until: float | None, json: Any, headers: Mapping[str, str] | None
    ) -> httpx.Response:
        """One request, which ends before `until`. Raises httpx.TransportError."""
        if until is None:
            return self._http.request(method, url, json=json, headers=headers)

        def left_s() -> float:
            return until - self._monotonic()

        timeouts = {"timeout": _TimeLeft(self._http.timeout, left_s)}
        request = self._http.build_request(method, url, json=json, headers=headers, extensions=timeouts)
        response = self._http.send(request, stream=True)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Until(response.stream, left_s)
        try:
            response.read()
        finally:
            response.close()
        return response


def retry_after_s(response: httpx.Response, now: float) -> float | None:
    """The time of the Retry-After header, in seconds from `now`; None when it is absent or unreadable."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except ValueError:
        return None


def error_message(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])[:MESSAGE_CHARS_MAX]
    except (*NOT_JSON, KeyError, TypeError):
        return response.text[:200]


def decoded(response: httpx.Response) -> Any:
    """The JSON of an answer. Raises SignalRefused when it is none."""
    try:
        return msgspec.json.decode(response.content)
    except NOT_JSON as error:
        raise SignalRefused(
            f"{response.url}: answered {response.status_code} without JSON", response.status_code
        ) from error
