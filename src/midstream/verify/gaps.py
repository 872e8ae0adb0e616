"""The gap between a trainer's log-probabilities and the server's, in parts: a part for each cause. Pure.

Owns: the causes in the order in which they are attributed, and the estimates of the KL divergence.
Always holds: the parts of a token sum to its gap, trainer minus rollout. Each part is the difference of two neighbours in one
sequence of numbers, which begins at the server's and ends at the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from midstream.verify.claims import Claim

#: exp() of more nats than these is as good as infinite, and JSON has no infinity.
NATS_MAX = 60.0


class GapCause(StrEnum):
    """In the order of attribution. The words are those of reports and of docs/verify.md."""

    TEMPERATURE = "temperature or penalties"
    MASK = "mask"
    TOKENS = "other tokens"
    STALE_KV = "stale KV"
    SNAPSHOT = "wrong snapshot"
    ROUTE = "route"
    TIES = "near ties"
    PRECISION = "precision"


#: Whoever reads the report may not know what to do next.
REMEDIES = {
    GapCause.TEMPERATURE: "compare one distribution with itself: divide the trainer's logits, or compare with `logprobs`",
    GapCause.MASK: "mask the trainer's logits with `sampling_masks` (midstream.client.replay.mask_logits)",
    GapCause.TOKENS: "train on the token ids of the records, and look at the shift between logits and labels",
    GapCause.STALE_KV: "a cache policy reused KV of older snapshots: reset_prompt_cache all, new_session or max_cache_age",
    GapCause.SNAPSHOT: "compute under the snapshot in each token's label, or correct for staleness",
    GapCause.ROUTE: "replay the recorded routes (midstream.client.replay)",
    GapCause.TIES: "replay the recorded routes; else none is needed",
    GapCause.PRECISION: "compare dtypes and kernels of server and trainer",
}


@dataclass(frozen=True, eq=False)
class Split:
    """The gap of one turn. rollout, trainer: of each token, in nats. parts: of each cause, zeros where it has no part.

    tokens: the ids that the trainer computed. details: of the causes that were found. off: how far the record itself is from
    what its snapshots compute.
    """

    claim: Claim
    rollout: np.ndarray
    trainer: np.ndarray
    tokens: Sequence[int]
    parts: dict[GapCause, np.ndarray]
    details: dict[GapCause, str]
    off: float

    def __repr__(self) -> str:
        return f"Split({self.claim.place}, {self.cause.value}, {np.abs(self.gap).max(initial=0.0):.2g})"

    @property
    def gap(self) -> np.ndarray:
        found: np.ndarray = self.trainer - self.rollout
        return found

    @property
    def cause(self) -> GapCause:
        """The one with the largest part; precision where none is larger."""
        sizes = {cause: float(np.abs(part).sum()) for cause, part in self.parts.items()}
        return max(reversed(GapCause), key=lambda cause: sizes[cause])

    def causes_of_tokens(self) -> list[GapCause]:
        """Of each token the cause with the largest part."""
        order = [*reversed(GapCause)]
        sizes = np.abs(np.array([self.parts[cause] for cause in order]))
        return [order[at] for at in sizes.argmax(0)] if sizes.size else []


@dataclass(frozen=True)
class CauseShare:
    """What one cause has of all gaps. turns, tokens: in which it has the largest part.

    k1, k3: estimates of the KL divergence of the rollout's distribution from the trainer's. k1 sums over the causes to that of
    the gap. k3 is that of a trainer for whom this part is all.
    """

    turns: int
    tokens: int
    k1: float
    k3: float
    mean: float
    largest: float


def k1(gaps: np.ndarray) -> float:
    return float(0.0 - gaps.mean()) if gaps.size else 0.0


def k3(gaps: np.ndarray) -> float:
    return float((np.expm1(np.minimum(gaps, NATS_MAX)) - gaps).mean()) if gaps.size else 0.0


def share(gaps: np.ndarray, turns: int, tokens: int) -> CauseShare:
    sizes = np.abs(gaps)
    mean = float(sizes.mean()) if sizes.size else 0.0
    return CauseShare(turns, tokens, k1(gaps), k3(gaps), mean, float(sizes.max(initial=0.0)))


def shares(splits: Sequence[Split]) -> dict[GapCause, CauseShare]:
    turns = [split.cause for split in splits]
    tokens = [cause for split in splits for cause in split.causes_of_tokens()]
    return {
        cause: share(_joined(split.parts[cause] for split in splits), turns.count(cause), tokens.count(cause))
        for cause in GapCause
    }


def whole(splits: Sequence[Split]) -> CauseShare:
    """Of the gaps themselves."""
    gaps = _joined(split.gap for split in splits)
    return share(gaps, len(splits), gaps.size)


def telescoped(
    numbers: Sequence[tuple[GapCause, np.ndarray]], start: np.ndarray
) -> dict[GapCause, np.ndarray]:
    """The parts of a sequence of numbers behind `start`. Each is named by the cause that it differs from the one before by."""
    parts = {cause: np.zeros(len(start)) for cause in GapCause}
    before = start
    for cause, after in numbers:
        parts[cause] = parts[cause] + (after - before)
        before = after
    return parts


def share_row(one: CauseShare) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "turns": one.turns,
        "tokens": one.tokens,
        "kl_k1": one.k1,
        "kl_k3": one.k3,
        "mean_nats": one.mean,
        "largest_nats": one.largest,
    }


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *arrays])
