"""Rollouts that run while a snapshot is switched, and what became of each.

Always holds: when a `traffic` begins, every long stream has generated a token. When it ends, nothing is in flight. A new
request follows each that ended, so that streams and newcomers are in flight whenever the switch comes. The long streams
differ in length, so that a batch of them does not end together and each next turn finds others in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream_conformance.answers import Answer
from midstream_conformance.endpoint import TRAJECTORY_HEADER, Flight
from midstream_conformance.outcome import Failed
from midstream_conformance.session import Session
from midstream_conformance.snapshots import Snapshots
from midstream_conformance.variants import Variant

STREAMS, NEWCOMERS = 6, 2
PROMPT, NEWCOMERS_TOKENS = 32, 8
LONGER = (1, 3, 9)
BACK_OFF_S = 0.05


@dataclass(frozen=True)
class Attempt:
    """One request for `asked` tokens. answer: None unless it was a 200."""

    prompt: tuple[int, ...]
    session: str
    asked: int
    status: int
    why: str
    retry_after: str | None
    answer: Answer | None

    @property
    def labels(self) -> list[str | None]:
        """The snapshots of its tokens, each once, in their order."""
        found: list[str | None] = []
        for token in self.answer.choice.generated if self.answer and self.answer.choices else ():
            if not found or found[-1] != token.label:
                found.append(token.label)
        return found

    @property
    def whole(self) -> bool:
        return (
            self.answer is not None
            and not self.why
            and self.answer.error is None
            and self.answer.done
            and self.answer.choice.finish == "length"
        )


class Traffic:
    def __init__(self, session: Session, longer: int = 1) -> None:
        """longer: how many times as many tokens the longest streams have, as far as the context goes."""
        self._session = session
        self._tokens_max = min(session.target.stream_tokens * longer, session.target.stream_tokens_max)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.attempts: list[Attempt] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Traffic]:
        """Within: rollouts run."""
        begun = [asyncio.Event() for _ in range(STREAMS)]
        self._tasks = [asyncio.create_task(self._rollout(event)) for event in begun]
        self._tasks += [asyncio.create_task(self._rollout(None)) for _ in range(NEWCOMERS)]
        try:
            # Set at the end of a rollout, too.
            for event in begun:
                await event.wait()
            yield self
            self._stopping = True
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _rollout(self, begun: asyncio.Event | None) -> None:
        """Turns of one session until it is stopped; begun: None for a newcomer, who is a new session every time."""
        session = self._session.key()
        try:
            while not self._stopping:
                attempt = await self._attempt(session, begun)
                self.attempts.append(attempt)
                if attempt.status != 200:
                    await asyncio.sleep(BACK_OFF_S)
                elif begun is None:
                    session = self._session.key()
        finally:
            if begun is not None:
                begun.set()

    async def _attempt(self, session: str, begun: asyncio.Event | None) -> Attempt:
        prompt = self._session.prompt(PROMPT)
        count = (
            NEWCOMERS_TOKENS
            if begun is None
            else self._session.between(self._tokens_max // 3, self._tokens_max)
        )
        body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "logprobs": True}
        body |= {"seed": self._session.seed(), "perf_metrics_in_response": True}
        flight = Flight(self._session.endpoint, body, {TRAJECTORY_HEADER: session})
        running = asyncio.create_task(flight.run())
        try:
            await flight.begun.wait()
            if begun is not None:
                begun.set()
            await running
        finally:
            running.cancel()
        return Attempt(
            tuple(prompt),
            session,
            count,
            flight.status,
            flight.why,
            flight.retry_after,
            flight.answer,
        )


@dataclass(frozen=True)
class Crossing:
    """A switch of snapshots under traffic.

    later: the labels of requests that every replica got afterwards, each once.
    scores: of each attempt that crossed, the logprobs of all its tokens under the old and under the new snapshot, prompt
        included. Empty where the engine does not know it.
    """

    old: str
    new: str
    attempts: Sequence[Attempt]
    later: Sequence[str | None]
    scores: Sequence[tuple[Attempt, list[float], list[float]]] = ()

    @property
    def crossed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.labels == [self.old, self.new]]

    @property
    def held_off(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.status == 425]

    @property
    def summary(self) -> dict[str, object]:
        statuses = sorted({attempt.status for attempt in self.attempts})
        return {"requests": len(self.attempts), "crossed": len(self.crossed), "statuses": statuses}


async def cross(session: Session, old: Variant, new: Variant) -> Crossing:
    """Switch from `old` to `new` under traffic, and score what crossed."""
    crossing = await switch(session, old, new, lambda found: found.crossed)
    if session.target.missing("prompt_logprobs") or not crossing.crossed:
        return crossing
    return await _scored(session, session.snapshots, crossing, old)


async def switch(
    session: Session, old: Variant, new: Variant, enough: Callable[[Crossing], object], policy: Any = "all"
) -> Crossing:
    """Switch from `old` to `new` under traffic, signalled with `policy`; nothing is scored.

    An engine that is far ahead of its clients may have nothing in flight at the switch. Then it is done again, with longer
    streams, until the finding is `enough` or a request failed.
    """
    for longer in LONGER:
        found = await _switch(session, old, new, longer, policy)
        if enough(found) or not all(attempt.whole for attempt in found.attempts):
            break
    return found


async def _switch(session: Session, old: Variant, new: Variant, longer: int, policy: Any) -> Crossing:
    snapshots = session.snapshots
    before = await snapshots.hold(old)
    after = await snapshots.ready(new)
    async with Traffic(session, longer).running() as traffic:
        await snapshots.signal(after, policy)
        await snapshots.wait(after)
    return Crossing(before, after, traffic.attempts, await session.labels())


async def _scored(session: Session, snapshots: Snapshots, crossing: Crossing, old: Variant) -> Crossing:
    def ids(attempt: Attempt) -> list[int]:
        if attempt.answer is None:
            raise Failed("a stream that crossed has no answer")
        return [*attempt.prompt, *(token.id for token in attempt.answer.choice.generated)]

    crossed = crossing.crossed
    under_new = [await session.endpoint.score(ids(attempt)) for attempt in crossed]
    await snapshots.hold(old)
    under_old = [await session.endpoint.score(ids(attempt)) for attempt in crossed]
    scores = tuple(zip(crossed, under_old, under_new, strict=True))
    return replace(crossing, scores=scores)
