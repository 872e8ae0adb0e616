"""What rows share during one run: the endpoint, what it is, snapshots, names and prompts that nobody used before.

Always holds: two calls never give the same prompt or the same key; what is remembered with `once` is found out once.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from midstream.conformance.answers import Answer
from midstream.conformance.endpoint import TRAJECTORY_HEADER, Endpoint, refusal
from midstream.conformance.rows import Failed, Skipped
from midstream.conformance.snapshots import Snapshots
from midstream.conformance.target import PROMPT_TOKENS, Target

T = TypeVar("T")

FIRST_ID, LAST_ID = (
    20,
    190,
)  # token ids that every vocabulary has; plain ASCII and its neighbours in byte-level ones
SIGHTINGS = 16  # sessions asked, at most, until every replica was seen


class Session:
    """tolerance: nats by which two computations of one log-probability may differ. limit_s: of a row."""

    def __init__(
        self,
        endpoint: Endpoint,
        target: Target,
        snapshots: Snapshots | None,
        *,
        tolerance: float,
        limit_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.target = target
        self._snapshots = snapshots
        self.tolerance = tolerance
        self.limit_s = limit_s
        self._random = random.Random(secrets.randbits(64))
        self._once: dict[str, Any] = {}

    @property
    def snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise Skipped("snapshots cannot be published")
        return self._snapshots

    def prompt(self, length: int = PROMPT_TOKENS) -> list[int]:
        """Token ids."""
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(length)]

    def key(self) -> str:
        """A session's name."""
        return f"conformance-{self._random.getrandbits(64):016x}"

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(items, len(items))

    def seed(self) -> int:
        return self._random.getrandbits(31)

    async def once(self, name: str, find_out: Callable[[Session], Awaitable[T]]) -> T:
        """What `find_out` gave, or raised, the first time."""
        if name not in self._once:
            try:
                self._once[name] = (await find_out(self), None)
            except (Failed, Skipped) as error:
                self._once[name] = (None, error)
        found, failure = self._once[name]
        if failure is not None:
            raise failure
        return found  # type: ignore[no-any-return]

    async def turn(self, prompt: Sequence[int], key: str | None, **fields: Any) -> Answer:
        """One token of `prompt` in the session `key`; None: without one."""
        headers = {} if key is None else {TRAJECTORY_HEADER: key}
        asked = {"max_tokens": 1, "ignore_eos": True, **fields}
        return await self.endpoint.complete(prompt, headers=headers, **asked)

    async def prime(self, prompt: Sequence[int]) -> list[str]:
        """Have every replica cache `prompt`, asked by sessions of its own; the replicas that were seen."""
        wanted = self.target.replicas or 1
        seen: set[str] = set()
        for _ in range(SIGHTINGS):
            answer = await self.turn(prompt, self.key())
            seen.add(answer.replica or "the endpoint")
            if len(seen) >= wanted and answer.replica is not None:
                break
        return sorted(seen)

    @contextlib.asynccontextmanager
    async def transition(self, wanted: str) -> AsyncIterator[None]:
        """Within: the deployment's transition is `wanted`. Raises Skipped when it is not and cannot be made so."""
        name, before = self.target.deployment, self.target.transition
        if before == wanted or (before is None and wanted == "ASYNC"):
            yield
            return
        if name is None or before is None:
            raise Skipped(f"the transition is {before or 'unknown'} and cannot be changed")
        await self._set_transition(name, wanted)
        try:
            yield
        finally:
            await self._set_transition(name, before)

    async def _set_transition(self, name: str, wanted: str) -> None:
        path = f"/v1/{name}?updateMask=hot_load_transition_type"
        response = await self.endpoint.request("PATCH", path, {"hotLoadTransitionType": wanted})
        if response.status_code != 200:
            raise Skipped(f"the transition cannot be set to {wanted}: {refusal(response)}")
