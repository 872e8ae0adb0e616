"""Router replay: a trainer's forward passes on the routes that the serving engine took.

Owns: scoring sequences with a Hugging Face MoE model on its own or on given routes, across the snapshots that made
them, and the measures of mismatch (k3, share of differing routes).

Always holds:
- Replaying replaces which experts a token goes to, never how much each counts: scores come from the model's own
  router logits at the given experts, through the router's own softmax and normalisation.
- Positions are input positions: logits at position i score the token at i + 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.demo.records import Routes, Turn

OWN_ROUTE = -1  # in a route tensor: this position takes the model's own route


class RouterTap:
    """Records the routes of every router of `model` within `forcing`, and replaces them when given some.

    `taken` after a forward: [tokens, moe_layers, top_k], tokens in the flattened order of the input batch.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._recording = False
        self._forced: Tensor | None = None
        self._taken: list[Tensor] = []
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(layer))

    @property
    def taken(self) -> Tensor:
        return torch.stack(self._taken, dim=1)

    @contextlib.contextmanager
    def forcing(self, routes: Tensor | None) -> Iterator[None]:
        """Within: routers take `routes` [tokens, moe_layers, top_k] wherever they are not OWN_ROUTE; None = all own."""
        self._recording, self._forced, self._taken = True, routes, []
        try:
            yield
        finally:
            self._recording, self._forced = False, None

    def _hook(self, layer: int) -> Any:
        def replace(router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if not self._recording:
                return output
            logits, scores, own = output
            chosen = own
            if self._forced is not None:
                forced = self._forced[:, layer]
                chosen = torch.where(forced == OWN_ROUTE, own, forced)
                scores = router_scores(logits, chosen, router.norm_topk_prob)
            self._taken.append(chosen.detach())
            return logits, scores, chosen

        return replace


def router_scores(logits: Tensor, experts: Tensor, normalise: bool) -> Tensor:
    """The weights of `experts` under the router's own logits."""
    scores = torch.softmax(logits, dtype=torch.float, dim=-1).gather(-1, experts)
    if normalise:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores.to(logits.dtype)


def pad_sequences(sequences: Sequence[Sequence[int]]) -> Tensor:
    """[sequences, longest]; padding on the right, which a causal model never looks at from the left."""
    longest = max(map(len, sequences))
    return torch.tensor([[*s, *([0] * (longest - len(s)))] for s in sequences])


def pad_routes(routes: Sequence[Routes], length: int) -> Tensor:
    """[sequences, length, moe_layers, top_k]; OWN_ROUTE after the end of each."""
    rows = [
        np.pad(r, ((0, length - len(r)), (0, 0), (0, 0)), constant_values=OWN_ROUTE)
        for r in map(np.asarray, routes)
    ]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


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
