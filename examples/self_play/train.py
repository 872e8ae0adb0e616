"""Self-play on one server: a learner trains against frozen snapshots of itself. Needs torch, transformers and peft.

    midstream serve --model MODEL
    python examples/self_play/train.py http://127.0.0.1:8080 BUCKET_URL MODEL ROUNDS

The game: each player says a digit, and the larger one wins.
"""

import sys

import httpx
import openai
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from midstream.client import ServerClient, SnapshotPublisher

DIGITS = list(range(48, 58))
PROMPT = list(b"A digit: ")
GAMES = 64


def play(client: openai.OpenAI, policy: str, seed: int) -> tuple[torch.Tensor, str]:
    """The digits [GAMES] that a policy says, and the snapshot that said them."""
    fields = {"return_token_ids": True, "allowed_token_ids": DIGITS}
    answer = client.completions.create(
        model=policy, prompt=PROMPT, n=GAMES, max_tokens=1, temperature=1.0, seed=seed, extra_body=fields
    )
    said = [choice.token_ids[0] - DIGITS[0] for choice in answer.choices]  # type: ignore[attr-defined]
    return torch.tensor(said), answer.model.partition("@")[2]


def keep(server: ServerClient, name: str, identity: str) -> None:
    """Keep what the learner serves now as a policy of its own that takes no other snapshot."""
    deployment = server.deployments.all()[0]["name"]
    body = {"policy": name, "from": "learner", "frozen": True}
    httpx.post(f"{server.root}/v1/{deployment}/policies", json=body, timeout=60).raise_for_status()
    server.policy(name).wait_until_ready(identity)


def main(url: str, bucket: str, base: str, rounds: int) -> None:
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights="gaussian"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    with SnapshotPublisher(url, bucket, policy="learner", adapter=model) as publisher:
        for number in range(rounds):
            publisher.publish(f"learner/{number}")
            keep(publisher.server, f"past-{number}", f"learner/{number}")
            mine, learner = play(client, "learner", seed=number)
            theirs, opponent = play(client, f"past-{number // 2}", seed=1000 + number)
            rewards = (mine - theirs).sign().float()
            print(
                f"{learner} against {opponent}: reward {rewards.mean():+.2f}, says {mine.float().mean():.1f}"
            )
            logprobs = model(torch.tensor([PROMPT])).logits[0, -1, DIGITS].log_softmax(-1)[mine]
            optimizer.zero_grad()
            (-(rewards - rewards.mean()) * logprobs).mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:4], rounds=int(sys.argv[4]))
