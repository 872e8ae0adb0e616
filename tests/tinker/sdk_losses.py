"""A client that samples while a process of the server is killed under it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
from sdk_common import answer, arguments, close, made, prompt_of, service
from tinker import types

given = arguments()
client = service(given)
sampler = made(client.create_sampling_client(base_model=given.base_model))


async def sample(number: int) -> list[int]:
    params = types.SamplingParams(max_tokens=given.max_tokens, temperature=0, stop=[])
    response = await sampler.sample_async(prompt_of([*given.prompt, number]), 1, params)
    return list(response.sequences[0].tokens)


async def at_work(http: httpx.AsyncClient) -> bool:
    name = "midstream_replica_kv_blocks_used{"
    lines = (await http.get(f"{given.url}/metrics", headers={"x-api-key": given.api_key})).text.splitlines()
    return any(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def main() -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as http:
        unfinished = 0
        # A slow client may be told of all the ends before it sees the work.
        for _ in range(20):
            while await at_work(http):
                # For others.
                pass
            running = [asyncio.create_task(sample(number)) for number in range(given.count)]
            while not await at_work(http) and not all(task.done() for task in running):
                pass
            if unfinished := sum(not task.done() for task in running):
                break
            await asyncio.gather(*running)
        os.kill(given.victim, signal.SIGKILL)
    return {"unfinished": unfinished, "tokens": await asyncio.gather(*running)}


result = asyncio.run(main())
close(client)
answer(result)
