"""Adapters over the served model, and what a policy answers against what PEFT computes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from serving import Server
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from adapter_helpers import ATTENTION, EXPERTS, adapted, write_adapter

HOT_LOAD = "/hot_load/v1/models/hot_load"
DEADLINE_S = 150.0


class Adapters:
    """PEFT's models over the served one, and their directories in the server's bucket."""

    def __init__(self, base: Path) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.made: dict[str, Any] = {}

    def put(self, server: Server, identity: str, seed: int, **config: Any) -> None:
        """In the server's bucket."""
        self.make(identity, seed, **config)
        self.write(identity, server.bucket / identity)

    def make(self, identity: str, seed: int, **config: Any) -> None:
        asked = {
            "target_modules": ATTENTION,
            "target_parameters": EXPERTS,
            "r": 8,
            "lora_alpha": 16,
            **config,
        }
        self.made[identity] = adapted(self.module, seed, **asked)

    def write(self, identity: str, directory: Path) -> None:
        write_adapter(self.made[identity], directory)

    def logprobs(self, identity: str, ids: list[int]) -> torch.Tensor:
        """[tokens - 1]: of each token after the first."""
        model = self.made.get(identity, self.module)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def signalled(server: Server, identity: str, policy: str | None = None, **more: Any) -> httpx.Response:
    body = {"identity": identity, **({} if policy is None else {"policy": policy}), **more}
    return httpx.post(server.url + HOT_LOAD, json=body, timeout=120)


def ready(server: Server, identity: str, policy: str) -> None:
    """Every replica serves it."""
    until = time.monotonic() + DEADLINE_S
    while True:
        rows = httpx.get(server.url + HOT_LOAD, params={"policy": policy}).json()["replicas"]
        if all(row["readiness"] and row["current_snapshot_identity"] == identity for row in rows) and rows:
            return
        assert time.monotonic() < until, rows
        time.sleep(0.02)


def load(server: Server, identity: str, policy: str) -> None:
    answer = signalled(server, identity, policy)
    assert answer.status_code == 200, answer.text
    ready(server, identity, policy)


def sample(server: Server, model: str, prompt: list[int], **more: Any) -> Any:
    asked = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "logprobs": 0, "return_token_ids": True, **more}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        return client.completions.create(
            model=model,
            prompt=prompt,
            extra_body={"return_token_ids": True},
            **{k: v for k, v in asked.items() if k != "return_token_ids"},
        )


def checked(adapters: Adapters, answer: Any, identity: str, prompt: list[int]) -> list[int]:
    """The sampled ids; every log-probability is that of PEFT's model."""
    choice = answer.choices[0]
    ids = choice.token_ids
    expected = adapters.logprobs(identity, [*prompt, *ids])[len(prompt) - 1 :]
    got = torch.tensor(choice.logprobs.token_logprobs)
    assert (got - expected).abs().max().item() < 1e-4
    assert answer.model.partition("@")[2] == identity
    return list(ids)
