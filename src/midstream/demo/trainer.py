"""The trainer: a Hugging Face model in float32, and one clipped policy-gradient update per step.

Owns: the master weights, the optimizer, and float32 copies of recent snapshots, which recompute their rollouts.

Always holds:
- An advantage compares a turn with the same turn of the other samples of its group alone.
- The importance ratio of a token uses the log-probability that was recorded when the token was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from midstream.client.replay import RouterTap, pad_routes, pad_sequences
from midstream.client.weights import no_progress_bars
from midstream.core.types import BASE_SNAPSHOT
from midstream.demo.records import Rollout
from midstream.demo.replay import Mismatch, Rescorer, measure_mismatch, token_logprobs


@dataclass(frozen=True)
class TrainerOptions:
    """clip: importance ratios are clipped to [1 - clip, 1 + 2 clip]. minibatch: sequences per backward pass, for memory."""

    learning_rate: float = 8e-4
    clip: float = 0.2
    minibatch: int = 16
    keep_snapshots: int = 6
    max_grad_norm: float = 1.0


class Trainer:
    def __init__(self, directory: Path, options: TrainerOptions) -> None:
        self.options = options
        self.model: Any = load_float32(directory)
        self.tap = RouterTap(self.model)
        self.rescorer = Rescorer(load_float32(directory))
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95)
        )
        self.snapshot = BASE_SNAPSHOT
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.remember(BASE_SNAPSHOT)

    def remember(self, snapshot: str) -> None:
        """Keep a copy of the current weights as `snapshot`, and drop the oldest copies beyond `keep_snapshots`."""
        self.snapshot = snapshot
        self.weights[snapshot] = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        while len(self.weights) > self.options.keep_snapshots:
            del self.weights[next(iter(self.weights))]

    def mismatch(self, rollouts: Sequence[Rollout]) -> Mismatch:
        return measure_mismatch(self.rescorer, [t for r in rollouts for t in r.turns], self.weights)

    def update(self, rollouts: Sequence[Rollout]) -> float:
        """Make one optimizer step on all `rollouts`. Returns the loss."""
        advantages = turn_advantages(rollouts)
        total = sum(len(turn.tokens) for rollout in rollouts for turn in rollout.turns)
        self.model.train()
        self.optimizer.zero_grad()
        loss_sum = 0.0
        for start in range(0, len(rollouts), self.options.minibatch):
            chunk = slice(start, start + self.options.minibatch)
            loss = self._loss(rollouts[chunk], advantages[chunk]) / total
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
        self.optimizer.step()
        return loss_sum

    def _loss(self, rollouts: Sequence[Rollout], advantages: Tensor) -> Tensor:
        """The loss summed over the generated tokens of all turns, from one pass over each conversation."""
        last = [rollout.turns[-1] for rollout in rollouts]
        ids = pad_sequences([turn.sequence for turn in last])
        inputs, targets = ids[:, :-1], ids[:, 1:]
        routes = pad_routes([turn.input_routes for turn in last], inputs.shape[1])
        with self.tap.forcing(routes.flatten(0, 1)):
            logprobs = token_logprobs(self.model(inputs, use_cache=False).logits, targets)
        rollout_logprobs = torch.zeros_like(logprobs)
        # It stays 0 on prompts and padding, which do not count.
        token_advantages = torch.zeros_like(logprobs)
        for i, rollout in enumerate(rollouts):
            for j, turn in enumerate(rollout.turns):
                span = slice(len(turn.prompt) - 1, len(turn.sequence) - 1)
                rollout_logprobs[i, span] = torch.tensor(turn.logprobs)
                token_advantages[i, span] = advantages[i, j]
        generated = token_advantages != 0
        return clipped_loss(
            logprobs[generated], rollout_logprobs[generated], token_advantages[generated], self.options.clip
        ).sum()


def load_float32(directory: Path) -> Any:
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def turn_advantages(rollouts: Sequence[Rollout]) -> Tensor:
    """[rollouts, turns]: each turn's reward less the mean of the same turns of its group, in their standard deviations.

    0 if all of them have the same reward.
    """
    rewards = torch.tensor([[turn.reward for turn in rollout.turns] for rollout in rollouts])
    result = torch.zeros_like(rewards)
    groups = [rollout.group for rollout in rollouts]
    for group in set(groups):
        rows = torch.tensor([g == group for g in groups])
        scores = rewards[rows]
        spread = scores.std(dim=0, unbiased=False)
        result[rows] = torch.where(spread > 1e-6, (scores - scores.mean(dim=0)) / spread.clamp(min=1e-6), 0.0)
    return result


def clipped_loss(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Per token, the lesser of the plain and the clipped policy-gradient objective, negated."""
    ratio = torch.exp(logprobs - rollout_logprobs)
    clipped = ratio.clamp(1 - clip, 1 + 2 * clip)
    return -torch.minimum(ratio * advantages, clipped * advantages)
