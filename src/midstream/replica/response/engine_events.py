"""The events of one generation: one engine request for each prompt, their events merged as they come.

Always holds: the index of an event counts the choices over all prompts. An iterator of the engine's is closed however it ends.
The engine is not asked for a choice that its trainer ended before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import cast

from msgspec.structs import replace

from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.base import AtOnce, Engine

_Item = GenerationEvent | asyncio.Task[None]


class EngineEvents:
    """requests: one for each prompt, each of `n` choices. A choice's number counts over all prompts."""

    def __init__(self, engine: Engine, requests: list[GenerateRequest], n: int) -> None:
        self._engine = engine
        self.requests = requests
        self._n = n
        #: By prompt: the number of choices without a finish reason.
        self._open = [n] * len(requests)
        #: Of all prompts.
        self.open = n * len(requests)
        #: Choices that a trainer ended.
        self.aborted: set[int] = set()

    def __repr__(self) -> str:
        return f"EngineEvents({self.open} choices open, {len(self.aborted)} aborted)"

    def ended(self, choice: int, *, unknown: bool) -> None:
        """The choice has a finish reason. unknown: of which the engine knows nothing, such as a stop string."""
        prompt, index = divmod(choice, self._n)
        self._open[prompt] -= 1
        self.open -= 1
        if unknown:
            self._engine.end_choice(self.requests[prompt].request_id, index)

    def abort(self, choices: Collection[int]) -> None:
        """End the open ones of these choices with what they have, and the finish reason `abort`."""
        self.aborted.update(choices)
        for prompt, request in enumerate(self.requests):
            ended = [index for index in range(self._n) if self.is_aborted(prompt * self._n + index)]
            if self._open[prompt] and len(ended) == self._n:
                self._engine.abort(request.request_id)
            elif self._open[prompt]:
                for index in ended:
                    self._engine.abort(request.request_id, index)

    def stop(self, choice: int) -> None:
        """The choice ends as if its trainer ended it: no further event of it comes."""
        self.aborted.add(choice)
        prompt, index = divmod(choice, self._n)
        self._engine.end_choice(self.requests[prompt].request_id, index)

    def is_aborted(self, choice: int) -> bool:
        return choice in self.aborted

    def events(self, at_once: AtOnce) -> AsyncGenerator[GenerationEvent, None]:
        """at_once: as of Engine.generate. Only the events of a single prompt are offered to it, of no aborted choice.

        Raises EngineDied, StreamLost.
        """
        live = [prompt for prompt, choices in enumerate(self._open) if choices]
        if live == [0] and not self.aborted:
            # The first prompt's choices have the numbers that they have in the request.
            return _closable(self._engine.generate(self.requests[0], at_once))
        return self._generate(live[0]) if len(live) == 1 else self._merged(live)

    async def _merged(self, live: list[int]) -> AsyncGenerator[GenerationEvent, None]:
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in live]
        for pump in pumps:
            pump.add_done_callback(queue.put_nowait)
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    running -= 1
                    item.result()
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:
                # One failure is shown; the others are the same one.
                if not pump.cancelled():
                    pump.exception()

    async def _generate(self, prompt: int) -> AsyncGenerator[GenerationEvent, None]:
        request, first = self.requests[prompt], prompt * self._n
        # Before the engine knew of them. Others may be aborted while these end.
        gone: list[int] = []
        while new := [i for i in request.choices if self.is_aborted(first + i) and i not in gone]:
            gone.append(new[0])
            yield GenerationEvent(index=first + new[0], finish="abort")
        if len(gone) == len(request.choices):
            return
        if gone:
            left = (None if index in gone else request.emitted_of(index) for index in range(request.n))
            request = replace(request, emitted=tuple(left))
        async with aclosing(_closable(self._engine.generate(request))) as events:
            async for event in events:
                yield replace(event, index=first + event.index) if first else event

    async def _pump(self, prompt: int, queue: asyncio.Queue[_Item]) -> None:
        async with aclosing(self._generate(prompt)) as events:
            async for event in events:
                if self._open[prompt] == 0:
                    break
                queue.put_nowait(event)


def _closable(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[GenerationEvent, None]:
    """The port's iterators have aclose (see Engine.generate); its type does not say so."""
    return cast("AsyncGenerator[GenerationEvent, None]", events)
