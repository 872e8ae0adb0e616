"""How near a choice may be to another one before a record calls it a near tie.

Owns: the thresholds, one for each dtype, and the margins of routers that run as modules.
Always holds: a threshold covers what two implementations were measured to differ by (docs/engines.md has the numbers), so
that a recomputation that differs by rounding alone finds its other choice marked; a choice that no known rule explains is
marked, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: By dtype: what rounding may change the difference of two logits by, as a share of the largest logit of their row.
#: It holds for router logits and for the logits that tokens are drawn from.
NEAR_TIE = {"float32": 2e-5, "float16": 6e-3, "bfloat16": 5e-2}
#: What rounding may change a sum of probabilities by, when it is added in float32; native/sample.h has the same.
SUM_ROUNDING = 2e-7


def near_tie(dtype: object) -> float:
    """The threshold of a torch dtype; one that is not listed gets the widest."""
    return NEAR_TIE.get(str(dtype).removeprefix("torch."), max(NEAR_TIE.values()))


class Routers:
    """How the routers of one model choose, learnt from what they chose."""

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
        # Those that explain all choices since one of them explained any.
        self._rules = self._all_rules

    def ties(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[tokens] bool, whether some layer's choice was near another.

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
                # Until the others are contradicted, any of them may be the one.
                near |= margin <= off
            elif not explained and rule == self._rules[-1]:
                near = margin <= off
        self._rules = explained or self._all_rules
        return near.any(dim=-1)

    def _margin(self, logits: torch.Tensor, chosen: torch.Tensor, score: str, grouped: bool) -> torch.Tensor:
        """[tokens, layers]: by how much the last of the chosen stood above the best that was not. Negative: not the rule."""
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
        return torch.minimum(between, groups / 2)  # a group's score is a sum of two


def _biases(routers: Sequence[Any]) -> torch.Tensor | None:
    """What is added to the scores before the choice, [layers, experts]."""
    found = [
        next((t for n, t in _tensors(router) if n.endswith("e_score_correction_bias")), None)
        for router in routers
    ]
    if any(bias is None for bias in found):
        return None
    return torch.stack([bias.detach().float().reshape(-1) for bias in found if bias is not None])


def _tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
