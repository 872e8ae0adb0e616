"""What a turn's sampling parameters make of the logits of a pass: penalties, limits, temperature and filters, in NumPy. Pure.

Owns: the sampling log-probability of a recorded token, computed again from its record, and whether a recorded mask is what the
filters leave. It shares no code with a sampler.
Always holds: where rounding may have put a filter's border elsewhere, what comes closest to the recorded number counts,
and each such mask is right. Parameters that a record does not have are never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from midstream.core.traces import TurnSampling
from midstream.engine.step import GREEDY_BELOW, NEAR_TIE, SUM_ROUNDING
from midstream.verify.claims import Claim
from midstream.verify.jobs import PassJob
from midstream.verify.readings import masks_of, mass, sought_by, temperature_of

#: In nats below the heaviest token: what is left may have a sum of 1 without such a weight.
FAINT = 30.0


def redrawn(claim: Claim, dtype: str, rounding: float = 1.0) -> Redrawn | None:
    """What hears the passes of the turn; None: it has no sampling log-probabilities, or not all that shaped them. rounding: how
    much of what the dtype allows."""
    recorded = claim.turn.sampling_logprobs
    if not recorded or None in recorded or not recomputable(claim.turn.sampling):
        return None
    return Redrawn(claim, rounding * NEAR_TIE.get(dtype, max(NEAR_TIE.values())))


def heard(drawn: Redrawn | None, first: int, job: PassJob) -> PassJob:
    """The job, whose rows `drawn` hears. first: the sampled token that its first row is of."""
    if drawn is None:
        return job
    return replace(job, look=lambda row, rows: drawn.hear(first + row, rows))


def recomputable(sampling: TurnSampling | None) -> bool:
    """Whether the record has all that shaped the distribution, and that is possible."""
    if sampling is None or sampling.grammar or sampling.bad_words:
        return False
    ids = (
        *sampling.logit_bias,
        *sampling.stop_token_ids,
        *sampling.allowed_token_ids,
        *chain(*sampling.bad_tokens),
    )
    return min(ids, default=0) >= 0 <= sampling.temperature and sampling.repetition_penalty > 0


def is_plain(sampling: TurnSampling | None) -> bool:
    """Whether tokens were drawn from the model's own distribution."""
    return sampling == TurnSampling()


def is_greedy(sampling: TurnSampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def grown(sampling: TurnSampling) -> float:
    """How often as large rounding of logits is at most, behind their division and penalties."""
    return 1.0 if is_greedy(sampling) else max(1.0, scaled(sampling) / sampling.temperature)


def scaled(sampling: TurnSampling) -> float:
    """How often as large penalties make a logit, and its rounding, at most."""
    by = sampling.repetition_penalty
    return max(by, 1.0 / by)


def is_filtered(sampling: TurnSampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


class Shaped:
    """The logits of a turn's passes behind penalties and limits. changes: whether there are any."""

    def __init__(self, claim: Claim, sampling: TurnSampling) -> None:
        self._sampling = sampling
        self._prompt = frozenset(claim.prompt) if sampling.repetition_penalty != 1.0 else frozenset[int]()
        self._sampled = claim.turn.token_ids
        given = sampling
        self.changes = given.repetition_penalty != 1.0 or bool(
            given.presence_penalty
            or given.frequency_penalty
            or given.logit_bias
            or given.min_tokens
            or given.allowed_token_ids
            or given.bad_tokens
        )

    def of(self, token: int, row: np.ndarray) -> np.ndarray:
        """row: the logits of the pass that sampled token number `token`, in float64."""
        given, made = self._sampling, self._sampled[:token]
        found = row.copy()
        if given.repetition_penalty != 1.0:
            seen = np.array([*self._prompt.union(made)], dtype=np.int64)
            values = found[seen]
            by = given.repetition_penalty
            found[seen] = np.where(values > 0, values / by, values * by)
        if given.presence_penalty or given.frequency_penalty:
            for one, count in Counter(made).items():
                found[one] -= given.presence_penalty + count * given.frequency_penalty
        for one, amount in given.logit_bias.items():
            if one < len(row):
                found[one] += amount
        forbidden = self._forbidden(made, len(row))
        if forbidden is not None:
            found[forbidden] = -np.inf
        return found

    def _forbidden(self, made: Sequence[int], vocab: int) -> np.ndarray | None:
        given = self._sampling
        none: list[int] = [*given.stop_token_ids] if len(made) < given.min_tokens else []
        none += [bad[-1] for bad in given.bad_tokens if bad and _ends_with(made, bad[:-1])]
        if not none and not given.allowed_token_ids:
            return None
        forbidden = np.full(vocab, bool(given.allowed_token_ids))
        forbidden[[one for one in given.allowed_token_ids if one < vocab]] = False
        forbidden[[one for one in none if one < vocab]] = True
        return forbidden


class Redrawn:
    """Hears the passes of a turn, and has the log-probability of each draw.

    slack: how much rounding may change the difference of two logits, as a share of the largest one. values: of each token; NaN
    where no pass was heard. wrong_masks: tokens whose mask these parameters do not leave.
    """

    def __init__(self, claim: Claim, slack: float) -> None:
        sampling = claim.turn.sampling
        assert sampling is not None
        self._claim, self._sampling, self._slack = claim, sampling, slack
        self._shaped = Shaped(claim, sampling)
        self._recorded = np.array(claim.turn.sampling_logprobs, dtype=float)
        self.values = np.full(len(claim.labels), np.nan)
        self._kept: Sequence[np.ndarray | None] | None = None
        self._whole: frozenset[int] | None = None
        self.rows: dict[int, np.ndarray] = {}
        self.wrong_masks = list[int]()
        # How far the recorded raw log-probabilities are off the rows.
        self._rounding = 0.0

    def begin(self, vocab: int) -> None:
        """vocab: of the model."""
        try:
            self._kept = masks_of(self._claim, vocab) if self._claim.turn.sampling_masks else None
        except ValueError:
            # Which mask it is, the verifier says elsewhere.
            self._kept = None
        every = self._kept or [None] * len(self.values)
        self._whole = frozenset(sought_by(self._recorded, every))

    def hear(self, first: int, rows: np.ndarray) -> None:
        # What a forged record asks for may be no number.
        with np.errstate(all="ignore"):
            for at, row in enumerate(rows[: len(self.values) - first], start=first):
                self._read(at, row.astype(np.float64))

    def _read(self, at: int, row: np.ndarray) -> None:
        if self._whole is None:
            self.begin(len(row))
        assert self._whole is not None
        if is_greedy(self._sampling):
            self.values[at] = 0.0
            return
        shaped = self._shaped.of(at, row)
        if at in self._whole:
            self.rows[at] = shaped
            own = float(row[self._claim.turn.token_ids[at]] - mass(row, -1))
            self._rounding = max(self._rounding, abs(own - self._claim.logprobs[at]))
        warm = shaped / self._sampling.temperature
        own = float(warm[self._claim.turn.token_ids[at]])
        slack = self._slack * float(np.abs(row).max()) * scaled(self._sampling) / self._sampling.temperature
        kept = None
        if self._kept is not None:
            kept = self._kept[at]
            if not may_leave(warm, np.arange(len(row)) if kept is None else kept, self._sampling, slack):
                self.wrong_masks.append(at)
        if kept is not None:
            self.values[at] = own - float(mass(warm[kept], -1))
            return
        most, least = _masses(warm, own, self._sampling, slack)
        # Of a token that cannot have been drawn the number is infinite, or none.
        near = float(np.clip(self._recorded[at], own - most, own - least))
        self.values[at] = near if np.isfinite(own - most) else own - most

    def other_temperature(self, tolerance: float) -> float | None:
        """The temperature that gives all recorded sampling log-probabilities, where that of the record does not."""
        if is_greedy(self._sampling) and not self.rows:
            return None
        kept = self._kept or [None] * len(self.values)
        off = max(tolerance, 2 * self._rounding) * scaled(self._sampling)
        return temperature_of(self.rows, self._claim.turn.token_ids, kept, self._recorded, off)


def may_leave(warm: np.ndarray, kept: np.ndarray, sampling: TurnSampling, slack: float) -> bool:
    """Whether filters may leave just these tokens. warm: what they see. slack: how much rounding changes a logit."""
    inside = np.zeros(len(warm), dtype=bool)
    inside[kept] = True
    left, out = warm[inside], float(warm[~inside].max(initial=-np.inf))
    lightest, heaviest = float(left.min()), float(warm.max())
    if lightest == -np.inf or out > lightest + slack:
        return False
    if not is_filtered(sampling):
        return out == -np.inf
    ranked = sampling.top_k if 0 < sampling.top_k < len(warm) else len(warm)
    floor = heaviest + np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    over = warm if ranked == len(warm) else np.partition(warm, -ranked)[-ranked:]
    # The least and the largest mass that top_p may have seen.
    wholes = [(float(mass(over, -1)),) * 2]
    if sampling.min_p > 0:
        # Engines apply top_p to what top_k left, before or behind min_p. Rounding moves the border of that, too.
        ends = (min(floor + by, heaviest) for by in (slack, -slack))
        least, most = (float(mass(over[over >= end], -1)) for end in ends)
        wholes.append((least, most))
    # Equal weights may all be left.
    may_stay = int((left > lightest + slack).sum()) < ranked and lightest >= floor - slack
    cut = len(left) >= ranked or out < max(floor + slack, heaviest - FAINT)
    if sampling.top_p >= 1:
        return may_stay and cut
    inner, off = float(mass(left, -1)), slack * sampling.top_p * (1 - sampling.top_p) + SUM_ROUNDING
    return may_stay and any(
        (len(left) == 1 or np.exp(inner - most) - np.exp(lightest - most) < sampling.top_p + off)
        and (cut or np.exp(inner - least) >= sampling.top_p - off)
        for least, most in wholes
    )


def _masses(warm: np.ndarray, own: float, sampling: TurnSampling, slack: float) -> tuple[float, float]:
    """The logarithms of the largest and the least mass that filters may have left. slack: how much rounding changes a logit."""
    whole, vocab = float(mass(warm, -1)), len(warm)
    ranked = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    if ranked == vocab and sampling.top_p >= 1 and sampling.min_p <= 0:
        return whole, whole
    ordered = np.sort(warm)[::-1][:ranked]
    sums = np.cumsum(np.exp(ordered - whole))
    before = np.append(0.0, sums[:-1]) / sums[-1]
    top_p, ends = sampling.top_p, []
    for by in (slack, -slack):
        left = ranked
        if top_p < 1:
            left = int((before < top_p + by * top_p * (1 - top_p) + np.sign(by) * SUM_ROUNDING).sum())
        if sampling.min_p > 0:
            left = min(left, int((ordered >= ordered[0] + np.log(sampling.min_p) - by).sum()))
        # The token was drawn, so it was left.
        ends.append(max(left, int((ordered > own).sum()) + 1))
    return whole + float(np.log(sums[min(ends[0], ranked) - 1])), whole + float(
        np.log(sums[min(ends[1], ranked) - 1])
    )


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == tuple(end)
