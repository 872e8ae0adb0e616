"""Router replay: a trainer's forward passes on the engine's routes, and the mismatch between trainer and engine.

Owns: scoring turns with a Hugging Face MoE model, on its own or on given routes (client/replay.py). The measures of mismatch
(k3, share of differing routes).
Always holds: positions are input positions, so the logits at position i score the token at i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.client.replay import RouterTap, pad_routes, pad_sequences
from midstream.demo.records import Turn


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each target, in nats. logits: [..., vocabulary]; targets and result: [...]."""
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@dataclass(frozen=True)
class Scored:
    """The trainer's scores of one turn's generated tokens. logprobs: [tokens]; routes: [tokens, moe_layers, top_k]."""

    logprobs: Tensor
    routes: Tensor


class Rescorer:
    """Recomputes turns under the snapshots that sampled them.

    A turn that crossed a swap is computed in pieces as in the engine: each by its own snapshot, over the keys and values that
    the earlier snapshots computed.
    """

    def __init__(self, model: Any) -> None:
        """model: its weights are replaced."""
        self.model = model.eval()
        self.tap = RouterTap(model)

    @torch.no_grad()
    def score(
        self, turns: Sequence[Turn], weights: Mapping[str, Mapping[str, Tensor]], *, replay: bool
    ) -> list[Scored]:
        """The scores of `turns`, in order. weights: of every snapshot in them. replay: force the engine's routes."""
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
        """Score turns with the same pieces: (snapshot, first input position) of each."""
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

    Tokens must come from the rollout distribution. The estimate is never negative, and 0 only where the two agree.
    """
    d = (trainer - rollout).double()
    return torch.expm1(d) - d


def differing_routes(left: Tensor, right: Tensor) -> Tensor:
    """Whether the two chose different sets of experts, in any order: bool [tokens, moe_layers]."""
    return (left.sort(-1).values != right.sort(-1).values).any(-1)


@dataclass(frozen=True)
class Mismatch:
    """The mismatch between trainer and engine on the same tokens. KLs are means over tokens, in nats."""

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
