"""The training requests of one model, in the order of their seq_id.

Always holds:
- A seq_id is carried out once, after all lower ones: each of them was carried out, or has visibly failed.
- A request that comes again is the one that came before; a seq_id that comes with another body is refused (400).
- No request waits for ever. When a missing seq_id has not come within gap_s, the requests that wait for it fail. The missing
  one fails, too, if it still comes. No request is ever carried out before one that it was meant to follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from midstream_tinker.futures import Future
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import WorkFailed

# The SDK gives a submission up after five minutes.
GAP_S = 600.0
# How many requests are remembered, to recognise a repetition.
REMEMBERED = 10_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingTurn:
    """act: carries it out and gives its future a result, or raises. size: of its body, bytes."""

    kind: str
    seq_id: int
    digest: bytes
    future: Future
    act: Callable[[], Awaitable[None]] = field(repr=False)
    size: int = 0


class _Known(NamedTuple):
    kind: str
    digest: bytes
    request_id: str


class Turns:
    """first: the seq_id that is carried out first; None: the first that comes. For one event loop, one taker."""

    def __init__(self, model_id: str, first: int | None, *, gap_s: float = GAP_S) -> None:
        self._model_id = model_id
        self._next = first
        self._gap_s = gap_s
        self._waiting: dict[int, TrainingTurn] = {}
        self._known: dict[int, _Known] = {}
        self.waiting_bytes = 0
        self._changed = asyncio.Event()
        # When the present gap is given up, in the loop's time.
        self._until: float | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def known(self, kind: str, seq_id: int, digest: bytes) -> str | None:
        """The request_id of this very request, if it came before.

        Raises TinkerRefusal (400) when another one had its seq_id.
        """
        before = self._known.get(seq_id)
        if before is None:
            return None
        if (before.kind, before.digest) != (kind, digest):
            what = "another body" if before.kind == kind else f"a {before.kind} request"
            raise TinkerRefusal(
                400,
                f"seq_id {seq_id} of {self._model_id} came before with {what}; this {kind} request needs one of its own",
                "seq_id",
            )
        return before.request_id

    def is_next(self, seq_id: int) -> bool:
        """Whether nothing has to come before it."""
        return self._next is None or seq_id == self._next

    def add(self, turn: TrainingTurn) -> None:
        """`turn`, which is not known; it waits for its turn, or has failed when that has passed."""
        self._remember(turn)
        if self._next is None:
            self._next = turn.seq_id
        if self._closed:
            turn.future.fail(f"{self._model_id} was unloaded: its session is finished")
        elif turn.seq_id < self._next:
            turn.future.fail(
                f"seq_id {turn.seq_id} of {self._model_id} came too late: what follows it was carried out or has failed"
            )
        else:
            self._waiting[turn.seq_id] = turn
            self.waiting_bytes += turn.size
            self._changed.set()

    async def take(self) -> TrainingTurn | None:
        """The next one, once the one before is over; None: closed, and none is left."""
        while True:
            if self._next in self._waiting:
                return self._pop(self._next)
            if self._closed:
                self._fail_waiting("its session was finished before")
                return None
            await self._more()

    def close(self) -> None:
        """Take no more requests; carry out those that can still have their turn."""
        self._closed = True
        self._changed.set()

    async def _more(self) -> None:
        """Until something came or, if there is a gap, until it is given up."""
        self._changed.clear()
        if self._waiting and self._until is None:
            self._until = asyncio.get_running_loop().time() + self._gap_s
        try:
            async with asyncio.timeout_at(self._until):
                await self._changed.wait()
        except TimeoutError:
            self._fail_waiting(f"it did not come within {self._gap_s:g} s")

    def _fail_waiting(self, why: str) -> None:
        """Those behind a gap; what is missing is not waited for any more."""
        missing = self._next
        for seq_id in sorted(self._waiting):
            self._pop(seq_id).future.fail(
                f"seq_id {seq_id} of {self._model_id} follows seq_id {missing}, but {why}; it was not carried out"
            )

    def _pop(self, seq_id: int) -> TrainingTurn:
        turn = self._waiting.pop(seq_id)
        self.waiting_bytes -= turn.size
        self._next = seq_id + 1
        self._until = None
        return turn

    def _remember(self, turn: TrainingTurn) -> None:
        self._known[turn.seq_id] = _Known(turn.kind, turn.digest, turn.future.request_id)
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]


@contextmanager
def failing(future: Future) -> Iterator[None]:
    """What goes wrong within is the future's error."""
    try:
        yield
    except WorkFailed as error:
        future.fail(error.message, error.category)
    except TinkerRefusal as error:
        future.fail(error.detail, "user" if error.status < 500 else "server")
    except OSError as error:
        # The disk's fault, as when it is full.
        logger.error("a %s request failed: %s", future.kind, error)
        future.fail(f"{future.kind} failed: {error}", "server")
    except Exception as error:
        # This is a bug: the request gets its answer, and those behind it their turn.
        logger.exception("a %s request failed", future.kind)
        future.fail(f"{future.kind} failed inside the server: {error}", "server")
