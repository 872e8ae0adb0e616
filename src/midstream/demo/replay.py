"""A trainer's forward passes on the routes that the serving engine took, and how far its numbers are from the engine's.

Owns: scoring sequences with a Hugging Face MoE model on its own or on given routes (tinker/trainer/replay.py), across the
snapshots that made them, and the measures of mismatch (k3, share of differing routes).
Always holds: positions are input positions: logits at position i score the token at i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.demo.records import Turn
from midstream.tinker.trainer.replay import RouterTap, pad_routes, pad_sequences


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p of each target under the logits at the same place."""
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@dataclass(frozen=True)
class Scored:
    """A trainer's view of one turn's generated tokens: log-probabilities and the routes its passes took."""

    logprobs: Tensor  # [tokens]
    routes: Tensor  # [tokens, moe_layers, top_k]


class Rescorer:
    """Recomputes turns under the snapshots that made them.

    A turn that crossed a swap is computed in pieces, each by its own snapshot over the keys and values that the
    earlier ones left: what the engine did.
    """

    def __init__(self, model: Any) -> None:
        """`model`: used as scratch; its weights are replaced."""
        self.model = model.eval()
        self.tap = RouterTap(model)

    @torch.no_grad()
    def score(
        self, turns: Sequence[Turn], weights: Mapping[str, Mapping[str, Tensor]], *, replay: bool
    ) -> list[Scored]:
        """`turns` in order; `weights[snapshot]` must hold every snapshot they name."""
        batches: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for i, turn in enumerate(turns):
            key = tuple((snapshot, start) for snapshot, start, _ in turn.segments())
            batches.setdefault(key, []).append(i)
        results: dict[int, Scored] = {}
        for key, indices in batches.items():
            scored = self._score_batch([turns[i] for i in indices], key, weights, replay)
            results.update(zip(indices, scored, strict=True))
        return [results[i] for i in range(len(turns))]

    def _score_batch(
        self,
        turns: Sequence[Turn],
        pieces: Sequence[tuple[str, int]],
        weights: Mapping[str, Mapping[str, Tensor]],
        replay: bool,
    ) -> list[Scored]:
        """Turns whose passes changed snapshots at the same positions: `pieces` of (snapshot, first input position)."""
        ids = pad_sequences([turn.sequence for turn in turns])
        inputs, targets = ids[:, :-1], ids[:, 1:]
        rows, length = inputs.shape
        forced = None
        if replay:
            forced = pad_routes([turn.input_routes for turn in turns], length)
        cache, logprobs, routes = None, [], []
        ends = [start for _, start in pieces[1:]] + [length]
        for (snapshot, start), end in zip(pieces, ends, strict=True):
            self.model.load_state_dict(weights[snapshot])
            with self.tap.forcing(None if forced is None else forced[:, start:end].flatten(0, 1)):
                output = self.model(inputs[:, start:end], past_key_values=cache, use_cache=len(pieces) > 1)
            cache = output.past_key_values
            logprobs.append(token_logprobs(output.logits, targets[:, start:end]))
            routes.append(self.tap.taken.reshape(rows, end - start, len(self.tap.routers), -1))
        all_logprobs, all_routes = torch.cat(logprobs, dim=1), torch.cat(routes, dim=1)
        spans = [slice(len(t.prompt) - 1, len(t.sequence) - 1) for t in turns]
        return [Scored(all_logprobs[i, span], all_routes[i, span]) for i, span in enumerate(spans)]


def k3(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Per token, the k3 estimate of KL(rollout || trainer): exp(d) - 1 - d with d = trainer - rollout logprob.

    Tokens must come from the rollout distribution. Never negative; zero only where the two agree.
    """
    d = (trainer - rollout).double()
    return torch.expm1(d) - d


def differing_routes(left: Tensor, right: Tensor) -> Tensor:
    """[tokens, moe_layers] bool: whether the two chose different sets of experts (their order does not matter)."""
    return (left.sort(-1).values != right.sort(-1).values).any(-1)


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer is from the engine on the same tokens, on its own and on replayed routes."""

    kl_own_routes: float
    kl_replayed_routes: float
    route_diff_share: float
    route_layer_diff_share: float


def measure_mismatch(
    rescorer: Rescorer, turns: Sequence[Turn], weights: Mapping[str, Mapping[str, Tensor]]
) -> Mismatch:
    own = rescorer.score(turns, weights, replay=False)
    replayed = rescorer.score(turns, weights, replay=True)
    rollout = torch.tensor([x for turn in turns for x in turn.logprobs], dtype=torch.float64)
    differs = torch.cat(
        [differing_routes(s.routes, torch.from_numpy(t.routes)) for s, t in zip(own, turns, strict=True)]
    )
    return Mismatch(
        kl_own_routes=k3(torch.cat([s.logprobs for s in own]), rollout).mean().item(),
        kl_replayed_routes=k3(torch.cat([s.logprobs for s in replayed]), rollout).mean().item(),
        route_diff_share=differs.any(-1).double().mean().item(),
        route_layer_diff_share=differs.double().mean().item(),
    )
