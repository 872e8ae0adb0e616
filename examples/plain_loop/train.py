"""A whole RL loop in plain PyTorch: REINFORCE with importance ratios over live hot loads. Needs torch and transformers.

    midstream serve
    python examples/plain_loop/train.py http://127.0.0.1:8080 .midstream/bucket .midstream/models/tiny-moe 12

The task: write digits. Sampling goes on while a step's weights are published, so data are one snapshot old at most.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from midstream.client import Rollout, RolloutClient, SnapshotPublisher, TrainingRun, fresh, staleness

DIGITS = frozenset(range(48, 58))
PROMPTS = [list(f"Write digits, {number}: ".encode()) for number in range(8)]
ROLLOUTS, TOKENS, STALE_MOST, RATIO_MOST = 8, 16, 2, 2.0


def reward(rollout: Rollout) -> float:
    return sum(token in DIGITS for token in rollout.token_ids) / TOKENS


def loss_of(model: torch.nn.Module, group: list[Rollout]) -> torch.Tensor:
    """Of one prompt's rollouts, which are all of one length."""
    rewards = torch.tensor([reward(one) for one in group])
    ids = torch.tensor([one.prompt_ids + one.token_ids for one in group])
    # The logits before each sampled token: [rollouts, tokens, vocabulary].
    logits = model(ids).logits[:, -TOKENS - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, -TOKENS:, None])[..., 0]
    sampled = torch.tensor([one.sampling_logprobs for one in group])
    ratios = (logprobs - sampled).exp().clamp(max=RATIO_MOST)
    return -(ratios * (rewards - rewards.mean())[:, None]).mean()


def main(url: str, bucket: str, base: str, steps: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    how = {"model": model, "config_dir": base, "dtype": "bfloat16"}
    with (
        SnapshotPublisher(url, os.path.abspath(bucket)) as publisher,
        RolloutClient(url) as client,
        TrainingRun(publisher, **how) as run,
    ):
        # Whatever an earlier run left there, this one begins with its own weights.
        run.publish()
        for step in range(1, steps + 1):
            # The newest snapshot may still be loaded, and nobody waits for it.
            groups = client.sample(
                PROMPTS,
                n=ROLLOUTS,
                max_tokens=TOKENS,
                temperature=1.0,
                seed=step,
                ignore_eos=True,
                at_least=run.at_least,
            )
            kept = [group for group in (fresh(group, run.signalled, STALE_MOST) for group in groups) if group]
            optimizer.zero_grad()
            for group in kept:
                (loss_of(model, group) / len(kept)).backward()
            optimizer.step()
            every = [one for group in groups for one in group]
            behind = sum(staleness(one, run.signalled) for one in every) / len(every)
            mean = sum(map(reward, every)) / len(every)
            print(f"step {step}: reward {mean:.3f}, {behind:.2f} snapshots behind", flush=True)
            run.publish()


if __name__ == "__main__":
    main(*sys.argv[1:4], steps=int(sys.argv[4]))
