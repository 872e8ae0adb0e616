"""Samples rollouts of two turns through the OpenAI SDK, and keeps every token with the server's label.

Owns: the requests of one rollout, and reading their streams. It uses public HTTP alone, and imports nothing of the server.

Always holds:
- Turn 1 is a chat request, turn 2 a completion on token ids. The prompt of turn 2 is the prompt ids of turn 1, its sampled
  ids and the rendered follow-up. So no answer is tokenised again.
- A stream that ended early, lost records or disagrees with its own usage is a failed request, never a short turn.
- Failed requests are counted, and never retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai

from midstream.client import routes_of, snapshot_of
from midstream.demo.records import Problem, Rollout, Turn, request_seed

SESSION_HEADER = "x-multi-turn-session-id"
REPLICA_HEADER = "x-midstream-replica"


class BadStream(Exception):
    """A response is incomplete or contradicts itself. The message says how."""


@dataclass
class StreamReader:
    """Collects one stream's token records. `turn` checks that they are complete, and raises BadStream if not.

    Echoed prompt tokens come in chunks whose `token_ids` is empty. A chunk names the snapshot of its generated tokens.
    """

    top_k: int
    prompt: tuple[int, ...] | None = None
    echoed: list[Mapping[str, Any]] = field(default_factory=list)
    generated: list[Mapping[str, Any]] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: Any = None

    def read(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish
            prompt = getattr(choice, "prompt_token_ids", None)
            self.prompt = tuple(prompt) if prompt else self.prompt
            if choice.logprobs is None:
                continue
            entries = [_as_mapping(entry) for entry in choice.logprobs.content]
            if not choice.token_ids:
                self.echoed.extend(entries)
                continue
            if [entry["token_id"] for entry in entries] != choice.token_ids:
                raise BadStream("a chunk's token ids and logprobs name different tokens")
            self.generated.extend(entries)
            snapshot = snapshot_of(chunk.model)
            if snapshot is None:
                raise BadStream(f"a chunk names no snapshot: {chunk.model!r}")
            self.snapshots.extend([snapshot] * len(entries))

    def turn(self, replica: str | None, reward: Callable[[Sequence[int]], float]) -> Turn:
        if self.finish not in ("stop", "length"):
            raise BadStream(f"the stream ended without a finish reason (got {self.finish!r})")
        if self.usage is None or replica is None or self.prompt is None:
            raise BadStream("the response lacks usage, prompt token ids, or the replica header")
        if [entry["token_id"] for entry in self.echoed] != list(self.prompt):
            raise BadStream(f"{len(self.echoed)} echoed tokens are not the {len(self.prompt)} of the prompt")
        if self.usage.completion_tokens != len(self.generated) or not self.generated:
            raise BadStream(f"usage counts {self.usage.completion_tokens} tokens, {len(self.generated)} came")
        details = self.usage.prompt_tokens_details
        tokens = tuple(entry["token_id"] for entry in self.generated)
        return Turn(
            prompt=self.prompt,
            tokens=tokens,
            logprobs=tuple(entry["logprob"] for entry in self.generated),
            sampling_logprobs=tuple(entry["sampling_logprob"] for entry in self.generated),
            snapshots=tuple(self.snapshots),
            routes=routes_of(self.generated, top_k=self.top_k).astype(np.int64),
            prompt_routes=routes_of(self.echoed, top_k=self.top_k).astype(np.int64),
            replica=replica,
            cached_tokens=(details.cached_tokens if details else 0) or 0,
            reward=reward(tokens),
        )


def _as_mapping(entry: Any) -> Mapping[str, Any]:
    """A logprobs entry. The SDK gives a model for chat, and the raw dict for a completion."""
    return entry if isinstance(entry, dict) else {**entry.__dict__, **(entry.model_extra or {})}


@dataclass(frozen=True)
class SamplerOptions:
    model: str
    seed: int
    tokens_per_turn: int
    top_k: int
    temperature: float = 1.0


class Sampler:
    """Runs rollouts. failed: the number of those with a failed request. errors: the reasons."""

    def __init__(
        self, client: openai.AsyncOpenAI, options: SamplerOptions, tokenize: Callable[[str], list[int]]
    ) -> None:
        self._client = client
        self._options = options
        self._tokenize = tokenize
        self.failed = 0
        self.errors: list[str] = []

    async def group(self, step: int, group: int, problem: Problem, samples: int) -> list[Rollout]:
        """Sample one problem `samples` times in parallel. Leaves out rollouts with a failed request."""
        rollouts = await asyncio.gather(*(self._rollout(step, group, i, problem) for i in range(samples)))
        return [rollout for rollout in rollouts if rollout is not None]

    async def _rollout(self, step: int, group: int, sample: int, problem: Problem) -> Rollout | None:
        session = f"rollout-{self._options.seed}-{step}-{group}-{sample}"
        seeds = [request_seed(self._options.seed, step, group, sample, turn) for turn in (1, 2)]
        try:
            first = await self._first_turn(session, problem, seeds[0])
            ended = first.tokens[-1] == self._tokenize("<|im_end|>")[0]
            follow_up = self._tokenize(problem.follow_up_text(ended))
            second = await self._second_turn(session, problem, [*first.sequence, *follow_up], seeds[1])
        except (openai.OpenAIError, BadStream, ValueError) as error:
            self.failed += 1
            self.errors.append(f"{session}: {type(error).__name__}: {error}")
            return None
        return Rollout(session, step, group, sample, (first, second))

    async def _first_turn(self, session: str, problem: Problem, seed: int) -> Turn:
        messages: Any = problem.first_messages()
        response = await self._client.chat.completions.with_raw_response.create(
            messages=messages, stream=True, logprobs=True, **self._arguments(session, seed)
        )
        return await self._read(response, problem)

    async def _second_turn(self, session: str, problem: Problem, prompt: list[int], seed: int) -> Turn:
        arguments = self._arguments(session, seed)
        # True asks for token records. The SDK declares this field as a count.
        arguments["extra_body"]["logprobs"] = True
        response = await self._client.completions.with_raw_response.create(
            prompt=prompt, stream=True, **arguments
        )
        turn = await self._read(response, problem)
        if turn.prompt != tuple(prompt):
            raise BadStream("the server continued another prompt than the one sent")
        return turn

    def _arguments(self, session: str, seed: int) -> dict[str, Any]:
        return {
            "model": self._options.model,
            "max_tokens": self._options.tokens_per_turn,
            "temperature": self._options.temperature,
            "seed": seed,
            "stream_options": {"include_usage": True},
            "extra_headers": {SESSION_HEADER: session},
            "extra_body": {"include_routing_matrix": True, "return_token_ids": True, "echo": True},
        }

    async def _read(self, response: Any, problem: Problem) -> Turn:
        reader = StreamReader(self._options.top_k)
        async for chunk in response.parse():
            reader.read(chunk)
        budget = self._options.tokens_per_turn
        return reader.turn(
            response.headers.get(REPLICA_HEADER), lambda tokens: problem.reward(tokens, budget)
        )
