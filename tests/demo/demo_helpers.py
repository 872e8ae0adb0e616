"""Turns with real numbers in them: a model's own tokens, log-probabilities and routes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from grpo import token_logprobs
from transformers import AutoModelForCausalLM
from two_turns import Rollout, Turn

from midstream.client.decode import SamplingMasks
from midstream.client.replay import RouterTap


def load(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_turn(
    model, prompt: list[int], tokens: list[int], snapshots: list[str] | None = None, reward: float = 0.0
) -> Turn:
    """The turn in which `model` sampled `tokens` after `prompt`."""
    tap = RouterTap(model)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad(), tap.forcing(None):
        logprobs = token_logprobs(model(ids[:, :-1], use_cache=False).logits, ids[:, 1:])[0]
    return Turn(
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs[len(prompt) - 1 :].tolist(),
        snapshots=snapshots or ["base"] * len(tokens),
        routes=tap.taken.numpy(),
        # Drawn from all tokens.
        masks=SamplingMasks(np.empty(0, np.int32), np.zeros(len(tokens) + 1, np.int64)),
        replica="replica-0",
        cached_tokens=0,
        reward=reward,
    )


def make_rollout(turns: tuple[Turn, ...], group: int = 0, sample: int = 0) -> Rollout:
    return Rollout(f"rollout-0-0-{group}-{sample}", group, turns)
