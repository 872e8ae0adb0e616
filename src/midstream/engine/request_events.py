"""The events of one request on their way from an engine to its consumer.

Always holds: events come out in the order in which the engine put them: by the iterator of `generate`, or by `at_once` while
that iterator is waited for. After the last event of a choice, after `end_choice` and after an error, no event of that choice
comes out.
"""

from __future__ import annotations

import asyncio
from collections import deque

from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.base import AtOnce


class RequestEvents:
    """open: the choices that are not over. at_once: as of Engine.generate; None: every event waits for the iterator."""

    def __init__(self, request: GenerateRequest, at_once: AtOnce | None = None) -> None:
        self.request = request
        self._at_once = at_once
        self.open = set(request.choices)
        self._arrived: deque[GenerationEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request.request_id}, open={sorted(self.open)})"

    def put(self, event: GenerationEvent) -> None:
        waiter, at_once = self._waiter, self._at_once
        if waiter is None or waiter.done():
            # Others may stand before it, or the consumer is gone.
            self._arrived.append(event)
        elif (
            at_once is None
            or event.finish is not None
            or event.error is not None
            or event.index not in self.open
        ):
            self._arrive(event)
        else:
            try:
                if not at_once(event):
                    self._arrive(event)
            except Exception as error:  # noqa: BLE001 - the iterator raises it
                self._arrive(error)

    def fail(self, reason: Exception) -> None:
        """Add the error that ends the request."""
        self._arrive(reason)

    def _arrive(self, item: GenerationEvent | Exception) -> None:
        self._arrived.append(item)
        self._wake()

    def _wake(self) -> None:
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
        self._wake()

    def abort(self, index: int | None = None) -> None:
        """After the events that came so far, the choice ends if it is open; None: every one does."""
        for ended in sorted(self.open if index is None else self.open & {index}):
            self.put(GenerationEvent(index=ended, finish="abort"))
