"""The engine port: what a replica needs from whatever computes tokens.

Owns: the contract only. Implementations: engine/embedded (PyTorch), engine/vllm (an unmodified vLLM server).
Methods are called from one asyncio event loop. None of them blocks it.

The events of one request on their way from an engine to the iterator of `generate`.

Always holds: events come out in the order in which the engine put them. After the last event of a choice, after `end_choice`
and after an error, no event of that choice comes out.

How long another process has been silent while this process listened, or stood still. Pure, but for `cpu_ticks`.

Always holds: time in which our own event loop stood still does not count. Messages from that time are read afterwards.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path

from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming


class EngineDied(Exception):
    """The engine is gone with all its requests; the replica is not ready until `start` succeeds again."""


class StreamLost(Exception):
    """The engine gives up one request, and goes on with the others. Another engine may go on with it."""


class StagingFailed(Exception):
    """The staged files could not become a model; what serves is unchanged."""


class Slot(abc.ABC):
    """What one policy serves, and what is to take its place. Every engine is the slot of its deployment's own policy.

    proves_staged: `stage` scores the canary with the staged weights, and raises StagingFailed when a log-probability is not
    finite. Of a slot that cannot do this, newcomers wait after a switch until the check has passed.
    """

    proves_staged = False

    @abc.abstractmethod
    async def stage(self, snapshot: str, directory: Path) -> None:
        """Prepare the verified files of `directory` beside the serving weights; steps go on meanwhile.

        One snapshot of a slot is staged at a time: a second stage replaces the first. The files are a checkpoint's or, with
        the feature `policies`, a LoRA adapter's of the base weights. Raises StagingFailed, EngineDied.
        """

    def drop_staged(self) -> None:  # noqa: B027 - optional to override
        """Free what is staged or being staged, if anything is: it will not be committed. Returns at once."""

    @abc.abstractmethod
    async def commit(self, snapshot: str) -> SwapTiming:
        """Switch to the staged snapshot at a step boundary; running sequences continue with their KV.

        Every token sampled before the switch is labelled with the old snapshot, every one after it with the new one. Without
        the feature `policy_crossing`, running sequences of a policy end under the snapshot that they began with, and say so.
        Only safe after stage(snapshot) returned; raises StagingFailed when that snapshot is not the one staged,
        EngineDied. The timing's pause_ms runs from the end of the last step before the switch to the switch.
        """

    def announce(  # noqa: B027 - optional to override
        self, files: str, overwritten: Sequence[tuple[str, str]]
    ) -> None:
        """What the next commit means; it is forgotten when that fails. Call it right before the commit. Returns at once.

        files: what the committed files are, for GenerationEvent.kv_files; equal for equal bytes. overwritten: (name, label) of
        names whose weights were others so far: these are told as the label from the commit on. Events say it to running
        requests (GenerationEvent.renamed).
        """

    def retain(self, snapshots: Collection[str]) -> None:  # noqa: B027 - optional to override
        """Besides what serves, keep these of the snapshots that serve or have served (feature `resident_snapshots`).

        The others are freed once no request runs under them. Returns at once.
        """

    async def until_computing(self) -> None:  # noqa: B027 - optional to override
        """Return when urgent requests are computed: at once, or after a pause without the feature `frozen_check`."""

    def settle(self, snapshot: str, *, sound: bool) -> None:  # noqa: B027 - optional to override
        """Tell the engine how the check of a committed snapshot ended. Returns at once.

        An engine that cannot be checked before its switch holds back what was sampled since. When the check fails, the
        requests that wait for it end with StreamLost.
        """

    async def weights_digest(self) -> str | None:
        """Digest of the serving weights, as the engine holds them; None if this engine cannot compute one.

        Equal for equal weights in engines of equal settings. Steps go on meanwhile. Not during commit. Raises EngineDied;
        StagingFailed when the weights cannot be read.
        """
        return None


class Engine(Slot):
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
        the engine stops within one step and its KV blocks are free again. Raises EngineDied, StreamLost.
        """

    def refuses(self, request: GenerateRequest) -> str | None:
        """Why the engine cannot serve this request although its card does not exclude it; None if it can.

        The text is for the user and begins with the name of the field: `temperature: ...`. The replica asks this before the
        request waits for anything.
        """
        return None

    def end_choice(self, request_id: str, index: int) -> None:
        """Stop one choice of a running request: no further event of it comes, and its KV is free within a step.

        The iterator of `generate` goes on with the other choices and ends when none is left. Unknown ids are ignored.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a choice of a running request, or every one, with what it has: its last event has the finish `abort`.

        Unknown ids are ignored.
        """

    def slot(self, policy: str) -> Slot:
        """The slot of another policy (feature `policies`). Its first commit makes the policy."""
        raise NotImplementedError(f"{type(self).__name__} serves one policy")

    def end_policy(self, policy: str) -> None:
        """Free all that the policy has, once no request runs under it. Returns at once."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Compute nothing but urgent requests from the next step on. The others stand still with their KV. Idempotent.

        An engine without the feature `frozen_check` computes no urgent request either.
        """

    @abc.abstractmethod
    async def resume(self) -> None:
        """Compute all requests again. Idempotent."""

    def silent_s(self) -> float:
        """Seconds since the engine was last heard of; 0 for an engine that does not report all the time. Safe at any time."""
        return 0.0

    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """The last numbers that the engine reported. Never waits."""

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        """Call `callback(reason)` when the engine dies by itself (not by close)."""


class RequestEvents:
    """open: the choices that are not over."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.open = set(request.choices)
        self._arrived: deque[GenerationEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request.request_id}, open={sorted(self.open)})"

    def put(self, item: GenerationEvent | Exception) -> None:
        """Add an event, or the error that ends the request."""
        self._arrived.append(item)
        self._wake()

    async def next(self) -> GenerationEvent | None:
        """The next event; None when every choice is over. Raises the error that ended the request."""
        while self.open:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            item = self._arrived.popleft()
            if isinstance(item, Exception):
                raise item
            if item.error is not None:
                self.open.clear()
            elif item.index not in self.open:
                # The choice was ended while this event was on its way.
                continue
            elif item.finish is not None:
                self.open.discard(item.index)
            return item
        return None

    def end_choice(self, index: int) -> None:
        self.open.discard(index)
        self._wake()

    def abort(self, index: int | None = None) -> None:
        """After the events that came so far, the choice ends if it is open; None: every one does."""
        for ended in sorted(self.open if index is None else self.open & {index}):
            self.put(GenerationEvent(index=ended, finish="abort"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


CHECK_INTERVAL_S = 1.0


class SilenceTimer:
    def __init__(self, now: float) -> None:
        self._updated_at = now
        self.silent_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def update(self, now: float) -> float:
        """Seconds of silence. Of the time since the last update, no more counts than a late update on a busy machine takes.

        now: in seconds.
        """
        self.silent_s += min(now - self._updated_at, 2 * CHECK_INTERVAL_S)
        self._updated_at = now
        return self.silent_s


class StillnessTimer:
    """How long a process has neither been heard nor used a processor. cpu_ticks: None where it is unknown.

    A process that computes for long is not still. One that was stopped, or waits for something that never comes, is.
    """

    def __init__(self, now: float) -> None:
        self._timer = SilenceTimer(now)
        self._cpu_ticks: int | None = None

    def heard(self) -> None:
        self._timer.heard()

    def update(self, now: float, cpu_ticks: int | None) -> float:
        """Seconds of stillness, at the time `now` in seconds."""
        if cpu_ticks is None or cpu_ticks != self._cpu_ticks:
            self._timer.heard()
            self._cpu_ticks = cpu_ticks
        return self._timer.update(now)


def cpu_ticks(pid: int) -> int | None:
    """Processor time that all threads of a process have used, in ticks of the kernel's clock. None where it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
