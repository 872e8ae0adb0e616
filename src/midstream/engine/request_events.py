"""The events of one request on their way from an engine to the iterator of `generate`.

Always holds: events come out in the order in which the engine put them. After the last event of a choice, after `end_choice`
and after an error, no event of that choice comes out.
"""

from __future__ import annotations

import asyncio
from collections import deque

from midstream.core.types import GenerateRequest, GenerationEvent


class RequestEvents:
    """open: the choices that are not over."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.open = set(request.choices)
        self._arrived: deque[GenerationEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request.request_id}, open={sorted(self.open)})"

    def put(self, item: GenerationEvent | Exception) -> None:
        """Add an event, or the error that ends the request."""
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> GenerationEvent | None:
        """The next event; None when every choice is over. Raises the error that ended the request."""
        while self.open:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            item = self._arrived.popleft()
            if isinstance(item, Exception):
                raise item
            if item.error is not None:
                self.open.clear()
            elif item.index not in self.open:
                # The choice was ended while this event was on its way.
                continue
            elif item.finish is not None:
                self.open.discard(item.index)
            return item
        return None

    def end_choice(self, index: int) -> None:
        self.open.discard(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self, index: int | None = None) -> None:
        """After the events that came so far, the choice ends if it is open; None: every one does."""
        for ended in sorted(self.open if index is None else self.open & {index}):
            self.put(GenerationEvent(index=ended, finish="abort"))
