"""A client against a server whose samples are played: every way in which a sample can end, then what it can ask about."""

from __future__ import annotations

from typing import Any

from sdk_common import answer, arguments, as_json, close, made, prompt_of, refusal, service
from tinker import types

given = arguments()
client = service(given)
sampler = made(client.create_sampling_client(base_model="tiny"))
params = types.SamplingParams(max_tokens=1)


def sample(first_token: int) -> Any:
    return sampler.sample(prompt_of([first_token, 7]), num_samples=2, sampling_params=params).result()


large = sample(4)
result = {
    "held": as_json(sample(1)),
    "failed": refusal(lambda: sample(2)),
    "gone": as_json(sample(3)),
    "large": [len(large.prompt_logprobs), large.prompt_logprobs[0], large.prompt_logprobs[-1]],
    "refused": refusal(lambda: sample(5)),
    "busy": as_json(sample(6)),
}
# 0.24 does not tell the server.
if hasattr(client, "close"):
    abandoned = sampler.sample(prompt_of([7, 7]), num_samples=1, sampling_params=params)
    # Is answered when the one above is being waited for.
    result["polled"] = as_json(sample(8))
    waiting = sampler.sample(prompt_of([9, 7]), num_samples=2, sampling_params=params)
    # Seen once: 0.36 on a busy machine never told of a cancellation.
    for _ in range(6):
        abandoned.cancel()
        try:
            # Is answered when that has arrived.
            result["cancelled"] = as_json(waiting.result(timeout=15))
            break
        except TimeoutError:
            abandoned = sampler.sample(prompt_of([7, 7]), num_samples=1, sampling_params=params)
            # A round trip for the one to be polled.
            sample(10)
training = made(client.create_lora_training_client(base_model="tiny", rank=4))
info = training.get_info()
rest = client.create_rest_client()
run = rest.get_training_run(info.model_id).result()
before = rest.list_checkpoints(info.model_id).result().checkpoints
weights = next(one for one in before if one.checkpoint_type == "training")
about = rest.get_weights_info_by_tinker_path(weights.tinker_path).result()
rest.delete_checkpoint(info.model_id, weights.checkpoint_id).result()
session = rest.get_session(info.model_id.partition(":")[0]).result()
result["rest"] = {
    "capabilities": [model.model_name for model in client.get_server_capabilities().supported_models],
    "info": [info.model_data.model_name, info.model_data.tokenizer_id, info.is_lora, info.lora_rank],
    "run": [run.training_run_id == info.model_id, run.base_model, run.is_lora, run.lora_rank],
    "runs": len(rest.list_training_runs().result().training_runs),
    "checkpoints": [one.checkpoint_id for one in before],
    "weights": [about.base_model, about.is_lora, about.lora_rank],
    "left": [one.checkpoint_id for one in rest.list_user_checkpoints().result().checkpoints],
    "session": [session.training_run_ids == [info.model_id], len(session.sampler_ids)],
    "sessions": len(rest.list_sessions().result().sessions),
    "sampler": rest.get_sampler(session.sampler_ids[0]).result().base_model,
    "unknown": refusal(lambda: rest.get_training_run("nothing").result()),
}
close(client)
answer(result)
