"""The engine port: what a replica needs from whatever computes tokens.

Owns: the contract only. Implementations: engine/embedded (PyTorch), engine/vllm (an unmodified vLLM server).
Methods are called from one asyncio event loop. None of them blocks it.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming


class EngineDied(Exception):
    """The engine is gone with all its requests; the replica is not ready until `start` succeeds again."""


class StagingFailed(Exception):
    """The staged files could not become a model; what serves is unchanged."""


class Engine(abc.ABC):
    @abc.abstractmethod
    async def start(self) -> ModelInfo:
        """Load the base weights and be ready to generate. Safe to call again after EngineDied."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the engine and free what it holds. Idempotent; `start` may follow.

        Running requests, and stage or commit under way, raise EngineDied.
        """

    @abc.abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Events of all n choices, interleaved, in order within a choice; ends after the last choice's `finish`.

        Safe at any time, also during stage and commit. Closing the iterator (aclose, cancellation) aborts the request:
        the engine stops within one step and its KV blocks are free again. Raises EngineDied.
        """

    def refuses(self, request: GenerateRequest) -> str | None:
        """Why the engine cannot serve this request although its card does not exclude it; None if it can.

        The text is for the user and begins with the name of the field: `temperature: ...`. The replica asks this before the
        request waits for anything.
        """
        return None

    def end_choice(self, request_id: str, index: int) -> None:  # noqa: B027 - optional to override
        """Stop one choice of a running request: no further event of it comes, and its KV is free within a step.

        The iterator of `generate` goes on with the other choices and ends when none is left. Unknown ids are ignored.
        """

    @abc.abstractmethod
    async def stage(self, snapshot: str, directory: Path) -> None:
        """Prepare the verified files of `directory` beside the serving weights; steps go on meanwhile.

        One snapshot is staged at a time: a second stage replaces the first. Raises StagingFailed, EngineDied.
        """

    def drop_staged(self) -> None:  # noqa: B027 - optional to override
        """Free what is staged or being staged, if anything is: it will not be committed. Returns at once."""

    @abc.abstractmethod
    async def commit(self, snapshot: str) -> SwapTiming:
        """Switch to the staged snapshot at a step boundary; running sequences continue with their KV.

        Every token sampled before the switch is labelled with the old snapshot, every one after it with the new one.
        Only safe after stage(snapshot) returned; raises StagingFailed when that snapshot is not the one staged,
        EngineDied. The timing's pause_ms runs from the end of the last step before the switch to the switch.
        """

    async def weights_digest(self) -> str | None:
        """Digest of the serving weights, as the engine holds them; None if this engine cannot compute one.

        Equal for equal weights in engines of equal settings. Steps go on meanwhile. Not during commit. Raises EngineDied;
        StagingFailed when the weights cannot be read.
        """
        return None

    @abc.abstractmethod
    async def pause(self) -> None:
        """Stop stepping at the next step boundary. Running sequences keep their KV. Idempotent."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Step again. Idempotent."""

    def silent_s(self) -> float:
        """Seconds since the engine was last heard of; 0 for an engine that does not report all the time. Safe at any time."""
        return 0.0

    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """The last numbers that the engine reported. Never waits."""

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:  # noqa: B027 - optional to override
        """Call `callback(reason)` when the engine dies by itself (not by close)."""
