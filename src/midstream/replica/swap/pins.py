"""The snapshot that a request asks for, and the requests that are pinned to the serving one: a swap lets them end first.

Always holds: while a swap waits for pinned requests, no other request is pinned. It waits for `drain_s` at most; a pinned
request that is not done by then ends with an error. No request is pinned when the swap commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from midstream.core.types import served_model_name
from midstream.core.versions import Admitted, Refusal, Refused, VersionConstraint

PIN_DRAIN_S = 60.0


class Asked:
    """The snapshot that one request asks for. constraint: from its body and its model's name. admitted: its gateway's decision.

    judged: another replica let the request in, so only its pin counts.
    """

    def __init__(
        self, model: str, constraint: VersionConstraint, admitted: Admitted | None, *, judged: bool = False
    ) -> None:
        self._model = model
        self._constraint = constraint
        self._expected = {constraint.snapshot, None if admitted is None else admitted.snapshot} - {None}
        self._judged = judged or not constraint.relative or (admitted is not None and admitted.body)
        self.pinned = constraint.snapshot is not None or (admitted is not None and admitted.pinned)

    def __repr__(self) -> str:
        return f"Asked({self._constraint}, expects {sorted(map(str, self._expected))}, pinned={self.pinned})"

    def check(self, serving: str, coming: str | None) -> None:
        """Raises Refused unless the request may begin. coming: the snapshot whose swap waits for pinned requests."""
        if not self._judged:
            why = "min_snapshot and max_staleness are the gateway's to judge: ask it"
        elif self._expected - {serving}:
            other = (self._expected - {serving}).pop()
            why = f"snapshot {other!r} is not serving; {served_model_name(self._model, serving)} is"
        elif self.pinned and coming is not None:
            why = f"snapshot {serving!r} takes no pinned requests any more: {coming!r} waits to replace it"
        else:
            return
        raise self.refused(why, serving, pinnable=coming is None)

    def refused(self, why: str, serving: str, *, pinnable: bool) -> Refused:
        return Refused(why, Refusal(serving, pinnable, self._constraint))


class Pins:
    """The pinned requests. drain_s: how long a swap waits for them, in seconds."""

    def __init__(self, on_change: Callable[[], None], drain_s: float = PIN_DRAIN_S) -> None:
        self._on_change = on_change
        self._drain_s = drain_s
        self._ended_for = ""
        self._held: dict[asyncio.Timeout, None] = {}
        self._none = asyncio.Event()
        self._none.set()
        self.coming: str | None = None

    def __repr__(self) -> str:
        return f"Pins({len(self._held)} held, coming={self.coming})"

    def __len__(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def hold(self, asked: Asked, snapshot: str) -> AsyncIterator[None]:
        """The request inside is pinned to `snapshot`, which serves. Ends it with Refused when a swap has waited."""
        limit = asyncio.timeout(None)
        self._held[limit] = None
        self._none.clear()
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = (
                f"snapshot {snapshot!r}, to which this request is pinned, is replaced by {self._ended_for!r}: it had"
                f" {self._drain_s:g} s to end"
            )
            raise asked.refused(message, snapshot, pinnable=False) from None
        finally:
            self._held.pop(limit, None)
            if not self._held:
                self._none.set()

    async def end(self, coming: str) -> int:
        """Waits until no pinned request is left. Ends those that exceed the time limit, and returns how many it ended.

        No request is pinned from now until `reopen`."""
        self.coming = coming
        if not self._held:
            return 0
        self._on_change()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._none.wait()
        except TimeoutError:
            ended, self._ended_for = len(self._held), coming
            for limit in self._held:
                if limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time())
            await self._none.wait()
            return ended
        return 0

    def reopen(self) -> None:
        if self.coming is not None:
            self.coming = None
            self._on_change()
