"""A client that samples in every way, scores prompts, makes mistakes and closes."""

from __future__ import annotations

from typing import Any

from sdk_common import answer, arguments, as_json, close, made, prompt_of, refusal, service
from tinker import types

given = arguments()
client = service(given)
sampler = made(client.create_sampling_client(base_model=given.base_model))
prompt = prompt_of(given.prompt)
context = client.get_server_capabilities().supported_models[0].max_context_length
full = prompt_of(given.prompt[:1] * context)


def sample(num_samples: int = 1, *, options: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    settings = types.SamplingParams(**{"max_tokens": 8, **params})
    return as_json(sampler.sample(prompt, num_samples, settings, **(options or {})).result())


result: dict[str, Any] = {
    "models": [m.model_name for m in client.get_server_capabilities().supported_models],
    "seeded": sample(2, seed=3, temperature=0.7, top_k=20, top_p=0.9),
    "seeded_again": sample(2, seed=3, temperature=0.7, top_k=20, top_p=0.9),
    "greedy": sample(2, temperature=0),
    "stop_string": sample(seed=given.seed, max_tokens=given.max_tokens, stop=given.stop_string),
    "stop_token": sample(seed=given.seed, max_tokens=given.max_tokens, stop=[given.stop_token]),
    "never_stops": sample(seed=given.seed, max_tokens=given.max_tokens, stop=[]),
    "scored": sample(options={"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}),
    "logprobs": sampler.compute_logprobs(prompt).result(),
    "logprobs_of_full": sampler.compute_logprobs(full).result(),
    "base_model": sampler.get_base_model(),
    "too_long": refusal(lambda: sample(max_tokens=10**6)),
    "too_hot": refusal(lambda: sample(temperature=7.0)),
    "unknown_model": refusal(lambda: made(client.create_sampling_client(base_model="no/such-model"))),
    "after_errors": sample(temperature=0),
}
close(client)
answer(result)
