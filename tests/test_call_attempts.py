"""The attempts of a call: which answers end it, which are asked for again, and how the two drivers obey."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from midstream.client.calls import RetryingCaller
from midstream.client.errors import Unanswered
from midstream.core.call_attempts import CallAttempts, Heard, NoAnswer
from midstream.core.http_answer import HttpAnswer
from midstream.core.retry import Backoff
from midstream.http.call import CallFailed, Lost, until_answered

BUSY, DONE, REFUSED = HttpAnswer(429, {}, b""), HttpAnswer(200, {}, b"done"), HttpAnswer(404, {}, b"absent")


class Refused(Exception):
    pass


class GaveUp(Exception):
    pass


class Three(CallAttempts):
    """At most three attempts."""

    def __init__(self) -> None:
        super().__init__(Backoff(first_s=1.0, last_s=8.0))
        self.events: list[str] = []

    def allows(self, heard: Heard, pause_s: float) -> bool:
        self.events.append(f"allows {pause_s:g}")
        return self.begun < 3

    def refused(self, answer: HttpAnswer) -> Refused:
        return Refused(answer.problem)

    def gave_up(self, heard: Heard) -> GaveUp:
        return GaveUp(heard.problem)

    def pausing(self, heard: Heard, pause_s: float) -> None:
        self.events.append(f"pausing {pause_s:g}")


@pytest.mark.parametrize(
    ("status", "verdict"), [(200, "take"), (204, "take"), (404, "refuse"), (429, "again"), (500, "again")]
)
def test_the_table_of_outcomes_says_what_becomes_of_an_answer(status: int, verdict: str) -> None:
    assert Three().verdict(HttpAnswer(status, {}, b"")) == verdict


def test_a_call_ends_with_an_answer_or_an_error_of_its_class() -> None:
    three = Three()
    three.begin()
    assert three.after(DONE) is DONE
    with pytest.raises(Refused, match="absent"):
        three.after(REFUSED)
    assert (three.begun, three.events) == (1, [])


def test_pauses_grow_until_no_attempt_may_follow() -> None:
    three = Three()
    for pause_s in (1.0, 2.0):
        three.begin()
        assert three.after(BUSY) == pause_s
    three.begin()
    with pytest.raises(GaveUp, match="gone"):
        three.after(NoAnswer("gone"))
    assert three.events == ["allows 1", "pausing 1", "allows 2", "pausing 2", "allows 4"]


def test_the_driver_of_event_loops_sends_and_sleeps_as_the_attempts_say() -> None:
    sent: list[HttpAnswer | CallFailed] = [Lost("cut"), BUSY, DONE]
    slept: list[float] = []
    heard: list[Heard] = []

    class Watched(Three):
        def after(self, one: Heard) -> HttpAnswer | float:
            heard.append(one)
            return super().after(one)

    async def send() -> HttpAnswer:
        one = sent.pop(0)
        if isinstance(one, CallFailed):
            raise one
        return one

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    assert asyncio.run(until_answered(Watched(), send, sleep)) is DONE
    assert heard == [NoAnswer("cut", lost=True), BUSY, DONE]
    assert slept == [1.0, 2.0]


def test_the_driver_of_threads_sends_and_sleeps_as_the_attempts_say() -> None:
    statuses = [503, 429, 200]
    slept: list[float] = []
    http = httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(statuses.pop(0), json={"a": 1}))
    )
    caller = RetryingCaller(http, sleep=slept.append, monotonic=lambda: 0.0)
    answer = caller.call("GET", "http://server/x", deadline_s=300.0)
    assert (answer.body, answer.attempts, slept) == ({"a": 1}, 3, [0.25, 0.5])
    statuses[:] = [503]
    with pytest.raises(Unanswered, match="GET http://server/x: 503"):
        caller.call("GET", "http://server/x", deadline_s=0.0)


def test_a_body_that_cannot_be_decompressed_is_no_answer() -> None:
    damaged = httpx.Response(200, headers={"content-encoding": "gzip"}, content=iter([b"no gzip"]))
    answers = [damaged, httpx.Response(200, json=1)]
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answers.pop(0)))
    caller = RetryingCaller(http, sleep=lambda pause_s: None, monotonic=lambda: 0.0)
    answer = caller.call("GET", "http://server/x", deadline_s=300.0)
    assert (answer.body, answer.attempts) == (1, 2)
