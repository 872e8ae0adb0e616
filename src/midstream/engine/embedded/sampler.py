"""From logits to tokens and log-probabilities.

Owns: penalties, grammar masks, temperature and filters, the random stream, both kinds of log-probability.
Always holds:
- The random number of a token depends only on (seed, choice index, position): batch, cache and replica do not matter.
- `logprob` is the raw model's (float32 log-softmax of the unmodified logits); `sampling_logprob` is the log-probability
  under the distribution the token was really drawn from. Greedy draws from a point mass: its sampling logprob is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from midstream.engine.embedded.ties import SUM_ROUNDING, near_tie
from midstream.types import NEAR_GREEDY, NEAR_MIN_P, NEAR_TOP_K, NEAR_TOP_P, SamplingParams

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
    near_ties: list[int]  # bits of NEAR_TIES, of the filters and of a greedy choice

    @property
    def columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.logprobs, self.sampling_logprobs, self.top, self.near_ties


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
    rounding = near_tie(logits.dtype) * logits.float().abs().amax(dim=-1)
    probs, borders = _filtered(probs, rows, rounding)
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
        near_ties=_near_ties(scores, rounding, greedy[:, 0], borders, chosen),
    )


@torch.inference_mode()
def score(logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
    """Raw log-probability of a given next token per row: prompt scoring. logits: [rows, vocab]."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    picked = torch.tensor(list(targets), device=logits.device).unsqueeze(1)
    values = raw.gather(1, picked)[:, 0].tolist()
    return Sampled(list(targets), values, values, _top(raw, top_logprobs), [0] * len(values))


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
            counts = Counter(row.history[row.prompt_len :])
            _add(
                scores[i],
                {t: -(params.presence_penalty + n * params.frequency_penalty) for t, n in counts.items()},
            )
        _add(scores[i], params.logit_bias)
    return scores


def _add(scores: torch.Tensor, amounts: Mapping[int, float]) -> None:
    """In one operation, however many tokens: on a device each would be a kernel of its own."""
    if amounts:
        tokens = torch.tensor(list(amounts), device=scores.device)
        scores[tokens] += torch.tensor(list(amounts.values()), dtype=scores.dtype, device=scores.device)


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


@dataclass(frozen=True)
class Borders:
    """How near the filters' borders are, of the rows that have filters.

    near: bits of borders where another rounding may keep another number of tokens. by, left_out: which filter cut, and the
    filtered probability that the heaviest of what it cut would have, so that a token as heavy as that is known.
    slack: what rounding may change a log weight by.
    """

    rows: torch.Tensor
    near: torch.Tensor
    by: torch.Tensor
    left_out: torch.Tensor
    slack: torch.Tensor


def _filtered(
    probs: torch.Tensor, rows: Sequence[SampleRow], rounding: torch.Tensor
) -> tuple[torch.Tensor, Borders | None]:
    """Zero what top-k, then top-p, then min-p exclude, and renormalise; rows without a filter are untouched.

    rounding: [rows], what rounding may change the difference of two logits by.
    """
    vocab = probs.shape[-1]
    limited = [
        i
        for i, r in enumerate(rows)
        if r.params.temperature >= GREEDY_BELOW
        and (0 < r.params.top_k < vocab or r.params.top_p < 1 or r.params.min_p > 0)
    ]
    if not limited:
        return probs, None
    where = torch.tensor(limited, device=probs.device)
    # Sums in float64: their own rounding must not move a border.
    ordered, order = probs[where].double().sort(dim=-1, descending=True, stable=True)
    params = [rows[i].params for i in limited]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=probs.device, dtype=ordered.dtype).unsqueeze(1)

    top_k = column([p.top_k if p.top_k > 0 else vocab for p in params])
    top_p = column([min(max(p.top_p, 0.0), 1.0) for p in params])
    min_p = column([p.min_p for p in params])
    slack = rounding[where].double().unsqueeze(1) / column([p.temperature for p in params])
    ranked = torch.arange(vocab, device=probs.device).unsqueeze(0) < top_k
    whole = (ordered * ranked).sum(dim=-1, keepdim=True)
    before = (ordered * ranked).cumsum(dim=-1) / whole - ordered / whole
    heavy = ordered >= min_p * ordered[:, :1]
    keep = ranked & (before < top_p) & heavy
    keep[:, 0] = True
    kept = ordered * keep
    mass = kept.sum(dim=-1, keepdim=True)
    result = probs.clone()
    filtered = (kept / mass).to(probs.dtype)
    result[where] = torch.zeros_like(filtered).scatter(1, order, filtered)

    count = keep.sum(dim=-1, keepdim=True)
    last, after = count - 1, count.clamp(max=vocab - 1)
    off = slack * top_p * (1 - top_p) + SUM_ROUNDING
    near_p = ((mass / whole - top_p).abs() <= off) | ((count > 1) & (top_p - before.gather(1, last) <= off))
    ratios = (
        torch.cat([ordered.gather(1, last), ordered.gather(1, after)], 1) / (min_p * ordered[:, :1])
    ).log()
    near_min = (ratios.abs() <= slack).any(dim=1, keepdim=True) & (min_p > 0)
    near = near_p * (top_p < 1) * NEAR_TOP_P + near_min * NEAR_MIN_P
    by_k, by_p = count >= top_k, mass / whole >= top_p
    by = torch.where(by_k, NEAR_TOP_K, torch.where(by_p, NEAR_TOP_P, 0)) * (count < vocab)
    left_out = (ordered.gather(1, after) / mass).log()
    return result, Borders(where, near[:, 0], by[:, 0], left_out[:, 0], slack[:, 0])


def _near_ties(
    scores: torch.Tensor,
    rounding: torch.Tensor,
    greedy: torch.Tensor,
    borders: Borders | None,
    chosen: torch.Tensor,
) -> list[int]:
    """chosen: [rows], log-probability of the drawn token after the filters."""
    ties = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    if borders is not None:
        # A token as heavy as one that was cut off might be the one cut off.
        as_heavy = chosen[borders.rows] - borders.left_out <= borders.slack
        ties[borders.rows] = borders.near | borders.by * as_heavy
    if bool(greedy.any()):
        best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
        ties = torch.where(greedy, (best[:, 0] - best[:, -1] <= rounding) * NEAR_GREEDY, ties)
    return list(ties.tolist())


def _inverse_cdf(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw; never one of probability zero."""
    cumulative = probs.double().cumsum(dim=-1)
    threshold = draws.unsqueeze(1) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(picked, last)
