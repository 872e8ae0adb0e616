"""A client that gives up on a long sample and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sdk_common import answer, arguments, close, made, prompt_of, service
from tinker import types

given = arguments()
client = service(given)
http = httpx.AsyncClient()
sampler = made(client.create_sampling_client(base_model=given.base_model))


async def gauge(name: str) -> float:
    """A metric summed over replicas."""
    lines = (await http.get(f"{given.url}/metrics", headers={"x-api-key": given.api_key})).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def sample(max_tokens: int) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[])
    return sampler.sample_async(prompt_of(given.prompt), 1, params)


async def main() -> dict[str, Any]:
    long = asyncio.create_task(sample(given.max_tokens))
    while await gauge("midstream_replica_kv_blocks_used") == 0:
        pass
    long.cancel()
    while await gauge("midstream_replica_kv_blocks_used") > 0:
        pass
    response = await sample(4)
    return {"cancelled": long.cancelled(), "tokens": list(response.sequences[0].tokens)}


result = asyncio.run(main())
close(client)
answer(result)
