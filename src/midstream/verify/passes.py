"""The passes that a trainer may have computed a turn with, as jobs, and the numbers that they gave. Pure.

Owns: what is counterfactual in a pass: its tokens, its KV, its weights, its routes.
Always holds: the numbers of all passes of a turn are of as many tokens as both the trainer and the server have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np

from midstream.client.records import LogprobKind
from midstream.verify.claims import Claim, KvPart
from midstream.verify.compare import LOGPROB_MIN
from midstream.verify.drawing import Shaped, is_filtered, is_greedy, recomputable, scaled
from midstream.verify.jobs import OWN_ROUTE, Computer, Numbers, PassJob, jobs_of
from midstream.verify.readings import RAW, SAMPLED, Reading, Way, drawn_otherwise, mass
from midstream.verify.trainer import TrainerTurn

#: As `Counterfactual.fresh`: each token by its label, over KV of that snapshot.
LABELS = ""


class Routes(StrEnum):
    """Which recorded routes a pass takes."""

    #: Those that the turn's own snapshots chose.
    TURN = "turn"
    #: Those of earlier turns, too, which other snapshots chose.
    ALL = "all"
    #: None: the model chooses.
    OWN = "own"


class Counterfactual(NamedTuple):
    """theirs: the trainer's tokens. fresh: the snapshot whose passes all are; None: those of the record, over its KV."""

    theirs: bool = False
    fresh: str | None = None
    routes: Routes = Routes.TURN


@dataclass(frozen=True)
class Made:
    """The numbers of passes. tied: whether a router chose by less than rounding."""

    values: dict[Way, np.ndarray]
    tied: bool


@dataclass(frozen=True)
class TurnPiece:
    """A job for the turn's tokens `tokens`, the first one being number `first`."""

    tokens: np.ndarray
    first: int
    job: PassJob
    reading: Reading


class RecordedRoutes(NamedTuple):
    """Of a conversation: positions, the label of the pass over each, and its route [positions, layers, top_k]."""

    positions: list[int]
    labels: list[str]
    rows: np.ndarray


@dataclass(eq=False)
class Case:
    """A turn of which both have numbers. kept: the mask of each token. routes: None where none can be forced.

    temperature: None while it is not known.
    """

    claim: Claim
    given: TrainerTurn
    against: LogprobKind
    kept: Sequence[np.ndarray | None]
    routes: RecordedRoutes | None
    temperature: float | None = None
    passes: dict[Counterfactual, Made] = field(default_factory=dict)
    rows: dict[Counterfactual, dict[int, np.ndarray]] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = min(len(self.given.logprobs), len(self.claim.labels))
        self.recorded = np.maximum(np.array(self.given.logprobs[: self.size]), LOGPROB_MIN)
        sampled = self.claim.turn.sampling_logprobs or []
        self.knows_sampled = bool(sampled) and None not in sampled
        self.sampled = np.maximum(np.array(sampled if self.knows_sampled else [], dtype=float), LOGPROB_MIN)
        raw = np.maximum(np.array(self.claim.logprobs), LOGPROB_MIN)
        self.rollout = (self.sampled if self.against == "sampling_logprob" else raw)[: self.size]
        self.start = SAMPLED if self.against == "sampling_logprob" else RAW
        self.masked = any(ids is not None for ids in self.kept)
        sampling = self.claim.turn.sampling
        self._shaped = Shaped(self.claim, sampling) if sampling is not None else None
        self.penalised = self._shaped is not None and self._shaped.changes
        self._scaled = 1.0 if sampling is None or not recomputable(sampling) else scaled(sampling)
        theirs, prompt = self.given.token_ids, self.given.prompt_ids
        other = theirs is not None and theirs != self.claim.turn.token_ids
        self.theirs = other or (prompt is not None and prompt != self.claim.prompt)
        self.stale = any(
            {*part.kv[: self._before + part.until - 1]} - {label}
            for part, label in zip(self.claim.parts, self._labels_of_parts(), strict=True)
        )

    @property
    def _before(self) -> int:
        return self.claim.length - len(self.claim.labels)

    def _labels_of_parts(self) -> Iterator[str | None]:
        """Of each part the label of all its tokens; None: there are several."""
        first = 0
        for until, _ in self.claim.parts:
            own = {*self.claim.labels[first:until]}
            yield own.pop() if len(own) == 1 else None
            first = until

    @property
    def recorded_temperature(self) -> float | None:
        """None: the record does not say it, or filters shaped the distributions, too, whose masks it has not."""
        sampling = self.claim.turn.sampling
        if sampling is None or is_greedy(sampling) or not recomputable(sampling):
            return None
        return sampling.temperature if self.masked or not is_filtered(sampling) else None

    def shaped(self, token: int, row: np.ndarray) -> np.ndarray:
        """The logits of a token's pass behind the recorded penalties."""
        return row if self._shaped is None else self._shaped.of(token, row.astype(np.float64))

    def rounding(self, rows: Mapping[int, np.ndarray], tolerance: float) -> float:
        """How far a number behind the penalties may be off at temperature 1: the tolerance, or twice what the recorded raw ones
        are off the rows, as often as penalties enlarge it."""
        ids, raw = self.claim.turn.token_ids, self.claim.logprobs
        off = [abs(float(row[ids[at]] - mass(row, -1)) - raw[at]) for at, row in rows.items()]
        return max(tolerance, 2 * max(off, default=0.0)) * self._scaled

    def grown(self, way: Way) -> float:
        """How often as large the recorded parameters make rounding in the numbers of a way."""
        if not way.tempered or not self.temperature:
            return 1.0
        return max(1.0, self._scaled / self.temperature)

    def ids(self, theirs: bool) -> list[int]:
        if not theirs:
            return self.claim.tokens
        prompt, own = self.given.prompt_ids, self.given.token_ids
        return [
            *(self.claim.prompt if prompt is None else prompt),
            *(self.claim.turn.token_ids if own is None else own),
        ]

    def usual(self) -> Iterator[Counterfactual]:
        """What is computed for every turn."""
        yield Counterfactual()
        if self.theirs:
            yield Counterfactual(theirs=True)
        if self.routes is not None:
            yield Counterfactual(self.theirs, None, Routes.OWN)
        for asked in self.by(LABELS):
            if self.stale or asked.routes is Routes.ALL:
                yield asked

    def by(self, snapshot: str) -> Iterator[Counterfactual]:
        yield Counterfactual(self.theirs, snapshot)
        if self.routes is not None:
            yield Counterfactual(self.theirs, snapshot, Routes.OWN)
            if not {*self.routes.labels} <= {*self.claim.labels}:
                yield Counterfactual(self.theirs, snapshot, Routes.ALL)

    def settle(self) -> None:
        """Which distributions a trainer may compare; and fresh KV is that of the record, unless that is stale."""
        if not self.stale:
            for asked in [one for one in self.passes if one.fresh is None and one.theirs == self.theirs]:
                self.passes[asked._replace(fresh=LABELS)] = self.passes[asked]
        warm = [self.start.tempered]
        plain = self.temperature == 1.0 and not self.penalised
        if self.knows_sampled and drawn_otherwise(self.claim) and not plain:
            warm.append(not self.start.tempered)
        masked = [self.start.masked, not self.start.masked] if self.masked else [self.start.masked]
        self.ways = [
            Way(one, other)
            for one in warm
            for other in masked
            # What no known temperature gives, only the record has, and that is masked.
            if not (one and not other and self.masked and self.temperature is None)
        ]

    def changes(self, asked: Counterfactual, way: Way) -> int:
        """How many things a trainer would do otherwise than the server."""
        passes = (asked.fresh is not None and self.stale) + bool(asked.fresh)
        passes += asked.routes is not Routes.TURN
        return passes + (way.tempered != self.start.tempered) + (way.masked != self.start.masked)

    def take(self, asked: Counterfactual, pieces: Sequence[TurnPiece], numbers: Sequence[Numbers]) -> None:
        count = len(self.given.logprobs) if asked.theirs else len(self.claim.labels)
        ways = [Way(warm, masked) for warm in (False, True) for masked in (False, True)]
        values = {way: np.zeros(count) for way in ways}
        for piece in pieces:
            for way in ways:
                values[way][piece.tokens] = piece.reading.of(way)[piece.tokens - piece.first]
            rows = {piece.first + at: row for at, row in piece.reading.rows.items()}
            self.rows.setdefault(asked, {}).update(rows)
        tied = any(one.tied for one in numbers)
        self.passes[asked] = Made({}, tied)
        if asked == Counterfactual():
            self._shift = self._moved(values[Way(False, True)])
        self.passes[asked].values.update(
            {way: self.of_reading(values.__getitem__, way)[: self.size] for way in ways}
        )

    def _moved(self, masked: np.ndarray) -> np.ndarray:
        """By how much the recorded sampling log-probabilities are off those of the masks alone."""
        moved: np.ndarray = self.sampled - masked if self.knows_sampled else np.zeros(len(masked))
        return moved

    def of_reading(self, of: Callable[[Way], np.ndarray], way: Way) -> np.ndarray:
        """The numbers of a reading. Without a known temperature, what was recorded is added to what the masks give."""
        if not way.tempered or self.temperature is not None or not drawn_otherwise(self.claim):
            return of(way)
        values = of(Way(False, way.masked))
        size = min(len(values), len(self._shift))
        moved = values.copy()
        moved[:size] += self._shift[:size]
        return moved

    def values(self, asked: Counterfactual, way: Way) -> np.ndarray:
        found: np.ndarray = np.maximum(self.passes[asked].values[way], LOGPROB_MIN)
        return found

    # -- for people

    def kv_snapshots(self) -> str:
        """Which snapshots computed the KV."""
        runs = [(name, sum(1 for _ in run)) for name, run in groupby(self.claim.parts[-1].kv)]
        named = [f"{name} for {size} positions" for name, size in runs[:4]]
        return ", ".join([*named, "..."] if len(runs) > len(named) else named)

    def other_ids(self) -> str:
        """Where the trainer's tokens begin to be others."""
        prompt, own = self.given.prompt_ids, self.given.token_ids
        if prompt is not None and prompt != self.claim.prompt:
            at = _first_other(prompt, self.claim.prompt)
            return f"the prompt's token {at} is another one"
        if own is None:
            return ""
        at = _first_other(own, self.claim.turn.token_ids)
        return f"from token {at} on; {len(own)} were computed, and {len(self.claim.labels)} sampled"


def _first_other(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def routes_of(claim: Claim, computer: Computer) -> RecordedRoutes | None:
    """Of all sampled tokens up to the end of the turn; None: the turn has none, or the computer cannot force them."""
    if claim.routes is None or not computer.experts or not len(claim.routes):
        return None
    found = RecordedRoutes([], [], np.zeros(0))
    rows = []
    turn: Claim | None = claim
    while turn is not None:
        routes = turn.routes
        begin = turn.length - len(turn.labels) - 1
        if routes is not None and routes.shape[1:] == computer.routes and len(routes) == len(turn.labels):
            if routes.max(initial=0) >= computer.experts:
                return None
            # The pass over the token before gave its logits.
            found.positions.extend(range(begin, begin + len(routes)))
            found.labels.extend(turn.labels)
            rows.append(routes)
        turn = turn.parent
    if not rows or claim.routes.shape[1:] != computer.routes:
        return None
    return found._replace(rows=np.concatenate(rows))


def asked_of(case: Case, asked: Counterfactual, whole: Sequence[int] = ()) -> list[TurnPiece]:
    """The jobs of what is asked for. whole: tokens whose rows are kept as they come."""
    claim, ids = case.claim, case.ids(asked.theirs)
    if asked.theirs:
        claim = _resized(claim, ids, len(case.given.logprobs))
    jobs = _as_recorded(claim, ids) if asked.fresh is None else _fresh(claim, ids, asked.fresh)
    return [_piece(case, asked, ids, len(claim.labels), whole, *one) for one in jobs]


def _piece(
    case: Case,
    asked: Counterfactual,
    ids: list[int],
    count: int,
    whole: Sequence[int],
    tokens: np.ndarray,
    first: int,
    job: PassJob,
) -> TurnPiece:
    begin = len(ids) - count
    until = len(job.ids) - begin
    kept = [*case.kept[:count], *([None] * (count - len(case.kept)))][first:until]
    own = [at - first for at in whole if first <= at < until]
    # Penalties of the trainer's own tokens are not known.
    shaped = None
    if case.penalised and case.temperature is not None and not asked.theirs:
        shaped = lambda at, row: case.shaped(first + at, row)  # noqa: E731
    reading = Reading(ids[begin + first : begin + until], kept, case.temperature, own, shaped)
    forced = None if asked.routes is Routes.OWN else _forced(case, asked, job)
    return TurnPiece(tokens, first, replace(job, look=reading, forced=forced), reading)


def _as_recorded(claim: Claim, ids: list[int]) -> Iterator[tuple[np.ndarray, int, PassJob]]:
    for first, until, job in jobs_of(claim, ids):
        yield np.arange(first, until), first, job


def _fresh(claim: Claim, ids: list[int], snapshot: str) -> Iterator[tuple[np.ndarray, int, PassJob]]:
    labels = np.array(claim.labels if snapshot == LABELS else [snapshot] * len(claim.labels))
    begin = len(ids) - len(labels)
    for name in dict.fromkeys(labels.tolist()):
        tokens = np.flatnonzero(labels == name)
        first, end = int(tokens[0]), begin + int(tokens[-1]) + 1
        yield tokens, first, PassJob(ids[:end], [name] * (end - 1), begin + first - 1)


def _resized(claim: Claim, ids: list[int], count: int) -> Claim:
    """The claim with other tokens: what it says of positions is continued, or ends earlier."""
    last = claim.labels[-1]
    begin = len(ids) - count
    parts, first = [], 0
    for number, (until, kv) in enumerate(claim.parts):
        end = count if number == len(claim.parts) - 1 else min(until, count)
        if end > first:
            needed = begin + end - 1
            parts.append(KvPart(end, (*kv, *([last] * needed))[:needed]))
            first = end
    labels = (*claim.labels, *([last] * count))[:count]
    return replace(claim, labels=labels, parts=tuple(parts), length=len(ids))


def _forced(case: Case, asked: Counterfactual, job: PassJob) -> np.ndarray | None:
    """The routes of each position, as a trainer replays them, whatever its tokens are."""
    routes, own = case.routes, {*case.claim.labels}
    if routes is None:
        return None
    count = len(job.ids) - 1
    # The trainer's prompt may be a longer one, or a shorter one.
    moved = len(case.given.prompt_ids or case.claim.prompt) - len(case.claim.prompt) if asked.theirs else 0
    forced = np.full((count, *routes.rows.shape[1:]), OWN_ROUTE, dtype=np.int64)
    for recorded, label, row in zip(routes.positions, routes.labels, routes.rows, strict=True):
        position = recorded + moved
        if not 0 <= position < count:
            continue
        if asked.fresh is None:
            # Where the pass that chose the route also computed the KV.
            takes = job.kv[position] == label and not (job.again and job.again[0] == position)
        else:
            takes = asked.routes is Routes.ALL or label in own
        if takes:
            forced[position] = row
    return forced
