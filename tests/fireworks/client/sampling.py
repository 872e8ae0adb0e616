"""DeploymentSampler: what a rollout worker asks of it, and what it made of the answers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import httpx
from fireworks.training.sdk.sampling import SamplingRequestError
from sdk import answer, arguments, as_json, sampler

given = arguments()
rollout = sampler(given)
PROMPT = list(b"Count: one, two, ")


async def completions(**options: Any) -> list[dict[str, Any]]:
    options = {"max_tokens": 6, "logprobs": True, **options}
    return [as_json(c) for c in await rollout.sample_with_prompt_tokens(PROMPT, **options)]


async def refusal(**options: Any) -> dict[str, Any]:
    """How the sampler reports a request that cannot work."""
    try:
        return {"answer": await completions(**options)}
    except httpx.HTTPStatusError as error:
        return {"status": error.response.status_code, **error.response.json()["error"]}
    except SamplingRequestError as error:
        return {"sampling_error": str(error)}


async def main() -> dict[str, Any]:
    result = await rollout.sample_with_prompt_tokens_result(
        PROMPT,
        max_tokens=6,
        logprobs=True,
        seed=5,
        logical_request_id="rollout-17",
        prompt_cache_key="metrics",
    )
    plain = await completions(seed=5, n=2)
    stop = next(character for character in plain[0]["text"][1:] if character.isascii())
    messages = [{"role": "user", "content": "hi"}]
    done = {
        "attempts": result.attempts,
        "metrics": asdict(result.server_metrics),
        "response_id": result.upstream_response_id,
        "plain": plain,
        "stop": stop,
        "echo": await completions(seed=5, echo=True, include_routing_matrix=True, top_logprobs=3),
        "echo_last": await completions(seed=5, echo=True, echo_last=4, include_routing_matrix=True),
        "routes": await completions(seed=5, include_routing_matrix=True),
        "cold": await completions(seed=5, temperature=0.7, top_p=0.9, top_k=20),
        "stopped": await completions(seed=5, stop=[stop]),
        "chat": [
            as_json(c)
            for c in await rollout.sample_with_tokens(messages, max_tokens=6, logprobs=True, seed=5)
        ],
        "unknown_field": await refusal(no_such_field=1),
        "bad_value": await refusal(temperature=-1.0),
    }
    # As a trainer does that takes routes as files.
    rollout.negotiate_routing_matrix_format("parquet_v1", "a-store")
    done["offered_files"] = await completions(seed=5, include_routing_matrix=True)
    done["agreed"] = rollout.routing_matrix_format
    done["mask_files"] = await refusal(seed=5, sampling_mask="parquet_v1")
    rollout.negotiate_routing_matrix_format("base64_inline", None)
    rollout.drain_metrics()
    await asyncio.gather(*(completions(seed=i) for i in range(16)))
    done["spread"] = [m.backend_host for m in rollout.drain_metrics()]
    await asyncio.gather(*(completions(seed=i, prompt_cache_key="one-session") for i in range(8)))
    done["sticky"] = [m.backend_host for m in rollout.drain_metrics()]
    return done


answer(asyncio.run(main()))
