"""TRL's AsyncGRPOTrainer, unmodified, with its weights pushed to a midstream server. Needs TRL 1.16 (README.md).

    midstream serve
    python examples/trl/async_grpo.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 8

The task: write digits. The bucket is not used: a replica puts there what was pushed. TRL packs rows for an attention kernel
that needs a GPU, and asks how fast that is. `without_gpu` gives it the same attention in PyTorch, and no speed. It does nothing
where there is a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import pairwise

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from midstream.integrations.trl_async import SNAPSHOT, PushRolloutWorker, PushTransfer

TOKENS, ROLLOUTS, PROMPTS = 16, 8, 4


class PackedAttention:
    """`flash_attn_varlen_func` of the kernel that TRL loads, as far as TRL's packing uses it."""

    @staticmethod
    def flash_attn_varlen_func(
        query, key, value, ends_q, ends_k, longest_q, longest_k, *, softmax_scale, causal, window_size
    ):
        assert causal
        assert window_size == (-1, -1)
        parts = []
        for (q0, q1), (k0, k1) in zip(_spans(ends_q), _spans(ends_k), strict=True):
            # The last query sees the last key.
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
            rows = (one.transpose(0, 1) for one in (query[q0:q1], key[k0:k1], value[k0:k1]))
            part = scaled_dot_product_attention(*rows, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)


def without_gpu() -> None:
    if not torch.cuda.is_available():
        packing._flash_attn = PackedAttention
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def _spans(ends):
    ends = ends.tolist()
    return pairwise(ends)


def reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    return [sum(character.isdigit() for character in one[0]["content"]) / TOKENS for one in completions]


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs and SNAPSHOT in logs:
            behind, place = float(logs["sample/staleness_mean"]), float(logs[SNAPSHOT])
            told = f"reward {float(logs['reward']):.3f}, {behind:.2f} snapshots behind"
            print(f"step {state.global_step}: {told}", flush=True)
            print(f"tokens of snapshot {place:.2f}", flush=True)


def main(url: str, _: str, base: str, steps: int) -> None:
    torch.manual_seed(0)
    without_gpu()
    tokenizer = AutoTokenizer.from_pretrained(base)
    # TRL knows this for the chat templates of some models only.
    tokenizer.response_template = qwen3_template
    questions = [[{"role": "user", "content": f"Write digits, {n}: "}] for n in range(64)]
    prompts = Dataset.from_dict({"prompt": questions})
    args = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        learning_rate=1e-3,
        dtype="float32",
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        gradient_accumulation_steps=1,
        num_generations=ROLLOUTS,
        max_completion_length=TOKENS,
        max_inflight_tasks=PROMPTS * ROLLOUTS,
        token_budget=0,
        vllm_server_base_url=url,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = AsyncGRPOTrainer(
        model=base,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Printed()],
        weight_transfer=PushTransfer(url, config_dir=base, dtype="bfloat16"),
        rollout_worker=PushRolloutWorker(
            model_name="tiny-moe",
            dataset=prompts,
            reward_funcs=[reward],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=ROLLOUTS,
            max_inflight_tasks=args.max_inflight_tasks,
            # Without a bound it samples on, and throws away what is too old.
            queue_maxsize=args.max_inflight_tasks,
            vllm_server_url=url,
            max_tokens=TOKENS,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
