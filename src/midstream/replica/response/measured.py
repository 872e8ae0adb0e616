"""What a generation was like: its usage, its metrics, and the snapshots that its tokens were labelled with.

Always holds: the final metrics are made once, so that a stream's last chunk and its headers say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from midstream.core.types import GenerationEvent
from midstream.replica.gate import Gate
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.answer import TokenCounts
from midstream.replica.response.choice import Choice
from midstream.replica.sessions import TurnStats


def _ignored(tokens: int) -> None:
    pass


class Timings(msgspec.Struct):
    started: float
    #: The gate let the request in.
    admitted: float = 0.0
    first_token: float | None = None
    #: In the engine, of the choice that waited longest.
    queued_s: float | None = None
    #: Headers of a response that waited for room in the KV cache.
    waited: Mapping[str, str] = {}
    #: Is called with the reused tokens of each prompt, once.
    on_cached: Callable[[int], None] = _ignored


class Measured:
    """snapshot: the newest one that any token was labelled with."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        gate: Gate,
        checked: Checked,
        prompts: Sequence[Prompt],
        timings: Timings,
        snapshot: str,
    ) -> None:
        self._monotonic = monotonic
        self._gate = gate
        self._stops = bool(checked.stops)
        self._prompt_tokens = [len(prompt.token_ids) for prompt in prompts]
        self.timings = timings
        #: Maps a prompt index to the number of reused tokens.
        self.cached: dict[int, int] = {}
        self.snapshot = snapshot
        #: The snapshots that tokens were labelled with, in their order, and when each first was.
        self.labels: dict[str, float] = {}
        #: The tokens of each choice that were generated elsewhere.
        self.tokens_before: Sequence[int] = ()
        #: What the request was like, from its end on.
        self.turn = TurnStats()
        self._final: dict[str, Any] | None = None

    @property
    def took_s(self) -> float:
        return self._monotonic() - self.timings.started

    def take(self, prompt: int, event: GenerationEvent) -> None:
        """Notes what the event reports of the prompt's KV and of its waiting."""
        if event.cached_tokens is not None and prompt not in self.cached:
            self.cached[prompt] = event.cached_tokens
            self.timings.on_cached(event.cached_tokens)
        if event.queued_s is not None:
            self.timings.queued_s = max(event.queued_s, self.timings.queued_s or 0.0)

    def first_token(self) -> None:
        """A token came that the client gets."""
        if self.timings.first_token is None:
            self.timings.first_token = self._monotonic()

    def label(self, before: str | None, snapshot: str) -> None:
        """A token of `snapshot` followed one of `before` in its choice. Events of several prompts overtake each other, so
        the token that came last is not always of the newest snapshot: one is newer when no token had it so far, or when
        a choice went on to it from the newest."""
        if snapshot not in self.labels or before == self.snapshot:
            self.labels.setdefault(snapshot, self._monotonic())
            self.snapshot = snapshot

    def fill_in(self, turn: TurnStats, choices: Sequence[Choice]) -> None:
        """The turn, at the request's end."""
        self.turn = turn
        tokens_before = self.tokens_before or [0] * len(choices)
        made = [choice.generated - before for choice, before in zip(choices, tokens_before, strict=True)]
        turn.prompt_tokens, turn.generated_tokens = sum(self._prompt_tokens), sum(made)
        turn.cached_tokens = sum(self.cached.values())
        turn.longest = max(made)
        turn.finishes = tuple([choice.finish or "abort" for choice in choices])
        first, now = self.timings.first_token, self._monotonic()
        turn.request_s, turn.queued_s = now - self.timings.started, self.timings.queued_s
        turn.admitted_s = max(0.0, self.timings.admitted - self.timings.started)
        if first is not None:
            turn.first_token_s = first - self.timings.started
            turn.generation_s = now - first

    def counts(self, choices: Sequence[Choice], *, aborted: bool) -> TokenCounts:
        """aborted: a choice was ended by its trainer."""
        completion = sum(choice.generated for choice in choices)
        return TokenCounts(sum(self._prompt_tokens), completion, self._cached(aborted))

    def _cached(self, aborted: bool) -> int | None:
        """None when a stop string ended the request before the engine reported how much was cached."""
        if len(self.cached) < len(self._prompt_tokens) and (self._stops or aborted):
            return None
        return sum(self.cached.values())

    def metrics(self, *, done: bool, aborted: bool) -> dict[str, Any]:
        if self._final is not None:
            return self._final
        started, first_token = self.timings.started, self.timings.first_token
        metrics: dict[str, Any] = {"prompt-tokens": sum(self._prompt_tokens)}
        known = done or len(self.cached) == len(self._prompt_tokens)
        if known and (cached := self._cached(aborted)) is not None:
            metrics["cached-prompt-tokens"] = cached
        metrics["num-concurrent-requests"] = self._gate.inside
        if self.timings.queued_s is not None:
            metrics["prefill-queue-duration"] = round(self.timings.queued_s, 6)
        if first_token is not None:
            metrics["server-time-to-first-token"] = round(first_token - started, 6)
        if done:
            metrics["server-processing-time"] = round(self._monotonic() - started, 6)
            self._final = metrics
        return metrics
