"""Several teams train on one server at once, each an adapter of its own. Needs torch, transformers and peft.

    midstream serve --model MODEL
    python examples/multi_tenant/teams.py http://127.0.0.1:8080 BUCKET_URL MODEL TEAMS STEPS

Each team wants its policy to say one digit, its number.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from midstream.client import SnapshotPublisher

DIGITS = list(range(48, 58))
PROMPT = list(b"A digit: ")
SAMPLES = 64


def train(url: str, bucket: str, model: Any, team: int, steps: int) -> str:
    """What the team's policy said of its digit at first and at last, and the snapshots that said it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    fields = {"return_token_ids": True, "allowed_token_ids": DIGITS}
    shares, snapshots = [], []
    with SnapshotPublisher(url, bucket, policy=f"team-{team}", adapter=model) as publisher:
        for step in range(steps):
            publisher.publish(f"team-{team}/{step}")
            answer = client.completions.create(
                model=f"team-{team}", prompt=PROMPT, n=SAMPLES, max_tokens=1, temperature=1.0, seed=step,
                extra_body=fields,
            )  # fmt: skip
            said = torch.tensor([choice.token_ids[0] - DIGITS[0] for choice in answer.choices])  # type: ignore[attr-defined]
            rewards = (said == team).float()
            shares.append(rewards.mean().item())
            snapshots.append(answer.model.partition("@")[2])
            logprobs = model(torch.tensor([PROMPT])).logits[0, -1, DIGITS].log_softmax(-1)[said]
            optimizer.zero_grad()
            (-(rewards - rewards.mean()) * logprobs).mean().backward()
            optimizer.step()
    return f"team-{team}: {shares[0]:.2f} to {shares[-1]:.2f} by {' '.join(snapshots)}"


def main(url: str, bucket: str, base: str, teams: int, steps: int) -> None:
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=8, target_modules=targets, init_lora_weights="gaussian")
    models = [
        get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        for _ in range(teams)
    ]
    with ThreadPoolExecutor(teams) as pool:
        for line in pool.map(lambda team: train(url, bucket, models[team], team, steps), range(teams)):
            print(line)


if __name__ == "__main__":
    main(*sys.argv[1:4], teams=int(sys.argv[4]), steps=int(sys.argv[5]))
