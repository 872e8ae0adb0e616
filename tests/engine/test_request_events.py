"""Events on their way from an engine to its consumer: by the iterator, or at once while that is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from midstream.core.types import GenerateRequest, GenerationEvent, SamplingParams, TokenRecord
from midstream.engine.base import EngineDied
from midstream.engine.request_events import RequestEvents

ASKED = GenerateRequest(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=9), n=2)


def token(number: int, index: int = 0) -> GenerationEvent:
    return GenerationEvent(index=index, tokens=(TokenRecord(number, 0.0, None, "base"),))


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


class Consumer:
    """Waits for the iterator, and takes at once what `takes` says."""

    def __init__(self, takes: Callable[[GenerationEvent], bool]) -> None:
        self.at_once: list[GenerationEvent] = []
        self.later: list[GenerationEvent] = []
        self.events = RequestEvents(ASKED, self._offered)
        self._takes = takes
        self.task = asyncio.create_task(self._run())

    def _offered(self, event: GenerationEvent) -> bool:
        taken = self._takes(event)
        if taken:
            self.at_once.append(event)
        return taken

    async def _run(self) -> None:
        while (event := await self.events.next()) is not None:
            self.later.append(event)


async def test_events_are_taken_at_once_while_the_iterator_is_waited_for() -> None:
    consumer = Consumer(lambda event: True)
    consumer.events.put(token(1))
    assert consumer.at_once == [], "the consumer has not begun to wait"
    await asyncio.sleep(0)
    assert consumer.later == [token(1)]
    consumer.events.put(token(2))
    consumer.events.put(token(3, index=1))
    assert consumer.at_once == [token(2), token(3, index=1)]
    consumer.task.cancel()


async def test_an_event_behind_one_that_waits_is_not_taken_before_it() -> None:
    consumer = Consumer(lambda event: event.tokens[0].token_id != 2)
    await asyncio.sleep(0)
    for number in (1, 2, 3):
        consumer.events.put(token(number))
    assert consumer.at_once == [token(1)]
    for _ in range(2):
        await asyncio.sleep(0)
    assert consumer.later == [token(2), token(3)]
    consumer.events.put(token(4))
    assert consumer.at_once == [token(1), token(4)]
    consumer.task.cancel()


async def test_the_iterator_raises_what_the_consumer_raised() -> None:
    def refuse(event: GenerationEvent) -> bool:
        raise ValueError("not this one")

    consumer = Consumer(refuse)
    await asyncio.sleep(0)
    consumer.events.put(token(1))
    with pytest.raises(ValueError, match="not this one"):
        await consumer.task


async def test_nothing_is_taken_once_the_consumer_is_cancelled_or_the_engine_is_gone() -> None:
    cancelled, dying = Consumer(lambda event: True), Consumer(lambda event: True)
    await asyncio.sleep(0)
    cancelled.task.cancel()
    cancelled.events.put(token(1))
    dying.events.fail(EngineDied("gone"))
    dying.events.put(token(1))
    assert cancelled.at_once == dying.at_once == []
    with pytest.raises(EngineDied, match="gone"):
        await dying.task


async def test_a_choice_that_its_consumer_ends_gives_nothing_more() -> None:
    def ends(event: GenerationEvent) -> bool:
        consumer.events.end_choice(event.index)
        return True

    consumer = Consumer(ends)
    await asyncio.sleep(0)
    for index in (0, 0, 1, 1):
        consumer.events.put(token(1, index))
    await asyncio.sleep(0)
    consumer.events.put(token(2, 1))
    await consumer.task
    assert consumer.at_once == [token(1), token(2, 1)]
    assert consumer.later == [token(1, 1), token(1, 1)]
