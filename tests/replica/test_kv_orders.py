"""The KV budget under every order of turns, ends, cancellations, gates and lost caches: all turns end, books are empty."""

from __future__ import annotations

import asyncio
import random

import pytest
from tiers import examples

from midstream.core.errors import Overloaded
from midstream.core.kv import KvStats
from midstream.core.types import Session
from midstream.replica.kv_budget import KvBudget, KvTurn
from midstream.replica.response.measured import Timings
from midstream.replica.sessions import TurnStats


class Ended:
    def __init__(self, longest: int) -> None:
        self.turn = TurnStats(longest=longest)


class Refused(Exception):
    pass


class Scene:
    """A cache of 100 tokens. known: sessions as the replica holds them. shut: a sync swap is under way."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now, self.shut = 0.0, False
        self.known: dict[Session, None] = {}
        self.turns: list[asyncio.Task[None]] = []
        self.budget = KvBudget(
            share=1.0,
            waiting_max=50,
            stats=lambda: KvStats(block_tokens=1, total=100),
            known=lambda session: session in self.known,
            ended=lambda session: None,
            monotonic=lambda: self.now,
        )

    async def turn(self, session: Session | None, tokens: int, said: int | None) -> None:
        turn = KvTurn(session, tuple(range(tokens)), said=said, shut=lambda: self.shut)
        await self.budget.enter(turn)
        with self.budget.turn(turn, Timings(0.0)):
            await asyncio.sleep(0)
            if self.shut or self.draw.random() < 0.1:
                raise Refused
            if session is not None:
                self.known[session] = None
            for _ in range(self.draw.randrange(5)):
                await asyncio.sleep(0)
            turn.measured = Ended(self.draw.randrange(30))
            if session is not None:
                self.budget.found(session, self.draw.randrange(tokens + 1))

    def step(self) -> None:
        draw, budget = self.draw, self.budget
        match draw.choices(range(8), (50, 15, 10, 2, 4, 2, 2, 15))[0]:
            case 0:
                session = None if draw.random() < 0.15 else ("", str(draw.randrange(30)))
                said = None if draw.random() < 0.5 else draw.randrange(1, 200)
                self.turns.append(asyncio.create_task(self.turn(session, draw.randrange(1, 60), said)))
            case 1 if self.turns:
                draw.choice(self.turns).cancel()
            case 2 if self.known:
                session = draw.choice(sorted(self.known))
                del self.known[session]
                budget.end(session)
            case 3:
                self.known.clear()
                budget.reset()
            case 4:
                self.shut = not self.shut
                budget.wake()
            case 5:
                budget.open(serving=False)
                budget.open(serving=True)
            case 6 if self.known:
                # A reward.
                budget.end(draw.choice(sorted(self.known)))
            case _:
                self.now += 8 * draw.random()

    async def play(self) -> None:
        budget = self.budget
        for _ in range(300):
            self.step()
            for _ in range(self.draw.randrange(3)):
                await asyncio.sleep(0)
            budget.account.check()
        self.shut = False
        for _ in range(400):
            self.now += 400
            budget.wake()
            for _ in range(8):
                await asyncio.sleep(0)
        assert all(turn.done() for turn in self.turns), "a turn waits for ever"
        ends = await asyncio.gather(*self.turns, return_exceptions=True)
        allowed = (Refused, Overloaded, asyncio.CancelledError)
        assert [end for end in ends if end is not None and not isinstance(end, allowed)] == []
        self.now += 1000
        waits = budget.report()
        budget.account.check()
        assert (waits.claimed_tokens, waits.waiting, budget.account.live) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_whatever_happens_all_turns_end_and_nothing_stays_claimed(seed: int) -> None:
    asyncio.run(Scene(seed).play())
