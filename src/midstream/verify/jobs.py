"""What is computed for a claim, and what comes back: the port between the logic and the part that computes. Pure.

Owns: how a turn whose KV was computed in pieces becomes sequences of passes.
Always holds: a job has a pass for each position, by the weights named for it, over the KV of the positions before it and its
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midstream.verify.claims import Claim

#: The verified whole files of a snapshot. Raises SnapshotError.
Files = Callable[[str], Path]
#: Hears of positions that were computed.
OnComputed = Callable[[int], None]
#: Gets logits of the whole vocabulary, [rows, vocab], and the number of the first row among those asked for.
Look = Callable[[int, np.ndarray], None]
#: In forced routes: the model's own choice.
OWN_ROUTE = -1


@dataclass(frozen=True)
class PassJob:
    """ids: all tokens; the last one is only scored. kv: the snapshot that computed each position but the last one's.

    again: a position whose KV was there already, and the snapshot whose pass over it gave the logits; None: there is none.
    first: the pass whose logits are asked for first; all passes behind it are asked for, too. top: of how many tokens the
    likeliest ones are asked for at the pass `first`. look: gets every row asked for. forced: the routes that the passes take,
    [passes, layers, top_k], OWN_ROUTE where the model's own are; None: those everywhere. Not every computer can force routes.
    weights: what the experts of the routes are multiplied by is asked for.
    """

    ids: Sequence[int]
    kv: Sequence[str]
    first: int
    again: tuple[int, str] | None = None
    top: int = 0
    look: Look | None = None
    forced: np.ndarray | None = None
    weights: bool = False


@dataclass(frozen=True)
class Numbers:
    """Of the passes asked for, one row each. best: the largest log-probability. routes: [rows, layers, top_k]; None: dense.

    tied: whether any router chose by less than rounding, in a row or before it. top: as asked for, the likeliest first.
    weights: of the routes, float32; None: not asked for, or the model's code hides them.
    """

    logprobs: np.ndarray
    best: np.ndarray
    routes: np.ndarray | None
    tied: bool
    top: tuple[int, ...] = ()
    weights: np.ndarray | None = None


class Computer(ABC):
    """Recomputes jobs. vocab: ids below it are tokens. longest: positions that a sequence may have.

    routes: [layers, top_k] of the model; None: dense. experts: of how many a forced route has some; 0: none can be forced.
    dtype: of the weights, as torch names it. about: for the statement.
    """

    vocab: int
    longest: int
    routes: tuple[int, int] | None
    experts: int = 0
    dtype: str
    about: dict[str, str]

    @abstractmethod
    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        """In the order of the jobs. Raises SnapshotError for a snapshot that cannot be used."""


def jobs_of(claim: Claim, tokens: Sequence[int] | None = None) -> Iterator[tuple[int, int, PassJob]]:
    """(first token, end, job) of each part of a turn with sampled tokens. tokens: all ids, instead of those recorded."""
    ids = claim.tokens if tokens is None else tokens
    last = len(ids) - len(claim.labels) - 1
    first = 0
    for until, kv in claim.parts:
        # Other ids than those recorded may need more KV than there is.
        if until > first and last >= 0 and last + until <= len(kv):
            row = last + first
            again = None
            # All KV was there: only the pass over the last token was of what served then.
            if kv[row] != claim.labels[first] and (first == 0 or len(claim.parts) > 1):
                again = row, claim.labels[first]
            asked = claim.router_weights is not None
            yield (
                first,
                until,
                PassJob(ids[: last + until + 1], kv[: last + until], row, again, weights=asked),
            )
        first = until
