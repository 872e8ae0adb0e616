"""Replay of what the engine chose: forward passes of a Hugging Face MoE model on given routes, and logits under sampling masks.

Owns: the hooks on a model's routers, the shape of a routing matrix that can be replayed, and masked logits.

Always holds:
- Replaying replaces which experts a token goes to, never how much each counts. Scores come from the model's own router logits
  at the given experts, through the router's own softmax and normalisation. So gradients reach the router.
- Positions are input positions: logits at position i score the token at i + 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.client.decode import SamplingMasks

# In a route tensor: this position takes the model's own route.
OWN_ROUTE = -1
# Routers that take the best of a softmax over all experts, and whether they then normalise.
# None: as their norm_topk_prob says.
ROUTERS: Mapping[str, bool | None] = {
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
    "Qwen3NextTopKRouter": None,
    "Qwen3_5MoeTopKRouter": True,
    "OlmoeTopKRouter": None,
    "MixtralTopKRouter": True,
}


class RouterTap:
    """Records the routes of every router of `model` within `forcing`, and replaces them when given some.

    routers: in the order of layers; none, when the model has none or some of a kind that is not in ROUTERS.
    `taken` after a forward: [tokens, moe_layers, top_k], tokens in the flattened order of the input batch.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.routers: list[Any] = routers_of(model)
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
                scores = router_scores(logits, chosen, normalises(router)).to(scores.dtype)
            self._taken.append(chosen.detach())
            return logits, scores, chosen

        return replace


def routers_of(model: torch.nn.Module) -> list[Any]:
    """The routers of `model` in the order of layers; [] when one of them is of a kind that cannot be replayed."""
    found = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    return found if all(type(m).__name__ in ROUTERS for m in found) else []


def normalises(router: Any) -> bool:
    """Whether `router`, of a kind in ROUTERS, scales the weights of its chosen experts to a sum of 1."""
    known = ROUTERS[type(router).__name__]
    return bool(router.norm_topk_prob) if known is None else known


def router_scores(logits: Tensor, experts: Tensor, normalise: bool) -> Tensor:
    """The weights of `experts` under the router's own logits, [tokens, top_k] in the logits' dtype.

    logits: [tokens, experts of the layer]. experts: numbers of the chosen ones, [tokens, top_k].
    """
    scores = torch.softmax(logits, dtype=torch.float, dim=-1).gather(-1, experts)
    if normalise:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores.to(logits.dtype)


def check_routes(routes: NDArray[Any], positions: int, layers: int, top_k: int, experts: int) -> str | None:
    """The reason why `routes` cannot be replayed over `positions` input positions; None if they can.

    layers: MoE layers of the model. top_k: how many experts a token goes to. experts: how many each layer has.
    """
    if not layers:
        return "this model has no MoE routers with a choice that can be replayed"
    if routes.shape != (positions, layers, top_k):
        return f"has shape {list(routes.shape)}, expected [{positions}, {layers}, {top_k}]: tokens, MoE layers, experts"
    if routes.dtype.kind == "f" and not np.array_equal(routes, np.trunc(routes)):
        return "holds a number that is not a whole one"
    if ((routes < OWN_ROUTE) | (routes >= experts)).any():
        return f"names an expert that is not 0 to {experts - 1} ({OWN_ROUTE}: the model's own route)"
    own = routes == OWN_ROUTE
    if (own.any(-1) != own.all(-1)).any():
        return f"mixes {OWN_ROUTE} with experts for one token and layer"
    ordered = np.sort(routes, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & ~own[..., 1:]).any():
        return "names an expert twice for one token and layer"
    return None


def mask_logits(logits: Tensor, masks: SamplingMasks) -> Tensor:
    """The logits with minus infinity for what a token was not drawn from. Divided by the temperature, their log_softmax at the
    token is what `sampling_logprob` is; gradients reach the tokens that were left.

    logits: [tokens, vocab], at the positions that gave the tokens. masks: of as many tokens. A vocabulary that is padded
    for the trainer has further columns, which a full row would take in: cut them off first.
    """
    sizes = torch.from_numpy(np.diff(masks.offsets)).to(logits.device)
    if len(sizes) != len(logits):
        raise ValueError(f"{len(sizes)} masks for the logits of {len(logits)} tokens")
    left = (sizes == 0).unsqueeze(1).repeat(1, logits.shape[1])
    rows = torch.arange(len(sizes), device=logits.device).repeat_interleave(sizes)
    left[rows, torch.from_numpy(masks.ids.astype(np.int64)).to(logits.device)] = True
    return logits.masked_fill(~left, -torch.inf)


def pad_sequences(sequences: Sequence[Sequence[int]]) -> Tensor:
    """The token ids as one tensor [sequences, longest]. Shorter sequences get zeros on the right: in a causal model, no token
    attends to a later one."""
    longest = max(map(len, sequences))
    return torch.tensor([[*s, *([0] * (longest - len(s)))] for s in sequences])


def pad_routes(routes: Sequence[NDArray[Any]], length: int) -> Tensor:
    """The routes as one tensor [sequences, length, moe_layers, top_k] of int64, with OWN_ROUTE after the end of each.

    routes: of each sequence, [tokens, moe_layers, top_k].
    """
    rows = [
        np.pad(r, ((0, length - len(r)), (0, 0), (0, 0)), constant_values=OWN_ROUTE)
        for r in map(np.asarray, routes)
    ]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
