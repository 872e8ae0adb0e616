"""Near ties of the tokens that vLLM draws: choices that another rounding may make differently. docs/engines.md has the rule.

The filters go in vLLM's order: min_p, then top_k, which leaves all tokens that are as heavy as the last one, then top_p.

Always holds: it computes with what vLLM drew from and what it left, and changes nothing of it. The thresholds come with the
request.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

numbers = importlib.import_module("midstream_vllm_numbers")
#: vLLM draws greedily below this temperature.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class TieLimits:
    """Of rows, [rows, 1] each. share, of_sum: how much rounding may change a logit, as a share of the row's largest one, and a
    sum of probabilities. top_k: 0 leaves all."""

    share: torch.Tensor
    of_sum: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[Any], device: Any) -> TieLimits:
        """params: vLLM's sampling parameters of each row, with thresholds in their `extra_args`."""
        found = [
            (*numbers.said(p, numbers.NEAR, (0.0, 0.0)), p.temperature, p.top_k, p.top_p, p.min_p)
            for p in params
        ]
        return cls(*torch.tensor(found, dtype=torch.float64, device=device).T.unsqueeze(-1))


def is_greedy(params: Any) -> bool:
    return bool(params.temperature < GREEDY_BELOW)


def is_filtered(params: Any) -> bool:
    return not is_greedy(params) and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def greedy_ties(scores: torch.Tensor, largest: torch.Tensor, limits: TieLimits) -> torch.Tensor:
    """The bits of rows whose best token was taken. scores: [rows, vocab], from which it was. largest: [rows, 1], of the model's
    logits."""
    best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
    near: torch.Tensor = best[:, :1] - best[:, -1:] <= largest * limits.share
    return near[:, 0].long().mul(int(numbers.NEAR_GREEDY))


def filter_ties(
    scores: torch.Tensor, kept: torch.Tensor, drawn: torch.Tensor, largest: torch.Tensor, limits: TieLimits
) -> torch.Tensor:
    """The bits of rows with filters.

    scores: [rows, vocab] before temperature and filters. kept: [rows, vocab], what these left.
    drawn: [rows], the tokens. largest: as for `greedy_ties`.
    """
    logs = scores / limits.temperature
    slack = largest * limits.share / limits.temperature
    best = logs.amax(-1, keepdim=True)
    # The logarithm of 0 leaves all.
    heavy_enough = best + limits.min_p.log()
    last_of_k = _last_of_k(logs, limits.top_k)
    heavy = (logs >= heavy_enough) & logs.isfinite()
    ranked = heavy & (logs >= last_of_k)
    weights = (logs - best).exp()
    whole, mass = ((weights * those).sum(-1, keepdim=True) for those in (ranked, kept))
    least = logs.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    own, left_out = (
        logs.gather(-1, drawn.long().unsqueeze(-1)),
        logs.masked_fill(kept, -torch.inf).amax(-1, True),
    )
    as_heavy = own - left_out <= slack

    off = slack * limits.top_p * (1 - limits.top_p) + limits.of_sum
    cut_by_p = (ranked & ~kept).any(-1, keepdim=True)
    several = kept.sum(-1, keepdim=True) > 1
    before = (mass - (least - best).exp()) / whole
    near_p = ((mass / whole - limits.top_p).abs() <= off) | several & (limits.top_p - before <= off)
    near_p = (near_p | cut_by_p & as_heavy) & (limits.top_p < 1)

    # Equal ones are all left, and another implementation may leave k of them.
    tied = ranked.sum(-1, keepdim=True) > limits.top_k
    cut_by_k = (heavy & (logs < last_of_k)).any(-1, keepdim=True) & ~cut_by_p
    near_k = cut_by_k & as_heavy | tied & ((own - last_of_k <= slack) | (limits.top_p < 1))
    near_k = near_k & (limits.top_k > 0)

    at_border = (logs - heavy_enough).abs() <= slack
    near_min = (at_border & (logs >= last_of_k - slack)).any(-1, keepdim=True) & (limits.min_p > 0)
    found: torch.Tensor = (
        near_k * numbers.NEAR_TOP_K + near_p * numbers.NEAR_TOP_P + near_min * numbers.NEAR_MIN_P
    )
    return found[:, 0]


def _last_of_k(logs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the k-th largest of each row; -inf where all are left."""
    places = top_k.long().clamp(max=logs.shape[-1])
    most = int(places.max())
    if most == 0:
        return torch.full_like(places, -torch.inf, dtype=logs.dtype)
    ordered = logs.topk(most, dim=-1).values
    return ordered.gather(-1, (places - 1).clamp(min=0)).masked_fill(places == 0, -torch.inf)
