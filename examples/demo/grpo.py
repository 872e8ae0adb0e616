"""The demo's trainer: one clipped policy-gradient update per step, and the server's numbers computed again.

Always holds:
- An advantage compares a turn with the same turn of the other samples of its group alone.
- The importance ratio of a token uses the log-probability that was recorded when the token was sampled.
- A turn is scored under the snapshots that its labels name: each piece by its own, over the KV that the earlier ones computed.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
from two_turns import Rollout, Turn

from midstream.client.replay import RouterTap, pad_routes, pad_sequences

CLIP = 0.2
KEPT_SNAPSHOTS = 6
disable_progress_bar()


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def k3(trainer: Tensor, engine: Tensor) -> Tensor:
    """Of each token that the engine sampled, the k3 estimate of KL(engine || trainer): never negative."""
    d = (trainer - engine).double()
    return torch.expm1(d) - d


def advantages_of(group: Sequence[Rollout]) -> Tensor:
    """[rollouts, turns]: the reward less the mean of the same turns, in their standard deviations; 0 if all are equal."""
    rewards = torch.tensor([[turn.reward for turn in rollout.turns] for rollout in group])
    spread = rewards.std(dim=0, unbiased=False)
    return torch.where(spread > 1e-6, (rewards - rewards.mean(dim=0)) / spread.clamp(min=1e-6), 0.0)


def clipped_loss(logprobs: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    """Of each token, the lesser of the plain and the clipped objective, negated."""
    ratio = torch.exp(logprobs - sampled)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + 2 * CLIP) * advantage)


class Trainer:
    """model: the master weights, in float32. directory: of the model as it was, with its tokenizer."""

    def __init__(self, directory: Path, learning_rate: float):
        read, self.directory = AutoModelForCausalLM.from_pretrained, directory
        self.model, self._scorer = (read(directory, dtype=torch.float32) for _ in range(2))
        self._tap, self._scorer_tap = RouterTap(self.model), RouterTap(self._scorer)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._weights: dict[str, dict[str, Tensor]] = {}
        self.remember("base")

    def remember(self, snapshot: str) -> None:
        """Keep a copy of the weights as `snapshot`, and drop the oldest beyond KEPT_SNAPSHOTS."""
        self._weights[snapshot] = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        while len(self._weights) > KEPT_SNAPSHOTS:
            del self._weights[next(iter(self._weights))]

    def update(self, rollouts: Sequence[Rollout]) -> None:
        """One optimizer step on all rollouts."""
        groups: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            groups[rollout.group].append(rollout)
        total = sum(len(turn.tokens) for rollout in rollouts for turn in rollout.turns)
        self._optimizer.zero_grad()
        for group in groups.values():
            (self._loss(group) / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def _loss(self, group: Sequence[Rollout]) -> Tensor:
        """Summed over the sampled tokens of all turns, from one pass over each conversation on the engine's routes."""
        last = [rollout.turns[-1] for rollout in group]
        ids = pad_sequences([turn.sequence for turn in last])
        routes = pad_routes([turn.routes for turn in last], ids.shape[1] - 1)
        with self._tap.forcing(routes.flatten(0, 1)):
            logprobs = token_logprobs(self.model(ids[:, :-1], use_cache=False).logits, ids[:, 1:])
        loss = torch.zeros(())
        for row, rollout, advantages in zip(logprobs, group, advantages_of(group), strict=True):
            for turn, advantage in zip(rollout.turns, advantages, strict=True):
                loss = loss + clipped_loss(row[turn.span], torch.tensor(turn.logprobs), advantage).sum()
        return loss

    def mismatch(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token, trainer against engine: the KL on the trainer's own routes, the KL on the engine's, and whether the
        routes differ in a layer."""
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        engine = torch.tensor([x for turn in turns for x in turn.logprobs], dtype=torch.float64)
        routes = torch.cat([torch.from_numpy(turn.routes[turn.span]) for turn in turns])
        own, taken = map(torch.cat, zip(*self.score(turns, replay=False), strict=True))
        replayed, _ = map(torch.cat, zip(*self.score(turns, replay=True), strict=True))
        differ = (taken.sort(-1).values != routes.sort(-1).values).any(-1).any(-1)
        return k3(own, engine), k3(replayed, engine), differ

    @torch.no_grad()
    def score(self, turns: Sequence[Turn], replay: bool) -> list[tuple[Tensor, Tensor]]:
        """The log-probabilities and routes of each turn's tokens. replay: on the engine's routes."""
        # Turns with the same pieces are one batch.
        batches: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for number, turn in enumerate(turns):
            batches[tuple(turn.pieces)].append(number)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for pieces, numbers in batches.items():
            scored = self._score_batch([turns[number] for number in numbers], pieces, replay)
            found.update(zip(numbers, scored, strict=True))
        return [found[number] for number in range(len(turns))]

    def _score_batch(
        self, turns: Sequence[Turn], pieces: Sequence[tuple[str, int]], replay: bool
    ) -> list[tuple[Tensor, Tensor]]:
        ids = pad_sequences([turn.sequence for turn in turns])
        rows, length = ids.shape[0], ids.shape[1] - 1
        forced = pad_routes([turn.routes for turn in turns], length) if replay else None
        cache, logprobs, routes = None, [], []
        for (snapshot, start), end in zip(pieces, [at for _, at in pieces[1:]] + [length], strict=True):
            self._scorer.load_state_dict(self._weights[snapshot])
            with self._scorer_tap.forcing(None if forced is None else forced[:, start:end].flatten(0, 1)):
                output = self._scorer(ids[:, start:end], past_key_values=cache, use_cache=len(pieces) > 1)
            cache = output.past_key_values
            logprobs.append(token_logprobs(output.logits, ids[:, start + 1 : end + 1]))
            routes.append(self._scorer_tap.taken.unflatten(0, (rows, end - start)))
        scores, taken = torch.cat(logprobs, dim=1), torch.cat(routes, dim=1)
        return [(scores[i, turn.span], taken[i, turn.span]) for i, turn in enumerate(turns)]
