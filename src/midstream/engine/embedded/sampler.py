"""From logits to tokens and log-probabilities.

Owns: penalties, grammar masks, temperature and filters, the random stream, both kinds of log-probability, and the choice
between these functions and the CPU kernel.
Always holds:
- The random number of a token depends only on (seed, choice index, position): batch, cache and replica do not matter.
- A row's own parameters alone decide whether the kernel draws it, so its token does not depend on the batch.
- `logprob` is the raw model's: float32 log-softmax of the unmodified logits. `sampling_logprob` is the log-probability under
  the distribution that the token was drawn from. Greedy draws from a point mass: its sampling logprob is 0.
- A row's mask has the tokens that this distribution is over: its penalised logits, divided by the temperature and normalised
  over the mask, give `sampling_logprob`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from midstream.core.config import EngineSettings
from midstream.core.masks import ALONE, EVERY
from midstream.core.types import NEAR_GREEDY, NEAR_MIN_P, NEAR_TOP_K, NEAR_TOP_P, SamplingParams
from midstream.engine.step import (
    GREEDY_BELOW,
    SEED_MASK,
    SUM_ROUNDING,
    Sampled,
    SampleRow,
    mask_of,
    near_tie,
)
from midstream_kernels import CpuSampler, KernelsUnavailable, RowMasks


class Sampler:
    """Draws with the CPU kernel where there is one and it can, and with the functions of this module elsewhere."""

    def __init__(self, kernel: CpuSampler | None = None) -> None:
        self._kernel = kernel

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """One token per row. logits: [rows, vocab], unmodified model output."""
        kernel = self._kernel
        if kernel is None or not kernel.takes(logits):
            return sample(logits, rows)
        others = sorted({*_penalised_rows(rows), *_masked_rows(rows)})
        if not others:
            return _drawn(kernel, logits, rows)
        plain = sorted(set(range(len(rows))) - set(others))
        zeros = [0.0] * len(rows)
        merged = Sampled(
            [0] * len(rows), zeros, [*zeros], [[] for _ in rows], [0] * len(rows), [None] * len(rows)
        )
        parts = [(others, sample(logits[others], [rows[i] for i in others]))]
        if plain:
            parts.append((plain, _drawn(kernel, logits[plain], [rows[i] for i in plain])))
        for where, part in parts:
            for to, found in zip(merged.columns, part.columns, strict=True):
                for i, value in zip(where, found, strict=True):
                    to[i] = value
        return merged

    def score(self, logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
        """The raw log-probability of a given next token per row: prompt scoring. logits: [rows, vocab]."""
        if self._kernel is not None and self._kernel.takes(logits):
            return Sampled(*self._kernel.score(logits, targets, top_logprobs), [None] * len(targets))
        return score(logits, targets, top_logprobs)


def _drawn(kernel: CpuSampler, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    numbers = [(r.params.temperature, r.params.top_k, r.params.top_p, r.params.min_p) for r in rows]
    given = np.array(numbers, dtype=np.float32)
    temperatures, filters = given[:, 0].copy(), given[:, 1:].copy()
    temperatures[temperatures < GREEDY_BELOW] = 0.0
    counters = np.array([(r.params.seed & SEED_MASK, r.index, r.position) for r in rows], dtype=np.uint64)
    top, tie = [r.top_logprobs for r in rows], near_tie(logits.dtype)
    masks: list[bytes | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.wants_mask]
    if not asked:
        return Sampled(*kernel.sample(logits, temperatures, filters, counters, tie, top), masks)
    drawn_from = RowMasks(*logits.shape)
    columns = kernel.sample(logits, temperatures, filters, counters, tie, top, drawn_from)
    made = drawn_from.all()
    for i in asked:
        masks[i] = made[i] or EVERY
    return Sampled(*columns, masks)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 over the counter (Steele et al., 2014).

    midstream_kernels/kernels/sample.h has the same function.
    """
    state = _mix64((seed & SEED_MASK) ^ _mix64((index + 1) * 0x9E3779B97F4A7C15))
    return (_mix64(state + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    z &= SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """See Sampler.sample. logits: of any float dtype."""
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
        masks=_masks(scores, probs, rows),
    )


@torch.inference_mode()
def score(logits: torch.Tensor, targets: Sequence[int], top_logprobs: Sequence[int]) -> Sampled:
    """See Sampler.score."""
    raw = torch.log_softmax(logits.float(), dim=-1)
    picked = torch.tensor(list(targets), device=logits.device).unsqueeze(1)
    values = raw.gather(1, picked)[:, 0].tolist()
    return Sampled(
        list(targets), values, values, _top(raw, top_logprobs), [0] * len(values), [None] * len(values)
    )


def ranks_of(logits: torch.Tensor, targets: Sequence[int]) -> list[int]:
    """The place of each row's target among all tokens, from 1. logits: [rows, vocab]."""
    own = logits.gather(1, torch.tensor(list(targets), device=logits.device).unsqueeze(1))
    return ((logits > own).sum(dim=-1) + 1).tolist()


def _top(raw: torch.Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    most = max(counts, default=0)
    if most == 0:
        return [[] for _ in counts]
    values, ids = raw.topk(min(most, raw.shape[-1]), dim=-1)
    pairs = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(row_ids[:n], row_values[:n], strict=True)) for row_ids, row_values, n in pairs]


def _penalised(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Repetition penalty over prompt and output (Keskar et al., 2019), OpenAI presence/frequency over output, bias."""
    changed = _penalised_rows(rows)
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
            presence, frequency = params.presence_penalty, params.frequency_penalty
            _add(scores[i], {t: -(presence + n * frequency) for t, n in counts.items()})
        _add(scores[i], params.logit_bias)
    return scores


def _add(scores: torch.Tensor, amounts: Mapping[int, float]) -> None:
    """Add to all tokens in one operation. On a device, each operation is a kernel of its own."""
    if amounts:
        tokens = torch.tensor(list(amounts), device=scores.device)
        scores[tokens] += torch.tensor(list(amounts.values()), dtype=scores.dtype, device=scores.device)


def _masked(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Minus infinity where a row's grammar or limits forbid the token. Rows without a mask stay as they are."""
    masks = _masked_rows(rows)
    if not masks:
        return scores
    # A tokenizer may know more tokens than the model has logits, and limits know those of the logits.
    width = max(map(len, masks.values()))
    joined = b"".join(mask.ljust(width, b"\0") for mask in masks.values())
    bits = ~np.frombuffer(joined, dtype=np.uint8).reshape(len(masks), -1)
    unpacked = np.unpackbits(bits, axis=1, count=scores.shape[-1], bitorder="little").view(np.bool_)
    forbidden = torch.from_numpy(unpacked).to(scores.device)
    if len(masks) == len(rows):
        return scores.masked_fill(forbidden, -torch.inf)
    scores = scores.clone()
    for i, row in zip(masks, forbidden, strict=True):
        scores[i].masked_fill_(row, -torch.inf)
    return scores


def _penalised_rows(rows: Sequence[SampleRow]) -> list[int]:
    return [
        i
        for i, row in enumerate(rows)
        if (params := row.params).repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
    ]


def _masked_rows(rows: Sequence[SampleRow]) -> dict[int, bytes]:
    """By row, its mask."""
    return {i: row.mask for i, row in enumerate(rows) if row.mask is not None}


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    filters = 0 < params.top_k < vocab or params.top_p < 1 or params.min_p > 0
    return params.temperature >= GREEDY_BELOW and filters


def _masks(scores: torch.Tensor, probs: torch.Tensor, rows: Sequence[SampleRow]) -> list[bytes | None]:
    """Of the rows that want it, what was left. scores: behind penalties and limits. probs: what was drawn from."""
    masks: list[bytes | None] = [None] * len(rows)
    sets = []
    for i, row in enumerate(rows):
        if not row.wants_mask:
            continue
        if row.params.temperature < GREEDY_BELOW:
            masks[i] = ALONE
        elif row.mask is None and not _is_filtered(row.params, scores.shape[-1]):
            masks[i] = EVERY
        else:
            sets.append(i)
    if not sets:
        return masks
    filtered = torch.tensor(
        [_is_filtered(rows[i].params, scores.shape[-1]) for i in sets], device=scores.device
    )
    left = torch.where(filtered.unsqueeze(1), probs[sets] > 0, scores[sets] > -torch.inf)
    ids = left.nonzero()[:, 1].cpu().numpy()
    ends = left.sum(dim=-1).cumsum(dim=0).tolist()
    for i, one in zip(sets, np.split(ids, ends[:-1]), strict=True):
        # Of logits that are not finite nothing is left. They fail their request.
        masks[i] = mask_of(one) if len(one) else None
    return masks


@dataclass(frozen=True)
class Borders:
    """For rows with filters: how near the drawn token may be to what the filters cut off.

    near: bits of the borders where another rounding may keep another number of tokens. by: the bit of the filter that cut.
    left_out: the log-probability that the heaviest token it cut would have. slack: how much rounding may change a log weight.
    """

    rows: torch.Tensor
    near: torch.Tensor
    by: torch.Tensor
    left_out: torch.Tensor
    slack: torch.Tensor


def _filtered(
    probs: torch.Tensor, rows: Sequence[SampleRow], rounding: torch.Tensor
) -> tuple[torch.Tensor, Borders | None]:
    """Set to zero what top-k, then top-p, then min-p exclude, and renormalise. Rows without a filter stay as they are.

    rounding: [rows], how much rounding may change the difference of two logits.
    """
    vocab = probs.shape[-1]
    limited = [i for i, row in enumerate(rows) if _is_filtered(row.params, vocab)]
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
    edges = torch.cat([ordered.gather(1, last), ordered.gather(1, after)], 1)
    ratios = (edges / (min_p * ordered[:, :1])).log()
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
    """The near-tie bits of each row. chosen: [rows], log-probability of the drawn token after the filters."""
    ties = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    if borders is not None:
        # A token as heavy as one that was cut off might itself have been cut off.
        as_heavy = chosen[borders.rows] - borders.left_out <= borders.slack
        ties[borders.rows] = borders.near | borders.by * as_heavy
    if bool(greedy.any()):
        best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
        ties = torch.where(greedy, (best[:, 0] - best[:, -1] <= rounding) * NEAR_GREEDY, ties)
    return list(ties.tolist())


def _inverse_cdf(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative probability exceeds the draw, and never one of probability zero."""
    cumulative = probs.double().cumsum(dim=-1)
    threshold = draws.unsqueeze(1) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(picked, last)


def new_sampler(settings: EngineSettings) -> Sampler:
    if settings.kernels == "torch" or settings.device != "cpu":
        return Sampler()
    try:
        return Sampler(CpuSampler(max(1, settings.threads)))
    except KernelsUnavailable:
        # The log has the reason already, from loading.py.
        return Sampler()
