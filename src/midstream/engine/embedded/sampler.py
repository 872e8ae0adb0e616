"""From logits to tokens and log-probabilities.

Owns: penalties, grammar masks, temperature and filters, the random stream, both kinds of log-probability.
Always holds:
- The random number of a token depends only on (seed, choice index, position): batch, cache and replica do not matter.
- `logprob` is the raw model's (float32 log-softmax of the unmodified logits); `sampling_logprob` is the log-probability
  under the distribution the token was really drawn from. Greedy draws from a point mass: its sampling logprob is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from midstream.types import SamplingParams

GREEDY_BELOW = 1e-5  # dividing logits by less overflows float32
SEED_MASK = (1 << 64) - 1


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 over the counter (Steele et al., 2014).

    native/sample.h has the same function.
    """
    state = _mix64((seed & SEED_MASK) ^ _mix64((index + 1) * 0x9E3779B97F4A7C15))
    return (_mix64(state + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    z &= SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)


@dataclass(slots=True)  # not frozen: one is made per token, and freezing doubles what that costs
class SampleRow:
    """What the sampler needs to know of one sequence. history: prompt then generated tokens.

    mask: the tokens its grammar allows, bit i (little-endian) for token i; None: all of them.
    """

    params: SamplingParams
    index: int
    position: int  # of the token to be sampled, from 0 at the first prompt token
    history: Sequence[int]
    prompt_len: int
    top_logprobs: int
    mask: bytes | None = None


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    top: list[list[tuple[int, float]]]  # per row, best first; empty when not asked for

    @property
    def columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.logprobs, self.sampling_logprobs, self.top


def is_unmodified(row: SampleRow) -> bool:
    """Whether the row is drawn from the logits as they are: no penalty, no bias, no grammar."""
    return row.mask is None and not _has_penalty(row.params)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """One token per row. logits: [rows, vocab], any float dtype, unmodified model output."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    scores = _masked(_penalised(logits.float(), rows), rows)
    temperatures = [r.params.temperature for r in rows]
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
    greedy = temperature < GREEDY_BELOW
    probs = torch.softmax(scores / torch.where(greedy, torch.ones_like(temperature), temperature), dim=-1)
    probs = _filtered(probs, rows)
    draws = np.array([uniform(r.params.seed, r.index, r.position) for r in rows])
    drawn = _inverse_cdf(probs, torch.from_numpy(draws).to(logits.device))
    tokens = torch.where(greedy[:, 0], scores.argmax(dim=-1), drawn)
    picked = tokens.unsqueeze(1)
    chosen = probs.gather(1, picked).log()[:, 0]
    sampling = torch.where(greedy[:, 0], torch.zeros_like(chosen), chosen)
    return Sampled(
        tokens=tokens.tolist(),
        logprobs=raw.gather(1, picked)[:, 0].tolist(),
        sampling_logprobs=sampling.tolist(),
        top=_top(raw, [r.top_logprobs for r in rows]),
    )


@torch.inference_mode()
def score(logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
    """Raw log-probability of a given next token per row: prompt scoring. logits: [rows, vocab]."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    picked = torch.tensor(list(targets), device=logits.device).unsqueeze(1)
    values = raw.gather(1, picked)[:, 0].tolist()
    return Sampled(list(targets), values, values, _top(raw, top_logprobs))


class TorchSampler:
    """The functions of this module, where there are no native kernels."""

    sample = staticmethod(sample)
    score = staticmethod(score)


def _top(raw: torch.Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    most = max(counts, default=0)
    if most == 0:
        return [[] for _ in counts]
    values, ids = raw.topk(min(most, raw.shape[-1]), dim=-1)
    pairs = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(row_ids[:n], row_values[:n], strict=True)) for row_ids, row_values, n in pairs]


def _penalised(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Repetition penalty over prompt and output (Keskar et al., 2019), OpenAI presence/frequency over output, bias."""
    changed = [i for i, r in enumerate(rows) if _has_penalty(r.params)]
    if not changed:
        return scores
    scores = scores.clone()
    for i in changed:
        row, params = rows[i], rows[i].params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(row.history)), device=scores.device)
            values = scores[i, seen]
            scores[i, seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(row.history[row.prompt_len :]).items():
                scores[i, token] -= params.presence_penalty + count * params.frequency_penalty
        for token, bias in params.logit_bias.items():
            scores[i, token] += bias
    return scores


def _masked(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Minus infinity where a row's grammar forbids the token; rows without a grammar are untouched."""
    masks = {i: r.mask for i, r in enumerate(rows) if r.mask is not None}
    if not masks:
        return scores
    bits = ~np.frombuffer(b"".join(masks.values()), dtype=np.uint8).reshape(len(masks), -1)
    unpacked = np.unpackbits(bits, axis=1, count=scores.shape[-1], bitorder="little").view(np.bool_)
    forbidden = torch.from_numpy(unpacked).to(scores.device)
    if len(masks) == len(rows):
        return scores.masked_fill(forbidden, -torch.inf)
    scores = scores.clone()
    for i, row in zip(masks, forbidden, strict=True):
        scores[i].masked_fill_(row, -torch.inf)
    return scores


def _has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
    )


def _filtered(probs: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Zero what top-k, then top-p, then min-p exclude, and renormalise; rows without a filter are untouched."""
    vocab = probs.shape[-1]
    limited = [
        i
        for i, r in enumerate(rows)
        if r.params.temperature >= GREEDY_BELOW
        and (0 < r.params.top_k < vocab or r.params.top_p < 1 or r.params.min_p > 0)
    ]
    if not limited:
        return probs
    where = torch.tensor(limited, device=probs.device)
    ordered, order = probs[where].sort(dim=-1, descending=True, stable=True)
    params = [rows[i].params for i in limited]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=probs.device, dtype=ordered.dtype).unsqueeze(1)

    rank = torch.arange(vocab, device=probs.device).unsqueeze(0)
    keep = rank < column([p.top_k if p.top_k > 0 else vocab for p in params])
    ordered = ordered * keep
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    keep &= ordered.cumsum(dim=-1) - ordered < column([min(max(p.top_p, 0.0), 1.0) for p in params])
    keep &= ordered >= column([p.min_p for p in params]) * ordered[:, :1]
    keep[:, 0] = True
    ordered = ordered * keep
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    result = probs.clone()
    result[where] = torch.zeros_like(ordered).scatter(1, order, ordered)
    return result


def _inverse_cdf(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw; never one of probability zero."""
    cumulative = probs.double().cumsum(dim=-1)
    threshold = draws.unsqueeze(1) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(picked, last)
