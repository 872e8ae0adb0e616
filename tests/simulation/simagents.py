"""Agents of a simulated history, whose sessions do not fit into the KV caches together, and the books that have to balance.

Always holds: at any time, each session that claims KV has a turn that runs, or is held by its replica, and nothing waits where
there is room. Behind the end of all agents, no session that is over claims anything.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simclient import Broken, Wrong, exchange

from midstream.core.headers import HEADER_EXPECTED_TOKENS
from midstream.replica.kv_account import SILENT_S_MAX

if TYPE_CHECKING:
    from simworld import World

    from midstream.replica.replica import Replica

#: Of agents, which have a group's prompt each; and how often the books are looked at.
AGENTS = (4, 8)
GROUPS = 3
LOOK_S = 0.2
#: Statuses of requests that were refused, and may come again.
LATER = frozenset((404, 409, 410, 422, 425, 429, 502, 503, 504))


def kinds(rng: random.Random) -> list[tuple[float, str, Any]]:
    """What befalls the replicas of each such history, beside what befalls others: seconds, kind and value."""
    made: list[tuple[float, str, Any]] = []
    for kind in ("kill replica", "engine dies"):
        made += [(rng.uniform(2.0, 18.0), kind, rng.random()) for _ in range(rng.randint(0, 2))]
    return made


class Agents:
    """over: of sessions that were ended or rewarded behind their last turn, which."""

    def __init__(self, port: int, world: World, seed: int, count: Callable[[str], None]) -> None:
        self._port, self._world, self._seed, self._count = port, world, seed, count
        self._over = False
        self.over: set[str] = set()

    def stop(self) -> None:
        self._over = True

    async def run(self, number: int) -> None:
        """One agent, with one trajectory after another."""
        rng = random.Random(f"{self._seed} agent {number}")
        for trajectory in itertools.count():
            if self._over:
                return
            await self._trajectory(f"agent-{number}-{trajectory}", rng)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            check_books(self._world)

    async def _trajectory(self, key: str, rng: random.Random) -> None:
        ids = [1 + rng.randrange(GROUPS), *range(2, 2 + rng.choice((30, 50)))]
        says = rng.choice((None, None, 5, 120, 10**9))
        headers = [("x-multi-turn-session-id", key)]
        headers += [] if says is None else [(HEADER_EXPECTED_TOKENS, str(says))]
        for _ in range(rng.randint(1, 6)):
            answer = None if self._over else await self._turn(ids, headers, rng)
            if answer is None:
                # As clients do that were refused.
                await asyncio.sleep(0.1 + rng.random() * 0.4)
                break
            ids = [*ids, *answer, *(rng.randint(1, 249) for _ in range(rng.randint(0, 20)))]
            # Some are silent for longer than their claims last.
            await asyncio.sleep(rng.random() * (8.0 if rng.random() < 0.05 else 0.4))
        await self._end(key, rng)

    async def _turn(
        self, ids: list[int], headers: list[tuple[str, str]], rng: random.Random
    ) -> list[int] | None:
        """The longest answer; None: there is none."""
        choices = rng.choice((1, 1, 1, 3))
        body = {
            "model": "sim",
            "prompt": ids,
            "max_tokens": rng.randint(1, 24),
            "n": choices,
            "stream": False,
        }
        body |= {"ignore_eos": True, "return_token_ids": True, "seed": rng.randint(0, 2**40)}
        try:
            # Clients have limits of their own, and some are short.
            async with asyncio.timeout(rng.choice((0.3, 10.0, 30.0))):
                answer = await exchange(self._port, "POST", "/v1/completions", body, headers)
        except TimeoutError:
            self._count("agent: left")
            return None
        except Broken:
            self._count("agent: lost")
            return None
        waited = "waited" if "x-midstream-queue-position" in answer.headers else "at once"
        self._count(f"agent: {answer.status}, {waited}")
        if answer.status != 200:
            if answer.status not in LATER:
                raise Wrong(f"an agent's turn: {answer}")
            return None
        told = json.loads(answer.body)["choices"]
        if sorted(choice["index"] for choice in told) != list(range(choices)):
            raise Wrong(f"asked for {choices} choices: {answer}")
        return max((choice["token_ids"] for choice in told), key=len)

    async def _end(self, key: str, rng: random.Random) -> None:
        """By a call, by a reward, or not at all."""
        how = rng.choice(("close", "reward", "silence"))
        try:
            if how == "close":
                status = (await exchange(self._port, "DELETE", f"/v1/sessions/{key}")).status
            elif how == "reward":
                path = f"/v1/sessions/{key}/reward"
                status = (await exchange(self._port, "POST", path, {"reward": 1.0})).status
            else:
                return
        except Broken:
            return
        self._count(f"agent: {how} {status}")
        if status in (200, 204):
            self.over.add(key)

    def nothing_is_left(self) -> None:
        """Nobody asks for anything any more. Raises Wrong."""
        for process, replica in self._world.replicas:
            if not process.alive:
                continue
            account = replica.budget.account
            left = sorted(key for _, key in account if key in self.over)
            if left and not self._world.counts["event: kill gateway"]:
                raise Wrong(f"{process} counts sessions that are over: {left}")


def check_books(world: World) -> None:
    """Raises Wrong."""
    for process, replica in world.replicas:
        if not process.alive or process.stopped:
            continue
        try:
            replica.budget.account.check()
        except AssertionError as error:
            raise Wrong(f"the books of {process} do not balance: {error}") from error
        _check_claims(str(process), replica)


def _check_claims(name: str, replica: Replica) -> None:
    budget = replica.budget
    account, queue = budget.account, budget.queue
    nobodys = [key for key in account if not account.runs(key) and not replica.sessions.holds(key)]
    if nobodys:
        raise Wrong(f"{name} counts sessions that nobody holds: {nobodys}")
    following = queue.following()
    if following is not None and queue.fits(following):
        raise Wrong(f"{name} has {following} that waits, and there is room in {account}")


def empty_after_silence(world: World) -> None:
    """The history is over: whatever sessions were not ended lose their claims by silence. Raises Wrong."""
    for process, replica in world.replicas:
        if process.alive:
            account = replica.budget.account
            account.demote(world.now + 1e6 + SILENT_S_MAX)
            account.check()
            if account.of_sessions or account.live or account.claimed:
                raise Wrong(f"{process}: silent sessions claim {account}, {account.live} live tokens")
