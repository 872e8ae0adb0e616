"""Log-probabilities of a turn's tokens under each distribution that a trainer may compare: raw, masked, at a temperature. Pure.

Owns: what is read from the rows of a pass, and the search for the temperature that a turn was sampled with.
Always holds: a row's whole vocabulary is kept for a few tokens of a turn alone. A temperature is known only if it gives every
recorded sampling log-probability that it was sought with.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from midstream.core.masks import kept_ids
from midstream.verify.claims import Claim

#: Rows that are reduced together, and tokens of a turn by which its temperature is sought.
ROWS_AT_A_TIME, SOUGHT_BY = 64, 8
#: Temperatures that are tried: from, to, how many, and then how often the best one's surroundings are divided.
COLDEST, HOTTEST, TRIED, REFINED = 0.02, 50.0, 160, 60
#: How far a sampling log-probability is from the raw one, if it is of another distribution.
OTHER_BY = 1e-6
#: Two temperatures that are as good by so much are one.
SAME_BY = 1e-5


class Way(NamedTuple):
    """Which distribution: at the turn's temperature and with its penalties, and of the tokens in the mask alone."""

    tempered: bool
    masked: bool


RAW, SAMPLED = Way(False, False), Way(True, True)


class Reading:
    """Of each row of a job. ids: the token it scores. kept: those in its mask; None: every one. temperature: None: not known.

    whole: rows that are kept as they come. shaped: what penalties make of a row, which tempered ways take.
    """

    def __init__(
        self,
        ids: Sequence[int],
        kept: Sequence[np.ndarray | None],
        temperature: float | None,
        whole: Sequence[int] = (),
        shaped: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._shaped = shaped
        self._ids, self._kept, self._temperature = np.array(ids, dtype=np.int64), kept, temperature
        self._whole = frozenset(whole)
        self.rows: dict[int, np.ndarray] = {}
        count = len(ids)
        ways = [Way(tempered, masked) for tempered in (False, True) for masked in (False, True)]
        self._values = {way: np.zeros(count) for way in ways}

    def __call__(self, first: int, rows: np.ndarray) -> None:
        for at in range(0, len(rows), ROWS_AT_A_TIME):
            self._read(first + at, rows[at : at + ROWS_AT_A_TIME].astype(np.float64))

    def _read(self, first: int, rows: np.ndarray) -> None:
        # A job may go on behind the last token of this turn.
        rows = rows[: max(0, len(self._ids) - first)]
        here = slice(first, first + len(rows))
        plain = rows
        for warm in (False, True):
            by = (self._temperature or 1.0) if warm else 1.0
            if warm and self._shaped is not None:
                rows = np.array([self._shaped(first + at, row) for at, row in enumerate(plain)])
            own = rows[np.arange(len(rows)), self._ids[here]]
            every = mass(rows / by, -1)
            kept = np.array(
                [
                    every[i] if ids is None else mass(rows[i, ids] / by, -1)
                    for i, ids in enumerate(self._kept[here])
                ]
            )
            self._values[Way(warm, False)][here] = own / by - every
            self._values[Way(warm, True)][here] = own / by - kept
        for number in self._whole.intersection(range(here.start, here.stop)):
            self.rows[number] = plain[number - first]

    def of(self, way: Way) -> np.ndarray:
        """Of each token. Tempered ones are those at temperature 1 where no temperature is known."""
        return self._values[way]


def masks_of(claim: Claim, vocab: int) -> list[np.ndarray | None]:
    """The ids that each token was drawn from; None: every one, or there is no mask. Raises ValueError for what is no mask."""
    given = claim.turn.sampling_masks
    if given is None:
        return [None] * len(claim.labels)
    found: list[np.ndarray | None] = []
    for mask, token in zip(given, claim.turn.token_ids, strict=True):
        ids = kept_ids(b64decode(mask, validate=True), token)
        if ids is not None and ids[-1] >= vocab:
            raise ValueError(f"a sampling mask of id {ids[-1]}, of {vocab}")
        found.append(None if ids is None else np.array(ids, dtype=np.int64))
    return found


def drawn_otherwise(claim: Claim) -> bool:
    """Whether a sampling log-probability is not the raw one."""
    given = claim.turn.sampling_logprobs
    return given is not None and any(
        value is None or abs(value - raw) > OTHER_BY for value, raw in zip(given, claim.logprobs, strict=True)
    )


def sought_by(sampled: np.ndarray, kept: Sequence[np.ndarray | None]) -> list[int]:
    """Tokens whose sampling log-probability says something of the temperature: those that were not alone."""
    candidates = [at for at, ids in enumerate(kept) if (ids is None or len(ids) > 1) and sampled[at] < 0.0]
    if len(candidates) <= SOUGHT_BY:
        return candidates
    return [candidates[round(at)] for at in np.linspace(0, len(candidates) - 1, SOUGHT_BY)]


def temperature_of(
    rows: dict[int, np.ndarray],
    ids: Sequence[int],
    kept: Sequence[np.ndarray | None],
    sampled: np.ndarray,
    rounding: float,
    recorded: float | None = None,
) -> float | None:
    """The temperature that gives the sampling log-probabilities of the tokens with a row; None: none does, or none is asked.

    sampled: as recorded. rounding: how far they may be off at temperature 1. recorded: the temperature that the record has,
    which is tried first.
    """
    if not rows:
        return None

    def off(by: float) -> list[float]:
        return [abs(_at(row, ids[at], kept[at], by) - float(sampled[at])) for at, row in rows.items()]

    def mean(by: float) -> float:
        return sum(off(by)) / len(rows)

    def fits(by: float) -> bool:
        # Rounding of logits grows as they are divided.
        return max(off(by)) <= rounding * max(1.0, 1 / by)

    if recorded is not None and fits(recorded):
        return recorded
    grid = np.geomspace(COLDEST, HOTTEST, TRIED)
    best = min(range(TRIED), key=lambda at: mean(float(grid[at])))
    low, high = float(grid[max(0, best - 1)]), float(grid[min(TRIED - 1, best + 1)])
    for _ in range(REFINED):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if mean(one) < mean(other) else (one, high)
    found = (low + high) / 2
    # People ask for short numbers.
    near = max(1.5 * mean(found), SAME_BY)
    short = (round(found, digits) for digits in (1, 2, 3))
    found = next((one for one in short if one > 0 and mean(one) <= near), found)
    return found if fits(found) else None


def _at(row: np.ndarray, token: int, kept: np.ndarray | None, by: float) -> float:
    return float(row[token] / by - mass((row if kept is None else row[kept]) / by, -1))


def mass(values: np.ndarray, axis: int) -> np.ndarray:
    """The logarithm of the sum of exponentials."""
    most = values.max(axis, keepdims=True)
    found: np.ndarray = np.log(np.exp(values - most).sum(axis)) + most.squeeze(axis)
    return found
