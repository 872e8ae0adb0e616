"""Turns with real numbers in them: a model's own tokens, log-probabilities and routes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from midstream.client.replay import RouterTap
from midstream.demo.records import Rollout, StepRow, Turn
from midstream.demo.replay import token_logprobs


def load(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_turn(
    model,
    prompt: list[int],
    tokens: list[int],
    snapshots: list[str] | None = None,
    reward: float = 0.0,
    replica: str = "replica-0",
) -> Turn:
    """The turn in which `model` sampled `tokens` after `prompt`."""
    tap = RouterTap(model)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad(), tap.forcing(None):
        logprobs = token_logprobs(model(ids[:, :-1], use_cache=False).logits, ids[:, 1:])[0]
    routes, first = tap.taken.numpy(), len(prompt) - 1
    return Turn(
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs[first:].tolist()),
        sampling_logprobs=tuple(logprobs[first:].tolist()),
        snapshots=tuple(snapshots or ["base"] * len(tokens)),
        routes=routes[first:],
        prompt_routes=routes[:first],
        replica=replica,
        cached_tokens=0,
        reward=reward,
    )


def make_rollout(turns: tuple[Turn, ...], group: int = 0, sample: int = 0) -> Rollout:
    return Rollout(f"rollout-0-{group}-{sample}", 0, group, sample, turns)


def make_row(step: int, **changes) -> StepRow:
    values = {
        "step": step,
        "snapshot": f"step-{step + 1}",
        "reward": 0.1,
        "rewards": (0.05, 0.15),
        "prompt_tokens": 100,
        "cached_prompt_tokens": 60,
        "older_snapshot_share": 0.5,
        "streams": 4,
        "streams_crossed_swap": 1,
        "one_replica": 2,
        "tokens": 50,
        "served": True,
        "pause_ms": (1.0, 3.0),
        "kind": "delta",
        "bytes_sent": 250_000,
        "bytes_whole": 1_000_000,
        "publish_s": 0.5,
    }
    return StepRow(**(values | changes))
