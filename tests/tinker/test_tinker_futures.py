"""Futures: what a client could lose, see too early, or see of another's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from midstream_tinker import futures as module
from midstream_tinker.answers import FutureFailed, StepDone
from midstream_tinker.futures import (
    ABANDONED_S,
    JSON,
    KEPT_FETCHED_S,
    KEPT_UNFETCHED_S,
    PROTOBUF,
    Future,
    Futures,
)
from midstream_tinker.refusals import TinkerRefusal


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def done(futures: Futures, tenant: str = "t", body: bytes = b"x") -> Future:
    future = futures.new(tenant, "sample")
    future.resolve(body, PROTOBUF)
    return future


def body_of(future: Future) -> Any:
    assert future.outcome is not None
    return json.loads(future.outcome.body)


def test_a_result_is_kept_until_it_is_fetched_and_two_minutes_more() -> None:
    clock = Clock()
    futures = Futures(clock)
    future = done(futures)
    clock.now += KEPT_UNFETCHED_S - 1
    assert futures.find("t", future.request_id) is future
    futures.fetched(future)
    clock.now += KEPT_FETCHED_S - 1
    # The answer was lost: it is asked for again.
    assert futures.find("t", future.request_id) is future
    # Which keeps it no longer.
    futures.fetched(future)
    clock.now += 1
    assert futures.find("t", future.request_id) is None
    assert len(futures) == 0


def test_a_result_that_nobody_fetches_goes_after_an_hour() -> None:
    clock = Clock()
    futures = Futures(clock)
    future = done(futures)
    pending = futures.new("t", "sample")
    clock.now += KEPT_UNFETCHED_S
    assert futures.find("t", future.request_id) is None
    clock.now += 100 * KEPT_UNFETCHED_S
    # What is not finished is not too old.
    assert futures.find("t", pending.request_id) is pending


def test_a_future_ends_once() -> None:
    futures = Futures()
    future = futures.new("t", "sample")
    future.fail("no such thing", "user")
    future.resolve(b"late", JSON)
    future.gone()
    assert body_of(future) == {"error": "no such thing", "category": "user"}


def test_a_mark_finds_what_no_client_asked_about() -> None:
    clock = Clock()
    futures = Futures(clock)
    first = futures.new("mine", "sample", b"mark")
    assert futures.unasked("mine", b"mark") is first
    assert futures.unasked("other", b"mark") is None
    assert futures.find("mine", first.request_id) is first
    assert futures.unasked("mine", b"mark") is None
    second = futures.new("mine", "sample", b"mark")
    # Of the first one alone.
    assert futures.find("mine", first.request_id) is first
    assert futures.find("other", second.request_id) is None
    assert futures.unasked("mine", b"mark") is second
    second.resolve(b"x", PROTOBUF)
    clock.now += KEPT_UNFETCHED_S
    futures.expire()
    assert futures.unasked("mine", b"mark") is None


def test_another_tenant_finds_nothing() -> None:
    futures = Futures()
    future = futures.new("mine", "sample")
    assert futures.find("mine", future.request_id) is future
    assert futures.find("other", future.request_id) is None
    assert futures.find("mine", "req_0") is None


async def test_waiting_ends_with_the_result_or_without_it() -> None:
    futures = Futures()
    future = futures.new("t", "sample")
    assert not await futures.wait(future, 0)
    waiting = [asyncio.create_task(futures.wait(future, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    future.resolve(b"x", PROTOBUF)
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert await futures.wait(future, 0)


async def test_a_waiter_that_is_cancelled_leaves_the_future_as_it_was() -> None:
    futures = Futures()
    future = futures.new("t", "sample")
    waiter = asyncio.create_task(futures.wait(future, 60))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert not future.done
    assert not future.cancelled
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_cancelling_tells_the_worker_once_and_ends_as_gone() -> None:
    futures = Futures()
    future = futures.new("t", "sample")
    told: list[str] = []
    future.on_cancel(lambda: told.append("stop"))
    future.cancel()
    future.cancel()
    future.resolve(b"too late", PROTOBUF)
    assert told == ["stop"]
    assert future.outcome is not None
    assert future.outcome.status == 410
    future.on_cancel(lambda: told.append("was cancelled before"))
    assert told == ["stop", "was cancelled before"]


def test_a_finished_future_is_not_cancelled_any_more() -> None:
    futures = Futures()
    future = futures.new("t", "sample")
    told: list[str] = []
    future.on_cancel(lambda: told.append("stop"))
    future.resolve(b"x", PROTOBUF)
    future.cancel()
    assert told == []
    assert future.outcome is not None
    assert future.outcome.body == b"x"


async def test_a_request_whose_client_stopped_asking_is_cancelled_and_no_other() -> None:
    clock = Clock()
    futures = Futures(clock)
    told: list[str] = []
    asked, held, never_asked, working = (futures.new("t", "sample") for _ in range(4))
    for future in (asked, held, never_asked):
        future.on_cancel(lambda: told.append("stop"))
    for future in (asked, held, working):
        await futures.wait(future, 0)
    holding = asyncio.create_task(futures.wait(held, 60))
    await asyncio.sleep(0)
    clock.now += ABANDONED_S - 1
    futures.cancel_abandoned()
    assert told == []
    clock.now += 1
    futures.cancel_abandoned()
    assert told == ["stop"]
    assert [future.cancelled for future in (asked, held, never_asked, working)] == [
        True,
        False,
        False,
        False,
    ]
    held.resolve(b"x", PROTOBUF)
    assert await holding


def test_too_many_unfinished_requests_are_refused_and_only_of_that_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    futures = Futures()
    first = futures.new("t", "sample")
    futures.new("t", "sample")
    with pytest.raises(TinkerRefusal) as caught:
        futures.new("t", "sample")
    assert caught.value.status == 429
    assert caught.value.headers() == {"retry-after": "5"}
    futures.new("other", "sample")
    first.resolve(b"x", PROTOBUF)
    futures.new("t", "sample")


def test_results_beyond_the_limit_push_out_the_oldest_and_first_what_was_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 10)
    futures = Futures()
    oldest, fetched = done(futures, body=b"1234"), done(futures, body=b"1234")
    theirs = done(futures, "other", b"1234567890")
    futures.fetched(fetched)
    newest = done(futures, body=b"1234")
    kept = [futures.find("t", future.request_id) is not None for future in (oldest, fetched, newest)]
    assert kept == [True, False, True]
    large = done(futures, body=b"much more than there is room for")
    kept = [futures.find("t", future.request_id) is not None for future in (oldest, newest, large)]
    assert kept == [False, False, True]
    assert futures.find("other", theirs.request_id) is theirs


async def test_closing_answers_everybody_who_waits() -> None:
    futures = Futures()
    pending, finished = futures.new("t", "sample"), done(futures)
    waiting = asyncio.create_task(futures.wait(pending, 60))
    await asyncio.sleep(0)
    futures.close()
    assert await waiting
    assert [one.outcome.status for one in (pending, finished) if one.outcome] == [410, 200]


def test_a_json_result_cannot_look_like_a_failure() -> None:
    future = Futures().new("t", "optim_step")
    with pytest.raises(AssertionError):
        future.resolve_json(FutureFailed(error="x", category="user"))
    future.resolve_json(StepDone(metrics={"grad_norm:mean": 1.0}))
    assert body_of(future) == {"type": "optim_step", "metrics": {"grad_norm:mean": 1.0}}
