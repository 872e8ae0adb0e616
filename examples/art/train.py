"""ART's PipelineTrainer and TinkerNativeBackend, unchanged, on midstream's Tinker API: the server trains. Write digits.

midstream serve
python examples/art/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12
"""

import asyncio
import itertools
import os
import sys
import tempfile

# litellm, which ART imports, would fetch a table of prices.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TINKER_API_KEY": "tml-local"}
os.environ["TINKER_BASE_URL"] = sys.argv[1]

import art
from art.pipeline_trainer import PipelineTrainer
from art.tinker_native import TinkerNativeBackend

STEPS, TOKENS, PROMPTS = int(sys.argv[4]), 16, [f"Write digits, {number}: " for number in range(8)]
LORA = {"tinker_native_args": {"renderer_name": "role_colon", "training_client_args": {"rank": 32}}}
BATCH = {"min_batch_size": 8, "max_batch_size": 8, "max_steps": STEPS, "learning_rate": 3e-3}
# What waits and what is being sampled make one batch.
AHEAD = {"num_rollout_workers": 4, "queue_maxsize": 4, "max_steps_off_policy": 2}


async def rollout(model: art.TrainableModel, prompt: str, _: None) -> art.TrajectoryGroup:
    asked = {"model": model.get_inference_name(), "messages": [{"role": "user", "content": prompt}]}
    answer = await model.openai_client().chat.completions.create(n=8, max_tokens=TOKENS, **asked)
    # The label is MODEL@STEP; the server samples from exactly the adapter that was saved after this step.
    known, group = {"initial_policy_version": int(answer.model.rpartition("@")[2])}, []
    for choice in answer.choices:
        known["reward"] = sum(map("0123456789".count, choice.message.content or "")) / TOKENS
        group.append(art.Trajectory(messages_and_choices=[*asked["messages"], choice], **known))
    return art.TrajectoryGroup(group)


class Backend(TinkerNativeBackend):
    async def train(self, model, trajectory_groups, **how):
        every, step = [one for group in trajectory_groups for one in group], await model.get_step()
        behind = sum(step - one.initial_policy_version for one in every) / len(every)
        reward = sum(one.reward for one in every) / len(every)
        print(f"step {step + 1}: reward {reward:.3f}, {behind:.2f} snapshots behind", flush=True)
        return await super().train(model, trajectory_groups, **how)


async def main(base: str, logs: str) -> None:
    # The server knows its model by its directory, too, where the tokenizer is read. A new name takes up no earlier run.
    named = {"name": os.path.basename(logs), "project": "digits", "base_model": base}
    model, backend = art.TrainableModel(_internal_config=LORA, **named), Backend(path=logs)
    await model.register(backend, _openai_client_config={"server_args": {"host": "127.0.0.1"}})
    # They end, since the trainer samples another one for each that failed.
    prompts = itertools.islice(itertools.cycle(PROMPTS), 4 * 8 * STEPS)
    await PipelineTrainer(model, backend, rollout, prompts, None, **BATCH, **AHEAD).train()
    await backend.close()


with tempfile.TemporaryDirectory(prefix="art-") as logs:
    asyncio.run(main(os.path.abspath(sys.argv[3]), logs))
