"""A client that trains, saves, loads and samples what it trained; every number it saw is its answer."""

from __future__ import annotations

from typing import Any

import httpx
from sdk_common import answer, arguments, close, made, prompt_of, refusal, service
from tinker import types

given = arguments()
client = service(given)
tokens = given.prompt + given.target
# The first position whose next token is the target's.
learned = len(given.prompt) - 1
result: dict[str, Any] = {}


def datum(**inputs: list[Any]) -> types.Datum:
    return types.Datum(
        model_input=prompt_of(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def padded(value: float) -> list[float]:
    return [0.0] * learned + [value] * len(given.target)


def supervised() -> list[types.Datum]:
    return [datum(weights=padded(1.0))]


def logprobs(training: Any) -> list[float]:
    """Of tokens[1:]."""
    output = training.forward(supervised(), "cross_entropy").result()
    return [float(x) for x in output.loss_fn_outputs[0]["logprobs"].tolist()]


def adam(rate: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)


def train(training: Any, steps: int) -> list[float]:
    """The losses; all calls are under way together, as the SDK recommends."""
    calls = [
        (training.forward_backward(supervised(), "cross_entropy"), training.optim_step(adam(given.rate)))
        for _ in range(steps)
    ]
    losses = []
    for backward, step in calls:
        losses.append(backward.result().metrics["loss:sum"])
        result["optim_metrics"] = step.result().metrics
    return losses


def reinforce(training: Any, loss_fn: str) -> dict[str, Any]:
    """One step on the target with advantage 1: the loss, and how much likelier it got."""
    before = logprobs(training)
    # The cookbook pads with zeros, which dro takes for log-probabilities of the prompt.
    behaviour = before if loss_fn == "dro" else [0.0] * learned + before[learned:]
    data = [datum(logprobs=behaviour, advantages=padded(1.0))]
    backward = training.forward_backward(data, loss_fn)
    step = training.optim_step(adam(given.small_rate))
    loss = backward.result().metrics["loss:sum"]
    step.result()
    return {"loss": loss, "gain": sum(logprobs(training)[learned:]) - sum(before[learned:])}


def greedy(sampler: Any) -> list[int]:
    params = types.SamplingParams(max_tokens=len(given.target), temperature=0, stop=[])
    return list(sampler.sample(prompt_of(given.prompt), 1, params).result().sequences[0].tokens)


def scores(sampler: Any) -> list[float]:
    """Of tokens[1:], by the replicas."""
    return [float(x) for x in sampler.compute_logprobs(prompt_of(tokens)).result()[1:]]


def labels(sampler: Any) -> list[str]:
    """The snapshots that made the tokens of a sample, from the server's own extension."""
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 10**6,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": given.prompt}]},
        "sampling_params": {"max_tokens": 3, "stop": []},
    }
    with httpx.Client(base_url=given.url, headers={"x-api-key": given.api_key}, timeout=60) as http:
        request_id = http.post("/api/v1/asample", json=body).raise_for_status().json()["request_id"]
        http.post("/api/v1/retrieve_future", json={"request_id": request_id}).raise_for_status()
        told = http.get(f"/api/v1/midstream/requests/{request_id}").raise_for_status().json()
    return [span["snapshot"] for sequence in told["sequences"] for span in sequence["snapshots"]]


training = made(client.create_lora_training_client(base_model=given.base_model, rank=given.rank, seed=1))
result["model_name"] = training.get_info().model_data.model_name
result["reinforced"] = {loss_fn: reinforce(training, loss_fn) for loss_fn in given.losses}
result["before"] = logprobs(training)
result["losses"] = train(training, given.steps)
result["trained"] = logprobs(training)
state = training.save_state("half-way").result().path

first = made(training.save_weights_and_get_sampling_client())
result["labels"] = labels(first)
result["greedy"] = greedy(first)
result["served"] = scores(first)

train(training, 1)
result["changed"] = logprobs(training)
second = made(training.save_weights_and_get_sampling_client())
result["served_changed"] = scores(second)
named = training.save_weights_for_sampler("final").result().path

training.load_state(state).result()
result["loaded"] = logprobs(training)
result["unknown_loss"] = refusal(lambda: training.forward_backward(supervised(), "nonsense").result())
result["unknown_state"] = refusal(lambda: training.load_state(state + "-not").result())
result["after_errors"] = logprobs(training)

restored = made(client.create_training_client_from_state(state))
result["restored"] = logprobs(restored)
result["restored_losses"] = train(restored, 2)
third = made(restored.save_weights_and_get_sampling_client())
result["restored_labels"] = labels(third)

saved = made(client.create_sampling_client(model_path=named))
result["saved_scores"] = scores(saved)
result["saved_labels"] = labels(saved)
result["superseded"] = refusal(lambda: greedy(third))
result.update(state=state, named=named)
close(client)
answer(result)
