"""Near ties of routers that run as PyTorch modules: how near a router's choice was to another one.

Always holds: the thresholds (engine/step.py) cover the differences that were measured between implementations; docs/engines.md
has the numbers. So a recomputation that differs by rounding alone finds its other choice marked. A choice that no known rule
explains is marked, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Routers:
    """The rule by which the routers of one model choose, learnt from their choices."""

    def __init__(self, routers: Sequence[Any], tie: float) -> None:
        """routers: one module per MoE layer, all of one class."""
        self._tie = tie
        self._bias = _biases(routers)
        groups = [getattr(routers[0], name, None) for name in ("num_group", "n_group")]
        self._groups = int(next((g for g in groups if g), 1))
        self._groups_kept = int(getattr(routers[0], "topk_group", None) or self._groups)
        grouped = [True, False] if self._groups > self._groups_kept else [False]
        scores = ["logits"] if self._bias is None else ["sigmoid", "softmax"]
        self._all_rules = [(score, grouping) for score in scores for grouping in grouped]
        # The rules that explain every choice so far; all rules while none has explained any.
        self._rules = self._all_rules

    def ties(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[tokens] bool: whether the choice of any layer was near another one.

        logits: [tokens, layers, experts]; chosen: [tokens, layers, top_k].
        """
        logits = logits.float()
        rounding = self._tie * logits.abs().amax(dim=-1)
        near = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
        explained = []
        for rule in self._rules:
            margin = self._margin(logits, chosen, *rule)
            # Both scores have a slope of at most 1/4.
            off = rounding if rule[0] == "logits" else rounding / 4
            if bool((margin >= -off).all()):
                explained.append(rule)
                # Any rule that no choice has contradicted may be the right one.
                near |= margin <= off
            elif not explained and rule == self._rules[-1]:
                near = margin <= off
        self._rules = explained or self._all_rules
        return near.any(dim=-1)

    def _margin(self, logits: torch.Tensor, chosen: torch.Tensor, score: str, grouped: bool) -> torch.Tensor:
        """[tokens, layers]: how far the last chosen expert stood above the best one that was not chosen.

        A negative margin shows that this is not the rule.
        """
        scores = logits
        if self._bias is not None:
            scores = (logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)) + self._bias
        taken = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter(-1, chosen, True)
        lowest = scores.gather(-1, chosen).amin(dim=-1)
        others = scores.masked_fill(taken, -torch.inf)
        if not grouped:
            return lowest - others.amax(dim=-1)
        parts = scores.view(*scores.shape[:-1], self._groups, -1)
        best = parts.amax(dim=-1) if self._bias is None else parts.topk(2, dim=-1).values.sum(dim=-1)
        ranked, order = best.sort(dim=-1, descending=True)
        kept = torch.zeros(best.shape, dtype=torch.bool, device=best.device)
        kept.scatter_(-1, order[..., : self._groups_kept], True)
        open_ = kept.unsqueeze(-1).expand(parts.shape).flatten(-2)
        between = lowest - others.masked_fill(~open_, -torch.inf).amax(dim=-1)
        groups = ranked[..., self._groups_kept - 1] - ranked[..., self._groups_kept]
        # A group's score is a sum of two.
        return torch.minimum(between, groups / 2)


def _biases(routers: Sequence[Any]) -> torch.Tensor | None:
    """The biases that are added to the scores before the choice, [layers, experts]; None when a router has none."""
    found = []
    for router in routers:
        tensors = (*router.named_parameters(), *router.named_buffers())
        found += [t for name, t in tensors if name.endswith("e_score_correction_bias")][:1]
    if len(found) < len(routers):
        return None
    return torch.stack([bias.detach().float().reshape(-1) for bias in found])
