"""Two runs that train, save and sample in turns: every path they saved, and the base model, sampled at the same time."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from sdk_common import answer, arguments, close, made, prompt_of, service
from tinker import types

given = arguments()
client = service(given)
rollouts = service(type(given)(**{**vars(given), "api_key": given.sampling_key}))
tokens, learned = given.prompt + given.target, len(given.prompt) - 1
result: dict[str, Any] = {"trained": {}, "served": {}, "again": {}, "sampled": {}, "labels": {}, "paths": {}}


def datum(weight: float) -> types.Datum:
    weights = [0.0] * learned + [weight] * len(given.target)
    return types.Datum(
        model_input=prompt_of(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def logprobs(training: Any) -> list[float]:
    """Of tokens[1:], by the trainer."""
    output = training.forward([datum(1.0)], "cross_entropy").result()
    return [float(x) for x in output.loss_fn_outputs[0]["logprobs"].tolist()]


def step(training: Any, weight: float) -> None:
    """weight: -1 unlearns what 1 learns."""
    training.forward_backward([datum(weight)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=given.rate)).result()


def save(training: Any, name: str) -> None:
    result["trained"][name] = logprobs(training)
    result["paths"][name] = training.save_weights_for_sampler(name).result().path


def scores(sampler: Any) -> list[float]:
    return [float(x) for x in sampler.compute_logprobs(prompt_of(tokens)).result()[1:]]


def sampled(sampler: Any) -> dict[str, list[float]]:
    """What it sampled, and how it scores that as a prompt."""
    params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
    made_of = sampler.sample(prompt_of(given.prompt), 1, params).result().sequences[0]
    whole = [*given.prompt, *made_of.tokens]
    scored = sampler.compute_logprobs(prompt_of(whole)).result()[len(given.prompt) :]
    return {"sampled": list(made_of.logprobs), "scored": [float(x) for x in scored]}


def labels(sampler: Any, key: str) -> list[str]:
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 10**6,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": given.prompt}]},
        "sampling_params": {"max_tokens": 3, "stop": []},
    }
    with httpx.Client(base_url=given.url, headers={"x-api-key": key}, timeout=120) as http:
        request_id = http.post("/api/v1/asample", json=body).raise_for_status().json()["request_id"]
        http.post("/api/v1/retrieve_future", json={"request_id": request_id}).raise_for_status()
        told = http.get(f"/api/v1/midstream/requests/{request_id}").raise_for_status().json()
    return [span["snapshot"] for sequence in told["sequences"] for span in sequence["snapshots"]]


def each(act: Any, clients: dict[str, Any]) -> dict[str, Any]:
    """Of all at the same time."""
    with ThreadPoolExecutor(len(clients)) as pool:
        running = {name: pool.submit(act, one) for name, one in clients.items()}
        return {name: one.result() for name, one in running.items()}


one = made(client.create_lora_training_client(base_model=given.base_model, rank=8, seed=1))
other = made(client.create_lora_training_client(base_model=given.base_model, rank=4, seed=2))
samplers = {"base": made(client.create_sampling_client(base_model=given.base_model))}
# A fresh adapter adds nothing.
result["trained"]["base"] = logprobs(one)
for turn in range(given.turns):
    step(one, 1.0)
    step(other, -1.0)
    save(one, f"one-{turn}")
    save(other, f"other-{turn}")
result["trained"]["unnamed"] = logprobs(one)
samplers["unnamed"] = made(one.save_weights_and_get_sampling_client())
step(one, 1.0)
result["trained"]["newer"] = logprobs(one)
samplers["newer"] = made(one.save_weights_and_get_sampling_client())
for name, path in result["paths"].items():
    samplers[name] = made(client.create_sampling_client(model_path=path))
result["served"] = each(scores, samplers)
result["sampled"] = each(sampled, samplers)
os.kill(given.victim, signal.SIGKILL)
result["again"] = each(scores, samplers)
result["labels"] = each(lambda sampler: labels(sampler, given.api_key), samplers)
# Training has not noticed.
step(one, 1.0)
save(one, "last")
seen = {
    name: made(rollouts.create_sampling_client(model_path=result["paths"][name]))
    for name in ("last", "one-0")
}
result["rollouts"] = each(scores, seen)
close(client)
answer(result)
