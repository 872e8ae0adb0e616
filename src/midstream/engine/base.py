"""The engine port: what a replica needs from whatever computes tokens.

Owns: the contract, and the prompt of the check that it speaks of. Implementations: engine/embedded (PyTorch), engine/vllm (an
unmodified vLLM server), engine/sglang (an unmodified SGLang server).
Methods are called from one asyncio event loop. None of them blocks it.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from midstream.core.types import EngineStats, GenerateRequest, GenerationEvent, ModelInfo, SwapTiming
from midstream.engine.kv_copies import KvCopies

#: Takes an event that ends nothing in the turn of the loop that brings it, or leaves it to the iterator: False.
AtOnce = Callable[[GenerationEvent], bool]
#: Of the canary: a fixed prompt whose scores prove what weights compute. Each token goes through all weights of a dense model,
#: but for rows of the embedding.
CANARY_TOKENS = 8
#: Of a model with experts, each of which some token has to choose.
CANARY_TOKENS_OF_EXPERTS = 32
#: Of a policy's adapter. Streams of others wait for it, and would wait longer for a longer one.
CANARY_TOKENS_OF_POLICY = 4


def canary_ids(vocab_size: int, context: int, experts: int, *, of_policy: bool = False) -> tuple[int, ...]:
    """Token ids all over the vocabulary, two at least, and no more than the context has room for. experts: that a layer has;
    0: a dense model. of_policy: for an adapter.

    They are the same for every replica and engine of a model. A shorter canary is the beginning of a longer one.
    """
    of_weights = CANARY_TOKENS_OF_EXPERTS if experts else CANARY_TOKENS
    tokens = CANARY_TOKENS_OF_POLICY if of_policy else of_weights
    return spread_ids(max(2, min(tokens, context - 1)), vocab_size)


def spread_ids(count: int, vocab_size: int, first: int = 13) -> tuple[int, ...]:
    """Token ids all over the vocabulary. Two prompts with different first ids share no prefix."""
    return tuple((i * 7919 + first) % vocab_size for i in range(count))


class EngineDied(Exception):
    """The engine is gone with all its requests; the replica is not ready until `start` succeeds again."""


class StreamLost(Exception):
    """The engine gives up one request, and continues the others. Another engine may continue it."""


class StagingFailed(Exception):
    """The staged files could not become a model; what serves is unchanged."""


class WeightsRefused(StagingFailed):
    """The weights in the files are at fault: another engine would refuse them, too."""


class TransferRefused(Exception):
    """The engine refuses what a trainer says to it, and is as it was."""


class TransferFailed(Exception):
    """The engine did not do its part in a trainer's group. What its weights are is unknown, until `give_up`."""


@dataclass(frozen=True)
class Tee:
    """Where tensors that an engine takes are written, too.

    places: begin and end of each in the file, by its name. part_bytes: of the parts of the file that may be digested meanwhile.
    """

    path: Path
    places: Mapping[str, tuple[int, int]]
    part_bytes: int


class Teed(NamedTuple):
    """What was found of tensors while they were written. parts: SHA-256 digests (32 bytes) of parts of the file that they
    filled, by where they begin; others may lack. finite: all their numbers were seen to be."""

    parts: Mapping[int, bytes]
    finite: bool


class InPlaceWeights(abc.ABC):
    """An engine whose own ranks take weights from a trainer, into those that serve. One group at a time.

    Always holds: from `hold` on nothing is computed, until a commit has switched to what was written, or `give_up` was called.
    `give_up` kills an engine whose weights are uncertain. Where a method raises TransferFailed, or is cancelled, the caller
    calls it. backend: of vLLM, as in `EngineCard.weight_transfer`.
    """

    backend = ""

    def __init__(self) -> None:
        #: Is called when the ranks are gone, and so is whatever group they were in.
        self.on_end: Callable[[str], None] = lambda reason: None

    @abc.abstractmethod
    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        """Have all ranks join the group. Raises TransferRefused, TransferFailed."""

    @abc.abstractmethod
    def check_ready(self) -> None:
        """Raises TransferFailed if what an update before wrote is not over yet."""

    @abc.abstractmethod
    async def hold(self, within_s: float) -> None:
        """Compute nothing any more. Requests stand still with their KV. Raises TransferFailed."""

    @abc.abstractmethod
    async def write(self, update_info: Any, tee: Tee, within_s: float) -> Teed:
        """Take tensors into the weights. Each of the tee's has been written there on return. Raises TransferFailed."""

    @abc.abstractmethod
    async def finish(self, within_s: float) -> None:
        """All tensors have come. The engine is given up unless a commit switches to them in about `within_s`. Raises
        TransferFailed."""

    @abc.abstractmethod
    def written(self, file: Path) -> None:
        """This file has what was written. A commit of a directory that has it loads nothing."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """The update is over, and is not to serve. Returns at once. Nothing to do if it serves already."""

    @abc.abstractmethod
    def give_up_unfinished(self, reason: str) -> None:
        """As `give_up`, unless all tensors have come."""

    @abc.abstractmethod
    def give_up_written(self, reason: str) -> None:
        """As `give_up`, if all tensors have come and nothing has switched to them."""

    @abc.abstractmethod
    async def leave(self, within_s: float) -> None:
        """Close the connections to the trainer, if the ranks are in no call. Never raises."""


class Slot(abc.ABC):
    """What one policy serves, and what is to take its place. Every engine is the slot of its deployment's own policy.

    proves_staged: `stage` scores the canary with the staged weights, and raises StagingFailed when a log-probability is not
    finite. Of a slot that cannot do this, newcomers wait after a switch until the check has passed.
    """

    proves_staged = False

    @property
    def awaits_commit(self) -> bool:
        """Nothing is computed before the next commit, so no request inside ends by itself."""
        return False

    @abc.abstractmethod
    async def stage(self, snapshot: str, directory: Path) -> None:
        """Prepare the verified files of `directory` beside the serving weights; steps continue meanwhile.

        One snapshot of a slot is staged at a time: a second stage replaces the first. The files are a checkpoint's or, with
        the feature `policies`, a LoRA adapter's of the base weights. Raises StagingFailed, EngineDied.
        """

    def stage_ahead(self, snapshot: str, directory: Path) -> None:  # noqa: B027 - optional to override
        """Begin to read files in `directory` that are not proved yet, where all but the tensors is there. Returns at once.

        A tensor is read once `tensors_made` has named it, and nothing is computed before `stage` has named the proved files. If
        those are others, what was read is thrown away. `drop_staged` ends it.
        """

    def tensors_made(self, tensors: Sequence[str]) -> None:  # noqa: B027 - optional to override
        """These tensors of the files of `stage_ahead` may be read. Returns at once."""

    def drop_staged(self) -> None:  # noqa: B027 - optional to override
        """Free what is staged or being staged, if anything is: it will not be committed. Returns at once."""

    def unfit(self, snapshot: str) -> None:  # noqa: B027 - optional to override
        """A snapshot that was to be committed failed before its commit, in any way but that a newer one came."""

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
        names that had other weights so far: those get the label from the commit on. Events say so to running
        requests (GenerationEvent.renamed).
        """

    def retain(self, snapshots: Collection[str]) -> None:  # noqa: B027 - optional to override
        """Besides what serves, keep these of the snapshots that serve or have served (feature `resident_snapshots`).

        The others are freed once no request runs under them. Returns at once.
        """

    def abandon_kv(self) -> None:  # noqa: B027 - optional to override
        """No new request of this policy finds what is cached now. Where that is known, it makes room. Returns at once."""

    async def until_computing(self) -> None:  # noqa: B027 - optional to override
        """Return when urgent requests are computed: at once, or after a pause without the feature `frozen_check`."""

    def settle(self, snapshot: str, *, sound: bool) -> None:  # noqa: B027 - optional to override
        """Tell the engine how the check of a committed snapshot ended. Returns at once.

        An engine that cannot be checked before its switch holds back what was sampled since. When the check fails, the
        requests that wait for it end with StreamLost.
        """

    async def weights_digest(self) -> str | None:
        """Digest of the serving weights, as the engine holds them; None if this engine cannot compute one.

        Equal for equal weights in engines of equal settings. Steps continue meanwhile. Not during commit. Raises EngineDied;
        StagingFailed when the weights cannot be read, or others come meanwhile.
        """
        return None


class Engine(Slot):
    """in_place: None for an engine that takes no weights from a trainer by itself."""

    in_place: InPlaceWeights | None = None
    #: Of an engine that runs. None: its KV stays where it is (feature `kv_travel`).
    kv: KvCopies | None = None

    @abc.abstractmethod
    async def start(self) -> ModelInfo:
        """Load the base weights and be ready to generate. Safe to call again after EngineDied."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the engine and free what it holds. Idempotent; `start` may follow.

        Running requests, and stage or commit under way, raise EngineDied.
        """

    @abc.abstractmethod
    def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        """Events of all n choices, interleaved, in order within a choice; ends after the last choice's `finish`.

        Safe at any time, also during stage and commit. Closing the iterator (aclose, cancellation) aborts the request:
        the engine stops within one step and its KV blocks are free again. Raises EngineDied, StreamLost.

        at_once: for a consumer that need not be woken for each event. While the iterator is waited for, the engine may offer
        it an event first, unless that ends a choice or the request. An event that it takes does not come out of the
        iterator. The order of events stays the same. The iterator raises what `at_once` raises.
        """

    def refuses(self, request: GenerateRequest) -> str | None:
        """Why the engine cannot serve this request although its card does not exclude it; None if it can.

        The text is for the user and begins with the name of the field: `temperature: ...`. The replica asks this before the
        request waits for anything.
        """
        return None

    def end_choice(self, request_id: str, index: int) -> None:
        """Stop one choice of a running request: no further event of it comes, and its KV is free within a step.

        The iterator of `generate` continues with the other choices and ends when none is left. Unknown ids are ignored.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a choice of a running request, or every one, with what it has: its last event has the finish `abort`.

        Unknown ids are ignored.
        """

    def end_session(self, session: str) -> None:
        """A session (GenerateRequest.session) is over: its KV is the first to go (feature `session_kv`). Returns at once."""

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
