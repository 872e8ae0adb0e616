"""Run by the Python of .venv-harness: generates with the real renderers client, and prints its results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers.client import _resolve_max_prompt_len, generate
from renderers.default import DefaultRenderer
from transformers import AutoTokenizer


async def main(url: str, model: str, directory: str, asked: list[dict]) -> None:
    renderer = DefaultRenderer(AutoTokenizer.from_pretrained(directory))
    client = AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    answers = []
    for sampling in asked:
        said = await generate(
            client=client,
            renderer=renderer,
            messages=[{"role": "user", "content": "hi there"}],
            model=model,
            sampling_params=sampling,
            cache_salt="salt",
            extra_headers={"X-Session-ID": "renderers"},
        )
        routes = said["routed_experts"]
        if routes is not None:
            routes = {**routes, "data": bytes(routes["data"]).decode()}
        names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "sampling_mask")
        answers.append({name: said[name] for name in names} | {"routed_experts": routes})
    print(json.dumps({"max_prompt_len": await _resolve_max_prompt_len(client, model), "answers": answers}))


asyncio.run(main(*sys.argv[1:4], json.loads(sys.argv[4])))
