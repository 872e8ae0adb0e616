"""A client that gives up on a long sample and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sdk_common import answer, arguments, close, made, prompt_of, service
from tinker import types

given = arguments()
client = service(given)
http = httpx.AsyncClient(timeout=60)
sampler = made(client.create_sampling_client(base_model=given.base_model))


async def metric(name: str) -> float:
    """Summed over replicas, once all of them are shown."""
    values: list[float] = []
    while len(values) < given.replicas:
        answered = await http.get(f"{given.url}/metrics", headers={"x-api-key": given.api_key})
        shown = f"midstream_replica_{name}{{"
        lines = [line for line in answered.text.splitlines() if line.startswith(shown)]
        values = [float(line.rpartition(" ")[2]) for line in lines]
    return sum(values)


def sample(max_tokens: int) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[])
    return sampler.sample_async(prompt_of(given.prompt), 1, params)


async def given_up() -> float:
    """How many tokens are made of a long sample that is given up once it is seen to be worked on."""
    while await metric("kv_blocks_used") > 0:
        # Of others.
        pass
    before = await metric("generated_tokens_total")
    long = asyncio.create_task(sample(given.max_tokens))
    while not long.done() and await metric("kv_blocks_used") == 0:
        pass
    long.cancel()
    while await metric("kv_blocks_used") > 0:
        pass
    generated = await metric("generated_tokens_total") - before
    return generated if long.cancelled() else given.max_tokens


async def main() -> dict[str, Any]:
    # It may be over before that is seen; seen too: the SDK told nobody that it gave up.
    for _ in range(6):
        if (generated := await given_up()) < given.max_tokens:
            break
    response = await sample(4)
    return {"generated": generated, "tokens": list(response.sequences[0].tokens)}


result = asyncio.run(main())
close(client)
answer(result)
