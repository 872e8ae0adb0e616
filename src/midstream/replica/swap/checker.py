"""Proves what serves: a digest of the weights in the engine, and a canary, a fixed prompt whose tokens are scored.

Always holds: the canary goes the way of any request, with a salt of its own, so no other request shares its KV. A check
returns finite numbers or raises. It waits for a digest only where that tells something that is waited for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import msgspec

from midstream.core.types import (
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    SnapshotCheck,
    TokenRecord,
)
from midstream.engine.base import (
    Engine,
    Slot,
    StagingFailed,
    canary_ids,
)
from midstream.snapshots.tasks import all_of

log = logging.getLogger(__name__)

CANARY_PREFIX = "canary-"


class NotSound(Exception):
    """The serving weights are not what they should be."""


class ScoresNotFinite(NotSound):
    """The serving weights compute a number that is not finite."""


class Checker:
    """new_id: never the same twice, also between boots. slot: of the policy; None: of the deployment's own."""

    def __init__(
        self, engine: Engine, new_id: Callable[[], str], *, slot: Slot | None = None, policy: str = ""
    ) -> None:
        self._engine = engine
        self._slot = engine if slot is None else slot
        self._policy = policy
        self._new_id = new_id

    async def check(
        self, info: ModelInfo, snapshot: str, generation: int, *, before: SnapshotCheck | None = None
    ) -> SnapshotCheck:
        """Checks what the engine serves now. Raises NotSound, EngineDied.

        before: of the weights that served before, if nobody waits for the digest of these. They are read in the check if the
        canary cannot tell them from those. Nor are weights read here of an engine that could not prove them before they
        served: `digest` does that.
        """
        canary: tuple[float, ...] = ()
        digest: str | None = None

        async def score() -> None:
            nonlocal canary, snapshot
            label, canary = await self._canary(info)
            if self._policy:
                # It names the base, too, where that is not the weights of the start.
                snapshot = label

        async def read() -> None:
            nonlocal digest
            digest = await self.digest()

        proved = self._slot.proves_staged
        unread = before is not None or not proved
        await all_of((score(),) if unread else (score(), read()))
        found = SnapshotCheck(snapshot=snapshot, generation=generation, canary=canary, unread=unread)
        if unread and proved and same_weights(found, before):
            unread = False
            await read()
        return msgspec.structs.replace(found, weights=digest, unread=unread)

    async def digest(self) -> str | None:
        """Of the weights that serve; None where there is none. Raises EngineDied."""
        try:
            return await self._slot.weights_digest()
        except StagingFailed as error:
            log.warning("the weights could not be read for a digest: %s", error)
            return None

    async def _canary(self, info: ModelInfo) -> tuple[str, tuple[float, ...]]:
        """What computed it, and the log-probabilities."""
        prompt = canary_prompt(info, of_policy=bool(self._policy))
        request = GenerateRequest(
            request_id=CANARY_PREFIX + self._new_id(),
            prompt=prompt,
            sampling=SamplingParams(max_tokens=0),
            salt=f"{CANARY_PREFIX}{self._new_id()}".encode(),
            prompt_records=len(prompt),
            urgent=True,
            policy=self._policy,
        )
        records: tuple[TokenRecord, ...] = ()
        async for event in self._engine.generate(request):
            if event.error is not None:
                raise NotSound(f"the canary prompt failed: {event.error}")
            records += event.prompt or ()
        if len(records) != len(prompt):
            raise NotSound(f"the canary prompt has {len(prompt)} tokens, {len(records)} were scored")
        logprobs = tuple(record.logprob for record in records[1:])
        for position, logprob in enumerate(logprobs, start=1):
            if not math.isfinite(logprob):
                raise ScoresNotFinite(f"the log-probability of canary token {position} is {logprob}")
        return records[-1].snapshot, logprobs


def same_weights(found: SnapshotCheck, before: SnapshotCheck | None) -> str:
    """The snapshot of `before`, if both checks found exactly the same weights under two names; else empty.

    Where a digest lacks, equal log-probabilities of the whole canary stand for it.
    """
    if before is None or before.snapshot == found.snapshot:
        return ""
    if found.weights is not None and before.weights is not None:
        same = found.weights == before.weights
    else:
        same = bool(found.canary) and found.canary == before.canary
    return before.snapshot if same else ""


def canary_prompt(info: ModelInfo, *, of_policy: bool = False) -> tuple[int, ...]:
    """The canary that fits a model, or an adapter of it."""
    return canary_ids(info.vocab_size, info.max_model_len, info.num_experts, of_policy=of_policy)
