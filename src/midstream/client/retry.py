"""HTTP with the retry rules of the hot-load API.

Always holds: a request is sent again only after no answer, 408, 425, 429 or 5xx, with growing pauses or those of Retry-After,
and never past the deadline.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx

from midstream.client.errors import SignalRefused, Unanswered

RETRY_STATUSES = frozenset({408, 425, 429})
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 10.0


class Answer(NamedTuple):
    """body: decoded JSON. attempts: how many requests it took."""

    body: Any
    attempts: int


class Caller:
    def __init__(
        self,
        http: httpx.Client,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._http = http
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
        """The answer of a 2xx. Raises SignalRefused on any other final answer, Unanswered after `deadline_s`."""
        response, attempts = self._request(method, url, deadline_s, json, headers)
        return Answer(_decoded(response), attempts)

    def text(self, method: str, url: str, *, deadline_s: float) -> str:
        """Like `call`, for an answer that is not JSON."""
        return self._request(method, url, deadline_s, None)[0].text

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
                response = self._http.request(method, url, json=json, headers=headers)
            except httpx.TransportError as error:
                problem = f"{method} {url}: {error or type(error).__name__}"
            else:
                if response.is_success:
                    return response, attempts
                problem = f"{method} {url}: {response.status_code} {error_message(response)}"
                if response.status_code not in RETRY_STATUSES and response.status_code < 500:
                    raise SignalRefused(problem, response.status_code)
            asked_s = retry_after_s(response, self._now()) if response is not None else None
            wait_s = asked_s if asked_s is not None else pause_s
            if self._monotonic() + wait_s > until:
                status = response.status_code if response is not None else None
                tried = f" (gave up after {deadline_s:g} s)" if deadline_s else ""
                raise Unanswered(problem + tried, status)
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


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
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _decoded(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise SignalRefused(
            f"{response.url}: answered {response.status_code} without JSON", response.status_code
        ) from error
