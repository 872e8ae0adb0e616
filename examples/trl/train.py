"""TRL's GRPOTrainer, unmodified, over live hot loads of a midstream server. Needs TRL 1.16 (README.md).

    midstream serve
    python examples/trl/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12

The task: write digits. TRL weighs what is one snapshot old by its own importance ratios. A fifth argument: `lora` trains an
adapter in a policy of its own; `rollout_func` samples by TRL's hook of that name.
"""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from midstream.integrations.trl import BEHIND, GRPOServer

TOKENS, ROLLOUTS, PROMPTS = 16, 8, 8


def reward(completions: list[str], **_: object) -> list[float]:
    return [sum(character.isdigit() for character in one) / TOKENS for one in completions]


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "reward" in logs:
            told = f"reward {float(logs['reward']):.3f}, {float(logs[BEHIND]):.2f} snapshots behind"
            print(f"step {state.global_step}: {told}", flush=True)


def main(url: str, bucket: str, base: str, steps: int, what: str = "") -> None:
    torch.manual_seed(0)
    lora = what == "lora"
    how = {"policy": "trl"} if lora else {"config_dir": base, "dtype": "bfloat16"}
    with GRPOServer(url, os.path.abspath(bucket), behind=1, **how) as server:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(base),
            reward_funcs=reward,
            rollout_func=server.rollout_func if what == "rollout_func" else None,
            train_dataset=Dataset.from_dict({"prompt": [f"Write digits, {n}: " for n in range(64)]}),
            callbacks=[Printed()],
            peft_config=LoraConfig(r=32, target_modules=r".*(q|k|v|o)_proj") if lora else None,
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                max_steps=steps,
                learning_rate=1e-2 if lora else 1e-3,
                lr_scheduler_type="constant",
                per_device_train_batch_size=PROMPTS * ROLLOUTS,
                num_generations=ROLLOUTS,
                max_completion_length=TOKENS,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
            ),
        )
        server.connect(trainer).train()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), *sys.argv[5:])
