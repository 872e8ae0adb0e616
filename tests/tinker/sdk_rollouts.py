"""Many samples at once, and rollouts of several turns, each turn through SamplingClient.sample."""

from __future__ import annotations

import asyncio
from typing import Any

from sdk_common import answer, arguments, close, made, prompt_of, service
from tinker import types

given = arguments()
client = service(given)
sampler = made(client.create_sampling_client(base_model=given.base_model))


async def sample(tokens: list[int], max_tokens: int) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0)
    return await sampler.sample_async(prompt_of(tokens), 1, params)


async def at_once() -> list[list[int]]:
    prompts = [given.prompts[i % len(given.prompts)] for i in range(given.count)]
    responses = await asyncio.gather(*(sample(prompt, 4) for prompt in prompts))
    return [list(response.sequences[0].tokens) for response in responses]


async def rollout(first: list[int]) -> list[dict[str, Any]]:
    """Each turn's prompt is all there was before and a few tokens more."""
    tokens, turns = list(first), []
    for turn in range(given.turns):
        response = await sample(tokens, 16)
        turns.append({"prompt": len(tokens), "cached": response.prompt_cache_hit_tokens})
        tokens += [*response.sequences[0].tokens, *range(turn, turn + 5)]
    return turns


async def main() -> dict[str, Any]:
    return {
        "tokens": await at_once(),
        "rollouts": await asyncio.gather(*(rollout(first) for first in given.trajectories)),
    }


result = asyncio.run(main())
close(client)
answer(result)
