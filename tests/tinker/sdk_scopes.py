"""A client whose key may sample and not train: what works, and how often it asks for what does not."""

from __future__ import annotations

from typing import Any

import httpx
from sdk_common import answer, arguments, as_json, close, made, prompt_of, refusal, service
from tinker import types

given = arguments()
asked: list[str] = []
send = httpx.AsyncClient.send


async def counted(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
    asked.append(request.url.path.rpartition("/")[2])
    return await send(self, request, **options)


httpx.AsyncClient.send = counted  # type: ignore[method-assign]
client = service(given)
sampler = made(client.create_sampling_client(base_model=given.base_model))
sampled = sampler.sample(prompt_of(given.prompt), 1, types.SamplingParams(max_tokens=4)).result()
refused = refusal(lambda: made(client.create_lora_training_client(base_model=given.base_model, rank=8)))
result = {"sampled": as_json(sampled), "refused": refused, "asked": asked.count("create_model")}
close(client)
answer(result)
