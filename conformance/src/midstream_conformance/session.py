"""What rows share during one run: the endpoint, its target, snapshots, and names and prompts that are always new.

Always holds: two calls never give the same prompt or the same key. A finding that is kept with `once` is found out once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from midstream_conformance.answers import Answer, Json
from midstream_conformance.endpoint import TRAJECTORY_HEADER, Endpoint, refusal
from midstream_conformance.outcome import Failed, Skipped
from midstream_conformance.snapshots import Snapshots
from midstream_conformance.target import PROMPT_TOKENS, Target

T = TypeVar("T")

# Token ids that every vocabulary has: plain ASCII and its neighbours in byte-level ones.
FIRST_ID, LAST_ID = (
    20,
    190,
)
# At most so many sessions are asked for each replica, until every one was seen.
SIGHTINGS = 16
# Where one of them was not: so long it waits before it asks twice as many at once as before, in seconds. A replica that was
# busy, or has more sessions than the others, gets no new one until its next report, or until they have as many.
PAUSES_S = (0.5, 1.0, 2.0)
# The replica of an answer that names none.
UNNAMED = ""


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
        # The state that a row found and changed. None: nothing is changed now.
        self._transition_before: str | None = None
        # Whether a row's pause may not have ended.
        self._paused = False

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
            except asyncio.CancelledError:
                # The time of the row, or of the run, is over.
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
        """The answers of `ask(key)` for unused session keys, by replica: until every replica has answered.

        It asks SIGHTINGS times as often as there are replicas, and no more where the endpoint does not name the replica that
        answers (UNNAMED), or their number. The first quarter is asked one by one, the others several at once: one by one, new
        sessions may all go where the fewest are. Where replicas are named, it asks more after each of PAUSES_S.
        """
        wanted = self.target.replicas
        found: dict[str, list[Answer]] = {}
        several = SIGHTINGS // 4 * (wanted or 1)
        rounds = [(0.0, 1)] * several + [(0.0, several)] * 3
        rounds += [(pause, several << doubled) for doubled, pause in enumerate(PAUSES_S, start=1)]
        for pause, count in rounds:
            if pause and (wanted is None or found.keys() <= {UNNAMED}):
                break
            await asyncio.sleep(pause)
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
            # The row's finding comes first. Putting back is tried again at the end.
            with contextlib.suppress(Failed, httpx.HTTPError):
                await self.restore_transition()
            raise
        await self.restore_transition()

    @contextlib.asynccontextmanager
    async def paused(self, path: str, body: Json | None = None) -> AsyncIterator[None]:
        """Within: the deployment is paused by this trainer's call, or was until the row ended it. Raises Failed when it is
        paused already, or cannot be paused or resumed; `restore_pause` may then try it again.
        """
        named = self.endpoint.hot_load_headers
        response = await self.endpoint.request("GET", "/is_paused", headers=named)
        if response.status_code != 200 or response.json().get("is_paused") is not False:
            raise Failed(f"it should not be paused, before a row pauses it: {response.text[:200]}")
        # It may be paused although no client gets the answer.
        self._paused = True
        try:
            response = await self.endpoint.request("POST", path, body, named)
            if response.status_code != 200:
                raise Failed(f"{path}: {refusal(response)}")
            yield
        except BaseException:
            # The row's finding comes first. Resuming is tried again at the end.
            with contextlib.suppress(Failed, httpx.HTTPError):
                await self.restore_pause()
            raise
        await self.restore_pause()

    async def restore_pause(self) -> bool:
        """End the pause of a row. Returns whether there may have been one. Raises Failed when it cannot be ended."""
        if not self._paused:
            return False
        response = await self.endpoint.request("POST", "/resume", headers=self.endpoint.hot_load_headers)
        if response.status_code != 200:
            raise Failed(f"the deployment's pause cannot be ended: {refusal(response)}")
        self._paused = False
        return True

    async def restore_transition(self) -> str | None:
        """Put the transition back as it was before any row. Returns it, or None when it is that. Raises Failed when refused."""
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
