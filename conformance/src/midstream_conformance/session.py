"""What rows share during one run: the endpoint, what it is, snapshots, names and prompts that nobody used before.

Always holds: two calls never give the same prompt or the same key; what is remembered with `once` is found out once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from midstream_conformance.answers import Answer
from midstream_conformance.endpoint import TRAJECTORY_HEADER, Endpoint, refusal
from midstream_conformance.outcome import Failed, Skipped
from midstream_conformance.snapshots import Snapshots
from midstream_conformance.target import PROMPT_TOKENS, Target

T = TypeVar("T")

FIRST_ID, LAST_ID = (
    20,
    190,
)  # token ids that every vocabulary has; plain ASCII and its neighbours in byte-level ones
SIGHTINGS = 16  # sessions asked for each replica, at most, until every one was seen
UNNAMED = ""  # the replica of an answer that names none


class Session:
    """tolerance: nats by which two computations of one log-probability may differ. limit_s: of a row, in which several
    snapshots are loaded.
    """

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
        self._transition_before: str | None = (
            None  # what a row found and changed; None: nothing is changed now
        )

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

    def between(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def seed(self) -> int:
        return self._random.getrandbits(31)

    async def once(self, name: str, find_out: Callable[[Session], Awaitable[T]]) -> T:
        """What `find_out` gave, or raised, the first time; whatever it raised, so that no row waits for it again."""
        if name not in self._once:
            try:
                self._once[name] = (await find_out(self), None)
            except asyncio.CancelledError:  # the row's time is over, or the run's
                self._once[name] = (None, Failed(f"the {name} was not done within a row's limit"))
                raise
            except Exception as error:  # noqa: BLE001 - the runner says what it means
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

    async def on_every_replica(self, ask: Callable[[str], Awaitable[Answer]]) -> dict[str, list[Answer]]:
        """The answers of `ask(key)` for session keys nobody used, by replica: until every replica has answered.

        At most SIGHTINGS times as often as there are replicas, and so often where the endpoint does not say which replica
        answers (UNNAMED) or how many there are. The first quarter is asked one by one; then several at once, for one by one
        new sessions may all go where the fewest are.
        """
        wanted = self.target.replicas
        found: dict[str, list[Answer]] = {}
        several = SIGHTINGS // 4 * (wanted or 1)
        for count in [1] * several + [several] * 3:
            asked = await asyncio.gather(*(ask(self.key()) for _ in range(count)), return_exceptions=True)
            for answer in asked:
                if isinstance(answer, BaseException):
                    raise answer
                found.setdefault(answer.replica or UNNAMED, []).append(answer)
            if wanted == 1 or (wanted and len(found.keys() - {UNNAMED}) >= wanted):
                break
        return found

    async def labels(self) -> list[str | None]:
        """The snapshots that the replicas' answers name now, each once."""
        found = await self.on_every_replica(lambda key: self.turn([FIRST_ID, FIRST_ID + 1], key))
        return list(dict.fromkeys(answer.label for answers in found.values() for answer in answers))

    @contextlib.asynccontextmanager
    async def transition(self, wanted: str) -> AsyncIterator[None]:
        """Within: the deployment's transition is `wanted`. Raises Skipped when it is not and cannot be made so, and Failed
        when it cannot be set back; `restore_transition` may then try it again.
        """
        before = self.target.transition
        if before == wanted or (before is None and wanted == "ASYNC"):
            yield
            return
        if self.target.deployment is None or before is None:
            raise Skipped(f"the transition is {before or 'unknown'} and cannot be changed")
        known, self._transition_before = self._transition_before, self._transition_before or before
        if refused := await self._set_transition(wanted):
            self._transition_before = known
            raise Skipped(refused)
        try:
            yield
        except BaseException:
            with contextlib.suppress(
                Failed, httpx.HTTPError
            ):  # what the row found comes first; tried again at the end
                await self.restore_transition()
            raise
        await self.restore_transition()

    async def restore_transition(self) -> str | None:
        """Set it to what it was before any row; to what, None when it is that. Raises Failed when it is refused."""
        before = self._transition_before
        if before is None:
            return None
        if refused := await self._set_transition(before):
            raise Failed(refused)
        self._transition_before = None
        return before

    async def _set_transition(self, wanted: str) -> str | None:
        """Why it was refused; None when it was not."""
        path = f"/v1/{self.target.deployment}?updateMask=hot_load_transition_type"
        response = await self.endpoint.request("PATCH", path, {"hotLoadTransitionType": wanted})
        if response.status_code != 200:
            return f"the transition cannot be set to {wanted}: {refusal(response)}"
        self.target.transition = wanted
        return None
