"""Sends the HTTP requests of the client: one connection pool, the retries of a call, and its deadline.

Always holds: a request is sent again only after an outcome that a retry may cure (core/retry.py), with growing pauses or those
of Retry-After. No request begins after the deadline, and none of a bounded `RetryingCaller` lasts past it. No other module of
the client sends a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.request import getproxies

import httpx

from midstream.client.errors import PublishError, SignalRefused, Unanswered
from midstream.core.call_attempts import CallAttempts, Heard, NoAnswer, Verdict
from midstream.core.http_answer import HttpAnswer, NotThatAnswer, read
from midstream.core.probes import PROBED
from midstream.core.retry import Backoff, Deadline

logger = logging.getLogger(__name__)

_Kind = TypeVar("_Kind")

BACKOFF = Backoff(first_s=0.25, last_s=10.0)
#: How long a call is retried, unless its caller says otherwise.
RETRY_S = 300.0
#: After so many failed attempts, a call logs a warning, once.
SAID_AFTER = 3
#: Rollouts may take long; a connection that is lost is seen at once, or by its probes.
ROLLOUT_TIMEOUT = httpx.Timeout(30.0, read=3600.0)


class CallAnswer(NamedTuple):
    """The answer of a 2xx. body: its decoded JSON. attempts: how many requests it took."""

    body: Any
    attempts: int


class _TimeLeft(dict[str, float | None]):
    """httpx's timeouts of one request, in seconds: each phase has at most the time that is left when it begins.

    slow: the answer may take all of it to begin.
    """

    def __init__(self, usual: httpx.Timeout, deadline: Deadline, slow: bool) -> None:
        super().__init__(usual.as_dict() | ({"read": None} if slow else {}))
        self._deadline = deadline

    def get(self, phase: str, default: Any = None) -> float:
        # A socket that may wait 0 s does not wait at all, which is another error.
        left_s = max(self._deadline.left_s, 0.001)
        usual = super().get(phase, default)
        return left_s if usual is None else min(usual, left_s)


class _Until(httpx.SyncByteStream):
    """The body of an answer. Raises httpx.ReadTimeout once no time is left: httpx's own timeout is that of each piece."""

    def __init__(self, body: Iterable[bytes], deadline: Deadline) -> None:
        self._body, self._deadline = body, deadline

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._body:
            if self._deadline.left_s < 0:
                raise httpx.ReadTimeout("the answer was still arriving")
            yield piece

    def close(self) -> None:
        if isinstance(self._body, httpx.SyncByteStream):
            self._body.close()


class _ClientAttempts(CallAttempts):
    """Attempts until a deadline. The server may ask for longer pauses, or for shorter ones. request: its method and URL.

    final: codes of errors that end the call, though a retry may cure them.
    """

    def __init__(
        self, request: str, deadline: Deadline, now: Callable[[], float], final: Collection[str] = ()
    ) -> None:
        super().__init__(BACKOFF)
        self._request = request
        self._deadline = deadline
        self._now = now
        self._final = final

    def verdict(self, answer: HttpAnswer) -> Verdict:
        if self._final and answer.code in self._final:
            return "refuse"
        return super().verdict(answer)

    def pause_s(self, heard: Heard) -> float:
        asked_s = heard.asked_pause_s(self._now()) if isinstance(heard, HttpAnswer) else None
        return self._backoff.pause_s(self.begun, asked_s)

    def allows(self, heard: Heard, pause_s: float) -> bool:
        return self._deadline.allows(pause_s)

    def refused(self, answer: HttpAnswer) -> SignalRefused:
        return SignalRefused(self._problem(answer), answer.status)

    def gave_up(self, heard: Heard) -> Unanswered:
        total_s = self._deadline.total_s
        tried = f" (gave up after {total_s:g} s)" if total_s else ""
        return Unanswered(
            self._problem(heard) + tried, heard.status if isinstance(heard, HttpAnswer) else None
        )

    def pausing(self, heard: Heard, pause_s: float) -> None:
        if self.begun == SAID_AFTER:
            left_s = self._deadline.left_s
            logger.warning("%s; sending it again for up to %.0f s more", self._problem(heard), left_s)

    def _problem(self, heard: Heard) -> str:
        if isinstance(heard, NoAnswer):
            return heard.problem
        return f"{self._request}: {heard.status} {heard.message}"


class RetryingCaller:
    """Sends requests, and sends them again where a retry may cure the answer. Safe to use from several threads.

    bounded: no request lasts past its deadline. Otherwise the deadline ends only the retries, and a request lasts as long
    as the timeouts of `http` allow, because sampling may take an hour. sleep, monotonic: for tests.
    """

    def __init__(
        self,
        http: httpx.Client,
        *,
        bounded: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._bounded = bounded
        self.sleep = sleep
        self.monotonic = monotonic
        self._now = time.time

    @classmethod
    def of_rollouts(cls, api_key: str | None, parallel: int) -> RetryingCaller:
        """A caller for `parallel` long requests at a time."""
        headers = {} if api_key is None else {"x-api-key": api_key}
        limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        # httpx takes the environment's proxies only with a transport of its own.
        proxied = getproxies().keys() - {"no"}
        probed = None if proxied else httpx.HTTPTransport(limits=limits, socket_options=PROBED)
        http = httpx.Client(headers=headers, timeout=ROLLOUT_TIMEOUT, limits=limits, transport=probed)
        return cls(http, bounded=False)

    def close(self) -> None:
        """Closes the connections. No call may follow."""
        self._http.close()

    def deadline(self, total_s: float) -> Deadline:
        """A deadline `total_s` seconds from now, by the clock of this caller."""
        return Deadline(total_s, self.monotonic)

    def call(
        self,
        method: str,
        url: str,
        *,
        deadline_s: float,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        final: Collection[str] = (),
    ) -> CallAnswer:
        """The answer of a 2xx. Raises SignalRefused on any other final answer, Unanswered after `deadline_s`.

        deadline_s: in seconds. 0 asks once, within the timeouts of the connection. final: codes of errors that are not waited
        for, though a retry may cure them.
        """
        answer, attempts = self._request(method, url, deadline_s, json, headers, final)
        return CallAnswer(decoded(answer, url), attempts)

    def read(self, url: str, kind: type[_Kind], what: str, *, deadline_s: float) -> _Kind:
        """The answer to a GET, as `kind`. what: the words for it. Raises PublishError as well, when it is something else."""
        return expected(self.call("GET", url, deadline_s=deadline_s).body, kind, url, what)

    def text(self, method: str, url: str, *, deadline_s: float) -> str:
        """The body of a 2xx as text, for an answer that is not JSON. Otherwise like `call`."""
        return self._request(method, url, deadline_s, None, None)[0].text

    def once(
        self,
        method: str,
        url: str,
        *,
        deadline_s: float | None = None,
        json: Any = None,
        slow: bool = False,
    ) -> HttpAnswer:
        """Sends one request and returns its answer, whatever the status. Raises Unanswered when none came.

        deadline_s: in seconds; None leaves it to the timeouts of the connection. slow: the answer may take all of that time.
        """
        deadline = None if deadline_s is None else self.deadline(deadline_s)
        return self._ask(method, url, deadline, json, None, slow=slow)

    def repeat(self, request: str, deadline: Deadline, ask: Callable[[], HttpAnswer]) -> HttpAnswer:
        """The answer of a 2xx that `ask` returns, which is called again as `call` sends a request again.

        request: its method and URL, for messages. ask: sends it once; raises Unanswered. Raises the errors of `call`.
        """
        return self._repeat(request, deadline, ask)[0]

    def _request(
        self,
        method: str,
        url: str,
        deadline_s: float,
        json: Any,
        headers: Mapping[str, str] | None,
        final: Collection[str] = (),
    ) -> tuple[HttpAnswer, int]:
        deadline = self.deadline(deadline_s)
        within = deadline if self._bounded and deadline_s else None
        return self._repeat(
            f"{method} {url}", deadline, lambda: self._ask(method, url, within, json, headers), final
        )

    def _repeat(
        self,
        request: str,
        deadline: Deadline,
        ask: Callable[[], HttpAnswer],
        final: Collection[str] = (),
    ) -> tuple[HttpAnswer, int]:
        attempts = _ClientAttempts(request, deadline, self._now, final)
        while True:
            attempts.begin()
            heard: Heard
            try:
                heard = ask()
            except Unanswered as error:
                heard = NoAnswer(str(error))
            step = attempts.after(heard)
            if isinstance(step, HttpAnswer):
                return step, attempts.begun
            self.sleep(step)

    def _ask(
        self,
        method: str,
        url: str,
        deadline: Deadline | None,
        json: Any,
        headers: Mapping[str, str] | None,
        *,
        slow: bool = False,
    ) -> HttpAnswer:
        """Sends one request, which ends before the deadline. Raises Unanswered when no whole answer came."""
        extensions = {} if deadline is None else {"timeout": _TimeLeft(self._http.timeout, deadline, slow)}
        request = self._http.build_request(method, url, json=json, headers=headers, extensions=extensions)
        try:
            response = self._http.send(request, stream=True)
            assert isinstance(response.stream, httpx.SyncByteStream)
            if deadline is not None:
                response.stream = _Until(response.stream, deadline)
            try:
                body = response.read()
            finally:
                response.close()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Unanswered(f"{method} {url}: {error or type(error).__name__}", None) from error
        return HttpAnswer(response.status_code, response.headers, body)


def decoded(answer: HttpAnswer, url: str) -> Any:
    """The JSON of an answer. Raises SignalRefused when the body is not JSON."""
    try:
        return answer.json()
    except NotThatAnswer as error:
        raise SignalRefused(f"{url}: {error}", answer.status) from error


def expected(value: Any, kind: type[_Kind], url: str, what: str) -> _Kind:
    """`value`, the JSON of an answer, as `kind`. what: the words for it. Raises PublishError when it is something else."""
    try:
        return read(value, kind)
    except NotThatAnswer as error:
        raise PublishError(f"{url}: answered something else than {what}: {error}") from error
