"""The demo's trainer: one clipped policy-gradient update per step, and the server's numbers computed again.

Always holds:
- An advantage compares a turn with the same turn of the other samples of its group alone.
- The importance ratio of a token uses the log-probability that was recorded when the token was sampled. The trainer's own is
  over the same tokens, which the sampling mask names.
- A turn is scored under the snapshots that its labels name: each piece by its own, over the KV that the earlier ones computed.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
from two_turns import Rollout, Turn

from midstream.client.decode import SamplingMasks
from midstream.client.replay import RouterTap, mask_logits, pad_routes, pad_sequences

CLIP = 0.2
KEPT_SNAPSHOTS = 6
disable_progress_bar()


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def masked_logprobs(logits: Tensor, targets: Tensor, masks: SamplingMasks) -> Tensor:
    """Of each token among those that it was drawn from."""
    return token_logprobs(mask_logits(logits.float(), masks), targets)


class Scores(NamedTuple):
    """Of each token of a turn: its log-probability among all and among those that it was drawn from, and the route."""

    plain: Tensor
    masked: Tensor
    routes: Tensor


class Mismatch(NamedTuple):
    """Of each token, the KL of trainer and engine: replaying nothing, the routes, the masks, or both. differ: the trainer's own
    routes differ in a layer."""

    neither: Tensor
    routes: Tensor
    masks: Tensor
    both: Tensor
    differ: Tensor


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
        """Summed over the sampled tokens of all turns, from a pass over each conversation on the engine's routes and masks."""
        last = [rollout.turns[-1] for rollout in group]
        ids = pad_sequences([turn.sequence for turn in last])
        routes = pad_routes([turn.routes for turn in last], ids.shape[1] - 1)
        with self._tap.forcing(routes.flatten(0, 1)):
            logits = self.model(ids[:, :-1], use_cache=False).logits
        loss = torch.zeros(())
        for row, rollout, advantages in zip(logits, group, advantages_of(group), strict=True):
            for turn, advantage in zip(rollout.turns, advantages, strict=True):
                logprobs = masked_logprobs(row[turn.span], torch.tensor(turn.tokens), turn.masks)
                loss = loss + clipped_loss(logprobs, torch.tensor(turn.logprobs), advantage).sum()
        return loss

    def mismatch(self, rollouts: Sequence[Rollout]) -> Mismatch:
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        engine = torch.tensor([x for turn in turns for x in turn.logprobs], dtype=torch.float64)
        routes = torch.cat([torch.from_numpy(turn.routes[turn.span]) for turn in turns])
        own, replayed = (
            Scores(*map(torch.cat, zip(*self.score(turns, replay=replay), strict=True)))
            for replay in (False, True)
        )
        differ = (own.routes.sort(-1).values != routes.sort(-1).values).any(-1).any(-1)
        scores = (own.plain, replayed.plain, own.masked, replayed.masked)
        return Mismatch(*(k3(trainer, engine) for trainer in scores), differ)

    @torch.no_grad()
    def score(self, turns: Sequence[Turn], replay: bool) -> list[Scores]:
        """Of each turn's tokens. replay: on the engine's routes."""
        # Turns with the same pieces are one batch.
        batches: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for number, turn in enumerate(turns):
            batches[tuple(turn.pieces)].append(number)
        found: dict[int, Scores] = {}
        for pieces, numbers in batches.items():
            scored = self._score_batch([turns[number] for number in numbers], pieces, replay)
            found.update(zip(numbers, scored, strict=True))
        return [found[number] for number in range(len(turns))]

    def _score_batch(
        self, turns: Sequence[Turn], pieces: Sequence[tuple[str, int]], replay: bool
    ) -> list[Scores]:
        ids = pad_sequences([turn.sequence for turn in turns])
        rows, length = ids.shape[0], ids.shape[1] - 1
        forced = pad_routes([turn.routes for turn in turns], length) if replay else None
        cache, logits, routes = None, [], []
        for (snapshot, start), end in zip(pieces, [at for _, at in pieces[1:]] + [length], strict=True):
            self._scorer.load_state_dict(self._weights[snapshot])
            with self._scorer_tap.forcing(None if forced is None else forced[:, start:end].flatten(0, 1)):
                output = self._scorer(ids[:, start:end], past_key_values=cache, use_cache=len(pieces) > 1)
            cache = output.past_key_values
            logits.append(output.logits)
            routes.append(self._scorer_tap.taken.unflatten(0, (rows, end - start)))
        whole, taken, found = torch.cat(logits, dim=1), torch.cat(routes, dim=1), []
        for row, own, turn in zip(whole, taken, turns, strict=True):
            of_turn, tokens = row[turn.span], torch.tensor(turn.tokens)
            masked = masked_logprobs(of_turn, tokens, turn.masks)
            found.append(Scores(token_logprobs(of_turn, tokens), masked, own[turn.span]))
        return found
