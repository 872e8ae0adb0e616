"""What was submitted and is not fetched yet: request_id -> future.

Always holds:
- A future ends once: with a result, an error, or gone (410: the SDK samples again). What comes later is dropped.
- Results are kept until they are fetched and then KEPT_FETCHED_S, so that an answer that was lost can be asked for again; at
  most KEPT_UNFETCHED_S. A tenant holds at most MAX_PENDING unfinished futures and MAX_KEPT_BYTES of results: beyond, its
  oldest results go, those first that were fetched.
- An id belongs to the tenant that made it; to others it is as unknown as one that was never given out.
- A submission that comes again before its client has asked about it is the one that came before: the answer was lost.
- Whoever waits leaves nothing behind, however the waiting ends. What can be cancelled is, when it was waited for and then not
  for ABANDONED_S: its client is dead.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from midstream_tinker.answers import FutureFailed, SampleFacts
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import Category

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
KEPT_FETCHED_S = 120.0
KEPT_UNFETCHED_S = 3600.0
ABANDONED_S = 300.0
MAX_PENDING = 20_000
MAX_FINISHED = 20_000
MAX_KEPT_BYTES = 1 << 30

logger = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """status 200 with a body, or 410. facts: of the versions extension. as_json: reads a body in protobuf."""

    status: Literal[200, 410]
    body: bytes
    media_type: str = JSON
    headers: dict[str, str] = {}
    facts: SampleFacts = msgspec.field(default_factory=SampleFacts)
    as_json: Callable[[bytes], msgspec.Struct] | None = None


class Future:
    """Made by Futures.new, in the event loop."""

    def __init__(
        self,
        tenant: str,
        request_id: str,
        kind: str,
        expires: float,
        ended: Callable[[Future], None],
        mark: bytes | None = None,
    ) -> None:
        """mark: what its submission is known by when it comes again, until a client asks about it; None: by nothing."""
        self.tenant = tenant
        self.request_id = request_id
        self.kind = kind
        self.mark = mark
        self.outcome: Outcome | None = None
        self.fetched = False
        self.cancelled = False
        self.expires = expires
        self.waiting = 0
        # The end of the last poll. None: it was not polled yet, or is being polled.
        self.unasked_since: float | None = None
        self._ended = ended
        self._done = asyncio.Event()
        self._on_cancel: Callable[[], object] | None = None

    @property
    def done(self) -> bool:
        return self.outcome is not None

    def resolve(
        self,
        body: bytes,
        media_type: str,
        *,
        as_json: Callable[[bytes], msgspec.Struct] | None = None,
        headers: Mapping[str, str] | None = None,
        facts: SampleFacts | None = None,
    ) -> None:
        """End with a result: protobuf, with what reads it, or a JSON object without a field `error`."""
        self._end(
            Outcome(
                status=200,
                body=body,
                media_type=media_type,
                headers=dict(headers or {}),
                facts=facts or SampleFacts(),
                as_json=as_json,
            )
        )

    def resolve_json(self, result: msgspec.Struct) -> None:
        assert "error" not in result.__struct_fields__, "the SDK would take it for a failure"
        self.resolve(msgspec.json.encode(result), JSON)

    def fail(self, message: str, category: Category = "user", *, facts: SampleFacts | None = None) -> None:
        """End with an error that the user sees once; nothing retries it."""
        body = msgspec.json.encode(FutureFailed(error=message, category=category))
        facts = msgspec.structs.replace(facts or SampleFacts(), error=message)
        self._end(Outcome(status=200, body=body, facts=facts))

    def gone(self, message: str = "this request's result is not to be had any more") -> None:
        """End as if it had never been known: the SDK's sample() submits again; other calls raise."""
        self._end(Outcome(status=410, body=msgspec.json.encode({"detail": message, "param": "request_id"})))

    @property
    def cancellable(self) -> bool:
        return self._on_cancel is not None

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call it when the result is not wanted any more, at once if that is so now; not when the future ends otherwise."""
        if self.cancelled:
            callback()
        elif not self.done:
            self._on_cancel = callback

    def cancel(self) -> None:
        """The client wants no result. Idempotent."""
        if self.done or self.cancelled:
            return
        self.cancelled = True
        callback = self._on_cancel
        self.gone("this request was cancelled")
        if callback is not None:
            callback()

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._on_cancel = None
        self._done.set()
        self._ended(self)

    async def wait(self) -> None:
        await self._done.wait()


class _Tenant:
    def __init__(self) -> None:
        self.pending = 0
        # In the order in which they ended.
        self.finished: dict[str, Future] = {}
        # Of the finished ones, in the order in which they were fetched.
        self.fetched: dict[str, Future] = {}
        self.bytes = 0


class Futures:
    """All futures of the front. For use in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, Future] = {}
        # By tenant and mark, while no client has asked about them.
        self._unasked: dict[tuple[str, bytes | None], Future] = {}
        self._tenants: dict[str, _Tenant] = {}
        # Deadlines of finished futures. Stale ones are skipped.
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def new(self, tenant: str, kind: str, mark: bytes | None = None) -> Future:
        """A pending future. Raises TinkerRefusal (429) when the tenant has too many of them."""
        self.expire()
        held = self._tenants.setdefault(tenant, _Tenant())
        if held.pending >= MAX_PENDING:
            raise TinkerRefusal(429, f"{held.pending} requests of this API key are unfinished")
        future = Future(tenant, f"req_{secrets.token_hex(12)}", kind, float("inf"), self._ended, mark)
        held.pending += 1
        self._by_id[future.request_id] = future
        if mark is not None:
            self._unasked[tenant, mark] = future
        return future

    def find(self, tenant: str, request_id: str) -> Future | None:
        """A client asks about it."""
        self.expire()
        future = self._by_id.get(request_id)
        if future is None or future.tenant != tenant:
            return None
        self._told(future)
        return future

    def _told(self, future: Future) -> None:
        """Its client has its id, or it is gone: a submission with its mark is another one from now on."""
        self._unasked.pop((future.tenant, future.mark), None)
        future.mark = None

    def unasked(self, tenant: str, mark: bytes) -> Future | None:
        """The one with this mark that no client has asked about."""
        return self._unasked.get((tenant, mark))

    async def wait(self, future: Future, timeout_s: float) -> bool:
        """Whether it has ended, after at most timeout_s."""
        if future.done:
            return True
        future.waiting += 1
        future.unasked_since = None
        try:
            async with asyncio.timeout(timeout_s):
                await future.wait()
        except TimeoutError:
            return future.done
        finally:
            future.waiting -= 1
            future.unasked_since = None if future.waiting else self._clock()
        return True

    def fetched(self, future: Future) -> None:
        """Its result went out: from the first time on it is kept for KEPT_FETCHED_S."""
        if not future.fetched and future.done:
            future.fetched = True
            held = self._tenants.get(future.tenant)
            if held is not None and held.finished.get(future.request_id) is future:
                held.fetched[future.request_id] = future
                self._keep(future, KEPT_FETCHED_S)

    def expire(self) -> None:
        """Drop what is past its time; called with every use, and from time to time when there is none."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            future = self._by_id.get(request_id)
            if future is not None and future.expires <= now:
                self._drop(future)

    def cancel_abandoned(self) -> None:
        """Call it from time to time."""
        before = self._clock() - ABANDONED_S
        for future in list(self._by_id.values()):
            if future.cancellable and future.unasked_since is not None and future.unasked_since <= before:
                logger.info("no client waits for %s any more", future.request_id)
                future.cancel()

    def close(self) -> None:
        """Every unfinished request is gone: its client is answered."""
        for future in list(self._by_id.values()):
            future.gone("the server was stopped before this request was done")

    def _ended(self, future: Future) -> None:
        held = self._tenants[future.tenant]
        held.pending -= 1
        held.finished[future.request_id] = future
        held.bytes += _size(future)
        self._keep(future, KEPT_UNFETCHED_S)
        while len(held.finished) > 1 and (len(held.finished) > MAX_FINISHED or held.bytes > MAX_KEPT_BYTES):
            oldest = next(iter(held.fetched.values()), None) or next(iter(held.finished.values()))
            if not oldest.fetched:
                logger.warning("too many results wait to be fetched: %s is dropped", oldest.request_id)
            self._drop(oldest)

    def _keep(self, future: Future, seconds: float) -> None:
        future.expires = self._clock() + seconds
        heapq.heappush(self._deadlines, (future.expires, future.request_id))

    def _drop(self, future: Future) -> None:
        del self._by_id[future.request_id]
        held = self._tenants[future.tenant]
        del held.finished[future.request_id]
        held.fetched.pop(future.request_id, None)
        held.bytes -= _size(future)
        self._told(future)
        if not held.finished and not held.pending:
            del self._tenants[future.tenant]


def _size(future: Future) -> int:
    return len(future.outcome.body) if future.outcome is not None else 0
