"""What a token was drawn from, in plain NumPy and float64: from a model's logits to the distribution, in vLLM's order.

Owns: the order of penalties, bias, forbidden tokens, temperature and filters, written without any sampler's code.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from midstream.core.types import SamplingParams

Array = NDArray[np.float64]
# A filter may take a token that lies so close to its border, or leave it: of the probability summed, and of the logarithm.
BORDER_P, BORDER_LOG = 2e-6, 2e-5
GREEDY_BELOW = 1e-5


def log_softmax(values: Array) -> Array:
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())


def drawn_from(
    logits: Sequence[float] | Array,
    sampling: SamplingParams,
    prompt: Sequence[int],
    emitted: Sequence[int],
    allowed: Collection[int] | None = None,
    bad: Sequence[Sequence[int]] = (),
) -> list[Array]:
    """Log-probabilities of all tokens; several where one lies at a border. The arguments are those of `scores_of`."""
    scores = scores_of(logits, sampling, prompt, emitted, allowed, bad)
    if sampling.temperature < GREEDY_BELOW:
        return [np.where(np.arange(len(scores)) == scores.argmax(), 0.0, -np.inf)]
    return _filtered(scores / sampling.temperature, sampling)


def scores_of(
    logits: Sequence[float] | Array,
    sampling: SamplingParams,
    prompt: Sequence[int],
    emitted: Sequence[int],
    allowed: Collection[int] | None = None,
    bad: Sequence[Sequence[int]] = (),
) -> Array:
    """The logits behind bias and penalties, -inf for what is forbidden. emitted: the tokens generated before this one.

    allowed: by the grammar. bad: token sequences that must not be generated.
    """
    scores = np.array(logits, dtype=np.float64)
    for these in (allowed, sampling.allowed_token_ids or None):
        if these is not None:
            kept = np.zeros(len(scores), dtype=bool)
            kept[list(these)] = True
            scores[~kept] = -np.inf
    for *before, last in bad:
        if not before or list(emitted[-len(before) :]) == before:
            scores[last] = -np.inf
    if len(emitted) < sampling.min_tokens:
        scores[list(sampling.stop_token_ids)] = -np.inf
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    seen, penalty = list({*prompt, *emitted}), sampling.repetition_penalty
    if penalty != 1:
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, count in Counter(emitted).items():
            scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def is_firm(scores: Array, sampling: SamplingParams, token: int, rounding: float) -> bool:
    """Whether `token` stays, and all else that the filters leave, when logits differ by `rounding`.

    A token at the border of min_p is in the sum of top_p or is not, also where top_p leaves it out.
    """
    shifted = scores.copy()
    if sampling.temperature < GREEDY_BELOW:
        shifted[token] -= rounding
        return bool(shifted.argmax() == token)
    logs, slack = scores / sampling.temperature, rounding / sampling.temperature
    shifted = logs.copy()
    shifted[token] -= slack
    of_mass = slack * sampling.top_p * (1 - sampling.top_p) + 2e-7
    found = [left_by(logs, sampling, log, mass) for log, mass in ((0, 0), (slack, 0), (-slack, 0))]
    found += [left_by(logs, sampling, 0, mass) for mass in (of_mass, -of_mass)]
    found.append(left_by(shifted, sampling, 0, 0))
    summed = [left_by(logs, replace(sampling, top_p=1.0), log, 0) for log in (0, slack, -slack)]
    return all(len({(left > -np.inf).tobytes() for left in lefts}) == 1 for lefts in (found, summed))


def _filtered(scores: Array, sampling: SamplingParams) -> list[Array]:
    found = []
    logs = (-BORDER_LOG, BORDER_LOG) if sampling.min_p > 0 else (0.0,)
    masses = (-BORDER_P, BORDER_P) if sampling.top_p < 1 else (0.0,)
    for log, mass in itertools.product(logs, masses):
        found.append(log_softmax(left_by(scores, sampling, log, mass)))
    return found


def left_by(scores: Array, sampling: SamplingParams, log: float, mass: float) -> Array:
    """-inf for what the filters cut off. log, mass: how far the borders of min_p and top_p are moved."""
    left = scores.copy()
    if sampling.min_p > 0:
        left[left < left.max() + np.log(sampling.min_p) + log] = -np.inf
    if sampling.top_k > 0:
        left[left < np.sort(left)[-min(sampling.top_k, len(left))]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(left, kind="stable")
        summed = np.cumsum(np.exp(log_softmax(left))[order])
        gone = summed <= 1 - sampling.top_p + mass
        gone[-1] = False
        left[order[gone]] = -np.inf
    return left
